"""Interrupted work belongs to the content of its inputs: other content of equal name, size and date is read again."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from drawn_workspace import SPLITS, make_workspace, params_with
from PIL import Image
from toy_dataset import write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureStore
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.data.pixels import PixelInput
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import DataError
from vlp_models.ingest.index import HashIndex
from vlp_models.models.checkpoint import SUMS, WEIGHTS
from vlp_models.pipeline.stages import detector, features, shards
from vlp_models.pipeline.training_job import TrainingJob

IDS = [f"drawn/{number}" for number in range(len(SPLITS))]


def swap(path: Path, content: bytes, *, new_file: bool = False) -> None:
    """Replace the content of a file; name, size and dates stay."""
    before = path.stat()
    assert len(content) == before.st_size and content != path.read_bytes()
    if new_file:
        path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def encode(values: list[list[float]]) -> str:
    return base64.b64encode(np.array(values, np.float32).tobytes()).decode()


def tsv(value: float, *, damaged: int = -1) -> bytes:
    """Return a features file with one region of four equal features per image."""
    boxes = encode([[0, 0, 64, 64]])
    rows = [[str(n), "64", "64", "1", boxes, encode([[value + n] * 4])] for n in range(len(SPLITS))]
    if damaged >= 0:
        rows[damaged][-1] = "!" + rows[damaged][-1][1:]
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def save_npz(folder: Path, value: float) -> None:
    for number in range(len(SPLITS)):
        arrays = {"features": np.full((1, 4), value + number, np.float32), "boxes": np.array([[0, 0, 64, 64]])}
        np.savez(folder / f"{number}.npz", image_h=np.array([64]), image_w=np.array([64]), **arrays)


def repaint(workspace: Workspace, color: tuple[int, int, int]) -> None:
    """Paint the images, bitmaps of equal size and date, and update the table as `prepare` and `validate` would."""
    rows = read_table("images", workspace.validated).to_pylist()
    for row in rows:
        path = workspace.root / row["path"]
        new = path.with_suffix(".bmp")
        before = new.stat() if new.exists() else None
        Image.new("RGB", (64, 64), color).save(new)
        if before:
            assert new.stat().st_size == before.st_size
            os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
        row |= {"path": workspace.relative(new), "sha256": hashlib.sha256(new.read_bytes()).hexdigest()}
    write_table(rows, "images", workspace.validated)


def interrupt(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch, module: object, name: str, after: int) -> None:
    """Run until a function has been called `after` times, then stop as a kill would."""
    original, calls = getattr(module, name), []

    def call(*args: object) -> object:
        calls.append(args)
        if len(calls) > after:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, call)
        run()


@pytest.mark.parametrize("new_file", [False, True], ids=["overwritten", "replaced"])
@pytest.mark.parametrize("source", ["tsv", "npz", "grid"])
def test_features_continue_only_with_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, new_file: bool
) -> None:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    workspace = make_workspace(tmp_path)
    path = "" if source == "grid" else f"given.{source}"
    params = params_with(detector={"source": "none"}, features={"source": source, "path": path})
    detector.run(params, workspace)
    if source == "tsv":
        (tmp_path / path).write_bytes(tsv(100))
    elif source == "npz":
        (tmp_path / path).mkdir()
        save_npz(tmp_path / path, 100)
    else:
        repaint(workspace, (255, 0, 0))
    interrupt(lambda: features.run(params, workspace), monkeypatch, storage, "write_chunk", after=2)
    assert list((tmp_path / ".work" / "features").glob("*/features-*.safetensors"))
    if source == "tsv":
        swap(tmp_path / path, tsv(200), new_file=new_file)
    elif source == "npz":
        (tmp_path / "other").mkdir()
        save_npz(tmp_path / "other", 200)
        for other in (tmp_path / "other").iterdir():
            swap(tmp_path / path / other.name, other.read_bytes(), new_file=new_file)
    else:
        repaint(workspace, (0, 0, 255))
    features.run(params, workspace)
    found = [FeatureStore(workspace.features).get(image_id).features for image_id in IDS]
    if source == "grid":
        assert all((cells[:, 0] < cells[:, 2]).all() for cells in found)  # blue everywhere, red nowhere
    else:
        assert [float(regions[0, 0]) for regions in found] == [200 + n for n in range(len(SPLITS))]


def test_a_repaired_features_file_is_read_again(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    params = params_with(detector={"source": "none"}, features={"source": "tsv", "path": "given.tsv"})
    detector.run(params, workspace)
    (tmp_path / "given.tsv").write_bytes(tsv(0, damaged=8))
    with pytest.raises(DataError, match=r"test: 1 of 1\n.*broken base64"):
        features.run(params, workspace)
    swap(tmp_path / "given.tsv", tsv(0))
    features.run(params, workspace)
    assert FeatureStore(workspace.features).get("drawn/8").features.tolist() == [[8] * 4]


def test_a_features_file_that_changes_during_its_import_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    workspace = make_workspace(tmp_path)
    params = params_with(detector={"source": "none"}, features={"source": "tsv", "path": "given.tsv"})
    detector.run(params, workspace)
    (tmp_path / "given.tsv").write_bytes(tsv(100))
    write_chunk = storage.write_chunk

    def swap_after_first(work: Path, number: int, images: list) -> Path:
        written = write_chunk(work, number, images)
        if number == 0:
            swap(tmp_path / "given.tsv", tsv(200))
        return written

    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=r"given\.tsv: changed while it was being imported; run the same command"),
    ):
        patch.setattr(storage, "write_chunk", swap_after_first)
        features.run(params, workspace)
    features.run(params, workspace)
    assert float(FeatureStore(workspace.features).get("drawn/0").features[0, 0]) == 200


def test_worker_processes_import_the_files_that_were_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks may be made by a process that opens the files later, on another machine."""
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    workspace = make_workspace(tmp_path)
    params = params_with(detector={"source": "none"}, features={"source": "tsv", "path": "given.tsv"})
    detector.run(params, workspace)
    (tmp_path / "given.tsv").write_bytes(tsv(100))

    def run_later(function: Callable, items: list) -> list:
        swap(tmp_path / "given.tsv", tsv(200))
        return [function(item) for item in items]

    with pytest.raises(DataError, match=r"given\.tsv: changed while it was being imported"):
        features.run(params, workspace, mapper=SimpleNamespace(map=run_later))
    features.run(params, workspace, mapper=SimpleNamespace(map=lambda function, items: map(function, items)))
    assert float(FeatureStore(workspace.features).get("drawn/8").features[0, 0]) == 208


READS = ModelInputs(image=RegionInput()), ModelInputs(image=PixelInput(height=16, width=16))


@pytest.mark.parametrize("changed", ["features", "images", "captions"])
def test_shards_continue_only_with_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    workspace = make_workspace(tmp_path)
    params = params_with(detector={"source": "none"}, features={"source": "grid"})
    params = dataclasses.replace(params, shards=dataclasses.replace(params.shards, images_per_shard=2))

    def write_inputs(text: str, color: tuple[int, int, int]) -> None:
        rows = [{"caption_id": f"{i}#0", "image_id": i, "text": text, "provenance": ""} for i in IDS]
        write_table(rows, "captions", workspace.validated)
        repaint(workspace, color)

    write_inputs("red", (255, 0, 0))
    detector.run(params, workspace)
    features.run(params, workspace)
    run = lambda: shards.run(params, workspace, inputs=READS)  # noqa: E731
    interrupt(run, monkeypatch, shards, "write_hashes", after=2)
    if changed == "features":  # other regions of the same detector, in a file of equal size and date
        path = workspace.features / storage.chunk_name(0)
        chunk = [(image_id, FeatureStore(workspace.features).get(image_id)) for image_id in IDS]
        other = storage.write_chunk(
            tmp_path, 0, [(i, dataclasses.replace(r, features=r.features * 0)) for i, r in chunk]
        )
        swap(path, other.read_bytes())
    else:
        write_inputs(*(("red", (0, 0, 255)) if changed == "images" else ("blu", (255, 0, 0))))
    run()
    splits = [ShardDataset(workspace.shards, split, "images", pixels=True) for split in ("train", "val", "test")]
    samples = [sample for split in splits for sample in split]
    assert {sample["captions"] for sample in samples} == {("blu",) if changed == "captions" else ("red",)}
    assert all((sample.regions.features == 0).all() == (changed == "features") for sample in samples)
    stored = {Image.open(tmp_path / "images" / "0.bmp").getpixel((0, 0))}
    assert stored == {(0, 0, 255) if changed == "images" else (255, 0, 0)}
    assert {_color(sample.pixels) for sample in samples} == stored


def _color(pixels: bytes) -> tuple[int, ...]:
    return Image.open(io.BytesIO(pixels)).getpixel((0, 0))


@pytest.mark.parametrize("stage", ["features", "shards"])
def test_an_image_that_changed_since_prepare_is_refused(tmp_path: Path, stage: str) -> None:
    """Its content would be kept under the hash of the old one."""
    workspace = make_workspace(tmp_path)
    params = params_with(detector={"source": "none"}, features={"source": "grid"})
    repaint(workspace, (255, 0, 0))
    detector.run(params, workspace)
    features.run(params, workspace)
    path = tmp_path / "images" / "5.bmp"
    swap(path, path.read_bytes()[:-3] + b"\1\2\3")
    shutil.rmtree(tmp_path / ".work" / "features")
    with pytest.raises(DataError, match=r"5\.bmp: has changed since `prepare`"):
        if stage == "features":
            features.run(params, workspace)
        else:
            shards.run(params, workspace, inputs=READS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    root = tmp_path_factory.mktemp("trained")
    params = write_workspace(root)
    (root / "augmented.jsonl").write_text("{}\n")
    return params, Workspace(root)


@pytest.mark.parametrize("run", ["pretrain/tden", "finetune/vqa"])
@pytest.mark.parametrize("name", ["content", "tokenizer", "start", "augment"])
def test_training_continues_only_with_the_same_content(trained: tuple, run: str, name: str) -> None:
    params, workspace = trained
    if run.startswith("finetune"):
        shutil.copytree(workspace.checkpoint("initial/tden"), workspace.checkpoint("pretrain/tden"), dirs_exist_ok=True)

    def job() -> TrainingJob:
        files = {"augment": workspace.root / "augmented.jsonl"}
        return TrainingJob(params, workspace, run, view="questions", settings={}, files=files)

    before = job()
    inputs = {**before.files, "content": next(iter(before.files.values()))}
    path = inputs[name]
    if name == "tokenizer":
        path /= "vocab.txt"
    old = {file: file.read_bytes() for file in ([path] if path.is_file() else [path / WEIGHTS, path / SUMS])}
    path = next(iter(old))
    new = old[path][:-2] + bytes([old[path][-2] ^ 1]) + old[path][-1:]
    swap(path, new)
    if name == "start":  # a checkpoint lists the hashes of its files
        hashes = [hashlib.sha256(content).hexdigest().encode() for content in (old[path], new)]
        swap(path.parent / SUMS, old[path.parent / SUMS].replace(*hashes))
    changed = job().work
    for file, content in old.items():
        swap(file, content)
    assert changed != before.work
    assert job().work == before.work


@pytest.mark.parametrize("new_file", [False, True], ids=["overwritten", "replaced"])
def test_ingest_hashes_an_image_of_equal_size_and_date_again(tmp_path: Path, new_file: bool) -> None:
    path = tmp_path / "a.bmp"
    path.write_bytes(b"first")
    hashed: list[bytes] = []

    def hash_files(paths):
        for number, name, _ in paths:
            content = Path(name).read_bytes()
            hashed.append(content)
            fingerprint = SimpleNamespace(to_bytes=lambda: b"")
            yield number, SimpleNamespace(sha256=content, pixels=content, perceptual=None, fingerprint=fingerprint)

    index = HashIndex(tmp_path / "index.sqlite", "own", keypoints=False)
    for content in (b"first", b"first", b"other"):
        if content != path.read_bytes():
            swap(path, content, new_file=new_file)
        index.sync_source("coco", [("coco/a", "test", str(path))], hash_files)
    index.close()
    assert hashed == [b"first", b"other"]
