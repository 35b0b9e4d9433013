"""`dvc status --json`: which stages are stale, and what changed. Each caller decides what a failure of DVC means."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.environment import command_environment
from vlp_models.errors import DataError, last_words, plain_text


def read_stale(root: Path, targets: Sequence[str] = (), timeout: float | None = None) -> dict[str, list[Any]]:
    """Return stage -> its changes: each is a text, or a mapping such as {"changed deps": {path: "modified"}}.

    Args:
        targets: these stages and what they depend on; default: all stages.

    Raises:
        DataError: DVC fails, or does not answer within `timeout` seconds.
    """
    command = [sys.executable, "-m", "dvc", "status", "--json", *(["--with-deps"] if targets else []), *targets]
    options: dict[str, Any] = {"cwd": root, "env": command_environment(), "timeout": timeout}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
    except subprocess.TimeoutExpired:
        raise DataError(f"dvc status timed out after {timeout:.0f} s") from None
    except OSError as error:
        raise DataError(f"dvc status failed to start: {plain_text(str(error))}") from None
    try:
        stages = json.loads(done.stdout)
        if done.returncode == 0:
            return {name: list(changes) for name, changes in stages.items()}
    except (ValueError, AttributeError, TypeError):
        pass
    if "busy" in done.stderr:  # another DVC process holds the lock
        raise DataError("dvc status: a stage is running")
    raise DataError(f"dvc status: {dvc_error(done.stderr)}")


def dvc_error(stderr: str) -> str:
    """Return why a command of DVC failed, from its stderr: the first error, without warnings and hints around it."""
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return plain_text(errors[0] if errors else last_words(stderr, count=1))  # without an error, it has crashed
