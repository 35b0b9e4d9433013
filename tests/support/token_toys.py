"""A small model of words and image in float64, whose hidden words depend on the sample alone: what it learns must not
depend on how its samples are cut into micro-batches or shared out over processes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Regions
from vlp_models.objectives.generation import sentence_generation
from vlp_models.objectives.loss import Count, Loss
from vlp_models.objectives.masked_modeling import masked_language_modeling, masked_object_classification

WEIGHTS = {"mlm": 1.0, "moc": 2.0, "msg": 0.5}


class Tokens(nn.Module):
    """objectives: `mlm` (about a third of the words, of some sentences none), `moc`, `msg`."""

    objectives = tuple(WEIGHTS)

    def __init__(self, vocab: int, features: int, classes: int, *, counts_ahead: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(vocab, 6)
        self.regions = nn.Linear(features, 6)
        self.trunk = nn.Linear(6, 6)
        self.word_head = nn.Linear(6, vocab)
        self.object_head = nn.Linear(6, classes)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.passes = 0
        if counts_ahead:
            self.pretraining_counts = self.counts
        self.double()

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """bool [B, T] and [B, R]: what is masked, by the sample's name."""
        assert isinstance(batch.image, Regions)
        text_BT, image_BR = torch.zeros_like(batch.text.mask_BT), torch.zeros_like(batch.image.mask_BR)
        for i, name in enumerate(batch.sample_ids):
            own = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            draw = torch.rand(40, generator=own)
            text_BT[i] = draw[: text_BT.shape[1]] < 0.3
            image_BR[i] = draw[20 : 20 + image_BR.shape[1]] < 0.5
        return text_BT & batch.text.mask_BT, image_BR & batch.image.mask_BR

    def counts(self, batch: Batch, *, objectives: Mapping[str, Any], **_: Any) -> dict[str, Count]:
        text_BT, image_BR = self.hidden(batch)
        found = {"mlm": text_BT.sum(), "moc": image_BR.sum(), "msg": batch.text.mask_BT[:, 1:].sum()}
        return {name: found[name] for name in objectives}

    def pretraining_losses(self, batch: Batch, *, objectives: Mapping[str, Any], **_: Any) -> dict[str, Loss]:
        self.passes += 1
        self.batches += 1
        image, text = batch.image, batch.text
        assert isinstance(image, Regions)
        text_BT, image_BR = self.hidden(batch)
        seen_BRD = self.regions(image.features_BRF.double().masked_fill(image_BR[..., None], 0.0))
        image_BD = seen_BRD.sum(1)
        read_BT = text.ids_BT.masked_fill(text_BT, 4)
        state_BTD = self.trunk(torch.tanh(self.words(read_BT) + image_BD[:, None]))
        losses = {
            "mlm": masked_language_modeling(self.word_head(state_BTD[text_BT]), text.ids_BT[text_BT]),
            "moc": masked_object_classification(
                self.object_head(self.trunk(torch.tanh(image_BD[:, None] + seen_BRD))[image_BR]),
                image.class_probs_BRC[image_BR],
            ),
            "msg": sentence_generation(
                self.word_head(state_BTD[:, :-1][text.mask_BT[:, 1:]]), text.ids_BT[:, 1:][text.mask_BT[:, 1:]]
            ),
        }
        return {name: losses[name] for name in objectives}
