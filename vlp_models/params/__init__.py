"""params.yaml as typed, frozen dataclasses: one section per stage. Nothing else in the project reads YAML."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.common.source_hash import refuse_other_package
from vlp_models.errors import ParamsError
from vlp_models.params.augment import AugmentedParams, AugmentParams
from vlp_models.params.cluster import ClusterParams
from vlp_models.params.data import (
    DetectorBackbone,
    DetectorParams,
    FeaturesParams,
    GeneratorParams,
    ShardsParams,
    SourceParams,
    TimmParams,
    TokenizerParams,
    ValidateParams,
)
from vlp_models.params.flow import FlowParams
from vlp_models.params.ingest import DriftParams, IngestParams
from vlp_models.params.nesting import check_nesting
from vlp_models.params.operations import EvaluateParams, TrackingParams
from vlp_models.params.optimizer import GroupParams, OptimizerParams
from vlp_models.params.promotion import GateParams, PromotionParams
from vlp_models.params.recipe import ObjectiveParams, RampParams, RecipeParams, ScheduledSamplingParams
from vlp_models.params.runs import (
    NAME,
    FinetuneParams,
    ModelParams,
    PretrainParams,
    StreamParams,
    TrainerParams,
    TrainingParams,
    VisionWarmupParams,
    split_start,
)
from vlp_models.params.schema import build, nearest, to_plain
from vlp_models.params.snapshots import SnapshotParams

__all__ = [
    "AugmentParams",
    "AugmentedParams",
    "ClusterParams",
    "DetectorBackbone",
    "DetectorParams",
    "DriftParams",
    "EvaluateParams",
    "FeaturesParams",
    "FinetuneParams",
    "FlowParams",
    "GateParams",
    "GeneratorParams",
    "GroupParams",
    "IngestParams",
    "ModelParams",
    "ObjectiveParams",
    "OptimizerParams",
    "Params",
    "PretrainParams",
    "PromotionParams",
    "RampParams",
    "RecipeParams",
    "ScheduledSamplingParams",
    "ShardsParams",
    "SnapshotParams",
    "SourceParams",
    "StreamParams",
    "TimmParams",
    "TokenizerParams",
    "TrackingParams",
    "TrainerParams",
    "TrainingParams",
    "ValidateParams",
    "VisionWarmupParams",
    "build",
    "laid_over",
    "load_params",
    "parse_params",
    "read_yaml",
    "split_start",
    "to_plain",
]

DEFAULTS = {"pretrain": PretrainParams, "finetune": FinetuneParams}  # the sections that `defaults` may speak of


@dataclass(frozen=True, kw_only=True)
class Params:
    generate: dict[str, GeneratorParams] = field(default_factory=dict)
    data: dict[str, SourceParams]
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
    cluster: ClusterParams = field(default_factory=ClusterParams)
    ingest: IngestParams = field(default_factory=IngestParams)
    drift: DriftParams = field(default_factory=DriftParams)
    flow: FlowParams = field(default_factory=FlowParams)

    def start_of(self, kind: str, run: str) -> str:
        """The checkpoint that a run starts from, below checkpoints/; empty for an initial one."""
        if kind == "pretrain":
            p = self.pretrain[run]
            return p.start or f"initial/{p.model}"
        return self.finetune[run].start if kind == "finetune" else ""

    def chain(self, checkpoint: str) -> list[str]:
        """The checkpoints that lead to this one, itself first, the initial one last."""
        found = [checkpoint]
        while start := self.start_of(*split_start(found[-1])):
            found.append(start)
        return found

    def model_of(self, run: str) -> str:
        """The name of the model that a fine-tuning run trains."""
        return self.model_at(self.finetune[run].start)

    def model_at(self, checkpoint: str) -> str:
        """The name of a checkpoint's model."""
        kind, name = split_start(checkpoint)
        if kind == "initial":
            return name
        return self.pretrain[name].model if kind == "pretrain" else self.model_of(name)

    def family_at(self, checkpoint: str) -> str:
        return self.models[self.model_at(checkpoint)].family

    def variant_of(self, run: str) -> str:
        return self.finetune[run].variant or run


def load_params(path: Path | str = "params.yaml") -> Params:
    """Reads and checks params.yaml.

    Raises:
        ParamsError: the file is missing, is no YAML mapping, breaks the schema, or names what is not there; or the
            code that runs is not that of its folder (vlp_models/common/source_hash.py).
    """
    return parse_params(read_yaml(path), str(path))


def read_yaml(path: Path | str = "params.yaml") -> dict[str, Any]:
    """params.yaml as plain data.

    Raises:
        ParamsError: the file is missing, or is no YAML mapping.
    """
    import yaml

    path = Path(path)
    refuse_other_package(path.parent)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = path.read_text(encoding="utf-8")
        check_nesting(text)
        raw = yaml.load(text, Loader=loader)
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file; run from the project's root, or pass --params") from None
    except (yaml.YAMLError, ValueError) as error:  # also a date or a number that there can't be
        raise ParamsError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected one section per stage, found {type(raw).__name__}")
    return raw


def parse_params(raw: Mapping[str, Any], file: str = "params.yaml") -> Params:
    """Checks plain data: `defaults` laid under every run, the schema, and the names that runs call each other by.

    Raises:
        ParamsError: see `load_params`.
    """
    if "model" in raw or "scheduled_sampling" in raw:
        raise ParamsError(
            f"{file}: one `model` per file is no longer supported; name models in `models`, and runs in `pretrain` and "
            "`finetune`"
        )
    params = build(Params, with_defaults(raw, file), where="", file=file)
    _check_names(params, file)
    _check_starts(params, file)
    _check_augment(params, file)
    for source in params.tokenizer.sources:
        if source not in params.data:
            raise ParamsError(f"{file}: `tokenizer.sources: {source}`{nearest(source, params.data)}")
    return params


def with_defaults(raw: Mapping[str, Any], file: str = "params.yaml") -> dict[str, Any]:
    """The same without `defaults`, which every entry of the section it names has then taken over."""
    full = dict(raw)
    defaults = full.pop("defaults", None) or {}
    if not isinstance(defaults, dict):
        raise ParamsError(f"{file}: `defaults` must be a section, found {defaults!r}")
    for section, values in defaults.items():
        if section not in DEFAULTS:
            raise ParamsError(f"{file}: unknown key `defaults.{section}`{nearest(str(section), DEFAULTS)}")
        if not isinstance(values, dict):
            raise ParamsError(f"{file}: `defaults.{section}` must be a section, found {values!r}")
        known = [f.name for f in dataclasses.fields(DEFAULTS[section])]
        for key in values:
            if key not in known:
                raise ParamsError(f"{file}: unknown key `defaults.{section}.{key}`{nearest(str(key), known)}")
        entries = full.get(section)
        if isinstance(entries, dict):
            full[section] = {
                name: laid_over(values, entry) if isinstance(entry, dict) else entry for name, entry in entries.items()
            }
    return full


def laid_over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the values of `over`, section by section."""
    merged = copy.deepcopy(dict(under))
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = laid_over(merged[key], value) if both else value
    return merged


def _check_names(params: Params, file: str) -> None:
    """Names become paths, DVC stages and words of a command line."""
    for section in ("generate", "data", "models", "pretrain", "finetune", "augment"):
        for name in getattr(params, section):
            if not NAME.fullmatch(name):
                raise ParamsError(f"{file}: `{section}.{name}`: a name has letters, digits, `_`, `-` and `.` only")


def _check_starts(params: Params, file: str) -> None:
    for name, run in params.pretrain.items():
        if run.model not in params.models:
            raise ParamsError(f"{file}: `pretrain.{name}.model: {run.model}`{nearest(run.model, params.models)}")
    known = {
        "initial": list(params.models),
        "pretrain": list(params.pretrain),
        "finetune": list(params.finetune),
    }
    runs = [("pretrain", name) for name in params.pretrain] + [("finetune", name) for name in params.finetune]
    for kind, name in runs:
        start = params.start_of(kind, name)
        of, at = split_start(start)
        where = f"{file}: `{kind}.{name}.start: {start}`"
        if not of:
            raise ParamsError(f"{where}: a start is initial/MODEL, pretrain/RUN or finetune/RUN")
        if at not in known[of]:
            raise ParamsError(f"{where}: there is none{nearest(at, known[of])}")
    for kind, name in runs:
        seen = [f"{kind}/{name}"]
        while start := params.start_of(*split_start(seen[-1])):
            if start in seen:
                circle = " -> ".join([*seen[seen.index(start) :], start])
                itself = "starts from itself" if start == seen[-1] else f"starts in a circle: {circle}"
                raise ParamsError(f"{file}: `{seen[-1].replace('/', '.')}` {itself}; start from `initial/MODEL`")
            seen.append(start)
    for name, run in params.pretrain.items():
        own, other = params.models[run.model].family, params.family_at(params.start_of("pretrain", name))
        if own != other:
            raise ParamsError(
                f"{file}: `pretrain.{name}` trains `{run.model}` of the family {own}, but starts from "
                f"{params.start_of('pretrain', name)} of the family {other}; weights are not exchanged between families"
            )


def _check_augment(params: Params, file: str) -> None:
    """A captioner, a fine-tuning with what it wrote: neither may wait for itself."""
    for name, entry in params.augment.items():
        kind, run = split_start(entry.start)
        if kind != "finetune" or run not in params.finetune or params.finetune[run].task != "captioning":
            captioners = [f"finetune/{run}" for run, p in params.finetune.items() if p.task == "captioning"]
            raise ParamsError(
                f"{file}: `augment.{name}.start: {entry.start}`: captions are written by a fine-tuning of the task "
                f"captioning{nearest(entry.start, captioners)}"
            )
        for source in entry.sources:
            if source not in params.data:
                raise ParamsError(f"{file}: `augment.{name}.sources: {source}`{nearest(source, params.data)}")
    for run, finetune in params.finetune.items():
        wanted = finetune.augment.captions
        if wanted and wanted not in params.augment:
            raise ParamsError(f"{file}: `finetune.{run}.augment: {wanted}`{nearest(wanted, params.augment)}")
        if finetune.augment.control and not wanted:
            raise ParamsError(f"{file}: `finetune.{run}.augment.control` needs `captions`, whose number it follows")
        todo, seen = [run], set[str]()
        while todo:
            for checkpoint in params.chain(f"finetune/{todo.pop()}"):
                kind, at = split_start(checkpoint)
                used = params.finetune[at].augment.captions if kind == "finetune" else ""
                captioner = split_start(params.augment[used].start)[1] if used in params.augment else ""
                if captioner == run:
                    raise ParamsError(
                        f"{file}: `finetune.{run}` learns from `augment.{used}`, whose captions come from {run} "
                        "itself; let a run without them write"
                    )
                if captioner and captioner not in seen:
                    seen.add(captioner)
                    todo.append(captioner)
