"""Self-critical training of a captioner: CIDEr-D as reward (Rennie et al. 2017; TDEN, section "Downstream tasks").

Each step draws descriptions of the batch's images, without gradients, and rewards each by how much better it is than
the baseline, the greedy description; one teacher-forced pass over what was drawn then gives the gradient. An image is
encoded once for all of its drawing, and once for the gradient.

What the paper leaves open:
- Reward and references are compared in words, not in word pieces: pieces are merged, and references are split at
  spaces and punctuation as the tokenizer does before it looks at its vocabulary. The end token is a word on both sides,
  so it is part of n-grams and bad endings cost; a description that did not end has none. [UNK] matches nothing.
- Document frequencies are those of the training images' references, each image being a document.
- Samples are drawn with dropout off, from the model that is evaluated; the public code has it on (`sampling_dropout`).
  The gradient's pass has dropout on.
- Validation's loss is minus the mean CIDEr-D of greedy descriptions, with the same document frequencies.

Shape suffixes: B images, K samples an image, N = B * K, T tokens, M drawn tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Text
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tokenizer import SEP, Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.models.decoding.sampling import sample
from vlp_models.models.decoding.search import DecodingModel, EncodedImages, Hypothesis, device_of, greedy
from vlp_models.models.protocols import Generates
from vlp_models.objectives.generation import advantages, self_critical
from vlp_models.objectives.loss import Loss, Part
from vlp_models.objectives.ranks import count_over_ranks, rank, world_size
from vlp_models.tasks.captioning import Captioning, SelfCriticalParams

FREQUENCIES = "document-frequencies.safetensors"


class SelfCriticalLoss:
    """What the training loop calls; learns from the view `images`, whose text it ignores.

    Parts: `reward` (of the samples, CIDEr-D as tables print it divided by 100), `reward_greedy`, `sample_length` (words
    and the end), `zero_rewards` (1 if the batch earned nothing at all), `reward_share` (the part of the step's time
    that the reward took; the first step has none).
    """

    def __init__(self, captioning: Captioning, reward: CiderD, params: SelfCriticalParams) -> None:
        """
        Raises:
            ParamsError: settings that can't be.
        """
        if params.samples < 1 + (params.baseline == "leave_one_out"):
            raise ParamsError(
                f"params.yaml: `options.self_critical.samples: {params.samples}` is too few for the baseline "
                f"{params.baseline}"
            )
        if captioning.label_smoothing:
            raise ParamsError(
                "params.yaml: `options.label_smoothing` has no meaning in self-critical training; leave it out"
            )
        self.captioning = captioning
        self.reward = reward
        self.params = params
        self.max_len = captioning.info.max_text_len - 1  # tokens, [SEP] included, after [CLS]
        self.zero_batches = 0  # of this process, in which no description earned anything
        self._reward_seconds = 0.0  # of the step under way
        self._began: float | None = None  # the step before this one

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> Loss:
        if update is None:
            return self._validate(batch)
        timing = self._next_step()
        device = device_of(batch.image)
        samples_BK, plain_B = self._draw(batch, generator)
        reward_BK = self._rewards(batch.image_ids, samples_BK).to(device)
        has_greedy = self.params.baseline == "greedy"
        greedy_B = self._rewards(batch.image_ids, [[h] for h in plain_B])[:, 0].to(device) if has_greedy else None
        advantage_N = advantages(reward_BK, self.params.baseline, greedy_B).flatten()
        is_zero = count_over_ranks(not _is_zero(reward_BK, greedy_B)) == 0
        self._look_for_zeros(is_zero)

        drawn = [h for group in samples_BK for h in group]
        owner_N = torch.tensor([row for row, group in enumerate(samples_BK) for _ in group], dtype=torch.int64)
        text = dataclasses.replace(self._as_text(drawn, device), owner_N=owner_N.to(device))
        at_NT = text.followed_BT
        loss = self_critical(
            self._model.generation_logits(batch.image, text, at_NT),
            text.following(at_NT),
            advantage_N[:, None].expand_as(at_NT)[at_NT],
        )
        parts = {
            **loss.parts,
            "reward": Part(sum=reward_BK.sum(), count=reward_BK.numel()),
            "sample_length": Part(sum=at_NT.sum(), count=reward_BK.numel()),
            "zero_rewards": Part(sum=torch.tensor(float(is_zero)), count=1),
            **timing,
        }
        if greedy_B is not None:
            parts["reward_greedy"] = Part(sum=greedy_B.sum(), count=len(greedy_B))
        return Loss(sum=loss.sum, count=loss.count, parts=parts)

    @property
    def _model(self) -> Generates:
        return cast(Generates, self.captioning.model)

    @torch.no_grad()
    def _draw(self, batch: Batch, generator: torch.Generator) -> tuple[list[list[Hypothesis]], list[Hypothesis]]:
        """K samples of each image, and its greedy description where it is the baseline.

        Of several processes each draws from a stream of its own, so they draw other samples than one would; the loss of
        given samples is the same.
        """
        if not len(batch):
            return [], []
        if world_size() > 1:
            seed = int(torch.randint(2**62, (), generator=generator)) + rank()
            generator = torch.Generator().manual_seed(seed)
        device = device_of(batch.image)
        if device.type == "cuda":  # drawing there spares a copy of the vocabulary's probabilities at each token
            seed = int(torch.randint(2**62, (), generator=generator))
            generator = torch.Generator(device).manual_seed(seed)

        def draw(model: DecodingModel) -> list[list[Hypothesis]]:
            return sample(model, batch.image, num_samples=self.params.samples, generator=generator, **self._ends)

        plain: list[Hypothesis] = []
        with _drawing(self.captioning, dropout=False):
            started = EncodedImages(model=self._model, state=self._model.start(batch.image, max_len=self.max_len))
            if self.params.baseline == "greedy":
                plain = greedy(started, batch.image, **self._ends)
            if not self.params.sampling_dropout:
                return draw(started), plain
        with _drawing(self.captioning, dropout=True):
            return draw(self._model), plain

    @torch.no_grad()
    def _validate(self, batch: Batch) -> Loss:
        self._began = None  # validation is no part of a step
        plain = greedy(self._model, batch.image, **self._ends) if len(batch) else []
        rewards_B = self._rewards(batch.image_ids, [[h] for h in plain])[:, 0]
        earned = rewards_B.sum()
        return Loss(sum=-earned, count=len(rewards_B), parts={"reward_greedy": Part(sum=earned, count=len(rewards_B))})

    @property
    def _ends(self) -> dict[str, Any]:
        """How the decoders begin and end."""
        return {"max_len": self.max_len, "bos_id": self._tokenizer.cls_id, "eos_id": self._tokenizer.sep_id}

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.captioning.tokenizer

    def _rewards(self, image_ids: Sequence[str], descriptions_BK: Sequence[Sequence[Hypothesis]]) -> Tensor:
        """CIDEr-D of each; on the CPU. [B, K]"""
        began = time.perf_counter()
        rows = [
            self.reward.score(image_id, [self._words(h) for h in group])
            for image_id, group in zip(image_ids, descriptions_BK, strict=True)
        ]
        self._reward_seconds += time.perf_counter() - began
        return torch.from_numpy(np.stack(rows)).float() if rows else torch.zeros(0, self.params.samples)

    def _words(self, hypothesis: Hypothesis) -> list[str]:
        words = self._tokenizer.merge(hypothesis.ids)
        return [*words, SEP] if len(hypothesis.ids) < self.max_len else words

    def _as_text(self, drawn: Sequence[Hypothesis], device: torch.device) -> Text:
        """[CLS], the tokens and, where the description ended, [SEP]."""
        first, last = self._tokenizer.cls_id, self._tokenizer.sep_id
        if not drawn:
            none = torch.zeros(0, 2, dtype=torch.int64)
            return Text(ids_BT=none, mask_BT=none.bool()).to(device)
        rows = [[first, *h.ids, last] if len(h.ids) < self.max_len else [first, *h.ids] for h in drawn]
        ids_NT = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, self._tokenizer.pad_id)
        lengths_N1 = torch.tensor([[len(row)] for row in rows])
        return Text(ids_BT=ids_NT, mask_BT=torch.arange(ids_NT.shape[1]) < lengths_N1).to(device)

    def _look_for_zeros(self, is_zero: bool) -> None:
        if not is_zero:
            return
        self.zero_batches += 1
        if self.zero_batches == 1:
            print(
                "self-critical training: no description of this batch has an n-gram that counts in common with its "
                "references, so nothing is learned from it. That may happen; if `zero_rewards` in the curve stays 1, "
                "start from a captioner trained with cross-entropy, on a train split of many images",
                file=sys.stderr,
            )

    def _next_step(self) -> dict[str, Part]:
        """The reward's share of the step that has just ended."""
        began, seconds = self._began, self._reward_seconds
        self._began, self._reward_seconds = time.perf_counter(), 0.0
        if began is None:
            return {}
        return {"reward_share": Part(sum=torch.tensor(seconds / (self._began - began)), count=1)}


def self_critical_loss(
    captioning: Captioning, params: SelfCriticalParams, shards: Path, sources: Mapping[str, int], work: Path
) -> SelfCriticalLoss:
    """The loss with its references, from the shards' index, and the document frequencies, counted once for `work`.

    Raises:
        DataError: no image of the train split has a caption.
        ParamsError: settings that can't be.
    """
    captions: dict[str, tuple[str, ...]] = {}
    train: list[str] = []
    for split in ("train", "val"):
        of_split = ShardDataset(shards, split, "images", sources, regions=False).references()
        captions |= of_split
        captioned = [image_id for image_id, texts in of_split.items() if texts]
        if split == "train":
            train = captioned
        if len(captioned) < len(of_split):
            bare = len(of_split) - len(captioned)
            print(f"self-critical training: {bare:,} {split} images without a caption are left out", file=sys.stderr)
    if not train:
        raise DataError(f"{shards}: no image of the train split has a caption to reward a description by")

    def words(image_id: str) -> list[list[str]]:
        return [[*captioning.tokenizer.split(text), SEP] for text in captions.get(image_id, ())]

    file = work / FREQUENCIES
    try:
        frequencies = DocumentFrequencies.load(file)
    except DataError:
        frequencies = DocumentFrequencies.of(map(words, train))
        frequencies.save(file)
    return SelfCriticalLoss(captioning, CiderD(frequencies, words), params)


@contextmanager
def _drawing(module: nn.Module, *, dropout: bool) -> Iterator[None]:
    """With dropout as it is (what is frozen has none), or without, for a while."""
    before = [(part, part.training) for part in module.modules()]
    if not dropout:
        module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
        # Autocast keeps weights it has cast; not every release of torch tells those cast without gradients apart.
        torch.clear_autocast_cache()


def _is_zero(reward_BK: Tensor, greedy_B: Tensor | None) -> bool:
    return not (reward_BK.any() or (greedy_B is not None and greedy_B.any()))
