"""Presets: YAML overlays that edit params.yaml in place and keep its comments.

A preset has only the keys it changes. A mapping is merged, any other value replaces, `null` deletes a key. The result
is checked as a whole before anything is written.

Only ruamel.yaml keeps comments. It is set to YAML 1.1, by whose rules params.yaml is read everywhere else.
"""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import write_together
from vlp_models.common.packages import HUB
from vlp_models.common.plugins import import_target
from vlp_models.common.redaction import redacted
from vlp_models.errors import ParamsError
from vlp_models.params import Params, parse_params, to_plain
from vlp_models.params.load import explain_yaml_error, parse_yaml, read_plain, read_yaml_text
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    from vlp_models.pipeline.stages.plan import PlanFacts

PACKAGED = Path(__file__).parents[1] / "presets"
SHIPPED = Path(__file__).parents[1] / "template" / "params.yaml"

# The keys that define what an entry of these sections is; a preset may change all others.
DEFINING = {
    "models": ("family",),
    "pretrain": ("model",),
    "finetune": ("task",),
    "data": ("format",),
    "augment": ("start",),
}


@dataclass(frozen=True)
class Overlay:
    """The result of a merge that is not written yet.

    changes: one line per changed key, `key: old -> new`. facts: what the check of the params found out, for dvc.yaml.
    """

    text: str
    raw: dict[str, Any]
    params: Params
    changes: list[str]
    facts: PlanFacts


def find_preset(name: str, root: Path | None = None) -> Path:
    """Return the file of a preset: `nlvr` is presets/nlvr.yaml in the project if it exists, else the package's.

    Args:
        name: a preset's name, or the path of a YAML file.
        root: the project's folder; default: the current one.
    """
    # A slash or suffix makes it a path; a preset's name has neither.
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    presets = list_presets(root)
    if name not in presets:
        raise ParamsError(f"no preset `{name}`{suggestion(name, presets)} (`vlp use --list` lists them all)")
    return presets[name]


def list_presets(root: Path | None = None) -> dict[str, Path]:
    """Return name -> file of the package's presets and of those in the project's folder presets/, sorted by name."""
    folders = (PACKAGED, (root or Path()) / "presets")  # the second one's files replace those of the same name
    return dict(sorted((path.stem, path) for folder in folders for path in folder.glob("*.yaml")))


def describe_preset(path: Path) -> str:
    """Return the first sentence of a preset's leading comment, after the command that the comment starts with."""
    words: list[str] = []
    for line in read_yaml_text(path).splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("# vlp use", "# make", "# or ")):
            words += line.strip("# ").split()
    # Up to the first period before a space, but not that of `et al.`
    return textwrap.shorten(re.split(r"(?<=[^l]\.) ", " ".join(words), maxsplit=1)[0], 95, placeholder=" ...")


def apply_overlay(params_file: Path, preset: Path | None, assignments: list[str]) -> list[str]:
    """Merge into `params_file` and write it; see `merge_overlay`. Return one line per changed key."""
    merged = merge_overlay(params_file, preset, assignments)
    write_together({params_file: merged.text})
    return merged.changes


def merge_overlay(
    params_file: Path, preset: Path | None, assignments: list[str], further: Sequence[Path] = ()
) -> Overlay:
    """Merge `preset`, `further` presets, then `key.path=value` assignments, into the content of `params_file`.

    Nothing is written.
    """
    from vlp_models.pipeline.stages.plan import check_params

    # ruamel keeps comments but not the layout, so lines are compared between a dump before the change and one after it.
    original, document = _read(params_file)
    unchanged = _dump(document)
    changes: list[str] = []
    for path in filter(None, (preset, *further)):
        _, overlay = _read(path)
        _check_names_free(document, overlay, path)
        merge_into(document, overlay, "", changes)
    for assignment in assignments:
        merge_into(document, parse_assignment(assignment), "", changes)
    # Before the dump, so that the quotes are part of the change that is carried over.
    _quote_colons(document)
    dumped = _dump(document)
    text = keep_layout(original, unchanged, dumped)
    raw = read_plain(dumped, params_file)
    # A layout that lines cannot be carried over to gives other values, or no YAML at all.
    try:
        is_kept = repr(read_plain(text, params_file)) == repr(raw)  # repr: NaN
    except ParamsError:
        is_kept = False
    if not is_kept:
        # The dump's own layout then.
        text = dumped
    # The fault is in what was merged together: neither file need be wrong on its own.
    sources = [*([f"the preset {preset.stem}"] if preset else []), *(["--set"] if assignments else [])]
    try:
        params = parse_params(raw, f"{params_file} with {' and '.join(sources)}")
    except ParamsError as error:
        hint = _explain_missing_entries(original, assignments) or (_explain_order(preset) if preset else "")
        raise ParamsError(f"{error}{hint}") from None
    # What the Hub has under a name without a commit may change: later runs are to read the same data and models.
    if pins := pin_commits(params):
        return merge_overlay(params_file, preset, [*assignments, *pins], further)
    return Overlay(text, raw, params, changes, facts=check_params(params))


def pin_commits(params: Params) -> list[str]:
    """Return the assignments that add the commit to what params.yaml names on the Hub without one."""
    from vlp_models.data.bert_folder import hub_function
    from vlp_models.data.formats import FORMATS
    from vlp_models.pipeline.dvc.external import named_sources

    sources = {key: source for source, key in named_sources(params, regions=True)}
    pinned = {
        key: hub_function("pin", f"{key}: {source}")(source, key)
        for key, source in sources.items()
        if source.startswith(HUB)
    }
    for name, source in params.data.items():
        # Only a reader that downloads datasets pins them.
        reader = import_target(FORMATS[source.format]) if source.is_remote and source.format in FORMATS else None
        if pin_root := getattr(reader, "pin_root", None):
            key = f"data.{name}.root"
            sources[key], pinned[key] = source.root, pin_root(name, source.root)
    assignments = []
    for key, source_now in pinned.items():
        if source_now != sources[key]:
            assignments.append(f"{key}={source_now}")
            print(
                f"{key}: {sources[key]} may move, so params.yaml gets its commit of now; "
                f"`vlp use --set {key}={sources[key]}` takes a later one",
                file=sys.stderr,
            )
    return assignments


def _explain_missing_entries(original: str, assignments: list[str]) -> str:
    """Return the models, runs and datasets that `--set` changes and params.yaml does not have."""
    before = read_plain(original, Path("params.yaml"))
    keys = [assignment.partition("=")[0].split(".") for assignment in assignments]
    changed = {tuple(key[:2]) for key in keys if key[0] in DEFINING and len(key) > 2}
    missing = [f"`{section}.{name}`" for section, name in sorted(changed) if name not in _mapping(before.get(section))]
    return f"; params.yaml has no {', '.join(missing)}, so leave out what sets a key of it" if missing else ""


def _explain_order(preset: Path) -> str:
    """Return what a preset is applied to, if it does not fit these params: other presets, or the shipped file."""
    # The first line of a preset has the commands in order.
    commands = re.findall(r"vlp use [\w-]+", read_yaml_text(preset).partition("\n")[0])
    if len(commands) > 1:
        return f"; it comes after others: `{' && '.join(commands)}`"
    with suppress(ParamsError):
        shipped, overlay = _read(SHIPPED)[1], _read(preset)[1]
        merge_into(shipped, overlay, "", [])
        parse_params(read_plain(_dump(shipped), SHIPPED), str(SHIPPED))
        return "; it fits the shipped params.yaml, but not this one: make a project for it with `vlp init`"
    return ""


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml = YAML()
    # Lines are broken at 120 characters, as in params.yaml.
    yaml.width = 120
    # Otherwise a value that needs no quotes loses them, and its line differs.
    yaml.preserve_quotes = True
    return yaml


def _load(text: str, where: object) -> Any:
    """Load YAML together with its comments."""
    from ruamel.yaml.error import YAMLError
    from yaml import YAMLError as LimitsError

    try:
        return parse_yaml(text, _yaml().load)
    except (YAMLError, LimitsError, ValueError, NotImplementedError) as error:
        raise ParamsError(f"{where}: not valid YAML: {explain_yaml_error(error)}") from None


def _read(path: Path) -> tuple[str, Any]:
    """Return a YAML file's text, and its mapping together with comments."""
    try:
        text = read_yaml_text(path)
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file") from None
    document = _load(text, path)
    if not isinstance(document, dict):
        raise ParamsError(f"{path}: expected a mapping of params, found {type(document).__name__}")
    return text, document


def _dump(document: Any) -> str:
    buffer = io.StringIO()
    _yaml().dump(document, buffer)
    return buffer.getvalue()


def parse_assignment(assignment: str) -> dict[str, Any]:
    """Return `a.b=1` as {"a": {"b": 1}}."""
    key, separator, text = assignment.partition("=")
    # Letters, digits, `.`, `@` and `-` of the key; anything after them may be part of a value.
    name = re.split(r"[^\w.@-]", key, maxsplit=1)[0]  # for messages: the value may be secret
    if not separator:
        raise ParamsError(f"--set {name}: write it as key.path=value")
    try:
        value: Any = _load(text, "") if text else ""  # `key=null` removes the key
    except ParamsError:
        raise ParamsError(f"--set {name}: the value is not valid YAML; quote it if it is a string") from None
    # From the last part to the first: 1 -> {"b": 1} -> {"a": {"b": 1}}.
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def keep_layout(original: str, dumped: str, changed: str) -> str:
    """Apply the difference between two dumps of a document to the text that it was read from.

    A dump breaks long lines in its own way. So only lines that differ between the dumps are taken from `changed`; all
    others stay as they are in `original`.

    Args:
        dumped: `original`, read and dumped without a change.
        changed: the dump after the change.
    """
    old, before, after = (text.splitlines(keepends=True) for text in (original, dumped, changed))
    # 1. original -> dump: for each line of `before` the lines (low, high) of `old` that it was dumped from. Where the
    # numbers of lines differ, a line was broken or joined: the first line of the group stands for all of them.
    source: dict[int, tuple[int, int]] = {}
    # autojunk=False: difflib would ignore lines that occur often, such as empty ones.
    for _, old_low, old_high, low, high in SequenceMatcher(None, old, before, autojunk=False).get_opcodes():
        if high - low == old_high - old_low:
            source |= {low + i: (old_low + i, old_low + i + 1) for i in range(high - low)}
        else:
            source |= dict.fromkeys(range(low, high), (old_high, old_high))
            source[low] = old_low, old_high

    # 2. dump -> changed dump: equal lines are copied from `old`, all others are those of the changed dump.
    result: list[str] = []
    for kind, low, high, new_low, new_high in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            result += [line for i in range(low, high) for line in old[slice(*source[i])]]
        else:
            # A removed entry takes the comment behind it along, which belongs to the entry that follows.
            new = after[new_low:new_high]
            tail = _comments_at_end(before[low:high])
            result += [*new, *([] if _comments_at_end(new) else tail)]
    return "".join(result)


def _comments_at_end(lines: list[str]) -> list[str]:
    """Return the empty lines and comments at the end, which belong to what follows."""
    end = len(lines)
    while end and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return lines[end:]


def _check_names_free(document: Any, overlay: Any, preset: Path) -> None:
    """Raise a ParamsError if the preset would replace a model or run by another one of the same name."""
    for section, keys in DEFINING.items():
        entries, new_entries = _mapping(document.get(section)), _mapping(overlay.get(section))
        for name, entry in new_entries.items():
            for key in keys:
                old, new = _mapping(entries.get(name)).get(key), _mapping(entry).get(key)
                if old is not None and new is not None and old != new:
                    raise ParamsError(
                        f"{preset}: the name `{section}.{name}` is used by an entry with `{key}: {old}`, not `{key}: "
                        f"{new}`; rename one of the two, or remove the other: `vlp use --set {section}.{name}=null`"
                    )


def _mapping(value: Any) -> Any:
    """Return the value, or {} if it is no mapping, which the schema will report."""
    return value if isinstance(value, dict) else {}


def merge_into(target: Any, overlay: Any, where: str, changes: list[str]) -> None:
    """Merge a mapping into another one in place, and add a line to `changes` for each key that differs then."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, SingleQuotedScalarString

    for key, value in overlay.items():
        path = f"{where}.{key}" if where else str(key)
        old = target.get(key)
        # `null` deletes.
        if value is None:
            if key in target:
                del target[key]
                changes.append(f"{path}: removed")
        # Two mappings are merged key by key.
        elif isinstance(value, dict) and isinstance(old, dict):
            merge_into(old, value, path, changes)
            if not old:
                target[key] = type(old)()  # if emptied in place, ruamel writes `{}` below the comment
        # Any other value replaces the old one.
        elif not _only_deletes(value):
            _drop_nulls(value)
            if key not in target or to_plain(old) != to_plain(value):
                before = _short(str(key), old) if key in target else "(new)"
                changes.append(f"{path}: {before} -> {_short(str(key), value)}")
                # A value that was quoted stays quoted in the same way.
                is_quoted = isinstance(old, DoubleQuotedScalarString | SingleQuotedScalarString)
                target[key] = type(old)(value) if is_quoted and isinstance(value, str) else value


def _only_deletes(value: Any) -> bool:
    """Return whether a mapping has nulls alone, at any depth: it creates nothing where its key is missing."""
    return value is None or (isinstance(value, dict) and bool(value) and all(map(_only_deletes, value.values())))


def _quote_colons(node: Any, *, in_flow: bool = False) -> None:
    """Quote strings with a colon, such as hf://OWNER/NAME, in `{...}` and `[...]`: DVC's parser refuses them bare."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, ScalarString

    # `fa` is ruamel's record of a node's layout: `{...}` and `[...]` are flow style.
    in_flow = in_flow or bool(hasattr(node, "fa") and node.fa.flow_style())
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, dict | list):
            _quote_colons(value, in_flow=in_flow)
        elif in_flow and isinstance(value, str) and not isinstance(value, ScalarString) and ":" in value:
            node[key] = DoubleQuotedScalarString(value)


def _drop_nulls(value: Any) -> None:
    """Remove nulls from a new mapping in place: they delete nothing."""
    if isinstance(value, dict):
        # A copy of the items, because the loop deletes some.
        for key, inner in list(value.items()):
            if _only_deletes(inner):
                del value[key]
            else:
                _drop_nulls(inner)


def _short(key: str, value: Any) -> str:
    # With its key, by which a secret is recognized.
    text = str(redacted({key: to_plain(value)})[key])
    return text if len(text) <= 60 else text[:57] + "..."
