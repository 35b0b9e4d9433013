"""Fixtures for the tests of the gate, and those of page_project.py."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from page_project import here, page_project, params, photo, toy
from toy_registry import ToyRegistry

__all__ = ["here", "page_project", "params", "photo", "toy"]


@pytest.fixture(scope="module")
def registry_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture
def no_tracking_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable overrides params.yaml."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def new(registry_root: Path, no_tracking_uri: None) -> Any:
    """Return a function that makes a registry for a new model; a file's tests share a database (slow to create)."""
    return lambda **gate: ToyRegistry(registry_root, f"toy-{uuid.uuid4().hex[:8]}", **gate)
