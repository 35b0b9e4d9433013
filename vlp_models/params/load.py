"""params.yaml as typed, frozen dataclasses: one section per stage. No other module reads YAML from users."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vlp_models.common.io import HEAD, convert_command, explain_not_text
from vlp_models.common.plugins import import_target, use_plugins
from vlp_models.common.source_hash import refuse_other_package
from vlp_models.errors import ParamsError
from vlp_models.params.data import (
    DatasetParams,
    DetectorParams,
    FeaturesParams,
    GeneratorParams,
    IngestParams,
    ShardsParams,
    TokenizerParams,
    ValidateParams,
)
from vlp_models.params.operations import (
    EvaluateParams,
    FlowParams,
    PromotionParams,
    TrackingParams,
)
from vlp_models.params.runs import (
    NAME,
    AugmentParams,
    FinetuneParams,
    ModelParams,
    PretrainParams,
    TrainerParams,
    split_start,
)
from vlp_models.params.schema import PARAMS_CHECKS, Extensible, build, check_key, suggestion, to_plain

DEFAULTS = {"pretrain": PretrainParams, "finetune": FinetuneParams}  # the sections that `defaults` may set
MAX_DEPTH, MAX_VALUES = 50, 200_000  # of a YAML document; params.yaml has six levels


@dataclass(frozen=True, kw_only=True)
class Params(Extensible):
    prefix: ClassVar[str] = ""

    generate: dict[str, GeneratorParams] = field(default_factory=dict)
    data: dict[str, DatasetParams]
    validate: ValidateParams
    detector: DetectorParams
    features: FeaturesParams
    tokenizer: TokenizerParams
    shards: ShardsParams
    models: dict[str, ModelParams]
    trainer: TrainerParams = field(default_factory=TrainerParams)
    pretrain: dict[str, PretrainParams] = field(default_factory=dict)
    finetune: dict[str, FinetuneParams] = field(default_factory=dict)
    augment: dict[str, AugmentParams] = field(default_factory=dict)
    evaluate: EvaluateParams
    tracking: TrackingParams
    promotion: PromotionParams = field(default_factory=PromotionParams)
    ingest: IngestParams = field(default_factory=IngestParams)
    flow: FlowParams = field(default_factory=FlowParams)
    plugins: dict[str, dict[str, str]] = field(default_factory=dict)

    def start_of(self, kind: str, run: str) -> str:
        """Return the checkpoint that a run starts from, relative to checkpoints/; empty for an initial one."""
        if kind == "pretrain":
            p = self.pretrain[run]
            return p.start or f"initial/{p.model}"
        return self.finetune[run].start if kind == "finetune" else ""

    def chain(self, checkpoint: str) -> list[str]:
        """Return this checkpoint and those it was trained from, the initial one last."""
        checkpoints = [checkpoint]
        # `start_of` returns an empty string for `initial/MODEL`, which ends the chain.
        while start := self.start_of(*split_start(checkpoints[-1])):
            checkpoints.append(start)
        return checkpoints

    @property
    def parts(self) -> list[int]:
        """Return into how many parts datasets are divided (`finetune.NAME.parts`)."""
        return sorted({run.parts for run in self.finetune.values()} - {1})

    def statistics_run(self) -> str:
        """Return the checkpoint with whose data `vlp drift` compares: of `drift.run`, else of the first training.

        Raises:
            ParamsError: `drift.run` names no run.
        """
        drift = self.sections.get("drift")  # contrib/drift
        trained = [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(self, kind)]
        if drift and drift.run:
            runs = {name.partition("/")[2]: name for name in reversed(trained)}  # of two with one name the pretraining
            if drift.run not in runs:
                raise ParamsError(f"params.yaml: `drift.run: {drift.run}`: no such run{suggestion(drift.run, runs)}")
            return runs[drift.run]
        return next(iter(trained), "")

    def model_of(self, run: str) -> str:
        """Return the name of the model that a fine-tuning run trains."""
        return self.model_at(self.finetune[run].start)

    def model_at(self, checkpoint: str) -> str:
        """Return the name of a checkpoint's model."""
        kind, name = split_start(checkpoint)
        if kind == "initial":
            return name
        # A fine-tuning trains the model of its start, which may be another fine-tuning.
        return self.pretrain[name].model if kind == "pretrain" else self.model_of(name)

    def family_at(self, checkpoint: str) -> str:
        return self.models[self.model_at(checkpoint)].family

    def variant_of(self, run: str) -> str:
        return self.finetune[run].variant or run

    def settings_of(self, run: str) -> list[tuple[str, dict[str, Any]]]:
        """Return (`finetune`, `pretrain` or `model`, settings) of a run and of all it starts from.

        Seeds and names are left out. Runs of one variant with equal settings differ in their seeds only; the report and
        the gate both use them.
        """
        settings = []
        for checkpoint in self.chain(f"finetune/{run}"):
            kind, name = split_start(checkpoint)
            # A pretraining's model may differ from that of its start, so each has an entry; a fine-tuning has none.
            if kind != "finetune":
                model = self.models[self.model_at(checkpoint)]
                # Without steps there is no warm-up, so its other settings have no effect.
                names = {"seed"} if model.vision_warmup.steps else {"seed", "vision_warmup"}
                settings.append(("model", {k: v for k, v in to_plain(model).items() if k not in names}))
            if kind != "initial":
                # The model's settings are an entry of their own, and names do not change a result.
                names = {"seed", "start", "variant", "model"}
                entry = to_plain(getattr(self, kind)[name])
                settings.append((kind, {k: v for k, v in entry.items() if k not in names}))
        return settings


def load_params(path: Path | str = "params.yaml") -> Params:
    """Read and check params.yaml.

    Raises:
        ParamsError: the file is missing, is not a YAML mapping, breaks the schema or refers to an unknown name; or the
            running code is not that of the file's folder (vlp_models/common/source_hash.py).
    """
    return parse_params(read_yaml(path), str(path), Path(path).parent)


def read_yaml(path: Path | str = "params.yaml") -> dict[str, Any]:
    """Read params.yaml as plain data."""
    path = Path(path)
    refuse_other_package(path.parent)
    try:
        text = read_yaml_text(path)
    except FileNotFoundError:
        raise ParamsError(f"{path}: not found; run in the project root, or pass --params") from None
    raw = read_plain(text, path)
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected one section per stage, found {type(raw).__name__}")
    return raw


def read_plain(text: str, path: Path) -> Any:
    """Read a YAML text as plain data, with the parser that DVC records params with, so that both read equal values.

    It is YAML 1.2: `010` is 10, `yes` and `12:30` are texts, 1e-4 is a number, and no key is given twice.

    Args:
        path: where it is, for messages.
    """
    from ruamel.yaml import YAML, YAMLError
    from yaml import YAMLError as LimitsError

    try:
        return parse_yaml(text, YAML(typ="safe").load)
    except (YAMLError, LimitsError, ValueError) as error:  # ValueError: also an impossible date or number
        raise ParamsError(f"{path}: not valid YAML: {explain_yaml_error(error)}") from None


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file that a user edits, with LF line ends."""
    content = path.read_bytes()
    if reason := explain_not_text(content[:HEAD], str(path)):
        raise ParamsError(f"{path}: {reason}")
    try:
        # `-sig`: editors on Windows start a file with a byte order mark.
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        # The line of the first byte that is not UTF-8.
        line = content.count(b"\n", 0, error.start) + 1
        raise ParamsError(
            f"{path}:{line}: not UTF-8 text; save the file as UTF-8: {convert_command(str(path))}"
        ) from None
    for number, line_text in enumerate(text.split("\n"), start=1):
        # Not `=======`, which may also underline a heading in a comment; a conflict has all three.
        if line_text.startswith(("<<<<<<<", ">>>>>>>")):
            raise ParamsError(
                f"{path}:{number}: git's conflict markers ({line_text.strip()[:40]}); keep one of the two versions and "
                "delete the lines <<<<<<<, ======= and >>>>>>>"
            )
    return text


def explain_yaml_error(error: Exception) -> str:
    """Return what is wrong with a YAML text, and where, in one line; of PyYAML's errors and ruamel's."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    # YAML 1.2 takes the colon in `{root: hf://OWNER/NAME}` for that of a key.
    quotes = '; in {...} or [...] put a text with a colon in quotes: "hf://OWNER/NAME"' if "':'" in problem else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{quotes}"


def parse_yaml(text: str, load: Callable[[str], Any]) -> Any:
    """Load a YAML text after checking that it is not too deep, too large, or of values that stand for others.

    The stream of events is checked: libyaml recurses in C for each level, and aliases expand while they are loaded
    ("billion laughs": a kilobyte of text that stands for gigabytes).

    Raises:
        ValueError, yaml.YAMLError: too deep, too many values, an alias, or not YAML.
    """
    import yaml

    depth = count = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        line = f"line {event.start_mark.line + 1 if event.start_mark else '?'}"
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{line}: YAML aliases (`*{event.anchor}`) are not supported; write the value out")
        # Starts and ends count as 1 and -1.
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"{line}: nested more than {MAX_DEPTH} levels deep")
        count += isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent)
        if count > MAX_VALUES:
            raise ValueError(f"{line}: more than {MAX_VALUES:,} keys and values")
    return load(text)


def parse_params(raw: Mapping[str, Any], file: str = "params.yaml", root: Path | None = None) -> Params:
    """Check plain data: `defaults` applied to every run, schema, plugins, references between sections.

    Args:
        root: the project's folder, for its plugins; default: the current one.
    """
    # The plugins' names are in the params, so they are put in use after the schema was checked.
    params = build(Params, _apply_defaults(raw, file), where="", file=file)
    use_plugins(params.plugins, Path.cwd() if root is None else root)
    for section in ("generate", "data", "models", "pretrain", "finetune", "augment"):
        for name in getattr(params, section):  # names become paths, DVC stages and command-line arguments
            if not NAME.fullmatch(name):
                raise ParamsError(
                    f"{file}: `{section}.{name}`: names may contain letters, digits, `_`, `-` (no dot, which separates "
                    "keys for DVC) and must start with a letter or digit"
                )
    for source in params.tokenizer.sources:
        if source not in params.data:
            raise ParamsError(
                f"{file}: `tokenizer.sources: {source}`: no such dataset{suggestion(source, params.data)}"
            )
    # After the names, which starts consist of.
    _check_starts(params, file)
    for target in PARAMS_CHECKS.values():
        import_target(target)(params, file)
    return params


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with the values of `changes`, section by section."""
    # Deep: `base` is merged into several runs, whose copies must not share lists and dicts.
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _apply_defaults(raw: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Merge `defaults` into every run and drop it."""
    full = dict(raw)
    # An empty section is null in YAML.
    defaults = full.pop("defaults", None) or {}
    if not isinstance(defaults, dict):
        raise ParamsError(f"{file}: `defaults` must be a section, found {defaults!r}")
    for section, values in defaults.items():
        if section not in DEFAULTS:
            raise ParamsError(f"{file}: unknown key `defaults.{section}`{suggestion(str(section), DEFAULTS)}")
        if not isinstance(values, dict):
            raise ParamsError(f"{file}: `defaults.{section}` must be a section, found {values!r}")
        for key in values:
            check_key(DEFAULTS[section], key, f"defaults.{section}", file)
        entries = full.get(section)
        if isinstance(entries, dict):
            # A copy, so that the caller's data stays as it was read.
            full[section] = dict(entries)
            for name, entry in entries.items():
                if isinstance(entry, dict):
                    # The run's own values win.
                    full[section][name] = merged(values, entry)
    return full


def _check_starts(params: Params, file: str) -> None:
    """Check that models and starts exist, that no run starts from itself, and that its family stays the same."""
    for name, run in params.pretrain.items():
        if run.model not in params.models:
            raise ParamsError(
                f"{file}: `pretrain.{name}.model: {run.model}`: no such model{suggestion(run.model, params.models)}"
            )
    names = {"initial": list(params.models), "pretrain": list(params.pretrain), "finetune": list(params.finetune)}
    # 1. Every start is the name of a checkpoint that exists, or will.
    runs = [("pretrain", name) for name in params.pretrain] + [("finetune", name) for name in params.finetune]
    for kind, name in runs:
        # `start_of` fills in `initial/MODEL` for a pretraining without a start.
        start = params.start_of(kind, name)
        start_kind, start_name = split_start(start)
        where = f"{file}: `{kind}.{name}.start: {start}`"
        if not start_kind:
            raise ParamsError(f"{where} must be initial/MODEL, pretrain/RUN or finetune/RUN")
        if start_name not in names[start_kind]:
            raise ParamsError(f"{where}: not found{suggestion(start_name, names[start_kind])}")
    # 2. Following the starts ends at initial weights.
    for kind, name in runs:
        visited = [f"{kind}/{name}"]
        # As `Params.chain`, which would not end in a cycle.
        while start := params.start_of(*split_start(visited[-1])):
            if start in visited:
                # The runs of the cycle only, without those that lead to it.
                cycle = " -> ".join([*visited[visited.index(start) :], start])
                itself = "starts from itself" if start == visited[-1] else f"forms a cycle: {cycle}"
                raise ParamsError(f"{file}: `{visited[-1].replace('/', '.')}` {itself}; start from `initial/MODEL`")
            visited.append(start)
    # 3. A pretraining continues weights of its own family.
    for name, run in params.pretrain.items():
        start = params.start_of("pretrain", name)
        family, start_family = params.models[run.model].family, params.family_at(start)
        if family != start_family:
            raise ParamsError(
                f"{file}: `pretrain.{name}` trains `{run.model}` of the family {family}, but starts from {start} of "
                f"the family {start_family}; weights cannot be transferred between families"
            )
