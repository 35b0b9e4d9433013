"""Ground-truth objects as regions, without pixels: the structured-representation input of NLVR (Suhr et al., 2017)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vlp_models.data.sample import RegionArrays
from vlp_models.data.tables import object_words
from vlp_models.vision.config import BACKGROUND
from vlp_models.vision.source import Row, left_out

GEOMETRY = ("width", "height", "centre x", "centre y")  # fractions of the image


class SymbolSource:
    """Each object becomes one region, in reading order of its left edge.

    Its feature says which words its category's name and its attributes have (`yellow square` -> yellow, square) and,
    in the last four numbers, its size and place. Its class is certain.
    """

    detector_id = "boxes"
    by_content = False
    device = "cpu"

    def __init__(self, objects: Iterable[Mapping[str, Any]], max_regions: int) -> None:
        self._objects: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in objects:
            self._objects[row["image_id"]].append(row)
        categories = sorted({row["category"] for rows in self._objects.values() for row in rows})
        self.classes = (BACKGROUND, *categories)
        self.words = tuple(
            sorted({word for rows in self._objects.values() for row in rows for word in object_words(row)})
        )
        self.feature_dim = len(self.words) + len(GEOMETRY)
        self._max_regions = max_regions

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """Images with more objects than `max_regions` lose those furthest right, and have a row in the second list."""
        notes = []
        for image in images:
            count = len(self._objects.get(image["image_id"], []))
            if count > self._max_regions:
                reason = f"{count} objects, but features.max_regions is {self._max_regions}"
                notes.append(left_out(image, "max_regions", reason, str(image.get("provenance", ""))))
        found = [self._regions(image) for image in images]
        advance(len(images))
        return found, notes

    def _regions(self, image: Row) -> RegionArrays:
        rows = sorted(self._objects.get(image["image_id"], []), key=lambda row: (row["x1"], row["y1"]))
        rows = rows[: self._max_regions]
        features = np.zeros((len(rows), self.feature_dim), dtype=np.float16)
        class_probs = np.zeros((len(rows), len(self.classes)), dtype=np.float16)
        boxes = np.zeros((len(rows), 4), dtype=np.float32)
        for number, row in enumerate(rows):
            x1, x2 = row["x1"] / image["width"], row["x2"] / image["width"]
            y1, y2 = row["y1"] / image["height"], row["y2"] / image["height"]
            boxes[number] = np.clip([x1, y1, x2, y2], 0, 1)
            for word in object_words(row):
                features[number, self.words.index(word)] = 1
            features[number, len(self.words) :] = [x2 - x1, y2 - y1, (x1 + x2) / 2, (y1 + y2) / 2]
            class_probs[number, self.classes.index(row["category"])] = 1
        scores = np.ones(len(rows), dtype=np.float32)
        return RegionArrays(features=features, boxes=boxes, class_probs=class_probs, scores=scores)
