"""Presets: YAML overlays that edit params.yaml in place and keep its comments.

A preset has only the keys it changes. A mapping is merged, any other value replaces, `null` deletes a key. The result
is checked as a whole before anything is written.

Only ruamel.yaml keeps comments. It reads YAML 1.2, and edits an alias or merge key together with its anchor. So the
same change is made to plain data, read as everything else reads params.yaml (YAML 1.1), and the text must give that.
"""

from __future__ import annotations

import io
import re
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import write_together
from vlp_models.common.redaction import redacted
from vlp_models.errors import ParamsError
from vlp_models.params import Params, parse_params, to_plain
from vlp_models.params.load import explain_yaml_error, parse_yaml, read_plain, read_yaml_text
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    from vlp_models.pipeline.stages.plan import PlanFacts

PACKAGED = Path(__file__).parents[1] / "presets"

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

    Raises:
        ParamsError: no preset has this name.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    known = list_presets(root)
    if name not in known:
        raise ParamsError(f"no preset `{name}`{suggestion(name, known)} (`vlp use --list` lists them all)")
    return known[name]


def list_presets(root: Path | None = None) -> dict[str, Path]:
    """Return name -> file of the package's presets and of those in the project's folder presets/, sorted by name."""
    own = Path("presets") if root is None else root / "presets"
    found = {path.stem: path for folder in (PACKAGED, own) for path in folder.glob("*.yaml")}
    return dict(sorted(found.items()))


def describe_preset(path: Path) -> str:
    """Return the first sentence of a preset's leading comment, after the command that the comment starts with.

    Raises:
        ParamsError: the file cannot be read as text.
    """
    words: list[str] = []
    for line in read_yaml_text(path).splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("# vlp use", "# make", "# or ")):
            words += line.strip("# ").split()
    return textwrap.shorten(re.split(r"(?<=[^l]\.) ", " ".join(words), maxsplit=1)[0], 95, placeholder=" ...")


def apply_overlay(params_file: Path, preset: Path | None, assignments: list[str]) -> list[str]:
    """Merge into `params_file` and write it; see `merge_overlay`. Return one line per changed key."""
    merged = merge_overlay(params_file, preset, assignments)
    write_together({params_file: merged.text})
    return merged.changes


def merge_overlay(params_file: Path, preset: Path | None, assignments: list[str]) -> Overlay:
    """Merge `preset`, then `key.path=value` assignments, into the content of `params_file`; nothing is written.

    Raises:
        ParamsError: a missing file, a malformed assignment, a result that breaks the schema, a run that is not
            possible, or a change that YAML aliases do not allow.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from yaml import AliasEvent, parse
    from yaml import YAMLError as SafeYAMLError

    from vlp_models.pipeline.stages.plan import check_params

    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True

    def parsed(text: str, where: object) -> Any:
        try:
            return parse_yaml(text, yaml.load)
        except (YAMLError, SafeYAMLError, ValueError, NotImplementedError) as error:
            raise ParamsError(f"{where}: not valid YAML: {explain_yaml_error(error)}") from None

    def read(path: Path) -> Any:
        try:
            return parsed(read_yaml_text(path), path)
        except FileNotFoundError:
            raise ParamsError(f"{path}: no such file") from None

    original = read_yaml_text(params_file) if params_file.is_file() else ""
    document = read(params_file)
    unchanged = _dump(yaml, document)
    if not isinstance(document, dict):
        raise ParamsError(f"{params_file}: expected a mapping of params, found {type(document).__name__}")
    wanted = _plain(read_plain(original, params_file))
    changes: list[str] = []
    if preset is not None:
        overlay = read(preset) or {}
        if not isinstance(overlay, dict):
            raise ParamsError(f"{preset}: expected a mapping of params, found {type(overlay).__name__}")
        _check_names_free(document, overlay, preset)
        wanted = _merged_plain(wanted, _plain(overlay))
        _merge(document, overlay, "", changes, _aliases(document))
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        named = re.split(r"[^\w.@-]", key, maxsplit=1)[0]  # for messages: the value may be secret
        if not separator:
            raise ParamsError(f"--set {named}: write it as key.path=value")
        try:
            nested: Any = parsed(text, "") if text else ""  # `key=null` removes the key
        except ParamsError:
            raise ParamsError(f"--set {named}: the value is not valid YAML; quote it if it is a string") from None
        for part in reversed(key.split(".")):
            nested = {part: nested}
        wanted = _merged_plain(wanted, _plain(nested))
        _merge(document, nested, "", changes, _aliases(document))
    _quote_colons(document)
    dumped = _dump(yaml, document)
    text = keep_layout(original, unchanged, dumped)
    raw: Any = None
    with suppress(ParamsError):
        raw = read_plain(text, params_file)
    if _difference(_plain(raw), wanted):  # a layout that lines cannot be carried over to
        text, raw = dumped, read_plain(dumped, params_file)
    if difference := _difference(_plain(raw), wanted):
        aliases = any(isinstance(event, AliasEvent) for event in parse(original))
        advice = (
            "a YAML alias or merge key (`*`, `<<`) shares it with another place; write its value out in both first"
            if aliases
            else "write it as a decimal number, or in quotes if it is a text"
        )
        raise ParamsError(f"{params_file}: {difference}: {advice}")
    params = parse_params(raw, str(preset or params_file))
    return Overlay(text, raw, params, changes, facts=check_params(params))


def _dump(yaml: Any, document: Any) -> str:
    buffer = io.StringIO()
    yaml.dump(document, buffer)
    return buffer.getvalue()


def keep_layout(original: str, dumped: str, changed: str) -> str:
    """Apply the difference between two dumps of a document to the text that it was read from.

    A dump breaks long lines in its own way. So only lines that differ between the dumps are taken from `changed`; all
    others stay as they are in `original`.

    Args:
        dumped: `original`, read and dumped without a change.
        changed: the dump after the change.
    """
    old, before, after = (text.splitlines(keepends=True) for text in (original, dumped, changed))
    # line of `before` -> lines of `old` that it was dumped from; the first line of a group has them all
    place: dict[int, tuple[int, int]] = {}
    for _, old_low, old_high, low, high in SequenceMatcher(None, old, before, autojunk=False).get_opcodes():
        if high - low == old_high - old_low:
            place |= {low + i: (old_low + i, old_low + i + 1) for i in range(high - low)}
        else:
            place |= {i: (old_low, old_high) if i == low else (old_high, old_high) for i in range(low, high)}

    result: list[str] = []
    for kind, low, high, new_low, new_high in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            result += [line for i in range(low, high) for line in old[slice(*place[i])]]
        else:
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
        entries, others = _mapping(document.get(section)), _mapping(overlay.get(section))
        for name, entry in others.items():
            for key in keys:
                there, new = _mapping(entries.get(name)).get(key), _mapping(entry).get(key)
                if there is not None and new is not None and there != new:
                    raise ParamsError(
                        f"{preset}: the name `{section}.{name}` is used by an entry with `{key}: {there}`, not `{key}: "
                        f"{new}`; rename one of the two, or remove the other: `vlp use --set {section}.{name}=null`"
                    )


def _mapping(value: Any) -> Any:
    """Return the value, or {} if it is no mapping, which the schema will report."""
    return value if isinstance(value, dict) else {}


def _aliases(document: Any) -> set[tuple[int, Any]]:
    """Return (id of a mapping, key) of the mappings that stand in another place, too, and there first.

    These are aliases, and what a merge key brings.
    """
    seen: set[int] = set()
    found: set[tuple[int, Any]] = set()

    def visit(node: Any) -> None:
        for key, inner in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(inner, dict | list):
                if id(inner) in seen:
                    found.add((id(node), key))
                else:
                    seen.add(id(inner))
                    visit(inner)

    visit(document)
    return found


def _merge(target: Any, overlay: Any, where: str, changes: list[str], aliases: set[tuple[int, Any]]) -> None:
    for key, value in overlay.items():
        place = f"{where}.{key}" if where else str(key)
        if value is None:
            if key in target:
                del target[key]
                changes.append(f"{place}: removed")
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            if (id(target), key) in aliases:
                target[key] = _copy(target[key])
            _merge(target[key], value, place, changes, aliases)
            if not target[key]:
                target[key] = type(target[key])()  # if emptied in place, ruamel writes `{}` below the comment
        elif not _only_deletes(value):
            _drop_nulls(value)
            if key not in target or _plain(target[key]) != _plain(value):
                before = _short(str(key), target[key]) if key in target else "(new)"
                changes.append(f"{place}: {before} -> {_short(str(key), value)}")
                target[key] = _quoted_like(_quote_unclear(value), target.get(key))


def _only_deletes(value: Any) -> bool:
    """Return whether a mapping has nulls alone, at any depth: it creates nothing where its key is missing."""
    return value is None or (isinstance(value, dict) and bool(value) and all(map(_only_deletes, value.values())))


def _merged_plain(target: Any, overlay: Any) -> Any:
    """Return what `_merge` makes of plain data; neither is changed."""
    if not isinstance(overlay, dict):
        return overlay
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in overlay.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(result.get(key), dict) or not _only_deletes(value):
            result[key] = _merged_plain(result.get(key), value)
    return result


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """Return a sentence on the first value of plain data that is not as wanted; empty if all are."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        inner = (
            _difference(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
            for key in {**wanted, **found}
        )
        return next(filter(None, inner), "")
    if isinstance(found, str) and isinstance(wanted, float):  # YAML 1.1 reads 1e-4 as text, and the schema as a number
        with suppress(ValueError):
            found = float(found)
    if found == wanted or repr(found) == repr(wanted):  # repr: NaN
        return ""
    key = where.rpartition(".")[2]
    old, new = ("absent" if value is None else _short(key, value) for value in (found, wanted))
    return f"`{where}` would be {old} instead of {new}"


def _copy(mapping: Any) -> Any:
    """Return a mapping of the same values in the same style that shares nothing with this one."""
    from ruamel.yaml.comments import CommentedMap

    copy = CommentedMap(_plain(mapping))
    if hasattr(mapping, "fa") and mapping.fa.flow_style():
        copy.fa.set_flow_style()
    return copy


def _quote_unclear(value: Any) -> Any:
    """Return a new value with quotes around the strings that YAML 1.1 reads as something else: on, yes, 1:30."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, PlainScalarString, ScalarString
    from yaml import ScalarNode
    from yaml.resolver import Resolver

    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (quoted := _quote_unclear(inner)) is not inner:
                value[key] = quoted
    bare = isinstance(value, str) and (not isinstance(value, ScalarString) or isinstance(value, PlainScalarString))
    if bare and Resolver().resolve(ScalarNode, value, (True, False)) != Resolver.DEFAULT_SCALAR_TAG:
        return DoubleQuotedScalarString(value)
    return value


def _quoted_like(value: Any, before: Any) -> Any:
    """Return a string with the quotes of the one that it replaces."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, SingleQuotedScalarString

    quoted = isinstance(before, DoubleQuotedScalarString | SingleQuotedScalarString)
    return type(before)(value) if quoted and isinstance(value, str) else value


def _quote_colons(node: Any, *, in_flow: bool = False) -> None:
    """Quote strings with a colon, such as hf://OWNER/NAME, in `{...}` and `[...]`: DVC's parser refuses them bare."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, ScalarString

    in_flow = in_flow or bool(hasattr(node, "fa") and node.fa.flow_style())
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, dict | list):
            _quote_colons(value, in_flow=in_flow)
        elif in_flow and isinstance(value, str) and not isinstance(value, ScalarString) and ":" in value:
            node[key] = DoubleQuotedScalarString(value)


def _drop_nulls(value: Any) -> None:
    """Remove nulls from a new mapping in place: they delete nothing."""
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            if _only_deletes(inner):
                del value[key]
            else:
                _drop_nulls(inner)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return to_plain(value)


def _short(key: str, value: Any) -> str:
    text = str(redacted({key: _plain(value)})[key])
    return text if len(text) <= 60 else text[:57] + "..."
