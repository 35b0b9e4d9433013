"""Fingerprint of a test set, and the slices of it that a gate can set floors for.

Two evaluations are comparable only if the fingerprints of their test sets are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from vlp_models.common.io import hash_file
from vlp_models.curation.validation.text import count_words
from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_languages, read_rows_of
from vlp_models.data.views import View


def hash_shards(shards: Path) -> str:
    """Hash the shards' manifest and indexes (ids, texts, detector): first 16 hex digits of the SHA-256."""
    files = [shards / "manifest.json", *sorted(shards.glob("index-*.parquet"))]
    lines = "".join(f"{file.name} {hash_file(file)}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def hash_test_set(samples: Iterable[Sample], view: View, validated: Path) -> str:
    """Hash what is to be predicted: ids, the view's texts and answers, and the images' bytes; first 16 hex digits.

    The detector and the training data are not part of it: models with other features take the same test. Neither are
    columns of other views, so adding one keeps every fingerprint.
    """
    # Sorted, so that the order in which samples are read does not count.
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    image_ids = pa.array({image_id for sample in ordered for image_id in sample.image_ids}, pa.string())
    images = read_rows_of(image_ids, "images", validated, ["image_id", "sha256"])
    pixels = dict(zip(images["image_id"].to_pylist(), images["sha256"].to_pylist(), strict=True))
    digest = hashlib.sha256()
    for sample in ordered:
        values = {column.name: sample.values.get(column.name) for column in view.indexed if column.name != "text"}
        # Hashes of the files, so a re-encoded image makes another test.
        hashes = [pixels.get(image_id, "") for image_id in sample.image_ids]
        row = [sample.sample_id, sample.image_id, sample.source, sample.text, values, *hashes]
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()[:16]


TEXT_LENGTHS = ((6, "1-6"), (10, "7-10"), (15, "11-15"))  # words, then 16+
OBJECT_COUNTS = ((0, "0"), (2, "1-2"), (5, "3-5"))  # objects, then 6+


def slices_of(
    samples: Sequence[Sample], validated: Path, task_slices: Callable[[Sample], list[str]] = lambda sample: []
) -> dict[str, list[str]]:
    """Return sample id -> its slices, such as `question_type=how many` or `objects=6+`.

    `dataset`; `language` of the references, if their dataset names languages (`several`: not of one); `objects` (of all
    its images, if the dataset has object annotations); `caption_length` (median number of words of the references) or
    `text_length`; and the task's own slices, from `task_slices`.
    """
    image_ids = pa.array({image_id for sample in samples for image_id in sample.image_ids}, pa.string())
    # A row per object, so the count of an id is the image's number of objects.
    objects = Counter(read_rows_of(image_ids, "objects", validated, ["image_id"])["image_id"].to_pylist())
    # An image without objects counts 0 if its dataset (the id's part before `/`) has annotations, else it has no slice.
    with_objects = {image_id.partition("/")[0] for image_id in objects}
    languages: dict[str, str] = {}
    for language, captions in read_languages(validated, set(image_ids.to_pylist())).items():
        for image_id in captions:
            languages[image_id] = "several" if image_id in languages else language
    result: dict[str, list[str]] = {}
    for sample in samples:
        slices = [f"dataset={sample.source}"]
        if sample.image_id.partition("/")[0] in with_objects:
            # NLVR2 has two images per sample.
            count = sum(objects[image_id] for image_id in sample.image_ids)
            slices.append(f"objects={_bin(count, OBJECT_COUNTS, '6+')}")
        if sample.values.get("captions") and sample.image_id in languages:
            slices.append(f"language={languages[sample.image_id]}")
        if sample.values.get("captions"):
            lengths = sorted(count_words(caption) for caption in sample["captions"])
            # The upper one of two medians.
            slices.append(f"caption_length={_bin(lengths[len(lengths) // 2], TEXT_LENGTHS, '16+')}")
        elif sample.text:
            slices.append(f"text_length={_bin(count_words(sample.text), TEXT_LENGTHS, '16+')}")
        result[sample.sample_id] = slices + task_slices(sample)
    return result


def _bin(value: int, bins: tuple[tuple[int, str], ...], last: str) -> str:
    # The first bin that the value fits into.
    return next((name for top, name in bins if value <= top), last)
