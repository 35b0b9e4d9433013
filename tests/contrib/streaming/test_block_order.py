"""Block order: random, and each block is read about once."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp_models.contrib.streaming.blocks import Layout
from vlp_models.contrib.streaming.order import LANES, TURNS, BlockOrder


def layout(counts: list[int], block_bytes: int = 100, shuffled: int | None = None) -> Layout:
    """Blocks of so many samples, three a shard; shuffled: the samples are not in the order of the shards."""
    places = [
        (block // 3, block % 3 * block_bytes + at % block_bytes, block % 3 * block_bytes + at % block_bytes + 10)
        for block, count in enumerate(counts)
        for at in range(count)
    ]
    table = np.array(places, np.int64).reshape(-1, 3)
    if shuffled is not None:
        table = np.random.default_rng(shuffled).permutation(table)
    return Layout.of(lambda: iter(np.array_split(table, 3)), block_bytes)


def order(found: Layout, **changes: Any) -> BlockOrder:
    arguments = {"length": int(found.counts.sum()), "batch_size": 5, "seed": 1, "window": 2} | changes
    return BlockOrder(layout=found, **arguments)


orders = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 20),
        "seed": st.integers(0, 3),
        "window": st.integers(1, 4),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
    }
)


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), orders, st.integers(0, 2), st.integers(1, 4))
def test_every_sample_once_and_ranks_share_each_batch(
    counts: list[int], arguments: dict[str, Any], epoch: int, world_size: int
) -> None:
    found = layout(counts)
    alone = list(order(found, **arguments).batches(epoch))
    ranks = [list(order(found, **arguments, rank=r, world_size=world_size).batches(epoch)) for r in range(world_size)]
    assert [[i for share in shares for i in share] for shares in zip(*ranks, strict=True)] == alone
    seen = [index for batch in alone for index in batch]
    left_out = sum(counts) % arguments["batch_size"] if arguments["drop_last"] else 0
    assert len(set(seen)) == len(seen) == sum(counts) - left_out
    assert all(0 <= index < sum(counts) for index in seen)
    sizes = list(map(len, alone))
    assert sizes[:-1] == [arguments["batch_size"]] * (len(sizes) - 1)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), orders, st.integers(0, 40))
def test_block_order_resumes_at_any_batch(counts: list[int], arguments: dict[str, Any], start: int) -> None:
    found = order(layout(counts), **arguments)
    assert list(found.batches(1, start)) == list(found.batches(1))[start:]


def test_block_orders_differ_by_epoch_and_seed() -> None:
    found = layout([20] * 30)
    epochs = [list(chain(*order(found, seed=seed).batches(epoch))) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_unsorted_samples_are_found_in_their_blocks() -> None:
    """Of a layout that is not sorted (`sources`), the same blocks hold the same places."""
    counts = [7, 3, 9, 1]
    places = {shuffled: layout(counts, shuffled=shuffled) for shuffled in (None, 4)}
    assert [found.counts.tolist() for found in places.values()] == [counts, counts]
    assert places[None].order is None and sorted(places[4].order.tolist()) == list(range(20))
    for name in ("keys", "begins", "ends"):
        np.testing.assert_array_equal(getattr(places[None], name), getattr(places[4], name))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_block_is_read_about_once(ranks: int, workers: int) -> None:
    """Over all processes and workers, where each holds the blocks of its lanes' windows and no more."""
    found = layout([50] * 400)
    window, reads = 2, 0
    of_sample = np.repeat(np.arange(400), 50)
    for rank in range(ranks):
        shares = list(order(found, batch_size=64, window=window, rank=rank, world_size=ranks).batches(0))
        for worker in range(workers):
            held: list[int] = []
            for share in shares[worker::workers]:
                for block in np.unique(of_sample[share]).tolist():
                    if block in held:
                        held.remove(block)
                    else:
                        reads += 1
                    held.append(block)
                del held[: -2 * (window + 1) * LANES * TURNS // (ranks * workers)]
    assert 400 <= reads <= 400 + 2 * LANES * TURNS, "once, and a second time where a lane begins within a block"
    mixed = np.diff(next(order(found, batch_size=64, window=window).batches(0)))
    assert (np.abs(mixed) > 1).mean() > 0.9, "adjacent samples are not in the same batch"
