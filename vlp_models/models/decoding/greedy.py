"""The most probable next token, again and again."""

from __future__ import annotations

import torch

from vlp_models.data.batch import Image
from vlp_models.models.decoding.steps import Hypothesis, Steps, collect, device_of, log_probabilities


@torch.no_grad()
def greedy(model: Steps, image: Image, *, max_len: int, bos_id: int, eos_id: int) -> list[Hypothesis]:
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
