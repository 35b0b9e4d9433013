"""The SNLI-VE reader: both spellings of the image's id, labels, what annotators did not agree on, broken lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams


def line(pair: str = "111222.jpg#2r1e", **changes: Any) -> dict[str, Any]:
    """As a genuine line is, with sentences of our own."""
    return {
        "Flikr30kID": "111222.jpg",
        "annotator_labels": ["entailment", "neutral", "entailment"],
        "captionID": "111222.jpg#2",
        "gold_label": "entailment",
        "pairID": pair,
        "sentence1": "Two kids share ice cream.",
        "sentence1_binary_parse": "( Two ( kids ... ) )",
        "sentence1_parse": "(ROOT ...)",
        "sentence2": "Children are\neating.",
        "sentence2_binary_parse": "",
        "sentence2_parse": "",
        **changes,
    }


def write(root: Path, split: str, rows: list[Any]) -> None:
    root.mkdir(exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (root / f"snli_ve_{split}.jsonl").write_text("\n".join(lines) + "\n")


def load(tmp_path: Path, **params: Any) -> Tables:
    return read_source(
        "ve", DatasetParams.of(format="snli_ve", root="ve", images="flickr30k-images", **params), tmp_path
    )


def test_lines_become_images_and_hypotheses(tmp_path: Path) -> None:
    regenerated = line("333.jpg#0r1n", gold_label="neutral", Flickr30K_ID="333")
    del regenerated["Flikr30kID"]
    write(tmp_path / "ve", "train", [line(), line("111222.jpg#2r1c", gold_label="contradiction"), regenerated])
    write(tmp_path / "ve", "dev", [line("4.jpg#0r1e", Flikr30kID="4.jpg")])
    tables = load(tmp_path)
    assert not tables["quarantine"] and not tables["captions"]  # the premise is no caption of ours
    assert [(row["image_id"], row["split"], Path(row["path"]).name) for row in tables["images"]] == [
        ("ve/111222", "train", "111222.jpg"),
        ("ve/333", "train", "333.jpg"),
        ("ve/4", "val", "4.jpg"),
    ]
    assert tables["hypotheses"][0] == {
        "hypothesis_id": "ve/111222.jpg#2r1e",
        "image_id": "ve/111222",
        "text": "Children are eating.",
        "gold_label": "entailment",
        "annotator_labels": ["entailment", "neutral", "entailment"],
        "provenance": "snli_ve_train.jsonl:1",
    }
    assert [row["gold_label"] for row in tables["hypotheses"]] == [
        *("entailment", "contradiction", "neutral"),
        "entailment",
    ]


def test_hypotheses_without_majority_label_are_skipped_and_counted(tmp_path: Path) -> None:
    hidden = line("9.jpg#0r1", annotator_labels=["", "entailment"])
    del hidden["gold_label"]
    write(tmp_path / "ve", "test", [line("1.jpg#0r1e", gold_label="-"), hidden])
    tables = load(tmp_path)
    assert tables.skipped["hypotheses without a majority label"] == 1 and not tables["quarantine"]
    (row,) = tables["hypotheses"]
    assert row["gold_label"] is None and row["annotator_labels"] == ["entailment"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"gold_label": "maybe"}, "gold_label_known"),
        ({"gold_label": 1}, "record_readable"),
        ({"sentence2": None}, "record_readable"),
        ({"Flikr30kID": "../../etc/passwd"}, "path_inside"),
        ({"Flikr30kID": ""}, "record_readable"),
        ({"pairID": "111222.jpg#2r1e"}, "id_unique"),
    ],
)
def test_bad_line_is_quarantined_and_reading_continues(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    write(tmp_path / "ve", "train", [line(), {**line("5.jpg#0r1e"), **changes}, "{not json", line("6.jpg#0r1e")])
    tables = load(tmp_path)
    assert [row["hypothesis_id"] for row in tables["hypotheses"]] == ["ve/111222.jpg#2r1e", "ve/6.jpg#0r1e"]
    found = {(row["rule"], row["provenance"]) for row in tables["quarantine"]}
    assert found == {(rule, "snli_ve_train.jsonl:2"), ("record_readable", "snli_ve_train.jsonl:3")}


HEADER = ",pairID,Flickr30kID,hypothesis,gold_label,explanation\n"  # the first column has no name
WITH_FILES = "split,pairID,Flickr30kID,image,hypothesis,gold_label,explanation\n"


def write_csv(root: Path, name: str, text: str) -> None:
    root.mkdir(exist_ok=True)
    (root / name).write_text(text)


def load_esnli(tmp_path: Path, **params: Any) -> Tables:
    return read_source("ve", DatasetParams.of(format="esnli_ve", root="ve", images="Images", **params), tmp_path)


def test_one_csv_per_split(tmp_path: Path) -> None:
    write_csv(
        tmp_path / "ve", "esnlive_train.csv", f'{HEADER}0,1.jpg#2r1c,1.jpg,"Old, he sits.",contradiction,"a ""b"", c"\n'
    )
    write_csv(tmp_path / "ve", "esnlive_dev.csv", f"{HEADER}0,2.jpg#2r1e,2.jpg,Two people.,entailment,\n")
    tables = load_esnli(tmp_path)
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
    """A hypothesis is in its photo's split, regardless of the csv."""
    lines = [
        "train,1.jpg#0r1e,1.jpg,1_ab00000001.jpg,A dog runs.,entailment,x",
        "train,2.jpg#0r1e,2.jpg,2_cd00000001.jpg,A cat runs.,neutral,x",
        "dev,3.jpg#0r1e,3.jpg,3_ef.jpg,A man runs.,contradiction,x",
    ]
    write_csv(tmp_path / "ve", "esnlive.csv", rows(*lines))
    own = {row["image_id"]: row["split"] for row in load_esnli(tmp_path)["images"]}
    assert own == {"ve/1_ab00000001": "train", "ve/2_cd00000001": "train", "ve/3_ef": "val"}
    write_csv(tmp_path / "ve", "train.txt", "3_ef.jpg\n")
    write_csv(tmp_path / "ve", "dev.txt", "1_ab00000001.jpg\n")
    tables = load_esnli(tmp_path, split_files={"train": ["train.txt"], "test": ["dev.txt"]})
    assert {row["image_id"]: row["split"] for row in tables["images"]} == {
        "ve/1_ab00000001": "test",
        "ve/3_ef": "train",
    }
    assert tables.skipped["hypotheses about unlisted photos"] == 1
    (tmp_path / "ve" / "Flickr8k_text").mkdir()
    (tmp_path / "ve" / "dev.txt").rename(tmp_path / "ve" / "Flickr8k_text" / "dev.txt")  # as its authors send them
    write_csv(tmp_path / "ve", "esnlive.csv", rows(*(line.replace(",1_ab00000001.jpg", ",") for line in lines)))
    by_list = load_esnli(tmp_path, split_files={"test": ["dev.txt"]})
    assert [row["image_id"] for row in by_list["images"]] == ["ve/1_ab00000001"], (
        "Flickr8k's list has the file of 1.jpg"
    )
    (tmp_path / "ve" / "Images").mkdir()
    (tmp_path / "ve" / "Images" / "1.jpg").touch()
    there = load_esnli(tmp_path, split_files={"test": ["dev.txt"]})
    assert [row["image_id"] for row in there["images"]] == ["ve/1"], "but where 1.jpg is there, that is the file"
    held = load_esnli(tmp_path, val_fraction=1.0)
    assert {row["split"] for row in held["images"]} == {"val"}, "all hypotheses follow their photo"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("train,1.jpg#0r1e,1.jpg,1_ab00000001.jpg,Again.,entailment,x", "id_unique"),
        ("train,5.jpg#0r1e,5.jpg,5_ab.jpg,Text.,maybe,x", "gold_label_known"),
        ("train,5.jpg#0r1e,5.jpg,5_ab.jpg,,neutral,x", "record_readable"),
        ("train,5.jpg#0r1e,5.jpg,../5.jpg,Text.,neutral,x", "path_inside"),
        ("somewhere,5.jpg#0r1e,5.jpg,5_ab.jpg,Text.,neutral,x", "split_known"),
        ("dev,5.jpg#0r1e,1.jpg,1_ab00000001.jpg,Text.,neutral,x", "split_disjoint"),
        ("train,5.jpg#0r1e,5.jpg,5_ab.jpg,Text, with a comma,neutral,x", "record_readable"),
        ('train,5.jpg#0r1e,5.jpg,5_ab.jpg,"Text.,neutral,x', "record_readable"),
    ],
)
def test_bad_csv_row_is_quarantined_and_reading_continues(tmp_path: Path, line: str, rule: str) -> None:
    good = "train,1.jpg#0r1e,1.jpg,1_ab00000001.jpg,A dog runs.,entailment,x"
    last = 'train,2.jpg#0r1e,2.jpg,2_ab.jpg,"A dog, again.",entailment,x'
    write_csv(tmp_path / "ve", "esnlive.csv", rows(good, line, last))
    tables = load_esnli(tmp_path)
    assert [row["hypothesis_id"] for row in tables["hypotheses"]] == ["ve/1.jpg#0r1e", "ve/2.jpg#0r1e"]
    assert [(row["rule"], row["provenance"]) for row in tables["quarantine"]] == [(rule, "esnlive.csv:3")]


def test_files_of_one_name_in_two_folders_are_not_one_photo(tmp_path: Path) -> None:
    lines = [
        "train,1#0,1.jpg,dogs/1.png,A dog runs.,entailment,x",
        "train,1#1,1.jpg,cats/1.png,A cat runs.,entailment,x",
        "dev,1#2,1.jpg,dogs/1.jpg,A dog sits.,entailment,x",
        "train,1#3,1.jpg,dogs\\1.png,A dog sits.,neutral,x",
    ]
    write_csv(tmp_path / "ve", "esnlive.csv", rows(*lines))
    tables = load_esnli(tmp_path)
    assert [(row["image_id"], row["path"]) for row in tables["images"]] == [
        ("ve/1", str(tmp_path / "ve/Images/dogs/1.png"))
    ]
    assert [row["hypothesis_id"] for row in tables["hypotheses"]] == ["ve/1#0", "ve/1#3"]
    assert [(row["rule"], row["row_id"], row["reason"]) for row in tables["quarantine"]] == [
        ("id_unique", "ve/1#1", "image ve/1 was dogs/1.png before and is cats/1.png here"),
        ("id_unique", "ve/1#2", "image ve/1 was dogs/1.png before and is dogs/1.jpg here"),
    ]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="necla-ml/SNLI-VE"):
        load(tmp_path)
    write_csv(tmp_path / "ve", "other.csv", "")
    with pytest.raises(DataError, match=r"contains none of esnlive\.csv, esnlive_train\.csv"):
        load_esnli(tmp_path)
    write_csv(tmp_path / "ve", "esnlive.csv", HEADER)
    with pytest.raises(DataError, match=r"must name the columns .*split"):
        load_esnli(tmp_path)


def test_odd_optional_fields_and_a_repeated_id(tmp_path: Path) -> None:
    lines = [
        line("1.jpg#0r1e", annotator_labels=None, gold_label=None),
        line("2.jpg#0r1e", annotator_labels="entailment"),
        line("3.jpg#0r1e", sentence2=None),
        line("3.jpg#0r1e"),
        line("3.jpg#0r1e", sentence2="Again."),
    ]
    write(tmp_path / "ve", "train", lines)
    tables = load(tmp_path)
    found = [(row["hypothesis_id"], row["gold_label"], row["annotator_labels"]) for row in tables["hypotheses"]]
    assert found[:2] == [("ve/1.jpg#0r1e", None, []), ("ve/2.jpg#0r1e", "entailment", [])]
    assert [row["provenance"] for row in tables["hypotheses"]][2:] == ["snli_ve_train.jsonl:4"], "the readable one"
    assert [row["rule"] for row in tables["quarantine"]] == ["record_readable", "id_unique"]
