"""A model that reads pixels, from the shards to its served prediction, without detector or features."""

from __future__ import annotations

import base64
import dataclasses
import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import write_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError
from vlp_models.models import FAMILIES, DataFacts, build_model
from vlp_models.models.checkpoint import CheckpointInfo, write_checkpoint
from vlp_models.params import load_params, to_plain
from vlp_models.pipeline.stages import shards
from vlp_models.serving.bundle import write_content
from vlp_models.serving.predictor import Predictor
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel

COLORS = ("red", "blue")
TOY = {"side": 8, "patch": 4, "hidden": 16, "heads": 2}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Eight images of one color each, with two statements each, one of them true."""
    made = Workspace(tmp_path)
    made.validated.mkdir(parents=True)
    images, statements = [], []
    for number in range(8):
        color = COLORS[number % 2]
        path = tmp_path / f"{number}.{'jpg' if number < 4 else 'png'}"
        Image.new("RGB", (30 + number, 20), color).save(path)
        row = {"image_id": f"d/{number}", "source": "d", "provenance": "", "sha256": ""}
        images.append(row | {"split": "train", "path": path.name, "width": 30 + number, "height": 20})
        for word in COLORS:
            statement = {"statement_id": f"d/{number}-{word}", "text": f"it is {word}", "label": word == color}
            statements.append(row | statement | {"group": "g"})
    for name, rows in (("images", images), ("statements", statements)):
        write_table(rows, name, made.validated)
    return made


def train(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, steps: int = 150) -> tuple[TaskModel, ShardDataset]:
    monkeypatch.setitem(FAMILIES, "toy", "vlp_models.contrib.plugin_kit.scaffolds.family.model:Toy")
    params = load_params(Path(__file__).parents[2] / "params.yaml")
    tokenizer = Tokenizer.train(["it is red", "it is blue"], 30, 1, True)
    torch.manual_seed(0)
    model = build_model("toy", TOY, DataFacts(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id))
    auto = dataclasses.replace(params, shards=dataclasses.replace(params.shards, pixels="auto"))
    shards.run(auto, workspace, inputs=[model.inputs])
    info = CheckpointInfo(
        family="toy",
        name="p",
        model_config=to_plain(model.config),
        task="nlvr",
        max_text_len=8,  # type: ignore[arg-type]
    )
    task_model = task_class("nlvr")(model, tokenizer, info)
    dataset = ShardDataset(workspace.shards, "train", "statements", **task_model.reader.flags)
    batch = task_model.collate([dataset[i] for i in range(len(dataset))])
    optimizer = torch.optim.Adam(task_model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = task_model.loss(batch, generator=torch.Generator()).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return task_model, dataset


def test_served_predictions_equal_those_of_training(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    task_model, dataset = train(workspace, monkeypatch)
    samples = [dataset[i] for i in range(len(dataset))]
    known = task_model.predict(task_model.collate(samples), samples)
    assert [p["prediction"] for p in known] == [sample["label"] for sample in samples]

    bundle = workspace.root / "bundle"
    (bundle / "checkpoint").mkdir(parents=True)
    write_checkpoint(bundle / "checkpoint", task_model, task_model.info, task_model.tokenizer)
    write_content(bundle, [])
    predictor = Predictor(bundle)
    assert predictor.extractor is None
    paths = [next(workspace.root.glob(f"{sample.image_id[2:]}.*")) for sample in samples]
    served = predictor.predict(paths, [sample.text for sample in samples])
    assert [p["p_true"] for p in served] == pytest.approx([p["p_true"] for p in known], abs=1e-6)

    batches = []  # of few images each
    monkeypatch.setattr("vlp_models.serving.predictor.ROWS_AT_ONCE", 3)
    monkeypatch.setattr("vlp_models.serving.predictor.PIXELS_AT_ONCE", 1300)  # two of the larger ones
    at_once = predictor.predict_opened
    monkeypatch.setattr(predictor, "predict_opened", lambda *given: batches.append(len(given[0])) or at_once(*given))
    again = predictor.predict(paths, [sample.text for sample in samples])
    assert sum(batches) == len(samples) and set(batches) == {2, 3}
    assert [p["statement_id"] for p in again] == [p["statement_id"] for p in served]
    assert [p["p_true"] for p in again] == pytest.approx([p["p_true"] for p in served], abs=1e-6)


def test_images_of_an_untrusted_request_are_limited_together(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their headers are read, and no image is decoded."""
    task_model, _ = train(workspace, monkeypatch, steps=1)
    bundle = workspace.root / "bundle"
    (bundle / "checkpoint").mkdir(parents=True)
    write_checkpoint(bundle / "checkpoint", task_model, task_model.info, task_model.tokenizer)
    write_content(bundle, [])
    buffer = io.BytesIO()
    Image.new("1", (7071, 7071)).save(buffer, "PNG")
    text = base64.b64encode(buffer.getvalue()).decode()
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("an image was decoded"))
    predictor = Predictor(bundle)
    assert len(predictor.check([text] * 2, ["it is red"] * 2, untrusted=True)) == 2
    with pytest.raises(DataError, match="more than 100,000,000 pixels together"):
        predictor.check([text] * 12, ["it is red"] * 12, untrusted=True)
    assert len(predictor.check([text] * 3, ["it is red"] * 3)) == 3


def test_blank_images_give_equal_predictions(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    task_model, dataset = train(workspace, monkeypatch)
    task_model.blank_images = True
    samples = [dataset[i] for i in range(len(dataset))]
    blind = task_model.predict(task_model.collate(samples), samples)
    assert len({p["p_true"] for p in blind if p["statement_id"].endswith("red")}) == 1
