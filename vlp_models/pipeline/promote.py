"""promote, rollback, history, lineage: the gate with the project's paths. No DVC stage: decisions are not outputs."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError, TrackingError
from vlp_models.evaluation.ranking import competing_runs
from vlp_models.params import Params
from vlp_models.params.schema import nearest
from vlp_models.registry.client import mlflow_errors
from vlp_models.registry.promotion.gate import WORN
from vlp_models.tasks import TASKS

if TYPE_CHECKING:
    from vlp_models.registry.promotion.ledger import Ledger
    from vlp_models.registry.promotion.promote import Decision

REFUSED = 3  # exit code


def promote_task(
    params: Params,
    workspace: Workspace,
    task: str,
    *,
    version: int | None = None,
    force_first: bool = False,
    by: str = "",
) -> Decision:
    """Decides on `version` (default: the best of the task's runs), moves the aliases, writes
    reports/promotion/TASK.json.

    Raises:
        ParamsError: no such task. DataError: nothing registered. LedgerError: see there.
        TrackingError: MLflow can't be reached.
    """
    from vlp_models.evaluation.ranking import comparison_metric
    from vlp_models.pipeline.reevaluate import reevaluated
    from vlp_models.registry.client import connect
    from vlp_models.registry.promotion.promote import Bench, promote
    from vlp_models.registry.versions import model_name
    from vlp_models.serving.bundle import content_of

    _check_task(task)
    with mlflow_errors(params):
        decision = promote(
            connect(params.tracking, workspace.root),
            ledger_of(params, workspace),
            params.promotion,
            task=task,
            model=model_name(params.tracking, task),
            metric=comparison_metric(params, task),
            dataset=params.tracking.dataset.get(task, ""),
            bench=Bench(
                content_of=content_of,
                reevaluate=lambda bundle, lineage: reevaluated(params, workspace, bundle, lineage),
            ),
            by=by or who(),
            runs=competing_runs(params, task),
            version=version,
            force_first=force_first,
        )
    write_json(report_path(workspace, task), decision.plain())
    return decision


def rollback_task(params: Params, workspace: Workspace, task: str, *, by: str = "") -> Decision:
    """Restores the previous champion, and writes reports/promotion/TASK.json.

    Raises:
        see `promote_task`; DataError also where there is no previous champion.
    """
    from vlp_models.registry.client import connect
    from vlp_models.registry.promotion.promote import rollback
    from vlp_models.registry.versions import model_name
    from vlp_models.serving.bundle import content_of

    _check_task(task)
    with mlflow_errors(params):
        client, ledger = connect(params.tracking, workspace.root), ledger_of(params, workspace)
        model = model_name(params.tracking, task)
        decision = rollback(client, ledger, task=task, model=model, content_of=content_of, by=by or who())
    write_json(report_path(workspace, task), decision.plain())
    return decision


def explain(decision: Decision) -> list[str]:
    """The decision in words."""
    was = of_run(decision.champion_run, decision.champion_run_model)
    before = f" (was {decision.champion}{was})" if decision.champion not in (None, decision.version) else ""
    made = of_run(decision.run, decision.run_model)
    what = f"version {decision.version}{made}" if decision.version else "no version"
    head = {
        "promoted": f"{decision.model}: champion is {what}{before}",
        "rolled back": f"{decision.model}: champion is {what}{before}; back at the one before",
        "refused": f"{decision.model}: {decision.answer or 'keep'}: {what} refused; champion stays "
        + (f"version {decision.champion}{was}" if decision.champion else "vacant"),
        "unchanged": f"{decision.model}: nothing to promote: " + "; ".join(decision.reasons),
    }[decision.outcome]
    lines = [head]
    numbers = decision.numbers
    if "gain" in numbers:
        interval = (
            f"{numbers['gain_low']:+.2f} to {numbers['gain_high']:+.2f}" if "gain_low" in numbers else "no interval"
        )
        lines.append(
            f"  {numbers['metric']} {numbers['value']:.2f} against {numbers['champion_value']:.2f}: gain "
            f"{numbers['gain']:+.2f} ({interval}) on {numbers['n']:,} items"
            + (", the champion evaluated anew" if numbers.get("champion_reevaluated") else "")
        )
        lines += _about_the_gain(numbers)
    elif "value" in numbers:
        lines.append(f"  {numbers['metric']} {numbers['value']:.2f} on {numbers['n']:,} items")
    lines += _about_the_test(numbers)
    if decision.outcome != "unchanged":
        lines += [f"  {'overridden: ' if decision.forced else ''}{reason}" for reason in decision.reasons]
    own = next((f", where it has {c['value']:.2f}" for c in decision.candidates if _is_own(c, decision)), "")
    where = f" on {numbers['chosen_on']}{own}" if numbers.get("chosen_on") else ""  # not the test's figures
    for other in decision.candidates:
        if other["version"] != decision.version:
            value = other.get("note") or f"{other['value']:.2f}{where}"
            lines.append(f"  beside it: version {other['version']}{of_run(other['run'], other['run_model'])}: {value}")
    return lines


def _is_own(candidate: Mapping[str, Any], decision: Decision) -> bool:
    return candidate["version"] == decision.version and candidate["value"] is not None


def _about_the_gain(numbers: dict[str, Any]) -> list[str]:
    """What could have been seen, and what makes it uncertain."""
    if "detectable" not in numbers:
        return []
    lines = [
        f"  smallest gain that would be shown in {numbers['power']:.0%} of cases: {numbers['detectable']:.2f}; of "
        f"interest is {numbers['relevant_gain']:g}"
    ]
    if numbers["deviation_seeds"]:
        lines.append(
            f"  seeds: {numbers['runs']} against {numbers['champion_runs']} runs of a design, a run deviates by "
            f"{numbers['seed_std']:.2f}; of the gain's deviation, items make {numbers['deviation_items']:.2f}, "
            f"seeds {numbers['deviation_seeds']:.2f}"
        )
    if numbers.get("too_few") == "seeds":
        lines.append("  more seeds would help: runs of one `variant` (docs/promotion.md); more items hardly")
    return lines


def _about_the_test(numbers: dict[str, Any]) -> list[str]:
    lines = []
    if numbers.get("chosen_on"):
        split, judged = numbers["chosen_on"], numbers["test"].partition(":")[0].rpartition("/")[2]
        own = "; the gain is too large by that choice, put val among `evaluate.splits`" if split == judged else ""
        lines.append(f"  chosen among several on {split}{own}")
    if numbers.get("test_uses", 1) > 1:
        more = "; take a fresh one" if numbers.get("budget_left", 1) < WORN else ""
        left = f", which leave {numbers['budget_left']:.0%} of its error budget" if "budget_left" in numbers else ""
        lines.append(f"  decisions on this test so far, this one included: {numbers['test_uses']}{left}{more}")
    return lines


def of_run(run: str, run_model: str) -> str:
    """Which run made a version, for a sentence; empty where that is not on record."""
    return f" ({', '.join(filter(None, (f'run {run}', run_model)))})" if run else ""


def history_rows(params: Params, workspace: Workspace, task: str) -> list[dict[str, Any]]:
    """The task's ledger entries, oldest first; intents only where their end is missing.

    Raises:
        LedgerError: the chain is broken.
    """
    from vlp_models.registry.versions import model_name

    _check_task(task)
    model = model_name(params.tracking, task)
    everything = _all_entries(params, workspace)
    entries = [entry for entry in everything if entry["model"] == model or model in entry.get("versions", {})]
    rows = []
    for place, entry in enumerate(entries):
        if entry["kind"] == "done" and place and entries[place - 1]["kind"] == "intent":
            entry = {"decision": entries[place - 1].get("decision", {}), **entry}
        if entry["kind"] != "intent" or place == len(entries) - 1:
            rows.append(entry)
    return rows


def _all_entries(params: Params, workspace: Workspace) -> list[dict[str, Any]]:
    """The registry's, which all checkouts share; the file's where there is no registry, or none of its ledger yet."""
    from vlp_models.registry.client import answering, connect, is_there, tracking_uri
    from vlp_models.registry.promotion.ledger import check
    from vlp_models.registry.promotion.log import RegistryLog

    ledger, uri = ledger_of(params, workspace), tracking_uri(params.tracking, workspace.root)
    if params.tracking.uri and is_there(uri):
        try:
            with answering(uri):
                lines = RegistryLog(connect(params.tracking, workspace.root), ledger.name).lines()
        except TrackingError as error:
            print(f"the ledger as of {ledger.path}: {error}", file=sys.stderr)
        else:
            if lines:
                return check(lines, ledger.name)
    return ledger.entries()


def ledger_of(params: Params, workspace: Workspace) -> Ledger:
    from vlp_models.registry.promotion.ledger import Ledger

    return Ledger(workspace.root / params.promotion.ledger, f"{params.tracking.model_prefix}-ledger")


def report_path(workspace: Workspace, task: str) -> Path:
    return workspace.reports / "promotion" / f"{task}.json"


def who() -> str:
    """The user's name; `unknown` where the system has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def _check_task(task: str) -> None:
    if task not in TASKS:
        raise ParamsError(f"{task}: no such task{nearest(task, TASKS)}")
