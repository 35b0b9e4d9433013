"""Hypothesis strategies that turn a valid file into a malformed one: by its bytes, and by its content."""

from __future__ import annotations

import copy
import io
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

TOKENS = (
    *(
        b"",
        b"\0",
        b"\xff",
        b"\n",
        b"\r",
        b'"',
        b"\t",
        b",",
        b"{",
        b"[",
        b"}",
        b"]",
        b"-",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
    ),
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"null", b"true", b"\\ud800", b"&a", b"*a", b"!!python/object:os.system"),
    *(b"../../outside/secret.txt", b"/etc/passwd", b"9" * 40, b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"a" * 3000),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 10**4299, 1e308, -0.0, math.nan, math.inf),
    *("", "x", "\0", "\ud800", "../../outside/secret.txt", "/etc/passwd", "9" * 5000, "NaN", "<script>", "x" * 5000),
    *([], {}, [[]], [None], {"": {}}, [0] * 50, {"a": [{"b": None}]}, [[[[[[[[]]]]]]]], ["x", 1], 0.5, 3, "1"),
)


def inputs(form: str, seeds: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Hostile inputs made of `seeds`; some bytes at random among them."""
    seed = st.sampled_from(list(seeds))
    by_bytes = st.builds(_change_bytes, seed, st.lists(_EDITS, min_size=1, max_size=5))
    others = [st.binary(max_size=200)] if form != "parquet" else []
    by_sense = {
        "json": _change_json,
        "lines": _change_line,
        "yaml": _change_yaml,
        "safetensors": _change_safetensors,
        "parquet": _change_parquet,
    }.get(form)
    if by_sense is None:
        return st.one_of(by_bytes, by_bytes, by_bytes, *others)
    sensible = st.builds(by_sense, seed, st.lists(st.tuples(_PLACES, _VALUES), min_size=1, max_size=3))
    return st.one_of(sensible, sensible, sensible, sensible, by_bytes, by_bytes, *others)


_SHARES = st.integers(0, 2**16)  # a place in something, whatever its length
_PLACES = st.lists(_SHARES, min_size=1, max_size=6)
_VALUES = st.one_of(
    st.sampled_from(VALUES),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-3, 3), max_size=5),
    st.just(KeyError),  # the key goes
)
_EDITS = st.tuples(
    st.sampled_from(("flip", "set", "insert", "delete", "double", "cut", "token", "number")),
    *(_SHARES, _SHARES),
    st.sampled_from(TOKENS),
    st.integers(0, 2**64 - 1),
)


def _change_bytes(data: bytes, edits: list[tuple[str, int, int, bytes, int]]) -> bytes:
    for kind, place, length, token, number in edits:
        at = place * max(len(data), 1) >> 16
        end = min(len(data), at + 1 + (length * 64 >> 16))
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << number % 8]) + data[at + 1 :]
        elif kind == "set":
            data = data[:at] + bytes([number & 255]) * (end - at) + data[end:]
        elif kind in ("insert", "token"):
            data = data[:at] + token + data[at if kind == "insert" else end :]
        elif kind == "delete":
            data = data[:at] + data[end:]
        elif kind == "double":
            data = data[:end] + data[at:end] * (1 + number % 30) + data[end:]
        elif kind == "cut":
            data = data[:at]
        elif kind == "number":
            data = data[:at] + struct.pack("<Q", number) + data[at + 8 :]
    return data


Changes = list[tuple[list[int], Any]]


def _change_json(data: bytes, changes: Changes) -> bytes:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return json.dumps(_changed(document, changes)).encode("utf-8", "surrogatepass")


def _change_line(data: bytes, changes: Changes) -> bytes:
    lines = data.split(b"\n")
    at = changes[0][0][0] * len(lines) >> 16 if changes[0][0][0] < 2**16 else 0
    lines[at] = _change_json(lines[at], changes)
    return b"\n".join(lines)


def _change_yaml(data: bytes, changes: Changes) -> bytes:
    try:
        document = yaml.safe_load(data)
        return yaml.safe_dump(_changed(document, changes), sort_keys=False).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError, ValueError):
        return data


def _change_safetensors(data: bytes, changes: Changes) -> bytes:
    """In the header (names, types, shapes, offsets), or the same number all over the contents."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    value = changes[0][1]
    if isinstance(value, float):
        kind, pattern = (
            changes[0][0][0] % 3,
            struct.pack("<f", min(max(value, -3e38), 3e38) if value == value else value),
        )
        pattern = (b"\x00\x7e", b"\x00\x7c", pattern[2:])[kind]  # NaN and infinity in float16, or these bits
        return data[: 8 + length] + (pattern * len(body))[: len(body)]
    changed = _change_json(header, changes)
    return len(changed).to_bytes(8, "little") + changed + body


def _change_parquet(data: bytes, changes: Changes) -> bytes:
    """Cells; a value that the column can't hold becomes one that it can."""
    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError, ValueError):
        return data
    rows = table.to_pylist()
    for places, value in changes:
        row = rows[places[0] * len(rows) >> 16] if places[0] < 2**16 else rows[0]
        name = table.column_names[places[-1] % len(table.column_names)]
        kind = table.schema.field(name).type
        for candidate in (
            value,
            2**31 - 1 - places[0],
            -(2**31) + places[0],
            "../x",
            [repr(value)[:9]],
        ):
            try:
                pa.array([candidate], kind)
            except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
                continue
            row[name] = candidate
            break
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), buffer, compression="zstd")
    return buffer.getvalue()


def _changed(document: Any, changes: Changes) -> Any:
    document = copy.deepcopy(document)
    for places, value in changes:
        document = _put(document, places, copy.deepcopy(value))  # else a later change puts it into itself
    return document


def _put(node: Any, places: list[int], value: Any) -> Any:
    """Another value somewhere below `node`: each place chooses a key, the last one or a leaf is replaced."""
    if not isinstance(node, (dict, list)) or not node or not places:
        return node if value is KeyError else value
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = keys[places[0] % len(keys)]
    if value is KeyError and (len(places) == 1 or not isinstance(node[key], (dict, list))):
        del node[key]
    else:
        node[key] = _put(node[key], places[1:], value)
    return node
