"""The rows of TDEN's tables 1 and 2 on synthetic scenes, against the paper's order.

    make ablations-tden            (= python benchmarks/ablations_tden.py)
    python benchmarks/ablations_tden.py --rows all-four two-pass-c --seeds 1 --share 0.1

Each row is a command of docs/ablations.md on the committed params.yaml and presets/scenes-tasks.yaml, whatever your
params.yaml says. The data are made once; then every seed of a row pretrains, fine-tunes captioning, VQA, caption-based
image retrieval and VCR, and evaluates, through the same stages as the pipeline, in a folder of its own below
.work/ablations. What is finished with the same params and data is not run again, so an interrupted study goes on;
several processes with the same arguments share the work (one row and seed each, held by a lock that ends with its
process), and the last to end has the whole table. `--share` scales all epochs, for a look before the long run. Changed
code makes nothing anew: move .work/ablations away for that.
Writes benchmarks/results/ablations-tden.json and docs/ablations/tden.md: the paper's figures, ours with 95% intervals
(Student's t over seeds), and for every pair of rows whether the order agrees. A pair whose interval of paired
differences holds 0 is "open", neither agreement nor disagreement.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretraining_gain import ROOT, T_975, value_of

from vlp_models.overlay import apply_overlay

PARTS = {"generate": "generate", "prepare": "data"}  # stage -> the section of params.yaml that names its parts
DATA_STAGES = ("validate", "detector", "features", "tokenizer", "shards")  # each has a section of its name
TASKS = {"captioning": "CIDEr", "vqa": "accuracy", "retrieval": "R@1", "vcr": "Q->AR"}
WORK = ROOT / ".work" / "ablations"
RESULTS = ROOT / "benchmarks" / "results" / "ablations-tden.json"
TABLE = ROOT / "docs" / "ablations" / "tden.md"


@dataclass(frozen=True)
class Row:
    """`label` begins its line in docs/ablations.md; the paper's figures follow.

    CIDEr on COCO after self-critical training, VQA on test-dev, retrieval's R@1 on Flickr30k, VCR's Q->AR on val.
    """

    label: str
    captioning: float
    vqa: float
    retrieval: float
    vcr: float


ROWS = {
    "no-pretraining": Row("TDEN-: no pretraining", 128.2, 69.8, 55.6, 54.5),
    "single-stream": Row("TDEN (Single-stream)", 128.6, 70.7, 56.2, 55.2),
    "two-stream": Row("TDEN (Two-stream)", 129.6, 70.9, 59.2, 55.8),
    "encoder": Row("encoder alone", 129.1, 71.9, 61.8, 56.9),
    "decoder": Row("decoder alone", 131.0, 71.7, 61.7, 56.8),
    "no-ism": Row("no ISM", 131.8, 72.0, 60.6, 57.3),
    "ism-cross": Row("ISM on the cross-modal encoder", 130.3, 71.9, 60.2, 57.2),
    "all-four": Row("all four, one pass", 132.4, 72.1, 62.5, 57.3),
    "two-pass-a": Row("Two-Pass-A", 133.4, 72.5, 63.6, 58.1),
    "two-pass-b": Row("Two-Pass-B", 133.0, 72.3, 63.6, 58.2),
    "two-pass-c": Row("Two-Pass-C", 133.0, 72.2, 63.4, 58.3),
}
Values = dict[str, dict[str, list[float]]]  # row -> task -> one value a seed


def command_of(row: Row) -> list[str]:
    """The words after `vlp use`; none for the shipped params.

    Raises:
        LookupError: docs/ablations.md has no such line.
    """
    for line in (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"| {row.label}"):
            found = re.search(r"`vlp use ([^`]+)`", line)
            return shlex.split(found[1]) if found else []
    raise LookupError(f"docs/ablations.md has no row {row.label!r}")


def scenes_params(words: list[str]) -> dict[str, Any]:
    """The committed params.yaml with presets/scenes-tasks.yaml, then `words` as after `vlp use`."""
    from ruamel.yaml import YAML

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "params.yaml"
        path.write_bytes(
            subprocess.run(["git", "show", "HEAD:params.yaml"], cwd=ROOT, check=True, capture_output=True).stdout
        )
        apply_overlay(path, ROOT / "presets" / "scenes-tasks.yaml", [])
        if words:
            preset = None if words[0] == "--set" else ROOT / words[0]
            apply_overlay(path, preset, [word for word in words[preset is not None :] if word != "--set"])
        return dict(YAML().load(path.read_text(encoding="utf-8")))  # round-trip: safe


def params_of(row: Row, seed: int, share: float) -> dict[str, Any]:
    """The whole of params.yaml for one row and seed."""
    params = scenes_params(command_of(row))
    params["finetune"] = {task: params["finetune"][task] for task in TASKS}
    captioning = params["finetune"]["captioning"]
    for task in ("retrieval", "vcr"):  # start where the row has captioning start
        params["finetune"][task] |= {key: captioning[key] for key in ("init", "scratch") if key in captioning}
    for section in (params["pretrain"], params["scheduled_sampling"], *params["finetune"].values()):
        section["seed"] = seed
        section["max_epochs"] = max(1, round(section["max_epochs"] * share))
    if captioning.get("scratch"):
        params["pretrain"]["max_steps"] = 1  # fine-tuning takes the architecture from it and no weights
    params["evaluate"]["blank_control"] = []
    params["tracking"]["uri"] = ""
    return params


def stages_of(params: dict[str, Any]) -> list[list[str]]:
    """What to run, in order: one pretraining, then each task."""
    sampling = params["scheduled_sampling"]
    stages = [["scheduled_sampling"]] if sampling["scheme"] != "none" else []
    if sampling["scheme"] == "none" or sampling["init"] == "pretrain":
        stages.insert(0, ["pretrain"])
    return stages + [[stage, task] for task in TASKS for stage in ("finetune", "evaluate")]


def run_stages(
    what: str, folder: Path, stages: list[list[str]], *, files: dict[str, str], made_of: dict[str, str], anew: Path
) -> bool:
    """Runs what is not finished yet in the workspace `folder`. False: another process is at it.

    files, made_of: name -> content. Where something was made of other contents of the latter, `anew` has to be moved
    away first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for file, content in made_of.items():
            if (folder / file).exists() and (folder / file).read_text(encoding="utf-8") != content:
                sys.exit(f"{folder} was made with another {file}; move {anew} away to begin anew")
        for file, content in (files | made_of).items():
            (folder / file).write_text(content, encoding="utf-8")
        finished = folder / "finished.txt"
        done = finished.read_text(encoding="utf-8").splitlines() if finished.exists() else []
        for stage in stages:
            if " ".join(stage) in done:
                continue
            print(f"{what}: {' '.join(stage)}", flush=True)
            subprocess.run([sys.executable, "-m", "vlp_models.cli", "stage", *stage], cwd=folder, check=True)
            with finished.open("a", encoding="utf-8") as file:
                file.write(" ".join(stage) + "\n")
    return True


def text_of(params: dict[str, Any]) -> str:
    from ruamel.yaml import YAML

    text = io.StringIO()
    YAML().dump(params, text)
    return text.getvalue()


def make_data(folder: Path) -> Path:
    """The scenes, from nothing to shards, below `folder`; waits for a process that is making them."""
    params = scenes_params([])
    stages = [[stage, name] for stage, section in PARTS.items() for name in params[section]]
    stages += [[stage] for stage in DATA_STAGES]
    sections = {name: params[name] for name in (*PARTS.values(), *DATA_STAGES)}
    made_of = {"sections.yaml": text_of(sections)}
    told = False
    while not run_stages(
        "data", folder, stages, files={"params.yaml": text_of(params)}, made_of=made_of, anew=folder.parent
    ):
        if not told:
            print("waiting for the process that makes the data", flush=True)
        told = True
        time.sleep(1)
    return folder / "data"


def run(name: str, seed: int, share: float, work: Path, data: Path) -> dict[str, float] | None:
    """{task: value} of one row and seed, made unless it is there; None: another process is making it."""
    folder = work / name / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process may be at it
        (folder / "data").symlink_to(data)
    params = params_of(ROWS[name], seed, share)
    manifest = (data / "shards" / "manifest.json").read_text(encoding="utf-8")
    made_of = {"params.yaml": text_of(params), "manifest.json": manifest}
    if not run_stages(f"{name}, seed {seed}", folder, stages_of(params), files={}, made_of=made_of, anew=work):
        return None
    return {task: value_of(folder / "reports" / "eval" / task, metric) for task, metric in TASKS.items()}


def is_finished(name: str, seed: int, share: float, work: Path) -> bool:
    """Also all seeds before it: a row's values are those of seeds 1, 2, ..."""
    for number in range(1, seed + 1):
        finished = work / name / f"seed-{number}" / "finished.txt"
        stages = [" ".join(stage) for stage in stages_of(params_of(ROWS[name], number, share))]
        if not finished.exists() or not set(stages) <= set(finished.read_text(encoding="utf-8").splitlines()):
            return False
    return True


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of the 95% interval; nan for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return mean, T_975.get(len(values) - 1, 1.96) * deviation / math.sqrt(len(values))


def verdict(paper: float, differences: list[float]) -> str:
    """Of one pair of rows: `paper` and `differences` (a seed each) are the first row's figure less the second's."""
    mean, half = interval(differences)
    if paper == 0 or math.isnan(half) or abs(mean) <= half:
        return "open"
    return "agrees" if (mean > 0) == (paper > 0) else "disagrees"


def table(values: Values, note: str) -> str:
    heads = "seeds | " + " | ".join(f"{metric}, paper | {metric}, here" for metric in TASKS.values())
    lines = [
        "# TDEN's ablations on the scenes",
        "",
        note,
        "",
        f"| row | {heads} |",
        "|---" * (2 + 2 * len(TASKS)) + "|",
    ]
    for name, tasks in values.items():
        cells = []
        for task in TASKS:
            mean, half = interval(tasks[task])
            cells += [
                str(getattr(ROWS[name], task)),
                f"{mean:.1f}" if math.isnan(half) else f"{mean:.1f} +- {half:.1f}",
            ]
        seeds = str(len(next(iter(tasks.values()))))
        lines.append(f"| {' | '.join([ROWS[name].label, seeds, *cells])} |")
    count = math.comb(len(values), 2)
    lines += [
        "",
        "Order of each pair of rows, the paper's against ours; open: the 95% interval of paired differences holds 0.",
    ]
    lines += [f"Of {count} pairs about {count / 20:.0f} would be called by chance alone.", ""]
    lines += ["| | agrees | disagrees | open |", "|---|---|---|---|"]
    named = []
    for task, metric in TASKS.items():
        found: dict[str, list[str]] = {"agrees": [], "disagrees": [], "open": []}
        for a, b in itertools.combinations(values, 2):
            paper = getattr(ROWS[a], task) - getattr(ROWS[b], task)
            pairs = zip(values[a][task], values[b][task], strict=False)  # seeds 1, 2, ... of each
            differences = [x - y for x, y in pairs]
            higher, lower = (a, b) if paper >= 0 else (b, a)
            found[verdict(paper, differences)].append(f"{higher} over {lower}")
        lines.append(f"| {metric} | {' | '.join(str(len(group)) for group in found.values())} |")
        for judged in ("agrees", "disagrees"):
            named.append(f"- {metric} {judged} with the paper's: {'; '.join(found[judged]) or 'none'}.")
    return "\n".join([*lines, "", *named]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--finished", action="store_true", help="run nothing: the table of what is finished")
    parser.add_argument("--share", type=float, default=1.0, help="of the epochs of params.yaml")
    arguments = parser.parse_args()
    work = WORK / f"share-{arguments.share}"
    parts = [(name, seed) for seed in range(1, arguments.seeds + 1) for name in arguments.rows]
    if arguments.finished:
        parts = [part for part in parts if is_finished(*part, arguments.share, work)]
        if not parts:
            sys.exit(f"nothing is finished in {work}")
    data = make_data(WORK / "data")
    for name, seed in parts:
        run(name, seed, arguments.share, work, data)
    values: Values = {name: {task: [] for task in TASKS} for name in arguments.rows}
    for name, seed in parts:  # again: what another process had in hand the first time
        found = run(name, seed, arguments.share, work, data)
        if found is None:
            print(f"another process is at {name}, seed {seed}: the last one to end writes the table")
            return
        for task, value in found.items():
            values[name][task].append(value)
    values = {name: tasks for name, tasks in values.items() if all(tasks.values())}
    command = " ".join(["python", "benchmarks/ablations_tden.py", *sys.argv[1:]])
    note = (
        f"`{command}`: means over seeds with 95% intervals (Student's t), the demo's tiny model on synthetic scenes, "
        f"{arguments.share:g} of the epochs of the params (rounded, at least one), captions after cross-entropy alone. "
        "Pairs are compared over the seeds that both have. The paper's figures are COCO after self-critical training, "
        "VQA v2, Flickr30k and VCR: sizes do not compare, orders may."
    )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"note": note, "values": values}, indent=2) + "\n", encoding="utf-8")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(values, note), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
