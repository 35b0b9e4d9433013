"""Captions sampled from the model's distribution.

Shape suffixes: N hypotheses, M hypotheses that are still computed, K samples an image, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlp_models.data.batch import Image
from vlp_models.models.decoding.search import DecodingModel, Hypothesis, device_of, log_probabilities, to_hypotheses

COMPACT_SHARE = 0.25  # drop finished rows when they exceed this share; it costs a copy of the others' state


@torch.no_grad()
def sample(
    model: DecodingModel,
    image: Image,
    *,
    max_len: int,
    bos_id: int,
    eos_id: int,
    num_samples: int,
    generator: torch.Generator | None = None,
    draws_KT: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> list[list[Hypothesis]]:
    """Return `num_samples` independent captions per image, of at most `max_len` tokens including `eos_id`.

    Tokens are drawn from softmax(logits / temperature); scores are log probabilities at temperature 1, comparable with
    those of `greedy`. The generator may be on another device than the model.

    Args:
        draws_KT: replaces the generator: uniform numbers in [0, 1) for `num_samples` times `max_len` tokens, which
            select them by the inverse distribution function. They are the same for each image, so an image's samples
            do not depend on the other images in the batch; and finished samples are no longer computed.
        top_p: sample only from the most probable tokens that together have this probability (Holtzman et al. 2020).
    """
    device = device_of(image)
    # N = B * K rows, the samples of an image next to each other; finished rows may be dropped, M remain.
    count = len(image) * num_samples
    state = model.start(image, max_len=max_len)
    state = model.reorder(state, torch.arange(len(image), device=device).repeat_interleave(num_samples))
    tokens_NT = torch.full((count, max_len), eos_id, device=device)
    score_N = torch.zeros(count, device=device)
    row_M = torch.arange(count, device=device)  # rows that are still computed
    token_M = torch.full((count,), bos_id, device=device)
    ended_M = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(max_len):
        logits_MV, state = model.step(token_M, state)
        probabilities_MV = log_probabilities(logits_MV / temperature).exp()
        if top_p < 1:
            probabilities_MV = nucleus(probabilities_MV, top_p)
        if draws_KT is not None:
            # Inverse distribution function: the first token at which the cumulative probability exceeds the draw.
            draw_M1 = draws_KT[:, step].to(device)[row_M % num_samples][:, None]
            sums_MV = probabilities_MV.cumsum(-1)
            index_M1 = torch.searchsorted(sums_MV, draw_M1 * sums_MV[:, -1:], right=True)
            drawn_M = index_M1[:, 0].clamp(max=probabilities_MV.shape[1] - 1)
        else:
            draw_device = generator.device if generator is not None else device
            drawn_M = torch.multinomial(probabilities_MV.to(draw_device), 1, generator=generator)[:, 0].to(device)
        # A finished row repeats `eos_id`, at no cost to its score.
        token_M = drawn_M.masked_fill(ended_M, eos_id)
        drawn_score_M = log_probabilities(logits_MV).gather(1, drawn_M[:, None])[:, 0]
        score_N[row_M] += drawn_score_M.masked_fill(ended_M, 0.0)
        tokens_NT[row_M, step] = token_M
        ended_M = ended_M | (token_M == eos_id)
        if ended_M.all():
            break
        # With a generator, a row's random numbers depend on its position, so no row may be dropped.
        if draws_KT is not None and ended_M.float().mean() > COMPACT_SHARE:
            active = (~ended_M).nonzero()[:, 0]
            state = model.reorder(state, active)
            row_M, token_M, ended_M = row_M[active], token_M[active], ended_M[active]
    flat = to_hypotheses(tokens_NT, score_N, eos_id)
    return [flat[i : i + num_samples] for i in range(0, count, num_samples)]


def nucleus(probabilities_NV: Tensor, share: float) -> Tensor:
    """Return the probabilities with all tokens at zero except the fewest most probable ones that sum to `share`."""
    sorted_NV, order_NV = probabilities_NV.sort(-1, descending=True)
    # The probability of all more probable tokens; a token is dropped if they have the share already.
    before_NV = sorted_NV.cumsum(-1) - sorted_NV
    return probabilities_NV.masked_fill((before_NV >= share).gather(-1, order_NV.argsort(-1)), 0.0)
