"""A view's record is all there is to it: tables, index, samples; and texts that no image belongs to."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from vlp_models.common.plugins import use_plugins
from vlp_models.data import views
from vlp_models.data.formats import filled_views, read_source
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord, ShardWriter, index_schema
from vlp_models.data.tables import ID_COLUMN, SCHEMAS, read_table
from vlp_models.data.views import TABLES, VIEWS
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import DatasetParams

Record = Callable[..., ImageRecord]


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Return a function that declares a view `own` with these arguments, in a project's plugins/own.py."""
    path = list(sys.path)
    (tmp_path / "plugins").mkdir()

    def declare(name: str = "own", view: str = "own", column: str = 'name="where", type="string"') -> None:
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "plugins"]:
            del sys.modules[loaded]
        text = "from vlp_models.data.views import Column, View\n"
        text += f'VIEW = View(name="{view}", id_column="own_id", columns=(Column({column}),))\n'
        (tmp_path / "plugins" / "own.py").write_text(text)
        use_plugins({"views": {name: "plugins.own:VIEW"}}, tmp_path)

    yield declare
    use_plugins({}, tmp_path)
    sys.path[:] = path


def test_a_view_of_a_plugin_has_a_table_and_columns_of_the_index(plugin: Callable[..., None], tmp_path: Path) -> None:
    builtin = list(SCHEMAS)
    plugin()
    assert list(SCHEMAS) == [*builtin[:-2], "own", *builtin[-2:]]  # before objects and quarantine
    assert VIEWS["own"].columns[0].name == "where" and ID_COLUMN["own"] == "own_id"
    assert pa.types.is_string(index_schema().field("where").type)
    assert not len(read_table("own", tmp_path)), "data that is older than the view has none of its rows"
    use_plugins({}, tmp_path)
    assert list(SCHEMAS) == builtin and "where" not in index_schema().names


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"column": 'name="label", type="string"'}, "column `label` of the view own has another type in another view"),
        ({"column": 'name="source", type="string"'}, "column `source` of the view own has the name of a column that"),
        (
            {"name": "objects", "view": "objects"},
            "plugins.own:VIEW: a view cannot have the name of the table `objects`",
        ),
        ({"view": "other"}, "`plugins.views.own` must be a View named `own`, but is a View named `other`"),
    ],
    ids=["type", "place", "table", "name"],
)
def test_a_view_that_clashes_is_refused_before_anything_runs(
    plugin: Callable[..., None], declared: dict[str, str], message: str
) -> None:
    plugin(**declared)
    with pytest.raises(ParamsError, match=re.escape(message)):
        views.index_columns()


def test_a_reader_fills_only_the_views_that_it_names(plugin: Callable[..., None], tmp_path: Path) -> None:
    plugin()
    code = "from vlp_models.data.formats.base import Tables, fills\n{}\n"
    code += "def read(name, params, base):\n    tables = Tables()\n    tables['own'].append({{}})\n    return tables\n"
    declared = {"views": {"own": "plugins.own:VIEW"}}
    declared["formats"] = {form: f"plugins.{form}:read" for form in ("some", "unnamed", "wrong")}
    for form, line in (("some", "@fills('captions')"), ("unnamed", ""), ("wrong", "@fills('owl')")):
        (tmp_path / "plugins" / f"{form}.py").write_text(code.format(line))
    use_plugins(declared, tmp_path)
    assert filled_views("some") == ("captions",) and set(filled_views("unnamed")) == set(TABLES)
    assert len(read_source("b", DatasetParams.of(format="unnamed", root="."), tmp_path)["own"]) == 1
    for form, message in (
        ("some", "fills the view `own`, which its `@fills"),
        ("wrong", "no view `owl` has a table; did"),
    ):
        with pytest.raises(ParamsError, match=re.escape(message)):
            read_source("b", DatasetParams.of(format=form, root="."), tmp_path)


def test_every_tables_schema_begins_with_its_id_and_ends_with_provenance() -> None:
    for view in TABLES.values():
        assert view.schema.names[0] == view.id_column and view.schema.names[-1] == "provenance"
        assert ("image_id" in view.schema.names) is view.has_image
    assert not VIEWS["images"].has_text and not VIEWS["texts"].has_image


def test_the_vocabulary_reads_every_text_of_a_view() -> None:
    row = {"choice_id": "a", "text": "q", "answers": ["w", "x"], "rationales": ["y"], "image_id": "i"}
    table = pa.Table.from_pylist([row], schema=VIEWS["choices"].schema)
    assert [text for column in VIEWS["choices"].text_columns for text in column.texts(table)] == ["q", "w", "x", "y"]


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
    source = DatasetParams.of(format="texts", root=".", texts={"train": ["a.txt"]})
    tables = read_source("b", source, tmp_path)
    assert [(row["text_id"], row["text"]) for row in tables["texts"]] == [
        ("b/a.txt:1", "Two cups."),
        ("b/a.txt:4", "Three cups."),
    ]
    assert [(row["rule"], row["provenance"]) for row in tables["quarantine"]] == [("text_utf8", "a.txt:3")]
    assert not tables["images"]
    for wrong, message in (({}, "names no file"), ({"holdout": ["a.txt"]}, "expected one of train, val, test")):
        with pytest.raises(DataError, match=message):
            read_source("b", DatasetParams.of(format="texts", root=".", texts=wrong), tmp_path)
