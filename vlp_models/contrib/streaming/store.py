"""Read byte ranges of files in a folder or an object store (`s3://bucket/prefix`).

If a server does not respond, requests are retried at growing intervals for up to `timeout_seconds`, and a warning is
logged; missing files and denied access are errors at once. Credentials come from where the store's own tools look for
them, never from params.yaml.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlp_models.common.log import get_logger
from vlp_models.errors import DataError, ParamsError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = get_logger(__name__)

TRIES = 3  # if a read returns too few bytes
MAX_WAIT = 30.0  # seconds between two tries
# S3 errors that waiting does not fix; s3fs raises most of them as a bare OSError
WRONG_ADDRESS = ("InvalidBucketName", "AuthorizationHeaderMalformed", "PermanentRedirect", "InvalidLocationConstraint")
# botocore does not retry, because `Store` does
S3_OPTIONS = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60}


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
