"""Image files as tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlp_models.data.images import FORMATS
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
            if image.size != (width, height):
                raise DataError(
                    f"{path}: {image.width}x{image.height} pixels, but {width}x{height} when it was validated; "
                    "run `dvc repro validate` again"
                )
            return to_tensor(image)
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise anything on hostile files
        raise DataError(f"{path}: {error}; it was readable when validated: `dvc repro validate`") from None


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 [3, H, W], RGB."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
