"""Self-critical training of a captioner: CIDEr-D as reward (Rennie et al. 2017; TDEN, section "Downstream tasks").

Each step samples captions of the batch's images without gradients and rewards each by its advantage over the baseline,
the greedy caption; one teacher-forced pass over the sampled captions then gives the gradient. An image is encoded once
for all of its samples, and once for the gradient.

What the paper leaves open:
- Reward and references are compared in words, not word pieces: pieces are merged, and references are split at spaces
  and punctuation, as the tokenizer does before it looks up its vocabulary. The end token is a word on both sides, so it
  is part of n-grams and bad endings cost; a caption cut at the maximum length has none. [UNK] matches nothing.
- Document frequencies are counted over the training images' references; each image is one document.
- Samples are drawn with dropout off, from the model as it is evaluated; the public code has it on
  (`sampling_dropout`). The gradient's pass has dropout on.
- The policy is softmax(logits / `temperature`), in the samples and in the gradient. At 1 a model that was trained with
  label smoothing of 0.1 draws a tenth of its words at random, and the reward mainly teaches it to be short and certain;
  at 0.5 samples are close to the captions of beam search.
- The validation loss is minus the mean CIDEr-D of greedy captions, with the same document frequencies.

Shape suffixes: B images, K samples per image, N = B * K, T tokens, M sampled tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from vlp_models.common.log import get_logger
from vlp_models.data.batch import Batch, Text
from vlp_models.data.tokenizer import SEP, Tokenizer
from vlp_models.errors import DataError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.models.decoding.sampling import sample
from vlp_models.models.decoding.search import DecodingModel, EncodedImages, Hypothesis, device_of, greedy
from vlp_models.models.protocols import Generates
from vlp_models.objectives.distributed import count_over_ranks, rank, world_size
from vlp_models.objectives.generation import advantages, self_critical
from vlp_models.objectives.loss import Loss, Part, WeightedLosses
from vlp_models.params.schema import PositiveFloat
from vlp_models.tasks.base import TaskModel

FREQUENCIES = "document-frequencies.safetensors"

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SelfCriticalParams:
    """Settings of self-critical training; the run starts from one trained with cross-entropy."""

    samples: int = 5  # captions sampled per image and step
    baseline: Literal["greedy", "leave_one_out"] = "greedy"  # the second needs two samples or more
    sampling_dropout: bool = False  # sample with dropout on, as the public code does
    temperature: PositiveFloat = 1.0  # of the policy

    def __post_init__(self) -> None:
        if self.samples < 1 + (self.baseline == "leave_one_out"):
            raise ValueError(f"`samples: {self.samples}` is too few for the baseline {self.baseline}")


class SelfCriticalLoss:
    """The training loss; reads the view `images` and ignores its text.

    Parts: `reward` (mean CIDEr-D of the samples, 0 to 10), `reward_greedy`, `sample_length` (in tokens, with the end),
    `zero_rewards` (1 if no caption of the batch earned a reward), `reward_share` (the reward's share of the step's
    time; not in the first step).
    """

    def __init__(self, captioning: TaskModel, reward: CiderD, params: SelfCriticalParams) -> None:
        self.captioning = captioning
        self.reward = reward
        self.params = params
        self.max_len = captioning.info.max_text_len - 1  # tokens, [SEP] included, after [CLS]
        self._has_warned = False  # of a batch in which no caption earned a reward
        self._reward_seconds = 0.0  # spent on rewards in the current step
        self._step_start: float | None = None  # of the current step

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        if update is None:
            return WeightedLosses.of(self._validate(batch))
        timing = self._start_step()
        device = device_of(batch.image)
        samples_BK, greedy_captions_B = self._sample(batch, generator)

        # The reward of each sample and, as baseline, of the greedy caption: (B, K) and (B,)
        reward_BK = self._rewards(batch.image_ids, samples_BK).to(device)
        greedy_B = None
        if self.params.baseline == "greedy":
            greedy_B = self._rewards(batch.image_ids, [[h] for h in greedy_captions_B])[:, 0].to(device)
        # (B, K) -> (N,): one advantage for each sampled caption
        advantage_N = advantages(reward_BK, self.params.baseline, greedy_B).flatten()
        rewarded = bool(reward_BK.any()) or (greedy_B is not None and bool(greedy_B.any()))
        # Over all processes: a batch counts as zero only if no process has a reward.
        is_zero = count_over_ranks(rewarded) == 0
        if is_zero and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "self-critical training: no caption of this batch shares an n-gram that counts with its references, so "
                "it contributes no gradient. Single batches like this are normal; if `zero_rewards` stays 1, start "
                "from a captioner trained with cross-entropy, on a training split of many images"
            )

        # One teacher-forced pass over all samples: (N, T), each with the row of its image
        sampled = [h for group in samples_BK for h in group]
        owner_N = torch.tensor([row for row, group in enumerate(samples_BK) for _ in group], dtype=torch.int64)
        text = dataclasses.replace(self._as_text(sampled, device), owner_N=owner_N.to(device))
        at_NT = text.has_next_BT
        loss = self_critical(
            self._model.generation_logits(batch.image, text, at_NT),
            text.next_tokens(at_NT),
            # (N,) -> (N, T) -> (M,): each token has the advantage of its caption.
            advantage_N[:, None].expand_as(at_NT)[at_NT],
            temperature=self.params.temperature,
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
        return WeightedLosses.of(Loss(sum=loss.sum, count=loss.count, parts=parts))

    @property
    def _model(self) -> Generates:
        return cast(Generates, self.captioning.model)

    @torch.no_grad()
    def _sample(self, batch: Batch, generator: torch.Generator) -> tuple[list[list[Hypothesis]], list[Hypothesis]]:
        """Return K samples of each image and, if it is the baseline, its greedy caption.

        Each process has its own random stream, so several processes draw other samples than one would; the loss of
        given samples is the same.
        """
        # With several processes, one may get no images of a small batch.
        if not len(batch):
            return [], []
        if world_size() > 1:
            # One draw on every process, so the common generator stays in the same state on all of them.
            seed = int(torch.randint(2**62, (), generator=generator)) + rank()
            generator = torch.Generator().manual_seed(seed)
        device = device_of(batch.image)
        if device.type == "cuda":  # sampling there avoids copying the vocabulary's probabilities at each token
            seed = int(torch.randint(2**62, (), generator=generator))
            generator = torch.Generator(device).manual_seed(seed)

        def draw(model: DecodingModel) -> list[list[Hypothesis]]:
            return sample(
                model,
                batch.image,
                num_samples=self.params.samples,
                temperature=self.params.temperature,
                generator=generator,
                **self._decoder_args,
            )

        greedy_captions: list[Hypothesis] = []
        # The baseline's greedy captions are always decoded without dropout.
        with _dropout(self.captioning, enabled=False):
            # Encoded once: greedy and sampled captions start from the same state.
            encoded = EncodedImages(model=self._model, state=self._model.start(batch.image, max_len=self.max_len))
            if self.params.baseline == "greedy":
                greedy_captions = greedy(encoded, batch.image, **self._decoder_args)
            if not self.params.sampling_dropout:
                return draw(encoded), greedy_captions
        with _dropout(self.captioning, enabled=True):
            # Dropout changes the encoding too, so the images are encoded again.
            return draw(self._model), greedy_captions

    @torch.no_grad()
    def _validate(self, batch: Batch) -> Loss:
        self._step_start = None  # validation is not part of a step
        captions = greedy(self._model, batch.image, **self._decoder_args) if len(batch) else []
        # (B, 1) -> (B,): one greedy caption per image.
        rewards_B = self._rewards(batch.image_ids, [[h] for h in captions])[:, 0]
        total = rewards_B.sum()
        return Loss(sum=-total, count=len(rewards_B), parts={"reward_greedy": Part(sum=total, count=len(rewards_B))})

    @property
    def _decoder_args(self) -> dict[str, Any]:
        return {"max_len": self.max_len, "bos_id": self._tokenizer.cls_id, "eos_id": self._tokenizer.sep_id}

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.captioning.tokenizer

    def _rewards(self, image_ids: Sequence[str], captions_BK: Sequence[Sequence[Hypothesis]]) -> Tensor:
        """Return the CIDEr-D of each caption, on the CPU. [B, K]"""
        start = time.perf_counter()
        rows = []
        for image_id, group in zip(image_ids, captions_BK, strict=True):
            rows.append(self.reward.score(image_id, [self._words(h) for h in group]))
        self._reward_seconds += time.perf_counter() - start
        return torch.from_numpy(np.stack(rows)).float() if rows else torch.zeros(0, self.params.samples)

    def _words(self, hypothesis: Hypothesis) -> list[str]:
        words = self._tokenizer.merge(hypothesis.ids)
        # A caption as long as the limit was cut and has no end; ids never include [SEP].
        return [*words, SEP] if len(hypothesis.ids) < self.max_len else words

    def _as_text(self, captions: Sequence[Hypothesis], device: torch.device) -> Text:
        """Return [CLS], the tokens and, unless the caption was cut at the maximum length, [SEP]."""
        if not captions:
            empty = torch.zeros(0, 2, dtype=torch.int64)
            return Text(ids_BT=empty, mask_BT=empty.bool()).to(device)
        rows = []
        for hypothesis in captions:
            # As in `_words`: only a caption that was not cut ends with [SEP].
            end = [self._tokenizer.sep_id] if len(hypothesis.ids) < self.max_len else []
            rows.append([self._tokenizer.cls_id, *hypothesis.ids, *end])
        ids_NT = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, self._tokenizer.pad_id)
        # (T,) < (N, 1) -> (N, T): true up to the length of each caption.
        lengths_N1 = torch.tensor([[len(row)] for row in rows])
        return Text(ids_BT=ids_NT, mask_BT=torch.arange(ids_NT.shape[1]) < lengths_N1).to(device)

    def _start_step(self) -> dict[str, Part]:
        """Return the reward's share of the previous step's time, and start timing the next."""
        start, seconds = self._step_start, self._reward_seconds
        self._step_start, self._reward_seconds = time.perf_counter(), 0.0
        if start is None:
            return {}
        return {"reward_share": Part(sum=torch.tensor(seconds / (self._step_start - start)), count=1)}


def self_critical_loss(
    captioning: TaskModel, params: SelfCriticalParams, shards: Path, sources: Mapping[str, int], work: Path
) -> SelfCriticalLoss:
    """Build the loss: references from the shards' index, document frequencies counted once and saved in `work`.

    Raises:
        DataError: no image of the train split has a caption.
        ParamsError: invalid settings.
    """
    from vlp_models.data.shards.dataset import ShardDataset

    captions: dict[str, tuple[str, ...]] = {}
    train: list[str] = []
    # Validation needs the references of val as well; frequencies are counted over train alone.
    for split in ("train", "val"):
        references = ShardDataset(shards, split, "images", sources, regions=False).references()
        captions |= references
        captioned = [image_id for image_id, texts in references.items() if texts]
        if split == "train":
            train = captioned
        skipped = len(references) - len(captioned)
        if skipped:
            logger.warning("self-critical training: skipping %s %s images without a caption", f"{skipped:,}", split)
    if not train:
        raise DataError(
            f"{shards}: no image of the train split has a caption, so there is nothing to compute rewards from"
        )

    def words(image_id: str) -> list[list[str]]:
        # The end token is a word of each reference, as it is of each finished caption.
        return [[*captioning.tokenizer.split(text), SEP] for text in captions.get(image_id, ())]

    # Counted once per run; a resumed run reads the file.
    file = work / FREQUENCIES
    try:
        frequencies = DocumentFrequencies.load(file)
    except DataError:
        frequencies = DocumentFrequencies.count(map(words, train))
        frequencies.save(file)
    return SelfCriticalLoss(captioning, CiderD(frequencies, words), params)


@contextmanager
def _dropout(module: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Run with dropout as the module has it (frozen parts have none), or with dropout off; restores the modes."""
    modes = [(part, part.training) for part in module.modules()]
    if not enabled:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        # Autocast caches cast weights; some releases of torch do not distinguish those cast without gradients.
        torch.clear_autocast_cache()
