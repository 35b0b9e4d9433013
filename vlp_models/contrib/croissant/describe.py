"""Croissant metadata of the validated data: a JSON-LD file that dataset search and loaders of other programs read.

MLCommons Croissant 1.0: the files with their hashes, and per table a record set with a field per column. The version is
the hash of the tables, so equal data has equal metadata.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlp_models.common.io import hash_file, read_json
from vlp_models.errors import DataError

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
_OWN_TERMS = (
    *("citeAs", "column", "extract", "field", "fileProperty", "fileObject", "fileSet", "format", "includes"),
    *("isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex", "repeated"),
    *("replace", "separator", "source", "subField", "transform"),
)
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _OWN_TERMS},
}
NOT_DATA = ("quarantine", "leaks")  # tables about rows that were left out
ABOUT = {
    "images": "The images: path, size, split and hashes.",
    "captions": "Sentences that describe an image.",
    "questions": "Questions about an image, with their answers.",
    "objects": "Boxes around objects, with their class.",
}


def describe_dataset(validated: Path, *, name: str, license: str, description: str) -> dict[str, Any]:
    """Return the metadata of data/validated as plain data.

    Args:
        license: an SPDX identifier or the address of a license; it is required by the format and not known to the data.

    Raises:
        DataError: the stage `validate` has not run.
    """
    manifest_file = validated / "manifest.json"
    if not manifest_file.exists():
        raise DataError(f"{validated}: no validated data; run `vlp run validate` first")
    manifest = read_json(manifest_file)
    tables = [
        path
        # Empty tables are left out: they describe nothing.
        for path in sorted(validated.glob("*.parquet"))
        if path.stem not in NOT_DATA and pq.read_metadata(path).num_rows
    ]
    hashes = {path.name: hash_file(path) for path in tables}
    # Names and hashes in sorted order: equal tables give the same version.
    version = hashlib.sha256("".join(f"{digest} {file}\n" for file, digest in hashes.items()).encode()).hexdigest()
    counts = ", ".join(f"{count:,} {kind}" for kind, count in manifest["splits"].items())
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": name,
        "description": f"{description} Images by split: {counts}.".strip(),
        "license": license,
        "version": f"0.0.0+{version[:16]}",
        "distribution": [_describe_file(path, hashes[path.name]) for path in tables],
        "recordSet": [_describe_table(path) for path in tables],
    }


def _describe_file(path: Path, sha256: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": path.name,
        "name": path.name,
        "contentUrl": path.name,
        "contentSize": f"{path.stat().st_size} B",
        "encodingFormat": "application/x-parquet",
        "sha256": sha256,
    }


def _describe_table(path: Path) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": path.stem,
        "name": path.stem,
        "description": ABOUT.get(path.stem, f"Rows of the view {path.stem}."),
        # Nested columns have no type in Croissant and are left out.
        "field": [_describe_column(path, column) for column in pq.read_schema(path) if _data_type(column.type)],
    }


def _describe_column(path: Path, column: pa.Field) -> dict[str, Any]:
    field: dict[str, Any] = {
        "@type": "cr:Field",
        "@id": f"{path.stem}/{column.name}",
        "name": column.name,
        "dataType": _data_type(column.type),
        "source": {"fileObject": {"@id": path.name}, "extract": {"column": column.name}},
    }
    return field | {"repeated": True} if pa.types.is_list(column.type) else field


def _data_type(kind: pa.DataType) -> str:
    """Return the schema.org type of a column; empty for nested ones, which Croissant cannot extract."""
    # A list has the type of its items; `repeated` marks it as a list.
    if pa.types.is_list(kind):
        return _data_type(kind.value_type)
    tests = {
        "sc:Boolean": pa.types.is_boolean,
        "sc:Integer": pa.types.is_integer,
        "sc:Float": pa.types.is_floating,
        "sc:Text": pa.types.is_string,
    }
    return next((name for name, test in tests.items() if test(kind)), "")
