"""The features stage: what it writes, that it resumes, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from drawn_workspace import SPLITS, make_workspace, params_with
from PIL import Image

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureStore
from vlp_models.data.sample import RegionArrays
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import CheckpointError, DataError
from vlp_models.pipeline.stages import detector
from vlp_models.pipeline.stages.features import run
from vlp_models.vision import region_source as source

IDS = [f"drawn/{number}" for number in range(len(SPLITS))]
LENIENT = {"min_score": 0.01, "max_regions": 4}  # the detector of these tests has hardly learned


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    workspace = make_workspace(tmp_path)
    detector.run(params_with(), workspace)
    return workspace


def forget(workspace: Workspace) -> None:
    """The last run's regions; the next one takes nothing over."""
    shutil.rmtree(workspace.root / ".work" / "features" / "kept")


def manifest(workspace: Workspace) -> dict:
    return json.loads((workspace.features / "manifest.json").read_text(encoding="utf-8"))


def test_every_image_has_its_regions(workspace: Workspace) -> None:
    left = workspace.work("features", "0123456789abcdef") / storage.chunk_name(0)  # of an interrupted run, other inputs
    left.touch()
    os.utime(left, (0, 0))
    run(params_with(features=LENIENT), workspace)
    config = json.loads((workspace.detector / "config.json").read_text(encoding="utf-8"))
    assert manifest(workspace)["detector_id"] == config["detector_id"]
    assert manifest(workspace)["classes"] == config["classes"]
    assert manifest(workspace)["counts"]["chunks"] == 3
    assert pq.read_table(workspace.features / "index.parquet")["image_id"].to_pylist() == IDS
    store = FeatureStore(workspace.features)
    regions = [store.get(image_id) for image_id in IDS]
    assert all(0 < len(found) <= 4 and found.features.shape == (len(found), 16) for found in regions)
    assert manifest(workspace)["counts"]["regions"] == sum(map(len, regions))
    assert [path.name for path in (workspace.root / ".work" / "features").iterdir()] == ["kept"]


def test_partial_chunks_of_lost_workers_are_removed(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Path] = []
    write_chunk = storage.write_chunk

    def leave_a_partial(directory: Path, number: int, images: Sequence[tuple[str, RegionArrays]]) -> Path:
        entry = directory / f".{storage.chunk_name(number)}.partial" / f"{'0' * 8}-1-{'0' * 8}"  # of another machine
        entry.parent.mkdir()
        entry.write_bytes(b"half")
        left.append(entry)
        return write_chunk(directory, number, images)

    monkeypatch.setattr(storage, "write_chunk", leave_a_partial)
    run(params_with(features=LENIENT), workspace)
    assert len(left) == 3 and not left[0].exists()
    assert [path.name for path in (workspace.root / ".work" / "features").iterdir()] == ["kept"]


def add_image(workspace: Workspace, image_id: str, color: str) -> None:
    """One more image without boxes, whose id comes before, between or after the others."""
    path = workspace.root / "images" / f"{color}.png"
    picture = Image.new("RGB", (64, 64), (200, 200, 200))
    picture.paste(color, (20, 20, 44, 44))
    picture.save(path)
    rows = read_table("images", workspace.validated).to_pylist()
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rows.append(rows[0] | {"image_id": image_id, "path": workspace.relative(path), "sha256": sha256})
    write_table(rows, "images", workspace.validated)


def test_only_new_images_are_extracted_with_equal_results(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    read_image = source.read_image
    monkeypatch.setattr(
        source, "read_image", lambda path, width, height: seen.append(path.name) or read_image(path, width, height)
    )
    run(params_with(features=LENIENT), workspace)
    assert len(seen) == len(IDS)
    shutil.rmtree(workspace.features)  # as DVC does
    seen.clear()
    for image_id, color in (("drawn/00", "green"), ("a/1", "red"), ("z/1", "blue")):
        add_image(workspace, image_id, color)
    run(params_with(features=LENIENT), workspace)
    assert sorted(seen) == ["blue.png", "green.png", "red.png"]
    assert "9 images reused from the last run, 3 extracted" in capsys.readouterr().err
    grown = hash_path(workspace.features)
    forget(workspace)
    run(params_with(features=LENIENT), workspace)
    assert hash_path(workspace.features) == grown

    # an image goes and another takes its name: its content counts
    rows = read_table("images", workspace.validated).to_pylist()
    rows = [row for row in rows if row["image_id"] not in ("a/1", "drawn/3")]
    write_table(
        [row | {"image_id": "drawn/3"} if row["image_id"] == "z/1" else row for row in rows],
        "images",
        workspace.validated,
    )
    seen.clear()
    run(params_with(features=LENIENT), workspace)
    assert seen == []
    renamed = hash_path(workspace.features)
    forget(workspace)
    run(params_with(features=LENIENT), workspace)
    assert hash_path(workspace.features) == renamed != grown


def test_regions_of_other_instructions_are_not_reused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook computes with its own, whatever `trainer.reproducible` asks of the command."""
    run(params_with(features=LENIENT), workspace)
    monkeypatch.setattr("vlp_models.pipeline.stages.features.is_portable", lambda: True)
    run(params_with(features=LENIENT), workspace)
    assert "reused" not in capsys.readouterr().err


def test_other_settings_reuse_nothing(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    run(params_with(features=LENIENT), workspace)
    run(params_with(features=LENIENT | {"max_regions": 3}), workspace)
    assert "reused" not in capsys.readouterr().err
    assert len(list((workspace.root / ".work" / "features" / "kept").iterdir())) == 1
    kept = next((workspace.root / ".work" / "features" / "kept").glob(f"*/{storage.chunk_name(0)}"))
    assert kept.samefile(workspace.features / storage.chunk_name(0))  # a link takes no room
    wanted = hash_path(workspace.features)
    shutil.rmtree(workspace.features)
    kept.write_bytes(kept.read_bytes()[:-10])  # cut off: made again
    run(params_with(features=LENIENT | {"max_regions": 3}), workspace)
    assert hash_path(workspace.features) == wanted


def test_resume_extracts_only_the_rest(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    run(params_with(features=LENIENT), workspace)
    whole = hash_path(workspace.features)
    forget(workspace)
    image = workspace.root / "images" / "5.png"  # of the second chunk
    image.rename(image.with_suffix(".away"))
    with pytest.raises(DataError, match=r"5\.png"):
        run(params_with(features=LENIENT), workspace)
    assert hash_path(workspace.features) == whole  # the old output stands
    image.with_suffix(".away").rename(image)
    written: list[int] = []
    write_chunk = storage.write_chunk
    monkeypatch.setattr(
        storage, "write_chunk", lambda work, number, images: written.append(number) or write_chunk(work, number, images)
    )
    run(params_with(features=LENIENT), workspace)
    assert written == [1, 2]
    assert hash_path(workspace.features) == whole


def test_symbols_need_no_detector(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    detector.run(params_with(detector={"source": "none"}), workspace)
    run(params_with(features={"source": "boxes"}), workspace)
    store = FeatureStore(workspace.features)
    assert (store.detector_id, store.feature_dim) == ("boxes", 3 + 4)  # blue, red, square
    np.testing.assert_array_equal(store.get("drawn/0").features[:, :3], [[0, 1, 1], [1, 0, 1]])
    with pytest.raises(CheckpointError, match=r"detector\.source: none"):
        run(params_with(), workspace)


def test_an_image_without_features_is_named(workspace: Workspace) -> None:
    run(params_with(features=LENIENT), workspace)
    with pytest.raises(DataError, match="no features for image drawn/99"):
        FeatureStore(workspace.features).get("drawn/99")


def test_damaged_chunk_is_reported(workspace: Workspace) -> None:
    run(params_with(features=LENIENT), workspace)
    chunk = workspace.features / storage.chunk_name(0)
    chunk.write_bytes(chunk.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"features-00000000\.safetensors: missing or damaged"):
        FeatureStore(workspace.features).get("drawn/0")


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    regions = RegionArrays(
        features=np.full((1, 2), 1e6, np.float32),
        boxes=np.array([[0, 0, 1, 1]], np.float32),
        class_probs=np.zeros((1, 0), np.float16),
        scores=np.ones(1, np.float32),
    )
    with pytest.raises(DataError, match="a/1: features has non-finite values, or values beyond the float16 range"):
        storage.write_chunk(tmp_path, 0, [("a/1", regions)])
    assert not list(tmp_path.iterdir())
