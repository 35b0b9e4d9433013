"""Presets: YAML overlays that edit params.yaml in place and keep its comments.

A preset holds only the keys it changes. A mapping is merged, anything else replaces, `null` deletes a key. The result
is checked as a whole before a byte is written.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from vlp_models.common.redaction import redacted
from vlp_models.errors import ParamsError
from vlp_models.params import parse_params, to_plain
from vlp_models.params.load import parse_yaml

# What an entry of these sections is; the rest is how it is made.
DEFINING = {
    "models": ("family",),
    "pretrain": ("model",),
    "finetune": ("task",),
    "data": ("format",),
    "augment": ("start",),
}


def apply_overlay(params_file: Path, preset: Path | None, assignments: list[str]) -> list[str]:
    """Merges `preset`, then `key.path=value` assignments, into `params_file`.

    Returns one line per changed key, `key: old -> new`. Raises `ParamsError` for a missing file, a malformed
    assignment, a result that the schema refuses, or a run that can't be; the file is then left as it was.
    """
    from io import StringIO

    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from yaml import YAMLError as SafeYAMLError

    from vlp_models.pipeline.check_params import check_runs

    yaml = YAML()
    yaml.width = 120
    yaml.preserve_quotes = True

    def parsed(text: str, where: object) -> Any:
        try:
            return parse_yaml(text, yaml.load)
        except (YAMLError, SafeYAMLError, ValueError, NotImplementedError) as error:
            raise ParamsError(f"{where}: not valid YAML: {error}") from None

    def read(path: Path) -> Any:
        try:
            return parsed(path.read_text(encoding="utf-8"), path)
        except FileNotFoundError:
            raise ParamsError(f"{path}: no such file") from None
        except UnicodeDecodeError as error:
            raise ParamsError(f"{path}: not UTF-8: {error}") from None

    document = read(params_file)
    if not isinstance(document, dict):
        raise ParamsError(f"{params_file}: a mapping of params, found {type(document).__name__}")
    changes: list[str] = []
    if preset is not None:
        overlay = read(preset) or {}
        if not isinstance(overlay, dict):
            raise ParamsError(f"{preset}: a preset is a mapping of params, found {type(overlay).__name__}")
        _check_names_free(document, overlay, preset)
        _merge(document, overlay, "", changes)
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        named = re.split(r"[^\w.@-]", key, maxsplit=1)[0]  # no more of it is told: the value may be secret
        if not separator:
            raise ParamsError(f"--set {named}: write it as key.path=value")
        try:
            nested: Any = parsed(text, "") if text else ""  # `key=null` removes the key
        except ParamsError:
            raise ParamsError(f"--set {named}: the value is not valid YAML; if it is a text, quote it") from None
        for part in reversed(key.split(".")):
            nested = {part: nested}
        _merge(document, nested, "", changes)
    check_runs(parse_params(_plain(document), str(preset or params_file)))
    buffer = StringIO()
    yaml.dump(document, buffer)
    whole = params_file.resolve()  # a link stays one
    with whole.open(encoding="utf-8", newline="") as before:
        ends = "\r\n" if before.readline().endswith("\r\n") else "\n"
    temporary = whole.with_name(f".{whole.name}.partial")
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)  # until it has the file's own mode: it may hold a secret
    temporary.write_text(buffer.getvalue(), encoding="utf-8", newline=ends)
    shutil.copymode(whole, temporary)
    temporary.replace(whole)
    return changes


def _check_names_free(document: Any, overlay: Any, preset: Path) -> None:
    """A preset may change an entry, but not put another model or run in the place of one of the same name.

    Raises:
        ParamsError: says which name is taken.
    """
    for section, keys in DEFINING.items():
        entries, others = _mapping(document.get(section)), _mapping(overlay.get(section))
        for name, entry in others.items():
            for key in keys:
                there, new = _mapping(entries.get(name)).get(key), _mapping(entry).get(key)
                if there is not None and new is not None and there != new:
                    raise ParamsError(
                        f"{preset}: the name `{section}.{name}` is taken, by one with `{key}: {there}` (here `{key}: "
                        f"{new}`); rename one of the two, or remove the other: `vlp use --set {section}.{name}=null`"
                    )


def _mapping(value: Any) -> Any:
    """What is none is for the schema to refuse."""
    return value if isinstance(value, dict) else {}


def _merge(target: Any, overlay: Any, where: str, changes: list[str]) -> None:
    for key, value in overlay.items():
        place = f"{where}.{key}" if where else str(key)
        if value is None:
            if key in target:
                del target[key]
                changes.append(f"{place}: removed")
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value, place, changes)
            if not target[key]:
                target[key] = type(target[key])()  # emptied in place, ruamel would write `{}` below the comment
        else:
            _drop_nulls(value)
            if key not in target or _plain(target[key]) != _plain(value):
                before = _short(str(key), target[key]) if key in target else "(new)"
                changes.append(f"{place}: {before} -> {_short(str(key), value)}")
                target[key] = value


def _drop_nulls(value: Any) -> None:
    """Of a mapping that is new, in place: there is nothing to delete."""
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            if inner is None:
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
