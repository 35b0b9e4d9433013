"""Read what stages have cost, and add it up: by stage, by week, between two decisions of the gate, for a model card."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlp_models.common.pages import page_environment
from vlp_models.evaluation.report import ReportContext, Section
from vlp_models.params import Params

FILE = Path(".work", "costs.jsonl")
COLUMNS = ("runs", "hours", "CPU hours", "memory, GB", "read, GB", "written, GB", "Wh")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process of a stage has cost, or several together.

    started: Unix time. seconds: of the clock. cpu: seconds of all processors. memory: the most that one process used
    at a time. read, written: on disk, beyond the system's cache. All in bytes. joules: of the processors of the whole
    machine meanwhile, including what else ran; None: they do not tell.
    """

    stage: str
    started: float
    seconds: float
    cpu: float
    memory: float
    read: float = 0.0
    written: float = 0.0
    joules: float | None = None

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


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
    known = [cost.joules for cost in costs if cost.joules is not None]
    return Cost(
        stage="",
        started=costs[0].started,
        seconds=sum(cost.seconds for cost in costs),
        cpu=sum(cost.cpu for cost in costs),
        memory=max(cost.memory for cost in costs),
        read=sum(cost.read for cost in costs),
        written=sum(cost.written for cost in costs),
        joules=sum(known) if len(known) == len(costs) else None,
    )


def describe(cost: Cost) -> str:
    """Return a cost in words: `1.3 CPU hours, 2.1 GB of memory, 41 Wh`."""
    energy = "" if cost.joules is None else f", {cost.joules / 3600:.1f} Wh"
    return f"{cost.cpu / 3600:.2f} CPU hours, {cost.memory / 1e9:.1f} GB of memory{energy}"


def table(costs: Iterable[Cost], key: Callable[[Cost], str]) -> dict[str, dict[str, str]]:
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


def week(cost: Cost) -> str:
    """Return the Monday of a cost's week, in UTC."""
    day = time.gmtime(cost.started - 86400 * time.gmtime(cost.started).tm_wday)
    return time.strftime("week of %Y-%m-%d", day)


def newest_by_stage(costs: Iterable[Cost]) -> list[Cost]:
    """Return each stage's newest measurement."""
    return list({cost.stage: cost for cost in costs}.values())


def report_section(context: ReportContext) -> Section:
    """Return the report's tables: what the stages have cost when they last ran, and all runs by week."""
    costs = read_costs(context.workspace.root)
    if not costs:
        return Section()
    template = page_environment(__package__).get_template("costs.html.j2")
    tables = {
        "The last run of each stage": table(newest_by_stage(costs), lambda cost: cost.stage),
        "All runs, by week": table(costs, week),
    }
    return Section(below=Markup(template.render(tables=tables, columns=COLUMNS)))


def card_fact(params: Params, root: Path, run: str) -> dict[str, str]:
    """Return a line of a model card: what the trainings of its chain and its evaluation have cost."""
    stages = {checkpoint.replace("/", "@") for checkpoint in params.chain(f"finetune/{run}")} | {f"evaluate@{run}"}
    total = add_up([cost for cost in newest_by_stage(read_costs(root)) if cost.stage in stages])
    return {} if total is None else {"cost of its trainings and evaluation": describe(total)}


def history_notes(root: Path, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence per ledger entry: what all stages have cost since the entry before it."""
    costs, notes, since = read_costs(root), [], 0.0
    for entry in entries:
        until = datetime.fromisoformat(entry["time"]).timestamp()
        if total := add_up([cost for cost in costs if since <= cost.started < until]):
            notes.append(f"line {entry['seq']}: {describe(total)} since the line before")
        since = until
    return notes
