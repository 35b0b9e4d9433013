"""Image files as tensors, and single-threaded execution for reproducible features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vlp_models.data.images import FORMATS, to_upright_rgb
from vlp_models.errors import DataError


def read_image(path: Path, width: int, height: int) -> Tensor:
    """Decode an image of known size to uint8 [3, H, W], RGB.

    The header must still have the size that validation found, so nothing larger is ever decoded.

    Raises:
        DataError: missing, damaged, or of another size.
    """
    try:
        # Only these formats, so that none of Pillow's other decoders reads an untrusted file.
        with Image.open(path, formats=sorted(set(FORMATS.values()))) as image:
            # The header may give the size before the EXIF rotation.
            upright = to_upright_rgb(image) if sorted(image.size) == sorted((width, height)) else image
            if upright.size != (width, height):
                raise DataError(
                    f"{path}: {upright.width}x{upright.height} pixels, but {width}x{height} when it was validated; "
                    "run `dvc repro validate` again"
                )
            return to_tensor(upright)
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise anything on hostile files
        raise DataError(f"{path}: {error}; it was readable when validated: `dvc repro validate`") from None


def to_tensor(image: Image.Image) -> Tensor:
    """Convert an image to uint8 [3, H, W], RGB."""
    # (H, W, 3) -> (3, H, W)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one CPU thread, so that sums do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
