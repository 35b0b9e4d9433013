"""Run bundles of others: values of wrong types are refused when a bundle is opened, before anything is printed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.errors import DataError
from vlp_models.pipeline.run_bundle import MANIFEST, _archive, open_bundle

BUNDLE = Path(__file__).parents[2] / "docs" / "results" / "runs" / "tden-vqa.run.zip"
SCORES = "scores.json"


def write_bundle(path: Path, manifest: dict[str, Any], files: dict[str, bytes]) -> Path:
    """Write a bundle with matching hashes."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    path.write_bytes(_archive({**files, MANIFEST: json.dumps({**manifest, "files": hashes}).encode()}))
    return path


def contents() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and the other files of the demo's bundle."""
    opened = open_bundle(BUNDLE)
    return dict(opened.manifest), {name: content for name, content in opened.files.items() if name != MANIFEST}


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "r\x1b[31mX"},
        {"run": "../other"},
        {"run": ""},
        {"task": "vqa\n"},
        {"git_commit": "\x9b31m"},
        {"bootstrap": -5},
        {"bootstrap": 10**9},
        {"bootstrap": True},
        {"bootstrap": 10.0},
        {"environment": {}},
        {"environment": {"mode": 1}},
        {"weights": {"model.safetensors": None}},
        {"weights": {"\x1b[2J": "abc"}},
    ],
    ids=str,
)
def test_invalid_value_in_the_manifest_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    manifest, files = contents()
    path = write_bundle(tmp_path / "changed.zip", manifest | changes, files)
    with pytest.raises(DataError, match="not a run bundle") as caught:
        open_bundle(path)
    assert "\x1b" not in str(caught.value) and "\x9b" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": "x"},
        {"seed": -1},
        {"seed": True},
        {"value": "x"},
        {"value": float("nan")},
        {"value": 10**400},
        {"low": [1]},
        {"high": float("inf")},
        {"dataset": ["a"]},
        {"split": None},
        {"metric": "\x1b[31maccuracy"},
        {"data": 1},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_invalid_value_in_a_score_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    manifest, files = contents()
    records = json.loads(files[SCORES])
    records[-1] |= changes
    path = write_bundle(tmp_path / "changed.zip", manifest, files | {SCORES: json.dumps(records).encode()})
    with pytest.raises(DataError, match="not a run bundle"):
        open_bundle(path)
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert isinstance(result.exception, DataError)


@pytest.mark.parametrize("key", ["dataset", "split", "metric", "value", "low", "high", "seed", "data"])
def test_score_without_a_key_is_refused(key: str, tmp_path: Path) -> None:
    manifest, files = contents()
    records = json.loads(files[SCORES])
    del records[0][key]
    path = write_bundle(tmp_path / "changed.zip", manifest, files | {SCORES: json.dumps(records).encode()})
    with pytest.raises(DataError, match="not a run bundle"):
        open_bundle(path)


def test_score_that_was_not_computed_is_accepted(tmp_path: Path) -> None:
    manifest, files = contents()
    records = json.loads(files[SCORES])
    records[-1] |= {"value": None, "low": None, "high": None}
    path = write_bundle(tmp_path / "changed.zip", manifest, files | {SCORES: json.dumps(records).encode()})
    assert open_bundle(path).json(SCORES) == records
