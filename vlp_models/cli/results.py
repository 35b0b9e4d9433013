"""What `vlp run` prints at its end: the scores next to the previous ones, where to look, and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json, read_json_or_none, write_json
from vlp_models.common.redaction import redact
from vlp_models.common.workspace import Workspace, find_uncommitted
from vlp_models.data.tables import SPLITS
from vlp_models.errors import TrackingError, VLPError
from vlp_models.evaluation.report.records import Record
from vlp_models.metrics.bootstrap import NO_INTERVAL
from vlp_models.params import Params
from vlp_models.registry.promotion.gate_rule import find_best_baseline
from vlp_models.tasks.judging import direction_of

Scores = dict[tuple[str, str, str, str], float]  # run, dataset, split, metric -> value
STEPS = 3
ADDRESS = "http://127.0.0.1:5000"


def read_scores(summary: Path) -> Scores:
    """Return the headline scores in a reports/summary.json; none if it does not exist or is damaged."""
    try:
        records = read_json(summary)
        return {_key(r): r["value"] for r in records if r["headline"] and r["value"] is not None}
    except (VLPError, OSError, KeyError, TypeError):
        return {}


def print_results(summary: Path, before: Scores | None = None) -> None:
    """Print the headline metrics of every run, in percent: one table per task and dataset.

    Only the last split of each dataset is shown; the report has all of them.

    Args:
        before: earlier scores, shown next to those that differ.
    """
    from vlp_models.cli.tables import open_console, print_table

    console, before = open_console(120), before or {}
    tables: dict[str, list[Record]] = {}
    for record in _last_split([record for record in read_json(summary) if record.get("headline")]):
        tables.setdefault(f"{record['task']}: {record['dataset']} {record['split']}", []).append(record)
    for title, records in tables.items():
        metrics = list(dict.fromkeys(record["metric"] for record in records))
        # Rows by metric, and within a metric by run: the sort is stable.
        records.sort(key=lambda record: metrics.index(record["metric"]))
        # Score and best baseline on the same items, those whose image and sentence are not in the training data.
        unseen = [(record["leakage"] or {}).get("without_both") or {} for record in records]
        columns = {
            "metric": [record["metric"] for record in records],
            "run": [record["run"] for record in records],
            "score": [_number(record["value"]) for record in records],
            "95% interval": [_interval(record) for record in records],
            "before": [_before(record, before) for record in records],
            "best baseline": [_best_baseline(record, record) for record in records],
            "unseen items": [f"{figure['value']:.1f}" if figure else "" for figure in unseen],
            "best baseline there": [_best_baseline(*pair) for pair in zip(records, unseen, strict=True)],
        }
        print_table(
            console,
            columns,
            title=title,
            numbers=("score", "before", "unseen items"),
            folded=("metric", "run", "best baseline", "best baseline there"),
        )


def print_places(params: Params, workspace: Workspace) -> None:
    """Print the path of the report, or of the validation page before it exists, and what shows the runs in MLflow."""
    from vlp_models.registry.client import database_exists, named_uri, tracking_uri

    # The report exists after the last stage, the validation page after an early one.
    pages = {"report": workspace.reports / "index.html", "validation": workspace.reports / "validation.html"}
    for name, page in pages.items():
        if page.exists():
            print(f"{name:10} {page}")
            break
    # Asking MLflow about a database that does not exist would create it.
    if not params.tracking.uri or not database_exists(tracking_uri(params.tracking, workspace.root)):
        return
    uri = redact(named_uri(params.tracking))
    if uri.startswith(("http://", "https://")):
        print(f"MLflow     {uri}{_experiment(params, workspace)}")
        return
    print(f"MLflow     mlflow ui --backend-store-uri {uri} --host 127.0.0.1 --port 5000")
    print(f"           {ADDRESS}{_experiment(params, workspace)}")


def print_next_steps(params: Params, workspace: Workspace) -> None:
    """Print up to three commands that make sense now, each with its purpose."""
    steps = next_steps(params, workspace)[:STEPS]
    width = max((len(command) for command, _ in steps), default=0)
    for i, (command, purpose) in enumerate(steps):
        print(f"{'next' if not i else '':10} {command:{width}}  {purpose}".rstrip())


def next_steps(params: Params, workspace: Workspace) -> list[tuple[str, str]]:
    """Return commands and their purposes: promote what has no champion, use a champion, commit what DVC recorded."""
    from vlp_models.registry.promotion.ledger import Ledger, LedgerError, replay
    from vlp_models.registry.receipts import find_challenger, read_registered

    try:
        # By the ledger: MLflow would take seconds to import.
        champions = replay(Ledger(workspace.root / params.promotion.ledger).entries())
    except (LedgerError, OSError):
        return []
    undecided, promoted = [], []  # tasks
    for task, receipts in read_registered(workspace.reports).items():
        state, challenger = champions.get(f"{params.tracking.model_prefix}-{task}"), find_challenger(receipts)
        if state is not None and state.champion is not None:
            promoted.append(task)
        if challenger is not None and (state is None or state.champion != challenger["version"]):
            undecided.append(task)
    # The purpose is printed once, and one line is left for the commit.
    gate = "let the gate decide whether its best version becomes champion"
    steps = [(f"vlp promote {task}", "" if number else gate) for number, task in enumerate(undecided[: STEPS - 1])]
    if files := find_uncommitted(workspace.root):
        command = f"git add {shlex.join(files)} && git commit"
        steps.append((command, "`dvc metrics diff` compares later runs with it"))
    if "captioning" in promoted:
        steps.append(("vlp caption IMAGE...", "caption images with the champion"))
    if promoted:
        steps.append(("vlp demo", "try the champions on a web page"))
    return steps


def _key(record: Record) -> tuple[str, str, str, str]:
    return record["run"], record["dataset"], record["split"], record["metric"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _interval(record: Record) -> str:
    if record["low"] is not None:
        return f"{record['low']:.1f} to {record['high']:.1f}"
    return "too few items" if NO_INTERVAL in record["note"] and record["value"] is not None else ""


def _before(record: Record, before: Scores) -> str:
    old = before.get(_key(record))
    return "" if old is None or old == record["value"] else _number(old)


def _best_baseline(record: Record, scored: Record) -> str:
    """Return the best baseline of `scored`, the record itself or its unseen items; or why there is no score."""
    if record["value"] is None:
        return str(record["note"]) if scored is record else ""
    best = find_best_baseline(scored, direction_of(record["task"], record["metric"]))
    return f"{best[1]:.1f} {best[0]}" if best else ""


def _last_split(records: list[Record]) -> list[Record]:
    """Keep the test split of datasets that were also scored on val, which runs are selected on."""
    last: dict[tuple[str, str], str] = {}
    for record in records:
        key = record["task"], record["dataset"]
        # SPLITS is train, val, test, so the largest index is that of the test split if it was scored.
        last[key] = max(last.get(key, record["split"]), record["split"], key=SPLITS.index)
    return [record for record in records if record["split"] == last[record["task"], record["dataset"]]]


def _experiment(params: Params, workspace: Workspace) -> str:
    """Return the part of MLflow's address that opens the experiment's runs; empty if MLflow does not answer."""
    from vlp_models.registry.client import connect, tracking_errors, tracking_uri
    from vlp_models.registry.versions import SCORES_VIEW

    # MLflow takes two seconds to import, so the part is stored once it is final.
    store = workspace.root / ".work" / "experiment.json"
    key = f"{redact(tracking_uri(params.tracking, workspace.root))} {params.tracking.experiment}"
    if address := (read_json_or_none(store) or {}).get(key):
        return str(address)
    try:
        client = connect(params.tracking, workspace.root)
        with tracking_errors(tracking_uri(params.tracking, workspace.root)):
            experiment: Any = client.get_experiment_by_name(params.tracking.experiment)
    except TrackingError:
        return ""
    if experiment is None:
        return ""
    address = f"/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning"
    if SCORES_VIEW not in experiment.tags:
        return address
    # With the scores as columns, once versions are registered.
    address += "&viewStateShareKey=scores"
    write_json(store, {key: address})
    return address
