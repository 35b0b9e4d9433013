"""Promote, roll back and list decisions with the project's paths. No DVC stage: decisions are not outputs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import write_json
from vlp_models.common.user import current_user
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError, VLPError
from vlp_models.params import Params
from vlp_models.registry.client import resolve_task
from vlp_models.registry.receipts import decision_word, describe_decision

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from vlp_models.registry.promotion.ledger import Ledger
    from vlp_models.registry.promotion.promote import Decision
    from vlp_models.registry.promotion.reconcile import PromotionContext

REFUSED = 3  # exit code


def promote_task(
    params: Params,
    workspace: Workspace,
    task: str,
    *,
    version: int | None = None,
    force: str | None = None,
    by: str = "",
) -> Decision:
    """Decide on `version` (default: the best of the task's runs), move the aliases, write reports/promotion/TASK.json.

    Args:
        force: why to accept a first champion that the gate refuses.

    Raises:
        ParamsError: unknown task, or `force` is blank.
        DataError: nothing is registered. LedgerError: the ledger was changed, or it and MLflow disagree.
        TrackingError: MLflow cannot be reached.
    """
    from vlp_models.registry.client import mlflow_errors
    from vlp_models.registry.promotion.gate_rule import competing_runs, gate_rule, gate_spec
    from vlp_models.registry.promotion.promote import GateRequest, promote

    task = resolve_task(params.tracking, task)
    if force is not None and not force.strip():
        raise ParamsError(
            '`--force` needs a reason for the ledger, such as --force "a first model to try the demo page"'
        )

    def reevaluate(bundle: Path, lineage: dict[str, Any]) -> AbstractContextManager[Path]:
        from vlp_models.pipeline.reevaluate import reevaluate_bundle  # imports torch, which most decisions do not need

        return reevaluate_bundle(params, workspace, bundle, lineage)

    request = GateRequest(
        params=params.promotion,
        rule=gate_rule(params, task),
        spec=gate_spec(params, task),
        reevaluate=reevaluate,
        runs=competing_runs(params, task),
        version=version,
        force=(force or "").strip(),
    )
    # the report is written whatever the decision is
    with mlflow_errors(params):
        context = _make_context(params, workspace, task, by)
        decision = promote(context, request)
        _record_decision(context, workspace, decision)
        _refresh_serving_cache(context.client, params, workspace, task)
    return decision


def rollback_task(
    params: Params, workspace: Workspace, task: str, *, champion_now: int | None = None, by: str = ""
) -> Decision:
    """Restore the previous champion and write reports/promotion/TASK.json.

    Args:
        champion_now: the champion to roll back; nothing is done if it was rolled back before.

    Raises:
        DataError: there is no previous champion.
    """
    from vlp_models.registry.client import mlflow_errors
    from vlp_models.registry.promotion.promote import rollback

    task = resolve_task(params.tracking, task)
    with mlflow_errors(params):
        context = _make_context(params, workspace, task, by)
        decision = rollback(context, champion_now=champion_now)
        _record_decision(context, workspace, decision)
        _refresh_serving_cache(context.client, params, workspace, task)
    return decision


def _record_decision(context: PromotionContext, workspace: Workspace, decision: Decision) -> None:
    """Write reports/promotion/TASK.json, and state the decision where MLflow shows the version."""
    from vlp_models.registry.versions import describe_gate

    write_json(workspace.reports / "promotion" / f"{decision.task}.json", decision.to_plain())
    if decision.version is not None:
        plain = decision.to_plain()
        word, text = decision_word(plain), describe_decision(plain)
        describe_gate(context.client, decision.model, decision.version, word, text)


def _refresh_serving_cache(client: MlflowClient, params: Params, workspace: Workspace, task: str) -> None:
    """Look up for `vlp caption` and its companions what they apply from now on."""
    from vlp_models.registry.serving_cache import choose_neighbors, refresh_serving_cache

    refresh_serving_cache(client, params.tracking, workspace.root, [task])
    if task == "captioning":
        # The decision stands without this answer: `vlp caption` looks it up itself and reports the reason.
        with suppress(VLPError):
            choose_neighbors(params, workspace.root)


def history_rows(params: Params, workspace: Workspace, task: str) -> list[dict[str, Any]]:
    """Return the task's ledger entries, oldest first, after checking the whole ledger.

    Raises:
        LedgerError: a line was changed, inserted or removed.
    """
    from vlp_models.registry.client import model_name

    task = resolve_task(params.tracking, task)
    model = model_name(params.tracking, task)
    entries = open_ledger(params, workspace).entries()
    return [entry for entry in entries if entry["model"] == model or model in entry.get("versions", {})]


def open_ledger(params: Params, workspace: Workspace) -> Ledger:
    from vlp_models.registry.promotion.ledger import Ledger

    return Ledger(workspace.root / params.promotion.ledger)


def aliases_are_behind(params: Params, workspace: Workspace, task: str) -> bool:
    """Return whether MLflow's aliases of a task do not follow the ledger; False without a ledger or a database.

    Raises:
        LedgerError: a line was changed, inserted or removed.
        TrackingError: MLflow cannot be reached.
    """
    from vlp_models.registry.client import connect, database_exists, model_name, tracking_errors, tracking_uri
    from vlp_models.registry.promotion.reconcile import aliases_follow

    ledger, uri = open_ledger(params, workspace), tracking_uri(params.tracking, workspace.root)
    if not params.tracking.uri or not ledger.path.exists() or not database_exists(uri):
        return False
    client = connect(params.tracking, workspace.root)
    with tracking_errors(uri):
        return not aliases_follow(client, ledger, model_name(params.tracking, task))


def ledger_champion(params: Params, workspace: Workspace, task: str) -> int | None:
    """Return the number of a task's champion by the ledger, without asking MLflow; None if it has none.

    Raises:
        LedgerError: a line was changed, inserted or removed.
    """
    from vlp_models.registry.client import model_name

    return open_ledger(params, workspace).state(model_name(params.tracking, task)).champion


def _make_context(params: Params, workspace: Workspace, task: str, user: str) -> PromotionContext:
    from vlp_models.registry.client import connect, model_name
    from vlp_models.registry.promotion.reconcile import PromotionContext

    return PromotionContext(
        client=connect(params.tracking, workspace.root),
        ledger=open_ledger(params, workspace),
        task=task,
        model=model_name(params.tracking, task),
        user=user or current_user(),
    )


def explain(decision: Decision) -> list[str]:
    """Return the decision as lines for the terminal."""
    # versions with the runs that they come from
    champion = describe_run(decision.champion_run, decision.champion_run_model)
    before = f" (was {decision.champion}{champion})" if decision.champion not in (None, decision.version) else ""
    made_by = describe_run(decision.run, decision.run_model)
    version = f"version {decision.version}{made_by}" if decision.version else "no version"
    stays = f"version {decision.champion}{champion}" if decision.champion else "vacant"
    lines = [
        {
            "promoted": f"{decision.model}: champion is {version}{before}",
            "rolled back": f"{decision.model}: rolled back; champion is {version}{before}",
            "refused": f"{decision.model}: {decision.outcome or 'keep'}: {version} refused; champion stays {stays}",
            "unchanged": f"{decision.model}: nothing to promote: " + "; ".join(decision.reasons),
        }[decision.action]
    ]
    # what was measured
    numbers = decision.numbers
    if "gain" in numbers:
        low, high = numbers.get("gain_low"), numbers.get("gain_high")
        interval = f"{low:+.2f} to {high:+.2f}" if low is not None else "no interval"
        reevaluated = ", champion evaluated again" if numbers.get("champion_reevaluated") else ""
        lines.append(
            f"  {numbers['metric']} {numbers['value']:.2f} vs {numbers['champion_value']:.2f}: gain "
            f"{numbers['gain']:+.2f} ({interval}) on {numbers['n']:,} items{reevaluated}"
        )
        lines += _explain_power(numbers)
        if "error" in numbers:
            lines.append(
                f"  this comparison may err with probability {100 * numbers['error']:.2g}%; "
                f"{numbers['budget_left']:.0%} of the task's error budget was left"
            )
    elif "value" in numbers:
        lines.append(f"  {numbers['metric']} {numbers['value']:.2f} on {numbers['n']:,} items")
    if decision.ranking:
        lines.append(f"  {decision.ranking}")
    # why, and the way around a refusal
    if decision.action != "unchanged":
        lines += [f"  {'overridden: ' if decision.forced else ''}{reason}" for reason in decision.reasons]
    if decision.forced:
        lines.append(f"  forced: {decision.force_reason}")
    elif decision.action == "refused" and decision.champion is None and numbers:
        lines.append(f'  to accept it as the first champion all the same: vlp promote {decision.task} --force "why"')
    # On the selection split, candidates are compared with the chosen version's value there, not on the test.
    where = ""
    if selected_on := numbers.get("selected_on", ""):
        where = f" on {selected_on}"
        for candidate in decision.candidates:
            if candidate["version"] == decision.version and candidate["value"] is not None:
                where += f" (chosen version: {candidate['value']:.2f})"
    for other in decision.candidates:
        if other["version"] != decision.version:
            value = other.get("reason") or f"{other['value']:.2f}{where}"
            run = describe_run(other["run"], other["run_model"])
            lines.append(f"  other candidate: version {other['version']}{run}: {value}")
    return lines


def _explain_power(numbers: Mapping[str, Any]) -> list[str]:
    """Say how small a gain the test could have shown, and what limits it."""
    if "detectable" not in numbers:
        return []
    lines = [
        f"  minimum detectable gain ({numbers['power']:.0%} power): {numbers['detectable']:.2f}; relevant gain: "
        f"{numbers['relevant_gain']:g}"
    ]
    if numbers["seed_std"] is not None:
        past = f" and {numbers['pooled_variants']} past variants" if numbers.get("pooled_variants") else ""
        lines.append(
            f"  seeds: {numbers['runs']} vs {numbers['champion_runs']} runs per variant{past}, std of one run "
            f"{numbers['seed_std']:.2f}; std of the gain: {numbers['std_items']:.2f} from items, "
            f"{numbers['std_seeds']:.2f} from seeds"
        )
    if "not_pooled" in numbers:
        lines.append(f"  past variants are not used for the std of a run: {numbers['not_pooled']}")
    if numbers.get("limited_by") == "seeds":
        lines.append("  more seeds would help (runs of one `variant`); more items hardly would")
    return lines


def describe_run(run: str, run_model: str) -> str:
    """Return ` (run RUN, MODEL)`; empty if the run is not on record."""
    return f" ({', '.join(filter(None, (f'run {run}', run_model)))})" if run else ""
