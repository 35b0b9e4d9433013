"""Params and presets, requests to a served model, the ledger: what people and programs write and send."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from pathlib import Path

import yaml
from PIL import Image

from targets.base import DEEP, PATHS, ROOT, Prepared, Target, in_place
from targets.checkpoints import make_bundle


def _params(folder: Path) -> Prepared:
    from vlp_models.params import load_params
    from vlp_models.pipeline.check_params import check_runs

    path = folder / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    plain = yaml.safe_load(path.read_text())  # without comments, which would be most of the mutations
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return in_place(path, lambda: check_runs(load_params(path)))


def _preset(folder: Path) -> Prepared:
    from vlp_models.cli.presets import apply_overlay

    shutil.copy(ROOT / "params.yaml", folder)
    shutil.copy(ROOT / "vlp_models" / "presets" / "tiny.yaml", folder)

    def use() -> None:
        apply_overlay(folder / "params.yaml", folder / "tiny.yaml", [])
        shutil.copy(ROOT / "params.yaml", folder)

    return in_place(folder / "tiny.yaml", use)


def _request(folder: Path) -> Prepared:
    """A row of a request to the served model: base64, a path, an array; with a folder that it may read from."""
    from vlp_models.serving.bundle import write_content
    from vlp_models.serving.predictor import Predictor

    bundle = make_bundle(folder)
    write_content(bundle, [])
    predictor = Predictor(bundle)
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
            texts = [str(row.get("text", ""))]
            (checked,) = predictor.check([row["image"]], texts, untrusted=True)
            predictor.predict_opened([[image.open() for image in checked]], texts)
        except DataError as error:
            assert "secret" not in str(error), "an answer may not hold what a file outside holds"
            raise
        finally:
            del os.environ["VLP_IMAGE_ROOT"]

    row = {"image": base64.b64encode(picture.getvalue()).decode(), "text": "it is red"}
    return serve, json.dumps(row).encode()


def _ledger(folder: Path) -> Prepared:
    from vlp_models.registry.promotion.ledger import Ledger, replay

    path = folder / "ledger.jsonl"
    ledger = Ledger(path)
    line = {"task": "vqa", "model": "vlp-vqa", "version": 1, "content": "c", "from": None}
    with ledger.locked():
        for action in ("refused", "promoted"):
            ledger.append({"action": action, **line})
    return in_place(path, lambda: replay(Ledger(path).entries()))


TARGETS = (
    Target(
        "params",
        "yaml",
        _params,
        {
            "laughs": b"a: &a [x, x]\n"
            + b"".join(f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n".encode() for n in range(24)),
            "merges": b"a: &a {x: 1}\n"
            + b"".join(
                b"%c: &%c {<<: [%s]}\n" % (98 + n, 98 + n, b", ".join([b"*%c" % (97 + n)] * 9)) for n in range(9)
            ),
            "deep": DEEP,
        },
    ),
    Target("preset", "yaml", _preset, {"deep": DEEP}, share=0.2),
    Target(
        "request",
        "json",
        _request,
        {
            **{f"path-{n}": json.dumps({"image": path}).encode() for n, path in enumerate((*PATHS, "out/secret.txt"))},
            "array": b'{"image": [[[1, 2, 3]]], "text": "x"}',
        },
    ),
    Target("ledger", "lines", _ledger),
)
