"""Logs of Inspect: `.eval` archives and JSON."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import read_zip_member
from vlp_models.contrib.compare.scored import (
    CLUSTER_NAMES,
    Columns,
    Row,
    Run,
    check_size,
    explain_clusters,
    explain_unscored,
    first_named,
    score_items,
    text,
    to_float,
)
from vlp_models.errors import MissingToolError

INSPECT_VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # correct, incorrect, partial, no answer
INSPECT_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # in any case
ZSTANDARD = 93  # a zip member's compression


def read_inspect_archive(path: Path, columns: Columns) -> list[Run]:
    with zipfile.ZipFile(path) as archive:
        check_size(path, archive)
        members = {member.filename: member for member in archive.infolist()}
        header = json.loads(_read_member(path, archive, members["header.json"])) if "header.json" in members else {}
        names = [name for name in members if name.startswith("samples/") and name.endswith(".json")]
        samples = [json.loads(_read_member(path, archive, members[name])) for name in sorted(names)]
    return read_inspect(path, header, samples, columns)


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member's content; Inspect compresses with Zstandard, which Python's zipfile reads from 3.14 on."""
    if member.compress_type != ZSTANDARD:
        return read_zip_member(archive, member)
    try:
        import pyarrow as pa
    except ModuleNotFoundError:
        raise MissingToolError(f"{path}: reading it needs pyarrow: pip install pyarrow") from None
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name, extra = struct.unpack("<26xHH", file.read(30))
        file.seek(name + extra, 1)
        content = file.read(member.compress_size)
    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        unpacked = bytes(stream.read(member.file_size + 1))
    if len(unpacked) != member.file_size:
        raise ValueError(f"{member.filename} does not have the {member.file_size:,} bytes that it declares")
    return unpacked


def read_inspect(path: Path, header: Row, samples: Sequence[Row], columns: Columns) -> list[Run]:
    """Return the log's run; the epochs of a sample are averaged.

    Samples without ids of their own are numbered after a shuffle, so their contents are compared, too.

    Raises:
        ValueError: there are scorers, but none whose values are all numbers, or none that the user names.
    """
    item_column = columns.item or "id"
    values: dict[str, dict[str, list[float]]] = {}
    others: dict[str, str] = {}  # scorer that is not compared -> its first value that is not a number
    rows: dict[str, Row] = {}
    for sample in samples:
        row = {**(sample.get("metadata") or {}), "id": str(sample["id"])}
        item = text(row.get(item_column))
        rows[item] = {**row, "doc_hash": _hash_of_sample(sample)}
        for scorer, score in (sample.get("scores") or {}).items():
            found = score.get("value") if isinstance(score, dict) else None
            for name, value in (found if isinstance(found, dict) else {"": found}).items():
                metric, number = f"{scorer}/{name}" if name else scorer, _inspect_number(value)
                if number is None:
                    others.setdefault(metric, f"sample {item}: {metric} is {str(value)[:50]!r}, not a number")
                elif not math.isnan(number):
                    values.setdefault(metric, {}).setdefault(item, []).append(number)
    values = {name: own for name, own in values.items() if name not in others}
    if columns.score:
        if columns.score not in values:
            raise ValueError(f"no scorer {columns.score} with numbers; there are: {', '.join(values)}")
        values = {columns.score: values[columns.score]}
    if others and not values:
        raise ValueError("; ".join(others.values()))
    metrics, cluster = {}, ""
    for name, own in values.items():
        chosen = [rows[item] for item in own]
        cluster = columns.cluster or first_named(CLUSTER_NAMES, chosen)
        metrics[name] = score_items(chosen, [float(np.mean(epochs)) for epochs in own.values()], item_column, cluster)
    evaluated = header.get("eval") or {}
    notes = [f"items: {item_column}", explain_clusters(cluster)]
    if any(len(epochs) > 1 for own in values.values() for epochs in own.values()):
        notes.append("epochs of a sample are averaged")
    notes += [f"not compared: {message}" for message in others.values()]
    for name, own in values.items():
        if unscored := [item for item in rows if item not in own]:
            notes.append(explain_unscored(name, unscored))
    return [Run(model=str(evaluated.get("model", "")), seed="", source=path, metrics=metrics, notes=notes)]


def _hash_of_sample(sample: Row) -> str:
    """Return a hash of a sample's question, choices and target; of messages only the texts, as their ids are random.

    "" if the log has none of them.
    """
    asked = sample.get("input")
    if isinstance(asked, list):
        parts = [message.get("content") for message in asked if isinstance(message, dict)]
        asked = [
            part if isinstance(part, str) else [one.get("text") for one in part if isinstance(one, dict)]
            for part in parts
            if isinstance(part, str | list)
        ]
    content = [asked, sample.get("choices"), sample.get("target")]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest() if any(content) else ""


def _inspect_number(value: Any) -> float | None:
    """Return a score's number as Inspect's `value_to_float` does; NaN: not scored, None: not a number."""
    if isinstance(value, str):
        value = INSPECT_VALUES.get(value, INSPECT_WORDS.get(value.lower(), value))
    return math.nan if value is None else to_float(value)
