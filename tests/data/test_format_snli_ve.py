"""The SNLI-VE reader: both spellings of the image's id, labels, what annotators did not agree on, broken lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


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
    return read_source("ve", SourceParams(format="snli_ve", root="ve", images="flickr30k-images", **params), tmp_path)


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


def test_what_annotators_did_not_agree_on_is_left_out_and_counted(tmp_path: Path) -> None:
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
        ({"annotator_labels": "entailment"}, "record_readable"),
        ({"Flikr30kID": "../../etc/passwd"}, "path_inside"),
        ({"Flikr30kID": ""}, "record_readable"),
        ({"pairID": "111222.jpg#2r1e"}, "id_unique"),
    ],
)
def test_a_bad_line_is_set_aside_and_the_rest_goes_on(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    write(tmp_path / "ve", "train", [line(), {**line("5.jpg#0r1e"), **changes}, "{not json", line("6.jpg#0r1e")])
    tables = load(tmp_path)
    assert [row["hypothesis_id"] for row in tables["hypotheses"]] == ["ve/111222.jpg#2r1e", "ve/6.jpg#0r1e"]
    found = {(row["rule"], row["provenance"]) for row in tables["quarantine"]}
    assert found == {(rule, "snli_ve_train.jsonl:2"), ("record_readable", "snli_ve_train.jsonl:3")}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="necla-ml/SNLI-VE"):
        load(tmp_path)
    write(tmp_path / "ve", "train", [line()])
    with pytest.raises(DataError, match="no split 'dev'; known: train, val, test"):
        load(tmp_path, splits=["dev"])
    with pytest.raises(DataError, match=r"snli_ve_test\.jsonl: no such file"):
        load(tmp_path, splits=["test"])
    (tmp_path / "ve" / "snli_ve_train.jsonl").unlink()
    with pytest.raises(DataError, match=r"contains none of snli_ve_train\.jsonl"):
        load(tmp_path)
