"""A file is an image only if its header says so, its name agrees, its size is bearable and all of it is there."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from vlp_models.curation.duplicates.hashes import hash_image_file
from vlp_models.data.images import ImageError

LIMIT = 50_000_000


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and ends where its pixels should begin."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    checked = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + checked + struct.pack(">I", 999) + b"IDAT"


def photo(path: Path, size: tuple[int, int] = (64, 48), format: str = "JPEG") -> Path:
    Image.effect_noise(size, 80).convert("RGB").save(path, format)
    return path


@pytest.mark.parametrize(("name", "format"), [("a.jpg", "JPEG"), ("a.JPEG", "JPEG"), ("a.png", "PNG"), ("a", "WEBP")])
def test_good_image(tmp_path: Path, name: str, format: str) -> None:
    path = photo(tmp_path / name, format=format)
    info = hash_image_file(path, LIMIT)
    assert (info.width, info.height, info.format) == (64, 48, format)
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
        "mislabelled.png": whole,
        "bomb.png": png_header(8_000, 8_000),
        "pillows-bomb.png": png_header(60_000, 60_000),
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
        ("scan.tiff", "image_readable", "a TIFF, which is not supported; save it as one of JPEG, PNG, WEBP, GIF or BMP"),
        ("of-a-mac.jpg", "image_readable", "a TIFF, which is not supported"),
        ("of-a-phone.jpg", "image_readable", "a HEIC, which is not supported; save it as one of JPEG, PNG"),
        ("mislabelled.png", "image_format", "named .png, but contains JPEG"),
        ("bomb.png", "image_not_a_bomb", "8000x8000 is 64,000,000 pixels"),
        ("pillows-bomb.png", "image_not_a_bomb", "decompression bomb"),
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


def test_bomb_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = photo(tmp_path / "a.png", (100, 100), "PNG")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="10,000 pixels"):
        hash_image_file(path, 9_999)
