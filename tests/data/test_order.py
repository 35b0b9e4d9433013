"""Grouped order, where texts about one image are adjacent."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_dataset import Toy, write_shards, write_tokenizer
from toy_tasks import any_generator, double, make

from vlp_models.data.shards import index
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.order import EpochOrder, GroupedOrder, choose_order
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import MissingToolError
from vlp_models.params import StreamParams
from vlp_models.training.data import LoaderFactory
from vlp_models.training.module import _non_finite_inputs


def first_positions(names: list[str]) -> np.ndarray:
    """Return the first position of each name."""
    return np.array([names.index(name) for name in names], np.uint32)


names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=40)


@given(names, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_every_text_occurs_once_in_the_fewest_runs(names: list[str], together: int, seed: int, epoch: int) -> None:
    order = GroupedOrder(
        length=len(names), batch_size=4, seed=seed, images=first_positions(names), texts_per_image=together
    ).permutation(epoch)
    assert sorted(order.tolist()) == list(range(len(names)))
    # two runs of one image may be adjacent, so checking where runs can begin is not enough
    runs = [len(list(run)) for _, run in groupby(names[i] for i in order)]
    wanted = sum(-(-names.count(name) // together) for name in set(names))
    assert len(runs) <= wanted
    if len(runs) == wanted:
        assert max(runs) <= together


def original_permutation(images: list[int], together: int, seed: int, epoch: int) -> list[int]:
    """The grouped order as it was first written, with int64: a run is resumed in the order in which it started."""
    rng = np.random.default_rng([seed, epoch])
    mixed = rng.permutation(len(images))
    by_image = mixed[np.argsort(np.array(images)[mixed], kind="stable")]
    sorted_images = np.array(images)[by_image]
    places = np.arange(len(images)) - np.searchsorted(sorted_images, sorted_images)
    runs = np.cumsum(places % together == 0) - 1
    found: list[int] = by_image[np.argsort(rng.permutation(len(images))[runs], kind="stable")].tolist()
    return found


@given(names, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_orders_do_not_change_between_versions(names: list[str], together: int, seed: int, epoch: int) -> None:
    images = first_positions(names)
    grouped = GroupedOrder(length=len(names), batch_size=4, seed=seed, images=images, texts_per_image=together)
    assert grouped.permutation(epoch).tolist() == original_permutation(images.tolist(), together, seed, epoch)
    order = EpochOrder(length=len(names), batch_size=4, seed=seed)
    assert order.permutation(epoch).tolist() == np.random.default_rng([seed, epoch]).permutation(len(names)).tolist()


@given(names, st.booleans())
def test_first_rows_of_images_in_any_order(names: list[str], ordered: bool) -> None:
    names = sorted(names) if ordered else names
    pieces = [pa.record_batch({"image_id": names[start : start + 4]}) for start in range(0, len(names), 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "PIECE", 4)
        rows = index.Index(pa.Table.from_batches(pieces)).first_rows()
    assert rows.tolist() == first_positions(names).tolist()


def test_samples_of_an_image_share_the_number_of_the_first(toy: Toy) -> None:
    for samples in (ShardDataset(toy.shards, "train", "questions"), doubled(toy)):
        assert samples.first_positions().tolist() == first_positions(samples.image_ids()).tolist()


def test_orders_differ_by_seed_and_epoch_and_texts_share_their_images_seed() -> None:
    images = np.repeat(np.arange(0, 60, 6), 6)

    def order(seed: int) -> GroupedOrder:
        return GroupedOrder(length=60, batch_size=4, seed=seed, images=images, texts_per_image=3)

    found = [order(seed).permutation(epoch).tolist() for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert len({tuple(f) for f in found}) == 3
    assert all(len(set(images[f[:30]])) > 4 for f in found), "runs of different images are mixed"
    draws = {(epoch, index): order(1).sample_seed(epoch, index) for epoch in (0, 1) for index in range(60)}
    assert len(set(draws.values())) == 20
    assert len({draws[0, index] for index in range(6)}) == 1


def test_loader_shares_images_and_resumes(toy: Toy) -> None:
    task = make(toy, "vqa")
    dataset = doubled(toy)

    def loader(**more: Any) -> ResumableLoader:
        arguments = {"batch_size": 6, "seed": 1, "shuffle": True, "sample_seeds": True} | more
        return ResumableLoader(dataset, collate=task.collate, make_order=choose_order(dataset, None, 2), **arguments)

    batches = list(loader())
    assert sum(len(batch) for batch in batches) == len(dataset)
    assert all(len(batch.image) == len(batch.image_ids) <= len(batch) for batch in batches)
    assert sum(len(batch.image) for batch in batches) < 0.6 * len(dataset)
    stopped = loader()
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    going_on = loader()
    going_on.load_state_dict(stopped.state_dict())
    assert [b.sample_ids for b in going_on] == [b.sample_ids for b in batches[3:]]
    shares = [[b.sample_ids for b in loader(rank=rank, world_size=2)] for rank in (0, 1)]
    assert [one + other for one, other in zip(*shares, strict=True)] == [b.sample_ids for b in batches]
    alone = ResumableLoader(dataset, collate=task.collate, batch_size=6, seed=1, shuffle=True, sample_seeds=True)
    assert alone.order == EpochOrder(length=len(dataset), batch_size=6, seed=1)
    assert not any(batch.shares_images for batch in alone), "each text has a draw, and so an image, of its own"


def test_shared_images_give_the_same_results_as_separate_ones(toy: Toy) -> None:
    """Compare loss, gradient and predictions; a value that is not finite names every text with it."""
    task = make(toy, "vqa").double()
    dataset = doubled(toy)
    samples = [dataset[i] for i in (0, len(dataset) // 2, 1, len(dataset) // 2 + 1, 2)]
    shared = task.collate(samples)
    assert len(shared.image) == 3 and shared.text.owner_N.tolist() == [0, 0, 1, 1, 2]
    apart = task.collate([replace(sample, seed=number) for number, sample in enumerate(samples)])
    assert len(apart.image) == 5
    losses = []
    for batch in (apart, shared):
        batch = double(batch)
        task.zero_grad()
        loss = task.loss(batch, generator=any_generator()).mean
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in task.parameters() if p.grad is not None]).norm()
        losses.append((loss.item(), norm.item(), [row["top"] for row in task.predict(batch, samples)]))
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-12)
    assert losses[0][1] == pytest.approx(losses[1][1], abs=1e-10)
    assert losses[0][2] == losses[1][2]
    assert shared.samples_showing(torch.tensor([1])) == [samples[2].sample_id, samples[3].sample_id]
    chosen = shared.select(torch.tensor([3, 0]))
    assert chosen.sample_ids == (samples[3].sample_id, samples[0].sample_id)
    assert chosen.text.owner_N.tolist() == [1, 0] and chosen.image_ids == shared.image_ids
    assert chosen.samples_showing(torch.tensor([0])) == [samples[0].sample_id] and not chosen.samples_showing(
        torch.tensor([2])
    )
    last = chosen.select(torch.tensor([1]))
    assert last.sample_ids == (samples[0].sample_id,) and last.text.owner_N.tolist() == [0]


def test_training_loader_uses_grouped_order(toy: Toy) -> None:
    task = make(toy, "vqa")
    arguments: dict[str, Any] = {
        "sources": {"toy": 2},
        "collate": task.collate,
        "batch_size": 6,
        "num_workers": 0,
        "seed": 1,
    }
    train, val = LoaderFactory(toy.shards, "questions", **arguments, texts_per_image=2)(0, 1)
    assert isinstance(train.order, GroupedOrder) and train.order.texts_per_image == 2
    assert val is not None and not isinstance(val.order, GroupedOrder)
    assert any(batch.shares_images and len(batch.image) < len(batch) for batch in train)


def test_non_finite_shared_image_names_all_its_texts(toy: Toy) -> None:
    task, dataset = make(toy, "vqa"), doubled(toy)
    samples = [dataset[i] for i in (0, len(dataset) // 2, 1)]
    batch = task.collate(samples)
    assert len(batch.image) == 2 and not _non_finite_inputs(batch)
    batch.image.features_BRF[0, 0, 0] = float("nan")
    assert _non_finite_inputs(batch) == [samples[0].sample_id, samples[1].sample_id]
    batch.targets[2, 0] = float("inf")
    assert _non_finite_inputs(batch) == [sample.sample_id for sample in samples]


def test_images_without_id_are_not_merged(toy: Toy) -> None:
    nameless = [replace(doubled(toy)[i], image_id="") for i in (0, 1)]
    assert len(make(toy, "vqa").collate(nameless).image) == 2


def doubled(toy: Toy) -> ShardDataset:
    """Each question of the toy dataset twice, so that each image has several."""
    return ShardDataset(toy.shards, "train", "questions", {"toy": 2})


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder: Path = tmp_path_factory.mktemp("grouped")
    write_shards(folder / "shards")
    write_tokenizer(folder / "tokenizer")
    return Toy(folder / "shards", Tokenizer.load(folder / "tokenizer"))


def test_streaming_without_its_folder_is_named(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.data.shards.STREAMING", {})
    with pytest.raises(MissingToolError, match="needs vlp_models/contrib/streaming, which is not installed"):
        ShardDataset(toy.shards, "train", "captions", stream=StreamParams(address=str(toy.shards)))
