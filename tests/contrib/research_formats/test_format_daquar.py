"""DAQUAR: two lines a question, photos by their number, answers that are sets, and a line that is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams

PAIRS = [
    ("what is on the desk in the image1 ?", "tape_dispenser, book"),
    ("how many chairs are there in the image1 ?", "3"),
    ("what is the color of the sofa in this image2 behind the door in the image2 ?", "red"),
    ("what is on the floor in the image3 ?", "book, tape_dispenser, book"),
]


def write(root: Path, pairs: list[tuple[str, str]] = PAIRS) -> None:
    (root / "images").mkdir(parents=True)
    (root / "all_qa_pairs.txt").write_text("\n".join(line for pair in pairs for line in pair))
    (root / "train_images_list.txt").write_text("image1\nimage3")
    (root / "test_images_list.txt").write_text("image2\n")
    (root / "images" / "image3.png").touch()


def load(tmp_path: Path, **params: Any) -> Tables:
    return read_source("d", DatasetParams.of(format="daquar", root="d", **params), tmp_path)


def test_questions_photos_and_answers(tmp_path: Path) -> None:
    write(tmp_path / "d")
    tables = load(tmp_path)
    assert not tables["quarantine"]
    assert [(row["image_id"], row["split"], Path(row["path"]).name) for row in tables["images"]] == [
        ("d/image1", "train", "image1.jpg"),
        ("d/image2", "test", "image2.jpg"),
        ("d/image3", "train", "image3.png"),
    ]
    assert tables["questions"][0] == {
        "question_id": "d/1",
        "image_id": "d/image1",
        "text": "what is on the desk in the image ?",
        "question_type": "what",
        "answer_type": "other",
        "answers": ["book, tape_dispenser"],
        "provenance": "all_qa_pairs.txt:1",
    }
    kinds = [(row["question_type"], row["answer_type"]) for row in tables["questions"]]
    assert kinds == [("what", "other"), ("how many", "number"), ("what color", "other"), ("what", "other")]
    assert tables["questions"][3]["answers"] == tables["questions"][0]["answers"], "an answer is a set"
    assert not any(digit in row["text"] for row in tables["questions"] for digit in "0123456789")


def test_a_file_that_is_no_image_is_not_a_photo(tmp_path: Path) -> None:
    write(tmp_path / "d")
    for name in ("image1.JPG", "image1.txt", "image2.mat", "image3.png.json"):
        (tmp_path / "d" / "images" / name).touch()
    assert [Path(row["path"]).name for row in load(tmp_path)["images"]] == ["image1.JPG", "image2.jpg", "image3.png"]


def test_one_file_per_split_gives_the_same_questions(tmp_path: Path) -> None:
    write(tmp_path / "d")
    whole = load(tmp_path)
    (tmp_path / "d" / "all_qa_pairs.txt").unlink()
    for split, chosen in (("train", [0, 1, 3]), ("test", [2])):
        lines = "\n".join(line for number in chosen for line in PAIRS[number])
        (tmp_path / "d" / f"qa.894.raw.{split}.txt").write_text(lines)
    tables = load(tmp_path)
    assert {row["image_id"]: row["split"] for row in tables["images"]} == {
        row["image_id"]: row["split"] for row in whole["images"]
    }
    assert sorted(row["text"] for row in tables["questions"]) == sorted(row["text"] for row in whole["questions"])
    held = load(tmp_path, val_fraction=1.0)
    assert {row["split"] for row in held["images"]} == {"val", "test"}
    (tmp_path / "d" / "mine.txt").write_text("image3\n")
    divided = load(tmp_path, split_files={"train": ["train_images_list.txt"], "val": ["mine.txt"]})
    assert {row["image_id"]: row["split"] for row in divided["images"]} == {"d/image1": "train", "d/image3": "train"}
    divided = load(tmp_path, split_files={"val": ["mine.txt"], "train": ["train_images_list.txt"]})
    assert {row["image_id"]: row["split"] for row in divided["images"]} == {"d/image1": "train", "d/image3": "val"}
    assert divided.skipped["questions about unlisted photos"] == 1


def test_questions_of_several_files_of_a_split_have_ids_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "d")
    for file, chosen in (("more/a.txt", [0, 1]), ("more/b.txt", [3]), ("b.txt", [3]), ("test.txt", [2])):
        (tmp_path / "d" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / file).write_text("\n".join(line for number in chosen for line in PAIRS[number]))

    def ids(train: list[str]) -> list[str]:
        tables = load(tmp_path, questions={"train": train, "test": ["test.txt"]})
        assert not tables["quarantine"]
        return [row["question_id"] for row in tables["questions"]]

    assert ids(["more/a.txt"]) == ["d/train-1", "d/train-3", "d/test-1"], "one file: without its name"
    assert ids(["more/a.txt", "more/b.txt"]) == ["d/train-a-1", "d/train-a-3", "d/train-b-1", "d/test-1"]
    assert ids(["b.txt", "more/b.txt"]) == ["d/train-b.txt-1", "d/train-more/b.txt-1", "d/test-1"]
    (tmp_path / "d" / "all.txt").write_text("\n".join(PAIRS[2]))
    tables = load(tmp_path, questions={"all": ["more/a.txt", "all.txt"]})
    assert [row["question_id"] for row in tables["questions"]] == ["d/a-1", "d/a-3", "d/all-1"]


def test_missing_line_costs_only_its_own_pair(tmp_path: Path) -> None:
    lines = [line for pair in PAIRS for line in pair]
    write(tmp_path / "d", [])
    for missing, lost in ((3, "a question without an answer"), (4, "a question names its photo")):
        (tmp_path / "d" / "all_qa_pairs.txt").write_text("\n".join(lines[:missing] + lines[missing + 1 :]))
        tables = load(tmp_path)
        assert len(tables["questions"]) == 3
        (row,) = tables["quarantine"]
        assert row["reason"].startswith(lost)


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match=r"contains neither all_qa_pairs\.txt nor qa\.894"):
        load(tmp_path)
    (tmp_path / "d" / "all_qa_pairs.txt").write_text("a text\nand another\n")
    (tmp_path / "d" / "train_images_list.txt").write_text("image1\n")
    with pytest.raises(DataError, match="no question about a photo"):
        load(tmp_path)
