"""Fingerprint of a test set: it covers inputs and answers and nothing else; slices of samples with several images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from samples import with_values

from vlp_models.data.sample import Sample, SampleImage
from vlp_models.data.tables import write_table
from vlp_models.data.views import VIEWS
from vlp_models.evaluation.test_set import hash_test_set as fingerprint
from vlp_models.evaluation.test_set import slices_of

SAMPLES = [
    Sample(
        sample_id=f"d/q{i}",
        image_id=f"d/{i}",
        source="d",
        text="how many?",
        values={"answers": (str(i),) * 10, "question_type": "how many", "answer_type": "number"},
    )
    for i in range(3)
]


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    return write(tmp_path, "0")


def write(directory: Path, digit: str) -> Path:
    about = {"source": "d", "split": "test", "path": "", "width": 1, "height": 1, "provenance": ""}
    write_table([{"image_id": f"d/{i}", "sha256": digit * 64, **about} for i in range(5)], "images", directory)
    return directory


@pytest.mark.parametrize(
    "changed",
    [
        SAMPLES[:2],
        [*SAMPLES[:2], replace(SAMPLES[2], text="how many cups?")],
        [*SAMPLES[:2], with_values(SAMPLES[2], answers=("7",) * 10)],
        [*SAMPLES[:2], replace(SAMPLES[2], image_id="d/1")],
    ],
)
def test_inputs_and_answers_matter(validated: Path, changed: list[Sample]) -> None:
    view = VIEWS["questions"]
    assert fingerprint(changed, view, validated) != fingerprint(SAMPLES, view, validated)


def test_image_bytes_matter_and_columns_of_other_views_and_order_do_not(validated: Path) -> None:
    view = VIEWS["questions"]
    before = fingerprint(SAMPLES, view, validated)
    assert fingerprint([with_values(sample, a_new_field=1) for sample in SAMPLES], view, validated) == before
    assert fingerprint(SAMPLES[::-1], view, validated) == before
    assert fingerprint(SAMPLES, view, write(validated, "1")) != before


def test_every_image_of_a_sample_matters(validated: Path) -> None:
    pair = [replace(SAMPLES[0], others=(SampleImage(image_id="d/4"),), values={"other_image_ids": ("d/4",)})]
    view = VIEWS["image_pairs"]
    before = fingerprint(pair, view, validated)
    about = {"source": "d", "split": "test", "path": "", "width": 1, "height": 1, "provenance": ""}
    rows = [{"image_id": f"d/{i}", "sha256": str(int(i == 4)) * 64, **about} for i in range(5)]
    write_table(rows, "images", validated)
    assert fingerprint(pair, view, validated) != before
    assert fingerprint(SAMPLES[:1], view, validated) == fingerprint(SAMPLES[:1], view, write(validated, "0"))


def test_objects_are_counted_over_every_image_of_a_sample(tmp_path: Path) -> None:
    box = {"category": "cup", "x1": 0.0, "y1": 0.0, "x2": 1.0, "y2": 1.0, "attributes": None, "provenance": ""}
    objects = [{"object_id": f"d/{n}", "image_id": f"d/{int(n < 2)}", **box} for n in range(5)]
    write_table(objects, "objects", tmp_path)
    pair = replace(SAMPLES[0], others=(SampleImage(image_id="d/1"),))
    assert "objects=3-5" in slices_of([pair], tmp_path)["d/q0"]
    assert "objects=1-2" in slices_of([SAMPLES[1]], tmp_path)["d/q1"]
