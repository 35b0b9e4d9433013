"""Pretraining and fine-tuning of one arm and seed: plain loops, and all randomness from the seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining_study import adapter
from pretraining_study.arms import Arm, Pretraining
from pretraining_study.data import Data, Images, Split, Texts, take
from pretraining_study.judging import ROWS, Judgments
from pretraining_study.pictures import Pictures

CLIP = 1.0  # largest gradient norm
OTHERS = 3  # images that a caption's own is ranked against, by a model that fuses each pair
# (where, what is read) -> the streams of chance for the order and for what is hidden
_STREAMS = {
    ("web", "pairs"): (1, 2),
    ("web", "blanked"): (6, 7),
    ("web", "texts"): (6, 7),
    ("web", "images"): (8, 9),
    ("target", "pairs"): (10, 11),
}


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
    modules: nn.Module,
    step: Callable[[Tensor, int], Tensor],
    rows: Iterator[Tensor],
    *,
    lr: float,
    updates: int,
    frozen: Sequence[str] = (),
) -> Iterator[int]:
    """`step(rows, update)` gives the loss of each update. Yields the update's number when it is done.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    adapter.begin_training(modules, frozen)
    optimizer, schedule = adapter.make_optimizer(modules, lr=lr, updates=updates)
    parameters = [p for p in modules.parameters() if p.requires_grad]
    for update, chosen in enumerate(rows):
        loss = step(chosen, update)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss of update {update} is {float(loss)}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        adapter.after_update(modules)
        schedule.step()
        yield update
    modules.requires_grad_(True).eval()


class _Stream:
    """The order in which a seed reads its texts, and the chance that hides tokens and cells.

    It is the same for every arm that reads the same, up to the shorter one's end, and goes on from stage to stage.
    """

    def __init__(self, seed: int, streams: tuple[int, int], count: int, size: int) -> None:
        order, self.corruption = (torch.Generator().manual_seed(1000 * seed + stream) for stream in streams)
        self.batches = orders(count, size, sys.maxsize, order)


def pretraining(model: nn.Module, arm: Arm, data: Data, split: Split, *, seed: int) -> Iterator[int]:
    """The stages one after the other, update by update. split: the target's training images."""
    streams: dict[tuple[str, str], _Stream] = {}
    for part in arm.pretraining:
        reads = (part.where, part.reads)
        images, texts = data.web if part.where == "web" else (split.images, split.captions)
        if reads not in streams:
            streams[reads] = _Stream(seed, _STREAMS[reads], len(texts), data.setting.batch)
        yield from _stage(model, part, data, images, texts, streams[reads], family=arm.family)


def _stage(
    model: nn.Module,
    wanted: Pretraining,
    data: Data,
    images: Images | Pictures,
    texts: Texts,
    stream: _Stream,
    *,
    family: str,
) -> Iterator[int]:
    trained = adapter.with_heads(model, wanted, data, family=family)
    loss = adapter.StepLoss(trained, wanted, family=family)

    def step(rows: Tensor, update: int) -> Tensor:
        chosen = adapter.batch(images, take(texts, rows), reads=wanted.reads)
        return loss(chosen, update, stream.corruption)

    times = loss.updates_per_batch
    batches = islice(stream.batches, -(-wanted.updates // times))
    repeated = islice((each for each in batches for _ in range(times)), wanted.updates)
    lr = data.setting.lr * wanted.lr_factor
    yield from updates_of(trained, step, repeated, lr=lr, updates=wanted.updates, frozen=wanted.frozen)


class Learner:
    """A model that learns a task from the target's few images."""

    def __init__(self, model: nn.Module, data: Data, split: Split, *, seed: int, lr: float) -> None:
        self.model, self.data, self.split, self.seed, self.lr = model, data, split, seed, lr
        self.head: nn.Module | None = None  # of the task that was learned, next to the model's own

    def learn(self, task: str, updates: int) -> None:
        torch.manual_seed(1000 * self.seed + 5)
        if task in ROWS:
            self.judging(task, updates)
        else:
            {"captioning": self.captioning, "vqa": self.vqa, "retrieval": self.retrieval}[task](updates)

    def captioning(self, updates: int) -> None:
        def step(texts: Texts) -> Tensor:
            return adapter.caption_losses(self.model, adapter.batch(self.split.images, texts)).mean()

        self._fit(self.model, self.split.captions, lambda rows: step(take(self.split.captions, rows)), updates)

    def vqa(self, updates: int) -> None:
        questions, images = self.split.questions, self.split.images
        self.head = head = adapter.answer_head(self.model, self.data.answers)

        def step(rows: Tensor) -> Tensor:
            chosen = adapter.batch(images, take(questions, rows), self.split.scores_QA[rows])
            return adapter.answer_loss(self.model, head, chosen)

        self._fit(nn.ModuleDict({"model": self.model, "head": head}), questions, step, updates)

    def judging(self, task: str, updates: int) -> None:
        """A batch has as many texts as that of another task, so fewer questions."""
        judged, images = self.split.judged[task], self.split.images
        self.head = head = adapter.judging_head(self.model, task)

        def step(questions: Tensor) -> Tensor:
            texts = take(judged.texts, judged.rows(questions))
            logits_QC = adapter.judging_logits(self.model, head, images, texts, task)
            return F.cross_entropy(logits_QC, judged.labels_Q[questions])

        size = max(1, self.data.setting.batch // ROWS[task])
        self._fit(nn.ModuleDict({"model": self.model, "head": head}), judged, step, updates, size)

    def retrieval(self, updates: int) -> None:
        chance = torch.Generator().manual_seed(1000 * self.seed + 4)

        def step(rows: Tensor) -> Tensor:
            texts = take(self.split.captions, rows)
            chosen = adapter.batch(self.split.images, texts)
            return adapter.matching_loss(self.model, chosen, OTHERS, chance)

        self._fit(self.model, self.split.captions, step, updates)

    def _fit(
        self,
        modules: nn.Module,
        samples: Texts | Judgments,
        step: Callable[[Tensor], Tensor],
        updates: int,
        size: int | None = None,
    ) -> None:
        order = torch.Generator().manual_seed(1000 * self.seed + 3)
        rows = orders(len(samples), size or self.data.setting.batch, updates, order)
        for _ in updates_of(modules, lambda chosen, _: step(chosen), rows, lr=self.lr, updates=updates):
            pass
