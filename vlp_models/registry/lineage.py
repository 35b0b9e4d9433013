"""Where a result came from: commit, data, params and packages, as plain strings for tags and model cards."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any


def git_commit(root: Path) -> str:
    """The commit, with `+changes` when tracked files differ from it; `unknown` outside a git checkout."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def lineage(root: Path, *, params: Any, data: Path, command: str) -> dict[str, str]:
    """Commit, hashes of the data manifest, params and lock files, and the command that rebuilds the result."""
    return {
        "git_commit": git_commit(root),
        "data_manifest": _hash(data),
        "dvc_lock": _hash(root / "dvc.lock"),
        "requirements_lock": _hash(root / "requirements.lock"),
        "params": hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:16],
        "command": command,
    }


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "absent"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
