"""Readers of public dataset formats, by their name in params.yaml."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from vlp_models.common.plugins import Table, import_target
from vlp_models.data.formats.base import Tables
from vlp_models.data.tables import standard_split
from vlp_models.data.views import TABLES
from vlp_models.errors import ParamsError, first_line
from vlp_models.params import DatasetParams, SourceParams, build, to_plain
from vlp_models.params.schema import check_known, suggestion

FORMATS = Table(
    "formats",
    {
        "coco": "vlp_models.data.formats.coco:read",
        "pairs": "vlp_models.data.formats.pairs:read",
        "texts": "vlp_models.data.formats.pairs:read_texts",
    },
)


def read_source(name: str, dataset: DatasetParams, base: Path) -> Tables:
    """Read one dataset.

    Args:
        base: the directory that its `root` is relative to.

    Raises:
        ParamsError: an unknown format or key, or rows of a view that the reader does not name.
        DataError: its directory or one of its files is missing or not in the format.
    """
    params = source_params(name, dataset)
    tables: Tables = import_target(FORMATS[params.format])(name, _with_standard_splits(params), base)
    # else stages would not depend on the view's code
    for view in sorted(TABLES.keys() - set(filled_views(params.format))):
        if len(tables[view]):
            raise ParamsError(
                f"plugin {FORMATS[params.format]}: it fills the view `{view}`, which its `@fills(...)` does not name"
            )
    return tables


def source_params(name: str, dataset: DatasetParams) -> SourceParams:
    """Return a dataset's params as the class that its reader annotates `params` with.

    Raises:
        ParamsError: an unknown format, a key or value that the format does not have, or a part of train to hold out
            in a format that divides no split.
    """
    check_known(dataset.format, FORMATS, f"data.{name}.format")
    cls = params_class(dataset.format)
    keys = to_plain(dataset)
    names = [field.name for field in dataclasses.fields(cls)]
    for key in keys:
        if key not in names:
            raise ParamsError(
                f"params.yaml: unknown key `data.{name}.{key}` of the format {dataset.format}{suggestion(key, names)}"
            )
    # a key without effect would be taken for one with effect
    origin_of_val: str = getattr(import_target(FORMATS[dataset.format]), "origin_of_val", "")
    for key in ("val_fraction", "group_near_duplicates"):
        if keys[key] and origin_of_val:
            raise ParamsError(
                f"params.yaml: `data.{name}.{key}`: the format {dataset.format} takes its splits from its files; "
                f"remove the key ({origin_of_val.format(name=name)})"
            )
    return build(cls, keys, where=f"data.{name}")


def params_class(name: str) -> type[SourceParams]:
    """Return the dataclass with the keys of a format: the annotation of its reader's `params`.

    Raises:
        ParamsError: a plugin's annotation is not such a class.
    """
    reader = import_target(FORMATS[name])
    annotation = getattr(reader, "__annotations__", {}).get("params", SourceParams)
    try:
        # a string with `from __future__ import annotations`
        cls = typing.get_type_hints(reader)["params"] if isinstance(annotation, str) else annotation
    except (NameError, TypeError, SyntaxError) as error:
        raise ParamsError(f"plugin {FORMATS[name]}: the annotation of `params`: {first_line(error)}") from None
    if isinstance(cls, type) and issubclass(cls, SourceParams) and dataclasses.is_dataclass(cls):
        return cls
    raise ParamsError(f"plugin {FORMATS[name]}: `params` must be annotated with a dataclass derived from SourceParams")


def filled_views(name: str) -> tuple[str, ...]:
    """Return the views that a format's reader fills (`@fills`), in order; all for a reader that does not name them."""
    declared: tuple[str, ...] | None = getattr(import_target(FORMATS[name]), "views", None)
    for view in declared or ():
        if view not in TABLES:
            raise ParamsError(
                f"plugin {FORMATS[name]}: `@fills`: no view `{view}` has a table{suggestion(view, TABLES)}"
            )
    return tuple(TABLES) if declared is None else declared


def _with_standard_splits(params: SourceParams) -> SourceParams:
    """Return the params with `validation`, `dev`, ... as keys of file lists replaced by the splits they stand for."""
    changed: dict[str, Any] = {}
    for section in params.file_keys:
        if not isinstance(getattr(params, section), dict):
            continue
        # `dev` and `val` in one section are one split
        lists: dict[str, list[str]] = {}
        for key, files in getattr(params, section).items():
            lists.setdefault(standard_split(key), []).extend(files)
        changed[section] = lists
    return dataclasses.replace(params, **changed)
