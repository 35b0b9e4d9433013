"""Visual Genome: keys of both releases, folders from addresses, objects, and excluded COCO images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables, spooled
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams


def image(number: int, coco: int | None = None, folder: str = "VG_100K") -> dict[str, Any]:
    url = f"https://cs.stanford.edu/people/rak248/{folder}/{number}.jpg"
    return {"image_id": number, "width": 60, "height": 40, "url": url, "coco_id": coco, "flickr_id": None}


def region(number: int, phrase: Any, key: str = "region_id") -> dict[str, Any]:
    return {key: number, "image_id": 7, "x": 12, "y": 40, "width": 88, "height": 61, "phrase": phrase}


IMAGES = [image(7), image(8, coco=42, folder="VG_100K_2"), image(9, coco=43), image(10, coco=44)]
REGIONS = [
    {"id": 7, "regions": [region(901, "red mug on the desk"), region(902, "Red mug  on the desk"), region(903, 5)]},
    {"id": 8, "regions": [region(904, "a dog\nsleeps", key="id")]},  # as older releases have it
    {"id": 9, "regions": []},
    {"id": 10, "regions": [region(905, "a cat sleeps")]},
]
KARPATHY = {
    "dataset": "coco",
    "images": [
        {"filename": f"{cocoid}.jpg", "cocoid": cocoid, "split": split, "sentences": []}
        for cocoid, split in ((42, "train"), (43, "val"), (44, "test"))
    ],
}


def load(tmp_path: Path, **params: Any) -> Tables:
    return read_source("vg", DatasetParams.of(format="visual_genome", root="vg", **params), tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "vg"
    root.mkdir()
    (root / "image_data.json").write_text(json.dumps(IMAGES))
    (root / "region_descriptions.json").write_text(json.dumps(REGIONS))
    (root / "dataset_coco.json").write_text(json.dumps(KARPATHY))
    return root


def test_phrases_become_captions(tmp_path: Path, root: Path) -> None:
    tables = load(tmp_path)
    assert [(row["image_id"], row["split"], Path(row["path"]).parts[-2:]) for row in tables["images"]][:2] == [
        ("vg/7", "train", ("VG_100K", "7.jpg")),
        ("vg/8", "train", ("VG_100K_2", "8.jpg")),
    ]
    assert (tables["images"][0]["width"], tables["images"][0]["height"]) == (60, 40)
    assert [(row["caption_id"], row["image_id"], row["text"]) for row in tables["captions"]] == [
        ("vg/901", "vg/7", "red mug on the desk"),
        ("vg/904", "vg/8", "a dog sleeps"),
        ("vg/905", "vg/10", "a cat sleeps"),
    ]
    assert tables.skipped == {"repeated phrases of an image": 1}
    assert [row["row_id"] for row in tables["quarantine"]] == ["vg/903"]


@pytest.mark.parametrize("file", ["dataset_coco.json", "ids.txt"])
def test_karpathy_test_images_are_skipped_and_counted(tmp_path: Path, root: Path, file: str) -> None:
    (root / "ids.txt").write_text("43\n44\n")
    tables = load(tmp_path, exclude=[file])
    assert [row["image_id"] for row in tables["images"]] == ["vg/7", "vg/8"]
    assert {row["image_id"] for row in tables["captions"]} == {"vg/7", "vg/8"}
    assert tables.skipped["excluded COCO images"] == 2


def test_objects_with_their_attributes(tmp_path: Path, root: Path) -> None:
    thing = {"object_id": 1, "x": 1, "y": 2, "w": 3, "h": 4, "names": ["Coffee Mug"], "synsets": ["mug.n.04"]}
    attributes = [{"image_id": 7, "attributes": [{**thing, "attributes": ["Red", "red", "small "]}]}]
    objects = [{"image_id": 7, "objects": [thing, {**thing, "object_id": 2, "names": []}]}]
    (root / "attributes.json").write_text(json.dumps(attributes))
    (root / "objects.json").write_text(json.dumps(objects))
    (row,) = load(tmp_path, instances={"all": ["attributes.json"]})["objects"]
    box = tuple(row[name] for name in ("x1", "y1", "x2", "y2"))
    assert (row["category"], row["attributes"], box) == ("coffee mug", ["red", "small"], (1, 2, 4, 6))
    tables = load(tmp_path, instances={"all": ["objects.json"]})
    assert [row["attributes"] for row in tables["objects"]] == [None]
    assert "vg/2" in {row["row_id"] for row in tables["quarantine"]}, "an object without a name"


def test_out_of_range_numbers_and_bad_addresses_cost_their_record(tmp_path: Path, root: Path) -> None:
    huge, address = 10**400, "http://[x/VG_100K/13.jpg"
    bad = [{**image(11), "width": huge}, {**image(12), "height": 2**31}, {**image(13), "url": address}]
    (root / "image_data.json").write_text(json.dumps([*IMAGES, *bad]))
    thing = {"object_id": 1, "x": 1, "y": 2, "w": huge, "h": 4, "names": ["mug"]}
    (root / "objects.json").write_text(json.dumps([{"image_id": 7, "objects": [thing, {**thing, "w": 3}]}]))
    tables = load(tmp_path, instances={"all": ["objects.json"]})
    assert len(tables["images"]) == len(IMAGES) and len(tables["objects"]) == 1
    reasons = {row["row_id"]: row["reason"] for row in tables["quarantine"]}
    assert reasons.keys() == {"vg/11", "vg/12", "vg/13", "vg/903", "vg/1"}
    assert reasons["vg/13"].startswith(f"`url` is not an address: '{address}'")


def test_errors_name_the_file(tmp_path: Path, root: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json: no such file"):
        load(tmp_path, exclude=["nowhere.json"])
    (root / "ids.txt").write_text("43\nforty\n")
    with pytest.raises(DataError, match=r"ids\.txt:2: 'forty' is not a COCO id"):
        load(tmp_path, exclude=["ids.txt"])
    with pytest.raises(DataError, match="has no splits"):
        load(tmp_path, instances={"train": ["objects.json"]})
    (root / "image_data.json").write_text("{}")
    with pytest.raises(DataError, match="expected a list, found dict"):
        load(tmp_path)


def test_unknown_sizes_and_a_repeated_id(tmp_path: Path, root: Path) -> None:
    listed = [{**image(7), "url": None}, {**image(7), "width": None}, image(7), {**image(8), "height": "40"}]
    (root / "image_data.json").write_text(json.dumps(listed))
    tables = load(tmp_path)
    assert [(row["image_id"], row["width"]) for row in tables["images"]] == [("vg/7", None), ("vg/8", 60)]
    rules = [row["rule"] for row in tables["quarantine"] if row["table"] == "images"]
    assert rules == ["record_readable", "id_unique"]


def test_bytes_that_are_not_utf_8_cost_their_object(tmp_path: Path, root: Path) -> None:
    box = {"x": 0, "y": 0, "w": 3, "h": 3}
    objects = [
        {"object_id": 1, "names": ["caf\u00e9"], **box},
        {"object_id": 2, "names": ["mug"], "attributes": ["ros\u00e9"], **box},
        {"object_id": 3, "names": ["mug"], "attributes": [" Red ", "  "], **box},
    ]
    content = json.dumps([{"image_id": 7, "attributes": objects}], ensure_ascii=False)
    (root / "attributes.json").write_text(content, encoding="latin-1")
    (tmp_path / "out").mkdir()
    with spooled(tmp_path / "out"):
        tables = load(tmp_path, instances={"all": ["attributes.json"]})
    assert [(row["object_id"], row["attributes"]) for row in tables["objects"]] == [("vg/3", ["red"])]
    rows = [row for row in tables["quarantine"] if row["table"] == "objects"]
    assert [row["rule"] for row in rows] == ["text_utf8", "text_utf8"]
    command = "`iconv -f cp1252 -t utf-8 attributes.json > utf8-attributes.json`"
    assert rows[0]["reason"] == f"`names` is not UTF-8: 'caf\\udce9'; convert the file: {command}"


@pytest.mark.parametrize("digits", ["\u00b2", "7" * 5000])
def test_only_numbers_are_ids_to_exclude(tmp_path: Path, root: Path, digits: str) -> None:
    (root / "ids.txt").write_text(f"43\n{digits}\n")
    with pytest.raises(DataError, match=r"ids\.txt:2: '.{1,40}' is not a COCO id, which are numbers"):
        load(tmp_path, exclude=["ids.txt"])
