"""Readers of public dataset formats."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from vlp_models.data.formats.base import Tables
from vlp_models.params import SourceParams

# format -> the module whose `read` reads it
READERS = {name: f"vlp_models.data.formats.{name}" for name in ("coco", "nlvr", "pairs", "snli_ve", "texts", "vcr")}


def read_source(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads one dataset; `base` is the directory that `params.root` is relative to.

    Raises:
        DataError: its directory or one of its files is missing or not in the format.
    """
    reader = import_module(READERS[params.format])
    tables: Tables = reader.read(name, params, base)
    return tables
