"""Image files as tensors, and which of them share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlp_models.data.images import FORMATS, to_upright_rgb
from vlp_models.errors import DataError


def read_image(path: Path, width: int, height: int) -> Tensor:
    """Decodes an image whose size is known.

    The header must still say what validation found, so nothing larger than that is ever decoded.

    Returns:
        uint8 [3, H, W], RGB.

    Raises:
        DataError: missing, damaged, or not of this size.
    """
    try:
        with Image.open(path, formats=sorted(set(FORMATS.values()))) as image:
            # the header's size may be that of a picture that lies on its side
            seen = to_upright_rgb(image) if sorted(image.size) == sorted((width, height)) else image
            if seen.size != (width, height):
                raise DataError(
                    f"{path}: {seen.width}x{seen.height} pixels, but {width}x{height} when it was validated; "
                    "run `dvc repro validate` again"
                )
            return to_tensor(seen)
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise anything on hostile files
        raise DataError(f"{path}: {error}; it was readable when validated: `dvc repro validate`") from None


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 [3, H, W], RGB."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def batches_by_size(sizes: Sequence[tuple[int, int]], batch_size: int) -> Iterator[list[int]]:
    """Positions in batches of one size each: padding would reach over the borders of the smaller images."""
    order = sorted(range(len(sizes)), key=lambda number: sizes[number])
    for _, group in groupby(order, key=lambda number: sizes[number]):
        numbers = list(group)
        for start in range(0, len(numbers), batch_size):
            yield numbers[start : start + batch_size]


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
