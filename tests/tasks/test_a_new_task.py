"""One file and one line make a task: it learns, is loaded, predicts, is scored and shown without any other change."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_world import write_workspace

from vlp_models.data.tables import write_table
from vlp_models.errors import ParamsError
from vlp_models.metrics.items import STATISTICS, read_items
from vlp_models.report.table import is_headline
from vlp_models.stages import evaluate, finetune, pretrain
from vlp_models.tasks import TASKS, check_task, task_class
from vlp_models.tasks.base import can_do, check_can
from vlp_models.tasks.load import load_task_model
from vlp_models.workspace.paths import Workspace, read_json

RUN = {
    "guess": {
        "task": "guess_colour",
        "init": "pretrain",
        "sources": {},
        "seed": 1,
        "max_epochs": 1,
        "max_steps": 0,
        "batch_size": 8,
        "accumulate": 1,
        "max_text_len": 12,
        "max_regions": 4,
        "optimizer": {"lr": 1e-3},
    }
}


@pytest.fixture
def one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "guess_colour", "toy_task.guess_colour:GuessColour")


@pytest.mark.usefixtures("one_line")
def test_a_task_of_one_file_goes_all_the_way(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    params = write_workspace(tmp_path, finetune=RUN, evaluate={"bootstrap": 20, "blank_control": ["guess_colour"]})
    workspace.validated.mkdir(parents=True)
    about = {"source": "toy", "split": "test", "path": "", "width": 10, "height": 10, "provenance": ""}
    rows = [{"image_id": f"toy/test{i:03d}", "sha256": "0" * 64, **about} for i in range(4)]
    write_table(rows, "images", workspace.validated)

    pretrain.run(params, workspace)
    finetune.run(params, workspace, "guess")
    model = load_task_model(workspace.checkpoint("guess"))
    assert model.task == "guess_colour" and model.labels == ("red", "green", "blue")
    evaluate.run(params, workspace, "guess")

    records = read_json(workspace.evaluation("guess") / "scores.json")
    found = {record["metric"]: record for record in records}
    assert found["error (all)"]["value"] == pytest.approx(100 - found["accuracy"]["value"])
    assert [record["metric"] for record in records if is_headline(record)] == ["error (all)"]
    lines = (workspace.evaluation("guess") / "colours_toy_test.txt").read_text().splitlines()
    assert len(lines) == 4 and all(line.split()[1] in model.labels for line in lines)
    # a name with brackets and a statistic of its own can be gated
    path, task = workspace.evaluation("guess") / "items.parquet", task_class("guess_colour")
    items = {found.metric: found for found in read_items(path, task.statistics)}
    assert items["error (all)"].statistic == "error" and "error" not in STATISTICS
    evidence = items["error (all)"].evidence()
    assert evidence.statistic(evidence.parts_NK.sum(0, keepdims=True))[0] == pytest.approx(
        found["error (all)"]["value"]
    )


def test_a_misspelt_task_is_told_its_neighbour() -> None:
    with pytest.raises(ParamsError, match=r"`finetune\.x\.task`: unknown task 'vqqa'; known: captioning.*mean `vqa`"):
        check_task("vqqa", where="finetune.x.task")


@pytest.mark.usefixtures("one_line")
def test_which_models_can_do_it_is_known_before_anything_is_computed() -> None:
    from torch import nn

    from vlp_models.models.tden.model import TDEN

    assert can_do(task_class("guess_colour"), TDEN)
    with pytest.raises(ParamsError, match="`plain` can't fuse image and text, so it can't do the task guess_colour"):
        check_can("guess_colour", task_class("guess_colour"), nn.Linear, "plain")
