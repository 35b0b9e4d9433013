"""What a model says it reads is what its batches hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlp_models.data.batch import Pixels, Regions, collate_regions, get_regions
from vlp_models.data.inputs import InputReader, ModelInputs, RegionInput, blanked, find_non_finite, prepare_images
from vlp_models.data.pixels import PixelInput
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError

REGIONS = ModelInputs(image=RegionInput())
PIXELS = ModelInputs(image=PixelInput(height=6, width=6))
TEXTS = ModelInputs(image=None, whole_words=True)


@pytest.fixture
def shards(build_shards: Callable[..., Path], record: Callable[..., ImageRecord]) -> Path:
    return build_shards(train=[record(i, pixels=True) for i in range(1, 5)])


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["caption of 0 1 2 3 4 5"] * 2, 40, 1, True)


def read(inputs: ModelInputs, shards: Path, tokenizer: Tokenizer) -> tuple[InputReader, list[Sample]]:
    reader = InputReader(inputs, tokenizer, max_text_len=9, max_regions=2)
    dataset = ShardDataset(shards, "train", "captions", **reader.flags)
    return reader, [dataset[i] for i in range(len(dataset))]


def test_regions_and_texts_are_collated(shards: Path, tokenizer: Tokenizer) -> None:
    reader, samples = read(REGIONS, shards, tokenizer)
    assert reader.flags == {"regions": True, "pixels": False}
    one = reader.collate(samples)
    image = collate_regions(get_regions(samples), 2)
    text = tokenizer.encode_batch([sample.text for sample in samples], 9)
    assert isinstance(one.image, Regions)
    for a, b in ((one.image, image), (one.text, text)):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert (x is None and y is None) or torch.equal(x, y), field.name
    assert one.sample_ids == tuple(sample.sample_id for sample in samples)
    assert one.image_ids == tuple(sample.image_id for sample in samples)


def test_pixels(shards: Path, tokenizer: Tokenizer) -> None:
    reader, samples = read(PIXELS, shards, tokenizer)
    assert samples[0].regions is None
    batch = reader.collate(samples)
    assert isinstance(batch.image, Pixels) and batch.image.pixels_B3HW.shape == (8, 3, 6, 6)
    assert batch.image.pixels_B3HW[:, 0].flatten(1).std(1).max() == 0  # each picture has one colour, its number
    assert batch.image.pixels_B3HW[0, 0, 0, 0] < batch.image.pixels_B3HW[2, 0, 0, 0]
    with pytest.raises(DataError, match="without its region features"):
        InputReader(REGIONS, tokenizer, max_text_len=9, max_regions=2).collate(samples)
    with pytest.raises(DataError, match="without its pixels"):
        reader.collate([dataclasses.replace(samples[0], pixels=None)])


def test_texts_alone_in_whole_words(shards: Path, tokenizer: Tokenizer) -> None:
    reader, samples = read(TEXTS, shards, tokenizer)
    assert reader.flags == {"regions": False, "pixels": False}
    batch = reader.collate(samples)
    assert batch.image is None
    assert batch.text.word_BT is not None
    words = batch.text.word_BT
    assert ((words >= 0) == (batch.text.mask_BT & (batch.text.ids_BT != 2) & (batch.text.ids_BT != 3))).all()
    first = words[0][words[0] >= 0]
    assert (first.diff() >= 0).all() and first[0] == 0
    text = reader.text(["caption caption of"])
    assert text.word_BT is not None and text.word_BT.tolist() == [[-1, 0, 1, 2, -1]]


def test_images_alone(shards: Path) -> None:
    reader = InputReader(dataclasses.replace(PIXELS, text=False), None, max_text_len=9, max_regions=0)
    dataset = ShardDataset(shards, "train", "images", **reader.flags)
    batch = reader.collate([dataset[0]])
    assert batch.text is None and len(batch.image) == 1
    with pytest.raises(ValueError, match="tokenizer"):
        InputReader(PIXELS, None, max_text_len=9, max_regions=0)


@pytest.mark.parametrize("inputs", [REGIONS, PIXELS])
def test_nothing_to_see(shards: Path, tokenizer: Tokenizer, inputs: ModelInputs) -> None:
    reader, samples = read(inputs, shards, tokenizer)
    batch = reader.collate(samples)
    blank = blanked(batch)
    seen = blank.image.features_BRF if isinstance(blank.image, Regions) else blank.image.pixels_B3HW
    assert not seen.any() and torch.equal(blank.text.ids_BT, batch.text.ids_BT)


def test_what_is_not_finite_is_named(shards: Path, tokenizer: Tokenizer) -> None:
    for inputs in (REGIONS, PIXELS):
        reader, samples = read(inputs, shards, tokenizer)
        batch = reader.collate(samples)
        assert find_non_finite(batch) == []
        values = batch.image.boxes_BR4 if isinstance(batch.image, Regions) else batch.image.pixels_B3HW
        values[3].fill_(float("inf"))
        assert find_non_finite(batch) == [samples[3].sample_id]
    reader, samples = read(TEXTS, shards, tokenizer)
    assert find_non_finite(reader.collate(samples)) == [] == find_non_finite(reader.collate(samples).empty())


def test_a_picture_from_outside_becomes_what_the_model_reads(
    shards: Path, tokenizer: Tokenizer, regions: Callable[[int, int], RegionArrays]
) -> None:
    class Fixed:
        def extract(self, images: list[Image.Image]) -> list[RegionArrays]:
            return [regions(image.width, 2) for image in images]

    pictures = [Image.new("RGB", (8, 4), (number, 0, 0)) for number in (1, 3)]
    reader, samples = read(PIXELS, shards, tokenizer)
    outside = [
        Sample(sample_id="x", image_id="x", source="", **fields) for fields in prepare_images(PIXELS, pictures, None)
    ]
    made, known = reader.image(outside), reader.image([samples[0], samples[4]])
    assert isinstance(made, Pixels) and isinstance(known, Pixels)
    assert torch.equal(made.pixels_B3HW, known.pixels_B3HW)
    assert [len(fields["regions"]) for fields in prepare_images(REGIONS, pictures, Fixed())] == [2, 2]
    assert prepare_images(TEXTS, pictures, None) == [{}, {}]
    with pytest.raises(ValueError, match="extractor"):
        prepare_images(REGIONS, pictures, None)
