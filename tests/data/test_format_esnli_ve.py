"""e-SNLI-VE: a csv a split or one of all, Flickr8k's names of photos, splits by photo, and broken rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.errors import DataError
from vlp_models.params import SourceParams

HEADER = ",pairID,Flickr30kID,hypothesis,gold_label,explanation\n"  # the first column has no name
WITH_FILES = "split,pairID,Flickr30kID,image,hypothesis,gold_label,explanation\n"


def write(root: Path, name: str, text: str) -> None:
    root.mkdir(exist_ok=True)
    (root / name).write_text(text)


def load(tmp_path: Path, **params: Any) -> Tables:
    return read_source("ve", SourceParams(format="esnli_ve", root="ve", images="Images", **params), tmp_path)


def test_a_file_a_split(tmp_path: Path) -> None:
    write(
        tmp_path / "ve", "esnlive_train.csv", f'{HEADER}0,1.jpg#2r1c,1.jpg,"Old, he sits.",contradiction,"a ""b"", c"\n'
    )
    write(tmp_path / "ve", "esnlive_dev.csv", f"{HEADER}0,2.jpg#2r1e,2.jpg,Two people.,entailment,\n")
    tables = load(tmp_path)
    assert [(row["image_id"], row["split"], Path(row["path"]).name) for row in tables["images"]] == [
        ("ve/1", "train", "1.jpg"),
        ("ve/2", "val", "2.jpg"),
    ]
    assert tables["hypotheses"][0] == {
        "hypothesis_id": "ve/1.jpg#2r1c",
        "image_id": "ve/1",
        "text": "Old, he sits.",
        "gold_label": "contradiction",
        "annotator_labels": [],
        "provenance": "esnlive_train.csv:2",
    }


def rows(*lines: str) -> str:
    return WITH_FILES + "".join(f"{line}\n" for line in lines)


def test_one_file_with_photos_of_flickr8k_and_splits_by_its_lists(tmp_path: Path) -> None:
    """Whatever the csv says of splits, a hypothesis is where its photo is."""
    lines = [
        "train,1.jpg#0r1e,1.jpg,1_ab.jpg,A dog runs.,entailment,x",
        "train,2.jpg#0r1e,2.jpg,2_cd.jpg,A cat runs.,neutral,x",
        "dev,3.jpg#0r1e,3.jpg,3_ef.jpg,A man runs.,contradiction,x",
    ]
    write(tmp_path / "ve", "esnlive.csv", rows(*lines))
    own = {row["image_id"]: row["split"] for row in load(tmp_path)["images"]}
    assert own == {"ve/1_ab": "train", "ve/2_cd": "train", "ve/3_ef": "val"}
    write(tmp_path / "ve", "train.txt", "3_ef.jpg\n")
    write(tmp_path / "ve", "dev.txt", "1_ab.jpg\n")
    tables = load(tmp_path, split_files={"train": ["train.txt"], "test": ["dev.txt"]})
    assert {row["image_id"]: row["split"] for row in tables["images"]} == {"ve/1_ab": "test", "ve/3_ef": "train"}
    assert tables.skipped["hypotheses about unlisted photos"] == 1
    (tmp_path / "ve" / "Flickr8k_text").mkdir()
    (tmp_path / "ve" / "dev.txt").rename(tmp_path / "ve" / "Flickr8k_text" / "dev.txt")  # as its authors send them
    write(tmp_path / "ve", "esnlive.csv", rows(*(line.replace(",1_ab.jpg", ",") for line in lines)))
    by_list = load(tmp_path, split_files={"test": ["dev.txt"]})
    assert [row["image_id"] for row in by_list["images"]] == ["ve/1_ab"], "Flickr8k's list knows the file of 1.jpg"
    (tmp_path / "ve" / "Images").mkdir()
    (tmp_path / "ve" / "Images" / "1.jpg").touch()
    there = load(tmp_path, split_files={"test": ["dev.txt"]})
    assert [row["image_id"] for row in there["images"]] == ["ve/1"], "but where 1.jpg is there, that is the file"
    held = load(tmp_path, val_fraction=1.0)
    assert {row["split"] for row in held["images"]} == {"val"}, "all that is said of a photo goes with it"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("train,1.jpg#0r1e,1.jpg,1_ab.jpg,Again.,entailment,x", "id_unique"),
        ("train,5.jpg#0r1e,5.jpg,5_ab.jpg,Text.,maybe,x", "gold_label_known"),
        ("train,5.jpg#0r1e,5.jpg,5_ab.jpg,,neutral,x", "record_readable"),
        ("train,5.jpg#0r1e,5.jpg,../5.jpg,Text.,neutral,x", "path_inside"),
        ("somewhere,5.jpg#0r1e,5.jpg,5_ab.jpg,Text.,neutral,x", "split_known"),
        ("dev,5.jpg#0r1e,1.jpg,1_ab.jpg,Text.,neutral,x", "split_disjoint"),
        ("train,5.jpg#0r1e,5.jpg,5_ab.jpg,Text, with a comma,neutral,x", "record_readable"),
        ('train,5.jpg#0r1e,5.jpg,5_ab.jpg,"Text.,neutral,x', "record_readable"),
    ],
)
def test_a_bad_row_is_set_aside_and_the_rest_goes_on(tmp_path: Path, line: str, rule: str) -> None:
    good = "train,1.jpg#0r1e,1.jpg,1_ab.jpg,A dog runs.,entailment,x"
    last = 'train,2.jpg#0r1e,2.jpg,2_ab.jpg,"A dog, again.",entailment,x'
    write(tmp_path / "ve", "esnlive.csv", rows(good, line, last))
    tables = load(tmp_path)
    assert [row["hypothesis_id"] for row in tables["hypotheses"]] == ["ve/1.jpg#0r1e", "ve/2.jpg#0r1e"]
    assert [(row["rule"], row["provenance"]) for row in tables["quarantine"]] == [(rule, "esnlive.csv:3")]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path / "ve", "other.csv", "")
    with pytest.raises(DataError, match=r"contains none of esnlive_train\.csv"):
        load(tmp_path)
    write(tmp_path / "ve", "esnlive.csv", HEADER)
    with pytest.raises(DataError, match=r"must name the columns .*split"):
        load(tmp_path)
