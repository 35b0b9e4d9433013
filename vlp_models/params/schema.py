"""Plain data to frozen dataclasses and back, with errors that name the dotted key.

Keys are checked here; what a value may be is declared by the annotation, which pydantic checks. An unknown key, a
missing key, a wrong type or a value out of range is a `ParamsError` that names the key and, for a misspelled one, the
nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from vlp_models.common.plugins import Table, absent_entries, contrib_entries, import_target
from vlp_models.errors import ParamsError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # safe in paths, commands and queries
Split = Literal["train", "val", "test"]

# Sections of params.yaml that folders of contrib have: dotted name, such as `finetune.NAME.lora` -> `module:dataclass`.
PARAMS_SECTIONS = Table("params", {})
# Checks of references between sections that folders of contrib add: name -> `module:function` of (params, file).
PARAMS_CHECKS = Table("params_checks", {})

T = TypeVar("T")
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


class OneOf:
    """The choices of a name: those of the core, and the entries that folders of contrib add to a table."""

    def __init__(self, kind: str, *core: str) -> None:
        self.kind = kind
        # The core may name an entry of contrib that the default params.yaml has: it is an error only if it is used.
        self.names = list(dict.fromkeys([*core, *contrib_entries(kind)]))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return the JSON schema, as pydantic has it for a Literal."""
        return {"enum": self.names, "type": "string"}


@dataclass(frozen=True, kw_only=True)
class Extensible:
    """A section that has those of contrib in it: next to its own keys in params.yaml, in `sections` here.

    prefix  of their dotted names in PARAMS_SECTIONS, such as `finetune.NAME.`
    """

    prefix: ClassVar[str]
    further_keys: ClassVar[str] = "sections"

    sections: dict[str, Any] = field(default_factory=dict)

    def section(self, cls: type[T]) -> T:
        """Return the section of this class."""
        return next((value for value in self.sections.values() if isinstance(value, cls)), cls())


def contrib_sections(cls: type) -> dict[str, Any]:
    """Return name -> dataclass of the sections that folders of contrib have in a section."""
    if not issubclass(cls, Extensible):
        return {}
    # `finetune.NAME.` -> {`lora`: ...}; a name with a dot is that of a section further down.
    below = {name.removeprefix(cls.prefix): name for name in PARAMS_SECTIONS if name.startswith(cls.prefix)}
    return {key: import_target(PARAMS_SECTIONS[name]) for key, name in below.items() if "." not in key}


def check_key(cls: type, key: str, where: str, file: str) -> None:
    """
    Raises:
        ParamsError: the section has no such key, or it is that of a folder of contrib that does not exist. At the top
            of the file the latter is ignored, so that the default params.yaml does without the folder.
    """
    names = [f.name for f in dataclasses.fields(cls) if f.name != getattr(cls, "further_keys", "")]
    names += contrib_sections(cls)
    if key in names:
        return
    folder = absent_entries("params").get(f"{cls.prefix}{key}") if issubclass(cls, Extensible) else None
    if folder is None:
        raise ParamsError(f"{file}: unknown key `{_join(where, key)}`{suggestion(str(key), names)}")
    if where:
        raise _absent(_join(where, key), folder, file)


def _absent(key: str, folder: str, file: str) -> ParamsError:
    return ParamsError(f"{file}: `{key}` needs vlp_models/contrib/{folder}, which is not installed")


def build(cls: type[T], raw: dict[str, Any], *, where: str, file: str = "params.yaml") -> T:
    """Build the dataclass `cls` from plain data, and check keys and types at every level.

    where: dotted key of `raw`, for messages; a ValueError of `__post_init__` is prefixed with it.
    """
    # Annotations are strings in these modules; `_hints` evaluates them, with the bounds of `Annotated`.
    hints: dict[str, Any] = _hints(cls)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    further = getattr(cls, "further_keys", "")
    sections = contrib_sections(cls)
    # Unknown keys before missing ones: a misspelled key is both, and only this message suggests the right name.
    if not further or issubclass(cls, Extensible):
        for key in raw:
            check_key(cls, key, where, file)
    if further:
        # Keys that are no fields go into the field `further`: sections of contrib, or keys that another module checks.
        shared = {key: value for key, value in raw.items() if key in fields and key != further}
        # A key of that field's own name is such a key as well, not the field.
        others = {key: value for key, value in raw.items() if key not in shared}
        if issubclass(cls, Extensible):
            others = {n: _convert(others.get(n, {}), c, _join(where, n), file) for n, c in sections.items()}
        raw = shared | {further: others}
    # Missing keys have the field's default, if it has one.
    values = {}
    for name, f in fields.items():
        if name in raw:
            values[name] = _convert(raw[name], hints[name], _join(where, name), file)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ParamsError(f"{file}: missing key `{_join(where, name)}`")
    try:
        # `__post_init__` checks what concerns several fields.
        return cls(**values)
    except ValueError as error:
        raise ParamsError(f"{file}: `{where}`: {error}") from None


def to_plain(value: Any) -> Any:
    """Return a params dataclass as dicts and lists, as JSON, MLflow and Lightning take them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        # The inverse of `build`: the keys in `further` go back next to the others.
        return plain | plain.pop(getattr(value, "further_keys", ""), {})
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def suggestion(name: str, valid_names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the folder it is in, the nearest valid one, or all of them."""
    if isinstance(valid_names, Table) and (folder := absent_entries(valid_names.kind).get(name)):
        return f"; it needs vlp_models/contrib/{folder}, which is not installed"
    names = list(valid_names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(names) or 'none'}"


def check_known(name: str, table: Mapping[str, str], where: str) -> None:
    """Raise a ParamsError if the table has no such name. where: the dotted key of the name."""
    if name not in table:
        raise ParamsError(f"params.yaml: `{where}: {name}` is unknown{suggestion(name, table)}")


# Cached: evaluating the annotations takes most of the time of `build`.
@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


# Cached: pydantic compiles a validator for each annotation.
@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)


def _convert(value: Any, hint: Any, where: str, file: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    # Any value: the module that uses it checks it.
    if hint is Any:
        return value
    # Sections are built here, not by pydantic, whose messages name no dotted key.
    if dataclasses.is_dataclass(hint):
        shorthand = getattr(hint, "from_shorthand", None)  # `mlm: 1.0` for `mlm: {weight: 1.0}`
        if shorthand is not None and not isinstance(value, dict):
            value = shorthand(value)
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        return build(typing.cast(type, hint), value, where=where, file=file)
    # Mappings and lists are converted entry by entry, so that messages name the entry.
    if origin is dict:
        if not isinstance(value, dict):
            raise ParamsError(f"{file}: `{where}` must be a section, found {value!r}")
        # DVC finds no param by the number 2024, and 010 would name 10.
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ParamsError(f"{file}: `{where}.{wrong[0]}`: the name is read as {wrong[0]!r}, not text; quote it")
        return {k: _convert(v, args[1], f"{where}.{k}", file) for k, v in value.items()}
    if origin is list:
        if not isinstance(value, list):
            raise ParamsError(f"{file}: `{where}` must be a list, found {value!r}")
        return [_convert(v, args[0], f"{where}[{i}]", file) for i, v in enumerate(value)]
    # `Section | None`
    if origin in (typing.Union, types.UnionType) and any(dataclasses.is_dataclass(a) for a in args):
        if value is None and type(None) in args:
            return None
        # A section that is set; a union has one section at most.
        return _convert(value, next(a for a in args if a is not type(None)), where, file)
    return _convert_leaf(value, hint, where, file)


def _bare_type(hint: Any) -> Any:
    """Return the type of a value that is set, without bounds: float for `PositiveFloat | None`."""
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    origin = typing.get_origin(hint)
    # `Annotated[X, ...]` has X as its first argument; `X | None` has it as the only one that is not None.
    if origin is typing.Annotated or (origin in (typing.Union, types.UnionType) and len(args) == 1):
        return _bare_type(args[0])
    return hint


def _convert_leaf(value: Any, hint: Any, where: str, file: str) -> Any:
    plain = _bare_type(hint)
    for choice in getattr(hint, "__metadata__", ()):
        if isinstance(choice, OneOf) and value not in choice.names:
            if folder := absent_entries(choice.kind).get(str(value)):
                raise _absent(f"{where}: {value}", folder, file)
            raise _not_a_choice(value, choice.names, where, file)
    # `lr: 1` is a number; strict validation would refuse an integer.
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    try:
        # Strict: a quoted "3" is no integer, and 1 is not true.
        return _adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        # pydantic's message names no key; those for choices and wrong types are written as the rest of ours.
        first = error.errors()[0]
        if typing.get_origin(plain) is Literal:
            raise _not_a_choice(value, [str(a) for a in typing.get_args(plain)], where, file) from None
        # Such as `int_type`: the value has another type than the annotation.
        if first["type"].endswith("_type") and isinstance(plain, type):
            raise ParamsError(
                f"{file}: `{where}` must be {_TYPE_NAMES.get(plain, plain.__name__)}, found {value!r}"
            ) from None
        raise ParamsError(f"{file}: `{where}: {value}` {first['msg'].removeprefix('Input ')}") from None


def _not_a_choice(value: Any, choices: list[str], where: str, file: str) -> ParamsError:
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean `{close[0]}`?" if close else ""
    return ParamsError(f"{file}: `{where}` must be one of {', '.join(choices)}; found {value!r}{hint}")
