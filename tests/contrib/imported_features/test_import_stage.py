"""`features.source: tsv` and `npz` through the stage: missing records, and files that change during an import."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from drawn_workspace import SPLITS, make_workspace, params_with
from swapped_files import interrupt, swap

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureStore
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params
from vlp_models.pipeline.stages import detector, features


def encode(values: list[list[float]]) -> str:
    return base64.b64encode(np.array(values, np.float32).tobytes()).decode()


def write_files(path: Path, value: float, *, damaged: int = -1) -> dict[Path, bytes]:
    """Return the file or files of one region with four equal features per image: `value` plus the image's number."""
    if path.suffix == ".tsv":
        boxes = encode([[0, 0, 64, 64]])
        rows = [[str(n), "64", "64", "1", boxes, encode([[value + n] * 4])] for n in range(len(SPLITS))]
        if damaged >= 0:
            rows[damaged][-1] = "!" + rows[damaged][-1][1:]
        return {path: "".join("\t".join(row) + "\n" for row in rows).encode()}
    files = {}
    path.mkdir(exist_ok=True)
    for number in range(len(SPLITS)):
        arrays = {"features": np.full((1, 4), value + number, np.float32), "boxes": np.array([[0, 0, 64, 64]])}
        np.savez(path.parent / "one.npz", image_h=np.array([64]), image_w=np.array([64]), **arrays)
        files[path / f"{number}.npz"] = (path.parent / "one.npz").read_bytes()
    return files


def prepare(folder: Path, source: str, value: float = 100) -> tuple[Params, Workspace]:
    """Return params that import `given.SOURCE`, which is written, and the workspace."""
    workspace = make_workspace(folder)
    params = params_with(detector={"source": "none"}, features={"source": source, "path": f"given.{source}"})
    detector.run(params, workspace)
    for path, content in write_files(folder / f"given.{source}", value).items():
        path.write_bytes(content)
    return params, workspace


def imported(workspace: Workspace) -> list[float]:
    """Return the first number of each image's first region; nothing for an image without regions."""
    store = FeatureStore(workspace.features)
    regions = [store.get(f"drawn/{number}") for number in range(len(SPLITS))]
    return [float(found.features[0, 0]) for found in regions if len(found)]


def test_missing_records_are_quarantined_or_stop_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, workspace = prepare(tmp_path, "npz", 0)
    features.run(params, workspace)
    store, before = FeatureStore(workspace.features), hash_path(workspace.features)
    assert store.detector_id.startswith("import-") and store.classes == []
    assert store.get("drawn/3").features.tolist() == [[3] * 4] and store.get("drawn/3").class_probs.shape == (1, 0)

    (tmp_path / "given.npz" / "8.npz").unlink()
    with pytest.raises(DataError, match=r"test: 1 of 1\n.*drawn/8: no record named drawn/8, 8"):
        features.run(params, workspace)
    assert hash_path(workspace.features) == before

    # a split may lose a few of its images
    monkeypatch.setattr("vlp_models.pipeline.stages.features.MAX_MISSING", 1.0)
    features.run(params, workspace)
    assert imported(workspace) == list(range(8))
    rows = read_table("quarantine", workspace.features).to_pylist()
    assert [(row["row_id"], row["rule"]) for row in rows] == [("drawn/8", "features_present")]


def test_an_import_needs_a_path(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"`features\.source: tsv` needs `features\.path`"):
        features.run(params_with(features={"source": "tsv"}), make_workspace(tmp_path))


@pytest.mark.parametrize("new_file", [False, True], ids=["overwritten", "replaced"])
@pytest.mark.parametrize("source", ["tsv", "npz"])
def test_an_import_continues_only_with_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, new_file: bool
) -> None:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    params, workspace = prepare(tmp_path, source)
    interrupt(lambda: features.run(params, workspace), monkeypatch, storage, "write_chunk", after=2)
    assert list((tmp_path / ".work" / "features").glob("*/features-*.safetensors"))
    for path, content in write_files(tmp_path / f"given.{source}", 200).items():
        swap(path, content, new_file=new_file)
    features.run(params, workspace)
    assert imported(workspace) == [200 + n for n in range(len(SPLITS))]


def test_a_repaired_file_is_read_again(tmp_path: Path) -> None:
    params, workspace = prepare(tmp_path, "tsv", 0)
    path = tmp_path / "given.tsv"
    swap(path, write_files(path, 0, damaged=8)[path])
    with pytest.raises(DataError, match=r"test: 1 of 1\n.*broken base64"):
        features.run(params, workspace)
    swap(path, write_files(path, 0)[path])
    features.run(params, workspace)
    assert imported(workspace)[8] == 8


def test_a_file_that_changes_during_its_import_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    params, workspace = prepare(tmp_path, "tsv")
    path, write_chunk = tmp_path / "given.tsv", storage.write_chunk

    def swap_after_first(work: Path, number: int, images: list) -> Path:
        written = write_chunk(work, number, images)
        if number == 0:
            swap(path, write_files(path, 200)[path])
        return written

    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=r"given\.tsv: changed while it was being imported; run the same command"),
    ):
        patch.setattr(storage, "write_chunk", swap_after_first)
        features.run(params, workspace)
    features.run(params, workspace)
    assert imported(workspace)[0] == 200


def test_worker_processes_import_the_files_that_were_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks may be made by a process that opens the files later, on another machine."""
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    params, workspace = prepare(tmp_path, "tsv")
    path = tmp_path / "given.tsv"

    def run_later(function: Callable, items: list) -> list:
        swap(path, write_files(path, 200)[path])
        return [function(item) for item in items]

    with pytest.raises(DataError, match=r"given\.tsv: changed while it was being imported"):
        features.run(params, workspace, mapper=SimpleNamespace(map=run_later))
    features.run(params, workspace, mapper=SimpleNamespace(map=lambda function, items: map(function, items)))
    assert imported(workspace)[8] == 208
