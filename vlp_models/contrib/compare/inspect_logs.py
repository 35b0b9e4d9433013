"""Logs of Inspect: `.eval` archives and JSON."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import re
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
    texts,
    to_float,
)
from vlp_models.errors import MissingToolError

INSPECT_VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # correct, incorrect, partial, no answer
INSPECT_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # in any case
ZSTANDARD = 93  # a zip member's compression
CHUNK_REFERENCE = re.compile(r"attachment://\d{1,31}")
WHOLE_SAMPLE, CHUNKED_SAMPLE = (
    re.compile(r"samples/.*_epoch_\d+\.json"),
    re.compile(r"samples/.*_epoch_\d+/sample\.json"),
)


def read_inspect_archive(path: Path, columns: Columns) -> list[Run]:
    with zipfile.ZipFile(path) as archive:
        check_size(path, archive)
        members = {member.filename: member for member in archive.infolist()}

        def read(name: str) -> Any:
            return json.loads(_read_member(path, archive, members[name]))

        # Inspect writes the header last: a process that was killed has left none.
        header = read("header.json") if "header.json" in members else {"status": "started"}
        samples = []
        for name in sorted(members):
            if WHOLE_SAMPLE.fullmatch(name):
                samples.append(read(name))
            # In a converted log, a sample is a folder with its metadata and its messages in files of their own.
            elif CHUNKED_SAMPLE.fullmatch(name):
                metadata = name.removesuffix("sample.json") + "metadata.json"
                samples.append(read(name) | ({"metadata": read(metadata)} if metadata in members else {}))
    return read_inspect(path, header, samples, columns)


def _read_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member's content; Inspect compresses with Zstandard, which Python's zipfile reads from 3.14 on."""
    if member.compress_type != ZSTANDARD:
        return read_zip_member(archive, member)
    try:
        import pyarrow as pa
    except ModuleNotFoundError:
        raise MissingToolError(f"{path}: reading it needs pyarrow: pip install pyarrow") from None
    packed = copy.copy(member)  # zipfile returns the packed bytes of a member that is stored and has no checksum
    packed.compress_type, packed.file_size = zipfile.ZIP_STORED, member.compress_size
    del packed.CRC
    with archive.open(packed) as file:
        content = file.read()
    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        # One byte more than declared: longer content is noticed without unpacking all of it.
        unpacked = bytes(stream.read(member.file_size + 1))
    if len(unpacked) != member.file_size:
        raise ValueError(f"{member.filename} does not have the {member.file_size:,} bytes that it declares")
    return unpacked


def read_inspect(path: Path, header: Row, samples: Sequence[Row], columns: Columns) -> list[Run]:
    """Return the log's run; the epochs of a sample are averaged.

    Samples without ids of their own are numbered after a shuffle, so their contents are compared, too.
    """
    item_column = columns.item or "id"
    values: dict[str, dict[str, list[float]]] = {}
    others: dict[str, str] = {}  # scorer that is not compared -> its first value that is not a number
    rows: dict[str, Row] = {}
    invalid = []
    for sample in samples:
        # `id` comes last, so a metadata key of that name does not replace it.
        row = {**(sample.get("metadata") or {}), "id": str(sample["id"])}
        item = text(row.get(item_column))
        rows[item] = {**row, "doc_hash": _hash_of_sample(sample)}
        if sample.get("invalidation"):
            invalid.append(item)
            continue
        # A score is a value, or a dictionary of several, which become the metrics SCORER/NAME.
        for scorer, score in (sample.get("scores") or {}).items():
            score = score.get("value") if isinstance(score, dict) else None
            by_name = score if isinstance(score, dict) else {"": score}
            for name, value in by_name.items():
                metric, number = f"{scorer}/{name}" if name else scorer, _inspect_number(value)
                if number is None:
                    others.setdefault(metric, f"sample {item}: {metric} is {str(value)[:50]!r}, not a number")
                elif not math.isnan(number):
                    # NaN stands for an epoch that was not scored, which does not count.
                    values.setdefault(metric, {}).setdefault(item, []).append(number)
    # A scorer with any text among its values, such as an explanation, is no metric.
    values = {metric: numbers for metric, numbers in values.items() if metric not in others}
    if columns.score:
        if columns.score not in values:
            raise ValueError(f"no scorer {columns.score} with numbers; there are: {', '.join(values)}")
        values = {columns.score: values[columns.score]}
    if others and not values:
        raise ValueError("; ".join(others.values()))
    metrics, cluster, unscored, epochs = {}, "", [], 1
    for metric, by_item in values.items():
        chosen = [rows[item] for item in by_item]
        cells = functools.partial(_cells, chosen)
        cluster = columns.cluster or first_named(CLUSTER_NAMES, cells)
        metrics[metric] = score_items(
            list(by_item),
            # One value per sample: the mean over its epochs.
            [float(np.mean(by_epoch)) for by_epoch in by_item.values()],
            texts(cells(cluster)) if cluster else [],
            item=item_column,
            cluster=cluster,
            row_at=chosen.__getitem__,
            contents={"doc_hash": texts(cells("doc_hash"))},
        )
        epochs = max(epochs, *map(len, by_item.values()))
        if missing := [item for item in rows if item not in by_item]:
            unscored.append(explain_unscored(metric, missing))
    evaluation = header.get("eval") or {}
    reducers = (evaluation.get("config") or {}).get("epochs_reducer") or ["mean"]
    notes = [
        f"items: {item_column}",
        explain_clusters(cluster),
        *["epochs of a sample are averaged"] * (epochs > 1),
        *[f"the log itself reduces epochs by {', '.join(reducers)}"] * (epochs > 1 and reducers != ["mean"]),
        *(f"not compared: {message}" for message in others.values()),
        *unscored,
        *[f"{len(invalid):,} samples were declared invalid: {', '.join(invalid[:5])}"] * bool(invalid),
    ]
    # Logs of programs that only resemble Inspect have no status.
    status = header.get("status", "success")
    unfinished = "" if status == "success" else f"the log's status is {status}, so samples may be missing"
    model = str(evaluation.get("model", ""))
    return [Run(model=model, seed="", source=path, metrics=metrics, notes=notes, unfinished=unfinished)]


def _cells(rows: Sequence[Row], name: str) -> list[Any]:
    return [row.get(name) for row in rows]


def _hash_of_sample(sample: Row) -> str:
    """Return a hash of a sample's question, choices and target; of messages only the texts, as their ids are random.

    "" if the log has none of them.
    """
    question = sample.get("input")
    if isinstance(question, str) and CHUNK_REFERENCE.fullmatch(question):
        question = None  # a long text of a converted log, kept elsewhere in its archive under a number
    if isinstance(question, list):
        texts: list[Any] = []
        for message in question:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                texts.append([part.get("text") for part in content if isinstance(part, dict)])
            elif isinstance(content, str):
                texts.append(content)
        question = texts
    parts = [question, sample.get("choices"), sample.get("target")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest() if any(parts) else ""


def _inspect_number(value: Any) -> float | None:
    """Return a score's number as Inspect's `value_to_float` does; NaN: not scored, None: not a number."""
    if isinstance(value, str):
        # C, I, P and N in upper case only; yes, no, true and false in any case.
        value = INSPECT_VALUES.get(value, INSPECT_WORDS.get(value.lower(), value))
    return math.nan if value is None else to_float(value)
