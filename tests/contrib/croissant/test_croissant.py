"""Croissant metadata of validated data: files, hashes and columns, equal for equal data."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlp_models.common.io import hash_file
from vlp_models.contrib.croissant.describe import CONFORMS_TO, describe_dataset
from vlp_models.errors import DataError


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    columns = {"image_id": ["a/1", "a/2"], "width": [10, 20], "boxes": [[0.5], []], "nested": [{"x": 1}, {"x": 2}]}
    pq.write_table(pa.table(columns), tmp_path / "images.parquet")
    pq.write_table(pa.table({"reason": ["too small"]}), tmp_path / "quarantine.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "captions.parquet")
    (tmp_path / "manifest.json").write_text(json.dumps({"splits": {"train": 1, "val": 0, "test": 1}}))
    return tmp_path


def describe(folder: Path) -> dict:
    return describe_dataset(folder, name="photos", license="CC-BY-4.0", description="Two photos.")


def test_files_and_columns_are_described(validated: Path) -> None:
    found = describe(validated)
    assert (found["conformsTo"], found["license"]) == (CONFORMS_TO, "CC-BY-4.0")
    assert found["description"] == "Two photos. Images by split: 1 train, 0 val, 1 test."
    (file,) = found["distribution"]  # neither the empty table nor the quarantine
    assert file["sha256"] == hash_file(validated / "images.parquet") and file["contentUrl"] == "images.parquet"
    (table,) = found["recordSet"]
    assert [(field["name"], field["dataType"], field.get("repeated")) for field in table["field"]] == [
        ("image_id", "sc:Text", None),
        ("width", "sc:Integer", None),
        ("boxes", "sc:Float", True),
    ]
    extract = {"fileObject": {"@id": "images.parquet"}, "extract": {"column": "width"}}
    assert table["field"][1]["source"] == extract


def test_the_version_changes_with_the_data_only(validated: Path, tmp_path: Path) -> None:
    before = describe(validated)
    assert describe(validated) == before
    pq.write_table(pa.table({"image_id": ["a/3"]}), validated / "images.parquet")
    assert describe(validated)["version"] != before["version"]
    with pytest.raises(DataError, match="run `vlp run validate` first"):
        describe(tmp_path / "elsewhere")
