"""`vlp status`: stale and running stages, champions, what contrib adds. What cannot be determined becomes a note."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.common.lock import find_holder
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.redaction import redact
from vlp_models.common.source_hash import changed_packages
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, VLPError, explain_system_error, first_line, plain_text
from vlp_models.pipeline.dvc.stale import read_stale
from vlp_models.registry.mlflow_run import end_dead_runs
from vlp_models.registry.receipts import Receipt, find_challenger, find_lost_versions, read_registered, read_value

if TYPE_CHECKING:
    from vlp_models.params import Params

DVC_SECONDS = 60.0  # a workspace of millions of files takes DVC a while
MAX_STALE = 12  # stages that are listed
COLUMNS = ("task", "metric", "champion", "challenger", "candidates")
# label of the lines that a folder of contrib adds -> the function that returns them for a project's folder
STATUS_LINES = Table("status_lines", {})


@dataclass(kw_only=True)
class Status:
    """stale: stage -> what changed. running: lines. added: label -> lines. tasks: one row each. notes: problems."""

    stale: dict[str, list[str]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    added: dict[str, list[str]] = field(default_factory=dict)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def print_status(
    ask_mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Read aliases from MLflow, not from the ledger.")
    ] = False,
) -> None:
    """Show stale stages, running stages, Prefect's server and worker, champions and challengers, the last decision."""
    from vlp_models.cli.tables import open_console, print_line, print_table

    result = status(Path.cwd(), ask_mlflow=ask_mlflow)
    console = open_console()
    if result.stale:
        count = len(result.stale)
        stages = "1 stage; `vlp run` brings it" if count == 1 else f"{count} stages; `vlp run` brings them"
        print_line(console, "stale", f"{stages} up to date", style="yellow")
        for name, reasons in list(result.stale.items())[:MAX_STALE]:
            print_line(console, "", f"  {name:24} {', '.join(reasons)}")
        if count > MAX_STALE:
            print_line(console, "", f"  and {count - MAX_STALE} more: dvc status")
    # Without an answer of DVC, "nothing" would be wrong.
    elif not any(note.startswith("dvc") for note in result.notes):
        print_line(console, "stale", "nothing", style="green")
    for line in result.running or ["nothing"]:
        print_line(console, "running", line, style="cyan")
    for label, lines in result.added.items():
        for line in lines:
            print_line(console, label, line, style="cyan")
    if result.tasks:
        columns = {name: [row[name] for row in result.tasks] for name in COLUMNS}
        print_table(console, columns, folded=COLUMNS)
    if result.last:
        print_line(console, "decision", describe_entry(result.last), style="bold")
    for note in result.notes:
        print_line(console, "note", note, style="yellow")


def status(root: Path, *, ask_mlflow: bool = False) -> Status:
    """Return everything that `vlp status` shows; whatever cannot be determined becomes a note."""
    if not (root / "params.yaml").exists():
        raise DataError(f"{root}: no params.yaml here; run this in a project's folder (`vlp init` makes one)")
    result = Status()
    end_dead_runs(root)
    _collect_running(root, result)
    for label, target in STATUS_LINES.items():
        try:
            result.added[label] = import_target(target)(root)
        except VLPError as error:
            result.notes.append(plain_text(str(error)))
    _collect_stale(root, result)
    try:
        from vlp_models.params import load_params

        params = load_params(root / "params.yaml")
    except VLPError as error:
        result.notes.append(plain_text(str(error)))
        return result
    _collect_champions(root, params, result, ask_mlflow)
    return result


def describe_entry(entry: dict[str, Any]) -> str:
    """Return a ledger entry as one line."""
    from vlp_models.cli.registry import describe_action

    reasons = "; ".join(entry.get("decision", {}).get("reasons", []))
    version = f" version {entry['version']}" if entry["version"] else ""
    return f"{entry['time']} {entry['model']}{version} {describe_action(entry)} by {entry['by']}" + (
        f": {reasons}" if reasons else ""
    )


def _collect_stale(root: Path, result: Status) -> None:
    try:
        stages = read_stale(root, timeout=DVC_SECONDS)
    # A note: the rest of the status does not depend on it.
    except DataError as error:
        result.notes.append(str(error))
        return
    for name, changes in stages.items():
        reasons: list[str] = []
        for change in changes:
            reasons += change if isinstance(change, dict) else [change]
        result.stale[name] = list(dict.fromkeys(reasons))
    # DVC depends on the records of installed packages, which `vlp run` writes again.
    if packages := changed_packages(root):
        result.stale.setdefault("plan", []).append(f"code of {', '.join(packages)}")


def _collect_running(root: Path, result: Status) -> None:
    """Collect the stages that run in this folder, and the holders of DVC's lock file."""
    import psutil

    from vlp_models.pipeline.dvc.lock_file import RWLOCK, read_holders

    here = os.fspath(root.resolve())
    if holder := find_holder(Workspace(root).lock):
        result.running.append(holder)
    for process in psutil.process_iter(["pid", "cmdline", "cwd", "create_time"]):
        command = process.info["cmdline"] or []
        # Skip processes of other folders, and this one.
        if process.info["cwd"] != here or process.info["pid"] == os.getpid():
            continue
        # `python .../vlp stage pretrain tden`, or `vlp stage ...` itself.
        if "vlp" in [Path(word).name for word in command[:2]] and "stage" in command:
            stage = command[command.index("stage") + 1 :][:2]
            # A stage's work folder is named STAGE-KEY, without options.
            name = "-".join(word for word in stage if not word.startswith("-"))
            progress = _progress(root, name, process.info["create_time"])
            result.running.append(f"pid {process.info['pid']}: {' '.join(stage)}{progress}")
    try:
        for pid, command_line in sorted(read_holders(root / RWLOCK).items()):
            state = "" if psutil.pid_exists(pid) else " (dead: DVC will release its lock)"
            result.running.append(f"pid {pid}: {command_line}, holds DVC's lock{state}")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        result.notes.append(f"dvc: {RWLOCK} cannot be read; if DVC is not running, delete it")


def _progress(root: Path, stage: str, started: float) -> str:
    """Return the last step that the trainer logged; empty if it has logged none since it started."""
    # Each fingerprint has a folder; the newest log is that of this run, or of the one before until its first step.
    logs = sorted((root / ".work" / stage).glob("*/log.jsonl"), key=lambda path: path.stat().st_mtime)
    if not logs or logs[-1].stat().st_mtime < started:
        return ""
    try:
        # The last line; one that is being written is not JSON yet.
        last = json.loads(logs[-1].read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2])
        loss = f", loss {last['loss']:.4g}" if isinstance(last.get("loss"), float) else ""
        return f", step {last['step']}, epoch {last['epoch']}{loss}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _collect_champions(root: Path, params: Params, result: Status, ask_mlflow: bool) -> None:
    from vlp_models.registry.promotion.gate_rule import gate_metric_or_empty
    from vlp_models.registry.promotion.ledger import Ledger, LedgerError, replay

    entries: list[dict[str, Any]] = []
    try:
        entries = Ledger(root / params.promotion.ledger).entries()
    except (LedgerError, OSError) as error:
        result.notes.append(explain_system_error(error))
    states = replay(entries)
    result.last = entries[-1] if entries else None
    reports, split = root / "reports", params.promotion.split
    registered = read_registered(reports)
    aliases = _aliases(root, params, result) if ask_mlflow else None
    for task in sorted({run.task for run in params.finetune.values()} | registered.keys()):
        model = f"{params.tracking.model_prefix}-{task}"
        metric = gate_metric_or_empty(params, task)
        champion = states[model].champion if model in states else None
        receipts = registered.get(task, [])
        challenger = (find_challenger(receipts) or {}).get("version")
        if aliases is not None:
            champion, challenger = (aliases.get(model, {}).get(name) for name in ("champion", "challenger"))
        # registered.json still names a version as challenger after its promotion.
        if challenger == champion:
            challenger = None
        # The champion's value is that of the ledger, which outlives its workspace; the others' are those of this one.
        values = {r["version"]: read_value(reports, r, metric, split) for r in receipts}
        champion_value = None if champion is None else _champion_value(entries, model, champion)
        candidates = [r["version"] for r in receipts if r["version"] not in (champion, challenger)]
        result.tasks.append(
            {
                "task": task,
                "metric": metric,
                "champion": _describe_version(champion, receipts, champion_value),
                "challenger": _describe_version(challenger, receipts, values.get(challenger)),
                "candidates": "; ".join(
                    _describe_version(version, receipts, values[version]) for version in candidates
                ),
            }
        )


def _aliases(root: Path, params: Params, result: Status) -> dict[str, dict[str, int]]:
    try:
        from vlp_models.registry.client import connect

        if lost := find_lost_versions(params.tracking, root):
            result.notes.append(f"MLflow has lost {', '.join(lost)}; `vlp run register` registers again")
        client = connect(params.tracking, root)
        return {m.name: {k: int(v) for k, v in m.aliases.items()} for m in client.search_registered_models()}
    except Exception as error:  # whatever MLflow raises: the rest is still worth showing
        result.notes.append(redact(f"MLflow: {first_line(error)}"))
        return {}


def _champion_value(entries: list[dict[str, Any]], model: str, version: int) -> float | None:
    """Return the champion's last measured value, from the ledger."""
    # The newest decision that names the version, on either side of a comparison.
    for entry in reversed(entries):
        numbers = entry.get("decision", {}).get("numbers", {})
        if entry["model"] == model and entry["version"] == version and "value" in numbers:
            return float(numbers["value"])
        if entry["model"] == model and entry["from"] == version and "champion_value" in numbers:
            return float(numbers["champion_value"])
    return None


def _describe_version(version: int | None, receipts: list[Receipt], value: float | None) -> str:
    """Return a version with its value, and with run and model if this workspace registered it."""
    if version is None:
        return "none"
    receipt = next((r for r in receipts if r["version"] == version), {})
    names = [str(receipt[name]) for name in ("run", "model") if receipt.get(name)]
    run = f" ({', '.join(dict.fromkeys(names))})" if names else ""
    return f"version {version}{run}" + ("" if value is None else f", {value:.2f}")
