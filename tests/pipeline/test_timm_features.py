"""`features.source: timm` through the stages: the backbone made ready, cells of every image, what makes them again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drawn_workspace import SPLITS, make_workspace, params_with, write_captioner_bundle
from timm_toys import SMALL, write_weights

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureStore
from vlp_models.errors import CheckpointError, MissingToolError
from vlp_models.params import Params, TimmParams
from vlp_models.pipeline.dvc.external import named_sources
from vlp_models.pipeline.stages import detector, plan
from vlp_models.pipeline.stages.features import run
from vlp_models.serving.images import open_image
from vlp_models.serving.predictor import Predictor


def timm_params(**timm: Any) -> Params:
    return params_with(features={"source": "timm", "timm": TimmParams(**{"model": SMALL} | timm)})


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    write_weights(tmp_path / "weights.safetensors")
    workspace = make_workspace(tmp_path)
    detector.run(timm_params(weights="weights.safetensors"), workspace)
    return workspace


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_image_has_cells_with_classes(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was trained: `detector.source: train` is ignored."""
    minutes = itertools.count(step=60.0)
    monkeypatch.setattr("vlp_models.pipeline.stages.features.time", SimpleNamespace(perf_counter=lambda: next(minutes)))
    run(timm_params(), workspace)
    report, manifest = read(workspace.reports / "detector.json"), read(workspace.features / "manifest.json")
    assert (report["source"], report["backbone"], report["counts"]["classes"]) == ("timm", SMALL, 1000)
    assert manifest["detector_id"] == report["detector_id"]
    assert (manifest["feature_dim"], len(manifest["classes"]), manifest["classes"][1]) == (256, 1001, "tench")
    store = FeatureStore(workspace.features)
    assert [len(store.get(f"drawn/{n}")) for n in range(len(SPLITS))] == [16] * len(SPLITS)
    found = re.search(r", 9 extracted at (0\.\d+) images/s\n", capsys.readouterr().err)
    assert found and float(found[1]) > 0, "however slow the machine"
    whole = hash_path(workspace.features)
    run(timm_params(), workspace)
    assert "9 images reused from the last run" in capsys.readouterr().err
    assert hash_path(workspace.features) == whole


def test_chosen_levels_are_in_the_features_and_in_what_is_served(workspace: Workspace) -> None:
    params = timm_params(weights="weights.safetensors", levels=[1, 3])
    detector.run(params, workspace)
    run(params, workspace)
    manifest = read(workspace.features / "manifest.json")
    assert manifest["feature_dim"] == 24 + 48 + 256, "two levels' channels, then the last map's"
    stored = FeatureStore(workspace.features).get("drawn/0")

    bundle = workspace.root / "bundle"
    write_captioner_bundle(bundle, params, workspace)
    shutil.rmtree(workspace.detector)
    predictor, picture = Predictor(bundle), workspace.root / "images" / "0.png"
    assert predictor.extractor is not None
    served = predictor.extractor.extract([open_image(picture)])[0]
    np.testing.assert_array_equal(served.features, stored.features)
    assert stored.features.shape == (16, 328) and isinstance(predictor.predict([picture])[0]["caption"], str)


def test_other_weights_are_other_regions(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    run(timm_params(), workspace)
    before = read(workspace.features / "manifest.json")["detector_id"]
    write_weights(workspace.root / "weights.safetensors", num_classes=7)
    detector.run(timm_params(weights="weights.safetensors"), workspace)
    run(timm_params(), workspace)
    assert "reused" not in capsys.readouterr().err
    assert read(workspace.features / "manifest.json")["detector_id"] != before


def test_detector_and_backbone_are_not_mistaken_for_each_other(workspace: Workspace) -> None:
    pytest.importorskip("vlp_models.contrib.detector")
    with pytest.raises(CheckpointError, match=r"not a detector's config .*found vlp-backbone/1.*dvc repro detector"):
        run(params_with(), workspace)
    detector.run(params_with(), workspace)
    with pytest.raises(CheckpointError, match=r"not a backbone's config.*found vlp-detector/1.*dvc repro detector"):
        run(timm_params(), workspace)


def test_missing_package_is_reported_before_anything_is_computed(workspace: Workspace) -> None:
    missing = timm_params(weights="package:no-such-weights")
    with pytest.raises(MissingToolError, match=r"`features\.timm\.weights: package:no-such-weights`: not installed"):
        plan.run(missing, workspace)
    assert not workspace.plan.exists()
    assert named_sources(missing, regions=False) == [], "a model that reads pixels needs no backbone"
    words = dataclasses.replace(missing.tokenizer, source="vocab", vocab="package:no-such-words")
    grid = dataclasses.replace(params_with(features={"source": "grid"}), tokenizer=words)
    with pytest.raises(MissingToolError, match=r"`tokenizer\.vocab: package:no-such-words`: not installed"):
        plan.run(grid, workspace)
