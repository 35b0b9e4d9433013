"""A view's record is all there is to it: tables, index, samples; and texts that no image belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from vlp_models.data import views
from vlp_models.data.formats import read_source
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord, ShardWriter
from vlp_models.data.views import TABLES, VIEWS, Column, View
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import SourceParams

Record = Callable[..., ImageRecord]


def test_index_has_one_type_per_column_name(monkeypatch: pytest.MonkeyPatch) -> None:
    clash = View(name="clash", id_column="clash_id", columns=(Column(name="label", type="string"),))
    monkeypatch.setitem(VIEWS, "clash", clash)
    with pytest.raises(ValueError, match="column `label` of the view clash"):
        views.index_columns()


def test_every_tables_schema_begins_with_its_id_and_ends_with_provenance() -> None:
    for view in TABLES.values():
        assert view.schema.names[0] == view.id_column and view.schema.names[-1] == "provenance"
        assert ("image_id" in view.schema.names) is view.has_image
    assert not VIEWS["images"].has_text and not VIEWS["texts"].has_image


def test_the_vocabulary_reads_every_text_of_a_view() -> None:
    row = {"choice_id": "a", "text": "q", "answers": ["w", "x"], "rationales": ["y"], "image_id": "i"}
    table = pa.Table.from_pylist([row], schema=VIEWS["choices"].schema)
    assert VIEWS["choices"].texts(table) == ["q", "w", "x", "y"]


def test_texts_without_an_image_are_only_in_the_index(build_shards: Any, record: Record) -> None:
    directory: Path = build_shards(train=[record(1), record(2)])
    writer = ShardWriter(directory, "train", 1)
    writer.add(record(3))
    rows = [{"text_id": f"b/{i}", "source": "b", "split": "train", "text": f"words {i}"} for i in range(3)]
    writer.add_without_image("texts", rows)
    counts = writer.close()
    assert counts["texts"] == 3 and counts["images"] == 1
    texts = ShardDataset(directory, "train", "texts")
    assert [sample.text for sample in texts] == ["words 0", "words 1", "words 2"]
    first = texts[0]
    assert (first.sample_id, first.image_id, first.source, first.regions) == ("b/0", "", "b", None)
    images = ShardDataset(directory, "train", "images")
    assert len(images) == 1 and images[0].text == "" and images[0].regions is not None


def test_an_unknown_view_is_named(build_shards: Any, record: Record) -> None:
    with pytest.raises(ParamsError, match="unknown view `pairs`; available: images, captions"):
        ShardDataset(build_shards(train=[record(1)]), "train", "pairs")


def test_text_files_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"Two  cups.\n\n\xff broken\r\nThree cups.\n")
    source = SourceParams(format="texts", root=".", texts={"train": ["a.txt"]})
    tables = read_source("b", source, tmp_path)
    assert [(row["text_id"], row["text"]) for row in tables["texts"]] == [
        ("b/a.txt:1", "Two cups."),
        ("b/a.txt:4", "Three cups."),
    ]
    assert [(row["rule"], row["provenance"]) for row in tables["quarantine"]] == [("text_utf8", "a.txt:3")]
    assert not tables["images"]
    for wrong, message in (({}, "names no file"), ({"holdout": ["a.txt"]}, "expected one of train, val, test")):
        with pytest.raises(DataError, match=message):
            read_source("b", SourceParams(format="texts", root=".", texts=wrong), tmp_path)
