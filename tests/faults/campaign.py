"""`make faults`: faults at random, each into a real run of the tiny pipeline, and what became of it.

python tests/faults/campaign.py --count 100 --seed 1     (about a minute to prepare, then 20 to 40 s a fault)

Kind, stage and moment of each are a function of seed and number. Written after each fault: reports/faults.json and .md.
Called again, it goes on where it was; `--anew` begins again, `--only 17` repeats one and writes no report.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ground import ROOT, Ground
from injure import draw, inflict


def main() -> int:
    options = _arguments()
    ground = Ground(options.folder.absolute())
    ground.make(print)
    if options.only is not None:
        print(json.dumps(inflict(ground, draw(options.seed, options.only, ground.stages)).record, indent=2))
        return 0
    file = options.reports / "faults.json"
    records: list[dict[str, Any]] = []
    if file.exists() and not options.anew:
        before = json.loads(file.read_text(encoding="utf-8"))
        records = before["faults"] if before["seed"] == options.seed else []
    number = 1 + max((record["number"] for record in records), default=-1)
    while (injected := sum(record["hit"] for record in records)) < options.count:
        fault = draw(options.seed, number, ground.stages)
        outcome = inflict(ground, fault)
        records.append({**outcome.record, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
        _write(options, records)
        state = "lost" if outcome.problems else "survived" if outcome.hit else "missed"
        print(
            f"{injected + outcome.hit:4}/{options.count}  #{number} {state:8} {fault.kind}, {fault.stage}, "
            f"{fault.moment}, {fault.command}  {outcome.seconds:.0f} s  {'; '.join(outcome.problems)}",
            flush=True,
        )
        number += 1
    print(f"{options.reports / 'faults.md'}")
    return int(any(record["problems"] for record in records))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / ".work" / "faults")
    parser.add_argument("--reports", type=Path, default=ROOT / "reports")
    return parser.parse_args()


def _write(options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    options.reports.mkdir(exist_ok=True)
    for name, text in (
        ("faults.json", json.dumps({"seed": options.seed, "faults": records}, indent=1) + "\n"),
        ("faults.md", _page(options, records)),
    ):
        partial = options.reports / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(options.reports / name)


def _page(options: argparse.Namespace, records: list[dict[str, Any]]) -> str:
    hits = [record for record in records if record["hit"]]
    lost = [record for record in records if record["problems"]]
    seconds = sum(record["seconds"] for record in records)
    lines = [
        "# Faults",
        "",
        f"`python tests/faults/campaign.py --count {options.count} --seed {options.seed}`: "
        f"{len(hits)} faults injected, "
        f"{len(hits) - sum(r['hit'] for r in lost)} survived, {len(lost)} lost; {seconds / 60:.0f} minutes. "
        f"{len(records) - len(hits)} more came too late to hit, and are not counted unless something was lost.",
        "",
        "Survived: the pipeline, run again, ended; weights, curves and dvc.lock's hashes are those of the undisturbed "
        "run; no recorded stage ran again; one MLflow run with every step once, one version; `dvc status` clean; no "
        "`*.partial`, no process left.",
    ]
    for name in ("kind", "stage", "moment", "command"):
        injected, failed = Counter(r[name] for r in hits), Counter(r[name] for r in lost)
        lines += ["", f"| {name} | injected | survived | lost |", "|---|---|---|---|"]
        lines += [f"| {value} | {n} | {n - failed[value]} | {failed[value]} |" for value, n in sorted(injected.items())]
    if lost:
        lines += ["", "## Lost", ""]
        lines += [
            f"- #{r['number']} {r['kind']}, {r['stage']}, {r['moment']}, {r['command']}: {'; '.join(r['problems'])}"
            for r in lost
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
