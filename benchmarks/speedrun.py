"""The race to a champion: how long does `vlp run` take until the demo's models are as good as they were?

    python benchmarks/speedrun.py --seeds 1 2 3 4 5         # the committed code against commit 598e041
    python benchmarks/speedrun.py --seeds 1 --use tiny      # a rehearsal

Rules:

- Target, on the demo's val split: captions with a CIDEr of 131 and 84.5% of the questions right, the lower ends of the
  intervals of the run that README shows. The test split takes no part.
- The clock runs from `vlp run` to its end, in a fresh copy of the commit, after the installation, on two cores that do
  nothing else.
- A record needs five seeds or more, of all trainings, and means that exceed both targets with p < 0.01 (one-sided
  t-tests over seeds).
- Processors differ, so the time counts as a ratio to commit 598e041, run on the same machine in the same hour: before
  the first seed, and after the last.
- Any change to code or params.yaml is allowed that keeps the datasets, the splits and the scorers.

Copies are made with `git archive` in a temporary folder and use this Python's packages. Results are added to
benchmarks/results/speedrun.json; docs/results/costs.md has the table of records.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from scipy import stats

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speedrun.json"
REFERENCE = "598e0415"
TARGETS = {"tden-captioning CIDEr": 131.0, "tden-vqa accuracy": 84.5}
MIN_SEEDS, ERROR = 5, 0.01
SCRIPT = """#!{python}
import sys
from vlp_models.cli{module} import main
if __name__ == "__main__":  # worker processes import this file
    sys.exit(main())
"""


class Copy:
    """A commit's files in a folder of their own, and an environment whose `vlp`, which its stages call, runs them."""

    def __init__(self, commit: str, folder: Path) -> None:
        folder.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)
        for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"]):
            subprocess.run(["git", *words], cwd=folder, check=True)
        self.folder = folder
        module = ".main" if (folder / "vlp_models" / "cli" / "main.py").exists() else ""
        environment = folder.with_name(folder.name + "-python")
        venv.create(environment)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        (packages / "these.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        self._vlp = environment / "bin" / "vlp"
        for command in Path(sys.executable).parent.iterdir():
            if not (environment / "bin" / command.name).exists() and command.name != "vlp":
                (environment / "bin" / command.name).symlink_to(command)
        script = SCRIPT.format(python=environment / "bin" / "python", module=module)
        self._vlp.write_text(script, encoding="utf-8")
        self._vlp.chmod(0o755)
        self._preset = "presets/{}.yaml" if (folder / "presets").exists() else "{}"  # 598e041 wants the file

    def use(self, presets: list[str], *settings: str) -> None:
        self.vlp("use", *(self._preset.format(name) for name in presets), *settings)

    def vlp(self, *words: str) -> float:
        """Run a command of this copy's code; return its seconds. Exit with its output if it fails."""
        began = time.perf_counter()
        done = subprocess.run(
            [self._vlp, *words],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(self.folder),
                "PATH": os.pathsep.join([str(self._vlp.parent), os.environ["PATH"]]),
            },
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"vlp {' '.join(words)} failed in a copy:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return time.perf_counter() - began

    def scores(self) -> dict[str, float]:
        """Return the scores on val that the targets name."""
        records = json.loads((self.folder / "reports" / "summary.json").read_text(encoding="utf-8"))
        return {
            f"{record['run']} {record['metric']}": record["value"]
            for record in records
            if record["split"] == "val" and f"{record['run']} {record['metric']}" in TARGETS
        }


def race(commit: str, seed: int, folder: Path, presets: list[str]) -> dict[str, Any]:
    copy = Copy(commit, folder)
    seeds = [f"--set=defaults.{kind}.seed={seed}" for kind in ("pretrain", "finetune")]
    copy.use(presets, *seeds)
    found = {"seed": seed, "seconds": round(copy.vlp("run"), 1), **copy.scores()}
    print(commit, json.dumps(found), flush=True)
    return found


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return whether the runs reach the targets, with the p-value of each."""
    p_values = {}
    for name, target in TARGETS.items():
        values = [run[name] for run in runs]
        spread = len(values) > 1 and statistics.stdev(values) > 0
        p_values[name] = float(stats.ttest_1samp(values, target, alternative="greater").pvalue) if spread else None
    reached = len(runs) >= MIN_SEEDS and all(p is not None and p < ERROR for p in p_values.values())
    means = {name: round(statistics.mean(run[name] for run in runs), 2) for name in TARGETS}
    return {"reached": reached, "p": p_values, "means": means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--reference", default=REFERENCE, help="empty: without one, so without a ratio")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--use", nargs="*", default=[], metavar="PRESET", help="presets to apply, e.g. tiny")
    options = parser.parse_args()
    name = subprocess.run(["git", "rev-parse", "--short=10", options.commit], cwd=ROOT, capture_output=True, text=True)
    commit = name.stdout.strip()
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        before = [race(options.reference, 1, where / "before", options.use)] if options.reference else []
        runs = [race(commit, seed, where / str(seed), options.use) for seed in options.seeds]
        after = [race(options.reference, 1, where / "after", options.use)] if options.reference else []
    seconds = statistics.median(run["seconds"] for run in runs)
    reference = statistics.mean(run["seconds"] for run in before + after) if options.reference else None
    record = {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "processor": next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.machine(),
        ),
        "presets": options.use,
        "seconds": seconds,
        "reference_seconds": reference,
        "ratio": round(seconds / reference, 3) if reference else None,
        **judge(runs),
        "runs": runs,
        "reference_runs": before + after,
    }
    print(json.dumps({key: value for key, value in record.items() if "runs" not in key}, indent=1))
    records = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    RESULTS.write_text(json.dumps([*records, record], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
