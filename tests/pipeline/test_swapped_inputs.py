"""Interrupted work belongs to the content of its inputs: other content of equal name, size and date is read again."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shutil
from pathlib import Path

import pytest
from drawn_workspace import SPLITS, make_workspace, params_with
from PIL import Image
from swapped_files import interrupt, swap
from toy_dataset import write_workspace

from vlp_models.common.checksums import SUMS
from vlp_models.common.workspace import Workspace
from vlp_models.data import features as storage
from vlp_models.data.features import FeatureStore
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.data.pixels import PixelInput
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import DataError
from vlp_models.models.checkpoint import WEIGHTS
from vlp_models.pipeline.stages import detector, features, shards
from vlp_models.pipeline.training_job import TrainingJob

IDS = [f"drawn/{number}" for number in range(len(SPLITS))]


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


def test_features_continue_only_with_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    workspace = make_workspace(tmp_path)
    params = params_with(detector={"source": "none"}, features={"source": "grid"})
    detector.run(params, workspace)
    repaint(workspace, (255, 0, 0))
    interrupt(lambda: features.run(params, workspace), monkeypatch, storage, "write_chunk", after=2)
    assert list((tmp_path / ".work" / "features").glob("*/features-*.safetensors"))
    repaint(workspace, (0, 0, 255))
    features.run(params, workspace)
    cells = [FeatureStore(workspace.features).get(image_id).features for image_id in IDS]
    assert all((found[:, 0] < found[:, 2]).all() for found in cells), "blue everywhere, red nowhere"


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
