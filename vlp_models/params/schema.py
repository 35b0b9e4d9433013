"""Plain data into frozen dataclasses and back, with errors that name the place.

An unknown key, a missing key, a value of the wrong type or out of range is a `ParamsError` that names the key's place
and, for a misspelt key, the nearest known one. What a value may be is its annotation's business: pydantic checks it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from vlp_models.errors import ParamsError

T = TypeVar("T")


def build(cls: type[T], raw: dict[str, Any], *, where: str, file: str = "params.yaml") -> T:
    """Makes the dataclass `cls` from plain data, checking keys and types all the way down.

    A ValueError of its `__post_init__` is told with the place.
    """
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            raise ParamsError(f"{file}: unknown key `{_dot(where, key)}`{nearest(str(key), fields)}")
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


def nearest(name: str, known: Iterable[str]) -> str:
    """What an error adds to a name that is not known."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(known) or 'none'}"


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _dot(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)


def _convert(value: Any, hint: Any, where: str, file: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        shorthand = getattr(hint, "from_shorthand", None)  # `mlm: 1.0` for `mlm: {weight: 1.0}`
        if shorthand is not None and not isinstance(value, dict):
            value = shorthand(value)
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        return build(typing.cast(type, hint), value, where=where, file=file)
    if origin is dict:
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        return {str(k): _convert(v, args[1], f"{where}.{k}", file) for k, v in value.items()}
    if origin is list:
        if not isinstance(value, list):
            raise ParamsError(f"{file}: `{where}` must be a list, found {value!r}")
        return [_convert(v, args[0], f"{where}[{i}]", file) for i, v in enumerate(value)]
    if origin in (typing.Union, types.UnionType) and any(dataclasses.is_dataclass(a) for a in args):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), where, file)
    return _leaf(value, hint, where, file)


def _leaf(value: Any, hint: Any, where: str, file: str) -> Any:
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    if plain is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    try:
        return _adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if typing.get_origin(plain) is Literal:
            known = [str(a) for a in typing.get_args(plain)]
            near = difflib.get_close_matches(str(value), known, n=1)
            hint_text = f"; did you mean `{near[0]}`?" if near else ""
            raise ParamsError(
                f"{file}: `{where}` must be one of {', '.join(known)}; found {value!r}{hint_text}"
            ) from None
        if first["type"].endswith("_type") and isinstance(plain, type):
            raise ParamsError(f"{file}: `{where}` must be {plain.__name__}, found {value!r}") from None
        said = first["msg"].removeprefix("Input ")
        raise ParamsError(f"{file}: `{where}: {value}` {said}") from None
