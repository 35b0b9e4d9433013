"""Region sources without a network: ground-truth objects as symbols, and a grid of image cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vlp_models.data.sample import RegionArrays
from vlp_models.vision.image_io import to_tensor
from vlp_models.vision.region_source import BACKGROUND, RegionSource, Row, object_words, quarantine_row

GEOMETRY = 4  # numbers of a symbol's feature: width, height, center x, center y, as fractions of the image
GRID = 4  # cells along each side of the grid
CELL_PIXELS = 8  # along each side of a cell


class SymbolSource(RegionSource):
    """Ground-truth objects as regions: the structured-representation input of NLVR (Suhr et al., 2017).

    Regions are ordered by their left edge. A feature marks the words of the object's category and attributes
    (`yellow square` -> yellow, square); its last four numbers are size and position. The class has probability 1.
    """

    detector_id = "boxes"

    def __init__(self, objects: Iterable[Mapping[str, Any]], max_regions: int) -> None:
        self._objects: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for item in objects:
            self._objects[item["image_id"]].append(item)
        # The names that any object has: the columns of class probabilities and of features.
        categories, words = set[str](), set[str]()
        for rows in self._objects.values():
            for row in rows:
                categories.add(row["category"])
                words.update(object_words(row))
        self.classes = (BACKGROUND, *sorted(categories))
        self.words = tuple(sorted(words))
        self.feature_dim = len(self.words) + GEOMETRY
        self._max_regions = max_regions

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """Return regions and quarantine rows. An image with more than `max_regions` objects loses the rightmost ones
        and gets a quarantine row."""
        quarantine = []
        for image in images:
            count = len(self._objects.get(image["image_id"], []))
            if count > self._max_regions:
                reason = f"{count} objects, but features.max_regions is {self._max_regions}"
                quarantine.append(quarantine_row(image, "max_regions", reason, str(image.get("provenance", ""))))
        regions = [self._regions(image) for image in images]
        advance(len(images))
        return regions, quarantine

    def _regions(self, image: Row) -> RegionArrays:
        # From left to right; the upper one first of two with the same left edge.
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
            # The last `GEOMETRY` numbers: size and center
            features[number, len(self.words) :] = [x2 - x1, y2 - y1, (x1 + x2) / 2, (y1 + y2) / 2]
            class_probs[number, self.classes.index(row["category"])] = 1
        scores = np.ones(len(rows), dtype=np.float32)
        return RegionArrays(features=features, boxes=boxes, class_probs=class_probs, scores=scores)


class GridExtractor:
    """A grid over the image as 16 regions: needs no detector, boxes or weights.

    Each cell is scaled to 8 x 8 pixels, whose red, green and blue from -1 to 1 are its feature of 192 numbers. This is
    crude, but trains on a user's own pairs within a minute; switch to a backbone or a detector later.
    """

    detector_id = f"grid-{GRID}-{CELL_PIXELS}"
    classes: tuple[str, ...] = ()
    feature_dim = CELL_PIXELS * CELL_PIXELS * 3
    device = "cpu"

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        tensors = (to_tensor(image) if isinstance(image, Image.Image) else image for image in images)
        return [self._regions(tensor) for tensor in tensors]

    def _regions(self, pixels_3HW: Tensor) -> RegionArrays:
        side = GRID * CELL_PIXELS
        small = Image.fromarray(pixels_3HW.permute(1, 2, 0).numpy()).resize((side, side), Image.Resampling.BOX)
        # [rows, y, columns, x, 3] -> [rows, columns, y, x, 3] -> [cells, features]
        cells = np.asarray(small, np.float32).reshape(GRID, CELL_PIXELS, GRID, CELL_PIXELS, 3).transpose(0, 2, 1, 3, 4)
        features = cells.reshape(GRID * GRID, -1) / 127.5 - 1
        # (cells,): row and column of each cell, row by row.
        top, left = np.divmod(np.arange(GRID * GRID), GRID)
        return RegionArrays(
            features=features.astype(np.float16),
            boxes=(np.stack([left, top, left + 1, top + 1], axis=1) / GRID).astype(np.float32),
            class_probs=np.zeros((GRID * GRID, 0), np.float16),
            scores=np.ones(GRID * GRID, np.float32),
        )
