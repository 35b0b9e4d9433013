"""An edit of the code that trains on boxes makes stale what was trained on boxes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlp_models.common.source_hash import ROOT
from vlp_models.models.meta_model import image_kinds
from vlp_models.params import ModelParams, Params, load_params, read_yaml
from vlp_models.params.runs import VisionWarmupParams
from vlp_models.pipeline.check_params import find_in_use
from vlp_models.pipeline.dvc.graph import CODE, build_pipeline
from vlp_models.pipeline.stages.plan import _hash_code, code_modules

FILE = ROOT.parent / "params.yaml"
TRAINING, REGIONS = "contrib/detector/training.py", "contrib/detector/regions.py"
SOHO: dict[str, Any] = {"family": "soho", "config": {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1}}


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(FILE)


def users_of(file: str, params: Params) -> set[str]:
    """Return the stages that depend on a source file; of `foreach` stages the entries, as NAME@ENTRY."""
    stages = build_pipeline(params, read_yaml(FILE), kinds=image_kinds(params), used=find_in_use(params))
    modules = code_modules()
    users = set()
    for name, stage in stages.items():
        for key, item in stage.get("foreach", {"": {}}).items():
            for dep in stage.get("do", stage)["deps"]:
                for field, value in item.items():
                    dep = dep.replace(f"${{item.{field}}}", value)
                if dep.startswith(f"{CODE}/"):
                    kind, entry = Path(dep).parent.name, Path(dep).stem
                    if file in _hash_code(kind, entry, modules[kind][entry]):
                        users.add(f"{name}@{key}" if key else name)
    return users


def test_training_is_code_of_a_trained_detector(params: Params) -> None:
    assert users_of(TRAINING, params) == {"detector"}
    weights = replace(params, detector=replace(params.detector, source="weights", weights="a.pth"))
    assert users_of(TRAINING, weights) == {"detector"}


@pytest.mark.parametrize("source", ["timm", "boxes"])
def test_training_is_no_code_of_other_regions(params: Params, source: str) -> None:
    features, detector = replace(params.features, source=source), replace(params.detector, source="none")
    assert not users_of(TRAINING, replace(params, features=features, detector=detector))


def test_training_is_code_of_a_model_with_a_warm_up(params: Params) -> None:
    models = {
        **params.models,
        "warm": ModelParams(**SOHO, vision_warmup=VisionWarmupParams(steps=1)),
        "cold": ModelParams(**SOHO),
    }
    timm = replace(params, models=models, features=replace(params.features, source="timm"))
    assert users_of(TRAINING, timm) == {"initial@warm"}


def test_what_extracts_regions_is_code_of_features_and_of_versions(params: Params) -> None:
    assert users_of(REGIONS, params) == {"features", "register"}
