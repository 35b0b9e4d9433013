"""Photos of the demo page: uploads are checked and turned upright, and boxes are drawn."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.contrib.demo_page import app
from vlp_models.contrib.demo_page.photos import BOX_COLOR, IMPORTANT_COLOR, draw_boxes, open_photo, scale_for_page
from vlp_models.errors import DataError, MissingToolError

ORIENTATION = 0x0112  # EXIF


def bomb() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 9_000, 9_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_photo_is_turned_upright_and_converted_to_rgb(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the camera was held on its side
    left_red = Image.new("RGB", (40, 20), "blue")
    left_red.paste((255, 0, 0), (0, 0, 20, 20))
    (tmp_path / "side.jpg").write_bytes(saved(left_red, "JPEG", exif=exif, quality=95))
    upright = open_photo(tmp_path / "side.jpg")
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5))[0] > 200 and upright.getpixel((10, 35))[2] > 200
    for mode, kind, name in (("CMYK", "JPEG", "c.jpg"), ("P", "GIF", "p.gif"), ("RGBA", "PNG", "a.PNG")):
        (tmp_path / name).write_bytes(saved(Image.new(mode, (LEAST_SIDE, LEAST_SIDE)), kind))
        assert open_photo(tmp_path / name).mode == "RGB"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("words.png", b"no image at all", "not an image"),
        ("empty.png", b"", "an empty file"),
        ("cut.png", saved(Image.effect_noise((64, 64), 9), "PNG")[:900], "damaged or cut short"),
        ("bomb.png", bomb(), "81,000,000 pixels"),
        ("icon.ico", saved(Image.new("RGB", (16, 16)), "ICO"), r"an icon \(.ico\), which is not supported"),
        ("dot.png", saved(Image.new("RGB", (1, 1)), "PNG"), "1x1 pixels; an image needs at least 4 per side"),
        ("line.bmp", saved(Image.new("RGB", (90, 3)), "BMP"), "90x3 pixels; an image needs at least 4 per side"),
    ],
)
def test_invalid_upload_is_an_error_without_its_folder(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_photo(tmp_path / name)
    assert str(caught.value).startswith(f"{name}: ") and str(tmp_path) not in str(caught.value)


def test_boxes_are_clipped_and_important_ones_are_thick() -> None:
    photo = Image.new("RGB", (100, 50), "white")
    drawn = draw_boxes(photo, [(0.5, 0.2, 0.9, 0.8), (0.0, 0.0, 1.0, 1.0), (0.3, 0.3, 0.3, 0.3)], [1])
    assert drawn.size == scale_for_page(photo).size == (700, 350) and photo.getpixel((0, 0)) == (255, 255, 255)
    assert drawn.getpixel((350, 175)) == BOX_COLOR and drawn.getpixel((2, 175)) == IMPORTANT_COLOR
    assert drawn.getpixel((697, 175)) == IMPORTANT_COLOR and drawn.getpixel((500, 175)) == (255, 255, 255)


def test_missing_gradio_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    install = r"`(uv )?pip install --no-deps --require-hashes -r requirements-photographs\.lock`"
    with pytest.raises(MissingToolError, match=f"install it with {install}"):
        app.check_installed()
