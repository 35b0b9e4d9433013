"""Descriptions drawn from the model's own distribution.

Shape suffixes: N hypotheses, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlp_models.data.batch import Image
from vlp_models.decoding.steps import Hypothesis, Steps, collect, device_of, log_probabilities


@torch.no_grad()
def sample(
    model: Steps,
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
    """`num_samples` independent descriptions per image, of at most `max_len` tokens, `eos_id` included.

    Tokens are drawn from softmax(logits / temperature); scores are log probabilities under the model as it is
    (temperature 1), comparable with greedy's. top_p: a token is one of the likeliest that have this share of the
    probability together (Holtzman et al. 2020). The generator may live on another device than the model.

    draws_KT: in place of a generator, numbers from 0 to below 1 for `num_samples` times `max_len` tokens, which pick
        them by the inverse of the distribution function: the same for each image, so that what is drawn for one does
        not depend on who stands beside it.
    """
    device = device_of(image)
    count = len(image) * num_samples
    state = model.start(image, max_len=max_len)
    state = model.reorder(state, torch.arange(len(image), device=device).repeat_interleave(num_samples))
    token_N = torch.full((count,), bos_id, device=device)
    score_N = torch.zeros(count, device=device)
    finished_N = torch.zeros(count, dtype=torch.bool, device=device)
    tokens = []
    for step in range(max_len):
        logits_NV, state = model.step(token_N, state)
        probabilities_NV = log_probabilities(logits_NV / temperature).exp()
        if top_p < 1:
            probabilities_NV = nucleus(probabilities_NV, top_p)
        if draws_KT is not None:
            drawn_N = _inverse(probabilities_NV, draws_KT[:, step].to(device).repeat(len(image)))
        else:
            where = generator.device if generator is not None else device
            drawn_N = torch.multinomial(probabilities_NV.to(where), 1, generator=generator)[:, 0].to(device)
        token_N = drawn_N.masked_fill(finished_N, eos_id)
        drawn_score_N = log_probabilities(logits_NV).gather(1, drawn_N[:, None])[:, 0]
        score_N = score_N + drawn_score_N.masked_fill(finished_N, 0.0)
        finished_N = finished_N | (token_N == eos_id)
        tokens.append(token_N)
        if finished_N.all():
            break
    flat = collect(torch.stack(tokens, 1), score_N, eos_id)
    return [flat[i : i + num_samples] for i in range(0, count, num_samples)]


def nucleus(probabilities_NV: Tensor, share: float) -> Tensor:
    """The same with all but the likeliest tokens at zero, of which as few are kept as have `share` together."""
    sorted_NV, order_NV = probabilities_NV.sort(-1, descending=True)
    before_NV = sorted_NV.cumsum(-1) - sorted_NV
    return probabilities_NV.masked_fill((before_NV >= share).gather(-1, order_NV.argsort(-1)), 0.0)


def _inverse(probabilities_NV: Tensor, draws_N: Tensor) -> Tensor:
    """The first token at which the sum of probabilities exceeds the draw."""
    sums_NV = probabilities_NV.cumsum(-1)
    found_N1 = torch.searchsorted(sums_NV, draws_N[:, None] * sums_NV[:, -1:], right=True)
    return found_N1[:, 0].clamp(max=probabilities_NV.shape[1] - 1)
