"""One hash over a whole bundle: what a version is, and whether it still is that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vlp_models.common.source_hash import ROOT
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.serving.bundle import check_content, hash_bundle, hash_weights, write_bundle
from vlp_models.serving.predictor import Predictor

FEATURES = {"source": "detector", "min_score": 0.2, "max_regions": 16, "content": "roi"}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A bundle as MLflow stores it: in artifacts/, with its code next to it. The weights are a few bytes."""
    checkpoint, detector = tmp_path / "checkpoint", tmp_path / "detector"
    checkpoint.mkdir()
    detector.mkdir()
    info = CheckpointInfo(
        family="tden", name="tden", model_config={}, task="vqa", max_text_len=8, detector_id="d", feature_dim=4
    )
    (checkpoint / "config.json").write_text(json.dumps(info.to_json()))
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    (checkpoint / "tokenizer.json").write_text("{}")
    (detector / "model.safetensors").write_bytes(b"detector")
    bundle = tmp_path / "model" / "artifacts" / "bundle"
    bundle.mkdir(parents=True)
    write_bundle(bundle, checkpoint=checkpoint, detector=detector, features=FEATURES)
    shutil.copytree(ROOT, tmp_path / "model" / "code" / ROOT.name, ignore=shutil.ignore_patterns("__pycache__"))
    return bundle


def code(bundle: Path, name: str) -> Path:
    return bundle.parents[1] / "code" / ROOT.name / name


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_settings_and_code_are_part_of_the_identity_but_the_model_card_is_not(version: Path) -> None:
    before, weights = hash_bundle(version), hash_weights(version)
    assert check_content(version) == before
    (version / "README.md").write_text("scores")
    code(version, "serving/__pycache__").mkdir()
    code(version, "evaluation/report/page.py").write_text("changed, but predicting does not run it")
    assert hash_bundle(version) == before
    check_content(version)

    change(version / "features.json", "0.2", "0.9")
    assert hash_bundle(version) != before and hash_weights(version) == weights
    with pytest.raises(CheckpointError, match=r"features\.json has changed"):
        check_content(version)
    with pytest.raises(CheckpointError, match=r"features\.json has changed"):
        Predictor(version)
    change(version / "features.json", "0.9", "0.2")

    change(code(version, "serving/images.py"), "MAX_PIXELS = 50", "MAX_PIXELS = 60")
    assert hash_bundle(version) != before and hash_weights(version) == weights, "serving is part of it"
    with pytest.raises(CheckpointError, match=r"serving/images\.py has changed"):
        check_content(version)


@pytest.mark.parametrize("name", ["checkpoint/model.safetensors", "checkpoint/tokenizer.json", "detector/x", "x"])
def test_every_file_is_part_of_the_identity(version: Path, name: str) -> None:
    before = hash_bundle(version)
    with (version / name).open("ab") as file:
        file.write(b"more")
    assert hash_bundle(version) != before
    with pytest.raises(CheckpointError, match=name):
        check_content(version)


def test_damaged_missing_or_older_content_list_is_rejected(version: Path) -> None:
    before, listed = hash_bundle(version), version / "content.json"
    written = json.loads(listed.read_text())
    del written["code"]["serving/images.py"]
    listed.write_text(json.dumps(written))
    assert hash_bundle(version) != before
    listed.write_text("{")
    with pytest.raises(CheckpointError, match=r"content\.json: invalid bundle .*`vlp stage register`"):
        hash_bundle(version)
    listed.write_text(json.dumps(written | {"format": "vlp-bundle/0"}))
    with pytest.raises(CheckpointError, match=r"format 'vlp-bundle/0', expected 'vlp-bundle/1'.*`vlp stage register`"):
        Predictor(version)
    listed.unlink()
    with pytest.raises(CheckpointError, match="invalid bundle"):
        check_content(version)
