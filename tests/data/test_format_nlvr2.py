"""The NLVR2 reader: labels as texts, both images of a pair, val by directory, where files lie, broken lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


def line(identifier: str = "dev-850-0-0", **changes: Any) -> dict[str, Any]:
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


def load(tmp_path: Path, **params: Any) -> Tables:
    return read_source("n", SourceParams(format="nlvr2", root="nlvr2", **params), tmp_path)


def test_lines_become_pairs_that_share_their_images(tmp_path: Path) -> None:
    root = tmp_path / "nlvr2"
    write(root, "train", [*map(line, ("train-3-0-0", "train-3-0-1")), line("train-4-2-1", label="False", directory=5)])
    write(root, "dev", [line()])
    write(root, "test1", [line("test1-0-1-0", label="false")])
    tables = load(tmp_path, validation_directories=["5"])
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


def test_files_are_found_where_they_come_and_a_hidden_label_is_null(tmp_path: Path) -> None:
    root = tmp_path / "nlvr2"
    hidden = line()
    del hidden["label"]
    write(root, "dev", [hidden])
    (root / "dev").mkdir()
    (root / "dev" / "dev-850-0-img1.png").touch()
    tables = load(tmp_path, splits=["dev"])
    assert [row["label"] for row in tables["image_pairs"]] == [None]
    assert [Path(row["path"]).parent.relative_to(root).as_posix() for row in tables["images"]] == ["images/dev", "dev"]
    root.rename(tmp_path / "moved")  # annotations in the repository, images beside it
    root.mkdir()
    (tmp_path / "moved").rename(root / "nlvr2")
    assert len(load(tmp_path)["image_pairs"]) == 1


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"label": "maybe"}, "label_known"),
        ({"label": True}, "record_readable"),
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
def test_a_bad_line_is_set_aside_and_the_rest_goes_on(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    bad = {**line("train-5-0-0"), **changes}
    write(tmp_path / "nlvr2", "train", [line("train-1-0-0"), bad, "[1]", line("train-6-0-0")])
    tables = load(tmp_path)
    assert [row["pair_id"] for row in tables["image_pairs"]] == ["n/train-1-0-0", "n/train-6-0-0"]
    assert len(tables["images"]) == 4, "nothing of the bad line is left"
    found = {(row["table"], row["rule"], row["provenance"]) for row in tables["quarantine"]}
    assert found == {
        ("image_pairs", rule, "train.json:2"),
        ("image_pairs", "record_readable", "train.json:3"),
    }


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lil-lab/nlvr"):
        load(tmp_path)
    write(tmp_path / "nlvr2", "dev", [line(), line("dev-850-1-0")])
    assert len(load(tmp_path, limit=1)["image_pairs"]) == 1
    with pytest.raises(DataError, match="no split 'test'; known: train, dev, test1, test2"):
        load(tmp_path, splits=["test"])
    with pytest.raises(DataError, match=r"test1\.json: no such file"):
        load(tmp_path, splits=["test1"])
    (tmp_path / "nlvr2" / "data" / "dev.json").unlink()
    with pytest.raises(DataError, match=r"contains none of train\.json, dev\.json"):
        load(tmp_path)
