"""Fixtures for the tests of the demo page (page_project.py) and of the gate."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_project import make_params, make_project
from toy_registry import ToyRegistry

from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table
from vlp_models.models import FAMILIES
from vlp_models.params import Params


@pytest.fixture(scope="module")
def toy() -> Iterator[None]:
    """Register a family that reads pixels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "toy", "vlp_models.scaffolds.family.model:Toy")
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


@pytest.fixture(scope="module")
def registry_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture
def new(registry_root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a registry for a new model; a file's tests share a database (slow to create)."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLflow sets it; monkeypatch restores it
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    return lambda **gate: ToyRegistry(registry_root, f"toy-{uuid.uuid4().hex[:8]}", **gate)
