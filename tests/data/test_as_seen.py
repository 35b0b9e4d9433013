"""A picture is what people see: turned as its EXIF data says, once, and RGB of 8 bits whatever the file holds."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from vlp_models.curation.duplicates.hashes import hash_image, hash_image_file
from vlp_models.data.images import ImageError, to_upright_rgb
from vlp_models.data.pixels import decode
from vlp_models.serving.images import open_image
from vlp_models.vision.image_io import read_image

UPRIGHT = Image.fromarray(np.random.default_rng(3).integers(0, 256, (20, 30, 3), np.uint8))


def file_of(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def lying(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(UPRIGHT, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_way_in_turns_a_picture_as_its_exif_data_says(tmp_path: Path, orientation: int) -> None:
    """Against Pillow's own `exif_transpose`."""
    path = tmp_path / "lying.png"
    path.write_bytes(lying(orientation))
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    info = hash_image_file(path, 10**6)
    assert (info.height, info.width) == expected.shape[:2]
    assert np.array_equal(decode(path.read_bytes(), ""), expected)
    assert np.array_equal(open_image(path), expected)
    assert np.array_equal(read_image(path, info.width, info.height).permute(1, 2, 0).numpy(), expected)
    hashes = hash_image(path.read_bytes(), ".png", 10**6)
    assert (hashes.height, hashes.width) == expected.shape[:2]
    assert hashes.pixels == hash_image(file_of(Image.fromarray(expected)), ".png", 10**6).pixels


def test_a_picture_is_turned_once() -> None:
    with Image.open(io.BytesIO(lying(6))) as image:
        once = to_upright_rgb(image)
    assert np.array_equal(to_upright_rgb(once), once) and np.array_equal(ImageOps.exif_transpose(once), once)


def test_damaged_exif_data_cost_nothing() -> None:
    content = file_of(UPRIGHT, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xffgarbage", quality=95)
    assert decode(content, "").size == UPRIGHT.size


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    levels = np.array([[0, 128, 257, 32_768, 65_535]] * 4, np.uint16)
    seen = np.asarray(decode(file_of(Image.fromarray(levels)), ""))
    assert seen.shape == (4, 5, 3) and seen[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def png_of_16_bits(rows: np.ndarray) -> bytes:
    """Pillow writes none of several channels. rows: uint16 [H, W, 3 or 4]."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = rows.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [3, 4])
def test_sixteen_bits_of_colour_are_the_upper_eight(channels: int) -> None:
    levels = np.zeros((4, 5, channels), np.uint16)
    levels[..., 0], levels[..., 1], levels[..., 2] = [0, 256, 32_768, 51_200, 65_535], 10 * 257, 250 * 257
    seen = np.asarray(decode(png_of_16_bits(levels), ""))
    assert seen.shape == (4, 5, 3) and seen[0, :, 0].tolist() == [0, 1, 128, 200, 255]
    assert (seen[..., 1:] == (10, 250)).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_picture_that_may_be_seen_through_keeps_its_colours(tmp_path: Path, mode: str) -> None:
    """What lies behind it is not known, so how clear it is plays no part."""
    path, colours = tmp_path / "clear.png", UPRIGHT if mode == "RGBA" else UPRIGHT.convert("L")
    image = colours.convert(mode)
    image.putalpha(Image.fromarray(np.random.default_rng(4).integers(0, 256, (20, 30), np.uint8)))
    image.save(path)
    expected = np.asarray(colours.convert("RGB"))
    assert np.array_equal(decode(path.read_bytes(), ""), expected)
    assert np.array_equal(open_image(path), expected)
    assert np.array_equal(read_image(path, 30, 20).permute(1, 2, 0).numpy(), expected)


def test_cmyk_has_its_colours() -> None:
    colours = Image.new("RGB", (16, 16), (200, 40, 90)).convert("CMYK")
    seen = np.asarray(decode(file_of(colours, "JPEG", quality=100), ""))
    assert np.abs(seen.astype(int) - (200, 40, 90)).max() <= 3


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_no_picture(tmp_path: Path, form: str) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    path = tmp_path / f"moving.{form.lower()}"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match="an animation") as caught:
        hash_image_file(path, 10**6)
    assert caught.value.rule == "image_still"
    frames[0].save(path)
    assert hash_image_file(path, 10**6).width == 20, "one frame is a picture"
