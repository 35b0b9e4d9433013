"""Scores of training pairs: against a trained copy of the model, for each task; report, page and removal."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_project import TINY, make_data, make_model
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.influence import scores
from vlp_models.contrib.influence.influence import (
    Query,
    find_nearest,
    open_pairs,
    read_batches,
    resolve_run,
    score_pairs,
    score_run,
)
from vlp_models.contrib.influence.losses import pair_losses
from vlp_models.contrib.influence.params import InfluenceParams
from vlp_models.contrib.influence.removal import files, read_worst
from vlp_models.errors import DataError
from vlp_models.params import GeneratorParams, Params, load_params
from vlp_models.tasks.base import TaskModel, load_task_model

ROOT = Path(__file__).parents[3]
REPORT = InfluenceParams().report
TASKS = ("captioning", "vqa", "retrieval")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, Workspace]:
    """A few scenes, and an untrained model for each task."""
    workspace = Workspace(tmp_path_factory.mktemp("influence"))
    loaded = load_params(ROOT / "params.yaml")
    generator = GeneratorParams(generator="objects", seed=3, train=12, val=4, test=4, side=64)
    run = dataclasses.replace(next(iter(loaded.finetune.values())), batch_size=8, sources={}, evaluate_on=[])
    runs = {task: dataclasses.replace(run, task=task, options={}) for task in TASKS}
    features = dataclasses.replace(loaded.features, source="boxes")
    params = dataclasses.replace(
        loaded, generate={"scenes": generator}, features=features, models={"tden": TINY}, finetune=runs
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        make_data(params, workspace)
        for task in TASKS:
            make_model(workspace, 1, run=task, task=task)
    return params, workspace


def load(project: tuple[Params, Workspace], name: str) -> tuple[TaskModel, list[Any], int]:
    """Return the model in float64, the training pairs as batches of 5, and their number."""
    params, workspace = project
    task = load_task_model(workspace.checkpoint(f"finetune/{name}")).double()
    pairs = open_pairs(task, workspace, params.finetune[name], "train")
    order = np.random.default_rng(0).permutation(len(pairs))[:15]

    def doubled(value: torch.Tensor) -> torch.Tensor:
        return value.double() if value.is_floating_point() else value

    return task, [batch.map_tensors(doubled) for batch in read_batches(task, pairs, order, 5)], len(order)


@pytest.mark.parametrize("name", TASKS)
def test_a_score_is_how_much_training_on_the_query_lowers_a_loss(project: tuple[Params, Workspace], name: str) -> None:
    task, batches, _ = load(project, name)
    query = Query(title="", batches=lambda: batches[:2])
    before = [parameter.detach().clone() for parameter in task.parameters()]
    found = score_pairs(task, lambda: batches, query, 15, lr=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(before, task.parameters(), strict=True)), "the weights are restored"

    trained = copy.deepcopy(task)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, weight_decay=0.0)
    for step in range(scores.STEPS):
        optimizer.zero_grad()
        pair_losses(trained, batches[step % 2]).mean().backward()
        optimizer.step()
    expected = [float(pair_losses(task, b)[i] - pair_losses(trained, b)[i]) for b in batches for i in range(5)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert found[:10].mean() > 0, "the loss of the query's own pairs falls"


@pytest.mark.parametrize("name", ["captioning", "vqa"])
def test_a_training_pair_helps_itself_most(project: tuple[Params, Workspace], name: str) -> None:
    task, batches, _ = load(project, name)
    query = Query(title="", batches=lambda: [batches[1].select(torch.tensor([3]))])
    assert score_pairs(task, lambda: batches, query, 15, lr=1e-4).argmax() == 8


@pytest.mark.parametrize("name", ["captioning", "vqa"])
def test_losses_of_pairs_add_up_to_the_loss_of_the_task(project: tuple[Params, Workspace], name: str) -> None:
    task, batches, _ = load(project, name)
    for batch in batches:
        whole = task.loss(batch, generator=torch.Generator()).sum
        torch.testing.assert_close(pair_losses(task, batch).sum(), whole)


def test_retrieval_losses_equal_a_loop_and_ignore_pairs_of_the_same_image(project: tuple[Params, Workspace]) -> None:
    task, batches, _ = load(project, "retrieval")
    batch = dataclasses.replace(batches[0], image_ids=("a", "a", "b", "c", "d"))
    model: Any = task.model
    similarity = (model.embed_text(batch.text).float() @ model.embed_image(batch.image).float().T).double() / 0.05
    expected = []
    for row in range(5):
        others = [column for column in range(5) if column == row or batch.image_ids[column] != batch.image_ids[row]]
        total = 0.0
        for values in (similarity[row, others], similarity[others, row]):
            total += float(values.exp().sum().log() - similarity[row, row])
        expected.append(total)
    assert pair_losses(task, batch).tolist() == pytest.approx(expected, rel=1e-4)


def test_a_frozen_part_does_not_move(project: tuple[Params, Workspace]) -> None:
    task, batches, _ = load(project, "vqa")
    for parameter in task.model.parameters():
        parameter.requires_grad_(False)
    start = {name: value.clone() for name, value in task.state_dict().items()}
    with scores.moved_weights(task, lambda: batches, pair_losses, lr=0.1):
        moved = {name for name, value in task.state_dict().items() if not torch.equal(value, start[name])}
    assert moved == {f"head.{name}" for name, _ in task.head.named_parameters()}


def test_the_command_lists_all_pairs_and_writes_a_page(
    project: tuple[Params, Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, workspace = project
    scored = score_run(params, workspace, "captioning")
    values = [row["score"] for row in scored.rows]
    assert len(values) == len({row["pair_id"] for row in scored.rows}) == 12 * 5
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    repeated = dataclasses.replace(params.finetune["captioning"], sources={"scenes": 3})
    thrice = score_run(dataclasses.replace(params, finetune={"captioning": repeated}), workspace, "captioning")
    assert [row["score"] for row in thrice.rows] == pytest.approx([3 * value for value in values])
    again = score_run(params, workspace, "captioning", seed=2)
    by_pair = {row["pair_id"]: row["score"] for row in again.rows}
    other = [by_pair[row["pair_id"]] for row in scored.rows]
    assert np.corrcoef(values, other)[0, 1] > 0.95, "another order of the query's pairs changes little"
    with pytest.raises(DataError, match=r"captionin: no fine-tuning run.*did you mean `captioning`"):
        resolve_run(params, workspace, "captionin")

    monkeypatch.chdir(workspace.root)
    monkeypatch.setattr("vlp_models.params.load_params", lambda *_: params)
    done = CliRunner().invoke(app, ["influence", "captioning", "--top", "2"])
    assert done.exit_code == 0 and "60 training pairs scored for val" in done.stdout, done.output
    page = (workspace.root / "reports" / "influence.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") == 4 and "<script" not in page
    lines = [json.loads(line) for line in (workspace.root / REPORT).read_text(encoding="utf-8").splitlines()]
    assert [line["score"] for line in lines] == values and lines[0]["run"] == "captioning"


@pytest.mark.parametrize("name", TASKS)
def test_one_prediction(project: tuple[Params, Workspace], name: str) -> None:
    params, workspace = project
    task = load_task_model(workspace.checkpoint(f"finetune/{name}"))
    sample = open_pairs(task, workspace, params.finetune[name], "test")[1]
    identifier = sample.image_id if name == "captioning" else sample.sample_id
    folder = workspace.evaluation(name)
    folder.mkdir(parents=True, exist_ok=True)
    row = {task.id_key: identifier, "caption": "a red ball", "answer": "red"}
    (folder / "predictions-test.jsonl").write_text(json.dumps(row) + "\n")
    scored = score_run(params, workspace, name, prediction=identifier)
    assert sample.image_id == scored.query.image_id and any(row["score"] for row in scored.rows)
    similarities = [row["similarity"] for row in scored.nearest]
    assert len(similarities) == 12 and similarities == sorted(similarities, reverse=True)
    # A training image is nearest to itself.
    pairs = open_pairs(task, workspace, params.finetune[name], "train")
    batches = list(read_batches(task, pairs, np.arange(len(pairs)), 8))
    query = Query(title="", batches=lambda: [task.collate([pairs[30]])], image_id=pairs[30].image_id)
    first = find_nearest(task, query, lambda: batches, scored.rows)[0]
    assert first["image_id"] == pairs[30].image_id and first["similarity"] == pytest.approx(1, abs=1e-5)
    if name != "retrieval":
        assert ("a red ball" if name == "captioning" else "red") in scored.query.title
    with pytest.raises(DataError, match="no prediction for 'scenes/none'"):
        score_run(params, workspace, name, prediction="scenes/none")


def test_validate_removes_the_lowest_share(tmp_path: Path) -> None:
    plain = load_params(ROOT / "params.yaml").validate
    worst = dataclasses.replace(plain, sections={"influence": InfluenceParams(worst=0.4)})
    assert not files(plain) and not read_worst(plain, tmp_path) and files(worst) == [REPORT]
    with pytest.raises(DataError, match="not found; run `vlp influence RUN`"):
        read_worst(worst, tmp_path)
    report = tmp_path / REPORT
    report.parent.mkdir()
    rows: list[dict[str, Any]] = [
        {"run": "r", "task": "captioning", "pair_id": f"s/{n}", "score": value}
        for n, value in enumerate((0.5, -2.0, 0.1, -0.5, 0.2))
    ]
    report.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_worst(worst, tmp_path) == {
        "s/1": "influence: score -2.00e+00, among the lowest 40.0%",
        "s/3": "influence: score -5.00e-01, among the lowest 40.0%",
    }
    for row, why in ((rows[0] | {"task": "vqa"}, "has questions of r"), ({"pair_id": "s/1"}, "damaged")):
        report.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=why):
            read_worst(worst, tmp_path)
