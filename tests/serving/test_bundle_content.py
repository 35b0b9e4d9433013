"""One hash over a whole bundle: what a version is, and whether it still is that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vlp_models.common.source_hash import ROOT
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.serving.bundle import check_content, content_of, weights_of, write_bundle
from vlp_models.serving.predictor import Predictor

FEATURES = {"source": "detector", "min_score": 0.2, "max_regions": 16}


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A bundle as MLflow keeps it: in artifacts/, its code beside it. The weights are some bytes."""
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


def test_settings_and_code_are_part_of_a_version_and_what_is_told_about_it_is_not(version: Path) -> None:
    before, weights = content_of(version), weights_of(version)
    check_content(version)
    (version / "README.md").write_text("scores")
    code(version, "serving/__pycache__").mkdir()
    code(version, "report/page.py").write_text("changed: no prediction runs on it")
    assert content_of(version) == before
    check_content(version)

    change(version / "features.json", "0.2", "0.9")
    assert content_of(version) != before and weights_of(version) == weights
    with pytest.raises(CheckpointError, match=r"features\.json is not what it was"):
        check_content(version)
    with pytest.raises(CheckpointError, match=r"features\.json is not what it was"):
        Predictor(version)
    change(version / "features.json", "0.9", "0.2")

    change(code(version, "serving/images.py"), "MAX_PIXELS = 50", "MAX_PIXELS = 60")
    assert content_of(version) != before and weights_of(version) == weights, "a fix to serving is another version"
    with pytest.raises(CheckpointError, match=r"serving/images\.py is not what it was"):
        check_content(version)


@pytest.mark.parametrize("name", ["checkpoint/model.safetensors", "checkpoint/tokenizer.json", "detector/x", "x"])
def test_every_file_counts(version: Path, name: str) -> None:
    before = content_of(version)
    with (version / name).open("ab") as file:
        file.write(b"more")
    assert content_of(version) != before
    with pytest.raises(CheckpointError, match=name):
        check_content(version)


def test_a_list_of_contents_that_is_gone_or_cut_off_does_not_pass_for_the_version(version: Path) -> None:
    before, listed = content_of(version), version / "content.json"
    written = json.loads(listed.read_text())
    del written["code"]["serving/images.py"]
    listed.write_text(json.dumps(written))
    assert content_of(version) != before
    listed.write_text("{")
    with pytest.raises(CheckpointError, match="does not say what the bundle holds"):
        content_of(version)
    listed.unlink()
    assert content_of(version) != before
