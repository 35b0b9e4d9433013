"""Datasets: their readers, and the images that they name."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from targets.base import DEEP, PATHS, ROOT, Prepared, Target, in_place

_LONG_ID = b'[{"id": ' + b"9" * 5000 + b"}]"
_LISTED = b"image,caption\n" + b"".join(f"{path},a caption\n".encode() for path in PATHS)


def _reader(section: dict[str, Any], file: str, generator: str = "objects") -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        from vlp_models.params import DatasetParams

        _synthetic(folder / "set", generator)
        source = DatasetParams.of(**{"root": "set", **section})
        return in_place(folder / "set" / file, lambda: _prepare(source, folder))

    return prepare


def _prepare(source: Any, folder: Path) -> None:
    """What the stage `prepare` does with a dataset, but for the writing of files: a hundredth of a second less."""
    import pyarrow as pa

    from vlp_models.curation.duplicates.hashes import hash_image_file
    from vlp_models.data.formats import read_source
    from vlp_models.data.images import ImageError
    from vlp_models.data.tables import SCHEMAS
    from vlp_models.pipeline.stages.prepare import _ImageFiles

    tables = read_source("set", source, folder)
    files = _ImageFiles("set", source, folder, folder / "prepared")
    for row in [row for row in tables["images"] if not files.locate(row)][:20]:
        with contextlib.suppress(ImageError):  # a row of the quarantine
            hash_image_file(Path(row["path"]), 1_000_000)
    for name, schema in SCHEMAS.items():
        pa.Table.from_pylist(tables[name], schema=schema)
    for row in tables["truth"]:
        json.dumps(row, ensure_ascii=False, sort_keys=True).encode()


def _synthetic(folder: Path, generator: str) -> None:
    """Write a few synthetic images in every public format of their generator; kept for all targets."""
    from vlp_models.common.plugins import import_target
    from vlp_models.params import GeneratorParams
    from vlp_models.synthetic import GENERATORS

    kept = folder.parent.parent / "synthetic" / generator
    if not kept.exists():
        kept.mkdir(parents=True)
        extra = {"vcr_per_image": 1, "hypotheses_per_image": 1, "pair_sentences": 1} if generator == "objects" else {}
        params = GeneratorParams(
            generator=generator, seed=3, train=4, val=1, test=1, questions_per_image=1, side=64, permutations=1, **extra
        )
        import_target(GENERATORS[generator])(params, kept)
        if generator == "objects":
            (kept / "lines.txt").write_text("a red star\na blue circle\n")
    shutil.copytree(kept, folder)


_COCO = {
    "format": "coco",
    "captions": {"all": ["annotations/captions_scenes.json"]},
    "instances": {"all": ["annotations/instances_scenes.json"]},
    "karpathy": "dataset_scenes.json",
    "questions": {"all": ["v2_OpenEnded_mscoco_scenes_questions.json"]},
    "annotations": {"all": ["v2_mscoco_scenes_annotations.json"]},
    "scene_graphs": "scenes.jsonl",
}


def _pairs(folder: Path, name: str, text: str) -> Prepared:
    from vlp_models.params import DatasetParams

    root = folder / "set"
    root.mkdir()
    for number in range(3):
        Image.new("RGB", (20, 20), (80 * number, 0, 0)).save(root / f"{number}.png")
    (root / name).write_text(text)
    source = DatasetParams.of(format="pairs", root="set", pairs=name)
    return in_place(root / name, lambda: _prepare(source, folder))


def _pairs_csv(folder: Path) -> Prepared:
    return _pairs(
        folder, "pairs.csv", 'image,caption,split\n0.png,a black one,train\n1.png,"red, dark",val\n2.png,"a\nb",test\n'
    )


def _pairs_jsonl(folder: Path) -> Prepared:
    rows = [{"image": f"{n}.png", "caption": "a picture", "split": s} for n, s in enumerate(("train", "val", "test"))]
    return _pairs(folder, "pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _submission(folder: Path) -> Prepared:
    """Prepare a submission's listing as `vlp ingest` reads it, and the images it names."""
    from vlp_models.contrib.ingest.reading import Staging
    from vlp_models.contrib.ingest.submissions import Submission
    from vlp_models.data.images import ImageError, read_file_inside
    from vlp_models.params import load_params

    validate = load_params(ROOT / "params.yaml").validate
    listing = folder / "submission" / "pairs.csv"
    listing.parent.mkdir()
    Image.new("RGB", (20, 20)).save(listing.parent / "0.png")
    (listing.parent / "link.png").symlink_to(folder.parents[2] / "outside" / "secret.txt")
    listing.write_text("image,caption\n0.png,a black picture\nlink.png,a black picture\n")

    def read() -> None:
        staging = Staging(folder / "staging.db")
        try:
            staging.read(Submission("submission", listing.parent, listing), validate)
            for (path,) in staging.connection.execute("SELECT path FROM images LIMIT 50").fetchall():
                try:
                    read_file_inside(listing.parent, path)
                except ImageError:
                    continue
        finally:
            staging.close()

    return in_place(listing, read)


def _image(folder: Path) -> Prepared:
    from vlp_models.curation.duplicates.hashes import hash_image_file
    from vlp_models.data.images import ImageError

    path = folder / "picture"
    Image.new("RGB", (9, 7), "red").save(path, "PNG")

    def read() -> None:
        with contextlib.suppress(ImageError):  # the documented answer: a row of the quarantine
            hash_image_file(path, 1_000_000)

    return in_place(path, read)


TARGETS = (
    Target(
        "pairs-csv",
        "text",
        _pairs_csv,
        {
            "quadratic": b"image,caption\n" + b'a",x,"c\n' * 4000,
            "paths": _LISTED,
        },
    ),
    Target("pairs-jsonl", "lines", _pairs_jsonl, {"long-id": b'{"image": ' + b"9" * 5000 + b"}\n", "deep": DEEP}),
    Target(
        "submission",
        "text",
        _submission,
        {
            "paths": _LISTED,
        },
    ),
    Target("coco-captions", "json", _reader(_COCO, "annotations/captions_scenes.json"), {"long-id": _LONG_ID}),
    Target("coco-instances", "json", _reader(_COCO, "annotations/instances_scenes.json"), {"deep": DEEP}),
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
)
