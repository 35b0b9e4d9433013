"""Beam search, batched over images.

Shape suffixes: B images, K beams, N = B * K hypotheses, V vocabulary, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vlp_models.data.batch import Image, Regions


@torch.no_grad()
def beam_search(
    model: DecodingModel,
    image: Image,
    *,
    max_len: int,
    bos_id: int,
    eos_id: int,
    beam_size: int,
    length_penalty: float = 0.0,
    set_aside: bool = False,
) -> list[Hypothesis]:
    """The best description found per image, of at most `max_len` tokens, `eos_id` included.

    Hypotheses are ranked by score / length ** length_penalty, the length counting `eos_id`: 0 ranks by the plain
    sum of log probabilities, as the papers do. A finished hypothesis keeps its place among the beams until enough
    better ones push it out, and is then lost. set_aside: it leaves its place to a living one at once, and the best of
    those that left is not forgotten, as in the public code of UniLM and Unified VLP; an image whose beams all end in
    the same step is done. The search of the batch stops once no living hypothesis can still win.
    """
    device = device_of(image)
    batch, beams = len(image), beam_size
    first_B1 = torch.arange(batch, device=device)[:, None] * beams  # each image's first hypothesis

    state = model.start(image, max_len=max_len)
    state = model.reorder(state, torch.arange(batch, device=device).repeat_interleave(beams))
    tokens_NT = torch.empty((batch * beams, 0), dtype=torch.int64, device=device)
    token_N = torch.full((batch * beams,), bos_id, device=device)
    score_BK = torch.full((batch, beams), float("-inf"), device=device)
    score_BK[:, 0] = 0.0  # the beams are equal at first: only one may grow
    length_BK = torch.zeros((batch, beams), device=device)
    finished_BK = torch.zeros((batch, beams), dtype=torch.bool, device=device)
    aside = _Aside(batch, max_len, eos_id, device) if set_aside else None

    for step in range(1, max_len + 1):
        logits_NV, state = model.step(token_N, state)
        step_BKV = log_probabilities(logits_NV).unflatten(0, (batch, beams))
        vocabulary = step_BKV.shape[-1]
        step_BKV = step_BKV.masked_fill(finished_BK[..., None], float("-inf"))
        if aside is None:
            step_BKV[..., eos_id] = step_BKV[..., eos_id].masked_fill(finished_BK, 0.0)  # the finished only stay
        length_BK = torch.where(finished_BK, length_BK, step)

        total_BKV = score_BK[..., None] + step_BKV
        ranked_BKV = _rank(total_BKV, length_BK[..., None], length_penalty)
        best_BK = ranked_BKV.flatten(1).topk(beams).indices
        parent_BK, token_BK = best_BK // vocabulary, best_BK % vocabulary

        score_BK = total_BKV.flatten(1).gather(1, best_BK)
        length_BK = length_BK.gather(1, parent_BK)
        finished_BK = token_BK == eos_id
        parent_N = (parent_BK + first_B1).flatten()
        token_N = token_BK.flatten()
        tokens_NT = torch.cat([tokens_NT[parent_N], token_N[:, None]], dim=1)
        if aside is not None:
            ended_BK = finished_BK | (step == max_len)
            aside.add(tokens_NT, score_BK, _rank(score_BK, length_BK, length_penalty), ended_BK, first_B1)
        best_B1 = None if aside is None else aside.rank_B1
        if step == max_len or _decided(score_BK, length_BK, finished_BK, max_len, length_penalty, best_B1):
            break
        state = model.reorder(state, parent_N)

    if aside is not None:
        return collect(aside.tokens_BT, aside.score_B1[:, 0], eos_id)
    winner_B1 = _rank(score_BK, length_BK, length_penalty).argmax(1, keepdim=True)
    return collect(tokens_NT[(winner_B1 + first_B1)[:, 0]], score_BK.gather(1, winner_B1)[:, 0], eos_id)


def _rank(score: Tensor, length: Tensor, length_penalty: float) -> Tensor:
    return score / length.clamp(min=1) ** length_penalty if length_penalty else score


def _decided(
    score_BK: Tensor,
    length_BK: Tensor,
    finished_BK: Tensor,
    max_len: int,
    length_penalty: float,
    best_B1: Tensor | None = None,
) -> bool:
    """Whether every image has a finished hypothesis that no living one can still overtake: a score only falls, so a
    living hypothesis ranks at best with its present score at the full length (or the present, if length is a
    disadvantage). best_B1: the rank of the best finished one, where it need not be among the beams."""
    ranked_BK = _rank(score_BK, length_BK, length_penalty)
    at_full_length_BK = _rank(score_BK, torch.full_like(length_BK, max_len), length_penalty)
    hope_BK = torch.maximum(ranked_BK, at_full_length_BK).masked_fill(finished_BK, float("-inf"))
    if best_B1 is None:
        best_B1 = ranked_BK.masked_fill(~finished_BK, float("-inf")).amax(1, keepdim=True)
    return bool((best_B1 >= hope_BK.amax(1, keepdim=True)).all())


class _Aside:
    """The best finished hypothesis of each image; among equals the first."""

    def __init__(self, batch: int, max_len: int, eos_id: int, device: torch.device) -> None:
        self.tokens_BT = torch.full((batch, max_len), eos_id, device=device)
        self.score_B1 = torch.full((batch, 1), float("-inf"), device=device)
        self.rank_B1 = self.score_B1.clone()

    def add(self, tokens_NT: Tensor, score_BK: Tensor, rank_BK: Tensor, ended_BK: Tensor, first_B1: Tensor) -> None:
        """Those of the present beams that ended; first_B1 is each image's first row of tokens_NT."""
        rank_B1, winner_B1 = rank_BK.masked_fill(~ended_BK, float("-inf")).max(1, keepdim=True)
        better_B1 = rank_B1 > self.rank_B1
        self.rank_B1 = torch.where(better_B1, rank_B1, self.rank_B1)
        self.score_B1 = torch.where(better_B1, score_BK.gather(1, winner_B1), self.score_B1)
        length = tokens_NT.shape[1]
        own_BT = tokens_NT[(winner_B1 + first_B1)[:, 0]]
        self.tokens_BT[:, :length] = torch.where(better_B1, own_BT, self.tokens_BT[:, :length])


class DecodingModel(Protocol):
    """The part of `Generates` (models/protocols.py) that decoding needs. Set the model to eval mode first."""

    def start(self, image: Image, *, max_len: int) -> Any: ...

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def reorder(self, state: Any, index_N: Tensor) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class EncodedImages:
    """Images that are encoded already, for decoders that follow one another: `start` returns the same state again.

    state: what `model.start` returned, for the largest `max_len` that any of them will ask for.
    """

    model: DecodingModel
    state: Any

    def start(self, image: Image, *, max_len: int) -> Any:
        return self.state

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.model.step(token_N, state)

    def reorder(self, state: Any, index_N: Tensor) -> Any:
        return self.model.reorder(state, index_N)


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """ids: the tokens between [CLS] and [SEP]; score: the sum of their log probabilities, [SEP]'s included."""

    ids: list[int]
    score: float


def collect(tokens_NT: Tensor, scores_N: Tensor, eos_id: int) -> list[Hypothesis]:
    """Rows of tokens, cut before their first `eos_id`."""
    hypotheses = []
    for ids, score in zip(tokens_NT.tolist(), scores_N.tolist(), strict=True):
        end = ids.index(eos_id) if eos_id in ids else len(ids)
        hypotheses.append(Hypothesis(ids=ids[:end], score=score))
    return hypotheses


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """In float32 at least, whatever precision the model runs in."""
    return logits_NV.log_softmax(-1, dtype=torch.promote_types(logits_NV.dtype, torch.float32))


def device_of(image: Image) -> torch.device:
    return image.mask_BR.device if isinstance(image, Regions) else image.pixels_B3HW.device


@torch.no_grad()
def greedy(model: DecodingModel, image: Image, *, max_len: int, bos_id: int, eos_id: int) -> list[Hypothesis]:
    """One description per image, of at most `max_len` tokens, `eos_id` included; stops when all have ended."""
    device = device_of(image)
    state = model.start(image, max_len=max_len)
    token_N = torch.full((len(image),), bos_id, device=device)
    score_N = torch.zeros(len(image), device=device)
    finished_N = torch.zeros(len(image), dtype=torch.bool, device=device)
    tokens = []
    for _ in range(max_len):
        logits_NV, state = model.step(token_N, state)
        best_N, token_N = log_probabilities(logits_NV).max(-1)
        token_N = token_N.masked_fill(finished_N, eos_id)
        score_N = score_N + best_N.masked_fill(finished_N, 0.0)
        finished_N = finished_N | (token_N == eos_id)
        tokens.append(token_N)
        if finished_N.all():
            break
    return collect(torch.stack(tokens, 1), score_N, eos_id)
