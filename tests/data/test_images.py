"""Image files: checks on format, size and completeness, and the upright RGB image."""

from __future__ import annotations

import hashlib
import io
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from png_files import SIGNATURE, chunk, png_header

from vlp_models.curation.duplicates.hashes import hash_image, hash_image_file
from vlp_models.data.images import MAX_SCANS, SCAN, ImageError, is_misnamed, read_file_inside, to_upright_rgb
from vlp_models.data.pixels import decode
from vlp_models.serving.images import open_image
from vlp_models.vision.image_io import read_image

LIMIT = 50_000_000


def photo(path: Path, size: tuple[int, int] = (64, 48), format: str = "JPEG") -> Path:
    Image.effect_noise(size, 80).convert("RGB").save(path, format)
    return path


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.jpg", "JPEG"),
        ("a.JPEG", "JPEG"),
        ("a.png", "PNG"),
        ("a", "WEBP"),
        ("misnamed.png", "JPEG"),
        ("misnamed.jpg", "PNG"),
        ("misnamed.JPG", "WEBP"),
        ("misnamed.jpeg", "GIF"),
    ],
)
def test_good_image(tmp_path: Path, name: str, format: str) -> None:
    path = photo(tmp_path / name, format=format)
    info = hash_image_file(path, LIMIT)
    assert (info.width, info.height, info.format) == (64, 48, format)
    assert is_misnamed(path, info.format) == name.startswith("misnamed")
    assert open_image(str(path)).size == (64, 48)
    assert info.sha256.hex() == hashlib.sha256(path.read_bytes()).hexdigest()


def broken(directory: Path) -> dict[str, Path]:
    whole = photo(directory / "whole.jpg", (400, 300)).read_bytes()
    whole_png = photo(directory / "whole.png", (400, 300), "PNG").read_bytes()
    contents = {
        "empty.jpg": b"",
        "text.jpg": b"not an image at all",
        "scan.tiff": photo(directory / "whole.tiff", format="TIFF").read_bytes(),
        "of-a-mac.jpg": b"MM\0*\0\0\0\x08",
        "of-a-phone.jpg": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        "bomb.png": png_header(8_000, 8_000),
        "pillows-bomb.png": png_header(60_000, 60_000),
        "scans.jpg": whole[:-2] + whole[whole.rindex(SCAN) : -2] * MAX_SCANS + whole[-2:],
        "truncated.jpg": whole[: len(whole) // 2],
        "truncated.png": whole_png[: len(whole_png) // 2],
        "header-only.png": png_header(64, 64),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return {name: directory / name for name in [*contents, "missing.jpg", "."]}


@pytest.mark.parametrize(
    ("name", "rule", "reason"),
    [
        ("missing.jpg", "image_present", "no such file"),
        (".", "image_present", "directory"),
        ("empty.jpg", "image_not_empty", "empty"),
        ("text.jpg", "image_readable", "not an im"),
        (
            "scan.tiff",
            "image_readable",
            "a TIFF, which is not supported; save it as one of JPEG, PNG, WEBP, GIF or BMP",
        ),
        ("of-a-mac.jpg", "image_readable", "a TIFF, which is not supported"),
        ("of-a-phone.jpg", "image_readable", "a HEIC, which is not supported; save it as one of JPEG, PNG"),
        ("bomb.png", "image_not_a_bomb", "8000x8000 is 64,000,000 pixels"),
        ("pillows-bomb.png", "image_not_a_bomb", "decompression bomb"),
        ("scans.jpg", "image_not_a_bomb", "a JPEG with 501 scans, 500 are allowed; save it again"),
        ("truncated.jpg", "image_decodes", "truncated"),
        ("truncated.png", "image_decodes", "truncated"),
        ("header-only.png", "image_decodes", "damaged"),
    ],
)
def test_broken_image(tmp_path: Path, name: str, rule: str, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        hash_image_file(broken(tmp_path)[name], LIMIT)
    assert caught.value.rule == rule
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "a Git LFS pointer instead of the file; run `git",
        ),
        (b"/annex/objects/SHA256E-s9--0.jpg\n", "a git-annex pointer instead of the file; run `git annex get`"),
        (
            b"\n<!DOCTYPE html><html>",
            "an HTML page instead of the file, such as a server's error or login page; get the",
        ),
        (b"\0\5\x16\7\0\2\0\0Mac OS X", "metadata of macOS (a `._` file) instead of the file; delete it"),
        (b"\xff\x0a\xfa\x7f", "a JPEG XL, which is not supported; save it as one of JPEG, PNG"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000, which is not supported"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG or another XML file, which is not supported"),
        (b"\0\0\0\x18ftypcrx ", "a video or a camera's raw file, which is not supported"),
    ],
)
def test_what_is_in_the_place_of_an_image_is_named(content: bytes, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        hash_image(content, LIMIT)
    assert caught.value.rule == "image_readable" and reason in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (b"zTXt", b"Comment\0\0" + zlib.compress(b"a" * 2**21)),
        (b"iCCP", b"profile\0\0" + zlib.compress(bytes(2**21))),
    ],
)
def test_a_png_with_a_large_text_or_color_profile_is_read_everywhere(tmp_path: Path, kind: bytes, data: bytes) -> None:
    whole = photo(tmp_path / "whole.png", format="PNG").read_bytes()
    end = len(SIGNATURE) + 25  # of IHDR
    path = tmp_path / "large.png"
    path.write_bytes(whole[:end] + chunk(kind, data) + whole[end:])
    info = hash_image_file(path, LIMIT)
    assert info.pixels == hash_image_file(tmp_path / "whole.png", LIMIT).pixels
    assert read_image(path, 64, 48).equal(read_image(tmp_path / "whole.png", 64, 48))
    assert open_image(str(path)).size == (64, 48)


def test_bomb_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = photo(tmp_path / "a.png", (100, 100), "PNG")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="10,000 pixels"):
        hash_image_file(path, 9_999)


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
def test_every_reader_applies_exif_orientation(tmp_path: Path, orientation: int) -> None:
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
    hashes = hash_image(path.read_bytes(), 10**6)
    assert (hashes.height, hashes.width) == expected.shape[:2]
    assert hashes.pixels == hash_image(file_of(Image.fromarray(expected)), 10**6).pixels


def test_orientation_is_applied_once() -> None:
    with Image.open(io.BytesIO(lying(6))) as image:
        once = to_upright_rgb(image)
    assert np.array_equal(to_upright_rgb(once), once) and np.array_equal(ImageOps.exif_transpose(once), once)


def test_damaged_exif_data_are_ignored() -> None:
    content = file_of(UPRIGHT, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xffgarbage", quality=95)
    assert decode(content, "").size == UPRIGHT.size


def test_sixteen_bit_gray_is_scaled_not_truncated() -> None:
    levels = np.array([[0, 128, 257, 32_768, 65_535]] * 4, np.uint16)
    seen = np.asarray(decode(file_of(Image.fromarray(levels)), ""))
    assert seen.shape == (4, 5, 3) and seen[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def png_of_16_bits(rows: np.ndarray) -> bytes:
    """Pillow writes none of several channels. rows: uint16 [H, W, 3 or 4]."""

    height, width, channels = rows.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    return SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [3, 4])
def test_sixteen_bit_color_keeps_the_upper_eight_bits(channels: int) -> None:
    levels = np.zeros((4, 5, channels), np.uint16)
    levels[..., 0], levels[..., 1], levels[..., 2] = [0, 256, 32_768, 51_200, 65_535], 10 * 257, 250 * 257
    seen = np.asarray(decode(png_of_16_bits(levels), ""))
    assert seen.shape == (4, 5, 3) and seen[0, :, 0].tolist() == [0, 1, 128, 200, 255]
    assert (seen[..., 1:] == (10, 250)).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_image_keeps_its_colors(tmp_path: Path, mode: str) -> None:
    """What lies behind it is not known, so how clear it is plays no part."""
    path, colors = tmp_path / "clear.png", UPRIGHT if mode == "RGBA" else UPRIGHT.convert("L")
    image = colors.convert(mode)
    image.putalpha(Image.fromarray(np.random.default_rng(4).integers(0, 256, (20, 30), np.uint8)))
    image.save(path)
    expected = np.asarray(colors.convert("RGB"))
    assert np.array_equal(decode(path.read_bytes(), ""), expected)
    assert np.array_equal(open_image(path), expected)
    assert np.array_equal(read_image(path, 30, 20).permute(1, 2, 0).numpy(), expected)


def test_cmyk_keeps_its_colors() -> None:
    colors = Image.new("RGB", (16, 16), (200, 40, 90)).convert("CMYK")
    seen = np.asarray(decode(file_of(colors, "JPEG", quality=100), ""))
    assert np.abs(seen.astype(int) - (200, 40, 90)).max() <= 3


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animation_is_refused(tmp_path: Path, form: str) -> None:
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "blue")]
    path = tmp_path / f"moving.{form.lower()}"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match="an animation") as caught:
        hash_image_file(path, 10**6)
    assert caught.value.rule == "image_still"
    frames[0].save(path)
    assert hash_image_file(path, 10**6).width == 20, "one frame is a picture"


def test_file_inside_a_folder_is_found_by_a_name_that_differs_in_form(tmp_path: Path) -> None:
    (tmp_path / "Sub").mkdir()
    decomposed = unicodedata.normalize("NFD", "é.jpg")
    for name in (decomposed, "Sub/A.JPG", "two.jpg", "TWO.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    assert read_file_inside(tmp_path, unicodedata.normalize("NFC", "é.jpg")) == decomposed.encode()
    assert read_file_inside(tmp_path, "sub\\a.jpg") == read_file_inside(tmp_path, "Sub/A.JPG") == b"Sub/A.JPG"
    assert read_file_inside(tmp_path, "two.jpg") == b"two.jpg", "the exact name comes first"
    (tmp_path / "link.jpg").symlink_to(tmp_path / "two.jpg")
    for name, rule in (("Two.jpg", "image_present"), ("..\\x.jpg", "path_inside"), ("LINK.jpg", "path_inside")):
        with pytest.raises(ImageError) as caught:
            read_file_inside(tmp_path, name)
        assert caught.value.rule == rule
