"""Caption-based image retrieval: find the image a sentence describes, and the sentence of an image.

No head: the model's own two embeddings are compared (TDEN: the vectors of image-sentence matching, section "Downstream
Tasks", with which a million images can be searched by one matrix product).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.metrics.retrieval import best_places, rank
from vlp_models.models.protocols import Embeds
from vlp_models.objectives.ism import match_in_batch
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.ranks import number_over_ranks
from vlp_models.objectives.token_loss import empty
from vlp_models.tasks.base import TaskModel, TaskOptions

TOP = 5
IMAGE, TEXTS = "image_D", "texts_ND"  # a record's embeddings, until `finish` has ranked with them


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(TaskOptions):
    """negatives: `all` that violate the margin (the paper's Multibatch), or a pair's `hardest` (its public code)."""

    negatives: Literal["all", "hardest"] = "all"
    margin: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 2:
            raise ParamsError(f"params.yaml: `options.margin: {self.margin}` must be above 0, and at most 2")


class Retrieval(TaskModel):
    """Triplet loss within the batch, in both directions. Samples of one image are no negatives of each other."""

    task = "retrieval"
    view = "captions"
    prediction_view = "images"
    options_class = RetrievalOptions

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: Mapping[str, Any], *, answers: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        if not isinstance(model, Embeds):
            raise ParamsError(
                f"the model `{info['model']}` can't embed images and texts apart, so it can't learn retrieval"
            )

    def loss(self, batch: Batch) -> Loss:
        """Parts `ism`, `ism_accuracy`. A batch of one image has no negative: its loss is zero."""
        # Besides, batch normalisation in the poolers could not take a batch of one.
        if len(number_over_ranks(batch.image_ids)[0].unique()) == 1:
            return empty(next(self.parameters()), "ism")
        model, options = cast(Embeds, self.model), cast(RetrievalOptions, self.options)
        return match_in_batch(
            model.embed_text(batch.text),
            model.embed_image(batch.image),
            batch.image_ids,
            margin=options.margin,
            negatives=options.negatives,
        )

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Embeddings, each image's and each caption's once; `finish` makes predictions of them."""
        self.eval()
        model = cast(Embeds, self.model)
        images_BD = model.embed_image(batch.image).float().cpu().numpy()
        captions = [caption for sample in samples for caption in sample.captions]
        texts_ND = np.zeros((0, images_BD.shape[1]), dtype=np.float32)
        if captions:
            text = self.tokenizer.encode_batch(captions, self.info["max_text_len"]).to(batch.text.ids_BT.device)
            texts_ND = model.embed_text(text).float().cpu().numpy()
        ends = np.cumsum([len(sample.captions) for sample in samples])[:-1]
        return [
            {"image_id": sample.image_id, IMAGE: image_D, TEXTS: own_ND}
            for sample, image_D, own_ND in zip(samples, images_BD, np.split(texts_ND, ends), strict=True)
        ]

    def finish(self, predictions: list[dict[str, Any]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Ranks each dataset's images and captions among themselves: `rank` of the image's best caption, `top` captions
        for it, and under `captions` each caption's `rank` of its image and `top` images."""
        finished: list[dict[str, Any]] = [{} for _ in predictions]
        for source in dict.fromkeys(sample.source for sample in samples):
            chosen = [i for i, sample in enumerate(samples) if sample.source == source]
            rows = _ranked([predictions[i] for i in chosen], [samples[i] for i in chosen])
            for i, row in zip(chosen, rows, strict=True):
                finished[i] = row
        return finished


def _ranked(rows: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    captions = [(sample.image_id, caption) for sample in samples for caption in sample.captions]
    found = rank(
        [sample.image_id for sample in samples],
        np.stack([row[IMAGE] for row in rows]),
        [image_id for image_id, _ in captions],
        np.concatenate([row[TEXTS] for row in rows]),
    )
    similarity_TI = found.similarity_TI
    images_TK, texts_IK = best_places(similarity_TI, TOP), best_places(similarity_TI.T, TOP)
    column_of = {image_id: column for column, image_id in enumerate(found.image_ids)}
    records, start = [], 0
    for sample in samples:
        column = column_of[sample.image_id]
        own = [
            {
                "caption": caption,
                "rank": int(found.text_ranks_T[t]),
                "top": [[found.image_ids[i], round(float(similarity_TI[t, i]), 6)] for i in images_TK[t]],
            }
            for t, caption in enumerate(sample.captions, start=start)
        ]
        start += len(own)
        records.append(
            {
                "image_id": sample.image_id,
                "rank": int(found.image_ranks_I[column]),
                "top": [[*captions[t], round(float(similarity_TI[t, column]), 6)] for t in texts_IK[column]],
                "captions": own,
            }
        )
    return records
