"""Fixtures of the page's tests: page_project.py says what they are. Other tests here have `params` of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_project import make_params, make_project

from vlp_models.data.tables import read_table
from vlp_models.params import Params
from vlp_models.workspace.paths import Workspace


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module")
def page_project(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Workspace:
    return make_project(tmp_path_factory.mktemp("project"), params)


@pytest.fixture
def here(page_project: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(page_project.root)
    return page_project


@pytest.fixture
def photo(here: Workspace) -> Path:
    return here.root / read_table("images", here.validated)["path"][0].as_py()
