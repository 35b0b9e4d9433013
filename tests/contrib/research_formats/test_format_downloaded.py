"""Conceptual Captions and SBU: lists of addresses, whose pictures are there or are counted as missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams

LINES = [
    "a small boat drifts past the harbour wall\thttp://example.org/img/boat-03.jpg",
    'person says " hello to actor\thttp://example.org/2.jpg',  # a lone quote  # plain-ok
    "no address at all",
    "two\ttabs\thttp://example.org/4.jpg",
    "a dead link\thttp://example.org/gone.jpg",
    "a red barn \thttp://example.org/6.png",
]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def load(tmp_path: Path, format: str, **params: Any) -> Tables:
    return read_source("d", DatasetParams.of(format=format, root="d", **params), tmp_path)


def test_conceptual_captions_are_identified_by_row(tmp_path: Path) -> None:
    root = tmp_path / "d"
    touch(root / "images" / "train", "00000/000000000.jpg", "00000/000000001.webp", "5.png")
    touch(root / "images" / "val", "0.jpg")
    (root / "Train_GCC-training.tsv").write_text("\n".join(LINES) + "\n")
    (root / "Validation_GCC-1.1.0-Validation.tsv").write_text(LINES[0] + "\n")
    tables = load(tmp_path, "conceptual_captions")
    assert [(row["image_id"], row["split"], Path(row["path"]).name) for row in tables["images"]] == [
        ("d/train-0", "train", "000000000.jpg"),
        ("d/train-1", "train", "000000001.webp"),
        ("d/train-5", "train", "5.png"),
        ("d/val-0", "val", "0.jpg"),
    ]
    assert tables["captions"][1]["text"] == 'person says " hello to actor'  # plain-ok
    assert tables["captions"][2] == {
        "caption_id": "d/train-5",
        "image_id": "d/train-5",
        "text": "a red barn",
        "provenance": "Train_GCC-training.tsv:6",
    }
    assert tables.skipped == {"pairs of train without an image": 1}
    assert [(row["row_id"], row["provenance"]) for row in tables["quarantine"]] == [
        ("d/train-2", "Train_GCC-training.tsv:3"),
        ("d/train-3", "Train_GCC-training.tsv:4"),
    ]
    assert len(load(tmp_path, "conceptual_captions", limit=1)["images"]) == 2, "one of each split"


def test_header_for_img2dataset_is_no_pair(tmp_path: Path) -> None:
    root = tmp_path / "d"
    touch(root / "images" / "train", "00000/000000000.jpg", "00000/000000001.jpg")
    (root / "Train_GCC-training.tsv").write_text("\n".join(["caption\turl", *LINES[:2]]) + "\n")
    tables = load(tmp_path, "conceptual_captions")
    assert [(row["image_id"], Path(row["path"]).name) for row in tables["images"]] == [
        ("d/train-0", "000000000.jpg"),
        ("d/train-1", "000000001.jpg"),
    ]
    assert [(row["text"], row["provenance"]) for row in tables["captions"]] == [
        ("a small boat drifts past the harbour wall", "Train_GCC-training.tsv:2"),
        ('person says " hello to actor', "Train_GCC-training.tsv:3"),  # plain-ok
    ]
    assert not tables["quarantine"] and not tables.skipped


def test_sbu_is_one_object_of_parallel_lists(tmp_path: Path) -> None:
    root = tmp_path / "d"
    touch(root / "images", "000000000.jpg", "2.jpg")
    document = {
        "image_urls": ["http://static.flickr.com/1/2_a.jpg", "http://static.flickr.com/gone.jpg", "http://x.org/3.jpg"],
        "user_ids": ["12@N00", "13@N00", "14@N00"],
        "captions": ["My bike against the blue shed door", "gone", 7],
    }
    (root / "sbu-captions-all.json").write_text(json.dumps(document))
    tables = load(tmp_path, "sbu")
    (image,), (caption,) = tables["images"], tables["captions"]
    assert (image["image_id"], image["split"], Path(image["path"]).name) == ("d/0", "train", "000000000.jpg")
    assert caption["text"] == "My bike against the blue shed door"
    assert tables.skipped == {"pairs without a photo": 1}
    assert [row["row_id"] for row in tables["quarantine"]] == ["d/2"], "a caption that is no text"
    document["captions"].pop()
    (root / "sbu-captions-all.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="2 captions and 3 image_urls"):
        load(tmp_path, "sbu")
    (root / "sbu-captions-all.json").write_text("[]")
    with pytest.raises(DataError, match="no list `image_urls`"):
        load(tmp_path, "sbu")


def test_error_without_any_image_names_the_expected_folder(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(DataError, match=r"contains none of Train_GCC-training\.tsv"):
        load(tmp_path, "conceptual_captions")
    (tmp_path / "d" / "Train_GCC-training.tsv").write_text(LINES[0] + "\n")
    with pytest.raises(DataError, match=r"no row has an image in .*/images/train; .*00012/000123456\.jpg"):
        load(tmp_path, "conceptual_captions")
