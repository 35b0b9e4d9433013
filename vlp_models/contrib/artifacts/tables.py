"""A run in Prefect's UI: its name by what it did, and artifacts: tables and links made from reports/, as plain data.

Missing files are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.runtime import flow_run

from vlp_models.common.io import read_json_or_none
from vlp_models.common.redaction import redact
from vlp_models.flows.pipeline import Outcome
from vlp_models.params import Params
from vlp_models.registry.client import named_uri
from vlp_models.registry.promotion.gate_rule import gate_metric_or_empty
from vlp_models.registry.receipts import (
    describe_decision,
    find_challenger,
    read_decisions,
    read_registered,
    read_value,
)

TABLE_NUMBERS = (
    *("metric", "value", "champion_value", "gain", "gain_low", "gain_high"),
    *("detectable", "error", "budget_left"),
)
COLUMNS = ("task", "run", "model", "dataset", "split", "metric", "value", "low", "high", "n")
MAX_NAME = 120  # characters of a run's name
MLFLOW_UI = "http://127.0.0.1:5000"  # where the `mlflow ui` that `vlp run` prints listens


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A table (`rows`) or a link."""

    key: str
    description: str
    rows: list[dict[str, Any]] | None = None
    link: str = ""


def publish(root: Path, params: Params, outcomes: Sequence[Outcome]) -> None:
    """Name a run and create its artifacts. A server that rejects them fails nothing."""
    steps: list[tuple[str, Callable[[], Any]]] = [("the run's name", lambda: _rename_flow_run(root, outcomes))]
    for artifact in make_artifacts(root, params, outcomes):
        steps.append((f"artifact {artifact.key}", partial(_create, artifact)))
    for name, step in steps:
        try:
            step()
        except Exception as error:
            get_run_logger().warning("%s was not published: %s", name, redact(str(error)))


def _create(artifact: Artifact) -> None:
    if artifact.rows is not None:
        create_table_artifact(artifact.rows, key=artifact.key, description=artifact.description)
    else:
        create_link_artifact(artifact.link, key=artifact.key, description=artifact.description)


def _rename_flow_run(root: Path, outcomes: Sequence[Outcome]) -> None:
    """Append what the run did to its name: the list of runs shows names, and a refused promotion is green there."""
    results = describe_results(outcomes, read_decisions(root / "reports"))
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(str(flow_run.get_id())))
        # A retried flow has been named before.
        name = f"{run.name.partition(': ')[0]}: {results}"
        client.update_flow_run(run.id, name=name[:MAX_NAME])


def describe_results(outcomes: Sequence[Outcome], decisions: Mapping[str, dict[str, Any]]) -> str:
    """Return the gate's answers, such as `CIDEr 40.0, refused`, or the parts that ran."""
    ran = [outcome.part for outcome in outcomes if outcome.state in ("ran", "refused")]
    judged = [part.removeprefix("promote ") for part in ran if part.startswith("promote ")]
    answers = [name_decision(decisions[task]) for task in judged if task in decisions]
    return "; ".join(answers) or (f"ran {', '.join(ran)}" if ran else "nothing was stale")


def name_decision(decision: dict[str, Any]) -> str:
    """Return the deciding metric and what happened, such as `CIDEr 40.0, refused`."""
    numbers, action = decision.get("numbers") or {}, str(decision.get("action"))
    return f"{numbers['metric']} {numbers['value']:.1f}, {action}" if "value" in numbers else action


def make_artifacts(root: Path, params: Params, outcomes: Sequence[Outcome]) -> list[Artifact]:
    """Return tables of parts, new data, drift, validation, results, candidates and promotion decisions; and links."""
    reports = root / "reports"
    ingested, decisions = read_json_or_none(reports / "ingest.json"), read_decisions(reports)
    verdicts = ". ".join(f"{task}: {name_decision(d)} ({describe_decision(d)})" for task, d in decisions.items())
    artifacts = [
        # The verdict first: a run's page shows the artifacts in the order in which they are made.
        Artifact(
            key="promotion",
            description=f"{verdicts}. `vlp history TASK` lists all decisions",
            rows=[{"task": task, **_scalars(decision), **_numbers(decision)} for task, decision in decisions.items()],
        ),
        Artifact(
            key="parts",
            description="State of each part",
            rows=[
                {"part": o.part, "state": o.state, "seconds": round(o.seconds, 1), "detail": o.detail} for o in outcomes
            ],
        ),
        Artifact(key="ingest", description="The inbox", rows=[_scalars(ingested)]) if ingested else None,
        _drift(reports),
        _validation(reports),
        _results(reports, params, decisions),
        _candidates(reports, params, decisions),
    ]
    # `vlp evaluate-alias` writes reports/aliases/TASK-ALIAS.
    for folder in sorted((reports / "aliases").glob("*-*")):
        records = read_json_or_none(folder / "scores.json") or []
        rows = [{name: record.get(name) for name in COLUMNS} for record in records]
        artifacts.append(
            Artifact(
                key=_key("alias", folder.name), description="A registered model on the current test split", rows=rows
            )
        )
    # An empty table is left out, as is a part of the reports that does not exist.
    return [artifact for artifact in artifacts if artifact is not None and artifact.rows] + _links(root, params)


def _drift(reports: Path) -> Artifact | None:
    drift = read_json_or_none(reports / "drift.json") or {}
    verdict = "drifted" if drift.get("drifted") else "no drift"
    gate = "a gate" if drift.get("gate") else "reported only"
    return Artifact(
        key="drift",
        description=f"New data compared with the training data: {verdict} ({gate})",
        rows=[_scalars(measure) for measure in drift.get("measures", [])],
    )


def _validation(reports: Path) -> Artifact | None:
    tables = (read_json_or_none(reports / "validation.json") or {}).get("tables", {})
    return Artifact(
        key="validation",
        description="Rows that passed and failed validation",
        rows=[{"table": name, **_scalars(counts)} for name, counts in tables.items()],
    )


def _results(reports: Path, params: Params, decisions: dict[str, dict[str, Any]]) -> Artifact | None:
    """Return every score of the report; the row of a task's deciding metric also has the champion's value."""
    rows = []
    for record in read_json_or_none(reports / "summary.json") or []:
        row = {name: record.get(name) for name in COLUMNS}
        task = str(record.get("task"))
        decision = decisions.get(task, {})
        numbers = decision.get("numbers") or {}
        deciding = numbers.get("metric") or gate_metric_or_empty(params, task)
        # The champion's value is shown once per task: next to the run that the gate judged, on the metric that it used.
        is_judged = record.get("metric") == deciding and record.get("run") == decision.get("run", record.get("run"))
        rows.append({**row, "champion": numbers.get("champion_value") if is_judged else None})
    return Artifact(key="results", description=f"Report: {reports / 'index.html'}", rows=rows)


def _candidates(reports: Path, params: Params, decisions: dict[str, dict[str, Any]]) -> Artifact:
    """Return every registered version of each task, the challenger first."""
    rows = []
    for task, receipts in sorted(read_registered(reports).items()):
        decision = decisions.get(task, {})
        metric = str(decision.get("numbers", {}).get("metric") or gate_metric_or_empty(params, task))
        for receipt in receipts:
            row = {name: receipt.get(name) for name in ("run", "model", "variant", "name", "version")}
            value = read_value(reports, receipt, metric, params.promotion.split)
            challenger = "yes" if receipt.get("challenger") else ""
            rows.append({"task": task, **row, "metric": metric, "value": value, "challenger": challenger})
    return Artifact(key="candidates", description="The registered versions of each task", rows=rows)


def _links(root: Path, params: Params) -> list[Artifact]:
    links = []
    page = root / "reports" / "index.html"
    if page.exists():
        links.append(Artifact(key="report", description="The report, on the worker's disk", link=page.as_uri()))
    # A registry on a server has pages of its own; one in a file has them once the user starts MLflow's UI on it.
    uri = redact(named_uri(params.tracking))
    base = uri.rstrip("/") if uri.startswith("http") else MLFLOW_UI
    how = "" if base == uri.rstrip("/") else f" (mlflow ui --backend-store-uri {uri})"
    for task, receipts in sorted(read_registered(root / "reports").items()):
        receipt = find_challenger(receipts) or receipts[0]
        version = f"{base}/#/models/{receipt['name']}/versions/{receipt['version']}"
        description = f"{receipt['name']} version {receipt['version']}, with its MLflow run{how}"
        links.append(Artifact(key=_key("mlflow", task), description=description, link=version))
    return links


def _key(*words: str) -> str:
    """Return an artifact's key: Prefect accepts lower-case letters, digits and dashes, tasks of plugins have others."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())


def _scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Return what fits into a table's cells: lists of strings are joined, nested structures are left out."""
    cells: dict[str, Any] = {}
    for name, value in record.items():
        # A list with anything but strings is a nested structure.
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            cells[name] = "; ".join(value)
        elif value is None or isinstance(value, (str, int, float)):
            cells[name] = value
    return cells


def _numbers(decision: dict[str, Any]) -> dict[str, Any]:
    """Return those of a decision's numbers that fit into a table."""
    numbers = decision.get("numbers")
    return {name: numbers[name] for name in TABLE_NUMBERS if name in numbers} if isinstance(numbers, dict) else {}
