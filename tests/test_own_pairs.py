"""The README's "Your own pairs": a CSV of image,caption becomes a captioner, without boxes, weights or a network."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlp_models.overlay import apply_overlay
from vlp_models.params import load_params, to_plain
from vlp_models.serving.predictor import Predictor
from vlp_models.workspace.paths import Workspace

ROOT = Path(__file__).parent.parent
TINY = [
    "models.tden.config.hidden=16",
    "models.tden.config.heads=2",
    "models.tden.config.intermediate=32",
    "tokenizer.vocab_size=120",
    "pretrain.tden.max_epochs=1",
    "pretrain.tden.batch_size=8",
    "finetune.tden-captioning.max_epochs=1",
    "finetune.tden-captioning.batch_size=8",
    "evaluate.bootstrap=20",
    "tracking.uri=",
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """24 one-colour pictures with captions, and one row of each kind of dirt that a spreadsheet brings."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    folder = tmp_path / "data" / "raw" / "pairs"
    (folder / "images").mkdir(parents=True)
    lines = ["image,caption"]
    for i in range(24):
        colour = ["red", "green", "blue"][i % 3]
        pixels = np.zeros((40, 60, 3), np.uint8)
        pixels[..., i % 3] = 255 - i
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        lines += [f'images/{i}.png,"a {colour} picture, all of it"', f"images/{i}.png,a picture in {colour}"]
    lines.append("images/3.png,")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    apply_overlay(
        tmp_path / "params.yaml", ROOT / "presets" / "own-pairs.yaml", [*TINY, "validate.max_bad_fraction=0.1"]
    )
    return Workspace(tmp_path)


@pytest.mark.pipeline
def test_a_csv_becomes_a_captioner(workspace: Workspace) -> None:
    params = load_params(workspace.root / "params.yaml")
    for name in ("prepare pairs", "validate", "detector", "features", "tokenizer", "shards"):
        stage, _, key = name.partition(" ")
        importlib.import_module(f"vlp_models.stages.{stage}").run(params, workspace, key)
    runs = (("initial", "tden"), ("pretrain", "tden"), ("finetune", "tden-captioning"), ("evaluate", "tden-captioning"))
    for stage, key in runs:
        importlib.import_module(f"vlp_models.stages.{stage}").run(params, workspace, key)

    validation = json.loads((workspace.reports / "validation.json").read_text())
    assert sum(rule["failed"] for rule in validation["rules"]) >= 1, "the empty caption is counted"
    scores = json.loads((workspace.evaluation("tden-captioning") / "scores.json").read_text())
    assert any(score["metric"] == "CIDEr" and score["value"] is not None for score in scores)

    bundle = workspace.root / "bundle"
    shutil.copytree(workspace.checkpoint("finetune/tden-captioning"), bundle / "checkpoint")
    (bundle / "features.json").write_text(json.dumps(to_plain(params.features)))
    picture = workspace.raw("pairs") / "images" / "0.png"
    assert isinstance(Predictor(bundle).predict([str(picture)])[0]["caption"], str)
