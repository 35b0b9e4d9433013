"""`vlp status`: stale and running stages, Prefect, champions. Whatever cannot be determined becomes a note."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.cli.stack import describe as describe_stack
from vlp_models.common.lock import find_holder
from vlp_models.common.redaction import redact
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, VLPError, explain_system_error, first_line, plain_text
from vlp_models.registry.receipts import Receipt, find_challenger, find_lost_versions, read_registered, read_value

if TYPE_CHECKING:
    from vlp_models.params import Params

DVC_SECONDS = 60.0  # a workspace of millions of files takes DVC a while


@dataclass(kw_only=True)
class Status:
    """stale: stage -> what changed. running, prefect: lines. tasks: one row each. notes: what is unknown, and why."""

    stale: dict[str, list[str]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    prefect: list[str] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def print_status(
    ask_mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Read aliases from MLflow, not from the ledger.")
    ] = False,
) -> None:
    """Show stale stages, running stages, Prefect's server and worker, champions and challengers, the last decision."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    found = status(Path.cwd(), ask_mlflow=ask_mlflow)
    console = Console()
    if found.stale:
        console.print(
            Text("stale     ", "yellow"), Text(f"{len(found.stale)} stages; `vlp run` brings them up to date")
        )
        for name, reasons in list(found.stale.items())[:12]:
            console.print(Text(f"            {name:24} {', '.join(reasons)}"))
        if len(found.stale) > 12:
            console.print(f"            and {len(found.stale) - 12} more: dvc status")
    elif not any(note.startswith("dvc") for note in found.notes):
        console.print(Text("stale     ", "green"), "nothing")
    for line in found.running or ["nothing"]:
        console.print(Text("running   ", "cyan"), Text(line))
    for line in found.prefect:
        console.print(Text("prefect   ", "cyan"), Text(line))
    if found.tasks:
        table = Table(box=None, header_style="bold", pad_edge=False)
        columns = ("task", "metric", "champion", "challenger", "candidates")
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in found.tasks:
            table.add_row(*(Text(str(row[name])) for name in columns))
        console.print(table)
    if found.last:
        console.print(Text("decision  ", "bold"), Text(describe_entry(found.last)))
    for note in found.notes:
        console.print(Text("note      ", "yellow"), Text(note))


def status(root: Path, *, ask_mlflow: bool = False) -> Status:
    """Return everything that `vlp status` shows; whatever cannot be determined becomes a note.

    Raises:
        DataError: the folder has no project.
    """
    if not (root / "params.yaml").exists():
        raise DataError(f"{root}: no params.yaml here; run this in a project's folder (`vlp init` makes one)")
    found = Status()
    _collect_running(root, found)
    try:
        found.prefect = describe_stack(root)
    except VLPError as error:
        found.notes.append(plain_text(str(error)))
    _collect_stale(root, found)
    try:
        from vlp_models.params import load_params

        params = load_params(root / "params.yaml")
    except VLPError as error:
        found.notes.append(plain_text(str(error)))
        return found
    _collect_champions(root, params, found, ask_mlflow)
    return found


def describe_entry(entry: dict[str, Any]) -> str:
    """Return a ledger entry as one line."""
    from vlp_models.cli.versions import describe_action

    reasons = "; ".join(entry.get("decision", {}).get("reasons", []))
    version = f" version {entry['version']}" if entry["version"] else ""
    return f"{entry['time']} {entry['model']}{version} {describe_action(entry)} by {entry['by']}" + (
        f": {reasons}" if reasons else ""
    )


def _collect_stale(root: Path, found: Status) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", "status", "--json"],
            cwd=root,
            env={**os.environ, "DVC_NO_ANALYTICS": "1"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DVC_SECONDS,
        )
    except subprocess.TimeoutExpired:
        found.notes.append(f"dvc status timed out after {DVC_SECONDS:.0f} s")
        return
    except OSError as error:
        found.notes.append(f"dvc status failed to start: {plain_text(str(error))}")
        return
    try:
        stages = {name: list(changes) for name, changes in json.loads(done.stdout).items()}
    except (ValueError, AttributeError, TypeError):
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        busy = any("busy" in line for line in lines)
        found.notes.append("dvc status: a stage is running" if busy else f"dvc status: {plain_text(lines[0])}")
    else:
        for name, changes in stages.items():
            reasons = [kind for change in changes for kind in (change if isinstance(change, dict) else [change])]
            found.stale[name] = list(dict.fromkeys(reasons))


def _collect_running(root: Path, found: Status) -> None:
    """Collect the stages that run in this folder, and the holders of DVC's lock file."""
    import psutil

    from vlp_models.pipeline.dvc.lock_file import RWLOCK, read_holders

    here = os.fspath(root.resolve())
    if holder := find_holder(Workspace(root).lock):
        found.running.append(holder)
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        command = process.info["cmdline"] or []
        if process.info["cwd"] != here or process.info["pid"] == os.getpid():
            continue
        names = [Path(word).name for word in command]
        if "vlp" in names[:2] and "stage" in command:
            stage = command[command.index("stage") + 1 :][:2]
            key = "-".join(word for word in stage if not word.startswith("-"))
            progress = _progress(root, key)
            found.running.append(f"pid {process.info['pid']}: {' '.join(stage)}{progress}")
    try:
        for pid, command_line in sorted(read_holders(root / RWLOCK).items()):
            state = "" if psutil.pid_exists(pid) else " (dead: DVC will release its lock)"
            found.running.append(f"pid {pid}: {command_line}, holds DVC's lock{state}")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found.notes.append(f"dvc: {RWLOCK} cannot be read; if DVC is not running, delete it")


def _progress(root: Path, stage: str) -> str:
    """Return the last step that the trainer logged."""
    logs = sorted((root / ".work" / stage).glob("*/log.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs:
        return ""
    try:
        last = json.loads(logs[-1].read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2])
        loss = f", loss {last['loss']:.4g}" if isinstance(last.get("loss"), float) else ""
        return f", step {last['step']}, epoch {last['epoch']}{loss}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _collect_champions(root: Path, params: Params, found: Status, ask_mlflow: bool) -> None:
    from vlp_models.registry.promotion.ledger import Ledger, LedgerError, replay

    entries: list[dict[str, Any]] = []
    try:
        entries = Ledger(root / params.promotion.ledger).entries()
    except (LedgerError, OSError) as error:
        found.notes.append(explain_system_error(error))
    states = replay(entries)
    found.last = entries[-1] if entries else None
    reports, split = root / "reports", params.promotion.split
    registered = read_registered(reports)
    aliases = _aliases(root, params, found) if ask_mlflow else None
    for task in sorted({run.task for run in params.finetune.values()} | registered.keys()):
        model = f"{params.tracking.model_prefix}-{task}"
        metric = params.promotion.gate(task).metric or params.tracking.metric.get(task, "")
        champion = states[model].champion if model in states else None
        receipts = registered.get(task, [])
        challenger = (find_challenger(receipts) or {}).get("version")
        if aliases is not None:
            champion, challenger = (aliases.get(model, {}).get(name) for name in ("champion", "challenger"))
        if challenger == champion:
            challenger = None
        row = {"task": task, "metric": metric, "champion": "none", "challenger": "none"}
        if champion is not None:
            row["champion"] = f"version {champion}{_describe_run(receipts, champion)}{_value(entries, model, champion)}"
        if challenger is not None:
            receipt = next((r for r in receipts if r["version"] == challenger), None)
            value = None if receipt is None else read_value(reports, receipt, metric, split)
            row["challenger"] = f"version {challenger}{_describe_run(receipts, challenger)}{_format_value(value)}"
        others = [r for r in receipts if r["version"] not in (champion, challenger)]
        row["candidates"] = "; ".join(
            f"version {r['version']}{_describe_run(receipts, r['version'])}"
            + _format_value(read_value(reports, r, metric, split))
            for r in others
        )
        found.tasks.append(row)


def _aliases(root: Path, params: Params, found: Status) -> dict[str, dict[str, int]]:
    try:
        from vlp_models.registry.client import connect

        if gone := find_lost_versions(params.tracking, root):
            found.notes.append(f"MLflow has lost {', '.join(gone)}; `vlp run register` registers again")
        client = connect(params.tracking, root)
        return {m.name: {k: int(v) for k, v in m.aliases.items()} for m in client.search_registered_models()}
    except Exception as error:  # whatever MLflow raises: the rest is still worth showing
        found.notes.append(redact(f"MLflow: {first_line(error)}"))
        return {}


def _value(entries: list[dict[str, Any]], model: str, version: int) -> str:
    """Return the champion's last measured value, from the ledger."""
    for entry in reversed(entries):
        numbers = entry.get("decision", {}).get("numbers", {})
        if entry["model"] != model:
            continue
        if entry["version"] == version and "value" in numbers:
            return f", {numbers['value']:.2f}"
        if entry["from"] == version and "champion_value" in numbers:
            return f", {numbers['champion_value']:.2f}"
    return ""


def _describe_run(receipts: list[Receipt], version: int) -> str:
    """Return run and model of a version that this workspace registered."""
    receipt = next((r for r in receipts if r["version"] == version), {})
    names = [str(receipt[name]) for name in ("run", "model") if receipt.get(name)]
    return f" ({', '.join(dict.fromkeys(names))})" if names else ""


def _format_value(value: float | None) -> str:
    return "" if value is None else f", {value:.2f}"
