"""A photo that somebody dropped: checked by its header before anything is decoded, upright, and drawn on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vlp_models.data.images import ImageError
from vlp_models.errors import DataError
from vlp_models.serving.images import MAX_BYTES, checked

SHOWN = 720  # pixels of a photo's longer side on the page
GIVEN, WEIGHED = (60, 60, 60), (255, 120, 0)
Box = Sequence[float]  # x1, y1, x2, y2 as fractions of width and height


def open_photo(path: str | Path) -> Image.Image:
    """The photo as RGB, turned as its EXIF says (data/images.py), by the predictor's own rule (serving/images.py).

    Raises:
        DataError: what `checked` refuses, or larger than `MAX_BYTES`. It names the file without its folder, which is
            the server's business.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path.name}: larger than {MAX_BYTES >> 20} MB")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path.name}: can't be read ({error.strerror})") from None
    try:
        return checked(content, path.suffix)
    except ImageError as error:
        raise DataError(f"{path.name}: {error}") from None


def shown(photo: Image.Image, longest: int = SHOWN) -> Image.Image:
    """A copy with a longer side of at most `longest` pixels; small ones are enlarged by whole factors."""
    if max(photo.size) <= longest:
        factor = longest // max(photo.size)
        return photo.resize((photo.width * factor, photo.height * factor), Image.Resampling.BICUBIC)
    copy = photo.copy()
    copy.thumbnail((longest, longest))
    return copy


def with_boxes(photo: Image.Image, boxes: Sequence[Box], weighed: Collection[int] = ()) -> Image.Image:
    """The photo as the page shows it: every box thin, those whose numbers are in `weighed` thick and numbered from 1 in
    its order."""
    drawn = shown(photo)
    draw = ImageDraw.Draw(drawn)
    thick, font = max(3, max(drawn.size) // 200), ImageFont.load_default(max(14, max(drawn.size) // 36))
    corners = [tuple(round(v * s) for v, s in zip(box, (*drawn.size, *drawn.size), strict=True)) for box in boxes]
    for box in corners:
        draw.rectangle(_within(box, drawn.size), outline=GIVEN, width=1)
    for place, number in reversed(list(enumerate(weighed, start=1))):  # the weightiest on top
        left, top, right, bottom = _within(corners[number], drawn.size)
        draw.rectangle((left, top, right, bottom), outline=WEIGHED, width=thick)
        label = draw.textbbox((left + thick, top + thick), str(place), font=font)
        draw.rectangle((label[0] - 2, label[1] - 2, label[2] + 2, label[3] + 2), fill=WEIGHED)
        draw.text((left + thick, top + thick), str(place), fill=(0, 0, 0), font=font)
    return drawn


def _within(box: Sequence[int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """At least a pixel wide and high, inside the picture: Pillow refuses corners that are crossed."""
    left, top = min(max(box[0], 0), size[0] - 1), min(max(box[1], 0), size[1] - 1)
    return left, top, max(left, min(box[2], size[0]) - 1), max(top, min(box[3], size[1]) - 1)
