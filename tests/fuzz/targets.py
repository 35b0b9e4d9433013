"""What is fuzzed: each target takes the bytes of one file, puts them where the program reads them, and has it read.

The files around it are sound and made by the project itself. What a target returns nobody looks at: an input may be
taken, or refused by a `VLPError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

ROOT = Path(__file__).parents[2]
Attempt = Callable[[bytes], Any]


@dataclass(frozen=True)
class Target:
    """form: how its bytes are best changed (mutate.py); prepare: makes the files around it in a folder, once; a file of
    the folder that gives a sound input, and `hostile`: inputs that are known to be none, by name."""

    name: str
    form: str
    prepare: Callable[[Path], tuple[Attempt, bytes]]
    hostile: dict[str, bytes] = dataclasses.field(default_factory=dict)
    share: float = 1.0  # of the inputs: less for what takes long


def _file(path: Path, then: Callable[[], Any]) -> tuple[Attempt, bytes]:
    """Puts an input in the place of `path`, which is whole again afterwards."""
    whole = path.read_bytes()

    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            then()
        finally:
            path.write_bytes(whole)

    return attempt, whole


# Readers, and the images that they name


def _reader(section: dict[str, Any], file: str, world: str = "objects") -> Callable[[Path], tuple[Attempt, bytes]]:
    def prepare(folder: Path) -> tuple[Attempt, bytes]:
        from vlp_models.params import SourceParams

        _world(folder / "set", world)
        source = SourceParams(**{"root": "set", **section})
        return _file(folder / "set" / file, lambda: _prepare(source, folder))

    return prepare


def _prepare(source: Any, folder: Path) -> None:
    """What the stage `prepare` does with a dataset, but for the writing of files: a hundredth of a second less."""
    import pyarrow as pa

    from vlp_models.data.formats import read_source
    from vlp_models.data.images import ImageError
    from vlp_models.data.tables import SCHEMAS
    from vlp_models.duplicates.hashes import examine
    from vlp_models.stages.prepare import _folders, _outside

    tables = read_source("set", source, folder)
    folders = _folders(folder / source.root, source.images)
    for row in [row for row in tables["images"] if not _outside(Path(row["path"]), folders, "set")][:20]:
        with contextlib.suppress(ImageError):  # a row of the quarantine
            examine(Path(row["path"]), 1_000_000)
    for name, schema in SCHEMAS.items():
        pa.Table.from_pylist(tables[name], schema=schema)
    for row in tables["truth"]:
        json.dumps(row, ensure_ascii=False, sort_keys=True).encode()


def _world(folder: Path, world: str) -> None:
    """A few images of the embedded worlds, in every public format that they write; kept for all targets."""
    from vlp_models.lookup import load
    from vlp_models.params import WorldParams
    from vlp_models.worlds import WORLDS

    kept = folder.parent.parent / "worlds" / world
    if not kept.exists():
        kept.mkdir(parents=True)
        extra = {"vcr_per_image": 1, "hypotheses_per_image": 1, "pair_sentences": 1} if world == "objects" else {}
        params = WorldParams(
            world=world, seed=3, train=4, val=1, test=1, questions_per_image=1, side=64, permutations=1, **extra
        )
        load(WORLDS[world])(params, kept)
        if world == "objects":
            (kept / "lines.txt").write_text("a red star\na blue circle\n")
    shutil.copytree(kept, folder)


_COCO = {
    "format": "coco",
    "captions": {"all": ["annotations/captions_scenes.json"]},
    "instances": {"all": ["annotations/instances_scenes.json"]},
    "karpathy": "dataset_scenes.json",
    "questions": {"all": ["v2_OpenEnded_mscoco_scenes_questions.json"]},
    "annotations": {"all": ["v2_mscoco_scenes_annotations.json"]},
    "truth": "scenes.jsonl",
}


def _pairs(folder: Path, name: str, text: str) -> tuple[Attempt, bytes]:
    from vlp_models.params import SourceParams

    root = folder / "set"
    root.mkdir()
    for number in range(3):
        Image.new("RGB", (20, 20), (80 * number, 0, 0)).save(root / f"{number}.png")
    (root / name).write_text(text)
    source = SourceParams(format="pairs", root="set", pairs=name)
    return _file(root / name, lambda: _prepare(source, folder))


def _pairs_csv(folder: Path) -> tuple[Attempt, bytes]:
    return _pairs(
        folder, "pairs.csv", 'image,caption,split\n0.png,a black one,train\n1.png,"red, dark",val\n2.png,"a\nb",test\n'
    )


def _pairs_jsonl(folder: Path) -> tuple[Attempt, bytes]:
    rows = [{"image": f"{n}.png", "caption": "a picture", "split": s} for n, s in enumerate(("train", "val", "test"))]
    return _pairs(folder, "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _drop(folder: Path) -> tuple[Attempt, bytes]:
    """A drop's listing as `vlp ingest` reads it, and the pictures that it names."""
    from vlp_models.data.images import ImageError
    from vlp_models.incoming.drops import Drop, read_inside
    from vlp_models.incoming.reading import Staging
    from vlp_models.params import load_params

    validate = load_params(ROOT / "params.yaml").validate
    listing = folder / "drop" / "pairs.csv"
    listing.parent.mkdir()
    Image.new("RGB", (20, 20)).save(listing.parent / "0.png")
    (listing.parent / "link.png").symlink_to(folder.parents[2] / "outside" / "secret.txt")
    listing.write_text("image,caption\n0.png,a black picture\nlink.png,a black picture\n")

    def read() -> None:
        staging = Staging(folder / "staging.db")
        try:
            staging.read(Drop("drop", listing.parent, listing), validate)
            for (path,) in staging.connection.execute("SELECT path FROM images LIMIT 50").fetchall():
                try:
                    read_inside(listing.parent, path)
                except ImageError:
                    continue
        finally:
            staging.close()

    return _file(listing, read)


def _image(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.data.images import ImageError
    from vlp_models.duplicates.hashes import examine

    path = folder / "picture"
    Image.new("RGB", (9, 7), "red").save(path, "PNG")

    def read() -> None:
        with contextlib.suppress(ImageError):  # the documented answer: a row of the quarantine
            examine(path, 1_000_000)

    return _file(path, read)


def _tsv(folder: Path) -> tuple[Attempt, bytes]:
    import base64

    from vlp_models.vision.tsv import open_tsv

    def text(array: np.ndarray) -> str:
        return base64.b64encode(array.astype(np.float32).tobytes()).decode()

    boxes, features = np.array([[0, 0, 5, 5], [1, 1, 9, 9]]), np.ones((2, 3))
    path = folder / "features.tsv"
    path.write_text("".join(f"{name}\t10\t10\t2\t{text(boxes)}\t{text(features)}\n" for name in ("a", "b")))
    return _file(path, lambda: _regions_of(open_tsv(path, 4)))


def _npz(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.vision.npz import open_npz

    arrays = {"features": np.ones((2, 3), np.float32), "boxes": np.array([[0, 0, 5, 5], [1, 1, 9, 9]], np.float32)}
    np.savez(folder / "a.npz", **arrays, image_w=10, image_h=10)
    shutil.copy(folder / "a.npz", folder / "b.npz")
    return _file(folder / "a.npz", lambda: _regions_of(open_npz(folder, 4)))


def _regions_of(source: Any) -> None:
    images = [{"image_id": f"set/{name}", "path": f"{name}.png"} for name in ("a", "b", "c")]
    source.regions(images, lambda count: None)


# Shards and features


def _shards(folder: Path) -> Path:
    """Three images with regions, pixels and texts of every view, and the index."""
    from toy_world import CLASSES, FEATURE_DIM, _compared
    from toy_world import _image as toy_image

    from vlp_models.data.shards import ShardWriter

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


def _shard(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.data.archive import read_shard

    path = _shards(folder) / "train-00000.tar"

    def read() -> None:
        for _ in read_shard(path):
            pass
        _batches(path.parent)

    return _file(path, read)


def _batches(directory: Path, views: tuple[str, ...] = ("captions",)) -> None:
    from vlp_models.data.dataset import ShardDataset

    for view in views:
        dataset = ShardDataset(directory, "train", view, pixels=True)
        dataset.image_ids()
        for number in range(min(len(dataset), 3)):
            assert dataset[number].images


def _index(folder: Path) -> tuple[Attempt, bytes]:
    directory = _shards(folder)
    views = ("images", "captions", "questions", "statements", "choices", "hypotheses", "image_pairs")
    return _file(directory / "index-train.parquet", lambda: _batches(directory, views))


def _shards_manifest(folder: Path) -> tuple[Attempt, bytes]:
    directory = _shards(folder)
    return _file(directory / "manifest.json", lambda: _batches(directory))


def _regions(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.data.archive import REGIONS, decode, read_shard

    first = next(iter(read_shard(_shards(folder) / "train-00000.tar")))[1][REGIONS]
    from vlp_models.data.archive import encode_regions

    return (lambda data: decode(REGIONS, data, where="a shard")), encode_regions(first)


def _feature_chunk(name: str) -> Callable[[Path], tuple[Attempt, bytes]]:
    def prepare(folder: Path) -> tuple[Attempt, bytes]:
        from vlp_models.data.archive import REGIONS, read_shard
        from vlp_models.data.features import FeatureStore, read_listing, write_chunk, write_index

        found = [(key, value[REGIONS]) for key, value in read_shard(_shards(folder) / "train-00000.tar")]
        directory = folder / "features"
        directory.mkdir()
        write_chunk(directory, 0, found)
        write_index(directory)
        (directory / "manifest.json").write_text(json.dumps({"detector_id": "toy", "feature_dim": 6, "classes": []}))

        def read() -> None:
            read_listing(directory / "features-00000.safetensors")
            store = FeatureStore(directory)
            for key, _ in found:
                if key in store:
                    store.get(key)

        return _file(directory / name, read)

    return prepare


# Checkpoints and bundles


def _bundle(folder: Path) -> Path:
    """A served model of pixels, tiny, untrained: what the registry holds of one."""
    import torch

    from vlp_models.data.tokenizer import Tokenizer
    from vlp_models.models import FAMILIES, DataFacts, build_model
    from vlp_models.models.checkpoint import write_checkpoint
    from vlp_models.models.info import CheckpointInfo
    from vlp_models.params import to_plain
    from vlp_models.tasks import task_class

    FAMILIES["toy"] = "toy_model.model:Toy"
    tokenizer = Tokenizer.train(["it is red", "it is blue"], 30, 1, True)
    torch.manual_seed(0)
    config = {"side": 8, "patch": 4, "hidden": 16, "heads": 2}
    model = build_model("toy", config, DataFacts(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id))
    facts: dict[str, Any] = {"model_config": to_plain(model.config), "task": "nlvr", "max_text_len": 8}
    info = CheckpointInfo(family="toy", name="toy", **facts)
    bundle = folder / "bundle"
    (bundle / "checkpoint").mkdir(parents=True)
    task_model = task_class("nlvr")(model, tokenizer, info)
    write_checkpoint(bundle / "checkpoint", task_model, info, tokenizer)
    return bundle


def _checkpoint(name: str) -> Callable[[Path], tuple[Attempt, bytes]]:
    """Without its sums, which would refuse all at once: whoever forges a file forges them as well."""

    def prepare(folder: Path) -> tuple[Attempt, bytes]:
        import torch

        from vlp_models.models.checkpoint import SUMS, load_model
        from vlp_models.serving.predictor import Predictor

        bundle = _bundle(folder)
        with torch.device("meta"):  # loads modules for two seconds, once: that is no hang
            torch.nn.Linear(1, 1)
        if name != SUMS:
            (bundle / "checkpoint" / SUMS).unlink()

        def read() -> None:
            load_model(bundle / "checkpoint")
            Predictor(bundle)

        return _file(bundle / "checkpoint" / name, read)

    return prepare


def _labels(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.models.checkpoint import read_labels

    (folder / "labels.json").write_text(json.dumps(["red", "blue"]))
    return _file(folder / "labels.json", lambda: read_labels(folder))


def _bundle_content(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.serving.bundle import CONTENT, content_of, write_content
    from vlp_models.serving.predictor import Predictor

    bundle = _bundle(folder)
    write_content(bundle, [])

    def read() -> None:
        content_of(bundle)
        Predictor(bundle)

    return _file(bundle / CONTENT, read)


def _bundle_features(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.serving.bundle import read_made

    made = {"source": "detector", "min_score": 0.2, "max_regions": 16, "content": "roi"}
    (folder / "features.json").write_text(json.dumps(made))
    return _file(folder / "features.json", lambda: read_made(folder))


def _detector(name: str) -> Callable[[Path], tuple[Attempt, bytes]]:
    def prepare(folder: Path) -> tuple[Attempt, bytes]:
        import torch

        from vlp_models.vision.config import DetectorConfig
        from vlp_models.vision.detector import build_detector
        from vlp_models.vision.state import load_detector, save_detector

        torch.manual_seed(0)
        config = DetectorConfig(feature_dim=4, channels=(2, 2, 2), anchors=(16.0,), roi_size=2)
        save_detector(folder, build_detector(config, 3), config, ["__background__", "a", "b"], {})
        return _file(folder / name, lambda: load_detector(folder))

    return prepare


# Params, requests, the ledger


def _params(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.params import load_params
    from vlp_models.runs.check import check_runs

    path = folder / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    plain = yaml.safe_load(path.read_text())  # without comments, which would be most of what is changed
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return _file(path, lambda: check_runs(load_params(path)))


def _preset(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.overlay import apply_overlay

    shutil.copy(ROOT / "params.yaml", folder)
    shutil.copy(ROOT / "presets" / "tiny.yaml", folder)

    def use() -> None:
        apply_overlay(folder / "params.yaml", folder / "tiny.yaml", [])
        shutil.copy(ROOT / "params.yaml", folder)

    return _file(folder / "tiny.yaml", use)


def _request(folder: Path) -> tuple[Attempt, bytes]:
    """A row of a request to the served model: base64, a path, an array; with a folder that it may read from."""
    import base64

    from vlp_models.serving.predictor import Predictor

    predictor = Predictor(_bundle(folder))
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    (folder / "served").mkdir()
    (folder / "served" / "a.png").write_bytes(picture.getvalue())
    (folder / "served" / "out").symlink_to(folder.parents[2] / "outside")

    def serve(data: bytes) -> None:
        from vlp_models.errors import DataError

        try:
            row = json.loads(data)
        except (ValueError, RecursionError):
            return  # MLflow's server answers this one
        if not isinstance(row, dict) or "image" not in row:
            return
        os.environ["VLP_IMAGE_ROOT"] = str(folder / "served")
        try:
            predictor.predict([row["image"]], [str(row.get("text", ""))], requested=True)
        except DataError as error:
            assert "secret" not in str(error), "an answer may not hold what a file outside holds"
            raise
        finally:
            del os.environ["VLP_IMAGE_ROOT"]

    row = {"image": base64.b64encode(picture.getvalue()).decode(), "text": "it is red"}
    return serve, json.dumps(row).encode()


def _ledger(folder: Path) -> tuple[Attempt, bytes]:
    from vlp_models.promotion.ledger import Ledger, replay

    path = folder / "ledger.jsonl"
    ledger = Ledger(path)
    fact = {"action": "promote", "task": "vqa", "model": "vlp-vqa", "version": 1, "from": None}
    with ledger.locked():
        for kind in ("intent", "done"):
            ledger.append({"kind": kind, **fact})
    return _file(path, lambda: replay(Ledger(path).entries()))


_OUT = "../" * 4 + "outside/secret.txt"
_PATHS = (_OUT, f"a/../{_OUT}", "/etc/passwd", "link.png", "file:///etc/passwd")
_LONG_ID = b'[{"id": ' + b"9" * 5000 + b"}]"
_DEEP = b"[" * 50_000

TARGETS = {
    target.name: target
    for target in (
        Target(
            "pairs-csv",
            "text",
            _pairs_csv,
            {
                "quadratic": b"image,caption\n" + b'a",x,"c\n' * 4000,
                "paths": b"image,caption\n" + b"".join(f"{path},a caption\n".encode() for path in _PATHS),
            },
        ),
        Target("pairs-jsonl", "lines", _pairs_jsonl, {"long-id": b'{"image": ' + b"9" * 5000 + b"}\n", "deep": _DEEP}),
        Target(
            "drop",
            "text",
            _drop,
            {
                "paths": b"image,caption\n" + b"".join(f"{path},a caption\n".encode() for path in _PATHS),
            },
        ),
        Target("coco-captions", "json", _reader(_COCO, "annotations/captions_scenes.json"), {"long-id": _LONG_ID}),
        Target("coco-instances", "json", _reader(_COCO, "annotations/instances_scenes.json"), {"deep": _DEEP}),
        Target("karpathy", "json", _reader(_COCO, "dataset_scenes.json"), {"long-id": _LONG_ID}),
        Target("vqa-questions", "json", _reader(_COCO, "v2_OpenEnded_mscoco_scenes_questions.json")),
        Target("vqa-annotations", "json", _reader(_COCO, "v2_mscoco_scenes_annotations.json")),
        Target("truth", "lines", _reader(_COCO, "scenes.jsonl")),
        Target("vcr", "lines", _reader({"format": "vcr"}, "train.jsonl")),
        Target("snli-ve", "lines", _reader({"format": "snli_ve"}, "snli_ve_train.jsonl")),
        Target("nlvr2", "lines", _reader({"format": "nlvr2", "root": "set/nlvr2"}, "nlvr2/data/train.json")),
        Target("nlvr", "lines", _reader({"format": "nlvr"}, "train/train.json", "boxes")),
        Target("texts", "text", _reader({"format": "texts", "texts": {"train": ["lines.txt"]}}, "lines.txt")),
        Target("image", "bytes", _image),
        Target("features-tsv", "text", _tsv),
        Target("features-npz", "bytes", _npz),
        Target("shard", "bytes", _shard),
        Target("shard-index", "parquet", _index, share=0.4),
        Target("shard-manifest", "json", _shards_manifest, {"long": b'{"feature_dim": ' + b"9" * 5000 + b"}"}),
        Target("shard-regions", "safetensors", _regions),
        Target("feature-chunk", "safetensors", _feature_chunk("features-00000.safetensors")),
        Target("feature-index", "parquet", _feature_chunk("index.parquet")),
        Target("checkpoint-config", "json", _checkpoint("config.json"), {"deep": _DEEP}, share=0.6),
        Target(
            "checkpoint-weights",
            "safetensors",
            _checkpoint("model.safetensors"),
            {"endless": (2**62).to_bytes(8, "little") + b"{}"},  # the length of its header
        ),
        Target("checkpoint-vocab", "text", _checkpoint("vocab.txt")),
        Target("checkpoint-tokenizer", "json", _checkpoint("tokenizer.json")),
        Target(
            "checkpoint-sums",
            "text",
            _checkpoint("SHA256SUMS"),
            {
                "path": b"0" * 64 + b"  ../../../outside/secret.txt\n",
            },
        ),
        Target("checkpoint-labels", "json", _labels),
        Target("bundle-content", "json", _bundle_content),
        Target("bundle-features", "json", _bundle_features),
        Target("detector-config", "json", _detector("config.json")),
        Target("detector-weights", "safetensors", _detector("detector.safetensors")),
        Target(
            "params",
            "yaml",
            _params,
            {
                "laughs": b"a: &a [x, x]\n"
                + b"".join(
                    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n".encode() for n in range(24)
                ),
                "deep": _DEEP,
            },
        ),
        Target("preset", "yaml", _preset, {"deep": _DEEP}, share=0.2),
        Target(
            "request",
            "json",
            _request,
            {
                **{
                    f"path-{n}": json.dumps({"image": path}).encode()
                    for n, path in enumerate((*_PATHS, "out/secret.txt"))
                },
                "array": b'{"image": [[[1, 2, 3]]], "text": "x"}',
            },
        ),
        Target("ledger", "lines", _ledger),
    )
}
