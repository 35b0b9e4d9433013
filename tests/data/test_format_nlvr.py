"""The reader of genuine NLVR, on files in its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlp_models.data.formats.base import Tables
from vlp_models.data.formats.nlvr import read
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

ITEM = {"x_loc": 10, "y_loc": 80, "size": 20, "type": "square", "color": "#0099ff"}
OTHER = {"x_loc": 0, "y_loc": 5, "size": 10, "type": "circle", "color": "Yellow"}


def line(identifier: str, **changes: Any) -> dict[str, Any]:
    return {
        "sentence": "There is a blue  square",
        "label": "true",
        "identifier": identifier,
        "directory": "4",
        "evals": {"r1": "true"},
        "structured_rep": [[ITEM], [OTHER], []],
        **changes,
    }


def write_split(root: Path, split: str, lines: list[Any], *, missing: tuple[str, ...] = ()) -> None:
    (root / split).mkdir(parents=True)
    text = "".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines)
    (root / split / f"{split}.json").write_text(text)
    for entry in lines:
        if isinstance(entry, str):
            continue
        folder = root / split / "images" / str(entry.get("directory", "0"))
        folder.mkdir(parents=True, exist_ok=True)
        for k in range(6):
            name = f"{split}-{entry['identifier']}-{k}.png"
            if name not in missing:
                Image.new("RGBA", (400, 100)).save(folder / name)


def load(tmp_path: Path, **params: Any) -> Tables:
    return read("nlvr", SourceParams(format="nlvr", root="nlvr", **params), tmp_path)


def test_one_row_and_one_statement_for_each_order_of_the_boxes(tmp_path: Path) -> None:
    write_split(tmp_path / "nlvr", "dev", [line("7-0"), line("7-1", label="false")])
    tables = load(tmp_path)
    assert [row["image_id"] for row in tables["images"][:6]] == [f"nlvr/dev-7-0-{k}" for k in range(6)]
    assert {row["split"] for row in tables["images"]} == {"test"}
    assert {row["group"] for row in tables["statements"]} == {"nlvr/dev-7"}
    assert [row["label"] for row in tables["statements"]] == [True] * 6 + [False] * 6
    assert tables["statements"][0]["text"] == "There is a blue square"
    assert tables["captions"] == []  # pretraining sees no pair of a test image
    assert tables["statements"][7]["provenance"] == "dev/dev.json:2"


def test_boxes_lie_where_the_order_puts_them(tmp_path: Path) -> None:
    write_split(tmp_path / "nlvr", "train", [line("7-0")])
    tables = load(tmp_path)
    left = {
        k: [row["x1"] for row in tables["objects"] if row["image_id"] == f"nlvr/train-7-0-{k}"] for k in range(6)
    }  # of the blue square, box 0, and the yellow circle, box 1
    assert left == {0: [10, 150], 1: [10, 300], 2: [160, 0], 3: [310, 0], 4: [160, 300], 5: [310, 150]}
    first, moved = tables["objects"][0], tables["objects"][4]
    assert first["attributes"] == ["left", "medium", "wall", "base"]
    assert moved["attributes"][0] == "middle"
    assert (first["category"], first["y1"], first["x2"], first["y2"]) == ("blue square", 80, 30, 100)


def test_true_training_sentences_are_captions_and_whole_directories_are_held_out(tmp_path: Path) -> None:
    lines = [line("1-0"), line("1-1", label="false"), line("2-0", directory="9")]
    write_split(tmp_path / "nlvr", "train", lines)
    tables = load(tmp_path, validation_directories=["9"])
    split = {row["image_id"]: row["split"] for row in tables["images"]}
    assert split["nlvr/train-1-0-0"] == "train" and split["nlvr/train-2-0-0"] == "val"
    assert {row["image_id"].rpartition("-")[0] for row in tables["captions"]} == {"nlvr/train-1-0", "nlvr/train-2-0"}


def test_hidden_labels_are_null_and_images_are_found_without_a_directory(tmp_path: Path) -> None:
    entry = line("3-0")
    del entry["label"], entry["directory"]
    write_split(tmp_path / "nlvr", "hidden", [entry])
    tables = load(tmp_path)
    assert len(tables["images"]) == 6 and {row["label"] for row in tables["statements"]} == {None}


def test_bad_records_are_set_aside_with_their_line(tmp_path: Path) -> None:
    bad_item = line("4-0", structured_rep=[[{**ITEM, "color": "mauve"}, OTHER], [], []])
    lines = [
        line("1-0"),
        line("2-0", label="maybe"),
        "{broken",
        bad_item,
        line("1-0", sentence="again"),
        line("5-0", structured_rep=[[ITEM]]),
    ]
    write_split(tmp_path / "nlvr", "train", lines, missing=("train-1-0-3.png",))
    tables = load(tmp_path)
    found = {(row["rule"], row["provenance"].removeprefix("train/")) for row in tables["quarantine"]}
    assert found == {
        ("image_exists", "train.json:1"),
        ("label_known", "train.json:2"),
        ("record_readable", "train.json:3"),
        ("category_known", "train.json:4"),
        ("id_unique", "train.json:5"),
        ("record_readable", "train.json:6"),
    }
    assert {row["image_id"].split("-")[1] for row in tables["statements"]} == {"1", "4", "5"}
    assert "nlvr/train-1-0-3" not in {row["image_id"] for row in tables["images"]}
    assert [row["category"] for row in tables["objects"] if "train-4-0-0" in row["image_id"]] == ["yellow circle"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lil-lab/nlvr"):
        load(tmp_path)
    write_split(tmp_path / "nlvr", "dev", [line("7-0")])
    with pytest.raises(DataError, match=r"train\.json"):
        load(tmp_path, splits=["train"])
    with pytest.raises(DataError, match="no split 'trian'"):
        load(tmp_path, splits=["trian"])


def test_limit_keeps_the_first_lines(tmp_path: Path) -> None:
    write_split(tmp_path / "nlvr", "dev", [line("7-0"), line("7-1"), line("8-0")])
    assert len(load(tmp_path, limit=2)["images"]) == 12
