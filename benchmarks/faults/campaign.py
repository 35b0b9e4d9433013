"""`make faults`: inject random faults into real runs of the tiny pipeline, and check the results.

python benchmarks/faults/campaign.py --count 1000 --seed 1     (minutes to prepare, then it prints the time left)

Kind, stage and moment of a fault are a function of seed and number. A campaign can be interrupted: each fault appends a
line to reports/faults.jsonl, and the same command continues after the last one; reports/faults.md summarizes all lines.
`--minutes 50` limits a session. `--only 17` injects only number 17, `--kind "server away"` the next ones of a kind;
both are recorded as such. After fixing a loss, repeat its number (`--only`), then continue the campaign.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ground import ROOT, Ground, end_all
from injure import GROUPS, KINDS, draw, inflict
from moments import Outcome

FILE = "faults.jsonl"
LANES = (os.cpu_count() or 1) + 1  # a fault waits a part of its time
VERDICTS = ("survived", "silent", "lost", "endless")


def main() -> int:
    options = _arguments()
    options.reports = options.reports.absolute()
    options.reports.mkdir(parents=True, exist_ok=True)
    if options.publish:
        publish(options)
        return 0
    grounds = [Ground(options.folder.absolute(), lane) for lane in range(options.lanes)]
    grounds[0].make(print)
    for ground in grounds:
        ground.code = grounds[0].code
    session = Session(options, grounds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        session.run()
    except KeyboardInterrupt:
        # Threads that wait for a command would wait for its end.
        end_all([process for ground in grounds for process in ground.descendants()])
        print("stopped; the same command continues", flush=True)
        os._exit(130)
    records = read(options.reports / FILE)
    print(f"{options.reports / 'faults.md'}: {sum(record['hit'] for record in records)} injected so far")
    return int(bool(still_lost(records)))


class Session:
    """Inject faults, one in each ground at a time, until enough of them came in time."""

    def __init__(self, options: argparse.Namespace, grounds: list[Ground]) -> None:
        self.options, self.file = options, options.reports / FILE
        summary = options.reports / "faults.json"
        self.earlier = float(json.loads(summary.read_text())["minutes"]) if summary.exists() else 0.0
        self.began, self.completed, self.lock = time.monotonic(), 0, threading.Lock()
        self.idle: queue.SimpleQueue[Ground] = queue.SimpleQueue()
        for ground in grounds:
            self.idle.put(ground)

    def run(self) -> None:
        lanes = ThreadPoolExecutor(self.options.lanes)  # not as a context: its end would wait for every fault
        # A fault that came too late does not count, so a further one is drawn for it.
        while numbers := next_numbers(self.options, read(self.file), self._stages()):
            if self.late():
                return
            list(lanes.map(lambda number: self._inject(number, len(numbers)), numbers))
            if self.options.kind or self.options.only is not None:
                return

    def late(self) -> bool:
        return bool(self.options.minutes) and time.monotonic() > self.began + 60 * self.options.minutes

    def _stages(self) -> list[str]:
        ground = self.idle.get()
        self.idle.put(ground)
        return ground.stages

    def _inject(self, number: int, of: int) -> None:
        if self.late():
            return
        ground = self.idle.get()
        try:
            fault = draw(self.options.seed, number, ground.stages)
            try:
                outcome = inflict(ground, fault)
            except Exception as error:  # of the campaign itself: the others go on
                outcome = Outcome(fault)
                outcome.blame("lost", f"the campaign failed: {type(error).__name__}: {error}")
        finally:
            self.idle.put(ground)
        alone = self.options.only is not None or bool(self.options.kind)
        about = {"seed": self.options.seed, "alone": alone, "code": ground.code}
        about["ended"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self.lock:
            _append(self.file, {**about, **outcome.record})
            self.completed += 1
            self._say(outcome, of)
            records = read(self.file)
            (self.options.reports / "faults.md").write_text(_page(self.options, records), encoding="utf-8")
            summary = summarize(records, self.earlier + (time.monotonic() - self.began) / 60)
            (self.options.reports / "faults.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    def _say(self, outcome: Outcome, of: int) -> None:
        fault, each = outcome.fault, (time.monotonic() - self.began) / self.completed
        state = outcome.verdict if outcome.hit or outcome.problems else "missed"
        left = max(0, of - self.completed) * each / 60
        details = filter(None, (outcome.note, "; ".join(outcome.problems)[:600]))
        print(
            f"{time.strftime('%H:%M:%S')}  {self.completed}/{of}, {left:.0f} min left  #{fault.number} {state:8} "
            f"{fault.kind}, {fault.stage}, {fault.moment}, {fault.command}  {outcome.seconds:.0f} s  "
            f"{'  '.join(details)}",
            flush=True,
        )


def next_numbers(options: argparse.Namespace, records: list[dict[str, Any]], stages: list[str]) -> list[int]:
    """Return the numbers of the next faults, without those of earlier sessions."""
    if options.only is not None:
        return [options.only]
    earlier = [record for record in records if record["seed"] == options.seed]
    done = {record["number"] for record in earlier}
    fresh = (number for number in itertools.count() if number not in done)
    if options.kind:
        fresh = (number for number in fresh if draw(options.seed, number, stages).kind == options.kind)
        return list(itertools.islice(fresh, options.count))
    injected = sum(record["hit"] for record in earlier if not record["alone"])
    return list(itertools.islice(fresh, max(0, options.count - injected)))


def read(file: Path) -> list[dict[str, Any]]:
    """Return the records of all sessions, without a line that a kill truncated."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def still_lost(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the faults that were lost when they were last injected."""
    newest = {(record["seed"], record["number"]): record for record in records}
    return [record for record in newest.values() if record["problems"]]


def summarize(records: list[dict[str, Any]], minutes: float) -> dict[str, Any]:
    """Count the verdicts by group of kinds; a fault that was injected several times counts once, with the last one.

    Args:
        minutes: how long all sessions took.
    """
    newest = {(record["seed"], record["number"]): record for record in records}
    hits = [record for record in newest.values() if record["hit"] or record["problems"]]

    def count(kinds: Collection[str]) -> dict[str, int]:
        verdicts = Counter(verdict_of(record) for record in hits if record["kind"] in kinds)
        return {"injected": verdicts.total(), **{verdict: verdicts[verdict] for verdict in VERDICTS}}

    return {
        "ended": max(record["ended"] for record in records),
        "minutes": round(minutes, 1),
        "missed": len(newest) - len(hits),
        "again": len(records) - len(newest),
        "total": count(KINDS),
        "groups": [{"group": group, **count(kinds)} for group, kinds in GROUPS.items()],
        "kinds": [{"kind": kind, **count([kind])} for kind in KINDS],
    }


def publish(options: argparse.Namespace) -> None:
    """Write the records, without what commands printed, and their summary to STEM.jsonl and STEM.json."""
    records = read(options.reports / FILE)
    with options.publish.with_suffix(".jsonl").open("w", encoding="utf-8") as out:
        for record in records:
            line = json.dumps({key: value for key, value in record.items() if key != "output"})
            out.write(line.replace(f"{options.folder.absolute()}/", "") + "\n")
    shutil.copy(options.reports / "faults.json", options.publish.with_suffix(".json"))


def _append(file: Path, record: dict[str, Any]) -> None:
    begin = "" if not file.exists() or file.read_bytes().endswith(b"\n") or not file.stat().st_size else "\n"
    with file.open("a", encoding="utf-8") as out:
        out.write(f"{begin}{json.dumps(record)}\n")
        out.flush()
        os.fsync(out.fileno())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=100, help="faults of all sessions together; with --kind: of this session"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=0, help="start no fault after this time")
    parser.add_argument("--lanes", type=int, default=LANES, help="faults at a time; default: one more than cores")
    parser.add_argument("--publish", type=Path, metavar="STEM", help="write the results so far to STEM.json and .jsonl")
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "faults")
    parser.add_argument("--reports", type=Path, default=ROOT / "reports")
    return parser.parse_args()


def _page(options: argparse.Namespace, records: list[dict[str, Any]]) -> str:
    hits = [record for record in records if record["hit"] or record["problems"]]
    failed = [record for record in records if record["problems"]]
    fixed = len(failed) - len(still_lost(records))
    verdicts = Counter(verdict_of(record) for record in hits)
    lines = [
        "# Faults",
        "",
        f"{len(hits)} faults injected: {', '.join(f'{verdicts[verdict]} {verdict}' for verdict in VERDICTS)}; of the "
        f"last three, {fixed} were fixed and survived when they were injected again. {len(records) - len(hits)} more "
        "came too late, or cannot be injected here, and are not counted. "
        f"`python benchmarks/faults/campaign.py --count {options.count} --seed {options.seed}` continues the campaign.",
        "",
        "Survived: the rerun completed; weights, curves, predictions and the hashes in dvc.lock equal those of an "
        "undisturbed run; no recorded stage ran again; one MLflow run with every step once, one version; every output "
        "is as dvc.lock records it; no `*.partial` and no process is left. Silent: it ended with wrong content, or "
        "without a message that names the cause. Lost: work was repeated, or something is gone or left behind. "
        "Endless: it did not end in time.",
    ]
    for name in ("kind", "stage", "moment", "command"):
        lines += ["", f"| {name} | injected | {' | '.join(VERDICTS)} |", "|---|---|---|---|---|---|"]
        for value in sorted({record[name] for record in hits}):
            counts = Counter(verdict_of(record) for record in hits if record[name] == value)
            cells = (str(counts[verdict]) for verdict in VERDICTS)
            lines.append(f"| {value} | {counts.total()} | {' | '.join(cells)} |")
    if failed:
        lines += ["", "## Not survived", ""]
        for r in failed:
            details = ", ".join(filter(None, (r["kind"], r["note"], r["stage"], r["moment"], r["command"])))
            lines.append(f"- seed {r['seed']}, {r['number']}, {verdict_of(r)}: {details}: {'; '.join(r['problems'])}")
    return "\n".join(lines) + "\n"


def verdict_of(record: dict[str, Any]) -> str:
    """Return the verdict of a record; earlier campaigns recorded problems alone."""
    return str(record.get("verdict", "lost" if record["problems"] else "survived"))


if __name__ == "__main__":
    sys.exit(main())
