"""`vlp import-checkpoint` of the public Unified VLP layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from authors_unified_vlp import weights
from model_checks import load_model
from torch import Tensor
from toy_dataset import CLASSES, FEATURE_DIM, write_workspace
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.contrib.public_weights.unified_vlp import convert_unified_vlp
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError
from vlp_models.tasks.base import load_task_model

FOUR_HEADS = ("--heads", "4")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_public(root: Path, **kind: Any) -> dict[str, Tensor]:
    """Write weights in the public layout for the data's vocabulary and features; return them."""
    vocab = Tokenizer.load(root / "data" / "tokenizer").vocab_size
    state = weights(vocab=vocab, features=FEATURE_DIM, classes=len(CLASSES), **kind)
    torch.save(state, root / "model.30.bin")
    return state


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["import-checkpoint", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_model_starts_from_public_weights(root: Path) -> None:
    state = write_public(root)
    output = call("model.30.bin", "--format", "unified-vlp", "--name", "theirs", *FOUR_HEADS)
    assert "Unified VLP's pretraining weights" in output and "randomly initialized (seed 1): fusion" in output
    loaded, _, info = load_model(root / "checkpoints" / "imported" / "theirs")
    assert (info.family, info.task) == ("unified_vlp", None)
    imported = convert_unified_vlp(state, heads=4).weights
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in imported.items())
    text = (root / "checkpoints" / "imported" / "theirs" / "preset.yaml").read_text()
    assert "100 regions" in text, "what the file does not contain is output"
    config = yaml.safe_load(text)["models"]["theirs"]["config"]
    assert config["compat_reference"] and config["region_slots"] == 100


def test_a_vqa_model_answers_with_its_own_classifier(root: Path) -> None:
    state = write_public(root, vqa=True, answers=5)
    names = ["<unk>", "red", "green", "blue", "yes"]
    (root / "answers.json").write_text(json.dumps(names))
    more = ("--answers", "answers.json", "--max-text-len", "12", "--max-regions", "4")
    call("model.30.bin", "--format", "unified-vlp", "--name", "vqa", *FOUR_HEADS, *more)
    task = load_task_model(root / "checkpoints" / "imported" / "vqa")
    dataset = ShardDataset(root / "data" / "shards", "val", "questions")
    samples = [dataset[i] for i in range(4)]
    batch = task.collate(samples)
    assert batch.image.scores_BR.max() > 0.8, "it reads the detector's confidence"
    with torch.no_grad():
        pooled = task.model.fuse(batch.image, batch.text).pooled_BP
        logits = pooled @ state["ans_classifier.2.weight"].T + state["ans_classifier.2.bias"]
    answers = [names[1:][i] for i in logits[:, 1:].argmax(-1).tolist()]  # row 0 is no answer
    assert [row["answer"] for row in task.predict(batch, samples)] == answers
    with torch.no_grad():
        task.head.bias[0] = 50.0
    predicted = task.predict(batch, samples)
    assert [row["answer"] for row in predicted] == answers and all(len(row["top"]) == 4 for row in predicted)


def test_captioner_needs_its_task(root: Path) -> None:
    write_public(root)
    ask = ("model.30.bin", "--format", "unified-vlp", "--name", "c", "--task", "captioning", *FOUR_HEADS)
    with pytest.raises(CheckpointError, match="pass --max-text-len and --max-regions"):
        call(*ask)
    call(*ask, "--max-text-len", "12", "--max-regions", "4")
    task = load_task_model(root / "checkpoints" / "imported" / "c")
    assert task.task == "captioning" and "finished captions set aside" in task.search
