"""Untrusted images are checked before they are decoded."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from vlp_models.errors import DataError
from vlp_models.serving.images import check_image, check_images, open_image


def png(width: int = 8, height: int = 6) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG whose header promises 100,000 x 100,000 pixels and whose body is a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def test_every_form_gives_the_same_image(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png())
    text = base64.b64encode(png()).decode()
    array = np.asarray(Image.open(path))
    noise = np.random.default_rng(1).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.bmp")
    longer = base64.b64encode((tmp_path / "noise.bmp").read_bytes()).decode()
    assert 255 < len(longer) < 1024 and np.array_equal(np.asarray(open_image(longer)), noise), "as short as a path"
    forms = [str(path), path, png(), text, f"data:image/png;base64,{text}", array, array.tolist()]
    for form in forms:
        image = open_image(form)
        assert (image.mode, image.size) == ("RGB", (8, 6))
        assert np.array_equal(np.asarray(image), array)


@pytest.mark.parametrize("untrusted", [False, True])
def test_base64_is_read_as_clients_write_it(untrusted: bool) -> None:
    data = png(24, 20)
    plain, lines = base64.b64encode(data).decode(), base64.encodebytes(data).decode()
    url_safe = base64.urlsafe_b64encode(data).decode()
    assert {"-", "_", "="} <= set(url_safe), "the image has every character that differs"
    forms = {
        "final newline": f"{plain}\n",
        "leading space": f" {plain}",
        "MIME lines": lines,
        "CRLF": lines.replace("\n", "\r\n"),
        "URL-safe": url_safe,
        "no padding": url_safe.rstrip("="),
        "padding on its own line": plain.rstrip("=") + "\n=\n" * (len(plain) - len(plain.rstrip("="))),
        "URI": f"data:image/png;base64,{plain}",
        "URI in capitals": f"DATA:image/png;BASE64,{plain}",
        "URI in lines": f"\ndata:image/png;base64,\n{lines}",
        "URI, URL-safe": f"Data:image/png;charset=utf-8;base64,{url_safe}",
        "URI, percent-encoded": f"data:image/png;base64,{quote(plain, safe='')}",
    }
    expected = np.asarray(open_image(data))
    for name, text in forms.items():
        for value in (text, text.encode(), bytearray(text.encode()), np.str_(text), memoryview(text.encode())):
            assert np.array_equal(np.asarray(check_image(value, untrusted=untrusted).open()), expected), name
    pair = np.array([plain.encode(), lines.encode()])
    assert len(check_images(pair, 2, untrusted=untrusted)) == 2
    for broken in (plain[: len(plain) // 4 * 2 + 1], f"data:image/png;base64,{plain[:41]}", lines.replace("\n", "*")):
        for value in (broken, broken.encode()):
            with pytest.raises(DataError, match=r"base64|not a readable image"):
                check_image(value, untrusted=untrusted).open()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"not an image at all", "not a readable image"),
        (png()[:60], "not a readable image"),
        (bomb(), r"100000x100000|limit|exceeds"),
        ("nowhere/to/be/found.png", "neither a file nor a base64 image"),
        ("." * 300, "neither a file nor a base64 image"),
        ("data:image/png;base64,%%%", "not valid base64"),
        (np.zeros((4, 4, 7), np.uint8), "an image array"),
        (np.full((4, 4, 3), 300), "integers 0 to 255"),
        (3.5, "found float"),
    ],
)
def test_invalid_input_is_an_error_that_names_it(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_image(value)


NO_IMAGES: dict[str, tuple[list[Any], str]] = {
    "numbers and a text": ([0] * 2000 + ["x" * 2000], "integers 0 to 255; found a list of int, str"),
    "a text as a channel": ([[[0, 0, "x" * 2000]] * 40] * 40, "integers 0 to 255; found a list of int, str"),
    "a truth value": ([[[0, 0, True]] * 8] * 8, "integers 0 to 255; found a list of bool, int"),
    "fractions": ([[[0.5] * 3] * 8] * 8, "integers 0 to 255; found a list of float"),
    "arrays of fractions": ([np.zeros((8, 3))] * 8, "integers 0 to 255; found a list of ndarray"),
    "a list next to a number": ([0, [0]], "integers 0 to 255; found a list of int, list"),
    "four lists deep": ([[[[0]]]], "lists that are nested more deeply"),
    "two hundred lists deep": (json.loads("[" * 200 + '"x"' + "]" * 200), "lists that are nested more deeply"),
    "too many pixels": ([[0] * 20_000] * 10_000, "at most 50,000,000 pixels; found more"),
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_a_list_that_is_no_image_is_refused_before_an_array_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an array of texts every element has the width of the longest one."""
    value, message = NO_IMAGES[name]
    monkeypatch.setattr(np, "asarray", lambda _: pytest.fail("an array was made"))
    with pytest.raises(DataError, match=message):
        check_image(value, untrusted=True).open()


def test_lists_of_other_forms() -> None:
    for value, message in (
        ([[[0] * 3] * 8, [[0] * 3] * 7], "found lists of different lengths"),
        ([[[300] * 3] * 8] * 8, "integers 0 to 255; found int64"),
        ([0] * 300, r"must be \[H, W, 3\] or \[H, W\]"),
    ):
        with pytest.raises(DataError, match=message):
            check_image(value, untrusted=True).open()
    array = np.asarray(Image.open(io.BytesIO(png())))
    for same in (list(array), [tuple(map(tuple, row)) for row in array.tolist()]):
        assert np.array_equal(np.asarray(open_image(same)), array)


def test_an_image_of_pillow_is_checked_as_a_file_is() -> None:
    file = io.BytesIO(png(64, 64))
    assert open_image(Image.open(file)).size == (64, 64)
    animation = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:])
    bilevel, closed = io.BytesIO(), Image.new("RGB", (8, 8))
    Image.new("1", (8000, 7000)).save(bilevel, "PNG")
    closed.close()
    for image, message in (
        (Image.open(io.BytesIO(file.getvalue()[:600])), r"the image: not a readable image \(damaged or cut short"),
        (Image.open(animation), "the image: not a readable image .an animation"),
        (Image.open(bilevel), r"8000x7000 is 56,000,000 pixels; the limit is 50,000,000"),
        (closed, "the image: not a readable image"),
        (Image.new("La", (8, 8)), "the image: not a readable image"),
        (Image.new("RGB", (3, 8)), "the image: 3x8 pixels; an image needs at least 4 per side"),
    ):
        with pytest.raises(DataError, match=message):
            open_image(image)
    assert open_image(Image.open(animation).copy()).size == (8, 8), "a frame"


@pytest.mark.parametrize("root", [False, True])
def test_request_opens_paths_only_below_the_root_and_reveals_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside.png"
    inside.mkdir()
    for path in (inside / "a.png", outside):
        path.write_bytes(png())
    (inside / "words.txt").write_text("not an image")
    (inside / "link.png").symlink_to(outside)
    (inside / "cut.png").write_bytes(png(64, 64)[:600])
    monkeypatch.chdir(inside)
    monkeypatch.delenv("VLP_IMAGE_ROOT", raising=False)
    if root:
        monkeypatch.setenv("VLP_IMAGE_ROOT", str(inside))
        for good in ("a.png", str(inside / "a.png")):
            assert check_image(good, untrusted=True).open().size == (8, 6)
    tried = [
        str(outside),
        "../outside.png",
        "nowhere.png",
        "words.txt",
        "link.png",
        "cut.png",
        "\ud800.png",
        "/etc/passwd",
        ".",
    ]
    answers = set()
    for text in tried if root else [*tried, "a.png", str(inside / "a.png")]:
        with pytest.raises(DataError) as caught:
            check_image(text, untrusted=True).open()
        answers.add(str(caught.value))
    assert len(answers) == 1
    for sent in (base64.b64encode(png()).decode(), np.zeros((4, 4, 3), np.uint8)):
        assert check_image(sent, untrusted=True).open().mode == "RGB"
    with pytest.raises(DataError) as caught:
        check_images([str(outside), str(outside)], 2, untrusted=True)
    assert str(caught.value) in answers


def test_paths_are_limited_to_the_image_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside.png"
    inside.mkdir()
    (inside / "a.png").write_bytes(png())
    outside.write_bytes(png())
    monkeypatch.setenv("VLP_IMAGE_ROOT", str(inside))
    assert open_image(inside / "a.png").size == (8, 6)
    with pytest.raises(DataError, match="outside VLP_IMAGE_ROOT"):
        open_image(inside / ".." / "outside.png")


def test_several_images_come_as_a_list(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png())
    array = np.asarray(Image.open(path))
    for value in (
        [str(path), array],
        (path.read_bytes(), str(path)),
        np.array([str(path)] * 2),
        np.array([str(path), array.tolist()], object),
        np.stack([array] * 2),
        [array.tolist()] * 2,
    ):
        assert [np.array_equal(np.asarray(one.open()), array) for one in check_images(value, 2)] == [True, True]
    assert len(check_images(array.tolist(), 1)) == 1
    for value, found in ((str(path), "str"), ([str(path)], "1"), ([str(path)] * 3, "3"), (array, "ndarray")):
        with pytest.raises(DataError, match=f"takes 2 images per request, as a list; found {found}"):
            check_images(value, 2)
    with pytest.raises(DataError, match="neither a file nor a base64 image"):
        check_images([str(path), "nowhere.png"], 2)
