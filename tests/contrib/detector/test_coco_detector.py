"""`detector.weights: torchvision` through the stages: from torchvision's cache to regions, and to what is served."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from coco_toys import MOBILE, keep_coco_detector
from drawn_workspace import SPLITS, make_workspace, params_with, write_captioner_bundle, write_objects

from vlp_models.common.io import read_json
from vlp_models.data.features import FeatureStore
from vlp_models.data.tables import read_table
from vlp_models.pipeline.stages import detector, features
from vlp_models.serving.bundle import why_not_served
from vlp_models.serving.images import open_image
from vlp_models.serving.predictor import Predictor


@pytest.mark.slow
def test_coco_detector_by_name_extracts_regions_and_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = keep_coco_detector(monkeypatch, tmp_path / "torch", MOBILE)
    workspace = make_workspace(tmp_path)
    objects = read_table("objects", workspace.validated).to_pylist()
    write_objects([row | {"category": "stop sign"} for row in objects], workspace)
    params = params_with(
        detector={"source": "weights", "weights": "torchvision", "backbone": MOBILE},
        features={"source": "detector", "min_score": 0.0, "max_regions": 5},  # random weights are sure of nothing
    )
    detector.run(params, workspace)
    cache.unlink()  # data/detector has them
    report, config = read_json(workspace.reports / "detector.json"), read_json(workspace.detector / "config.json")
    assert (config["architecture"]["backbone"], config["training"]["weights"]) == (MOBILE, "torchvision")
    assert report["counts"] == {"val_images": SPLITS.count("val")} and set(report["val"]) == {
        "AP",
        "AP50",
        "AP75",
        "AR",
    }

    features.run(params, workspace)
    manifest = read_json(workspace.features / "manifest.json")
    assert manifest["detector_id"] == config["detector_id"] == report["detector_id"]
    assert (len(manifest["classes"]), manifest["feature_dim"]) == (91, 1024)
    assert [manifest["classes"][place] for place in (0, 1, 12, 13, 90)] == [
        *("__background__", "person", "N/A", "stop sign", "toothbrush"),  # COCO's own numbers, with their gaps
    ]
    stored = FeatureStore(workspace.features).get("drawn/0")
    assert stored.features.shape == (5, 1024) and stored.class_probs.shape == (5, 91)

    bundle = tmp_path / "bundle"
    write_captioner_bundle(bundle, params, workspace)
    assert "contrib/detector/regions.py" in read_json(bundle / "content.json")["code"]
    shutil.rmtree(workspace.detector)
    predictor, picture = Predictor(bundle), tmp_path / "images" / "0.png"
    assert why_not_served(bundle) == "" and predictor.extractor is not None
    served = predictor.extractor.extract([open_image(picture)])[0]
    for name, array in vars(stored).items():
        np.testing.assert_array_equal(getattr(served, name), array, err_msg=name)
    assert isinstance(predictor.predict([picture])[0]["caption"], str)
