"""Stream shards: byte ranges from a folder or an object store (`s3://bucket/prefix`), fetched by the block.

A block is a run of adjacent images, a few megabytes, that one request fetches; webdataset unpacks it. Which images are
adjacent, and where each block begins and ends, follows from the index alone.

If a server does not respond, requests are retried at growing intervals for up to `timeout_seconds`, and a warning is
logged; missing files and denied access are errors at once. Credentials come from where the store's own tools look for
them, never from params.yaml.
"""

from __future__ import annotations

import io
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from vlp_models.common.log import get_logger
from vlp_models.data.shards.archive import BLOCK
from vlp_models.data.shards.write import shard_name
from vlp_models.errors import DataError, ParamsError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = get_logger(__name__)

PARALLEL_REQUESTS = 8  # per process
TRIES = 3  # if a read returns too few bytes
MAX_WAIT = 30.0  # seconds between two tries
# S3 errors that waiting does not fix; s3fs raises most of them as a bare OSError
WRONG_ADDRESS = ("InvalidBucketName", "AuthorizationHeaderMalformed", "PermanentRedirect", "InvalidLocationConstraint")
# botocore does not retry, because `Store` does
S3_OPTIONS = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}
Spans = Callable[[], Iterator[NDArray[np.int64]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Where the samples of a dataset are. For the K blocks with samples, in the order of the shards:

    keys          int64 [K]: shard, and which of its blocks
    begins, ends  int64 [K]: byte range of its images in the tar
    counts        int64 [K]: number of samples
    order         int64 [N]: the samples, block after block; None: they are in this order already
    """

    block_bytes: int
    keys: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    counts: NDArray[np.int64]
    order: NDArray[np.int64] | None

    @classmethod
    def of(cls, spans: Spans, block_bytes: int) -> Layout:
        """Make the layout.

        Args:
            spans: yields int64 [n, 3], N rows in total: per sample the shard, and where in its tar the members of its
                image begin (the first header) and end.
        """
        # grouped piece by piece, then all groups again: memory does not grow with the samples
        groups: list[NDArray[np.int64]] = []  # each int64 [4, K]
        in_order, last = True, -1
        for piece in spans():
            keys = _block_keys(piece, block_bytes)
            in_order = in_order and bool((np.diff(keys, prepend=last) >= 0).all())
            last = int(keys[-1]) if len(keys) else last
            groups.append(_group_by_key(keys, piece[:, 1], piece[:, 2], np.ones_like(keys)))
        keys, begins, ends, counts = _group_by_key(*np.concatenate(groups, axis=1))
        order = None
        if not in_order:
            order = np.argsort(np.concatenate([_block_keys(piece, block_bytes) for piece in spans()]), kind="stable")
        return cls(block_bytes=block_bytes, keys=keys, begins=begins, ends=ends, counts=counts, order=order)

    def key(self, shard: int, begin: int) -> int:
        """Return the key of the block with this byte of a shard."""
        # The shard in the upper 32 bits, the block within it in the lower ones: keys sort by shard, then by position.
        return shard << 32 | begin // self.block_bytes

    def span(self, key: int) -> tuple[int, int, int] | None:
        """Return shard, begin and end of a block; None if the dataset has no sample in it."""
        # keys are sorted
        block = int(np.searchsorted(self.keys, key))
        if block == len(self.keys) or self.keys[block] != key:
            return None
        return key >> 32, int(self.begins[block]), int(self.ends[block])


def _block_keys(spans: NDArray[np.int64], block_bytes: int) -> NDArray[np.int64]:
    """Return int64 [n]: the `Layout.key` of the block in which each span begins."""
    return spans[:, 0] << 32 | spans[:, 1] // block_bytes


def _group_by_key(
    keys: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return int64 [4, K]: each key once, its smallest begin, largest end and sum of counts."""
    unique, inverse = np.unique(keys, return_inverse=True)
    # Start values that any begin and any end replace.
    smallest, largest = np.full(len(unique), np.iinfo(np.int64).max), np.zeros_like(unique)
    total = np.zeros_like(unique)
    np.minimum.at(smallest, inverse, begins)
    np.maximum.at(largest, inverse, ends)
    np.add.at(total, inverse, counts)
    return np.stack([unique, smallest, largest, total])


@dataclass
class BlockReader:
    """Reads members of one split's shards by the block. Keeps up to `buffer_bytes` of the most recently used blocks."""

    store: Store
    split: str
    layout: Layout | None  # None: each image is requested separately
    buffer_bytes: int
    requests: int = 0
    _held: OrderedDict[int, dict[str, bytes]] = field(default_factory=OrderedDict, repr=False)
    _size: int = field(default=0, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, repr=False)
    _process: int = field(default=0, repr=False)

    def fetch(self, spans: Iterable[tuple[int, int, int]]) -> dict[str, bytes]:
        """Return the members of these images and of adjacent ones, by name; several blocks are requested in parallel.

        Args:
            spans: per image the shard, and where in its tar its members begin and end.

        Raises:
            DataError: a shard is missing, access is denied, it is truncated or not a tar, or the store does not
                respond.
        """
        if self._process != os.getpid():  # threads and buffered blocks do not survive a fork
            self._held, self._size, self._process = OrderedDict(), 0, os.getpid()
            self._pool = ThreadPoolExecutor(PARALLEL_REQUESTS)
        members: dict[str, bytes] = {}
        buffered: set[int] = set()  # keys of the blocks that are added to `members` already
        missing: dict[int, tuple[int, int, int]] = {}  # key of a block, or a negative number -> byte range to request
        for shard, begin, end in spans:
            key = self.layout.key(shard, begin) if self.layout is not None else -1
            block_span = self.layout.span(key) if self.layout is not None else None
            if block_span is None:  # requested separately, e.g. the second image of a pair
                missing[-1 - len(missing)] = (shard, begin, end)
            elif key in self._held and key not in buffered:
                self._held.move_to_end(key)
                buffered.add(key)
                members |= self._held[key]
            elif key not in buffered:
                missing[key] = block_span
        assert self._pool is not None
        self.requests += len(missing)
        # Blocks of one batch are requested in parallel, each once.
        for key, block in zip(missing, self._pool.map(self._read, missing.values()), strict=True):
            members |= block
            if key >= 0:  # a whole block: its other images are likely requested next
                self._held[key] = block
                self._size += sum(map(len, block.values()))
        # drop the least recently used blocks
        while self._size > self.buffer_bytes and len(self._held) > 1:
            _, block = self._held.popitem(last=False)
            self._size -= sum(map(len, block.values()))
        return members

    def _read(self, span: tuple[int, int, int]) -> dict[str, bytes]:
        from webdataset.tariterators import tar_file_iterator

        shard, begin, end = span
        name = shard_name(self.split, shard)
        data = self.store.read(name, begin, end)
        try:
            # texts are in the index
            members = tar_file_iterator(io.BytesIO(data), select_files=lambda name: not name.endswith(".json"))
            return {member["fname"]: member["data"] for member in members}
        except Exception as error:  # tarfile raises anything on bad contents
            raise DataError(
                f"{self.store.url(name)}: bytes {begin:,} to {end:,} are not part of a tar: {error}; "
                "upload this shard again"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        # Threads, connections and buffers stay in this process: a worker makes its own.
        return {**self.__dict__, "_held": OrderedDict(), "_size": 0, "_pool": None, "_process": 0}


@overload
def padded(end: int) -> int: ...
@overload
def padded(end: NDArray[np.int64]) -> NDArray[np.int64]: ...
def padded(end: Any) -> Any:
    """Return where the next header starts after contents that end here."""
    return -(-end // BLOCK) * BLOCK


@dataclass
class Store:
    """Reads byte ranges of files.

    address          a folder, or anything fsspec accepts: `s3://bucket/prefix`
    timeout_seconds  how long to wait for a server that does not respond
    retry_seconds    wait before the second try; doubled after each further one
    """

    address: str
    timeout_seconds: float = 300.0
    retry_seconds: float = 0.5
    _system: AbstractFileSystem | None = field(default=None, repr=False, compare=False)
    _process: int = field(default=0, repr=False, compare=False)

    def url(self, name: str) -> str:
        return f"{self.address}{'' if self.address.endswith('/') else '/'}{name}"

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes `begin` to `end` of a file; to the end of the file if `end` is None.

        Raises:
            DataError: the file is missing or shorter, access is denied, or the store did not respond in time.
            ParamsError: the package for this kind of store is not installed.
        """
        started, wait = time.monotonic(), self.retry_seconds
        short_reads, warned = 0, False
        while True:
            try:
                data = self._request(name, begin, end)
            except (DataError, ParamsError):
                raise
            except Exception as error:  # every store has its own errors for not responding
                if time.monotonic() - started + wait > self.timeout_seconds:
                    raise DataError(
                        f"{self.url(name)}: the store did not respond for {self.timeout_seconds:g} seconds: "
                        f"{type(error).__name__}: {error}; run the same command again to resume"
                    ) from None
                if not warned:
                    warned = True
                    logger.warning(
                        "%s: the store does not respond (%s); retrying for up to %g seconds",
                        self.url(name),
                        type(error).__name__,
                        self.timeout_seconds,
                    )
                self._system = None  # connect again
            else:
                if end is None or len(data) == end - begin:
                    return data
                short_reads += 1
                if short_reads == TRIES:
                    raise DataError(
                        f"{self.url(name)}: truncated: {len(data):,} of {end - begin:,} bytes from byte {begin:,}, "
                        f"{TRIES} times; upload this shard again"
                    )
            time.sleep(wait)
            wait = min(2 * wait, MAX_WAIT)

    def _request(self, name: str, begin: int, end: int | None) -> bytes:
        try:
            content = self._open().cat_file(self.url(name), start=begin or None, end=end)
        except FileNotFoundError:
            raise DataError(
                f"{self.url(name)}: no such {_describe(self.address, name)}; upload data/shards there"
            ) from None
        except PermissionError as error:
            raise DataError(
                f"{self.url(name)}: access denied to {_describe(self.address, name)} ({error}); the credentials of "
                "this process (AWS_PROFILE, AWS_ACCESS_KEY_ID or the machine's role) need s3:GetObject there"
            ) from None
        except Exception as error:
            # botocore's errors by name: it is an optional package
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
                raise DataError(
                    f"{self.url(name)}: no credentials for {_describe(self.address, name)} ({error}); set AWS_PROFILE, "
                    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                ) from None
            # HTTP 416, in S3's or other stores' form: the file ends before the range begins
            if _code(error) == "InvalidRange" or getattr(error, "status", None) == 416:
                return b""
            if type(error).__name__ == "ParamValidationError" or _code(error) in WRONG_ADDRESS:
                raise DataError(
                    f"{self.url(name)}: invalid address ({error}); trainer.stream.address sets the bucket, "
                    "AWS_DEFAULT_REGION its region and AWS_ENDPOINT_URL its server"
                ) from None
            raise
        assert isinstance(content, bytes)
        return content

    def _open(self) -> AbstractFileSystem:
        """Return the file system; each process has its own, since connections do not survive a fork."""
        if self._system is None or self._process != os.getpid():
            import fsspec

            options = {"config_kwargs": S3_OPTIONS} if self.address.startswith(("s3://", "s3a://")) else {}
            try:
                self._system, _ = fsspec.url_to_fs(self.address, skip_instance_cache=True, **options)
            except ImportError as error:
                way_out = "; install the extra `s3`" if options else ""
                raise ParamsError(f"trainer.stream.address: {self.address}: {error}{way_out}") from None
            except ValueError as error:  # an unknown kind of store
                raise ParamsError(f"trainer.stream.address: {self.address}: {error}") from None
            self._process = os.getpid()
        return self._system

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_system": None}


def _code(error: Exception) -> str | None:
    """Return S3's name of an error."""
    response = getattr(error.__cause__ or error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _describe(address: str, name: str) -> str:
    """Return `bucket b, key k`, or `file`."""
    scheme, separator, path = address.partition("://")
    if not separator:
        return "file"
    bucket, _, prefix = path.partition("/")
    return f"{scheme} bucket {bucket}, key {'/'.join(filter(None, (prefix.strip('/'), name)))}"
