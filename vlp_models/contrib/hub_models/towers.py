"""What the towers of both libraries have in common: the layout of a text, and how an image is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.data.bert_folder import TOKENIZER
from vlp_models.data.tokenizer import read_pretrained
from vlp_models.errors import CheckpointError, DataError

SENTENCEPIECE = "spiece.model"


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """How a text tower reads a text.

    vocab_size  rows of the word embeddings
    length      tokens, at most
    has_start   whether a text begins with [CLS]
    is_padded   whether each text is filled up to `length`, and the padding is read
    end_id      the token whose state is the text's; None: the last place, or the highest id
    """

    vocab_size: int
    length: int
    has_start: bool
    is_padded: bool
    end_id: int | None


def image_input(
    file: Path, *, size: Any, crop: Any, filter_name: Any, mean: Any, std: Any, rounding: str
) -> dict[str, Any]:
    """Return the fields of `PixelInput` for a preprocessing; crop: side of the center crop, None without.

    Args:
        file: that describes it, for messages.
        size: height and width, or the length of the shorter side.

    Raises:
        CheckpointError: it is one that pixels of a batch are not prepared by.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if isinstance(size, int) and crop is None:
        raise CheckpointError(f"{file}: resizes the shorter side without a center crop; images would differ in size")
    if crop is not None and crop != (height, width):
        raise CheckpointError(
            f"{file}: resizes to {height} x {width} and crops {crop[0]} x {crop[1]}; only equal sizes are supported"
        )
    if filter_name not in ("bicubic", "bilinear"):
        raise CheckpointError(f"{file}: resizes by {filter_name}; bicubic and bilinear are supported")
    if len(mean) != 3 or len(std) != 3:
        raise CheckpointError(f"{file}: normalizes {len(mean)} channels; expected RGB")
    return {
        "height": height,
        "width": width,
        "resize": "crop" if isinstance(size, int) else "squash",
        "rounding": rounding,
        "interpolation": filter_name,
        "mean": [float(value) for value in mean],
        "std": [float(value) for value in std],
    }


def read_pad_id(folder: Path) -> int:
    """Return the id of the padding of the folder's tokenizer.

    Raises:
        DataError: it has no tokenizer.json, or no padding.
    """
    if (folder / SENTENCEPIECE).is_file() and not (folder / TOKENIZER).is_file():
        raise DataError(
            f"{folder}: has {SENTENCEPIECE} but no {TOKENIZER}, and only the latter is read; copy the {TOKENIZER} of "
            "the same model into it, or write one as docs/guides/two-towers.md shows"
        )
    return read_pretrained(folder).pad_id
