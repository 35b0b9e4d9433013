"""The reader of genuine NLVR, on files in its layout."""

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
    return read_source("nlvr", DatasetParams.of(format="nlvr", root="nlvr", **params), tmp_path)


def test_one_row_and_one_statement_for_each_order_of_the_boxes(tmp_path: Path) -> None:
    write_split(tmp_path / "nlvr", "dev", [line("7-0"), line("7-1", label="false")])
    tables = load(tmp_path)
    assert [row["image_id"] for row in tables["images"][:6]] == [f"nlvr/dev-7-0-{k}" for k in range(6)]
    assert {row["split"] for row in tables["images"]} == {"test"}
    assert {row["group"] for row in tables["statements"]} == {"nlvr/dev-7"}
    assert [row["label"] for row in tables["statements"]] == [True] * 6 + [False] * 6
    assert tables["statements"][0]["text"] == "There is a blue square"
    assert tables["captions"] == []  # no test image is used in pretraining
    assert tables["statements"][7]["provenance"] == "dev/dev.json:2"


def test_boxes_follow_the_order(tmp_path: Path) -> None:
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


def test_bad_records_are_quarantined_with_their_line(tmp_path: Path) -> None:
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


def test_limit_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lil-lab/nlvr"):
        load(tmp_path)
    write_split(tmp_path / "nlvr", "dev", [line("7-0"), line("7-1"), line("8-0")])
    assert len(load(tmp_path, limit=2)["images"]) == 12


def nlvr2_line(identifier: str = "dev-850-0-0", **changes: Any) -> dict[str, Any]:
    """As a genuine line is, with a sentence of our own."""
    train = {"directory": 17} if identifier.startswith("train") else {"extra_validations": {"5": "True"}}
    return {
        "validation": {"21": "True"},
        "sentence": "Both pictures show \n a cup.",
        "left_url": "https://example.org/left.jpg",
        "writer": "19",
        "label": "True",
        "query": "cups4",
        "right_url": "https://example.org/right.jpg",
        "synset": "cup",
        "identifier": identifier,
        **train,
        **changes,
    }


def write(root: Path, split: str, rows: list[Any]) -> None:
    (root / "data").mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (root / "data" / f"{split}.json").write_text("\n".join(lines) + "\n")


def load_nlvr2(tmp_path: Path, **params: Any) -> Tables:
    return read_source("n", DatasetParams.of(format="nlvr2", root="nlvr2", **params), tmp_path)


def test_lines_become_pairs_that_share_their_images(tmp_path: Path) -> None:
    root = tmp_path / "nlvr2"
    write(
        root,
        "train",
        [*map(nlvr2_line, ("train-3-0-0", "train-3-0-1")), nlvr2_line("train-4-2-1", label="False", directory=5)],
    )
    write(root, "dev", [nlvr2_line()])
    write(root, "test1", [nlvr2_line("test1-0-1-0", label="false")])
    tables = load_nlvr2(tmp_path, validation_directories=["5"])
    assert not tables["quarantine"]
    assert tables["image_pairs"][0] == {
        "pair_id": "n/train-3-0-0",
        "image_id": "n/train-3-0-img0",
        "other_image_ids": ["n/train-3-0-img1"],
        "text": "Both pictures show a cup.",
        "label": True,
        "group": "n/train-3-0",
        "provenance": "train.json:1",
    }
    found = {row["pair_id"]: (row["label"], row["group"]) for row in tables["image_pairs"]}
    assert found["n/train-3-0-1"] == (True, "n/train-3-1")
    assert found["n/train-4-2-1"] == (False, "n/train-4-1"), 'bool("False") would be true'
    assert found["n/test1-0-1-0"] == (False, "n/test1-0-0")
    images = {
        row["image_id"]: (row["split"], Path(row["path"]).relative_to(root).as_posix()) for row in tables["images"]
    }
    assert images == {
        "n/train-3-0-img0": ("train", "images/train/17/train-3-0-img0.png"),
        "n/train-3-0-img1": ("train", "images/train/17/train-3-0-img1.png"),
        "n/train-4-2-img0": ("val", "images/train/5/train-4-2-img0.png"),
        "n/train-4-2-img1": ("val", "images/train/5/train-4-2-img1.png"),
        "n/dev-850-0-img0": ("test", "images/dev/dev-850-0-img0.png"),
        "n/dev-850-0-img1": ("test", "images/dev/dev-850-0-img1.png"),
        "n/test1-0-1-img0": ("test", "images/test1/test1-0-1-img0.png"),
        "n/test1-0-1-img1": ("test", "images/test1/test1-0-1-img1.png"),
    }
    assert len(tables["images"]) == len(images), "an image is listed once, however many sentences are about it"


def test_files_are_found_in_both_layouts_and_hidden_labels_are_null(tmp_path: Path) -> None:
    root = tmp_path / "nlvr2"
    hidden = nlvr2_line()
    del hidden["label"]
    write(root, "dev", [hidden])
    (root / "dev").mkdir()
    (root / "dev" / "dev-850-0-img1.png").touch()
    tables = load_nlvr2(tmp_path, splits=["dev"])
    assert [row["label"] for row in tables["image_pairs"]] == [None]
    assert [Path(row["path"]).parent.relative_to(root).as_posix() for row in tables["images"]] == ["images/dev", "dev"]
    root.rename(tmp_path / "moved")  # annotations in the repository, images next to it
    root.mkdir()
    (tmp_path / "moved").rename(root / "nlvr2")
    assert len(load_nlvr2(tmp_path)["image_pairs"]) == 1


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"label": "maybe"}, "label_known"),
        ({"label": 1}, "label_known"),
        ({"sentence": None}, "record_readable"),
        ({"sentence": "\udcff"}, "text_utf8"),
        ({"identifier": "train-1-2"}, "identifier_form"),
        ({"identifier": "dev-1-2-3"}, "identifier_form"),
        ({"identifier": "train-../../etc-2-3"}, "identifier_form"),
        ({"identifier": "train-1-2-3\n"}, "identifier_form"),
        ({"identifier": "train-1-0-0"}, "id_unique"),
        ({"directory": "../../etc"}, "path_inside"),
        ({"directory": "/etc"}, "path_inside"),
        ({"directory": None}, "record_readable"),
    ],
)
def test_bad_nlvr2_line_is_quarantined_and_reading_continues(
    tmp_path: Path, changes: dict[str, Any], rule: str
) -> None:
    bad = {**nlvr2_line("train-5-0-0"), **changes}
    write(tmp_path / "nlvr2", "train", [nlvr2_line("train-1-0-0"), bad, "[1]", nlvr2_line("train-6-0-0")])
    tables = load_nlvr2(tmp_path)
    assert [row["pair_id"] for row in tables["image_pairs"]] == ["n/train-1-0-0", "n/train-6-0-0"]
    assert len(tables["images"]) == 4, "nothing of the bad line is left"
    found = {(row["table"], row["rule"], row["provenance"]) for row in tables["quarantine"]}
    assert found == {
        ("image_pairs", rule, "train.json:2"),
        ("image_pairs", "record_readable", "train.json:3"),
    }


def test_limit_and_missing_files_of_nlvr2(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lil-lab/nlvr"):
        load_nlvr2(tmp_path)
    write(tmp_path / "nlvr2", "dev", [nlvr2_line(), nlvr2_line("dev-850-1-0")])
    assert len(load_nlvr2(tmp_path, limit=1)["image_pairs"]) == 1
    with pytest.raises(DataError, match="no split 'test'; known: train, dev, test1, test2"):
        load_nlvr2(tmp_path, splits=["test"])
    with pytest.raises(DataError, match=r"test1\.json: no such file"):
        load_nlvr2(tmp_path, splits=["test1"])
    (tmp_path / "nlvr2" / "data" / "dev.json").unlink()
    with pytest.raises(DataError, match=r"contains none of train\.json, dev\.json"):
        load_nlvr2(tmp_path)


def test_the_readable_one_of_repeated_identifiers_is_kept(tmp_path: Path) -> None:
    write_split(tmp_path / "nlvr", "train", [line("1-0", sentence=None), line("1-0"), line("1-0", sentence="again")])
    tables = load(tmp_path)
    assert len(tables["images"]) == len(tables["statements"]) == 6 and len(tables["objects"]) == 12
    assert {row["provenance"] for row in tables["statements"]} == {"train/train.json:2"}
    assert [row["rule"] for row in tables["quarantine"]] == ["record_readable", "id_unique"]
    pairs = [nlvr2_line("train-1-0-0", sentence=None), nlvr2_line("train-1-0-0", label=None)]
    write(tmp_path / "nlvr2", "train", pairs)
    tables = load_nlvr2(tmp_path)
    assert [(row["provenance"], row["label"]) for row in tables["image_pairs"]] == [("train.json:2", None)]


def test_images_are_found_in_another_letter_case_but_another_number_is_another_image(tmp_path: Path) -> None:
    write_split(tmp_path / "nlvr", "dev", [line("7-0")], missing=("dev-7-0-5.png",))
    folder = tmp_path / "nlvr" / "dev" / "images" / "4"
    (folder / "dev-7-0-0.png").rename(folder / "DEV-7-0-0.PNG")
    tables = load(tmp_path)
    assert [Path(row["path"]).name for row in tables["images"]] == [
        "DEV-7-0-0.PNG",
        *(f"dev-7-0-{k}.png" for k in range(1, 5)),
    ]
    ((row_id, reason),) = [(row["row_id"], row["reason"]) for row in tables["quarantine"]]
    assert row_id == "nlvr/dev-7-0-5"
    assert reason.startswith("no file dev-7-0-5.png under images/") and "nearest" not in reason
