"""Slices of a test set by which a gate can ask for floors: `question_type=how many`, `objects=6+`, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_table

LENGTHS = ((6, "1-6"), (10, "7-10"), (15, "11-15"))  # words, then 16+
COUNTS = ((0, "0"), (2, "1-2"), (5, "3-5"))  # objects, then 6+


def slices_of(
    samples: Sequence[Sample], validated: Path, own: Callable[[Sample], list[str]] = lambda sample: []
) -> dict[str, list[str]]:
    """Sample id -> the slices it belongs to.

    `dataset`, `objects` (of all its images; where the dataset's samples have any), `caption_length` (words of an
    image's references, their median) or `text_length`, and those of the task, which `own` gives.
    """
    table = read_table("objects", validated, columns=["image_id"])
    wanted = pa.array({image_id for sample in samples for image_id in sample.image_ids}, pa.string())
    objects = Counter(table.filter(pc.is_in(table["image_id"], value_set=wanted))["image_id"].to_pylist())
    with_objects = {image_id.partition("/")[0] for image_id in objects}
    result: dict[str, list[str]] = {}
    for sample in samples:
        found = [f"dataset={sample.source}"]
        if sample.image_id.partition("/")[0] in with_objects:
            there = sum(objects[image_id] for image_id in sample.image_ids)
            found.append(f"objects={_bin(there, COUNTS, '6+')}")
        if sample.values.get("captions"):
            lengths = sorted(len(caption.split()) for caption in sample["captions"])
            found.append(f"caption_length={_bin(lengths[len(lengths) // 2], LENGTHS, '16+')}")
        elif sample.text:
            found.append(f"text_length={_bin(len(sample.text.split()), LENGTHS, '16+')}")
        result[sample.sample_id] = found + own(sample)
    return result


def _bin(value: int, bins: tuple[tuple[int, str], ...], last: str) -> str:
    return next((name for top, name in bins if value <= top), last)
