"""`features.source: joined`: the cells of several timm models side by side, saved, served and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from drawn_workspace import make_workspace, params_with, write_captioner_bundle
from timm_toys import SMALL, write_weights

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.joined_features.joined import JoinedExtractor
from vlp_models.contrib.joined_features.params import JoinedParams
from vlp_models.data.features import FeatureStore
from vlp_models.errors import CheckpointError, ParamsError, VLPError
from vlp_models.params import Params, TimmParams, parse_params, to_plain
from vlp_models.pipeline.check_params import check_runs
from vlp_models.pipeline.dvc.external import detector_inputs
from vlp_models.pipeline.stages import detector, features
from vlp_models.registry.borrowed import borrowed_sources
from vlp_models.serving.images import open_image
from vlp_models.serving.predictor import Predictor
from vlp_models.vision.timm_backbone import CellExtractor, load_backbone

ROOT = Path(__file__).parents[3]
NAMES = (SMALL, "test_resnet")


def joined_params(root: Path, *, max_regions: int = 16, **more: Any) -> Params:
    """Params of both models. more: settings of the second."""
    models = [TimmParams(model=name, weights=write_weights(root / f"{name}.safetensors", name)) for name in NAMES]
    models[1] = TimmParams(model=models[1].model, weights=models[1].weights, **more)
    sections = {"joined": JoinedParams(models=models)}
    return params_with(features={"source": "joined", "max_regions": max_regions, "sections": sections})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, Workspace]:
    root = tmp_path_factory.mktemp("joined")
    params, workspace = joined_params(root), make_workspace(root)
    detector.run(params, workspace)
    features.run(params, workspace)
    return params, workspace


def test_a_region_is_the_cell_of_each_model_at_its_place(prepared: tuple[Params, Workspace]) -> None:
    params, workspace = prepared
    image = open_image(workspace.root / "images" / "0.png")
    (regions,) = JoinedExtractor(to_plain(params.features), workspace.detector, "cpu").extract([image])
    alone = [CellExtractor(load_backbone(workspace.detector / part), max_regions=16) for part in "01"]
    first, second = (extractor.extract([image])[0] for extractor in alone)
    assert not np.array_equal(first.boxes, second.boxes)  # each model is certain of other cells
    at = {tuple(box): feature for box, feature in zip(second.boxes, second.features, strict=True)}
    expected = np.concatenate([first.features, [at[tuple(box)] for box in first.boxes]], axis=1)
    np.testing.assert_array_equal(regions.features, expected)
    for name in ("boxes", "class_probs", "scores"):
        np.testing.assert_array_equal(getattr(regions, name), getattr(first, name))


def test_a_bundle_serves_them_and_damage_is_found(prepared: tuple[Params, Workspace], tmp_path: Path) -> None:
    params, workspace = prepared
    manifest = json.loads((workspace.features / "manifest.json").read_text())
    stored = FeatureStore(workspace.features).get("drawn/0")
    assert manifest["feature_dim"] == stored.features.shape[1] and len(manifest["classes"]) == 1001
    bundle = tmp_path / "bundle"
    write_captioner_bundle(bundle, params, workspace)
    predictor, picture = Predictor(bundle), workspace.root / "images" / "0.png"
    assert predictor.extractor is not None
    (served,) = predictor.extractor.extract([open_image(picture)])
    np.testing.assert_array_equal(served.features, stored.features)
    assert isinstance(predictor.predict([picture])[0]["caption"], str)
    shutil.copytree(bundle / "detector", tmp_path / "detector")
    shutil.rmtree(tmp_path / "detector" / "1")
    shutil.copytree(tmp_path / "detector" / "0", tmp_path / "detector" / "1")
    with pytest.raises(CheckpointError, match=r"not the models of its config\.json"):
        JoinedExtractor({"max_regions": 16}, tmp_path / "detector", "cpu")


def test_invalid_models_are_refused(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    with pytest.raises(ParamsError, match=r"max_regions: 16`: the models give 16 and 10 regions; set fewer"):
        detector.run(joined_params(tmp_path, pooled=True), workspace)
    with pytest.raises(ParamsError, match=r"features\.joined\.models\.1\.levels: \[99\]"):
        detector.run(joined_params(tmp_path, levels=[99]), workspace)

    def params_of(*models: dict[str, str]) -> Params:
        raw = yaml.safe_load((ROOT / "params.yaml").read_text())
        raw["features"] |= {"source": "joined", "joined": {"models": list(models)}}
        return parse_params(raw)

    cnn = {"model": "tf_efficientnet_lite0", "weights": "timm:tf_efficientnet_lite0.in1k"}
    dino = {"model": "vit_small_patch14_dinov2", "weights": "dino.safetensors"}
    params = params_of(cnn, dino)
    check_runs(params)  # classes are the first model's
    assert detector_inputs(params) == ["dino.safetensors"]
    lineage = {"params": to_plain(params), "parents": [{"role": "detector"}]}
    borrowed = [("backbone", part["weights"], part["model"]) for part in (cnn, dino)]
    assert [source for source in borrowed_sources(lineage) if source[0] == "backbone"] == borrowed
    with pytest.raises(VLPError, match=r"moc` needs class probabilities, which `features\.joined\.models\.0\.model: v"):
        check_runs(params_of(dino, cnn))
    with pytest.raises(ParamsError, match=r"features\.joined\.models\.1\.model: .* did you mean `tf_efficientnet_l"):
        check_runs(params_of(dino, cnn | {"model": "tf_efficientnet_light0"}))
    with pytest.raises(ParamsError, match=r"features\.joined\.models` names 1 models"):
        check_runs(params_of(cnn))
