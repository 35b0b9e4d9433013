"""The generated reference pages: every key of params.yaml from the schema, every command from the CLI, and which
objectives go with which models from their protocols."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from vlp_models.cli.main import app
from vlp_models.contrib.shared_objectives.heads import FAMILY_ONLY, SHARED, refusal
from vlp_models.data.formats import FORMATS, params_class
from vlp_models.models import FAMILIES, own_objectives
from vlp_models.models.meta_model import META_FACTS, meta_model
from vlp_models.params import DatasetParams, ModelParams, Params, SourceParams
from vlp_models.params.schema import OneOf, contrib_sections

ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*) {2,}(\S.*)$")  # of a class docstring: `name  what it sets`
MORE = re.compile(r"^ {6,}(\S.*)$")
OBJECTIVES = {  # name -> what it predicts, and a shared one's loss with its source
    "mlm": ("masked words", "cross-entropy over the vocabulary (BERT, section 3.1)"),
    "itm": (
        "image-text matching",
        "cross-entropy: does the text describe the image, or another one? (UNITER, section 3.2)",
    ),
    "itc": ("image-text contrast", "InfoNCE in both directions, learned temperature from 0.07 (CLIP, figure 3)"),
    "ism": ("image-sentence matching", "triplet ranking in both directions, margin 0.2 (TDEN)"),
    "ic": ("captioning", "cross-entropy of each next word (XGPT, section 3.2)"),
    "msg": ("masked sentence generation", "likewise; the decoder reads masked words (TDEN)"),
    "moc": ("classes of masked regions", "KL divergence to the detector's probabilities (UNITER's MRC-KL, TDEN)"),
    "mrfr": ("features of masked regions", "squared distance, mean over features (UNITER, section 3.2)"),
    "mim": ("visual tokens of masked patches", ""),
    "mvm": ("codes of masked cells", ""),
    "bidirectional": ("masked words, both directions", ""),
    "seq2seq": ("masked words, left to right", ""),
    "imlm": ("a masked fragment", ""),
    "ida": ("a caption from a damaged one", ""),
    "tifg": ("regions from a caption", ""),
}
assert OBJECTIVES.keys() == {*SHARED, *FAMILY_ONLY}, "every objective has a row"


def params_page() -> str:
    """Return reference/params.md: one table per section of params.yaml, in the order of the schema."""
    lines = [
        "# params.yaml",
        "",
        "Every key, its type, its default and what it sets. Generated from the schema in {src}`vlp_models/params`. "
        "An unknown key, a wrong type or a value out of range is an error that names the key and the nearest one.",
        "`vlp use PRESET` merges a preset into params.yaml; `vlp use --set key.of.a.value=5` sets one value.",
        "The file is YAML 1.2, read as DVC reads it: `true` and `false` (not `yes` or `on`), `010` is 10, `1e-4` is a "
        "number, and no key is given twice.",
        "",
    ]
    hints = field_hints(Params)
    for field in fields_of(Params):
        cls = dataclass_in(hints[field.name])
        named = typing.get_origin(hints[field.name]) is dict
        lines += [f"## {field.name}", ""]
        if cls is None:
            lines += [f"{_type_name(hints[field.name])}; default {_default(field)}.", ""]
            continue
        lines += [*_tables(cls, f"{field.name}.NAME" if named else field.name, set()), ""]
        if cls is DatasetParams:
            lines += [*_format_tables(), ""]
    return "\n".join(lines) + "\n"


def _tables(cls: type, where: str, seen: set[type]) -> Iterator[str]:
    """Yield the table of a params class, then those of the classes in it."""
    seen.add(cls)
    if first := describe_class(cls):
        yield f"{_escape(first)}\n"
    hints, meanings = field_hints(cls), describe_fields(cls)
    yield "| key | type | default | |\n|---|---|---|---|"
    inner = []
    for field in fields_of(cls):
        nested = dataclass_in(hints[field.name])
        kind = _type_name(hints[field.name])
        yield f"| `{where}.{field.name}` | {kind} | {_default(field)} | {_escape(meanings.get(field.name, ''))} |"
        if nested and nested not in seen:
            many = typing.get_origin(hints[field.name]) is dict
            inner.append((nested, f"{where}.{field.name}{'.NAME' if many else ''}"))
    for nested, name in inner:
        if nested not in seen:
            yield f"\n### {name}\n"
            yield from _tables(nested, name, seen)


def _format_tables() -> Iterator[str]:
    """Yield a table for each class of keys that a format has next to those of every dataset."""
    by_class: dict[type, list[str]] = {}
    for name in FORMATS.builtin:
        by_class.setdefault(params_class(name), []).append(name)
    common = {field.name for field in dataclasses.fields(SourceParams)}
    for cls, names in by_class.items():
        fields = [field for field in dataclasses.fields(cls) if field.name not in common]
        if not fields:
            continue
        yield f"\n### data.NAME of {'the format' if len(names) == 1 else 'the formats'} {', '.join(names)}\n"
        yield "| key | type | default | |\n|---|---|---|---|"
        hints, meanings = typing.get_type_hints(cls, include_extras=True), describe_fields(cls)
        for field in fields:
            about = _escape(meanings.get(field.name, ""))
            yield f"| `data.NAME.{field.name}` | {_type_name(hints[field.name])} | {_default(field)} | {about} |"


def describe_class(cls: type) -> str:
    """Return the first paragraph of a params class's docstring; empty without one, or if it only lists the fields."""
    text = cls.__doc__ or ""
    if text.startswith(("\n", f"{cls.__name__}(")):
        return ""
    return " ".join(text.partition("\n\n")[0].split())


def fields_of(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a params class that are keys of params.yaml, then the sections of contrib in it."""
    own = [field for field in dataclasses.fields(cls) if field.name != getattr(cls, "further_keys", "")]
    added = [(name, section, dataclasses.field(default_factory=section)) for name, section in _sections(cls)]
    return [*own, *dataclasses.fields(dataclasses.make_dataclass("Sections", added))]


def field_hints(cls: type) -> dict[str, Any]:
    """Return the types of `fields_of`, with their bounds."""
    return typing.get_type_hints(cls, include_extras=True) | dict(_sections(cls))


def _sections(cls: type) -> list[tuple[str, type]]:
    return list(contrib_sections(cls).items())


def describe_fields(cls: type) -> dict[str, str]:
    """Return what the fields of a dataclass mean: from its docstring, or the comment at or above each field."""
    meanings: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        meanings |= _from_comments(base) | _from_docstring(base)
    return meanings


def _from_docstring(cls: type) -> dict[str, str]:
    meanings: dict[str, str] = {}
    names: list[str] = []  # of the entry that a further line continues
    for line in (cls.__doc__ or "").splitlines():
        if entry := ENTRY.match(line):
            names = entry[1].split(", ")
            meanings |= dict.fromkeys(names, entry[2])
        elif names and (more := MORE.match(line)):
            meanings |= {name: f"{meanings[name]} {more[1]}" for name in names}
        else:
            names = []
    return meanings


def _from_comments(cls: type) -> dict[str, str]:
    lines, _ = inspect.getsourcelines(cls)
    (node,) = ast.parse(inspect.cleandoc("".join(lines))).body
    assert isinstance(node, ast.ClassDef)
    text = inspect.cleandoc("".join(lines)).splitlines()
    meanings = {}
    for entry in node.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        # a comment behind the field, otherwise the lines of comments above it
        after = text[(entry.end_lineno or 1) - 1][entry.end_col_offset or 0 :].strip()
        above: list[str] = []
        for line in reversed(text[: entry.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            above.insert(0, line.strip().lstrip("# "))
        meanings[entry.target.id] = after.lstrip("# ") if after.startswith("#") else " ".join(above)
    return meanings


def dataclass_in(hint: Any) -> type | None:
    """Return the params class that a type hint is or contains."""
    if dataclasses.is_dataclass(hint):
        return hint  # type: ignore[return-value]
    for argument in typing.get_args(hint):
        if (inner := dataclass_in(argument)) is not None:
            return inner
    return None


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Annotated:
        base, *extra = typing.get_args(hint)
        if choices := [name for one_of in extra if isinstance(one_of, OneOf) for name in one_of.names]:
            return ", ".join(f"`{name}`" for name in choices)
        limits = [m for field in extra for m in getattr(field, "metadata", [])]
        bounds = {type(m).__name__.lower(): getattr(m, type(m).__name__.lower(), None) for m in limits}
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        return " ".join([_type_name(base), *(f"{signs[k]} {v}" for k, v in bounds.items() if k in signs)])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{_yaml(value)}`" for value in arguments)
    if origin is list or origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping to {_type_name(arguments[1])}"
    if arguments:
        return " or ".join(_type_name(a) for a in arguments if a is not type(None))
    if dataclasses.is_dataclass(hint):
        return "section"
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}.get(hint, "any value")


def field_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of a params class; `dataclasses.MISSING` for a required one."""
    if field.default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _default(field: dataclasses.Field[Any]) -> str:
    value = field_default(field)
    if value is dataclasses.MISSING:
        return "required"
    return "below" if dataclasses.is_dataclass(value) else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or '""'
    return "null" if value is None else re.sub(r"'", "", str(value)) or "{}"


def _escape(text: str) -> str:
    return re.sub(r"\$", r"\\$", text.replace("|", "\\|").replace("<", "&lt;"))


def cli_page() -> str:
    """Return reference/cli.md: every command with its arguments and options, grouped as `vlp --help` groups them."""
    root: Any = typer.main.get_command(app)  # Typer has its own copy of Click's classes
    groups: dict[str, list[str]] = {}
    for name, command in root.commands.items():
        if not command.hidden:
            groups.setdefault(command.rich_help_panel or "Commands", []).append(_command(f"vlp {name}", command))
    lines = ["# Commands", "", "Generated from the commands; `vlp COMMAND --help` shows the same in a terminal.", ""]
    for panel, texts in groups.items():
        lines += [f"## {panel}", "", *texts]
    return "\n".join(lines) + "\n"


def _command_default(parameter: Any) -> str:
    """Return the default as --help shows it, or that an option is required; flags and empty defaults have none."""
    if parameter.required:
        return " Required." if parameter.param_type_name == "option" else ""
    value = parameter.default
    shown = value not in (None, "", (), []) and not isinstance(value, bool) and parameter.show_default
    return f" Default: `{value}`." if shown else ""


def _command(name: str, command: Any) -> str:
    lines = [f"### {name}", "", _escape(inspect.cleandoc(command.help or "").replace("\b", "")), ""]
    usage, rows = [name], []
    for parameter in command.params:
        text = _escape(getattr(parameter, "help", "") or "") + _command_default(parameter)
        if parameter.param_type_name == "argument":
            label = (parameter.metavar or parameter.name).upper() + ("..." if parameter.nargs == -1 else "")
            usage.append(label if parameter.required else f"[{label}]")
            rows.append(f"| `{label}` | {text} |")
        elif not parameter.hidden and parameter.name != "help":
            names = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
            rows.append(f"| {names} | {text} |")
    lines += [f"```text\n{' '.join(usage)} [OPTIONS]\n```", ""]
    if rows:
        lines += ["| | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


OBJECTIVES_PAGE = """# Objectives across models

The names in `pretrain.RUN.recipe.objectives` decide what a model is pretrained on. A family's own objectives are those
of its paper. A shared one needs a protocol of the model and no more
({src}`vlp_models/contrib/shared_objectives`), so every family that implements the protocol has it,
[plugins](../guides/plugins.md) as well. Generated from the families at their default configs, VLMo with `image_codes`.
[A study](../results/claims.md#objectives-across-models) compares some of them at equal compute.

- **own**: the family computes it; `own` always comes before `shared`.
- **shared**: a pass of its own, with a head that exists only if the recipe names the objective.
- **–**: refused, with the reason, by `vlp plan` and before training; the reasons are below.

```console
$ vlp use --set pretrain.tden.recipe.objectives.itm=1
```

@cells

With `region_classes: pretext`, Unified VLP has a `moc` of its own.

## Shared objectives

@losses

Protocols: {src}`vlp_models/models/protocols.py`. Words are masked as in BERT; `recipe.mask_probability` is that of a
word or a region.

The heads are a part of their own in a [checkpoint](checkpoints.md), `objective_heads`, and a parameter group of that
name (`optimizer.groups`). A further pretraining loads those that it also names; fine-tuning ignores them. Two-pass
scheduled sampling and `contrast_over: update` are for own objectives.

## Reasons

@reasons
"""


def objectives_page() -> str:
    """Return reference/objectives.md: for each paper's family and objective, whether it trains it, or why it cannot."""
    configs = {"vlmo": {"image_codes": 8192}}  # its pretraining on images alone
    families = [name for name, target in FAMILIES.builtin.items() if ".contrib." not in target]
    models = {f: meta_model(ModelParams(family=f, config=configs.get(f, {}))) for f in families}
    cells, refused = [], dict[str, list[str]]()
    for name, (title, _) in OBJECTIVES.items():
        row = []
        for family, model in models.items():
            reason = refusal(model, name, META_FACTS)
            row.append("–" if reason else "own" if name in own_objectives(model) else "shared")
            if reason:
                refused.setdefault(f"`{name}`: {reason}", []).append(family)
        cells.append([f"`{name}`", title, *row])
    losses = [
        [
            f"`{name}`",
            " or ".join(f"`{protocol.__name__}`" for protocol in cls.protocols)
            + (", reads regions" if cls.regions else ""),
            OBJECTIVES[name][1],
        ]
        for name, cls in SHARED.items()
    ]
    tables = {
        "cells": _table(["objective", "", *models], cells),
        "losses": _table(["objective", "the model", "loss"], losses),
        "reasons": _table(["refused", "in"], [[reason, ", ".join(families)] for reason, families in refused.items()]),
    }
    return re.sub(r"^@(\w+)$", lambda match: tables[match[1]], OBJECTIVES_PAGE, flags=re.M)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
