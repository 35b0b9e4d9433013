"""detector: train or load the model that turns pixels into regions.

`source: train` trains on the boxes of the train split; `weights` loads a file or torchvision's weights; `none` is for
imported features and symbols. With `features.source: timm` it is a backbone. Average precision is measured on val.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.device import pick_device
from vlp_models.common.io import hash_file, output_directory, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace, record_timing, write_manifest
from vlp_models.data.joins import read_boxed
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import DetectorParams, Params, TimmParams, to_plain

if TYPE_CHECKING:
    from torchvision.models.detection import FasterRCNN

    from vlp_models.vision.detector import DetectorConfig
    from vlp_models.vision.training import LabeledImage, TrainingOptions

logger = get_logger(__name__)

Report = dict[str, Any]
EVALUATION_BATCH = 32


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/detector and reports/detector.json.

    Raises:
        MissingToolError: the package of the weights is not installed.
        DataError: `validate` has not run; or `source: train` without any box in the train split.
        CheckpointError: the weights of `source: weights` or of a backbone are missing or have another architecture.
        ParamsError: an unknown dataset in `sources`, a missing path, or an invalid number.
        NonFiniteLossError: the training diverged.
    """
    p = params.detector
    backbone = params.features.source == "timm"
    if not backbone:
        _check(p, params)
    # a backbone, the record that there is no detector, or a detector with its classes
    with record_timing(workspace, "detector"), output_directory(workspace.detector) as directory:
        if backbone:
            report: Report = _make_backbone(params.features.timm, workspace, directory)
        elif p.source == "none":
            from vlp_models.vision.detector_checkpoint import save_no_detector

            report = {"detector_id": save_no_detector(directory, {"source": "none"}), "source": "none"}
        else:
            report = _make_detector(params, workspace, directory)
        write_manifest(
            directory,
            stage="detector",
            params=to_plain(params.features.timm if backbone else p),
            counts=report.get("counts", {}),
            detector_id=report["detector_id"],
        )
    write_json(workspace.reports / "detector.json", report)
    _log(report)


def _check(p: DetectorParams, params: Params) -> None:
    unknown = [name for name in p.sources if name not in params.data]
    if unknown:
        raise ParamsError(
            f"params.yaml: `detector.sources` names {', '.join(unknown)}; data has {', '.join(params.data)}"
        )
    if p.source == "weights" and not p.weights:
        raise ParamsError(
            "params.yaml: `detector.source: weights` needs `detector.weights`: a .safetensors or .pth file, or "
            "`torchvision` for its COCO weights"
        )
    for name, value in {"steps": p.steps, "lr": p.lr}.items():
        if p.source == "train" and not value:
            raise ParamsError(f"params.yaml: `detector.{name}: {value}` must be above zero")


def _make_backbone(p: TimmParams, workspace: Workspace, directory: Path) -> Report:
    from vlp_models.vision.timm_backbone import make_backbone, save_backbone

    backbone = make_backbone(p, workspace.root)
    config = backbone.model.config
    identity = save_backbone(directory, backbone, {"source": "timm", "weights": p.weights})
    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    counts = {"classes": config.num_classes, "parameters": parameters, "feature_dim": config.feature_dim}
    return {"source": "timm", "backbone": config.model, "detector_id": identity, "counts": counts}


def _make_detector(params: Params, workspace: Workspace, directory: Path) -> Report:
    import torch

    from vlp_models.vision.detector_checkpoint import save_detector
    from vlp_models.vision.training import average_precision, labeled_images

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
    p: DetectorParams, rows: list[dict[str, Any]], workspace: Workspace, device: Any, report: Report
) -> tuple[FasterRCNN, DetectorConfig, tuple[str, ...], dict[str, Any]]:
    """Train a detector; return it with its config, its classes and a record of the training. Adds to `report`."""
    import numpy as np
    import torch

    from vlp_models.vision.detector import build_detector, configure
    from vlp_models.vision.training import train_detector

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
    import numpy as np

    from vlp_models.vision.region_source import BACKGROUND
    from vlp_models.vision.training import categories_of, labeled_images, words_of

    categories, words = categories_of(train_rows), words_of(train_rows)
    images = labeled_images(train_rows, "train", categories, words, workspace.root)
    # a random sample, in the order of ids
    if 0 < p.max_images < len(images):
        numbers = np.random.default_rng(p.seed).permutation(len(images))[: p.max_images]
        images = [images[number] for number in sorted(numbers.tolist())]
    return images, (BACKGROUND, *categories), words


def training_options(p: DetectorParams) -> TrainingOptions:
    from vlp_models.vision.training import TrainingOptions

    return TrainingOptions(steps=p.steps, batch_size=p.batch_size, lr=p.lr, seed=p.seed)


def _load(
    p: DetectorParams, rows: list[dict[str, Any]], workspace: Workspace
) -> tuple[FasterRCNN, DetectorConfig, tuple[str, ...], dict[str, Any]]:
    """Load published weights; return the same as `_train`."""
    from vlp_models.common.packages import find_weights_file, library_of
    from vlp_models.vision.detector_checkpoint import fetch_published, load_published

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


def _log(report: Report) -> None:
    counts, parts = report.get("counts", {}), [report["source"]]
    if report["source"] == "timm":
        parts += [f"{report['backbone']} with {counts['parameters']:,} parameters", f"{counts['classes']:,} classes"]
    if "seconds" in report:
        parts += [
            f"{counts['train_images']:,} images, {counts['classes']} classes",
            f"{report['seconds']:.0f} s at {report['images_per_second']:.0f} images/s",
        ]
    if "val" in report:
        parts.append("val " + " ".join(f"{name} {value:.1f}" for name, value in report["val"].items()))
    elif "note" in report:
        parts.append(report["note"])
    logger.info("detector %s: %s", report["detector_id"], ", ".join(parts))
