"""`vlp doctor`: check the machine and the installation."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import typer

from vlp_models.common.lock import check_locks
from vlp_models.common.source_hash import ROOT, other_package
from vlp_models.common.user import explain_home, require_home
from vlp_models.errors import DataError, explain_access, explain_system_error, plain_text

# Releases that must not run, and why.
KNOWN_BAD = {
    "lightning": {"2.6.2": "a malicious upload", "2.6.3": "a malicious upload"},
    "pytorch-lightning": {"2.6.2": "a malicious upload", "2.6.3": "a malicious upload"},
}
# First release that breaks another required package.
BREAKS_FROM = {
    "fastapi": ("0.151", "every Prefect 3.8 server call with a null field fails"),
    "sqlalchemy": ("2.1", "Prefect 3.8's scheduler silently stops creating runs"),
}
NEEDED_GB = 10
# What a run writes to, if it exists.
WRITTEN = (
    *("params.yaml", "dvc.yaml", "dvc.lock", "mlflow.db", "mlartifacts"),
    *("data", "checkpoints", "reports", "promotions"),
    *(".work", ".work/run.lock", ".work/locks", ".work/params", ".dvc", ".dvc/tmp", ".dvc/tmp/lock", ".dvc/tmp/rwlock"),
    *(".dvc/cache", ".dvc/cache/files", ".dvc/cache/files/md5"),
)
PORTS = {5000: "mlflow server", 4200: "prefect server"}


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "note", "problem"]
    subject: str
    text: str


def print_findings() -> None:
    """Check this machine: packages, what params.yaml names, Java, git, file locks, disk space, accelerator, ports.

    Exit code 1: there is a problem to fix.
    """
    from rich.console import Console
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    console, failed = Console(), False
    for finding in examine(Path.cwd()):
        subject = Text(f"{finding.subject:18}", "bold")
        console.print(Text(f"{finding.level:8}", styles[finding.level]), subject, Text(finding.text))
        failed |= finding.level == "problem"
    raise typer.Exit(int(failed))


def examine(root: Path) -> Iterator[Finding]:
    """Yield one finding per subject: packages, what params.yaml names, the account, permissions, ports, ..."""
    yield Finding("ok", "python", sys.version.split()[0])
    yield _code(root)
    yield from _packages()
    yield from _params(root)
    yield _java()
    yield _git(root)
    yield _account()
    yield _permissions(root)
    yield _locks(root)
    yield _disk(root)
    yield _accelerator()
    yield from _ports()
    yield _gradio()


def check_machine(root: Path) -> None:
    """Check what DVC needs before it starts: git, a home folder, and files that this user may write."""
    require_home()
    for finding in (_permissions(root), _git(root)):
        if finding.level == "problem":
            raise DataError(finding.text)


def _code(root: Path) -> Finding:
    package = other_package(root)
    if package is not None:
        fix = f"run `make install` here, or set PYTHONPATH={package.parent}"
        return Finding("problem", "code", f"{ROOT} is running instead of the code in this folder: {fix}")
    return Finding("ok", "code", str(ROOT))


def _packages() -> list[Finding]:
    problems = []
    for name, releases in KNOWN_BAD.items():
        installed = _version(name)
        if installed in releases:
            problems.append(
                Finding("problem", name, f"{installed} is {releases[installed]}: remove it, run `make install`")
            )
    for name, (first, why) in BREAKS_FROM.items():
        installed = _version(name)
        if installed and _version_tuple(installed) >= _version_tuple(first):
            problems.append(Finding("problem", name, f"{installed}: from {first} on, {why}; run `make install`"))
    for name in ("torch", "lightning", "prefect", "dvc", "mlflow", "great-expectations"):
        if _version(name) is None:
            problems.append(Finding("problem", name, "not installed; run `make install`"))
    return problems or [Finding("ok", "packages", "no known-bad release installed")]


def _java() -> Finding:
    java = shutil.which("java")
    missing = "METEOR and SPICE are skipped, and a Python tokenizer replaces PTB's; install a Java runtime (8 or newer)"
    if java is None:
        return Finding("note", "java", f"not found: {missing}")
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("note", "java", f"{java} failed to start ({plain_text(str(error))}): {missing}")
    # `java -version` prints to stderr.
    first = next((line for line in (done.stderr + done.stdout).splitlines() if "version" in line), "")
    if done.returncode or not first:
        return Finding("note", "java", f"{java} failed to start: {missing}")
    return Finding("ok", "java", first)


def _git(root: Path) -> Finding:
    if shutil.which("git") is None:
        return Finding("problem", "git", "git: not found; install it, DVC needs it")
    if not (root / ".dvc").is_dir():
        return Finding("problem", "dvc", f"{root}: no .dvc folder; run in the project root, or run `dvc init`")
    # Also recognizes a repository whose root is above the project.
    done = subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=root, capture_output=True, text=True)
    if done.returncode:
        if "dubious ownership" in done.stderr:
            way_out = f"another user's repository: run `git config --global --add safe.directory {root}`"
        else:
            way_out = "not a git repository: run `git init`; DVC and the ledger need it"
        return Finding("problem", "git", f"{root}: {way_out}")
    return Finding("ok", "git and dvc", "a DVC project")


def _params(root: Path) -> Iterator[Finding]:
    """Yield what params.yaml names and this machine does not have: folders of raw data, and packages."""
    from vlp_models.common.packages import check_installed
    from vlp_models.common.workspace import Workspace
    from vlp_models.errors import VLPError
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.external import explain_roots, find_untracked, named_sources
    from vlp_models.pipeline.stages.plan import check_params

    if not (root / "params.yaml").exists():
        yield Finding("problem", "params.yaml", f"{root}: not found; run this in a project's folder")
        return
    try:
        params = load_params(root / "params.yaml")
    except VLPError as error:
        yield Finding("problem", "params.yaml", str(error).removeprefix("params.yaml: "))
        return
    # Two kinds of problems: folders of raw data that do not exist, and packages that are not installed.
    missing = [text.removeprefix("params.yaml: ") for text in explain_roots(params, root)]
    # The first missing package raises, so at most one is listed.
    try:
        check_installed(named_sources(params, regions=check_params(params).regions))
    except VLPError as error:
        missing.append(str(error).removeprefix("params.yaml: "))
    for text in missing:
        yield Finding("problem", "params.yaml", text)
    if not missing:
        yield Finding("ok", "params.yaml", "its folders of raw data and packages exist")
    for sentence in find_untracked(params, Workspace(root)):
        yield Finding("note", "data", sentence)


def _account() -> Finding:
    """DVC, MLflow and Prefect keep settings in the user's home folder."""
    if problem := explain_home():
        return Finding("problem", "account", problem)
    return Finding("ok", "account", f"home folder {Path.home()}")


def _permissions(root: Path) -> Finding:
    """Check the files and folders that a run writes to; another user may have created some of them."""
    for path in [root, *(root / name for name in WRITTEN)]:
        if problem := explain_access(path):
            return Finding("problem", "permissions", problem)
    return Finding("ok", "permissions", f"{root} is writable")


def _locks(root: Path) -> Finding:
    try:
        check_locks(root)
    except DataError as error:
        return Finding("problem", "file locks", str(error))
    except OSError as error:
        return Finding("note", "file locks", f"cannot be tried: {explain_system_error(error)}")
    return Finding("ok", "file locks", "work here")


def _disk(root: Path) -> Finding:
    free = shutil.disk_usage(root).free / 1e9
    if free < NEEDED_GB:
        return Finding("problem", "disk", f"{free:.1f} GB free; packages and the demo need about {NEEDED_GB} GB")
    return Finding("ok", "disk", f"{free:.0f} GB free")


def _accelerator() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("problem", "torch", "cannot be imported; run `make install`")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Finding("ok", "accelerator", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return Finding("note", "accelerator", f"none: training runs on the CPU ({torch.get_num_threads()} threads)")


def _ports() -> list[Finding]:
    notes = []
    for port, server in PORTS.items():
        # A connection that succeeds means that a server listens.
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                text = f"in use; unless that is your {server}, start yours with `--port {port + 1}`"
                notes.append(Finding("note", f"port {port}", text))
    servers = ", ".join(f"{port} ({server})" for port, server in PORTS.items())
    return notes or [Finding("ok", "ports", f"free: {servers}")]


def _gradio() -> Finding:
    from vlp_models.common.packages import INSTALL

    installed = _version("gradio")
    return Finding("ok", "gradio", installed or f"not installed; `vlp demo` needs it: `{INSTALL}`")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_tuple(text: str) -> tuple[int, ...]:
    # `2.11.0+cpu` -> (2, 11, 0); a part such as `0rc1` is left out.
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
