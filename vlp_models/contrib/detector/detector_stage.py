"""The stage `detector` with `source: train`, on the boxes of the train split, or `weights`, a file or torchvision's.

Average precision is measured on val.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlp_models.common.device import pick_device
from vlp_models.common.io import hash_file
from vlp_models.common.packages import find_weights_file, library_of
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.detector.checkpoint import fetch_published, load_published, save_detector
from vlp_models.contrib.detector.faster_rcnn import DetectorConfig, build_detector, configure
from vlp_models.contrib.detector.torchvision_parts import FasterRCNN
from vlp_models.contrib.detector.training import (
    LabeledImage,
    TrainingOptions,
    average_precision,
    categories_of,
    first_step,
    labeled_images,
    train_detector,
    words_of,
)
from vlp_models.data.joins import read_boxed
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import DetectorParams, Params
from vlp_models.vision.region_source import BACKGROUND

Report = dict[str, Any]
EVALUATION_BATCH = 32


def _check(p: DetectorParams) -> None:
    """Refuse weights without a name, and a training without steps."""
    if p.source == "weights" and not p.weights:
        raise ParamsError(
            "params.yaml: `detector.source: weights` needs `detector.weights`: a .safetensors or .pth file, or "
            "`torchvision` for its COCO weights"
        )
    for name, value in {"steps": p.steps, "lr": p.lr}.items():
        if p.source == "train" and not value:
            raise ParamsError(f"params.yaml: `detector.{name}: {value}` must be above zero")


def make_detector(params: Params, workspace: Workspace, directory: Path) -> Report:
    """Write a detector to `directory`; return the stage's report.

    Raises:
        DataError: `validate` has not run; or `source: train` without any box in the train split.
        CheckpointError: the weights of `source: weights` are missing or have another architecture.
        ParamsError: a missing path, or an invalid number.
        NonFiniteLossError: the training diverged.
    """
    _check(params.detector)
    device = torch.device(pick_device(params.trainer.accelerator, params.trainer.torch_threads))
    p = params.detector
    rows = boxed_rows(p, workspace)
    # the report has what the result has: a loaded detector has no losses or seconds
    report: Report = {"source": p.source, "backbone": p.backbone, "counts": {}}
    if p.source == "train":
        model, config, classes, training = _train(p, rows, workspace, device, report)
    else:
        model, config, classes, training = _load(p, rows, workspace)
    report["detector_id"] = save_detector(directory, model, config, classes, training)
    # average precision on val, for the classes without the background
    val = labeled_images(rows, "val", classes[1:], (), workspace.root)
    report["counts"]["val_images"] = len(val)
    if val:
        report["val"] = average_precision(model, val, classes, device, EVALUATION_BATCH)
    else:
        report["note"] = "average precision not computed: the val split has no box of these classes"
    return report


def boxed_rows(p: DetectorParams, workspace: Workspace) -> list[dict[str, Any]]:
    """Return the images with boxes of the selected datasets with their objects, ordered by id."""
    return [row for row in read_boxed(workspace.validated) if not p.sources or row["source"] in p.sources]


def _train(
    p: DetectorParams, rows: list[dict[str, Any]], workspace: Workspace, device: torch.device, report: Report
) -> tuple[FasterRCNN, DetectorConfig, tuple[str, ...], dict[str, Any]]:
    """Train a detector; return it with its config, its classes and a record of the training. Adds to `report`."""
    train_rows = [row for row in rows if row["split"] == "train"]
    if not train_rows:
        raise DataError(
            f"{workspace.validated}: the train split has no object boxes to train on"
            + (f" in {', '.join(p.sources)}" if p.sources else "")
            + "; set features.source to `timm` (a backbone, no boxes needed), detector.source to `weights` with a "
            "detector of your own, or to `none` and features.source to `tsv` or `npz` (imported features)"
        )
    images, classes, words = training_data(p, train_rows, workspace)
    # the small backbone's anchors have the sizes of the training boxes
    config = configure(p.backbone, p.feature_dim, np.concatenate([image.boxes for image in images]), words)
    torch.manual_seed(p.seed)
    model = build_detector(config, len(classes))
    result = train_detector(model, images, training_options(p), device)
    sources = sorted({row["source"] for row in train_rows})
    report["counts"] = {"train_images": len(images), "classes": len(classes) - 1}
    report["losses"] = result.losses
    report["seconds"], report["images_per_second"] = result.seconds, result.images_per_second
    training = {"source": "train", "datasets": sources, "images": len(images), "steps": p.steps, "seed": p.seed}
    return model, config, classes, training


def training_data(
    p: DetectorParams, train_rows: list[dict[str, Any]], workspace: Workspace
) -> tuple[list[LabeledImage], tuple[str, ...], tuple[str, ...]]:
    """Return the training images in order, the classes with the background first, and the words."""
    categories, words = categories_of(train_rows), words_of(train_rows)
    images = labeled_images(train_rows, "train", categories, words, workspace.root)
    # a random sample, in the order of ids
    if 0 < p.max_images < len(images):
        numbers = np.random.default_rng(p.seed).permutation(len(images))[: p.max_images]
        images = [images[number] for number in sorted(numbers.tolist())]
    return images, (BACKGROUND, *categories), words


def training_options(p: DetectorParams) -> TrainingOptions:
    return TrainingOptions(steps=p.steps, batch_size=p.batch_size, lr=p.lr, seed=p.seed)


def first_detector_step(p: DetectorParams, workspace: Workspace, image_ids: Set[str]) -> int | None:
    """Return the first step, from 1, in which a detector was trained on one of these images, or None.

    Computed from the current data/validated.

    Raises:
        DataError: `validate` has not run.
    """
    rows = [row for row in boxed_rows(p, workspace) if row["split"] == "train"]
    images, _, _ = training_data(p, rows, workspace)
    return first_step(images, training_options(p), image_ids)


def _load(
    p: DetectorParams, rows: list[dict[str, Any]], workspace: Workspace
) -> tuple[FasterRCNN, DetectorConfig, tuple[str, ...], dict[str, Any]]:
    """Load published weights; return the same as `_train`."""
    where = "params.yaml: `detector.weights`"
    training: dict[str, Any] = {"source": "weights"}
    # a model of torchvision, or a file with its state dict
    if library_of(p.weights):
        detector = fetch_published(p.weights, p.backbone, where)
        training |= {"weights": p.weights}
    else:
        path = find_weights_file(p.weights, workspace.root, where)
        names = sorted({item["category"] for row in rows for item in row["objects"]})
        detector = load_published(path, p.backbone, names)
        training |= {"file": path.name, "sha256": hash_file(path)}
    return detector.model, detector.config, detector.classes, training
