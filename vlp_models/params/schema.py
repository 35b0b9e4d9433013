"""Plain data into frozen dataclasses and back, with errors that name the place.

An unknown key, a missing key or a value of the wrong type is a `ParamsError` that names the key's place and, for a
misspelt key, the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal, TypeVar

from vlp_models.errors import ParamsError

T = TypeVar("T")


def build(cls: type[T], raw: dict[str, Any], *, where: str, file: str = "params.yaml") -> T:
    """Makes the dataclass `cls` from plain data, checking keys and types all the way down.

    A ValueError of its `__post_init__` is told with the place.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(fields)}"
            raise ParamsError(f"{file}: unknown key `{_dot(where, key)}`{hint}")
    values = {}
    for name, f in fields.items():
        if name in raw:
            values[name] = _convert(raw[name], hints[name], _dot(where, name), file)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ParamsError(f"{file}: missing key `{_dot(where, name)}`")
    try:
        return cls(**values)
    except ValueError as error:
        raise ParamsError(f"{file}: `{where}`: {error}") from None


def to_plain(value: Any) -> Any:
    """A params dataclass as plain dicts and lists: what JSON, MLflow and Lightning can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def _dot(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)


def _convert(value: Any, hint: Any, where: str, file: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        return build(typing.cast(type, hint), value, where=where, file=file)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
            hint_text = f"; did you mean `{near[0]}`?" if near else ""
            raise ParamsError(
                f"{file}: `{where}` must be one of {', '.join(map(str, args))}; found {value!r}{hint_text}"
            )
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        return {str(k): _convert(v, args[1], f"{where}.{k}", file) for k, v in value.items()}
    if origin is list:
        if not isinstance(value, list):
            raise ParamsError(f"{file}: `{where}` must be a list, found {value!r}")
        return [_convert(v, args[0], f"{where}[{i}]", file) for i, v in enumerate(value)]
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), where, file)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ParamsError(f"{file}: `{where}` must be {hint.__name__}, found {value!r}")
    return value
