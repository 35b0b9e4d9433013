"""Batches have what a model declares to read; captions per image; what shards must store."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlp_models.cli.presets import apply_overlay
from vlp_models.data.batch import Pixels, Regions, collate_regions, get_regions
from vlp_models.data.inputs import (
    InputReader,
    ModelInputs,
    RegionInput,
    RequiredContent,
    blanked,
    choose_captions,
    find_non_finite,
    prepare_images,
    required_content,
)
from vlp_models.data.pixels import PixelInput, fit
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError

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
    assert batch.image.pixels_B3HW[:, 0].flatten(1).std(1).max() == 0  # each image has one color, its number
    assert batch.image.pixels_B3HW[0, 0, 0, 0] < batch.image.pixels_B3HW[2, 0, 0, 0]


def test_text_only_model_gets_whole_words(shards: Path, tokenizer: Tokenizer) -> None:
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


def test_image_only_model_gets_no_text(shards: Path) -> None:
    reader = InputReader(dataclasses.replace(PIXELS, text=False), None, max_text_len=9, max_regions=0)
    dataset = ShardDataset(shards, "train", "images", **reader.flags)
    batch = reader.collate([dataset[0]])
    assert batch.text is None and len(batch.image) == 1


@pytest.mark.parametrize("inputs", [REGIONS, PIXELS])
def test_blanked_batch_has_no_image_content(shards: Path, tokenizer: Tokenizer, inputs: ModelInputs) -> None:
    reader, samples = read(inputs, shards, tokenizer)
    batch = reader.collate(samples)
    blank = blanked(batch)
    seen = blank.image.features_BRF if isinstance(blank.image, Regions) else blank.image.pixels_B3HW
    assert not seen.any() and torch.equal(blank.text.ids_BT, batch.text.ids_BT)


def test_samples_with_non_finite_values_are_named(shards: Path, tokenizer: Tokenizer) -> None:
    for inputs in (REGIONS, PIXELS):
        reader, samples = read(inputs, shards, tokenizer)
        batch = reader.collate(samples)
        assert find_non_finite(batch) == []
        values = batch.image.boxes_BR4 if isinstance(batch.image, Regions) else batch.image.pixels_B3HW
        values[3].fill_(float("inf"))
        assert find_non_finite(batch) == [samples[3].sample_id]
    reader, samples = read(TEXTS, shards, tokenizer)
    assert find_non_finite(reader.collate(samples)) == [] == find_non_finite(reader.collate(samples).empty())


def test_external_image_becomes_the_models_input(
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


def test_captions_are_drawn_without_replacement() -> None:
    captions = ("a", "b", "c")
    assert choose_captions(captions, 2, None) == ["a", "b"]
    assert choose_captions(captions, 5, None) == ["a", "b", "c", "a", "b"]
    assert choose_captions(captions, 2, 7) == choose_captions(captions, 2, 7)
    drawn = [choose_captions(captions, 2, seed) for seed in range(300)]
    assert all(len(set(pair)) == 2 for pair in drawn)
    count = Counter(caption for pair in drawn for caption in pair)
    assert all(160 < count[caption] < 240 for caption in captions)
    assert all(sorted(Counter(choose_captions(captions, 4, seed)).values()) == [1, 1, 2] for seed in range(20))


@pytest.mark.parametrize(
    ("size", "limits", "shown"),
    [
        ((1200, 1000), {"longer": 1000, "shorter": 600}, (720, 600)),  # by the shorter side
        ((1000, 1200), {"longer": 1000, "shorter": 600}, (600, 720)),
        ((2000, 500), {"longer": 1000, "shorter": 600}, (1000, 250)),  # by the longer one
        ((100, 50), {}, (1024, 512)),
        ((100, 50), {"shorter": 600}, (1024, 512)),
    ],
)
def test_padded_image_respects_side_limits(size, limits, shown) -> None:
    wanted = PixelInput(height=1024, width=1024, resize="pad", **limits)
    pixels, mask, *_ = fit(Image.new("RGB", size, "white"), wanted, None)
    assert (mask.any(0).sum(), mask.any(1).sum()) == shown and mask.sum() == shown[0] * shown[1]
    assert pixels[mask].all() and not pixels[~mask].any()


ROOT = Path(__file__).parents[2]
REGION_MODEL = ModelInputs(image=RegionInput())


def pixel_model(patch: int) -> ModelInputs:
    return ModelInputs(image=PixelInput(height=64, width=64, patch=patch))


def test_models_decide_what_shards_store() -> None:
    assert required_content([REGION_MODEL]) == RequiredContent(regions=True, pixels=False)
    assert required_content([REGION_MODEL, pixel_model(8)]) == RequiredContent(regions=True, pixels=True)
    assert required_content([ModelInputs(image=None)], True) == RequiredContent(regions=False, pixels=True, texts=True)
    with pytest.raises(ParamsError, match=r"shards\.pixels: false"):
        required_content([pixel_model(8)], False)
    patches = [REGION_MODEL, pixel_model(32), pixel_model(16)]
    assert required_content(patches, min_side=32).pixels
    with pytest.raises(ParamsError, match=r"patches of 32 pixels, and `validate\.min_image_side: 16`"):
        required_content(patches, min_side=16)


def test_images_must_not_exceed_the_shards_pixel_limit() -> None:
    assert required_content([REGION_MODEL], max_pixels=200_000_000).regions, "a detector reads the files"
    for inputs, packed in (([pixel_model(8)], "auto"), ([REGION_MODEL], True)):
        with pytest.raises(ParamsError, match=r"`validate\.max_image_pixels: 200000000` accepts larger .* 50000000"):
            required_content(inputs, packed, max_pixels=200_000_000)


def test_impossible_preset_is_refused_before_params_yaml_changes(tmp_path: Path) -> None:
    for folder in ("public_weights", "research_formats"):
        pytest.importorskip(f"vlp_models.contrib.{folder}")
    path = Path(shutil.copy(ROOT / "params.yaml", tmp_path / "params.yaml"))
    for preset in ("flickr8k", "flickr8k-vlmo"):
        apply_overlay(path, ROOT / "vlp_models" / "presets" / f"{preset}.yaml", [])
    before = path.read_bytes()
    for wrong, message in {
        "validate.min_image_side=16": "patches of 32",
        "shards.pixels=false": "reads pixels",
    }.items():
        with pytest.raises(ParamsError, match=message):
            apply_overlay(path, None, [wrong])
    assert path.read_bytes() == before
