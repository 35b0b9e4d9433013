"""Readers of public dataset formats, by their name in params.yaml."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vlp_models.common.plugins import Table, import_target
from vlp_models.data.formats.base import Tables
from vlp_models.data.tables import standard_split
from vlp_models.data.views import TABLES
from vlp_models.errors import ParamsError
from vlp_models.params import SourceParams
from vlp_models.params.schema import check_known, suggestion

FORMATS = Table(
    "formats",
    {
        "coco": "vlp_models.data.formats.coco:read",
        "nlvr": "vlp_models.data.formats.nlvr:read",
        "nlvr2": "vlp_models.data.formats.nlvr:read_nlvr2",
        "pairs": "vlp_models.data.formats.pairs:read",
        "hf": "vlp_models.data.formats.hf:read",
        "vcr": "vlp_models.data.formats.vcr:read",
        "texts": "vlp_models.data.formats.pairs:read_texts",
        "snli_ve": "vlp_models.data.formats.snli_ve:read",
        "esnli_ve": "vlp_models.data.formats.snli_ve:read_esnli_ve",
        "flickr8k": "vlp_models.data.formats.flickr:read_flickr8k",
        "flickr30k": "vlp_models.data.formats.flickr:read_flickr30k",
        "daquar": "vlp_models.data.formats.daquar:read",
        "conceptual_captions": "vlp_models.data.formats.downloaded:read_conceptual_captions",
        "sbu": "vlp_models.data.formats.downloaded:read_sbu",
        "visual_genome": "vlp_models.data.formats.visual_genome:read",
    },
)


def read_source(name: str, params: SourceParams, base: Path) -> Tables:
    """Read one dataset.

    Args:
        base: the directory that `params.root` is relative to.

    Raises:
        ParamsError: an unknown format, or rows of a view that the reader does not name.
        DataError: its directory or one of its files is missing or not in the format.
    """
    check_known(params.format, FORMATS, f"data.{name}.format")
    tables: Tables = import_target(FORMATS[params.format])(name, _with_standard_splits(params), base)
    for view in sorted(TABLES.keys() - set(filled_views(params.format))):
        if len(tables[view]):
            raise ParamsError(
                f"plugin {FORMATS[params.format]}: it fills the view `{view}`, which its `@fills(...)` does not name"
            )
    return tables


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
    for section in ("captions", "instances", "questions", "annotations", "texts", "split_files"):
        lists: dict[str, list[str]] = {}
        for key, files in getattr(params, section).items():
            lists.setdefault(standard_split(key), []).extend(files)
        changed[section] = lists
    return dataclasses.replace(params, **changed)
