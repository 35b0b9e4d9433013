"""Slices of a test set by which a gate can ask for floors: `question_type=how many`, `objects=6+`, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_table

LENGTHS = ((6, "1-6"), (10, "7-10"), (15, "11-15"))  # words, then 16+
COUNTS = ((0, "0"), (2, "1-2"), (5, "3-5"))  # objects, then 6+


def slices_of(samples: Sequence[Sample], validated: Path) -> dict[str, list[str]]:
    """Sample id -> the slices it belongs to.

    `dataset`, `objects` (where the dataset has any), `caption_length` (words of an image's references, their median) or
    `text_length`, and of questions `question_type` and `answer_type`.
    """
    table = read_table("objects", validated)
    objects = Counter(table["image_id"].to_pylist())
    with_objects = {image_id.partition("/")[0] for image_id in objects}
    result: dict[str, list[str]] = {}
    for sample in samples:
        own = [f"dataset={sample.source}"]
        if sample.image_id.partition("/")[0] in with_objects:
            own.append(f"objects={_bin(objects[sample.image_id], COUNTS, '6+')}")
        if sample.captions:
            lengths = sorted(len(caption.split()) for caption in sample.captions)
            own.append(f"caption_length={_bin(lengths[len(lengths) // 2], LENGTHS, '16+')}")
        elif sample.text:
            own.append(f"text_length={_bin(len(sample.text.split()), LENGTHS, '16+')}")
        own += [f"{name}={getattr(sample, name)}" for name in ("question_type", "answer_type") if getattr(sample, name)]
        result[sample.sample_id] = own
    return result


def _bin(value: int, bins: tuple[tuple[int, str], ...], last: str) -> str:
    return next((name for top, name in bins if value <= top), last)
