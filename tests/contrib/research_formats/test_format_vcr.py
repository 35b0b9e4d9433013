"""The reader of genuine VCR, on lines in its form, good and bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams

OBJECTS = ["person", "dog", "cup", "person"]
BOXES = [[1.0, 2.0, 30.0, 40.0, 0.99], [5.0, 5.0, 9.0, 9.0, 0.5], [0, 0, 4, 4, 0.4], [20.0, 1.0, 31.0, 32.0, 0.3]]
IMAGE = "lsmdc_X/X_00.01@0"


def line(annot_id: str = "train-0", **changes: Any) -> dict[str, Any]:
    return {
        "movie": "X",
        "objects": OBJECTS,
        "interesting_scores": [0, -1],
        "answer_likelihood": "possible",
        "img_fn": f"{IMAGE}.jpg",
        "metadata_fn": f"{IMAGE}.json",
        "question_orig": "Why is 1 near 2 and 3?",
        "question": ["Why", "is", [0], "near", [1, 2], "?"],
        "answer_choices": [[[0], "is", "thirsty", "."], ["No", "."], ["It", "rains", "."], [[1], "'s", "barking", "."]],
        "answer_label": 0,
        "rationale_choices": [["A", "cup", "is", "close", "."], ["x", "."], ["y", "."], [[3], "waits", "."]],
        "rationale_label": 3,
        "img_id": "train-5",
        "question_number": 0,
        "annot_id": annot_id,
        **changes,
    }


def write(root: Path, split: str, lines: list[Any], metadata: dict[str, Any] | None = None) -> None:
    folder = root / "vcr1images" / "lsmdc_X"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines)
    (root / f"{split}.jsonl").write_text(text)
    found = {"boxes": BOXES, "segms": [[]] * 4, "names": OBJECTS, "width": 32, "height": 48} | (metadata or {})
    (root / "vcr1images" / f"{IMAGE}.json").write_text(json.dumps(found))
    Image.new("RGB", (32, 48)).save(root / "vcr1images" / f"{IMAGE}.jpg")


def load(tmp_path: Path, **params: Any) -> Tables:
    return read_source("vcr", DatasetParams.of(format="vcr", root="vcr", images="vcr1images", **params), tmp_path)


def test_tags_become_names_and_boxes_follow(tmp_path: Path) -> None:
    write(tmp_path / "vcr", "train", [line(), line("train-1", question=["Who", "is", [3], "?"])])
    tables = load(tmp_path)
    assert not tables["quarantine"]
    (image,) = tables["images"]
    assert (image["image_id"], image["split"], image["width"], image["height"]) == ("vcr/train-5", "train", 32, 48)
    assert image["path"] == str(tmp_path / "vcr" / "vcr1images" / f"{IMAGE}.jpg")
    first, second = tables["choices"]
    assert first["choice_id"] == "vcr/train-0" and first["image_id"] == "vcr/train-5"
    assert first["text"] == "Why is Alex near dog and cup ?"
    assert first["answers"] == ["Alex is thirsty .", "No .", "It rains .", "dog 's barking ."]
    assert first["rationales"][3] == "Blake waits ."
    assert (first["answer_label"], first["rationale_label"], first["provenance"]) == (0, 3, "train.jsonl:1")
    # objects of question and answers first, then the rest: only a rationale mentions the second person
    assert first["boxes"] == [box[:4] for box in BOXES]
    assert second["text"] == "Who is Blake ?"
    assert second["boxes"] == [BOXES[i][:4] for i in (0, 1, 3, 2)]
    assert [row["object_id"] for row in tables["objects"]] == [f"vcr/train-5#{i}" for i in range(4)]
    assert [row["category"] for row in tables["objects"]] == OBJECTS
    assert tables["objects"][1]["provenance"] == f"train.jsonl:1, {IMAGE}.json#boxes[1]"
    hidden = {key: value for key, value in line("test-0").items() if not key.endswith("_label")}
    write(tmp_path / "vcr", "test", [hidden])
    (row,) = load(tmp_path, splits=["test"])["choices"]
    assert row["answer_label"] is None and row["rationale_label"] is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "tag_known": ({"rationale_choices": [["a"], ["b"], [[4], "c"], ["d"]]}, "the tag 4 has no object: the line has 4"),
    "record_readable": ({"question": ["Why", [], "?"]}, "expected a word or a list of object numbers"),
    "four_choices": ({"answer_choices": [["a"], ["b"], ["c"]]}, "`answer_choices` does not have 4"),
    "label_known": ({"answer_label": 4}, "`answer_label` is 4"),
    "id_unique": ({"annot_id": "train-0"}, "is already used in train.jsonl:1"),
    "path_inside": ({"img_id": "train-9", "img_fn": "../../x.jpg"}, "not a path inside"),
    "image_id_unique": ({"img_fn": "lsmdc_X/other.jpg"}, "img_id train-5 is lsmdc_X/other.jpg here"),
    "objects_match": ({"objects": ["person"]}, "objects differ from the first line"),
    "metadata_readable": ({"img_id": "train-9", "metadata_fn": "lsmdc_X/no.json"}, "no such file"),
}


def test_bad_lines_are_quarantined_with_line_and_reason(tmp_path: Path) -> None:
    bad_lines = [line(f"train-{i}") | changes for i, (changes, _) in enumerate(BAD.values(), start=1)]
    write(tmp_path / "vcr", "train", [line(), *bad_lines, "{broken", line("train-99")])
    tables = load(tmp_path)
    assert [row["choice_id"] for row in tables["choices"]] == ["vcr/train-0", "vcr/train-99"]
    assert len(tables["images"]) == 1
    found = {row["provenance"]: row for row in tables["quarantine"]}
    for number, (rule, (_, reason)) in enumerate(BAD.items(), start=2):
        row = found.pop(f"train.jsonl:{number}")
        assert (row["table"], row["rule"]) == ("choices", rule)
        assert reason in row["reason"]
        assert row["row_id"] == ("vcr/train-0" if rule == "id_unique" else f"vcr/train-{number - 1}")
    assert {row["rule"] for row in found.values()} == {"record_readable"} and len(found) == 1


@pytest.mark.parametrize(
    ("metadata", "rule"),
    [
        ({"boxes": BOXES[:3]}, "objects_match"),
        ({"names": ["cup"] * 4}, "objects_match"),
        ({"boxes": [1] * 4}, "box_readable"),
    ],
)
def test_inconsistent_metadata_costs_every_line_of_the_image(
    tmp_path: Path, metadata: dict[str, Any], rule: str
) -> None:
    write(tmp_path / "vcr", "train", [line(), line("train-1")], metadata)
    tables = load(tmp_path)
    assert not tables["choices"] and not tables["images"] and not tables["objects"]
    assert [(row["rule"], row["provenance"]) for row in tables["quarantine"]] == [
        (rule, "train.jsonl:1"),
        (rule, "train.jsonl:2"),
    ]


def test_many_persons_share_names_and_missing_files_are_named(tmp_path: Path) -> None:
    from vlp_models.contrib.research_formats.vcr import NAMES, name_objects

    assert len(set(NAMES)) == len(NAMES) == 13
    assert name_objects(["cup", *["person"] * 14]) == ["cup", *NAMES, NAMES[0]]
    with pytest.raises(DataError, match=r"visualcommonsense\.com"):
        load(tmp_path)
    write(tmp_path / "vcr", "val", [line(), line("train-1")])
    assert len(load(tmp_path, limit=1)["choices"]) == 1


def test_unknown_size_and_a_repeated_id(tmp_path: Path) -> None:
    lines = [line(answer_label=9), line(), line(question=["Again", "?"])]
    write(tmp_path / "vcr", "train", lines, metadata={"width": None, "height": "48"})
    tables = load(tmp_path)
    assert [(row["width"], row["height"]) for row in tables["images"]] == [(None, None)]
    assert [row["provenance"] for row in tables["choices"]] == ["train.jsonl:2"], "the first readable one"
    assert [row["rule"] for row in tables["quarantine"]] == ["label_known", "id_unique"]


def test_metadata_is_found_in_another_letter_case_and_else_the_nearest_name_is_shown(tmp_path: Path) -> None:
    other = IMAGE.replace("X_00", "XX_00")
    lines = [line(), line("train-1", img_id="train-6", metadata_fn=f"{other}.json", img_fn=f"{other}.jpg")]
    write(tmp_path / "vcr", "train", lines)
    folder = tmp_path / "vcr" / "vcr1images" / "lsmdc_X"
    (folder / "X_00.01@0.json").rename(folder / "x_00.01@0.JSON")
    tables = load(tmp_path)
    assert [row["choice_id"] for row in tables["choices"]] == ["vcr/train-0"]
    ((rule, reason),) = [(row["rule"], row["reason"]) for row in tables["quarantine"]]
    assert rule == "metadata_readable" and "lsmdc_X/XX_00.01@0.json: no such file; the nearest name there is" in reason
