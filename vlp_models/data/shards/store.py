"""Byte ranges of files in a folder or an object store (`s3://bucket/prefix`), read until they are whole.

A server that is away is asked again, at growing intervals, for `patience` seconds, and stderr says so; what is missing
or denied is an error at once. Credentials come from where the store's own tools look for them, never from params.yaml.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError, ParamsError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

TRIES = 3  # of a read that comes back short
LONGEST = 30.0  # seconds between two tries
# S3's names of what waiting does not mend; s3fs has most of them as a bare OSError
WRONG_ADDRESS = ("InvalidBucketName", "AuthorizationHeaderMalformed", "PermanentRedirect", "InvalidLocationConstraint")
ONCE = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}  # botocore's: we ask again


@dataclass
class Store:
    """
    address     a folder, or what fsspec understands: `s3://bucket/prefix`
    patience    seconds that a server may be away
    first_wait  seconds before the second try; doubled for each one after it
    """

    address: str
    patience: float = 300.0
    first_wait: float = 0.5
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
        started, wait, short, away = time.monotonic(), self.first_wait, 0, False
        while True:
            try:
                data = self._ask(name, begin, end)
            except (DataError, ParamsError):
                raise
            except Exception as error:  # each store has errors of its own for being away
                if time.monotonic() - started + wait > self.patience:
                    raise DataError(
                        f"{self.where(name)}: the store did not answer for {self.patience:g} seconds: "
                        f"{type(error).__name__}: {error}; the same command goes on from the last checkpoint"
                    ) from None
                if not away:
                    away = True
                    print(
                        f"{self.where(name)}: the store is away ({type(error).__name__}); asked again for up to "
                        f"{self.patience:g} seconds",
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
