"""Blocks of shards: runs of neighbouring images, a few megabytes each, read in one piece.

A block is what one request fetches; webdataset takes it apart. Which images are neighbours, and where each block
begins and ends, follows from the index alone.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from vlp_models.data.shards.archive import BLOCK
from vlp_models.data.shards.write import shard_name
from vlp_models.errors import DataError, ParamsError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

AT_ONCE = 8  # requests under way in a process
Places = Callable[[], Iterator[NDArray[np.int64]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the samples of a dataset lie. Of the K blocks that hold any, in the order of the shards:

    keys    int64 [K]: the shard, and which of its blocks
    begins, ends  int64 [K]: the bytes of the tar in which its images lie
    counts  int64 [K]: its samples
    order   int64 [N]: the samples, block after block; None: as they are
    """

    block_bytes: int
    keys: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    counts: NDArray[np.int64]
    order: NDArray[np.int64] | None

    @classmethod
    def of(cls, places: Places, block_bytes: int) -> Layout:
        """
        Args:
            places: int64 [n, 3], piece by piece, all N in the end: of each sample the shard, and where in its tar the
                members of its image begin (the first header) and end.
        """
        groups: list[NDArray[np.int64]] = []
        in_order, last = True, -1
        for piece in places():
            keys = _keys(piece, block_bytes)
            in_order = in_order and bool((np.diff(keys, prepend=last) >= 0).all())
            last = int(keys[-1]) if len(keys) else last
            groups.append(_grouped(keys, piece[:, 1], piece[:, 2], np.ones_like(keys)))
        keys, begins, ends, counts = _grouped(*np.concatenate(groups, axis=1))
        order = None
        if not in_order:
            order = np.argsort(np.concatenate([_keys(piece, block_bytes) for piece in places()]), kind="stable")
        return cls(block_bytes=block_bytes, keys=keys, begins=begins, ends=ends, counts=counts, order=order)

    def key(self, shard: int, begin: int) -> int:
        return shard << 32 | begin // self.block_bytes

    def span(self, key: int) -> tuple[int, int, int] | None:
        """Shard, begin and end of a block; None of one in which the dataset has no sample of its own."""
        place = int(np.searchsorted(self.keys, key))
        if place == len(self.keys) or self.keys[place] != key:
            return None
        return key >> 32, int(self.begins[place]), int(self.ends[place])


def _keys(places: NDArray[np.int64], block_bytes: int) -> NDArray[np.int64]:
    return places[:, 0] << 32 | places[:, 1] // block_bytes


def _grouped(
    keys: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64 [4, K]: each key once, its least begin, its last end, its sum of counts."""
    unique, inverse = np.unique(keys, return_inverse=True)
    least, most, total = np.full(len(unique), np.iinfo(np.int64).max), np.zeros_like(unique), np.zeros_like(unique)
    np.minimum.at(least, inverse, begins)
    np.maximum.at(most, inverse, ends)
    np.add.at(total, inverse, counts)
    return np.stack([unique, least, most, total])


@dataclass
class BlockReader:
    """The members of one split's shards, by the block. A process holds `buffer_bytes` of blocks, those used last."""

    store: Store
    split: str
    layout: Layout | None  # None: every image by itself
    buffer_bytes: int
    requests: int = 0
    _held: OrderedDict[int, dict[str, bytes]] = field(default_factory=OrderedDict, repr=False)
    _size: int = field(default=0, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, repr=False)
    _process: int = field(default=0, repr=False)

    def fetch(self, places: Iterable[tuple[int, int, int]]) -> dict[str, bytes]:
        """The members of these images and of their neighbours, by name; several blocks are asked for at once.

        Args:
            places: of each image the shard, and where in its tar its members begin and end.

        Raises:
            DataError: a shard is missing, denied, cut short or no tar, or the store is away for too long.
        """
        if self._process != os.getpid():  # neither threads nor what they hold survive a fork
            self._held, self._size, self._process = OrderedDict(), 0, os.getpid()
            self._pool = ThreadPoolExecutor(AT_ONCE)
        found: dict[str, bytes] = {}
        held: set[int] = set()
        missing: dict[int, tuple[int, int, int]] = {}
        for shard, begin, end in places:
            key = self.layout.key(shard, begin) if self.layout is not None else -1
            span = self.layout.span(key) if self.layout is not None else None
            if span is None:  # by itself, as an image that a row names beside its own
                missing[-1 - len(missing)] = (shard, begin, end)
            elif key in self._held and key not in held:
                self._held.move_to_end(key)
                held.add(key)
                found |= self._held[key]
            elif key not in held:
                missing[key] = span
        assert self._pool is not None
        self.requests += len(missing)
        for key, members in zip(missing, self._pool.map(self._read, missing.values()), strict=True):
            found |= members
            if key >= 0:
                self._held[key] = members
                self._size += sum(map(len, members.values()))
        while self._size > self.buffer_bytes and len(self._held) > 1:
            _, members = self._held.popitem(last=False)
            self._size -= sum(map(len, members.values()))
        return found

    def _read(self, span: tuple[int, int, int]) -> dict[str, bytes]:
        from webdataset.tariterators import tar_file_iterator

        shard, begin, end = span
        name = shard_name(self.split, shard)
        data = self.store.read(name, begin, end)
        try:
            members = tar_file_iterator(io.BytesIO(data), select_files=_is_of_image)
            return {member["fname"]: member["data"] for member in members}
        except Exception as error:  # whatever tarfile raises, the bytes are at fault
            raise DataError(
                f"{self.store.where(name)}: bytes {begin:,} to {end:,} are no part of a tar: {error}; "
                "upload this shard again"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict(), "_size": 0, "_pool": None, "_process": 0}


def _is_of_image(name: str) -> bool:
    """The texts stand in the index."""
    return not name.endswith(".json")


@overload
def padded(end: int) -> int: ...
@overload
def padded(end: NDArray[np.int64]) -> NDArray[np.int64]: ...
def padded(end: Any) -> Any:
    """Where the contents that end here are followed by another header."""
    return -(-end // BLOCK) * BLOCK


TRIES = 3  # of a read that comes back short
LONGEST = 30.0  # seconds between two tries
# S3's names of what waiting does not mend; s3fs has most of them as a bare OSError
WRONG_ADDRESS = ("InvalidBucketName", "AuthorizationHeaderMalformed", "PermanentRedirect", "InvalidLocationConstraint")
ONCE = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}  # botocore's: we ask again


@dataclass
class Store:
    """
    address     a folder, or what fsspec understands: `s3://bucket/prefix`
    timeout_seconds    seconds that a server may be away
    retry_seconds  seconds before the second try; doubled for each one after it
    """

    address: str
    timeout_seconds: float = 300.0
    retry_seconds: float = 0.5
    _system: AbstractFileSystem | None = field(default=None, repr=False, compare=False)
    _process: int = field(default=0, repr=False, compare=False)

    def where(self, name: str) -> str:
        return f"{self.address}{'' if self.address.endswith('/') else '/'}{name}"

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` of a file; to its end without one.

        Raises:
            DataError: the file is missing or shorter, access is denied, or the store did not answer in time.
            ParamsError: the package that speaks to this kind of store is not installed.
        """
        started, wait, short, away = time.monotonic(), self.retry_seconds, 0, False
        while True:
            try:
                data = self._ask(name, begin, end)
            except (DataError, ParamsError):
                raise
            except Exception as error:  # each store has errors of its own for being away
                if time.monotonic() - started + wait > self.timeout_seconds:
                    raise DataError(
                        f"{self.where(name)}: the store did not answer for {self.timeout_seconds:g} seconds: "
                        f"{type(error).__name__}: {error}; the same command goes on from the last checkpoint"
                    ) from None
                if not away:
                    away = True
                    print(
                        f"{self.where(name)}: the store is away ({type(error).__name__}); asked again for up to "
                        f"{self.timeout_seconds:g} seconds",
                        file=sys.stderr,
                        flush=True,
                    )
                self._system = None
            else:
                if end is None or len(data) == end - begin:
                    return data
                short += 1
                if short == TRIES:
                    raise DataError(
                        f"{self.where(name)}: cut short: {len(data):,} of {end - begin:,} bytes from byte {begin:,} "
                        f"on, {TRIES} times; upload this shard again"
                    )
            time.sleep(wait)
            wait = min(2 * wait, LONGEST)

    def _ask(self, name: str, begin: int, end: int | None) -> bytes:
        try:
            found = self._open().cat_file(self.where(name), start=begin or None, end=end)
        except FileNotFoundError:
            raise DataError(
                f"{self.where(name)}: no such {_file(self.address, name)}; upload data/shards there"
            ) from None
        except PermissionError as error:
            raise DataError(
                f"{self.where(name)}: access denied to {_file(self.address, name)} ({error}); the credentials of this "
                "process (AWS_PROFILE, AWS_ACCESS_KEY_ID or the machine's role) need s3:GetObject there"
            ) from None
        except Exception as error:
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
                raise DataError(
                    f"{self.where(name)}: no credentials for {_file(self.address, name)} ({error}); set AWS_PROFILE, "
                    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                ) from None
            if _beyond(error):
                return b""
            if type(error).__name__ == "ParamValidationError" or _code(error) in WRONG_ADDRESS:
                raise DataError(
                    f"{self.where(name)}: no such address ({error}); trainer.stream.address names the bucket, "
                    "AWS_DEFAULT_REGION its region and AWS_ENDPOINT_URL its server"
                ) from None
            raise
        assert isinstance(found, bytes)
        return found

    def _open(self) -> AbstractFileSystem:
        """Each process its own: connections do not survive a fork."""
        if self._system is None or self._process != os.getpid():
            import fsspec

            options = {"config_kwargs": ONCE} if self.address.startswith(("s3://", "s3a://")) else {}
            try:
                self._system, _ = fsspec.url_to_fs(self.address, skip_instance_cache=True, **options)
            except ImportError as error:
                way_out = "; install the extra `s3`" if options else ""
                raise ParamsError(f"trainer.stream.address: {self.address}: {error}{way_out}") from None
            except ValueError as error:  # a kind of store that nobody knows
                raise ParamsError(f"trainer.stream.address: {self.address}: {error}") from None
            self._process = os.getpid()
        return self._system

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_system": None}


def _beyond(error: Exception) -> bool:
    """Whether the file ends before the range begins: HTTP's 416, as S3 and as others say it."""
    return _code(error) == "InvalidRange" or getattr(error, "status", None) == 416


def _code(error: Exception) -> str | None:
    """S3's own name of what went wrong."""
    response = getattr(error.__cause__ or error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _file(address: str, name: str) -> str:
    """`bucket b, key k`, or the file."""
    scheme, found, path = address.partition("://")
    if not found:
        return "file"
    bucket, _, prefix = path.partition("/")
    return f"{scheme} bucket {bucket}, key {'/'.join(filter(None, (prefix.strip('/'), name)))}"
