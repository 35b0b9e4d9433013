"""Readers of public dataset formats."""

from __future__ import annotations

from pathlib import Path

from vlp_models.data.formats.base import Tables
from vlp_models.params import SourceParams


def read_source(name: str, params: SourceParams, base: Path) -> Tables:
    """Reads one dataset; `base` is the directory that `params.root` is relative to.

    Raises:
        DataError: its directory or one of its files is missing or not in the format.
    """
    from vlp_models.data.formats import coco, nlvr, pairs, vcr

    readers = {"coco": coco.read, "nlvr": nlvr.read, "pairs": pairs.read, "vcr": vcr.read}
    return readers[params.format](name, params, base)
