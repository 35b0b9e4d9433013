"""Speed of the stages on a busy machine: `python benchmarks/contention.py`.

Makes a project of the synthetic scenes at the demo's size with fewer images and updates, and runs every stage alone,
then next to two processes that compute without a pause. The goal: none takes more than three times as long. On two
cores, three processes that compute get two thirds of a core each. Use an otherwise idle machine of two cores.

Writes benchmarks/results/contention.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import vlp, write_result

NEIGHBORS = 2
SETTINGS = (
    *("generate.scenes.train=600", "detector.steps=40", "pretrain.tden.max_steps=60", "tracking.uri="),
    *("finetune.tden-captioning.max_steps=60", "finetune.tden-vqa.max_steps=60"),
)
STAGES = (
    *("plan", "generate scenes", "prepare scenes", "validate", "detector", "features", "tokenizer", "shards"),
    *("initial tden", "pretrain tden", "finetune tden-captioning", "finetune tden-vqa"),
    *("evaluate tden-captioning", "evaluate tden-vqa"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        project = Path(name) / "project"
        vlp(["init", str(project)], Path(name))
        vlp(["use", *(word for setting in SETTINGS for word in ("--set", setting))], project)
        alone, busy = {}, {}
        for stage in STAGES:
            alone[stage] = seconds(stage, project)
            with neighbors():
                busy[stage] = seconds(stage, project)
            print(f"{stage:26} {alone[stage]:6.1f} s, {busy[stage]:6.1f} s next to {NEIGHBORS}", flush=True)
    record = {
        "claim": "seconds of each stage, alone and next to two processes that compute without a pause",
        "processors": os.cpu_count(),
        "stages": {s: {"alone": alone[s], "busy": busy[s], "ratio": round(busy[s] / alone[s], 2)} for s in STAGES},
        "worst_ratio": round(max(busy[s] / alone[s] for s in STAGES), 2),
    }
    write_result("contention", record)
    print(json.dumps({"worst_ratio": record["worst_ratio"]}))


def seconds(stage: str, project: Path) -> float:
    """Run a stage from its start, and return its seconds."""
    subprocess.run(["rm", "-rf", str(project / ".work")], check=True)  # what a finished stage keeps
    start = time.perf_counter()
    vlp(["stage", *stage.split()], project)
    return round(time.perf_counter() - start, 2)


@contextmanager
def neighbors() -> Iterator[None]:
    spin = "while True: sum(range(10**6))"
    started = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(NEIGHBORS)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
