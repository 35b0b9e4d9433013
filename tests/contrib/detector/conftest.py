"""Eight small drawings, and a detector trained on them once."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw
from small_detector import train

from vlp_models.contrib.detector.checkpoint import Detector
from vlp_models.contrib.detector.training import LabeledImage, TrainingResult


@pytest.fixture(scope="session")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> list[LabeledImage]:
    """A red circle on the left and a blue square on the right, of varying position and size; two image sizes."""
    directory = tmp_path_factory.mktemp("drawings")
    rng = np.random.default_rng(0)
    images = []
    for number in range(8):
        width, height = (64, 64) if number % 2 else (80, 48)
        image = Image.new("RGB", (width, height), (200, 200, 200))
        pen = ImageDraw.Draw(image)
        boxes = []
        for left, color, shape in ((2, "red", pen.ellipse), (width // 2 + 2, "blue", pen.rectangle)):
            side = int(rng.integers(16, 27))
            x, y = left + int(rng.integers(0, 4)), int(rng.integers(2, height - side - 2))
            shape((x, y, x + side, y + side), fill=color)
            boxes.append([x, y, x + side + 1, y + side + 1])
        path = directory / f"{number}.png"
        image.save(path)
        images.append(
            LabeledImage(
                image_id=f"drawn/{number}",
                path=path,
                width=width,
                height=height,
                boxes=np.array(boxes, np.float32),
                labels=np.array([2, 1]),
                words=np.array([[0, 1, 1, 0], [1, 0, 0, 1]], np.float32),
            )
        )
    return images


@pytest.fixture(scope="session")
def trained(drawings: list[LabeledImage]) -> tuple[Detector, TrainingResult]:
    return train(drawings)
