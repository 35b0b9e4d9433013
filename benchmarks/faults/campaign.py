"""`make faults`: inject random faults into real runs of the tiny pipeline, and check the results.

python benchmarks/faults/campaign.py --count 1000 --seed 1     (minutes to prepare, then 20 to 60 s a fault)

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
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ground import ROOT, Ground
from injure import KINDS, draw, inflict

FILE = "faults.jsonl"


def main() -> int:
    options = _arguments()
    options.reports = options.reports.absolute()
    options.reports.mkdir(parents=True, exist_ok=True)
    ground = Ground(options.folder.absolute())
    ground.make(print)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else None
    for number in _numbers(options, ground):
        if deadline is not None and time.monotonic() > deadline:
            break
        fault = draw(options.seed, number, ground.stages)
        outcome = inflict(ground, fault)
        alone = options.only is not None or bool(options.kind)
        about = {"seed": options.seed, "alone": alone, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        _append(options.reports / FILE, {**about, "code": ground.code, **outcome.record})
        state = "lost" if outcome.problems else "survived" if outcome.hit else "missed"
        print(
            f"{time.strftime('%H:%M:%S')}  #{number} {state:8} {fault.kind}, {fault.stage}, {fault.moment}, "
            f"{fault.command}  {outcome.seconds:.0f} s  {outcome.note}  {'; '.join(outcome.problems)}",
            flush=True,
        )
        (options.reports / "faults.md").write_text(_page(options, read(options.reports / FILE)), encoding="utf-8")
    found = read(options.reports / FILE)
    print(f"{options.reports / 'faults.md'}: {sum(record['hit'] for record in found)} injected so far")
    return int(bool(still_lost(found)))


def _numbers(options: argparse.Namespace, ground: Ground) -> Iterator[int]:
    """Yield the numbers of the next faults, without those of earlier sessions."""
    if options.only is not None:
        yield options.only
        return
    known = [r for r in read(options.reports / FILE) if r["seed"] == options.seed]
    done, injected = {r["number"] for r in known}, sum(r["hit"] for r in known if not r["alone"])
    last = max((r["number"] for r in known if not r["alone"]), default=-1)
    fresh = itertools.count(last + 1)
    if options.kind:
        numbers = (n for n in fresh if n not in done and draw(options.seed, n, ground.stages).kind == options.kind)
        yield from itertools.islice(numbers, options.count)
        return
    for number in fresh:
        if injected >= options.count:
            return
        if number in done:  # it was injected alone and is in the file
            continue
        yield number
        injected += _last(options.reports / FILE)["hit"]


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


def _append(file: Path, record: dict[str, Any]) -> None:
    begin = "" if not file.exists() or file.read_bytes().endswith(b"\n") or not file.stat().st_size else "\n"
    with file.open("a", encoding="utf-8") as out:
        out.write(f"{begin}{json.dumps(record)}\n")
        out.flush()
        os.fsync(out.fileno())


def _last(file: Path) -> dict[str, Any]:
    return read(file)[-1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", type=int, default=100, help="faults of all sessions together; with --kind: of this session"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=0, help="start no fault after this time")
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "faults")
    parser.add_argument("--reports", type=Path, default=ROOT / "reports")
    return parser.parse_args()


def _page(options: argparse.Namespace, records: list[dict[str, Any]]) -> str:
    hits = [record for record in records if record["hit"]]
    lost = [record for record in records if record["problems"]]
    fixed = len(lost) - len(still_lost(records))
    seconds = sum(record["seconds"] for record in records)
    lines = [
        "# Faults",
        "",
        f"{len(hits)} faults injected, {len(hits) - sum(r['hit'] for r in lost)} survived, {len(lost)} lost; of these "
        f"{fixed} were fixed and survived when they were injected again; {seconds / 60:.0f} minutes. "
        f"{len(records) - len(hits)} more came too late, or cannot be injected here, and are not counted. "
        f"`python benchmarks/faults/campaign.py --count {options.count} --seed {options.seed}` continues the campaign.",
        "",
        "Survived: the rerun completed; weights, curves and the hashes in dvc.lock equal those of an undisturbed run; "
        "no recorded stage ran again; one MLflow run with every step once, one version; `dvc status` is clean; no "
        "`*.partial` and no process is left.",
    ]
    for name in ("kind", "stage", "moment", "command"):
        injected, failed = Counter(r[name] for r in hits), Counter(r[name] for r in lost)
        lines += ["", f"| {name} | injected | survived | lost |", "|---|---|---|---|"]
        lines += [f"| {value} | {n} | {n - failed[value]} | {failed[value]} |" for value, n in sorted(injected.items())]
    if lost:
        lines += ["", "## Lost", ""]
        for r in lost:
            what = ", ".join(filter(None, (r["kind"], r["note"], r["stage"], r["moment"], r["command"])))
            lines.append(f"- seed {r['seed']}, {r['number']}: {what}: {'; '.join(r['problems'])}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
