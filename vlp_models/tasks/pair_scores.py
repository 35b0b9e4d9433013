"""Every caption against every image by a model that fuses the two: exact, and slow, as each pair is a pass of its own.

1,000 images with five captions each are five million passes. With a shortlist only the pairs that embeddings place
among the first are scored, and all others stand behind them in the order of their embeddings.

Shape suffixes: I images, T captions, N pairs, D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlp_models.data.tokenizer import Tokenizer
from vlp_models.metrics.retrieval import best_places
from vlp_models.models.protocols import ScoresPairs

PAIRS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Where an image's encoding is: row `row` of what `encode_image` made of its batch."""

    state: Any
    row: int


@torch.no_grad()
def score_all(
    model: ScoresPairs,
    tokenizer: Tokenizer,
    images: Sequence[Encoded],
    captions: Sequence[str],
    *,
    max_text_len: int,
    wanted_TI: NDArray[np.bool_] | None = None,
) -> NDArray[np.float32]:
    """[T, I]; of pairs that are not wanted, minus infinity."""
    scores_TI = np.full((len(captions), len(images)), -np.inf, dtype=np.float32)
    device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else torch.device("cpu")
    columns: dict[int, list[int]] = {}
    for column, image in enumerate(images):
        columns.setdefault(id(image.state), []).append(column)
    for own in columns.values():
        state = images[own[0]].state
        if wanted_TI is None:
            pairs = [(t, i) for t in range(len(captions)) for i in own]
        else:
            pairs = [(int(t), own[int(c)]) for t, c in np.argwhere(wanted_TI[:, own])]
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            block = pairs[start : start + PAIRS_AT_ONCE]
            text = tokenizer.encode_batch([captions[t] for t, _ in block], max_text_len).to(device)
            image_of_text_N = torch.tensor([images[i].row for _, i in block], device=device)
            found_N = model.score(state, text, image_of_text_N).float().cpu().numpy()
            scores_TI[[t for t, _ in block], [i for _, i in block]] = found_N
    return scores_TI


def shortlisted(similarity_TI: NDArray[np.float32], count: int) -> NDArray[np.bool_]:
    """The pairs worth a closer look: each caption's `count` most similar images, and each image's captions."""
    wanted_TI = np.zeros(similarity_TI.shape, dtype=bool)
    np.put_along_axis(wanted_TI, best_places(similarity_TI, count), True, axis=1)
    np.put_along_axis(wanted_TI.T, best_places(similarity_TI.T, count), True, axis=1)
    return wanted_TI


def behind(scores_TI: NDArray[np.float32], similarity_TI: NDArray[np.float32]) -> NDArray[np.float32]:
    """Pairs that were not scored come behind all that were, in the order of their similarity (of unit vectors). A score
    that is no number stays one, for `rank_similarities` to refuse."""
    scored_TI = ~np.isneginf(scores_TI)
    lowest = scores_TI[scored_TI].min() if scored_TI.any() else np.float32(0)
    return np.where(scored_TI, scores_TI, lowest - 2 + similarity_TI).astype(np.float32)
