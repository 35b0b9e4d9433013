"""Read tar files from untrusted sources: what a shard may contain, and how each member is decoded.

A shard has plain files named `<key>.<extension>` with an extension of the table below, and nothing else. Nothing is
ever extracted, unpickled or run; sizes are checked in the header before anything is read.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.images import MAX_IMAGE_PIXELS
from vlp_models.data.sample import REGION_DTYPES, RegionArrays
from vlp_models.errors import DataError

BLOCK = tarfile.BLOCKSIZE  # 512: size of a header, and the unit that contents are padded to
REGIONS = "regions.safetensors"

_MEGABYTE = 1 << 20
_MAX_BYTES = {
    "json": 16 * _MEGABYTE,
    REGIONS: 256 * _MEGABYTE,
    "png": 256 * _MEGABYTE,  # same limit as data/images.py
    "jpg": 256 * _MEGABYTE,
    "txt": _MEGABYTE,
}
Offsets = TypeVar("Offsets", int, NDArray[np.int64])
KEY = "[A-Za-z0-9_%-]"  # one character of an image's key
_NAME = re.compile(rf"({KEY}+)\.([a-z.]+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file of a shard. `offset`: where its contents start in the tar, in bytes."""

    name: str
    key: str
    extension: str
    offset: int
    size: int


def check_tar(path: Path) -> list[Member]:
    """Return the members of a shard in order, from their headers alone.

    Raises:
        DataError: a path instead of a name, a link, a device, a directory, an unknown extension, a duplicate name, a
            member that is too large, a damaged or truncated archive.
    """
    members: list[Member] = []
    names: set[str] = set()
    size = path.stat().st_size
    with path.open("rb") as file:
        position = 0
        while True:
            header = file.read(BLOCK)
            try:
                # headers are read one by one: tarfile itself would apply extended headers
                info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                return members
            except (tarfile.HeaderError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: no tar header at byte {position}: {error}; build the shards again") from None
            member = _check_member(path, info, position + BLOCK)
            if member.name in names:
                raise DataError(f"{path}: duplicate member {member.name}")
            names.add(member.name)
            members.append(member)
            position = padded(member.offset + member.size)
            if position > size:
                raise DataError(f"{path}: truncated within {member.name}; build the shards again")
            file.seek(position)


def padded(end: Offsets) -> Offsets:
    """Return where the next header starts after contents that end here: contents are padded to whole blocks."""
    return -(-end // BLOCK) * BLOCK


def _check_member(path: Path, info: tarfile.TarInfo, offset: int) -> Member:
    def refuse(why: str) -> DataError:
        return DataError(f"{path}: member {info.name!r} refused: {why}")

    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise refuse("only plain files are read; no links, devices, directories or header extensions")
    match = _NAME.fullmatch(info.name)
    if match is None:
        raise refuse("a name is letters, digits, _, - and %, then an extension; no path and no command")
    key, extension = match.groups()
    if extension not in _MAX_BYTES:
        raise refuse(f"extension .{extension} is not one of {', '.join(_MAX_BYTES)}")
    if not 0 <= info.size <= _MAX_BYTES[extension]:
        raise refuse(f"{info.size} bytes; .{extension} may have at most {_MAX_BYTES[extension]}")
    return Member(name=info.name, key=key, extension=extension, offset=offset, size=info.size)


def read_member(path: Path, name: str, offset: int, size: int) -> bytes:
    """Return the contents of one member of an index, after checking its header.

    Raises:
        DataError: the shard is missing, or has something else at this offset.
    """
    # An unknown extension allows -1 bytes, which no size fits.
    if not 0 <= size <= _MAX_BYTES.get(name.partition(".")[2], -1):
        raise DataError(f"{path}: {name}: invalid size of {size} bytes; build the shards again")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise DataError(f"{path}: no such shard; run `dvc repro shards`") from None
    try:
        # header and contents in one read
        data = os.pread(descriptor, BLOCK + size, offset - BLOCK) if offset >= BLOCK else b""
    finally:
        os.close(descriptor)
    # name in the first 100 bytes, size as octal digits in 124..136
    header = data[:100].rstrip(b"\0"), data[124:135]
    if len(data) != BLOCK + size or header != (name.encode(), b"%011o" % size):
        raise DataError(f"{path}: {name} is not at the offset in the index; build the shards again")
    return data[BLOCK:]


def decode(extension: str, data: bytes, *, where: str) -> Any:
    """Return a member's value: a dict, `RegionArrays`, the image file's own bytes, or a string.

    Raises:
        DataError: the contents are invalid; `where` names the member.
    """
    try:
        return _DECODERS[extension](data)
    except Exception as error:  # decoders raise anything on bad contents
        raise DataError(f"{where}: not a valid .{extension}: {error}; build the shards again") from None


def _decode_json(data: bytes) -> dict[str, Any]:
    value = json.loads(data.decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def encode_regions(regions: RegionArrays, where: str = "regions") -> bytes:
    """Return a member's bytes; `where` names the image in errors.

    Raises:
        DataError: `decode` would refuse it: a value that is not finite (float16 ends at 65504), boxes outside [0, 1].
    """
    import safetensors.numpy

    arrays = {name: np.ascontiguousarray(getattr(regions, name), dtype=dtype) for name, dtype in REGION_DTYPES.items()}
    try:
        # Checked after the conversion: float16 turns large values into infinity.
        _check_regions(RegionArrays(**arrays))
    except ValueError as error:
        raise DataError(
            f"{where}: {error}; fix it at its source, or run `dvc repro --force --single-item features`"
        ) from None
    return safetensors.numpy.save(arrays)


def _decode_regions(data: bytes) -> RegionArrays:
    import safetensors.numpy

    arrays = safetensors.numpy.load(data)
    missing = [name for name in REGION_DTYPES if name not in arrays]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    regions = RegionArrays(**{name: arrays[name] for name in REGION_DTYPES})
    for name, dtype in REGION_DTYPES.items():
        if getattr(regions, name).dtype != dtype:
            raise ValueError(f"{name} of type {getattr(regions, name).dtype} instead of {np.dtype(dtype).name}")
    _check_regions(regions)
    return regions


def _check_regions(regions: RegionArrays) -> None:
    """Check shapes and values of all arrays; a ValueError names the invalid one."""
    # N rows each
    features, boxes, probs, scores = (getattr(regions, name) for name in REGION_DTYPES)
    rows = features.shape[:1]
    shapes_fit = boxes.shape == (*rows, 4) and probs.shape[:1] == rows and scores.shape == rows
    if not shapes_fit or features.ndim != 2 or probs.ndim != 2:
        raise ValueError(f"lengths of arrays differ: {[(k, getattr(regions, k).shape) for k in sorted(REGION_DTYPES)]}")
    for name in REGION_DTYPES:
        if not np.isfinite(getattr(regions, name)).all():
            raise ValueError(f"{name} has a value that is not finite")
    if boxes.size and not (boxes.min() >= 0 and boxes.max() <= 1):
        raise ValueError(f"boxes from {boxes.min():g} to {boxes.max():g}, expected fractions of width and height")


def _check_image(data: bytes) -> bytes:
    """Check the size of an image in its header; nothing is decoded."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=["PNG", "JPEG"]) as image:
        width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"{width} x {height} pixels; {MAX_IMAGE_PIXELS} are allowed")
    return data


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "json": _decode_json,
    REGIONS: _decode_regions,
    "png": _check_image,
    "jpg": _check_image,
    "txt": lambda data: data.decode("utf-8"),
}
