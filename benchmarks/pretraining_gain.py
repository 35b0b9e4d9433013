"""What pretraining is worth: TDEN against TDEN- (no pretraining, same fine-tuning budget), over seeds.

    python benchmarks/pretraining_gain.py [--seeds 3] [--tasks captioning vqa] [--share-pretraining]

Needs the shards of a finished pipeline (`make demo`). Each seed pretrains, fine-tunes each task from the pretrained
weights and from scratch with the same params, and evaluates both, through the same stages as the pipeline, in a
folder of its own below .work/. Writes benchmarks/results/pretraining_gain.json with every value and the mean gain
with its 95% interval (Student's t over seeds). On the synthetic scenes, at the tiny size.

--share-pretraining fine-tunes every seed from the pipeline's one pretrained checkpoint: quicker, and silent about how
much another pretraining would differ.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}  # two-sided 95% quantiles of Student's t, by freedom


def run_seed(seed: int, tasks: list[str], folder: Path, share_pretraining: bool) -> dict[str, dict[str, float]]:
    """{task: {"TDEN": value, "TDEN-": value}} of one seed."""
    from ruamel.yaml import YAML

    yaml = YAML()  # round-trip: safe, keeps comments
    params = yaml.load((ROOT / "params.yaml").read_text())
    params["pretrain"]["seed"] = seed
    runs = {}
    for task in tasks:
        run = params["finetune"][task]
        run["seed"] = seed
        runs[task] = run
        runs[f"{task}_scratch"] = {**run, "scratch": True}
    params["finetune"] = runs
    params["evaluate"]["blank_control"] = []
    params["tracking"]["uri"] = ""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "params.yaml").open("w") as file:
        yaml.dump(params, file)
    if not (folder / "data").exists():
        (folder / "data").symlink_to(ROOT / "data")
    if share_pretraining:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "pretrain").symlink_to(ROOT / "checkpoints" / "pretrain")
    steps = [] if share_pretraining else [["pretrain"]]
    steps += [["finetune", name] for name in runs] + [["evaluate", name] for name in runs]
    for step in steps:
        print(f"seed {seed}: {' '.join(step)}", flush=True)
        subprocess.run([sys.executable, "-m", "vlp_models.cli", "stage", *step], cwd=folder, check=True)
    metric = dict(params["tracking"]["metric"])
    return {
        task: {
            "TDEN": value_of(folder / "reports" / "eval" / task, metric[task]),
            "TDEN-": value_of(folder / "reports" / "eval" / f"{task}_scratch", metric[task]),
        }
        for task in tasks
    }


def value_of(directory: Path, metric: str) -> float:
    scores: list[dict[str, Any]] = json.loads((directory / "scores.json").read_text())
    return next(float(score["value"]) for score in scores if score["metric"] == metric)


def summarise(values: list[dict[str, float]]) -> dict[str, Any]:
    gains = [value["TDEN"] - value["TDEN-"] for value in values]
    mean = statistics.mean(gains)
    half = math.nan
    if len(gains) > 1:
        half = T_975.get(len(gains) - 1, 1.96) * statistics.stdev(gains) / math.sqrt(len(gains))
    return {"per_seed": values, "gain_mean": mean, "gain_95": [mean - half, mean + half]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=["captioning"])
    parser.add_argument("--share-pretraining", action="store_true")
    arguments = parser.parse_args()
    if not (ROOT / "data" / "shards" / "manifest.json").exists():
        sys.exit("no data/shards: run `make demo` first")
    start = time.perf_counter()
    work = ROOT / ".work" / "pretraining_gain"
    shutil.rmtree(work, ignore_errors=True)
    results = [
        run_seed(seed, arguments.tasks, work / f"seed-{seed}", arguments.share_pretraining)
        for seed in range(1, arguments.seeds + 1)
    ]
    report = {
        "command": "python benchmarks/pretraining_gain.py " + " ".join(sys.argv[1:]),
        "data": "synthetic scenes, test split",
        "seconds": round(time.perf_counter() - start),
        "tasks": {task: summarise([result[task] for result in results]) for task in arguments.tasks},
    }
    out = ROOT / "benchmarks" / "results" / "pretraining_gain.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
