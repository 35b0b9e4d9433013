"""params.schema.json: the schema of params.yaml for editors, generated from the dataclasses that check the file.

It accepts all that `load_params` accepts. Names that refer to other names or to plugins, and what a dataclass checks in
`__post_init__`, are left to `vlp plan`.

    python docs/_ext/params_schema.py      # after a change of vlp_models/params or of a model's config
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from reference import dataclass_in, describe_class, describe_fields, field_default, field_hints, fields_of

from vlp_models.common.plugins import KINDS as PLUGIN_KINDS
from vlp_models.data.formats import FORMATS, params_class
from vlp_models.models import FAMILIES, family_class
from vlp_models.params import Params, to_plain
from vlp_models.params.load import DEFAULTS
from vlp_models.params.runs import KINDS, NAME
from vlp_models.synthetic import GENERATORS
from vlp_models.tasks import TASKS

FILE = Path(__file__).parents[2] / "vlp_models" / "params.schema.json"
NAMED = ("generate", "data", "models", "pretrain", "finetune", "augment")  # names become paths and stages
TABLES = {
    ("GeneratorParams", "generator"): GENERATORS,
    ("DatasetParams", "format"): FORMATS,
    ("ModelParams", "family"): FAMILIES,
    ("FinetuneParams", "task"): TASKS,
}
Schema = dict[str, Any]


def params_schema() -> str:
    """Return params.schema.json: JSON Schema, draft 2020-12."""
    definitions: dict[str, Schema] = {}
    root = _object_schema(Params, definitions)
    for section in NAMED:
        names = root["properties"][section]
        names["patternProperties"] = {f"^{NAME.pattern}$": names["additionalProperties"]}
        names["additionalProperties"] = False
    for cls in DEFAULTS.values():
        _drop_required(cls, definitions)
    root["properties"]["defaults"] = {
        "description": "Settings of every run; a run may override them.",
        "type": ["object", "null"],
        "properties": {name: {"$ref": f"#/$defs/{cls.__name__}"} for name, cls in DEFAULTS.items()},
        "additionalProperties": False,
    }
    entries = {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[^:]+:[^:]+$"}}
    root["properties"]["plugins"] |= {"properties": dict.fromkeys(PLUGIN_KINDS, entries), "additionalProperties": False}
    for (cls_name, key), table in TABLES.items():
        definitions[cls_name]["properties"][key]["examples"] = list(table.builtin)  # plugins add others
    definitions["FinetuneParams"]["properties"]["start"]["pattern"] = f"^({'|'.join(KINDS)})/{NAME.pattern}$"
    definitions["ModelParams"]["allOf"] = [_config_of(family, definitions) for family in FAMILIES.builtin]
    entry = definitions["DatasetParams"]
    entry["additionalProperties"] = True  # the keys of a plugin's format; those of built-in ones:
    entry["allOf"] = [_keys_of(name, definitions) for name in FORMATS.builtin]
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "params.yaml of vlp-flows",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _object_schema(cls: type, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a section, and put those of the sections in it into `definitions`."""
    hints, meanings = field_hints(cls), describe_fields(cls)
    properties, required = {}, []
    for field in fields_of(cls):
        entry = _value_schema(hints[field.name], definitions)
        if meaning := meanings.get(field.name, ""):
            entry["description"] = meaning
        default = field_default(field)
        if default is dataclasses.MISSING:
            required.append(field.name)
        elif not dataclasses.is_dataclass(default):
            entry["default"] = to_plain(default)
        properties[field.name] = entry
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    about = {"description": describe_class(cls), "required": required}
    return schema | {key: value for key, value in about.items() if value}


def _value_schema(hint: Any, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a value; sections are references."""
    inner, arguments = dataclass_in(hint), typing.get_args(hint)
    if inner is None:
        return TypeAdapter(hint).json_schema()  # bounds, patterns and choices, as pydantic checks them
    if typing.get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _value_schema(arguments[1], definitions)}
    if typing.get_origin(hint) is list:
        return {"type": "array", "items": _value_schema(arguments[0], definitions)}
    if inner.__name__ not in definitions:
        definitions[inner.__name__] = {}  # before its fields, which may refer to it
        definitions[inner.__name__] = _object_schema(inner, definitions)
    reference: Schema = {"$ref": f"#/$defs/{inner.__name__}"}
    shorthand = getattr(inner, "from_shorthand", None)
    if shorthand is not None:  # `mlm: 1.0` for `mlm: {weight: 1.0}`
        (key,) = shorthand(None)
        short = TypeAdapter(typing.get_type_hints(inner, include_extras=True)[key]).json_schema()
        return {"anyOf": [short, reference]}
    return {"anyOf": [reference, {"type": "null"}]} if type(None) in arguments else reference


def _drop_required(cls: type, definitions: dict[str, Schema]) -> None:
    """Let the keys of a run be absent, at any level: they may come from `defaults`."""
    definitions[cls.__name__].pop("required", None)
    for hint in field_hints(cls).values():
        if (inner := dataclass_in(hint)) is not None:
            _drop_required(inner, definitions)


def _keys_of(name: str, definitions: dict[str, Schema]) -> Schema:
    """Return that a dataset of this format has the keys of its dataclass and no others."""
    cls = params_class(name)
    definitions[cls.__name__] = _object_schema(cls, definitions)
    return {
        "if": {"properties": {"format": {"const": name}}, "required": ["format"]},
        "then": {"$ref": f"#/$defs/{cls.__name__}"},
    }


def _config_of(family: str, definitions: dict[str, Schema]) -> Schema:
    """Return that `config` has the keys of the family's config dataclass; the data determines the missing ones."""
    cls = family_class(family).config_class
    config = _object_schema(cls, definitions)
    config.pop("required", None)
    definitions[cls.__name__] = config
    return {
        "if": {"properties": {"family": {"const": family}}, "required": ["family"]},
        "then": {"properties": {"config": {"$ref": f"#/$defs/{cls.__name__}"}}},
    }


if __name__ == "__main__":
    FILE.write_text(params_schema(), encoding="utf-8")
