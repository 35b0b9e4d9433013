"""Pixels: resizing, checks before decoding, and augmentation that does not depend on the process."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from png_files import png_header

from vlp_models.data.batch import Batch, Pixels
from vlp_models.data.inputs import InputReader, ModelInputs
from vlp_models.data.pixels import OPERATIONS, PixelInput, collate_pixels, decode, encode, fit, random_box
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.write import ImageRecord
from vlp_models.errors import DataError

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth, so that resizing it is no matter of single pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_squash_resizes_and_normalizes() -> None:
    image = picture(40, 30)
    wanted = PixelInput(height=30, width=40, mean=(0.5, 0.25, 0.0), std=(0.5, 0.5, 2.0))
    made = collate_pixels([image], wanted, [None])
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    expected = (values - torch.tensor([0.5, 0.25, 0.0])[:, None, None]) / torch.tensor([0.5, 0.5, 2.0])[:, None, None]
    torch.testing.assert_close(made.pixels_B3HW[0], expected)
    assert made.mask_BHW is None
    assert fit(image, PixelInput(height=10, width=10), None)[0].shape == (10, 10, 3)


def test_crop_takes_the_center() -> None:
    wide = Image.new("RGB", (90, 30), (255, 0, 0))
    wide.paste((0, 255, 0), (30, 0, 60, 30))
    pixels, mask, *_ = fit(wide, PixelInput(height=30, width=30, resize="crop"), None)
    assert mask.all() and (pixels == [0, 255, 0]).all()
    pixels, *_ = fit(picture(33, 57), PixelInput(height=16, width=24, resize="crop"), None)
    assert pixels.shape == (16, 24, 3)


@pytest.mark.parametrize("size", [(4, 60_000), (30_000, 7), (20, 4000)])
def test_only_the_window_of_a_strip_is_resized(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Resized as a whole to a side of 224 pixels, the first one would have 752 million pixels."""
    strip, wanted = picture(size[0], size[1]), PixelInput(height=16, width=24, resize="crop")
    with monkeypatch.context() as patch:
        patch.setattr("vlp_models.data.pixels.MAX_STRIP", float("inf"))
        whole = fit(strip, wanted, 7)
    areas, resized = [], Image.Image.resize

    def resize(image: Image.Image, size: tuple[int, int], *options: Any, **named: Any) -> Image.Image:
        areas.append(size[0] * size[1])
        return resized(image, size, *options, **named)

    monkeypatch.setattr(Image.Image, "resize", resize)
    found = fit(strip, wanted, 7)
    assert areas == [16 * 24]
    assert np.abs(found.pixels.astype(int) - whole.pixels).max() <= 2 and found.mask.all()
    assert np.array_equal(found.matrix, whole.matrix) and found.window == whole.window


def test_padding_is_masked_and_zero() -> None:
    images = [picture(40, 20), picture(20, 40, 1), picture(50, 50, 2)]
    made = collate_pixels(images, PixelInput(height=16, width=16, resize="pad"), [None] * 3)
    mask = made.mask_BHW
    assert mask is not None and mask.dtype == torch.bool
    assert mask.sum((1, 2)).tolist() == [128, 128, 256]
    assert mask[0, :8].all() and mask[1, :, :8].all()  # the picture is at the top and at the left
    assert not made.pixels_B3HW.permute(0, 2, 3, 1)[~mask].any()
    again = made.select(torch.tensor([1, 1]))
    assert again.mask_BHW is not None and torch.equal(again.mask_BHW, mask[[1, 1]])
    blank = made.blanked()
    assert blank.mask_BHW is not None and blank.mask_BHW.all() and not blank.pixels_B3HW.any()


def test_rand_augment_is_a_function_of_the_seed_and_keeps_the_size() -> None:
    image = picture(24, 16)
    wanted = PixelInput(height=16, width=24, augment=("rand_augment",), **PLAIN)
    seen = [collate_pixels([image], wanted, [draw]).pixels_B3HW for draw in range(40)]
    again = [collate_pixels([image], wanted, [draw]).pixels_B3HW for draw in range(40)]
    still = collate_pixels([image], wanted, [None]).pixels_B3HW
    assert all(torch.equal(one, other) for one, other in zip(seen, again, strict=True))
    kept = sum(torch.equal(pixels, still) for pixels in seen)
    assert 4 <= kept <= 22  # a quarter is unchanged, and some that "identity" and "autocontrast" process


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rand_augment_operation_changes_object_colors(name: str) -> None:
    """In a red and black image no green or blue appears, except for the gray fill."""
    red = Image.new("RGB", (32, 32))
    red.paste((200, 0, 0), (8, 8, 24, 24))
    for strength in (-1.0, 1.0):
        pixels = np.asarray(OPERATIONS[name](red, strength)).astype(int)
        assert pixels.shape == (32, 32, 3)
        assert (pixels[..., 1] == pixels[..., 2]).all() and (pixels[..., 0] > pixels[..., 1]).any()


def test_flip_mirrors_the_image() -> None:
    image = picture(32, 16)
    wanted = PixelInput(height=16, width=32, augment=("flip",))
    plain = fit(image, wanted, None)[0]
    turned = [np.array_equal(fit(image, wanted, draw)[0], plain[:, ::-1]) for draw in range(200)]
    same = [np.array_equal(fit(image, wanted, draw)[0], plain) for draw in range(200)]
    assert all(a != b for a, b in zip(turned, same, strict=True))
    assert 70 < sum(turned) < 130
    none = dataclasses.replace(wanted, augment=())
    assert all(np.array_equal(fit(image, none, draw)[0], plain) for draw in range(20))


def test_random_crops_stay_inside_and_keep_their_area() -> None:
    for draw in range(300):
        left, top, right, bottom = random_box(60, 37, (0.5, 0.8), np.random.default_rng(draw))
        assert 0 <= left < right <= 60 and 0 <= top < bottom <= 37
        assert 0.45 < (right - left) * (bottom - top) / (60 * 37) < 0.85
    assert random_box(100, 4, (1.0, 1.0), np.random.default_rng(0)) == (47, 0, 52, 4)  # no such crop fits: the middle


def test_encode_and_decode_are_lossless() -> None:
    image = picture(31, 17)
    assert np.array_equal(decode(encode(image), "x"), image)
    gray = Image.new("LA", (4, 4), (100, 3))
    assert np.array_equal(decode(encode(gray), "x"), np.full((4, 4, 3), 100))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "empty"),
        (b"no image at all", "not an image"),
        (encoded(picture(40, 40), "JPEG")[:-60], "damaged or cut short"),
        (png_header(40_000, 40_000), "pixels"),
    ],
)
def test_invalid_image_files_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(DataError, match=rf"a/1: .*{text}"):
        decode(data, "a/1")


def test_invalid_pixel_input_is_refused() -> None:
    with pytest.raises(ValueError, match="0x8"):
        PixelInput(height=8, width=0)
    with pytest.raises(ValueError, match="crop_scale"):
        PixelInput(height=8, width=8, crop_scale=(0.9, 0.5))


AUGMENTED = ModelInputs(
    image=PixelInput(height=12, width=12, augment=("random_resized_crop", "flip"), **PLAIN), text=False
)


@pytest.fixture
def dataset(build_shards: Callable[..., Path], record: Callable[..., ImageRecord]) -> ShardDataset:
    records = [
        dataclasses.replace(record(i), pixels=encoded(picture(20 + i, 18, i)), pixels_extension="png")
        for i in range(11)
    ]
    return ShardDataset(build_shards(train=records), "train", "captions", regions=False, pixels=True)


def loader(dataset: ShardDataset, **changes: Any) -> ResumableLoader:
    reader = InputReader(AUGMENTED, None, max_text_len=8, max_regions=0)
    arguments: dict[str, Any] = {"batch_size": 5, "seed": 1, "shuffle": True, "sample_seeds": True} | changes
    return ResumableLoader(dataset, collate=reader.collate, **arguments)


def seen(batches: list[Batch]) -> list[tuple[str, bytes]]:
    return [
        (sample_id, pixels.numpy().tobytes())
        for batch in batches
        for sample_id, pixels in zip(batch.sample_ids, _pixels(batch).pixels_B3HW, strict=True)
    ]


def _pixels(batch: Batch) -> Pixels:
    assert isinstance(batch.image, Pixels)
    return batch.image


def two_epochs(loader: ResumableLoader) -> list[Batch]:
    return [*loader, *loader]


def test_crops_change_with_the_epoch_and_not_with_the_run(dataset: ShardDataset) -> None:
    once = seen(two_epochs(loader(dataset)))
    assert once == seen(two_epochs(loader(dataset)))
    first, second = dict(once[:22]), dict(once[22:])
    assert first.keys() == second.keys()
    assert sum(first[name] == second[name] for name in first) < 3
    pairs = [(first[f"{name[:-1]}0"], pixels) for name, pixels in first.items() if name.endswith("1")]
    assert any(a != b for a, b in pairs)  # two captions of one image see it differently
    assert once != seen(two_epochs(loader(dataset, seed=2)))
    plain = seen(list(loader(dataset, sample_seeds=False)))
    assert dict(plain) == dict(seen(list(loader(dataset, sample_seeds=False, seed=5))))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_after_any_batch_gives_the_same_pixels(dataset: ShardDataset, num_workers: int) -> None:
    reference, whole, states = loader(dataset), [], []
    for _ in range(2):
        for batch in reference:
            whole.append(batch)
            states.append(reference.state_dict())
    for done in range(len(states) - 1):
        rest = loader(dataset, num_workers=num_workers)
        rest.load_state_dict(states[done])
        found: list[Batch] = []
        while len(found) < len(whole) - done - 1:
            found += list(rest)
        assert seen(found) == seen(whole[done + 1 :]), done


def test_ranks_and_workers_get_the_same_pixels_as_one_process(dataset: ShardDataset) -> None:
    alone = seen(two_epochs(loader(dataset)))
    ranks = [two_epochs(loader(dataset, rank=rank, world_size=3, num_workers=rank)) for rank in range(3)]
    together = seen([batch for step in zip(*ranks, strict=True) for batch in step if len(batch)])
    assert together == alone
