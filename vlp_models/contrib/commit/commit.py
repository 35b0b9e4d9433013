"""Commit a run's files to the branch that is checked out, then push its data, then the commit.

- Only a project's own files are committed (`find_uncommitted`), as `vlp run` names them; what a person has changed or
  staged besides them stays as it is. Hooks and signing are git's own, and nothing asks for a password.
- A commit whose push failed is pushed by the next run, and so is what a person has committed to the branch. Data goes
  first: the newest commit on the remote has all its data.
- Nothing is merged or pulled, since that could change the code of a machine that nobody watches. If the remote has
  commits that are missing here, or protects its branch, the commit goes to the branch `vlp-runs/BRANCH` there.
- A detached HEAD becomes a new branch `vlp-runs/COMMIT`, so that its commits are not lost.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from vlp_models.common.environment import command_environment, program_environment
from vlp_models.common.log import get_logger
from vlp_models.common.redaction import redact, redact_yaml
from vlp_models.common.workspace import find_uncommitted, run_git
from vlp_models.errors import DataError, VLPError, last_words, shorten_list
from vlp_models.params import Params
from vlp_models.pipeline.dvc.stale import dvc_error
from vlp_models.registry.promotion.ledger import Ledger

logger = get_logger(__name__)

REFUSED = 3  # exit code if git's remote refused the branch
SIDE_BRANCHES = "vlp-runs"  # branches that this project makes
STALE_LOCK = 600.0  # seconds after which index.lock, if no git runs, is what a killed git has left
# What git keeps in its folder while a person merges, rebases or picks commits
UNFINISHED = ("MERGE_HEAD", "rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "REVERT_HEAD")


class RemoteError(VLPError):
    """A remote did not answer, or refused the credentials; the commit is kept, and the next push includes it."""

    exit_code = 69  # EX_UNAVAILABLE


def commit_run(params: Params, root: Path) -> str:
    """Commit the changed files of the runs since the last commit; return what was done.

    Raises:
        DataError: not a git repository, a merge or rebase is unfinished, params.yaml has a secret, or git failed.
    """
    if run_git(root, "rev-parse", "--git-dir") is None:
        raise DataError(f"{root}: not a git repository; run `git init`, or set `flow.commit: false`")
    _require_finished(root)
    for file in [root / "params.yaml", *root.glob("presets/*.yaml")]:
        text = file.read_text(encoding="utf-8")
        if redact_yaml(text) != text:
            pairs = zip(text.splitlines(), redact_yaml(text).splitlines(), strict=False)
            number = next(number for number, (line, clean) in enumerate(pairs, start=1) if line != clean)
            raise DataError(f"{file}:{number}: a secret, which must not be committed; write env:NAME in its place")
    if run_git(root, "symbolic-ref", "--quiet", "HEAD") is None:
        branch = f"{SIDE_BRANCHES}/{_read(root, 'rev-parse', '--short', 'HEAD')}"
        if run_git(root, "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}") is not None:
            branch += time.strftime("-%Y%m%d-%H%M%S")
        # Only HEAD moves to the new branch; no file changes.
        _git(root, "switch", "--quiet", "--create", branch)
        logger.warning("no branch was checked out; this clone is on the new branch %s now", branch)
    files = find_uncommitted(root)
    ledger = params.promotion.ledger
    if ledger not in files and _read(root, "status", "--porcelain", "--", ledger):
        files.append(ledger)
    if not files:
        return "nothing to commit"
    _git(root, "add", "--all", "--", *files)
    # -z: names as they are, without quotes.
    listed = _read(root, "diff", "--cached", "--name-only", "--relative", "-z", "--", *files)
    changed = [name for name in listed.split("\0") if name]
    if not changed:  # what was staged is undone in the working tree, for example
        return "nothing to commit"
    message = _message(params, root, changed)
    _git(root, "commit", "--quiet", "--message", message, "--only", "--", *files, options=_identity(root))
    return f"committed {shorten_list(changed, 6)} as {_read(root, 'rev-parse', '--short', 'HEAD')}"


def push_run(root: Path) -> tuple[str, bool]:
    """Push the workspace's data, then its branch.

    Returns:
        What was done, and whether git's remote refused the branch.

    Raises:
        RemoteError: a remote did not answer or refused the credentials, or DVC's cache lacks a file.
    """
    data = _push_data(root)
    branch = _read(root, "symbolic-ref", "--short", "HEAD")
    remotes = _read(root, "remote").split()
    if not remotes:
        return f"{data}; no git remote, so the commit is on this machine only", False
    remote = _read(root, "config", f"branch.{branch}.remote")
    if remote not in remotes:  # none, or `.`: this repository
        remote = "origin" if "origin" in remotes else remotes[0]
    side = f"{SIDE_BRANCHES}/{branch.removeprefix(f'{SIDE_BRANCHES}/')}"
    # To the branch of the same name: one that was started from main follows main, and must not be pushed there.
    if not (reason := _push(root, remote, branch)):
        return f"{data}; {branch} pushed to {remote}", False
    # A side branch that was pushed before and has other commits now gets a name of its own.
    for name in (side, f"{side}-{_read(root, 'rev-parse', '--short', 'HEAD')}"):
        if not _push(root, remote, name):
            answer = f"{remote} refused {branch} ({reason}), so the commit is on its branch {name}"
            return f"{data}; {answer}; merge it there, then `git pull` here", True
    raise DataError(f"{remote} refused {branch} and {side}: {reason}")


def _require_finished(root: Path) -> None:
    """
    Raises:
        DataError: someone is in the middle of a merge, or of something like it, in this clone.
    """
    for name in UNFINISHED:
        if (root / _read(root, "rev-parse", "--git-path", name)).exists():
            raise DataError(
                f"{root}: a merge or rebase is unfinished ({name}); finish or abort it, the next run commits"
            )
    if _read(root, "ls-files", "--unmerged"):
        raise DataError(f"{root}: files have merge conflicts; resolve them, the next run commits")


def _identity(root: Path) -> list[str]:
    """Return options that name an author, if git has none, as for a service's account."""
    if _read(root, "config", "user.email"):
        return []
    return ["-c", "user.name=vlp", "-c", f"user.email=vlp@{socket.gethostname()}"]


def _message(params: Params, root: Path, changed: list[str]) -> str:
    """Return a commit message: the decisions since the last commit, the stages that ran, new and removed batches."""
    ledger = root / params.promotion.ledger
    before = (run_git(root, "show", f"HEAD:./{params.promotion.ledger}") or b"").decode("utf-8", errors="replace")
    entries = [entry for entry in Ledger(ledger).entries() if entry["hash"] not in before]
    decisions = [f"{entry['action']} {entry.get('task', '')} {_version(entry)}".rstrip() for entry in entries]
    batches: dict[str, list[str]] = {"new": [], "removed": []}
    for file in map(Path, changed):
        if file.suffix == ".dvc" and file.parent == Path(params.ingest.dataset):
            batches["new" if (root / file).exists() else "removed"].append(file.stem)
    lines = [f"{kind} data: {shorten_list(names)}" for kind, names in batches.items() if names]
    summaries = list(lines)
    if stages := _changed_stages(root):
        lines.append(f"stages: {shorten_list(stages)}")
        summaries.append(f"stages: {shorten_list(stages, 3)}")
    subject = "; ".join(decisions) or (summaries[0] if summaries else shorten_list(changed, 3))
    return "\n".join([f"vlp: {subject}"[:100], "", *decisions, *lines])


def _version(entry: dict[str, Any]) -> str:
    return f"version {entry['version']}" if entry.get("version") else ""


def _changed_stages(root: Path) -> list[str]:
    """Return the stages whose entries in dvc.lock differ from those of the last commit."""
    if not (root / "dvc.lock").exists():
        return []
    now = (yaml.safe_load((root / "dvc.lock").read_text(encoding="utf-8")) or {}).get("stages", {})
    before = (yaml.safe_load(run_git(root, "show", "HEAD:./dvc.lock") or b"") or {}).get("stages", {})
    return [name for name, entry in now.items() if before.get(name) != entry]


def _push_data(root: Path) -> str:
    """Run `dvc push` for the workspace's outputs; return what was done."""
    command = [sys.executable, "-m", "dvc"]
    options: dict[str, Any] = {"cwd": root, "env": command_environment(), "stdin": subprocess.DEVNULL}
    options |= {"capture_output": True, "text": True, "errors": "replace"}
    if not subprocess.run([*command, "config", "core.remote"], **options).stdout.strip():
        return "no default DVC remote, so the data is on this machine only"
    done = subprocess.run([*command, "push"], **options)
    if done.returncode:
        raise RemoteError(f"dvc push: {redact(dvc_error(done.stderr))}; the next run pushes again")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "data pushed"


def _push(root: Path, remote: str, branch: str) -> str:
    """Push HEAD to a branch of a remote; return why the remote refused it, or an empty text.

    Raises:
        RemoteError: the push failed for another reason.
    """
    done = _start(root, "push", "--porcelain", remote, f"HEAD:refs/heads/{branch}")
    if not done.returncode:
        return ""
    # `!`, what was to be pushed, and the reason: `[rejected] (fetch first)`, `[remote rejected] (protected branch)`.
    for line in done.stdout.splitlines():
        if line.startswith("!"):
            return redact(line.rpartition("\t")[2])
    raise RemoteError(f"git push: {redact(last_words(done.stderr, done.stdout, count=6))}; the next run pushes again")


def _git(root: Path, command: str, *arguments: str, options: Sequence[str] = ()) -> None:
    """Run a command of git; remove the lock that a killed git has left, once.

    Raises:
        DataError: git failed; in its words, with those of hooks and of the program that signs.
    """
    done = _start(root, *options, command, *arguments)
    lock = root / _read(root, "rev-parse", "--git-path", "index.lock")
    if done.returncode and "index.lock" in done.stderr and lock.exists():
        if time.time() - lock.stat().st_mtime < STALE_LOCK or _is_git_running(root):
            raise DataError(f"{lock}: another git is at work here, or one was killed; the next run commits")
        logger.warning("%s: left by a git that was killed; removed", lock)
        lock.unlink(missing_ok=True)
        done = _start(root, *options, command, *arguments)
    if done.returncode:
        raise DataError(f"git {command}: {redact(last_words(done.stderr, done.stdout, count=6))}")


def _is_git_running(root: Path) -> bool:
    """Return whether a git of this user works in the repository, such as one whose editor is open."""
    top = Path(_read(root, "rev-parse", "--show-toplevel"))
    for process in psutil.process_iter(["name", "cwd"]):
        folder = process.info["cwd"]
        if process.info["name"] == "git" and folder and Path(folder).is_relative_to(top):
            return True
    return False


def _start(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # git and ssh fail instead of asking for a password. What signs may still ask: `flow.timeout_hours` ends it.
    asking = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS_REQUIRE": "never"}
    if not {"GIT_SSH", "GIT_SSH_COMMAND"}.intersection(os.environ) and not _read(root, "config", "core.sshCommand"):
        asking["GIT_SSH_COMMAND"] = "ssh -o BatchMode=yes"
    return subprocess.run(
        ["git", *arguments],
        cwd=root,
        env=program_environment(**asking),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )


def _read(root: Path, *arguments: str) -> str:
    """Return what git prints; empty if it fails."""
    return (run_git(root, *arguments) or b"").decode("utf-8", errors="replace").strip()
