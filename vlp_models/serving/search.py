"""Rank images by a text with a retrieval model, for the demo page and for `VLP.search`.

Shape suffixes: I images, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from vlp_models.data.sample import Sample
from vlp_models.metrics.retrieval import top_columns
from vlp_models.models.protocols import Embeds, ScoresPairs
from vlp_models.serving.predictor import check_text
from vlp_models.tasks.retrieval import EncodedImage, Retrieval, score_pairs

AT_ONCE = 32  # images per forward pass


class ImageSearch:
    """Ranks the images of a collection by a text; they are embedded at the first search.

    Args:
        count: number of images.
        read: positions in the collection -> their samples.
    """

    def __init__(
        self, task_model: Retrieval, count: int, read: Callable[[Sequence[int]], list[Sample]], device: str = "cpu"
    ) -> None:
        self.task_model = task_model
        self.count = count
        self._read = read
        self._device = device
        self._embedded_ID: NDArray[np.float32] | None = None

    def find(self, text: str, top: int) -> list[tuple[int, float]]:
        """Return the positions of the `top` best images with their scores, best first.

        Scores are comparable within one search only.

        Raises:
            DataError: `check_text` rejects the text.
        """
        check_text(text, "query")
        if self.task_model.by_embeddings:
            similarity_I = self._similarity(text)
        else:
            similarity_I = np.zeros(self.count, np.float32)
        # Similarities choose a shortlist, if there is one; scores of pairs then rank it.
        rows: list[int] = np.arange(self.count).tolist()
        score_I = similarity_I
        if self.task_model.by_pairs:
            shortlist = int(self.task_model.options.shortlist)
            if shortlist:
                rows = top_columns(similarity_I[None], shortlist)[0].tolist()
            score_I = self._pair_scores(text, rows)
        # `score_I` is now over `rows`: all images, or those of the shortlist.
        best = top_columns(score_I[None], top)[0].tolist()
        return [(rows[i], float(score_I[i])) for i in best]

    @torch.no_grad()
    def _similarity(self, text: str) -> NDArray[np.float32]:
        # Each image is embedded once, in blocks of `AT_ONCE`, since their pixels would not fit into memory together.
        model = cast(Embeds, self.task_model.model)
        if self._embedded_ID is None:
            blocks = []
            for samples in self._batches(range(self.count)):
                batch = self.task_model.collate(samples).to(self._device)
                blocks.append(model.embed_image(batch.image).float().cpu().numpy())
            # Once for all searches: (I, D), 4 D bytes an image.
            self._embedded_ID = np.concatenate(blocks)
        tokens = self.task_model.tokenizer.encode_batch([text], self.task_model.info.max_text_len).to(self._device)
        # (I, D) @ (D,) -> (I,)
        similarity_I: NDArray[np.float32] = self._embedded_ID @ model.embed_text(tokens).float().cpu().numpy()[0]
        return similarity_I

    @torch.no_grad()
    def _pair_scores(self, text: str, rows: Sequence[int]) -> NDArray[np.float32]:
        model, scores = cast(ScoresPairs, self.task_model.model), []
        # A model that scores pairs reads image and text together, so nothing of it can be stored for other texts.
        for samples in self._batches(rows):
            state = model.encode_image(self.task_model.collate(samples).to(self._device).image)
            encoded = [EncodedImage(state=state, row=row) for row in range(len(samples))]
            length = self.task_model.info.max_text_len
            # [0]: the scores of the one text with the images of the block.
            scores.append(score_pairs(model, self.task_model.tokenizer, encoded, [text], max_text_len=length)[0])
        return np.concatenate(scores)

    def _batches(self, rows: Sequence[int]) -> Iterator[list[Sample]]:
        for start in range(0, len(rows), AT_ONCE):
            yield self._read(rows[start : start + AT_ONCE])
