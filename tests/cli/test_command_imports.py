"""Commands import only what they need: which heavy packages each may import, and a generous bound on its CPU time.

The bound is about three times what a command takes on an idle machine (CONTRIBUTING.md has the goals).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from cloned_project import copy_project, environment

from vlp_models.cli.main import app

pytestmark = pytest.mark.pipeline

HEAVY = (
    *("torch", "torch._dynamo", "torchvision", "transformers", "lightning", "timm", "pandas", "mlflow", "scipy"),
    *("sklearn", "matplotlib", "great_expectations", "prefect", "dvc", "duckdb", "pyarrow", "PIL", "numpy"),
)
FILES = {"pyarrow", "PIL", "numpy"}  # to read tables and images
MLFLOW = {"mlflow", "pandas", "scipy", "pyarrow", "numpy"}  # MLflow's client imports all of them
MODEL = {"torch", "torchvision", "PIL", "numpy"}  # to apply a model that reads regions

EVALUATED = "reports/eval/tden-vqa"

# arguments -> (packages that it may import, CPU seconds); IMAGE is an image file. In this order: promote comes first.
ALLOWED: dict[tuple[str, ...], tuple[set[str], float]] = {
    ("--help",): (set(), 3),
    ("promote", "vqa", "--force", "a first model"): (MLFLOW, 12),
    ("promote", "vqa"): (MLFLOW, 12),
    ("history", "vqa"): (set(), 4.5),
    ("status",): (set(), 4.5),  # with the `dvc status` that it starts
    ("lineage", "vqa"): (MLFLOW, 12),
    ("rollback", "vqa"): (MLFLOW, 12),  # nothing to go back to
    ("verify", "vqa"): (MLFLOW | FILES, 15),
    ("drift",): (FILES, 4.5),
    ("use", "--list"): (set(), 4.5),
    ("use", "--set", "finetune.tden-vqa.max_epochs=2"): (MODEL | FILES, 6),
    ("plan",): (MODEL | FILES, 6),
    ("ingest",): (FILES, 4.5),
    ("commit", "--no-push"): (set(), 4.5),
    ("costs",): (set(), 4.5),
    ("prune",): (set(), 4.5),
    ("compare", f"a={EVALUATED}", f"b={EVALUATED}", "--metric", "scenes test accuracy"): (FILES, 6),
    ("pack", "tden-vqa"): (FILES, 6),
    ("replay", "tden-vqa.run.zip"): (FILES, 6),
    ("upgrade",): (set(), 4.5),
    ("down",): (set(), 4.5),
    ("croissant", "--license", "CC0-1.0"): (FILES, 4.5),
    ("answer", "IMAGE", "What color is it?"): (MODEL, 12),
    ("predict", "vqa", "IMAGE", "What color is it?"): (MODEL, 12),
    ("caption", "IMAGE", "--model", "vlp-captioning@challenger"): (MODEL | MLFLOW, 15),
    ("caption", "IMAGE", "--model", "vlp-captioning@challenger", ""): (MODEL, 12),  # again: the version is remembered
}
# They train, evaluate, serve or start other programs: their own work takes longer than any import.
WORK = {
    *("init", "run", "stage", "join", "import-checkpoint", "new", "try", "up", "forget", "demo", "judge"),
    *("export", "evaluate-alias", "doctor", "verify-resume", "classify", "label"),
    *("audit", "dossier", "bisect", "influence"),
}


@pytest.fixture(scope="module")
def project(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(built_project, tmp_path_factory.mktemp("imports") / "project")


def run_command(project: Path, arguments: list[str]) -> tuple[set[str], float, str]:
    """Run `vlp ARGUMENTS` in a process of its own; return its heavy packages, its CPU seconds and its output."""
    code = (
        "import atexit, json, sys\n"
        f"heavy = {HEAVY!r}\n"
        "atexit.register(lambda: print('IMPORTED', json.dumps([name for name in heavy if name in sys.modules])))\n"
        f"sys.argv = ['vlp', *{arguments!r}]\n"
        "from vlp_models.cli.main import main\n"
        "main()"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**environment(project), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else each command compiles the clone's modules
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=env, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    _, found, imported = done.stdout.rpartition("IMPORTED ")
    assert found, done.stdout + done.stderr
    return set(json.loads(imported)), seconds, done.stdout + done.stderr


def test_every_command_is_in_the_table() -> None:
    names = {command.name for command in app.registered_commands}
    assert names == WORK | {arguments[0] for arguments in ALLOWED if not arguments[0].startswith("-")}


@pytest.mark.timeout(900)
def test_commands_import_what_they_need_and_answer_soon(project: Path) -> None:
    image = next((project / "data" / "raw" / "scenes").rglob("*.png"))
    run_command(project, ["plan"])  # compiles the clone's modules
    wrong = []
    for arguments, (allowed, seconds) in ALLOWED.items():
        words = [os.fspath(image) if word == "IMAGE" else word for word in arguments if word]
        imported, took, output = run_command(project, words)
        assert "Traceback" not in output, output
        if imported - allowed:
            wrong.append(f"vlp {' '.join(arguments)} imports {', '.join(sorted(imported - allowed))}")
        if took > seconds:
            wrong.append(f"vlp {' '.join(arguments)} takes {took:.1f} s of CPU time")
    assert not wrong, "\n".join(wrong)
