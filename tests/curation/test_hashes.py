"""Image hashes: re-encoding keeps the perceptual hash, and different images have distant ones."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlp_models.curation.duplicates import search
from vlp_models.curation.duplicates.fingerprints import perceptual_hash
from vlp_models.curation.duplicates.hashes import hash_image
from vlp_models.curation.duplicates.search import PAIRS_BLOCK, HammingIndex
from vlp_models.data.images import ImageError


def picture(seed: int) -> Image.Image:
    """Smooth and random, 128 x 96."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize((128, 96), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def distance(a: int | None, b: int | None) -> int:
    assert a is not None
    assert b is not None
    return (a ^ b).bit_count()


def test_re_encoding_and_scaling_keep_the_perceptual_hash() -> None:
    apart = []
    for seed in range(40):
        image = picture(seed)
        own = perceptual_hash(image)
        assert own is not None and own.bit_count() == 32, "half of the bits are set"
        for quality, scale in ((85, 1.0), (60, 0.5), (50, 1.7)):
            size = (round(128 * scale), round(96 * scale))
            changed = Image.open(io.BytesIO(encoded(image.resize(size), "JPEG", quality=quality)))
            apart.append(distance(own, perceptual_hash(changed)))
    assert max(apart) <= 4
    hashes = [perceptual_hash(picture(seed)) for seed in range(40)]
    assert min(distance(a, b) for i, a in enumerate(hashes) for b in hashes[:i]) >= 12, "and others are far"


def test_pixel_hash_is_of_displayed_pixels_in_any_file_format() -> None:
    image = picture(1)
    png, bmp = (hash_image(encoded(image, form), 10**6) for form in ("PNG", "BMP"))
    assert png.sha256 != bmp.sha256
    assert png.pixels == bmp.pixels and png.perceptual == bmp.perceptual
    exif = Image.Exif()
    exif[0x0112] = 6  # display rotated by 90 degrees
    turned = hash_image(encoded(image.rotate(90, expand=True), "PNG", exif=exif), 10**6)
    assert turned.pixels == png.pixels
    assert hash_image(encoded(picture(2), "PNG"), 10**6).pixels != png.pixels


def test_uniform_image_has_no_perceptual_hash() -> None:
    assert perceptual_hash(Image.new("RGB", (50, 50), "red")) is None
    clear = Image.new("RGBA", (50, 50), (255, 0, 0, 0))
    clear.putpixel((3, 3), (0, 255, 0, 0))
    assert perceptual_hash(clear) is None, "transparent pixels do not count"


@pytest.mark.parametrize("size", [(16, 2400), (3100, 20), (1, 500)])
def test_a_narrow_image_has_no_keypoints(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    hashes = hash_image(encoded(Image.fromarray(noise), "PNG"), 10**6, keypoints=True, held_out=True)
    assert (hashes.width, hashes.height) == size
    assert len(hashes.fingerprint.keypoints) == 0 == len(hashes.fingerprint.mirrored)


def test_a_side_that_is_too_short_is_found_before_the_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.new("L", (1, 5000)), "PNG")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="1x5000 pixels; the shorter side must have at least 16") as caught:
        hash_image(content, 10**6, min_side=16)
    assert caught.value.rule == "image_side"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8), st.integers(0, 2**32), st.booleans())
def test_hamming_index_equals_brute_force(radius: int, seed: int, clustered: bool) -> None:
    rng = random.Random(seed)
    held = [rng.getrandbits(64) for _ in range(30)]
    if clustered:
        held = [held[0] ^ (1 << rng.randrange(64)) ^ (1 << rng.randrange(64)) for _ in range(30)]
    queries = [h ^ sum(1 << b for b in rng.sample(range(64), rng.randrange(0, 10))) for h in rng.choices(held, k=30)]
    index = HammingIndex(np.array(held, np.uint64), radius)
    found = [
        (int(q), int(h)) for qs, hs in index.pairs(np.array(queries, np.uint64)) for q, h in zip(qs, hs, strict=True)
    ]
    expected = [(i, j) for i, q in enumerate(queries) for j, h in enumerate(held) if (q ^ h).bit_count() <= radius]
    assert sorted(found) == expected, "each pair once"


def test_blocks_bound_the_candidates_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PAIRS_BLOCK", 7)
    same = np.full(20, 5, np.uint64)
    pairs = list(HammingIndex(same, 0).pairs(same))
    assert PAIRS_BLOCK > 7 and len(pairs) == 20, "one query's twenty candidates at a time"
    assert sum(len(queries) for queries, _ in pairs) == 400
