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

from vlp_models.cli.pipeline import explain_git, explain_permissions
from vlp_models.common.environment import program_environment
from vlp_models.common.loopback import require_loopback
from vlp_models.common.packages import INSTALL, OWN, PIP, holds_own_code
from vlp_models.common.source_hash import ROOT, other_package
from vlp_models.common.user import HOME_HINT, current_user
from vlp_models.contrib.doctor.file_system import find_limits
from vlp_models.errors import LaunchError, explain_access, explain_system_error, last_words, plain_text

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
PORTS = {5000: "mlflow server", 4200: "prefect server"}


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "note", "problem"]
    subject: str
    text: str


def print_findings() -> None:
    """Check this machine: packages, what params.yaml names, Java, git, file system, disk space, accelerator, ports.

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
    yield from _packages(root)
    yield from _params(root)
    yield _java()
    yield _check("git", explain_git(root), "a DVC project")
    yield _account()
    yield _check("permissions", explain_permissions(root), f"{root} is writable")
    yield from _file_system(root)
    yield _disk(root)
    yield _accelerator(root)
    yield from _ports()
    yield _gradio()


def _check(subject: str, problem: str, text: str) -> Finding:
    """Return the problem, or `text` without one."""
    return Finding("problem", subject, problem) if problem else Finding("ok", subject, text)


def _code(root: Path) -> Finding:
    package = other_package(root)
    if package is not None:
        fix = f"run `make install` here, or set PYTHONPATH={package.parent}"
        return Finding("problem", "code", f"{ROOT} is running instead of the code in this folder: {fix}")
    return Finding("ok", "code", str(ROOT))


def _installation(root: Path) -> str:
    """Return the command that installs what the project needs: only a clone has a Makefile."""
    return "`make install`" if holds_own_code(root) else f'`{PIP} install "{OWN}[pipeline]"`'


def _packages(root: Path) -> list[Finding]:
    problems, install = [], _installation(root)
    for name, releases in KNOWN_BAD.items():
        installed = _version(name)
        if installed in releases:
            problems.append(
                Finding("problem", name, f"{installed} is {releases[installed]}: remove it, then run {install}")
            )
    for name, (first, why) in BREAKS_FROM.items():
        installed = _version(name)
        if installed and _version_tuple(installed) >= _version_tuple(first):
            fix = f"`{PIP} install '{name}<{first}'`"
            problems.append(Finding("problem", name, f"{installed}: from {first} on, {why}; run {fix}"))
    for name in ("torch", "lightning", "prefect", "dvc", "mlflow", "great-expectations"):
        if _version(name) is None:
            problems.append(Finding("problem", name, f"not installed; run {install}"))
    return problems or [Finding("ok", "packages", "no known-bad release installed")]


def _java() -> Finding:
    java = shutil.which("java")
    missing = "METEOR and SPICE are skipped, and a Python tokenizer replaces PTB's; install a Java runtime (8 or newer)"
    if java is None:
        return Finding("note", "java", f"not found: {missing}")
    try:
        done = subprocess.run(
            [java, "-version"],
            env=program_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("note", "java", f"{java} failed to start ({plain_text(str(error))}): {missing}")
    # `java -version` prints to stderr.
    first = next((line for line in (done.stderr + done.stdout).splitlines() if "version" in line), "")
    if done.returncode or not first:
        return Finding("note", "java", f"{java} failed to start ({last_words(done.stderr, done.stdout)}): {missing}")
    return Finding("ok", "java", first)


def _params(root: Path) -> Iterator[Finding]:
    """Yield what params.yaml names and this machine does not have: folders of raw data, and packages."""
    from vlp_models.cli.pipeline import PLAN_NOTES
    from vlp_models.common.packages import check_installed
    from vlp_models.common.plugins import import_target
    from vlp_models.common.workspace import Workspace
    from vlp_models.errors import VLPError
    from vlp_models.params import load_params
    from vlp_models.pipeline.dvc.external import explain_roots, named_sources
    from vlp_models.pipeline.stages.plan import check_params, check_regions

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
        facts = check_params(params)
        check_installed(named_sources(params, regions=facts.regions))
        check_regions(params, facts)
    except VLPError as error:
        missing.append(str(error).removeprefix("params.yaml: "))
    for text in missing:
        yield Finding("problem", "params.yaml", text)
    if not missing:
        yield Finding("ok", "params.yaml", "its folders of raw data and packages exist")
    find_untracked = PLAN_NOTES.get("untracked")
    for sentence in import_target(find_untracked)(params, Workspace(root)) if find_untracked else []:
        yield Finding("note", "data", sentence)


def _account() -> Finding:
    """DVC, MLflow and Prefect keep settings in the user's home folder."""
    try:
        home = Path.home()
    except RuntimeError:
        return Finding("problem", "account", f"{current_user()}: no home folder; {HOME_HINT}")
    problem = explain_access(home) if home.is_dir() else f"{home}: the home folder does not exist; create it"
    return _check("account", problem and f"{problem}, or {HOME_HINT}", f"home folder {home}")


def _file_system(root: Path) -> list[Finding]:
    try:
        limits = list(find_limits(root))
    except OSError as error:
        return [Finding("note", "file system", f"cannot be tried: {explain_system_error(error)}")]
    findings = [Finding(level, "file system", text) for level, text in limits]
    return findings or [Finding("ok", "file system", "locks, links, renames, long names and DVC's cache work here")]


def _disk(root: Path) -> Finding:
    free = shutil.disk_usage(root).free / 1e9
    if free < NEEDED_GB:
        return Finding("problem", "disk", f"{free:.1f} GB free; packages and the demo need about {NEEDED_GB} GB")
    return Finding("ok", "disk", f"{free:.0f} GB free")


def _accelerator(root: Path) -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("problem", "torch", f"cannot be imported; run {_installation(root)}")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Finding("ok", "accelerator", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return Finding("note", "accelerator", f"none: training runs on the CPU ({torch.get_num_threads()} threads)")


def _ports() -> list[Finding]:
    try:
        require_loopback()
    except LaunchError as error:
        return [Finding("problem", "loopback", plain_text(str(error)))]
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


COMMANDS = {"Checks": {"doctor": print_findings}}
WORK = {"doctor": "checking this machine"}
