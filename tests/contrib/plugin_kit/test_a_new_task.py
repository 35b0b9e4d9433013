"""A new task is one file in plugins/: it trains, loads, predicts and is scored without any change of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.plugin_kit.commands import SCAFFOLDS
from vlp_models.contrib.plugin_kit.scaffolds.task.guess_color import GuessColor
from vlp_models.data.sample import Sample
from vlp_models.errors import ParamsError
from vlp_models.metrics.score import STATISTICS, read_items
from vlp_models.models.tden.model import TDEN
from vlp_models.tasks.base import check_model, supports_task
from vlp_models.tasks.scoring import EvalContext

TESTS = Path(__file__).parents[2]
EVERY_STAGE = """
import sys
from pathlib import Path
from toy_dataset import write_workspace
from vlp_models.data.tables import write_table
from vlp_models.evaluation.report.records import evaluation_records
from vlp_models.pipeline.stages import evaluate, finetune, initial, pretrain
from vlp_models.common.workspace import Workspace

root = Path(sys.argv[1])
workspace = Workspace(root)
run = {"guess": {"task": "guess_color", "start": "pretrain/tden"}}
settings = {"splits": ["test"], "bootstrap": 20, "blind_baseline": ["guess_color"]}
plugins = {"tasks": {"guess_color": "plugins.guess_color:GuessColor"}}
params = write_workspace(root, finetune=run, evaluate=settings, plugins=plugins)
workspace.validated.mkdir(parents=True)
about = {"source": "toy", "split": "test", "path": "", "width": 10, "height": 10, "provenance": ""}
rows = [{"image_id": f"toy/test{i:03d}", "sha256": "0" * 64, **about} for i in range(4)]
write_table(rows, "images", workspace.validated)
initial.run(params, workspace, "tden")
pretrain.run(params, workspace, "tden")
finetune.run(params, workspace, "guess")
evaluate.run(params, workspace, "guess")
records = evaluation_records(params, workspace)
print("headlines:", [record["metric"] for record in records if record["headline"]])
"""


@pytest.mark.slow
def test_a_task_in_one_file_runs_through_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "work" / "plugins").mkdir(parents=True)
    shutil.copy(SCAFFOLDS / "task" / "guess_color.py", tmp_path / "work" / "plugins")
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS / 'support'}"}
    command = [sys.executable, "-c", EVERY_STAGE, str(tmp_path / "work")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "headlines: ['error (all)']" in done.stdout

    workspace = Workspace(tmp_path / "work")
    found = {record["metric"]: record for record in read_json(workspace.evaluation("guess") / "scores.json")}
    assert found["error (all)"]["value"] == pytest.approx(100 - found["accuracy"]["value"], abs=1e-3)
    lines = (workspace.evaluation("guess") / "colors_toy_test.txt").read_text().splitlines()
    assert len(lines) == 4 and all(line.split()[1] in ("red", "green", "blue") for line in lines)
    assert read_json(workspace.checkpoint("finetune/guess") / "labels.json") == ["red", "green", "blue"]
    # A metric with brackets in its name and its own statistic can be gated.
    items = read_items(workspace.evaluation("guess") / "items.parquet", GuessColor.statistics)
    stored = {found.metric: found for found in items}["error (all)"]
    assert stored.statistic == "error" and "error" not in STATISTICS
    evidence = stored.evidence()
    value = evidence.statistic(evidence.parts_NK.sum(0, keepdims=True))[0]
    assert value == pytest.approx(found["error (all)"]["value"], abs=1e-3)


def test_unsupported_model_is_rejected_before_anything_is_computed() -> None:
    assert supports_task(TDEN, GuessColor)
    with pytest.raises(
        ParamsError, match="`plain` cannot fuse image and text, so it does not support the task guess_color"
    ):
        check_model("guess_color", GuessColor, nn.Linear, "plain")


def test_questions_without_answers_are_not_scored(tmp_path: Path) -> None:
    context = EvalContext(source="toy", validated=tmp_path)
    samples = []
    for number, answers in enumerate((("red",), (), ("blue",))):
        samples.append(Sample(sample_id=f"q{number}", image_id=f"i{number}", source="toy", values={"answers": answers}))
    predictions = [{"question_id": sample.sample_id, "color": "red"} for sample in samples]
    scores = GuessColor.score(object.__new__(GuessColor), predictions, samples, context).scores
    for score in scores:
        assert score.value == 50 and score.n == 2 and score.evidence is not None
        assert list(score.evidence.groups) == ["i0", "i2"] and list(score.evidence.items) == ["q0", "q2"]
