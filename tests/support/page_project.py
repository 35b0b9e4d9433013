"""A project with untrained models of grid cells in a real registry.

tests/registry/conftest.py and those of some folders of tests/contrib import its fixtures.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_project import SIZES, make_data, make_model
from toy_registry import toy_items, write_evaluation

from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table
from vlp_models.models import FAMILIES
from vlp_models.params import GeneratorParams, ModelParams, Params, load_params, to_plain
from vlp_models.registry.client import connect, model_name
from vlp_models.registry.versions import CHAMPION, RegisteredVersion, VersionRecord, register
from vlp_models.serving.bundle import hash_bundle, write_bundle

ROOT = Path(__file__).parents[2]
TASKS = ("captioning", "vqa", "retrieval")


def make_params() -> Params:
    loaded = load_params(ROOT / "params.yaml")
    generator = GeneratorParams(generator="objects", seed=3, train=6, val=4, test=5, side=64)
    return dataclasses.replace(
        loaded,
        generate={"scenes": generator},
        models={"tden": ModelParams(family="tden", config=SIZES)},
        features=dataclasses.replace(loaded.features, source="grid"),
    )


def make_project(root: Path, params: Params) -> Workspace:
    """Make a champion for captioning and for retrieval, none for vqa."""
    workspace = Workspace(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "")  # MLflow sets it; the patch restores it
        patch.delenv("MLFLOW_TRACKING_URI")
        patch.chdir(workspace.root)
        make_data(params, workspace)
        workspace.detector.mkdir()  # a grid needs none
        client = connect(params.tracking, workspace.root)
        for seed, task in enumerate(TASKS):
            checkpoint = make_model(workspace, seed, f"own-{task}", task=task)
            version = register_model(client, params, workspace, task, checkpoint)
            if task != "vqa":
                client.set_registered_model_alias(version.name, CHAMPION, str(version.version))
    return workspace


def register_model(client: Any, params: Params, workspace: Workspace, task: str, checkpoint: Path) -> RegisteredVersion:
    bundle = workspace.root / "bundles" / task / "bundle"
    bundle.mkdir(parents=True)
    write_bundle(bundle, checkpoint=checkpoint, detector=workspace.detector, features=to_plain(params.features))
    run = f"own-{task}"
    evaluation = write_evaluation(bundle.parent / "evaluation", [toy_items([1.0] * 5, metric="accuracy")])
    score = {"metric": "accuracy", "value": 61.0, "low": 50.0, "high": 70.0, "dataset": "scenes", "split": "test"}
    (evaluation / "scores.json").write_text(json.dumps([score | {"task": task}]))
    record = VersionRecord(
        name=model_name(params.tracking, task),
        task=task,
        run=run,
        bundle=bundle,
        content=hash_bundle(bundle),
        evaluation=evaluation,
        tags={"run": run, "model": "tden", "family": "tden", "task": task},
        lineage={
            "params": {"data": {"scenes": {}}, "generate": {"scenes": {}}, "finetune": {}},
            "data": {},
            "parents": [],
        },
    )
    return register(client, record)


@pytest.fixture(scope="module")
def toy() -> Iterator[None]:
    """Register a family that reads pixels."""
    pytest.importorskip("vlp_models.contrib.plugin_kit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "toy", "vlp_models.contrib.plugin_kit.scaffolds.family.model:Toy")
        yield


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module")
def page_project(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Workspace:
    return make_project(tmp_path_factory.mktemp("project"), params)


@pytest.fixture
def here(page_project: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLflow sets it; monkeypatch restores it
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(page_project.root)
    return page_project


@pytest.fixture
def photo(here: Workspace) -> Path:
    return here.root / read_table("images", here.validated)["path"][0].as_py()
