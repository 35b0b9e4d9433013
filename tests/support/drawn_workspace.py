"""A validated workspace of a few drawings, as the stages of the vision room read it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlp_models.common.workspace import Workspace
from vlp_models.data.joins import write_boxed
from vlp_models.data.tables import write_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint import CheckpointInfo, write_checkpoint
from vlp_models.params import Params, load_params, to_plain
from vlp_models.serving.bundle import write_bundle
from vlp_models.tasks import task_class

SPLITS = ("train", "train", "train", "train", "train", "train", "val", "val", "test")


def make_workspace(root: Path) -> Workspace:
    """Nine images, 64 x 64, two objects each: a red and a blue square."""
    workspace = Workspace(root)
    workspace.validated.mkdir(parents=True)
    (root / "images").mkdir()
    rng = np.random.default_rng(0)
    images, objects = [], []
    for number, split in enumerate(SPLITS):
        image = Image.new("RGB", (64, 64), (200, 200, 200))
        for left, color in ((2, "red"), (34, "blue")):
            side = int(rng.integers(16, 25))
            x, y = left + int(rng.integers(0, 4)), int(rng.integers(2, 60 - side))
            ImageDraw.Draw(image).rectangle((x, y, x + side, y + side), fill=color)
            objects.append(
                {
                    "object_id": f"drawn/{len(objects)}",
                    "image_id": f"drawn/{number}",
                    "category": f"{color} square",
                    **dict(zip(("x1", "y1", "x2", "y2"), (x, y, x + side + 1, y + side + 1), strict=True)),
                    "provenance": "drawn",
                }
            )
        path = root / "images" / f"{number}.png"
        image.save(path)
        images.append(
            {
                "image_id": f"drawn/{number}",
                "source": "drawn",
                "split": split,
                "path": workspace.relative(path),
                "width": 64,
                "height": 64,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "provenance": "drawn",
            }
        )
    write_table(images, "images", workspace.validated)
    write_objects(objects, workspace)
    return workspace


def write_objects(objects: list[dict[str, Any]], workspace: Workspace) -> None:
    """These objects in both tables that hold them."""
    write_table(objects, "objects", workspace.validated)
    write_boxed(workspace.validated)


def params_with(*, detector: dict[str, Any] | None = None, features: dict[str, Any] | None = None) -> Params:
    """The project's params with these fields changed; the detector is small and quick."""
    params = load_params(Path(__file__).resolve().parents[2] / "params.yaml")
    quick = {"steps": 3, "batch_size": 2, "feature_dim": 16}
    return dataclasses.replace(
        params,
        data={"drawn": dataclasses.replace(params.data["scenes"], root="images")},
        detector=dataclasses.replace(params.detector, **quick | (detector or {})),
        features=dataclasses.replace(params.features, **features or {}),
    )


def write_captioner_bundle(bundle: Path, params: Params, workspace: Workspace) -> None:
    """A bundle of an untrained captioner for the workspace's features; its checkpoint is next to it."""
    manifest = json.loads((workspace.features / "manifest.json").read_text())
    write_bundle(
        bundle,
        checkpoint=write_captioner(bundle.parent / "checkpoint", manifest),
        detector=workspace.detector,
        features=to_plain(params.features),
    )


def write_captioner(directory: Path, features: dict[str, Any]) -> Path:
    """An untrained captioner's checkpoint, for features of this manifest."""
    tokenizer = Tokenizer.train(["a red square", "a blue square"], 40, 1, True)
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        feature_dim=features["feature_dim"],
        num_classes=len(features["classes"]),
    )
    model = build_model("tden", {"hidden": 16, "heads": 2, "intermediate": 32}, facts)
    info = CheckpointInfo(
        family="tden",
        name="tden",
        model_config=to_plain(model.config),
        task="captioning",
        max_text_len=8,
        max_regions=16,
        detector_id=features["detector_id"],
        feature_dim=features["feature_dim"],
        classes=tuple(features["classes"]),
    )
    directory.mkdir()
    write_checkpoint(directory, task_class("captioning")(model, tokenizer, info), info, tokenizer)
    return directory
