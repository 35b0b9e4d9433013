"""How well `vlp bisect` finds the cause of a lower score: 30 injected regressions, each with the answer written down.

    python benchmarks/regressions.py --work FOLDER [--rows 1,4,7]

A tiny VQA project (synthetic scenes, a model of 80,000 parameters, trainings of seconds) is built once in FOLDER. A row
is a clone of it that shares its DVC cache. The bad commit has the row's harmful changes and, by seed, 2 to 6 harmless
ones; then `vlp bisect GOOD BAD --json` runs. Finished rows are kept in FOLDER/rows: the same command continues.

A harmful change is harmful: the bad commit's own accuracy is at least 8 points below that of the good one, with the
same seed. Each has two doses; the weaker one is replaced by the stronger if its drop is below that. This is decided
before bisect runs, and both drops are recorded; a row with a smaller drop at the stronger dose is `not harmful`. Of two
causes, each lowers the score by 8 points alone; of a pair that does so together, each by at most 4, or it does not run.
A row without a cause has the first of the seeds 2 to 4 that scores at least a point lower, as people ask after such a
seed, or else the last one.

What counts as right was written on 2026-11-30 before any row was run:

cause     the answer is this change, alone, as the only cause. A drop of new data is a dataset of params.yaml
two       the answer is both changes, each as a cause of its own
together  the answer is the pair as one cause: neither alone lowers the score
none      no cause is named: `seed`, `nothing differs`, `not lower` or `inconclusive`
package   a package of the project, here a vocabulary, is another version: no cause is named, and the answer names the
          package as not tried. Versions of libraries are not recorded in a commit, so rounding by a library is left out

Contrasts:

1. At least 27 of 30 answers are right.
2. No cause is named in the rows without one. One of five is within bisect's 5% error per comparison (probability 0.2);
   two are not (0.02).
3. In rows of kind `cause` that are right, the search takes at most log2(n) + 2 trials for n changes, after the two
   sides, with the logarithm rounded up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import write_result
from regression_rows import DROP, EXTRA, HARMLESS, PAIRS, RAW, ROWS, VOCABULARY, Change, Row, dataset, write_packages

from vlp_models.common.io import read_json, read_json_or_none, write_json
from vlp_models.pipeline.dvc.repro import REPRO

ROOT = Path(__file__).parents[1]
SEED, BUDGET, TARGET = 1, "60m", "evaluate@vqa"
LEFT_OUT = ("tests", "docs", "benchmarks", "examples", "deploy")
SIZES = {"scenes": (8, 200, 100), "monday": (31, 400, 0), "extra": (32, 12, 0)}  # seed, train and test images
CONFIG = {"hidden": 32, "heads": 2, "intermediate": 64}
CONFIG |= dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 1)
NO_CAUSE = ("seed", "nothing differs", "not lower", "inconclusive")


@dataclass(frozen=True)
class Project:
    """A clone of the project in a folder of its own. work: the folder with what all share."""

    folder: Path
    work: Path
    version: str = ""  # of the vocabulary's package on the path

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command with this project's code; exit with its output if it fails."""
        bin_folder = Path(sys.executable).parent
        path = [str(self.folder), *([str(self.work / "packages" / self.version)] if self.version else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        environment |= {"DVC_SITE_CACHE_DIR": str(self.work / "site")}
        who = (f"GIT_{role}_{field}" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL"))
        environment |= dict.fromkeys(who, "benchmark@example.org")
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if check and done.returncode:
            sys.exit(f"{' '.join(command)} failed in {self.folder}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done

    def read_params(self) -> dict[str, Any]:
        raw_params: dict[str, Any] = yaml.safe_load((self.folder / "params.yaml").read_text())
        return raw_params

    def set_params(self, **values: Any) -> None:
        """Set values by their dotted keys, written with `__`."""
        raw_params = self.read_params()
        for key, value in values.items():
            *path, name = key.replace("__", ".").split(".")
            section = raw_params
            for part in path:
                section = section.setdefault(part, {})
            section[name] = value
        (self.folder / "params.yaml").write_text(yaml.safe_dump(raw_params, sort_keys=False))

    def evaluate(self) -> float | None:
        """Train and evaluate; return the accuracy on test, or None if it does not run."""
        for command in (("vlp", "plan"), (*REPRO, TARGET)):
            if self.run(*command, check=False).returncode:
                return None
        scores = read_json(self.folder / "reports/eval/vqa/scores.json")
        return next(float(score["value"]) for score in scores if score["metric"] == "accuracy")

    def reset(self) -> None:
        """Restore what is committed, with the raw data."""
        self.run("git", "checkout", "-q", ".")
        self.run("dvc", "checkout", "-q", "--force", f"{RAW}.dvc", f"{EXTRA}.dvc")

    def commit(self, message: str) -> str:
        self.run("git", "add", "-A")
        self.run("git", "commit", "-qm", message)
        return self.run("git", "rev-parse", "HEAD").stdout.strip()

    def apply(self, change: Change, dose: int) -> None:
        """Make a change at one of its doses; the last one if it has fewer."""
        value = change.doses[min(dose, len(change.doses) - 1)]
        if change.kind == "params":
            self.set_params(**{change.name: value})
        elif change.kind == "code":
            file, (old, new) = self.folder / "vlp_models" / change.name, value
            text = file.read_text()
            assert old in text, f"{change.name}: {old} not found"
            file.write_text(text.replace(old, new, 1))
        else:
            root = self.folder / change.name
            if change.kind == "drop":
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(self.work / "monday", root)
                self.set_params(data__monday=dataset("monday"))
            value(root)
            self.run("dvc", "add", "-q", change.name)


def build_base(work: Path) -> Project:
    """Return the good project, trained and committed; the first call builds it."""
    base = Project(work / "base", work)
    if (work / "base.json").exists():
        return base
    shutil.rmtree(base.folder, ignore_errors=True)
    shutil.rmtree(work / "monday", ignore_errors=True)
    base.folder.mkdir(parents=True)
    left_out = (f":!{name}" for name in LEFT_OUT)
    archive = subprocess.run(
        ["git", "archive", "HEAD", "--", ".", *left_out], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "x"], cwd=base.folder, input=archive.stdout, check=True)
    base.run("git", "init", "-q")
    base.run("dvc", "config", "cache.dir", str(work / "cache"))
    sizes = {
        name: {"generator": "objects", "seed": seed, "train": train, "val": 4, "test": test}
        | {"questions_per_image": 4, "side": 64}
        for name, (seed, train, test) in SIZES.items()
    }
    base.set_params(generate=sizes)
    for name in sizes:
        base.run("vlp", "stage", "generate", name)
    (base.folder / DROP).rename(work / "monday")
    run = {"task": "vqa", "start": "initial/tden", "max_steps": 250, "batch_size": 32, "evaluate_on": ["scenes"]}
    base.set_params(generate={}, data={name: dataset(name) for name in ("scenes", "extra")}, pretrain={})
    base.set_params(finetune={"vqa": run}, models__tden__config=base.read_params()["models"]["tden"]["config"] | CONFIG)
    base.set_params(detector__source="none", features__source="boxes", ingest__inbox="", tracking__uri="")
    base.set_params(tokenizer__vocab_size=300, tokenizer__min_answer_count=1, defaults__finetune__optimizer__lr=4e-3)
    base.set_params(evaluate__splits=["test"], evaluate__blind_baseline=[], evaluate__bootstrap=50)
    base.run("vlp", "plan")
    base.run("dvc", "add", "-q", RAW, EXTRA)
    score = base.evaluate()
    if score is None:
        sys.exit(f"the good project does not train; see `vlp run` in {base.folder}")
    base.commit("good")
    write_packages(work / "packages", (base.folder / "data/tokenizer/vocab.txt").read_text().split("\n"))
    write_json(work / "base.json", {"accuracy": score})
    return base


def draw_harmless(number: int, row: Row) -> list[Change]:
    """Return 2 to 6 harmless changes by seed, none of a param or file that the row changes; none for a seed alone."""
    if row.about == "another seed alone":
        return []
    chance = random.Random(f"{SEED}/{number}")
    names = {change.name for change in row.changes}  # a file or param of the row is not changed a second time
    free = [change for change in HARMLESS if change.name not in names]
    return chance.sample(free, chance.randint(2, 6))


def make_bad(project: Project, row: Row, harmless: Sequence[Change], good: float) -> dict[str, Any]:
    """Make the bad side of a row, uncommitted: at the weakest dose or first seed with a drop, or else the last one."""
    attempts: list[dict[str, Any]] = []
    is_none = row.kind == "none"
    for dose in (0, 1, 2) if is_none else (0, 1):
        alone = [measure_drop(project, [change], dose, good) for change in row.changes] if row.kind in PAIRS else []
        drop = measure_drop(project, [*row.changes, *harmless], dose, good, seed=dose + 2 if is_none else 1)
        attempts.append({"dose": dose + 1, "drop": drop, "alone": alone})
        if row.is_injected(drop, alone):
            break
    return {
        "attempts": attempts,
        "drop": drop,
        "is_harmful": drop is not None and (is_none or row.is_injected(drop, alone)),
    }


def measure_drop(project: Project, changes: Sequence[Change], dose: int, good: float, seed: int = 1) -> float | None:
    """Apply the changes to the good side, train, and return the drop; None if it does not run."""
    project.reset()
    for change in changes:
        if change.kind == "package":
            project = Project(project.folder, project.work, change.doses[0])
        else:
            project.apply(change, dose)
    if seed != 1:
        project.set_params(finetune__vqa__seed=seed)
    score = project.evaluate()
    return None if score is None else good - score


def run_row(number: int, work: Path) -> dict[str, Any]:
    """Inject a row's changes, bisect, and judge the answer."""
    base, row, start = build_base(work), ROWS[number - 1], time.monotonic()
    folder = work / "projects" / f"{number:02}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    has_package = row.kind == "package"
    project = Project(folder, work, "1.0" if has_package else "")
    base.run("git", "clone", "-q", ".", str(folder))
    project.reset()
    if has_package:
        project.set_params(tokenizer__source="vocab", tokenizer__vocab=f"package:{VOCABULARY}")
        accuracy = project.evaluate()
        project.commit("good")
    else:
        accuracy = read_json(work / "base.json")["accuracy"]
    assert accuracy is not None
    good = project.run("git", "rev-parse", "HEAD").stdout.strip()
    harmless = draw_harmless(number, row)
    record: dict[str, Any] = {"row": number, "kind": row.kind, "about": row.about, "good": accuracy}
    record |= {"harmful": [change.id for change in row.changes], "harmless": [change.id for change in harmless]}
    record |= make_bad(project, row, harmless, accuracy)
    if not record.pop("is_harmful"):
        return record | {"verdict": "not harmful"}
    if has_package:  # as a person has it who asks: the later version is installed
        project = Project(folder, work, "2.0")
    bad = project.commit("bad")
    began = time.monotonic()
    done = project.run("vlp", "bisect", good, bad, "--json", "--budget", BUDGET, check=False)
    (folder.parent / f"{number:02}.log").write_text(done.stdout + done.stderr)
    if done.returncode not in (0, 3):
        answer: dict[str, Any] = {"kind": "error", "sentence": done.stderr.strip()[-300:], "causes": []}
        return record | {"answer": answer, "verdict": "wrong"}
    result = json.loads(done.stdout)
    record |= {"answer": {key: result["answer"][key] for key in ("kind", "sentence", "causes", "candidates", "notes")}}
    record |= {"changes": result["changes"], "trials": result["trials"], "verdict": judge(row, result)}
    record |= {
        "search": max(0, len(result["trials"]) - 2),
        "bound": math.ceil(math.log2(max(1, len(result["changes"])))) + 2,
    }
    record["trainings"] = sum(trial["seeds"] for trial in result["trials"])
    now = time.monotonic()
    shutil.rmtree(folder)
    return record | {"minutes": {"inject": (began - start) / 60, "bisect": (now - began) / 60}}


def judge(row: Row, result: Mapping[str, Any]) -> str:
    """Return `right`, `wrong cause` if a change is named that is none, or `wrong`."""
    answer, names = result["answer"], {change.id for change in row.changes}
    causes = {frozenset(cause) for cause in answer["causes"]}
    if row.kind == "none":
        is_right = not causes and answer["kind"] in NO_CAUSE
    elif row.kind == "package":
        is_right = not causes and answer["kind"] == "untried" and VOCABULARY in answer["sentence"]
    elif row.kind == "together":
        is_right = causes == {frozenset(names)}
    else:
        is_right = causes == {frozenset([name]) for name in names}
    harmful = set() if row.kind == "package" else names
    named = {name for cause in causes for name in cause}
    return "right" if is_right else "wrong cause" if named - harmful else "wrong"


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the contrasts over all rows; `not run` while rows are missing."""
    right = [row for row in rows if row["verdict"] == "right"]
    without = [row for row in rows if row["kind"] == "none"]
    wrong = [row["row"] for row in without if row["verdict"] == "wrong cause"]
    long = [row["row"] for row in right if row["kind"] == "cause" and row["search"] > row["bound"]]
    finished = [row for row in rows if row["verdict"] != "not run"]
    is_whole = len(finished) == len(rows)
    verdicts = {
        "at least 27 of 30 are right": len(right) >= 27,
        "no cause is named in a row without one": not wrong,
        "the search takes at most log2(n) + 2 trials": not long,
    }
    return {
        "right": len(right),
        "run": len(finished),
        "named without a cause": wrong,
        "beyond the bound of trials": long,
        "contrasts": {name: ("met" if met else "not met") if is_whole else "not run" for name, met in verdicts.items()},
    }


def read_rows(work: Path) -> list[dict[str, Any]]:
    """Return all rows in order, those without a result as `not run`."""
    records = []
    for number, row in enumerate(ROWS, 1):
        empty = {"row": number, "kind": row.kind, "about": row.about, "verdict": "not run"}
        records.append(read_json_or_none(work / "rows" / f"{number:02}.json") or empty)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the projects and of finished rows")
    parser.add_argument("--rows", default="", help="only these, such as 1,4,7; default: all")
    options = parser.parse_args()
    work = options.work.absolute()
    (work / "rows").mkdir(parents=True, exist_ok=True)
    chosen = [int(number) for number in options.rows.split(",") if number] or list(range(1, len(ROWS) + 1))
    pending = [number for number in chosen if not (work / "rows" / f"{number:02}.json").exists()]
    start = time.monotonic()
    for count, number in enumerate(pending, 1):
        record = run_row(number, work)
        write_json(work / "rows" / f"{number:02}.json", record)
        minutes = (time.monotonic() - start) / 60
        remaining = minutes / count * (len(pending) - count)
        answer = record.get("answer", {}).get("sentence", "")
        print(f"row {number}, {record['about']}: {record['verdict']}, drop {record['drop']}: {answer}")
        print(f"  {count} of {len(pending)} rows, {minutes:.0f} min, about {remaining:.0f} min left", flush=True)
    rows = read_rows(work)
    summary = summarize(rows)
    write_result("regressions", {"seed": SEED, **summary, "rows": rows})
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
