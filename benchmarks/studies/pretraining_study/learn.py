"""Pretraining and fine-tuning of one arm and seed: plain loops, and all randomness from the seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from pretraining_study import adapter
from pretraining_study.arms import DrawnPretraining, Pretraining
from pretraining_study.data import Data, Split, Texts, take

CLIP = 1.0  # largest gradient norm


def orders(count: int, size: int, updates: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The rows of each update: every row once before any comes again; an epoch's incomplete last batch is left out."""
    if count <= size:
        for _ in range(updates):
            yield torch.randperm(count, generator=generator)
        return
    done = 0
    while True:
        for rows in torch.randperm(count, generator=generator).split(size):
            if len(rows) < size:
                continue
            if done == updates:
                return
            done += 1
            yield rows


def updates_of(
    modules: nn.Module, step: Callable[[Tensor, int], Tensor], rows: Iterator[Tensor], *, lr: float, updates: int
) -> Iterator[int]:
    """`step(rows, update)` gives the loss of each update. Yields the update's number when it is done.

    Raises:
        FloatingPointError: a loss is no number.
    """
    optimizer, schedule = adapter.optimiser(modules, lr=lr, updates=updates)
    parameters = [p for p in modules.parameters() if p.requires_grad]
    modules.train()
    for update, chosen in enumerate(rows):
        loss = step(chosen, update)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss of update {update} is {float(loss)}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        yield update
    modules.eval()


def pretraining(model: nn.Module, wanted: Pretraining, data: Data, *, family: str, seed: int) -> Iterator[int]:
    """On the web's pairs, update by update. Batches are the same for every arm of a seed, up to the shorter one's
    end."""
    images, texts = data.web
    if isinstance(wanted, DrawnPretraining) and wanted.texts_first:
        yield from _on_texts(model, wanted, data, family=family, seed=seed)
    loss = adapter.pretraining_loss(model, wanted, family=family)
    order, corruption = (torch.Generator().manual_seed(1000 * seed + stream) for stream in (1, 2))

    def step(rows: Tensor, update: int) -> Tensor:
        return loss(adapter.batch(images, take(texts, rows)), update, corruption)

    rows = orders(len(texts), data.setting.batch, wanted.updates, order)
    yield from updates_of(model, step, rows, lr=data.setting.lr, updates=wanted.updates)


def _on_texts(model: nn.Module, wanted: DrawnPretraining, data: Data, *, family: str, seed: int) -> Iterator[int]:
    """The web's texts without their images."""
    images, texts = data.web
    learn = DrawnPretraining(
        objectives=tuple(wanted.texts_learn),
        shares=tuple(wanted.texts_learn.values()),
        updates=wanted.texts_first,
        mask_probability=wanted.mask_probability,
    )
    loss = adapter.pretraining_loss(model, learn, family=family)
    order, corruption = (torch.Generator().manual_seed(1000 * seed + stream) for stream in (6, 7))

    def step(rows: Tensor, update: int) -> Tensor:
        return loss(adapter.blanked(adapter.batch(images, take(texts, rows))), update, corruption)

    rows = orders(len(texts), data.setting.batch, learn.updates, order)
    return updates_of(model, step, rows, lr=data.setting.lr, updates=learn.updates)


class Learner:
    """A model that learns a task from the target's few images."""

    def __init__(self, model: nn.Module, data: Data, split: Split, *, seed: int, lr: float) -> None:
        self.model, self.data, self.split, self.seed, self.lr = model, data, split, seed, lr
        torch.manual_seed(1000 * seed + 5)
        self.head = adapter.answer_head(model, data.answers)

    def captioning(self, updates: int) -> None:
        def step(texts: Texts) -> Tensor:
            return adapter.caption_losses(self.model, adapter.batch(self.split.images, texts)).mean()

        self._fit(self.model, self.split.captions, lambda rows: step(take(self.split.captions, rows)), updates)

    def vqa(self, updates: int) -> None:
        questions, images = self.split.questions, self.split.images

        def step(rows: Tensor) -> Tensor:
            chosen = adapter.batch(images, take(questions, rows), self.split.scores_QA[rows])
            return adapter.answer_loss(self.model, self.head, chosen)

        self._fit(nn.ModuleList([self.model, self.head]), questions, step, updates)

    def retrieval(self, updates: int) -> None:
        def step(rows: Tensor) -> Tensor:
            texts = take(self.split.captions, rows)
            return adapter.matching_loss(self.model, adapter.batch(self.split.images, texts))

        self._fit(self.model, self.split.captions, step, updates)

    def _fit(self, modules: nn.Module, texts: Texts, step: Callable[[Tensor], Tensor], updates: int) -> None:
        order = torch.Generator().manual_seed(1000 * self.seed + 3)
        rows = orders(len(texts), self.data.setting.batch, updates, order)
        for _ in updates_of(modules, lambda chosen, _: step(chosen), rows, lr=self.lr, updates=updates):
            pass
