"""The README's "Your own pairs": a CSV of image,caption becomes a captioner, without boxes or a network.

The backbone is one of timm's smallest with random weights, and the words are learnt from the captions: what the
preset's packages hold is not needed for this.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm_toys import SMALL, write_weights

from vlp_models.errors import CheckpointError, DataError
from vlp_models.overlay import apply_overlay
from vlp_models.params import load_params, to_plain
from vlp_models.serving.bundle import SEARCH, not_served, try_out, write_bundle
from vlp_models.serving.predictor import Predictor
from vlp_models.stages import detector
from vlp_models.workspace.paths import Workspace

ROOT = Path(__file__).parent.parent
TINY = [
    f"features.timm.model={SMALL}",
    "features.timm.weights=weights.safetensors",
    "features.max_regions=9",
    "models.tden.config.hidden=16",
    "models.tden.config.heads=2",
    "models.tden.config.intermediate=32",
    "models.tden.words=",
    "tokenizer.source=train",
    "tokenizer.vocab=",
    "tokenizer.vocab_size=120",
    "trainer.precision=32-true",
    "pretrain.tden.max_epochs=1",
    "pretrain.tden.batch_size=8",
    "finetune.tden-captioning.max_epochs=1",
    "finetune.tden-captioning.batch_size=8",
    "evaluate.bootstrap=20",
    "evaluate.beam_size=2",
    "evaluate.consensus=6",
    "evaluate.consensus_temperature=2",
    "evaluate.consensus_neighbours=4",
    "tracking.uri=",
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """24 one-colour pictures with captions, and one row of each kind of dirt that a spreadsheet brings."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    write_weights(tmp_path / "weights.safetensors")
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

    curve = (workspace.reports / "curves" / "pretrain" / "tden.csv").read_text()
    assert "moc" in curve.partition("\n")[0], "the backbone's classes are a target"

    # The bundle carries the backbone and the search: nothing else is needed to caption a photo as it was scored.
    bundle = workspace.root / "bundle"
    checkpoint = workspace.checkpoint("finetune/tden-captioning")
    write_bundle(
        bundle,
        checkpoint=checkpoint,
        detector=workspace.detector,
        features=to_plain(params.features),
        search=workspace.evaluation("tden-captioning") / SEARCH,
    )
    (workspace.root / "weights.safetensors").unlink()
    shutil.rmtree(workspace.detector)
    picture = workspace.raw("pairs") / "images" / "0.png"
    assert not_served(bundle) == "" and try_out(bundle, [picture]).problem == ""
    rows = (workspace.evaluation("tden-captioning") / "predictions-test.jsonl").read_text().splitlines()
    said = {row["image_id"].partition("/")[2]: row["caption"] for row in map(json.loads, rows)}
    predictor = Predictor(bundle)
    assert predictor.task_model.search == (
        "beam 2, of it and 6 drawn at 2 the most like captions of 4 similar photos, at most 24 tokens"
    )
    for name, caption in said.items():
        assert predictor.predict([str(workspace.raw("pairs") / name)])[0]["caption"] == caption
    Image.new("RGB", (1, 1)).save("pixel.png")
    with pytest.raises(DataError, match="1x1 pixels; a picture has at least 4 a side"):
        Predictor(bundle).predict(["pixel.png"])

    # Another backbone in its place is refused by its classes.
    other = dataclasses.replace(
        params.features.timm, weights=write_weights(workspace.root / "seven.pth", num_classes=7)
    )
    detector.run(dataclasses.replace(params, features=dataclasses.replace(params.features, timm=other)), workspace)
    write_bundle(
        workspace.root / "other", checkpoint=checkpoint, detector=workspace.detector, features=to_plain(params.features)
    )
    with pytest.raises(CheckpointError, match=r"1000 classes \(tench, goldfish, \.\.\.\), but .* 7 classes \(class 1"):
        Predictor(workspace.root / "other")
