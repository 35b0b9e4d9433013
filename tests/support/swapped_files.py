"""Files that change behind a stage's back, and stages that a kill ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def swap(path: Path, content: bytes, *, new_file: bool = False) -> None:
    """Replace the content of a file; name, size and dates stay."""
    before = path.stat()
    assert len(content) == before.st_size and content != path.read_bytes()
    if new_file:
        path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def interrupt(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch, module: object, name: str, after: int) -> None:
    """Run until a function has been called `after` times, then stop as a kill would."""
    original, calls = getattr(module, name), []

    def call(*args: object) -> object:
        calls.append(args)
        if len(calls) > after:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, call)
        run()
