"""Errors a user can act on.

Each message names the file (and the line or key, if there is one) and what to do. The command line prints only the
message and exits with `exit_code`; a traceback means a bug in this project.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path


class VLPError(Exception):
    """Base of every error that the input causes, not the program."""

    exit_code = 2


class ParamsError(VLPError):
    """params.yaml holds an unknown key or a value of the wrong type."""


class DataError(VLPError):
    """Input data is missing, unreadable, or violates a rule that the run depends on."""


class BusyError(DataError):
    """Another process holds a lock; try again later."""


class CheckpointError(VLPError):
    """A checkpoint is damaged or belongs to another architecture."""


class MissingToolError(VLPError):
    """A program this step needs (java, git, ...) is not on this machine."""


class TrackingError(VLPError):
    """MLflow does not respond, and this step requires it."""

    exit_code = 69  # EX_UNAVAILABLE


class NonFiniteLossError(VLPError):
    """The loss is NaN or infinite; raised before the optimizer step; names the samples."""

    exit_code = 3


class ProcessLostError(VLPError):
    """Another process of a distributed training, or of a cluster, is gone. A rerun resumes what is finished."""

    exit_code = 75


class LaunchError(VLPError):
    """The engine of `trainer.launcher` refused a training, a node cannot take part in it, or nodes were lost."""


class Preempted(SystemExit):
    """Training was asked to stop and has saved its state; a rerun resumes from there.

    Exits with 75 (EX_TEMPFAIL), never 0: DVC would record a half-trained result as complete.
    """

    def __init__(self) -> None:
        super().__init__(75)


class Terminated(SystemExit):
    """SIGTERM outside of training: unfinished outputs are removed on the way out; the exit code is 128 + 15."""

    def __init__(self) -> None:
        super().__init__(128 + 15)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether `error` was caused by a full disk, quota or file size limit, however a library reports it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        text = str(error)
        if any(f"os error {number})" in text for number in _DISK_FULL) or any(t in text for t in _DISK_FULL_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# SQLite's, the C library's, torch's
_DISK_FULL_TEXTS = (
    "database or disk is full",
    "No space left on device",
    "File too large",
    "PytorchStreamWriter failed",
)


def find_exhausted(error: BaseException | None) -> OSError | None:
    """Return the system's error if `error` means that memory, processes or open files are exhausted."""
    # Errors of Python, torch and the loader of libraries, which have no number.
    text = str(error) if isinstance(error, (RuntimeError, ImportError)) else ""
    no_memory = ("out of memory", "can't allocate memory", "failed to map segment from shared object")
    if isinstance(error, MemoryError) or any(words in text for words in no_memory):
        return OSError(errno.ENOMEM, "")
    if "can't start new thread" in text:
        return OSError(errno.EAGAIN, "")
    return error if isinstance(error, OSError) and error.errno in _RESOURCES else None


def shorten_list(names: Sequence[str], count: int = 20) -> str:
    """Return the first `count` names, and the number of the others."""
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if the message is empty."""
    if isinstance(error, OSError) and error.errno is not None:
        return explain_system_error(error)
    if isinstance(error, KeyError) and error.args:
        return f"`{error.args[0]}` is missing"
    if not isinstance(error, VLPError) and (reason := network_reason(error)):
        return reason
    return plain_text(next(iter(str(error).splitlines()), type(error).__name__))


def last_words(*outputs: str | bytes, count: int = 3) -> str:
    """Return why a program failed, in its own words: the last lines of the first output that has any.

    Args:
        outputs: what it wrote to stderr, then to stdout.
    """
    for output in outputs:
        text = output.decode("utf-8", errors="replace") if isinstance(output, bytes) else output
        # Without the frames that rich draws around errors.
        lines = [line.strip(" \t│╭╮╰╯─") for line in text.splitlines()]
        if lines := [line for line in lines if any(map(str.isalnum, line))]:
            return "; ".join(line[:300] for line in lines[-count:])
    return "no output"


def network_reason(error: BaseException) -> str:
    """Return why a connection failed, in the system's words; an empty text if `error` is about something else.

    Clients of HTTP wrap them in errors of their own, which quote whole requests, or say only that nothing answered.
    """
    chain: list[BaseException] = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    modules = [type(e).__module__.partition(".")[0] for e in chain]
    if not {"requests", "httpx", "httpx2"}.intersection(modules):
        return ""
    system = [e for e, module in zip(chain, modules, strict=True) if isinstance(e, OSError) and module in _SYSTEM]
    if not system:
        return ""
    text = str(system[-1].strerror or system[-1])
    reason = text if text.startswith("[") else text.lower()  # [SSL: ...]
    proxies = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    # HTTPX does not say that it was the proxy that did not answer.
    if proxies and ("requests" not in modules or any("Proxy" in type(e).__name__ for e in chain)):
        reason += f"; the environment names a proxy ({', '.join(proxies)}), and what needs none (no_proxy)"
    return reason


_SYSTEM = ("builtins", "socket", "ssl")


def explain_system_error(error: BaseException) -> str:
    """Return why the operating system refused something, as a sentence: the path, the reason, the way out.

    Accepts any exception: libraries raise errors of their own for a full disk, for example.
    """
    path = path_of(error)
    if is_disk_full(error):
        reason = "the disk is full, or a quota or size limit is reached; free some space"
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        reason = _explain_denied(path)
    elif isinstance(error, OSError) and error.errno is not None:
        reason = _REASONS.get(error.errno) or (error.strerror or os.strerror(error.errno)).lower()
    else:
        return first_line(error)
    return f"{path}: {reason}" if path else reason


def find_refusal(error: BaseException) -> OSError | None:
    """Return the error of the operating system behind `error` that denies access, if any.

    A reader that takes each failure for damage must not hide it: restoring the file would not help.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and path_of(cause):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def explain_access(path: Path) -> str:
    """Return why this process cannot write to an existing file or folder, as a sentence; empty if it can."""
    if not os.path.lexists(path) or is_accessible(path, os.W_OK):
        return ""
    read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return explain_system_error(OSError(errno.EROFS if read_only else errno.EACCES, "", os.fspath(path)))


def is_accessible(path: Path, rights: int) -> bool:
    """Return whether this process has the rights (os.R_OK, ...), as the system decides when a file is opened."""
    return os.access(path, rights, effective_ids=os.access in os.supports_effective_ids)


def plain_text(text: str) -> str:
    """Return a message with Python's own wording of system and encoding errors replaced by sentences."""

    def explain(error: re.Match[str]) -> str:
        path = error["path"] or ""
        sentence = explain_system_error(OSError(int(error["code"]), "", path or None))
        is_named = path and text[: error.start()].endswith(f"{path}: ")  # a message that starts with the path
        return sentence.removeprefix(f"{path}: ") if is_named else sentence

    text = _SYSTEM_ERROR.sub(explain, _ARROW_ERROR.sub(r"[Errno \1] : '\2'", text))
    return _CODEC_ERROR.sub(r"not valid \1 text (byte \2)", text)


_SYSTEM_ERROR = re.compile(
    r"\[Errno (?P<code>\d+)\] [^:'\"\n\[\]();]*"
    r"(?:: (?P<quote>['\"])(?P<path>[^\n]*?)(?P=quote))?(?: -> ['\"][^\n]*?['\"])?"
)
_ARROW_ERROR = re.compile(r"\[Errno (\d+)\] Failed to open local file '([^'\n]*)'(?:\. Detail: \[errno \d+\] [\w ]*)?")
_CODEC_ERROR = re.compile(r"'([\w-]+)' codec can't (?:de|en)code [^:\n]* in position (\d+)(?:-\d+)?: [^\n;)]*")
_RESOURCES = {
    errno.EMFILE: "too many open files; raise the limit with `ulimit -n`",
    errno.ENFILE: "too many open files on this machine; raise `sysctl fs.file-max`",
    errno.EAGAIN: "no further process or thread; raise the limit with `ulimit -u`, of a container with `--pids-limit`",
    errno.ENOMEM: "out of memory; free some, lower the `batch_size` of a training, or raise the limit (`ulimit -v`, a "
    "container's `--memory`)",
}
_REASONS = {
    errno.EROFS: "the file system is read-only; work in a copy of the project on a writable one",
    errno.ENOTDIR: "a part of this path is a file, not a folder; rename or remove that file",
    errno.EISDIR: "a folder, where a file is needed; rename or remove it",
    errno.EEXIST: "a file of this name is in the way; rename or remove it",
    errno.ENOTEMPTY: "the folder is not empty; rename or remove it",
    errno.ENAMETOOLONG: "the name is too long; shorten it",
    errno.ELOOP: "symbolic links lead in a circle; remove one of them",
    **_RESOURCES,
    errno.EIO: "the disk reports an input/output error; check it, then restore the file",
}


_PARTIAL = re.compile(r"(?<![^/])\.([^/]+)\.partial(/[^/]+)?(?![^/])")  # .NAME.partial, .NAME.partial/WRITER


def path_of(error: BaseException) -> str:
    """Return the path of an OSError; that of the output for a partial one (common/io.py)."""
    path = getattr(error, "filename", None)
    if path is None and (match := _ARROW_ERROR.search(str(error))):
        path = match[2]
    if not isinstance(path, (str, bytes)):
        return ""
    return _PARTIAL.sub(r"\1", os.fsdecode(path))


def _explain_denied(path: str) -> str:
    """Say whose the file is, or the folder that it would be created in."""
    existing = Path(path)
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    try:
        owner = existing.stat().st_uid
    except OSError:
        return "permission denied"
    if owner == os.geteuid():
        return f"permission denied; `chmod u+rwX {existing}` allows access"
    subject = "it" if os.fspath(existing) == path else existing
    return (
        f"permission denied: {subject} belongs to {_describe_user(owner)}, and this process runs as "
        f"{_describe_user(os.geteuid())}; run as its owner, or have its permissions changed"
    )


def _describe_user(uid: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"
