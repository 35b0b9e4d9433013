"""Shards and features: the parts of a training's input, and what regions are imported from."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from targets.base import Prepared, Target, in_place


def _tsv(folder: Path) -> Prepared:
    from vlp_models.contrib.imported_features.tsv import open_tsv

    def text(array: np.ndarray) -> str:
        return base64.b64encode(array.astype(np.float32).tobytes()).decode()

    boxes, features = np.array([[0, 0, 5, 5], [1, 1, 9, 9]]), np.ones((2, 3))
    path = folder / "features.tsv"
    path.write_text("".join(f"{name}\t10\t10\t2\t{text(boxes)}\t{text(features)}\n" for name in ("a", "b")))
    return in_place(path, lambda: _regions_of(open_tsv(_request("tsv", path))))


def _npz(folder: Path) -> Prepared:
    from vlp_models.contrib.imported_features.npz import open_npz

    arrays = {"features": np.ones((2, 3), np.float32), "boxes": np.array([[0, 0, 5, 5], [1, 1, 9, 9]], np.float32)}
    np.savez(folder / "a.npz", **arrays, image_w=10, image_h=10)
    shutil.copy(folder / "a.npz", folder / "b.npz")
    return in_place(folder / "a.npz", lambda: _regions_of(open_npz(_request("npz", folder))))


def _request(source: str, path: Path) -> Any:
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import FeaturesParams
    from vlp_models.vision.region_source import SourceRequest

    params = FeaturesParams(source=source, content="roi", path=str(path), max_regions=4, min_score=0.0)
    return SourceRequest(params=params, workspace=Workspace(path.parent))


def _regions_of(source: Any) -> None:
    images = [{"image_id": f"set/{name}", "path": f"{name}.png"} for name in ("a", "b", "c")]
    source.regions(images, lambda count: None)


def _shards(folder: Path) -> Path:
    """Three images with regions, pixels and texts of every view, and the index."""
    from toy_dataset import CLASSES, FEATURE_DIM, _compared
    from toy_dataset import _image as toy_image

    from vlp_models.data.shards.write import ShardWriter

    directory = folder / "shards"
    directory.mkdir()
    rng, counts = np.random.default_rng(0), {}
    picture = io.BytesIO()
    Image.new("RGB", (10, 10), "red").save(picture, "PNG")
    for split in ("train", "val", "test"):
        writer = ShardWriter(directory, split, images_per_shard=2)
        records = [toy_image(f"toy/{split}{n}", rng) for n in range(3)]
        for record, other in zip(records, [*records[1:], records[0]], strict=True):
            rows = {**record.rows, "image_pairs": [_compared(record, other)]}
            writer.add(dataclasses.replace(record, rows=rows, pixels=picture.getvalue(), pixels_extension="png"))
        counts[split] = writer.close()
    facts = {"feature_dim": FEATURE_DIM, "classes": CLASSES, "detector_id": "toy", "sources": ["toy"]}
    (directory / "manifest.json").write_text(json.dumps({**facts, "counts": counts}))
    return directory


def _shard(folder: Path) -> Prepared:
    from shard_files import read_shard

    path = _shards(folder) / "train-00000000.tar"

    def read() -> None:
        for _ in read_shard(path):
            pass
        _batches(path.parent)

    return in_place(path, read)


def _batches(directory: Path, views: tuple[str, ...] = ("captions",)) -> None:
    from vlp_models.data.shards.dataset import ShardDataset

    for view in views:
        dataset = ShardDataset(directory, "train", view, pixels=True)
        dataset.image_ids()
        for number in range(min(len(dataset), 3)):
            assert dataset[number].images


def _index(folder: Path) -> Prepared:
    directory = _shards(folder)
    views = ("images", "captions", "questions", "statements", "choices", "hypotheses", "image_pairs")
    return in_place(directory / "index-train.parquet", lambda: _batches(directory, views))


def _shards_manifest(folder: Path) -> Prepared:
    directory = _shards(folder)
    return in_place(directory / "manifest.json", lambda: _batches(directory))


def _regions(folder: Path) -> Prepared:
    from shard_files import read_shard

    from vlp_models.data.shards.archive import REGIONS, decode, encode_regions

    first = next(iter(read_shard(_shards(folder) / "train-00000000.tar")))[1][REGIONS]
    return (lambda data: decode(REGIONS, data, where="a shard")), encode_regions(first)


def _feature_chunk(name: str) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        from shard_files import read_shard

        from vlp_models.data.features import FeatureStore, read_listing, write_chunk, write_index
        from vlp_models.data.shards.archive import REGIONS

        found = [(key, value[REGIONS]) for key, value in read_shard(_shards(folder) / "train-00000000.tar")]
        directory = folder / "features"
        directory.mkdir()
        write_chunk(directory, 0, found)
        write_index(directory)
        (directory / "manifest.json").write_text(json.dumps({"detector_id": "toy", "feature_dim": 6, "classes": []}))

        def read() -> None:
            read_listing(directory / "features-00000000.safetensors")
            store = FeatureStore(directory)
            for key, _ in found:
                if key in store:
                    store.get(key)

        return in_place(directory / name, read)

    return prepare


TARGETS = (
    Target("features-tsv", "text", _tsv),
    Target("features-npz", "bytes", _npz),
    Target("shard", "bytes", _shard),
    Target("shard-index", "parquet", _index, share=0.4),
    Target("shard-manifest", "json", _shards_manifest, {"long": b'{"feature_dim": ' + b"9" * 5000 + b"}"}),
    Target("shard-regions", "safetensors", _regions),
    Target("feature-chunk", "safetensors", _feature_chunk("features-00000000.safetensors")),
    Target("feature-index", "parquet", _feature_chunk("index.parquet")),
)
