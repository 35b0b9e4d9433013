"""Greedy and beam search, batched over images, and the interface that decoding drives.

Shape suffixes: B images, K beams, N hypotheses (B * K in beam search), V vocabulary, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vlp_models.data.batch import Image, PixelSets, Regions


class DecodingModel(Protocol):
    """The part of `Generates` (models/protocols.py) that decoding needs. Set the model to eval mode first."""

    def start(self, image: Image, *, max_len: int) -> Any: ...

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]: ...

    def reorder(self, state: Any, index_N: Tensor) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class EncodedImages:
    """A `DecodingModel` with images already encoded, to decode them several times: `start` returns the same state.

    state: result of `model.start` for the largest `max_len` in use.
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
    """ids: the tokens between [CLS] and [SEP]; score: the sum of their log probabilities, including [SEP]'s."""

    ids: list[int]
    score: float


def to_hypotheses(tokens_NT: Tensor, scores_N: Tensor, eos_id: int) -> list[Hypothesis]:
    """Return the rows of tokens, cut before their first `eos_id`."""
    hypotheses = []
    for ids, score in zip(tokens_NT.tolist(), scores_N.tolist(), strict=True):
        end = ids.index(eos_id) if eos_id in ids else len(ids)
        hypotheses.append(Hypothesis(ids=ids[:end], score=score))
    return hypotheses


def log_probabilities(logits_NV: Tensor) -> Tensor:
    """Return log probabilities in float32 at least, whatever precision the model runs in."""
    return logits_NV.log_softmax(-1, dtype=torch.promote_types(logits_NV.dtype, torch.float32))


def device_of(image: Image) -> torch.device:
    if isinstance(image, PixelSets):
        return image.there_BK.device
    return image.mask_BR.device if isinstance(image, Regions) else image.pixels_B3HW.device


# ---- Greedy search -----------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy(model: DecodingModel, image: Image, *, max_len: int, bos_id: int, eos_id: int) -> list[Hypothesis]:
    """Return one caption per image, of at most `max_len` tokens including `eos_id`."""
    device = device_of(image)
    # One hypothesis per image; a finished one goes on reading `eos_id`, which changes neither its tokens nor its score.
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
    return to_hypotheses(torch.stack(tokens, 1), score_N, eos_id)


# ---- Beam search -------------------------------------------------------------------------------------------------


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
    """Return the best caption found per image, of at most `max_len` tokens including `eos_id`.

    Hypotheses are ranked by score / length ** length_penalty, where the length includes `eos_id`; 0 ranks by the sum of
    log probabilities, as in the papers. The search stops when no unfinished hypothesis of the batch can still win.

    set_aside: what happens to finished hypotheses. False: they stay in the beam until enough better ones push them out,
        and are then lost. True: they leave the beam at once and the best of them is kept, as in the public code of
        UniLM and Unified VLP; an image whose beams all finish in the same step is done.
    """
    device = device_of(image)
    batch, beams = len(image), beam_size
    first_B1 = torch.arange(batch, device=device)[:, None] * beams  # row of each image's first hypothesis

    # N = B * K hypotheses, those of an image next to each other: row k of image b is b * K + k.
    state = model.start(image, max_len=max_len)
    state = model.reorder(state, torch.arange(batch, device=device).repeat_interleave(beams))
    tokens_NT = torch.empty((batch * beams, 0), dtype=torch.int64, device=device)
    token_N = torch.full((batch * beams,), bos_id, device=device)
    score_BK = torch.full((batch, beams), float("-inf"), device=device)
    score_BK[:, 0] = 0.0  # all beams are equal at first: extend only one
    length_BK = torch.zeros((batch, beams), device=device)
    finished_BK = torch.zeros((batch, beams), dtype=torch.bool, device=device)
    best = _BestFinished(batch, max_len, eos_id, device) if set_aside else None

    for step in range(1, max_len + 1):
        # The log probability of each next token: [N, V] -> [B, K, V]. A finished hypothesis has no next token.
        logits_NV, state = model.step(token_N, state)
        step_BKV = log_probabilities(logits_NV).unflatten(0, (batch, beams))
        vocabulary = step_BKV.shape[-1]
        step_BKV = step_BKV.masked_fill(finished_BK[..., None], float("-inf"))
        if best is None:  # a finished hypothesis has one continuation, itself
            step_BKV[..., eos_id] = step_BKV[..., eos_id].masked_fill(finished_BK, 0.0)
        length_BK = torch.where(finished_BK, length_BK, step)

        # The best `beams` of all continuations of an image: [B, K, V] -> [B, K]
        total_BKV = score_BK[..., None] + step_BKV
        ranked_BKV = _rank(total_BKV, length_BK[..., None], length_penalty)
        best_BK = ranked_BKV.flatten(1).topk(beams).indices
        parent_BK, token_BK = best_BK // vocabulary, best_BK % vocabulary

        # Every row of the state below follows its parent: a beam may have several continuations, or none.
        score_BK = total_BKV.flatten(1).gather(1, best_BK)
        length_BK = length_BK.gather(1, parent_BK)
        finished_BK = token_BK == eos_id
        parent_N = (parent_BK + first_B1).flatten()
        token_N = token_BK.flatten()
        tokens_NT = torch.cat([tokens_NT[parent_N], token_N[:, None]], dim=1)
        if best is not None:
            # At the limit, unfinished captions count as well.
            ended_BK = finished_BK | (step == max_len)
            best.add(tokens_NT, score_BK, _rank(score_BK, length_BK, length_penalty), ended_BK, first_B1)
        best_B1 = None if best is None else best.rank_B1
        if step == max_len or _is_decided(score_BK, length_BK, finished_BK, max_len, length_penalty, best_B1):
            break
        state = model.reorder(state, parent_N)

    if best is not None:
        return to_hypotheses(best.tokens_BT, best.score_B1[:, 0], eos_id)
    winner_B1 = _rank(score_BK, length_BK, length_penalty).argmax(1, keepdim=True)
    return to_hypotheses(tokens_NT[(winner_B1 + first_B1)[:, 0]], score_BK.gather(1, winner_B1)[:, 0], eos_id)


def _rank(score: Tensor, length: Tensor, length_penalty: float) -> Tensor:
    return score / length.clamp(min=1) ** length_penalty if length_penalty else score


def _is_decided(
    score_BK: Tensor,
    length_BK: Tensor,
    finished_BK: Tensor,
    max_len: int,
    length_penalty: float,
    best_B1: Tensor | None = None,
) -> bool:
    """Return whether every image has a finished hypothesis that no unfinished one can still beat.

    Scores only fall, so an unfinished hypothesis ranks at best with its present score at the full length (or at the
    present length, if length is a disadvantage). best_B1: rank of the best finished hypothesis, if it need not be in
    the beam.
    """
    # The best rank that each unfinished hypothesis can still reach
    ranked_BK = _rank(score_BK, length_BK, length_penalty)
    at_full_length_BK = _rank(score_BK, torch.full_like(length_BK, max_len), length_penalty)
    bound_BK = torch.maximum(ranked_BK, at_full_length_BK).masked_fill(finished_BK, float("-inf"))
    if best_B1 is None:
        best_B1 = ranked_BK.masked_fill(~finished_BK, float("-inf")).amax(1, keepdim=True)
    return bool((best_B1 >= bound_BK.amax(1, keepdim=True)).all())


class _BestFinished:
    """The best finished hypothesis of each image; the first of several equally good ones."""

    def __init__(self, batch: int, max_len: int, eos_id: int, device: torch.device) -> None:
        self.tokens_BT = torch.full((batch, max_len), eos_id, device=device)
        self.score_B1 = torch.full((batch, 1), float("-inf"), device=device)
        self.rank_B1 = self.score_B1.clone()

    def add(self, tokens_NT: Tensor, score_BK: Tensor, rank_BK: Tensor, ended_BK: Tensor, first_B1: Tensor) -> None:
        """Add the beams that just ended. first_B1: each image's first row of tokens_NT."""
        rank_B1, winner_B1 = rank_BK.masked_fill(~ended_BK, float("-inf")).max(1, keepdim=True)
        better_B1 = rank_B1 > self.rank_B1
        self.rank_B1 = torch.where(better_B1, rank_B1, self.rank_B1)
        self.score_B1 = torch.where(better_B1, score_BK.gather(1, winner_B1), self.score_B1)
        length = tokens_NT.shape[1]
        winner_BT = tokens_NT[(winner_B1 + first_B1)[:, 0]]
        self.tokens_BT[:, :length] = torch.where(better_B1, winner_BT, self.tokens_BT[:, :length])
