from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp_models.data.batch import Batch, collate_regions
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.data.shards.order import EpochOrder
from vlp_models.data.shards.write import ImageRecord
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError


def collate(tokenizer: Tokenizer, samples: list[Sample]) -> Batch:
    return Batch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        image_ids=tuple(sample.image_id for sample in samples),
        image=collate_regions([sample.regions for sample in samples if sample.regions is not None], 4),
        text=tokenizer.encode_batch([sample.text for sample in samples], 16),
    )


@pytest.fixture
def dataset(build_shards: Callable[..., Path], record: Callable[..., ImageRecord]) -> ShardDataset:
    return ShardDataset(build_shards(train=[record(i) for i in range(11)]), "train", "captions")


@pytest.fixture
def make(dataset: ShardDataset) -> Callable[..., ResumableLoader]:
    """A loader over 22 captions in batches of 5."""
    together = partial(collate, Tokenizer.train(["caption of 0 1 2 3 4 5 6 7 8 9"] * 2, 60, 1, True))

    def build(**changes: Any) -> ResumableLoader:
        arguments = {"batch_size": 5, "seed": 1, "shuffle": True, "drop_last": False} | changes
        return ResumableLoader(dataset, collate=together, **arguments)

    return build


def ids(loader: ResumableLoader) -> list[tuple[str, ...]]:
    return [batch.sample_ids for batch in loader]


orders = st.fixed_dictionaries(
    {
        "length": st.integers(1, 60),
        "batch_size": st.integers(1, 9),
        "world_size": st.integers(1, 4),
        "seed": st.integers(0, 3),
    }
)


@given(orders, st.integers(0, 3), st.booleans())
def test_ranks_share_each_batch(arguments: dict[str, int], epoch: int, drop_last: bool) -> None:
    """Joined in the order of ranks, their shares of a step are a single process's batch of that step, shared evenly."""
    world_size = arguments.pop("world_size")
    alone = list(EpochOrder(**arguments, drop_last=drop_last).batches(epoch))
    ranks = [
        list(EpochOrder(**arguments, drop_last=drop_last, rank=rank, world_size=world_size).batches(epoch))
        for rank in range(world_size)
    ]
    assert [[index for share in shares for index in share] for shares in zip(*ranks, strict=True)] == alone
    for shares in zip(*ranks, strict=True):
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    seen = [index for batch in alone for index in batch]
    left_out = arguments["length"] % arguments["batch_size"] if drop_last else 0
    assert len(set(seen)) == len(seen) == arguments["length"] - left_out


@given(orders, st.integers(0, 70))
def test_batches_from_the_middle_are_the_rest(arguments: dict[str, int], start: int) -> None:
    order = EpochOrder(**arguments)
    assert list(order.batches(2, start)) == list(order.batches(2))[start:]


def test_rank_without_samples_gets_an_empty_batch(make: Callable[..., ResumableLoader]) -> None:
    """22 samples in batches of 5 leave 2 for the last one; of 4 ranks two go without."""
    batches = [list(make(rank=rank, world_size=4, num_workers=rank % 2))[-1] for rank in range(4)]
    assert [len(batch) for batch in batches] == [0, 1, 0, 1]
    assert batches[0].image.features_BRF.shape[0] == batches[0].text.ids_BT.shape[0] == 0  # type: ignore[union-attr]
    assert batches[0].image.features_BRF.shape[2] == batches[1].image.features_BRF.shape[2]  # type: ignore[union-attr]


def test_order_depends_on_seed_and_epoch() -> None:
    def of(seed: int, epoch: int, **more: Any) -> list[list[int]]:
        return list(EpochOrder(length=50, batch_size=8, seed=seed, **more).batches(epoch))

    assert of(1, 0) == of(1, 0) != of(1, 1) != of(2, 1) != of(2, 0)
    assert of(1, 5, shuffle=False) == [list(range(i, min(i + 8, 50))) for i in range(0, 50, 8)]


def test_workers_change_nothing(make: Callable[..., ResumableLoader]) -> None:
    plain, parallel = make(), make(num_workers=2)
    for _ in range(2):
        for a, b in zip(plain, parallel, strict=True):
            assert a.sample_ids == b.sample_ids
            assert torch.equal(a.image.features_BRF, b.image.features_BRF)  # type: ignore[union-attr]
            assert torch.equal(a.text.ids_BT, b.text.ids_BT)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_resumed_after_any_batch_the_order_is_the_same(make: Callable[..., ResumableLoader], num_workers: int) -> None:
    reference, whole, states = make(), [], []
    for _ in range(3):
        for batch in reference:
            whole.append(batch.sample_ids)
            states.append(reference.state_dict())
    assert all(type(value) is int for state in states for value in state.values())
    # with workers, processes start for every epoch: only the boundaries that matter
    for done in range(len(states)) if num_workers == 0 else (0, 2, len(reference) - 1, len(reference)):
        loader = make(num_workers=num_workers)
        loader.load_state_dict(states[done])
        rest = []
        while len(rest) < len(whole) - done - 1:
            rest += ids(loader)
        assert rest == whole[done + 1 :], done


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 7), st.booleans())
def test_repeated_interruptions_keep_the_order(cuts: list[int], batch_size: int, shuffle: bool) -> None:
    """Killed after cuts[0] batches, then after cuts[1] more, ...: the joined orders are the uninterrupted one."""

    def make() -> ResumableLoader:
        numbers: Any = range(17)
        return ResumableLoader(numbers, batch_size=batch_size, collate=tuple, seed=3, shuffle=shuffle)  # type: ignore[arg-type]

    def take(loader: ResumableLoader, count: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count:
            for batch in loader:
                taken.append(batch)
                if len(taken) == count:
                    break
        return taken

    wanted = take(make(), sum(cuts))
    found: list[Any] = []
    state = make().state_dict()
    for cut in cuts:
        loader = make()
        loader.load_state_dict(state)
        found += take(loader, cut)
        state = loader.state_dict()
    assert found == wanted


def test_unused_iterators_change_nothing_and_interrupted_ones_end_their_epoch(
    make: Callable[..., ResumableLoader],
) -> None:
    loader, reference = make(), make()
    iter(loader)
    iter(loader)
    assert loader.state_dict() == {"epoch": 0, "batches": 0, "steps": 5}
    assert ids(loader) == ids(reference)
    iter(loader)
    assert ids(loader) == ids(reference)
    # a sanity check that looks at one batch must not cost the next pass that batch
    interrupted = make(shuffle=False)
    next(iter(interrupted))
    assert sum(len(batch) for batch in ids(interrupted)) == 22 and interrupted.epoch == 1


def test_an_epoch_leaves_the_global_generator_alone(make: Callable[..., ResumableLoader]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    ids(make())
    ids(make(num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_state_of_other_data_and_too_little_data_are_refused(make: Callable[..., ResumableLoader]) -> None:
    with pytest.raises(CheckpointError, match=r"5 batches per epoch, this one has 11"):
        make(batch_size=2).load_state_dict(make().state_dict())
    with pytest.raises(DataError, match="22 samples are too few for a batch of 23"):
        make(batch_size=23, drop_last=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_saves_and_resumes_the_order(
    make: Callable[..., ResumableLoader], num_workers: int, tmp_path: Path
) -> None:
    """Stopped after each of a few steps, before, at and after the end of an epoch, through real checkpoints."""
    import lightning.pytorch as pl

    class Recorder(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.seen: list[tuple[str, ...]] = []

        def training_step(self, batch: Batch, index: int) -> torch.Tensor:
            self.seen.append(batch.sample_ids)
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class SaveAll(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def fit(checkpoint: Path | None, workers: int, *callbacks: pl.Callback) -> list[tuple[str, ...]]:
        module = Recorder()
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=3,
            logger=False,
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, make(num_workers=workers), ckpt_path=checkpoint, weights_only=True)
        return module.seen

    whole = fit(None, 0, SaveAll())
    assert len(whole) == 15 and len(set(whole)) == 15
    state = torch.load(tmp_path / "7.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state == [{"epoch": 1, "batches": 2, "steps": 5}]
    for step in range(1, 15) if num_workers == 0 else (5, 7):
        assert fit(tmp_path / f"{step}.ckpt", num_workers) == whole[step:], step
