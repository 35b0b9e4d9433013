"""Samples that speak of several images: read from the shards, made a batch of, drawn for, blanked and picked from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from samples import with_values

from vlp_models.data.batch import Batch, Pixels, Regions, collate_regions, get_regions
from vlp_models.data.inputs import InputReader, ModelInputs, RegionInput, blanked, find_non_finite
from vlp_models.data.pixels import PixelInput, collate_pixels, decode, encode
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.write import ImageRecord
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import VIEWS, View
from vlp_models.errors import DataError

REGIONS = ModelInputs(image=RegionInput())
PIXELS = ModelInputs(image=PixelInput(height=6, width=6))
CROPPED = ModelInputs(image=PixelInput(height=6, width=6, augment=("random_resized_crop", "flip")))
BEHIND = {1: [6, 7], 2: [], 5: [1], 6: [2]}  # image -> those behind it in its row; without an entry it has no row


@pytest.fixture
def shards(build_shards: Callable[..., Path], record: Callable[..., ImageRecord]) -> Path:
    """Seven images in three tars; rows that name images of other tars, and one that names none."""
    records = []
    for number in range(1, 8):
        made = record(number, pixels=True)
        others = [record(n).image_id for n in BEHIND.get(number, [])]
        pair = {"pair_id": f"p{number}", "other_image_ids": others or None, "text": f"caption {number}"}
        rows = {"image_pairs": [pair | {"label": True, "group": "g"}]} if number in BEHIND else {}
        records.append(dataclasses.replace(made, rows={**made.rows, **rows}))
    return build_shards(train=records)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["caption of 0 1 2 3 4 5"] * 2, 40, 1, True)


def read(inputs: ModelInputs, shards: Path, tokenizer: Tokenizer) -> tuple[InputReader, list[Sample]]:
    reader = InputReader(inputs, tokenizer, max_text_len=9, max_regions=4)
    dataset = ShardDataset(shards, "train", "image_pairs", **reader.flags)
    return reader, [dataset[i] for i in range(len(dataset))]


def named(numbers: list[int]) -> tuple[str, ...]:
    return tuple(f"scenes/{n:03d}.a b" for n in numbers)


def values(batch: Batch) -> torch.Tensor:
    return batch.image.features_BRF if isinstance(batch.image, Regions) else batch.image.pixels_B3HW


def test_sample_has_all_its_images(shards: Path, tokenizer: Tokenizer) -> None:
    alone = {s.image_id: s for s in ShardDataset(shards, "train", "images", pixels=True)}
    dataset = ShardDataset(shards, "train", "image_pairs", regions=True, pixels=True)
    samples = dataset.__getitems__([3, 0, 1, 2])
    assert [s.image_ids for s in samples] == [named([n, *BEHIND[n]]) for n in (6, 1, 2, 5)]
    for sample in samples:
        for image in sample.images:
            assert image.pixels == alone[image.image_id].pixels
            known = alone[image.image_id].regions
            assert image.regions is not None and known is not None
            np.testing.assert_array_equal(image.regions.features, known.features)
    bare = samples[1].without_images()
    assert bare.image_ids == samples[1].image_ids and bare.images[2].pixels is None and bare.images[0].regions is None
    assert ShardDataset(shards, "train", "image_pairs", regions=False)[0].image_ids == named([1, 6, 7])


@pytest.mark.parametrize("inputs", [REGIONS, PIXELS])
def test_images_are_concatenated_with_owners(shards: Path, tokenizer: Tokenizer, inputs: ModelInputs) -> None:
    reader, samples = read(inputs, shards, tokenizer)
    batch = reader.collate(samples)
    assert len(batch) == 4 and len(batch.text) == 4
    assert batch.image_ids == named([1, 6, 7, 2, 5, 1, 6, 2])
    assert batch.image_owner_M is not None and batch.image_owner_M.tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    dataset = ShardDataset(shards, "train", "images", **reader.flags)
    every = {s.image_id: values(reader.collate([s]))[0] for s in (dataset[i] for i in range(len(dataset)))}
    for row, image_id in zip(values(batch), batch.image_ids, strict=True):
        known = every[image_id]
        if inputs is PIXELS:
            assert torch.equal(row, known)
        else:  # padded to the longest of the batch
            assert torch.equal(row[: len(known)], known) and not row[len(known) :].any()
    assert reader.collate(samples[1:2]).image_owner_M is None, "one image each: image i is sample i's"
    if isinstance(batch.image, Pixels):
        assert batch.image.place_B is not None and batch.image.place_B.tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
        assert reader.collate(samples[1:2]).image.place_B is None
        assert blanked(batch).image.place_B is batch.image.place_B
    if inputs is REGIONS:
        again = collate_regions(get_regions(samples), 4)
        assert torch.equal(again.features_BRF, batch.image.features_BRF)


@pytest.mark.parametrize("inputs", [REGIONS, PIXELS])
def test_batch_with_several_images_can_be_selected_emptied_and_blanked(
    shards: Path, tokenizer: Tokenizer, inputs: ModelInputs
) -> None:
    reader, samples = read(inputs, shards, tokenizer)
    batch = dataclasses.replace(reader.collate(samples), targets=torch.arange(4))
    picked, direct = batch.select(torch.tensor([2, 0, 2])), reader.collate([samples[2], samples[0], samples[2]])
    assert picked.sample_ids == direct.sample_ids == ("p5", "p1", "p5")
    assert picked.image_ids == direct.image_ids
    assert picked.targets is not None and picked.targets.tolist() == [2, 0, 2]
    assert picked.image_owner_M is not None and picked.image_owner_M.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert torch.equal(values(picked)[:, : values(direct).shape[1]], values(direct))
    nothing = batch.empty()
    assert len(nothing) == len(nothing.image) == len(nothing.image_owner_M) == 0  # type: ignore[arg-type]
    assert find_non_finite(nothing) == [] == find_non_finite(batch)
    blank = blanked(batch)
    assert not values(blank).any() and blank.image_owner_M is batch.image_owner_M
    values(batch)[[2, 4, 5]] = float("nan")  # the last image of the first sample, and both of the third
    assert find_non_finite(batch) == ["p1", "p5"]


def test_known_objects_belong_to_the_first_image(shards: Path, tokenizer: Tokenizer) -> None:
    reader, samples = read(REGIONS, shards, tokenizer)
    boxed = [with_values(sample, boxes=((0.0, 0.0, 0.5, 0.5),)) for sample in samples[:1]]
    image = reader.image(boxed, known_objects=True)
    assert isinstance(image, Regions)
    first = torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert [torch.equal(box, first) for box in image.boxes_BR4[:, 0]] == [True, False, False]


def test_each_image_has_its_own_reproducible_crop(shards: Path, tokenizer: Tokenizer) -> None:
    """A draw of (seed, epoch, sample, which image): the same after a restart, another one for each image."""
    reader, _ = read(CROPPED, shards, tokenizer)
    dataset = ShardDataset(shards, "train", "image_pairs", **reader.flags)

    def epochs(workers: int) -> list[Batch]:
        loader = ResumableLoader(
            dataset, batch_size=3, collate=reader.collate, seed=4, shuffle=True, sample_seeds=True, num_workers=workers
        )
        return [batch for _ in range(2) for batch in loader]

    once, again = epochs(0), epochs(1)
    assert [b.image_ids for b in once] == [b.image_ids for b in again]
    assert all(torch.equal(values(a), values(b)) for a, b in zip(once, again, strict=True))

    sample = dataclasses.replace(dataset[0], seed=11)
    draws = [image.seed for image in sample.images]
    assert draws[0] == 11 and len(set(draws)) == 3 and None not in draws
    assert draws == [image.seed for image in dataclasses.replace(dataset[0], seed=11).images]
    assert [image.seed for image in dataset[0].images] == [None] * 3
    data = encode(Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)))
    others = tuple(dataclasses.replace(other, pixels=data) for other in sample.others)
    seen = reader.collate([dataclasses.replace(sample, pixels=data, others=others)]).image
    wanted = CROPPED.image
    assert isinstance(seen, Pixels) and isinstance(wanted, PixelInput)
    expected = collate_pixels([decode(data, "")] * 3, wanted, draws).pixels_B3HW
    assert torch.equal(seen.pixels_B3HW, expected)
    assert not torch.equal(expected[0], expected[1]) and not torch.equal(expected[1], expected[2])


def test_missing_parts_are_named(shards: Path, tokenizer: Tokenizer, build_shards: Callable[..., Path]) -> None:
    reader, samples = read(REGIONS, shards, tokenizer)
    lost = dataclasses.replace(
        samples[0], others=tuple(dataclasses.replace(o, regions=None) for o in samples[0].others)
    )
    with pytest.raises(DataError, match=r"p1: image scenes/006\.a b was read without its region features"):
        reader.collate([lost])
    with pytest.raises(DataError, match=r"p1: image scenes/001\.a b was read without its pixels"):
        InputReader(PIXELS, tokenizer, max_text_len=9, max_regions=4).collate([samples[0]])


def test_row_with_an_unknown_image_is_an_error(
    build_shards: Callable[..., Path], record: Callable[..., ImageRecord]
) -> None:
    pair = {"pair_id": "p", "other_image_ids": ["scenes/9"], "text": "a", "label": True, "group": "g"}
    made = dataclasses.replace(record(1), rows={"image_pairs": [pair]})
    directory = build_shards(train=[made])
    with pytest.raises(DataError, match=r"no image scenes/9, which a row names"):
        ShardDataset(directory, "train", "image_pairs")


def test_only_views_with_several_images_have_their_column() -> None:
    assert [view.name for view in VIEWS.values() if view.images == "several"] == ["image_pairs"]
    with pytest.raises(ValueError, match="the view x: `images: several`"):
        View(name="x", id_column="x_id", images="several", columns=())
