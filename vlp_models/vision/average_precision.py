"""COCO's average precision, by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
from torchvision.models.detection import FasterRCNN

from vlp_models.common.progress import progress_bar
from vlp_models.vision.images import batches_by_size, read_image
from vlp_models.vision.labelled import LabelledImage


def average_precision(
    model: FasterRCNN, images: Sequence[LabelledImage], classes: Sequence[str], device: torch.device, batch_size: int
) -> dict[str, float]:
    """AP (mean over IoU 0.5 to 0.95), AP50, AP75 and AR (100 detections an image), all in percent.

    Args:
        classes: names, background first; labels of `images` count from it.
    """
    detections: list[dict[str, Any]] = []
    sizes = [(image.height, image.width) for image in images]
    model.to(device).eval()
    with torch.inference_mode(), progress_bar("average precision", len(images), "images") as bar:
        for numbers in batches_by_size(sizes, batch_size):
            rows = [images[number] for number in numbers]
            pixels = [read_image(row.path, row.width, row.height).to(device).float() / 255 for row in rows]
            for number, found in zip(numbers, model(pixels), strict=True):
                detections += _as_coco(number, {name: value.cpu() for name, value in found.items()})
            bar.advance(by=len(numbers))
    return _score(images, classes, detections)


def _as_coco(image: int, found: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    boxes = found["boxes"].clone()
    boxes[:, 2:] -= boxes[:, :2]
    return [
        {"image_id": image, "category_id": label, "bbox": box, "score": score}
        for box, label, score in zip(boxes.tolist(), found["labels"].tolist(), found["scores"].tolist(), strict=True)
    ]


def _score(
    images: Sequence[LabelledImage], classes: Sequence[str], detections: list[dict[str, Any]]
) -> dict[str, float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations: list[dict[str, Any]] = []
    for number, image in enumerate(images):
        for box, label in zip(image.boxes.tolist(), image.labels.tolist(), strict=True):
            width, height = box[2] - box[0], box[3] - box[1]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label,
                    "bbox": [box[0], box[1], width, height],
                    "area": width * height,
                    "iscrowd": 0,
                }
            )
    if not detections:
        return {"AP": 0.0, "AP50": 0.0, "AP75": 0.0, "AR": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its own report
        truth = COCO()
        truth.dataset = {
            "images": [{"id": n, "width": image.width, "height": image.height} for n, image in enumerate(images)],
            "annotations": annotations,
            "categories": [{"id": n, "name": name} for n, name in enumerate(classes) if n],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: round(100 * float(evaluation.stats[place]), 2) for name, place in _STATS.items()}


_STATS = {"AP": 0, "AP50": 1, "AP75": 2, "AR": 8}
