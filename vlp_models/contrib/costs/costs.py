"""Read what stages have cost, and add it up: by stage, by week, between two decisions of the gate, for a model card."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlp_models.common.pages import page_environment
from vlp_models.contrib.costs.meter import FILE, Cost
from vlp_models.evaluation.report import ReportContext, Section
from vlp_models.params import Params

COLUMNS = ("runs", "hours", "CPU hours", "memory, GB", "read, GB", "written, GB", "Wh")


def read_costs(root: Path) -> list[Cost]:
    """Return all measurements of a project, oldest first; a line that a full disk has cut off is left out."""
    costs = []
    try:
        lines = (root / FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            costs.append(Cost(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return costs


def add_up(costs: Sequence[Cost]) -> Cost | None:
    """Return the sum of some measurements; the memory is the largest, and the energy None if any lacks it."""
    if not costs:
        return None
    joules = [cost.joules for cost in costs if cost.joules is not None]
    return Cost(
        stage=costs[-1].stage,
        started=costs[0].started,
        seconds=sum(cost.seconds for cost in costs),
        cpu=sum(cost.cpu for cost in costs),
        memory=max(cost.memory for cost in costs),
        read=sum(cost.read for cost in costs),
        written=sum(cost.written for cost in costs),
        joules=sum(joules) if len(joules) == len(costs) else None,
    )


def describe(cost: Cost) -> str:
    """Return a cost in words: `1.3 CPU hours, 2.1 GB of memory, 41 Wh`."""
    energy = "" if cost.joules is None else f", {cost.joules / 3600:.1f} Wh"
    return f"{cost.cpu / 3600:.2f} CPU hours, {cost.memory / 1e9:.1f} GB of memory{energy}"


def make_table(costs: Iterable[Cost], key: Callable[[Cost], str]) -> dict[str, dict[str, str]]:
    """Return row -> column -> text, with a row for each value of `key` and one for all."""
    groups: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        groups[key(cost)].append(cost)
    if len(groups) > 1:
        groups["all"] = [cost for group in groups.values() for cost in group]
    return {name: _cells(group) for name, group in groups.items()}


def _cells(costs: Sequence[Cost]) -> dict[str, str]:
    total = add_up(costs)
    assert total is not None
    energy = "" if total.joules is None else f"{total.joules / 3600:.1f}"
    numbers = (total.seconds / 3600, total.cpu / 3600, total.memory / 1e9, total.read / 1e9, total.written / 1e9)
    texts = [str(len(costs)), *(f"{number:.2f}" for number in numbers), energy]
    return dict(zip(COLUMNS, texts, strict=True))


def week_of(cost: Cost) -> str:
    """Return the Monday of a cost's week, in UTC."""
    day = time.gmtime(cost.started - 86400 * time.gmtime(cost.started).tm_wday)
    return time.strftime("week of %Y-%m-%d", day)


def last_runs(costs: Iterable[Cost]) -> list[Cost]:
    """Return what each stage's last completed run has cost, with the interrupted attempts before it."""
    attempts: dict[str, list[Cost]] = defaultdict(list)
    runs: dict[str, list[Cost]] = {}
    for cost in costs:
        attempts[cost.stage].append(cost)
        if cost.completed:
            runs[cost.stage] = attempts.pop(cost.stage)
    return [total for run in runs.values() if (total := add_up(run))]


def _is_current(params: Params, stage: str) -> bool:
    """Return whether params.yaml has the run, model or dataset that a stage is about."""
    entries: dict[str, Mapping[str, Any]] = {
        **dict.fromkeys(("finetune", "evaluate"), params.finetune),
        **{"pretrain": params.pretrain, "initial": params.models, "generate": params.generate, "prepare": params.data},
    }
    kind, at, name = stage.partition("@")
    return not at or kind not in entries or name in entries[kind]


def report_section(context: ReportContext) -> Section:
    """Return the report's tables: what the stages have cost when they last ran, and all runs by week."""
    costs = read_costs(context.workspace.root)
    if not costs:
        return Section()
    current = [cost for cost in last_runs(costs) if _is_current(context.params, cost.stage)]
    template = page_environment(__package__).get_template("costs.html.j2")
    tables = {
        "the last run": make_table(current, lambda cost: cost.stage),
        "all runs": make_table(costs, week_of),
    }
    return Section(below=Markup(template.render(tables=tables, columns=COLUMNS)))


def card_fact(params: Params, root: Path, run: str) -> dict[str, str]:
    """Return a line of a model card: what the trainings of its chain and its evaluation have cost."""
    stages = {checkpoint.replace("/", "@") for checkpoint in params.chain(f"finetune/{run}")} | {f"evaluate@{run}"}
    total = add_up([cost for cost in last_runs(read_costs(root)) if cost.stage in stages])
    return {} if total is None else {"cost of its trainings and evaluation": describe(total)}


def history_notes(root: Path, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence per ledger entry of a task: what all stages, of any task, have cost since the one before."""
    costs, notes, since = read_costs(root), [], 0.0
    for entry in entries:
        until = datetime.fromisoformat(entry["time"]).timestamp()
        if total := add_up([cost for cost in costs if since <= cost.started < until]):
            period = "since the task's line before" if since else "until then"
            notes.append(f"line {entry['seq']}: {describe(total)} {period}")
        since = until
    return notes
