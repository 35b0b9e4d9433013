"""The parts of the unattended flow that look for what lowered the score of a refused version, and report it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from vlp_models.contrib.bisect.answers import is_missing_in_report
from vlp_models.contrib.bisect.params import BisectParams
from vlp_models.flows.parts import REFUSED, Part, hash_values, read_record
from vlp_models.params import Params
from vlp_models.registry.receipts import find_challenger, read_registered


def bisect_parts(params: Params) -> list[Part]:
    """Return a part for each task, if `bisect.hours` is set, and one that puts the answers into the report.

    Each runs only after a refusal.
    """
    settings = params.section(BisectParams)
    if not settings.hours:
        return []
    options = ("--budget", f"{settings.hours:g}h", "--seeds", str(settings.seeds))
    parts = [
        Part(
            name=f"bisect {task}",
            kind="bisect",
            command=("bisect", f"{task}@champion", f"{task}@challenger", *options),
            refusal=REFUSED,  # no answer: inconclusive, out of time, or the two cannot be compared
            evidence=partial(find_evidence, task),
            nothing="the gate refused no version of the champion's run that scores lower",
        )
        for task in sorted({run.task for run in params.finetune.values() if not run.blank_images})
    ]
    report = Part(name="report with causes", kind="report", targets=("report",), outdated=is_missing_in_report)
    return [*parts, report]


def find_evidence(task: str, root: Path) -> str | None:
    """Return the hash of the two versions that are compared; None if the last decision leaves nothing to explain."""
    decision = read_record(root / "reports" / "promotion" / f"{task}.json")
    gain = (decision.get("numbers") or {}).get("gain")
    is_lower = decision.get("action") == "refused" and gain is not None and gain < 0
    challenger = find_challenger(read_registered(root / "reports").get(task, [])) or {}
    # The champion of another run differs in more than a week's changes; a version that is no longer the challenger
    # (rolled back, or replaced since) would not be the one that is compared.
    is_same_run = decision.get("run") == decision.get("champion_run")
    if not is_lower or not is_same_run or decision["version"] != challenger.get("version"):
        return None
    return hash_values(decision["champion"], decision["version"])
