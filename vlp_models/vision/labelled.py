"""Images whose objects are known: what a detector learns from, and eyes (eyes.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.data.tables import object_words

Rows = Sequence[Mapping[str, Any]]  # of boxed.parquet (data/boxed.py)


@dataclass(frozen=True, kw_only=True)
class LabelledImage:
    """An image and its objects: boxes float32 [N, 4] in pixels, x1 y1 x2 y2; labels int64 [N], 1 is the first class;
    words float32 [N, W], 1 where a word holds of the object.
    """

    image_id: str
    path: Path
    width: int
    height: int
    boxes: np.ndarray
    labels: np.ndarray
    words: np.ndarray


def categories_of(rows: Rows) -> tuple[str, ...]:
    return tuple(sorted({item["category"] for row in rows for item in row["objects"]}))


def words_of(rows: Rows) -> tuple[str, ...]:
    """Of categories and attributes."""
    return tuple(sorted({word for row in rows for item in row["objects"] for word in object_words(item)}))


def labelled_images(
    rows: Rows, split: str, categories: Sequence[str], words: Sequence[str], root: Path
) -> list[LabelledImage]:
    """The images of a split that have an object of these categories, each with those, in order.

    Args:
        root: what the rows' paths are relative to.
    """
    label = {name: number for number, name in enumerate(categories, start=1)}
    images = []
    for row in rows:
        if row["split"] != split:
            continue
        objects = [item for item in row["objects"] if item["category"] in label]
        boxes = np.array([[item["x1"], item["y1"], item["x2"], item["y2"]] for item in objects], np.float32)
        boxes = boxes.reshape(-1, 4).clip(0, np.array([row["width"], row["height"]] * 2, np.float32))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)  # validation lets a box stick out a little
        labels = np.array([label[item["category"]] for item in objects], np.int64)
        holds = np.array([[word in object_words(item) for word in words] for item in objects], np.float32)
        if inside.any():
            images.append(
                LabelledImage(
                    image_id=row["image_id"],
                    path=root / row["path"],
                    width=row["width"],
                    height=row["height"],
                    boxes=boxes[inside],
                    labels=labels[inside],
                    words=holds[inside],
                )
            )
    return images
