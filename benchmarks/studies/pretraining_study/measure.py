"""What a fine-tuned model is worth on held-out target images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pretraining_study import adapter
from pretraining_study.data import Data, Split, take
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.vqa import question_accuracy
from vlp_models.worlds.scenes.checker import check
from vlp_models.worlds.scenes.language import words_of

AT_ONCE = 250

# metric -> (what it is called, whether less is better, digits)
METRICS: dict[str, tuple[str, bool, int]] = {
    "nll": ("NLL a token, nats", True, 3),
    "cider": ("CIDEr", False, 1),
    "true": ("true captions, %", False, 1),
    "vqa": ("VQA accuracy, %", False, 1),
    "r1": ("R@1, %", False, 1),
}


def _pieces(count: int) -> Iterator[Tensor]:
    return iter(torch.arange(count).split(AT_ONCE))


@torch.no_grad()
def nll(model: nn.Module, split: Split) -> float:
    """Nats a token of the references, each token given the image and the tokens before it."""
    total, tokens = 0.0, 0
    for rows in _pieces(len(split.captions)):
        losses_M = adapter.caption_losses(model, adapter.batch(split.images, take(split.captions, rows)))
        total, tokens = total + float(losses_M.double().sum()), tokens + len(losses_M)
    return total / tokens


@torch.no_grad()
def captions(model: nn.Module, split: Split, data: Data) -> dict[str, float]:
    """`cider` of greedy descriptions, and `true`: the share of them all of whose claims hold."""
    told = [
        text
        for rows in _pieces(len(split.images))
        for text in adapter.describe(model, split.images, rows, data.tokenizer)
    ]
    true = [check(text, dataclasses.asdict(scene)).true is True for text, scene in zip(told, split.scenes, strict=True)]
    return {"cider": cider(told, split.references), "true": 100 * float(np.mean(true))}


def cider(told: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Of one description an image, document frequencies from its references; 1.2 reads 120, as tables print it."""
    words = [[words_of(text) for text in texts] for texts in references]
    scorer = CiderD(DocumentFrequencies.of(words), lambda number: words[int(number)])
    return 100 * float(np.mean([scorer.score(str(i), [words_of(text)])[0] for i, text in enumerate(told)]))


@torch.no_grad()
def vqa(model: nn.Module, head: nn.Linear, split: Split, data: Data) -> float:
    """The official accuracy, in percent."""
    scores = []
    for rows in _pieces(len(split.questions)):
        chosen = adapter.batch(split.images, take(split.questions, rows))
        best = adapter.answer_logits(model, head, chosen).argmax(-1).tolist()
        scores += [
            question_accuracy(data.answers[a], split.answers[q]) for a, q in zip(best, rows.tolist(), strict=True)
        ]
    return 100 * float(np.mean(scores))


@torch.no_grad()
def retrieval(model: nn.Module, split: Split) -> float:
    """R@1 of captions searching images, in percent: an image of which the caption is true counts as found."""
    best_N = adapter.similarity(model, split.images, split.captions).argmax(1).numpy()
    return 100 * float(split.true_NI[np.arange(len(best_N)), best_N].mean())
