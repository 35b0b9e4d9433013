"""What a captioner may look up: the photos that it learnt from, as they look, with their captions.

Of several captions of a photo the one is chosen that is most like those of the training photos that look most like it
(J. Mao et al., "Deep Captioning with Multimodal Recurrent Neural Networks", 2015, consensus reranking; after J. Devlin
et al., "Exploring Nearest Neighbor Approaches for Image Captioning", 2015, whose captions are the neighbours' own).
Looks are compared by the cosine of pooled regions (data/pooled.py), captions by CIDEr-D (metrics/cider_d.py), with the
document frequencies of what is remembered; punctuation does not count, as in the official scores.

Shape suffixes: N photos remembered, F numbers of a feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vlp_models.common.io import read_json, write_json
from vlp_models.data.pooled import pooled
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.ptb import DROPPED

MOST = 200_000  # photos: each caption's search goes through all of them
FEATURES, CAPTIONS, FREQUENCIES = "memory.safetensors", "memory.json", "memory-frequencies.safetensors"


class CaptionMemory:
    """
    features_NF  float16, of length one
    captions     of each photo, as written
    image_ids    of each photo; a photo does not count as its own neighbour
    """

    def __init__(
        self,
        features_NF: NDArray[np.float16],
        captions: Sequence[Sequence[str]],
        image_ids: Sequence[str],
        tokenizer: Tokenizer,
        frequencies: DocumentFrequencies | None = None,
    ) -> None:
        """frequencies: of their n-grams; None: they are counted, a second for some thousand captions."""
        self.features_NF = features_NF
        self.captions = captions
        self.image_ids = image_ids
        self._tokenizer = tokenizer
        self._looks_NF = features_NF.astype(np.float32)
        self._texts = dict(zip(image_ids, captions, strict=True))
        self.frequencies = frequencies or DocumentFrequencies.of(map(self._words, image_ids))

    @classmethod
    def of(cls, shards: Path, sources: Mapping[str, int], tokenizer: Tokenizer, max_regions: int) -> CaptionMemory:
        """
        Raises:
            DataError: see `captioned`.
        """
        photos = captioned(shards, sources)
        captions = photos.references()
        numbers = {image_id: number for number, image_id in enumerate(photos.image_ids())}
        features_NF = pooled(photos, list(numbers.values()), max_regions).astype(np.float16)
        return cls(features_NF, [captions[image_id] for image_id in numbers], list(numbers), tokenizer)

    def choose(
        self, image_id: str, look_F: NDArray[np.float32], candidates: Sequence[Sequence[str]], count: int
    ) -> int:
        """The place of the candidate (in words) that is most like the captions of the `count` photos that look most
        alike; the first of equals. Of a photo with nothing to see, the first."""
        near = self.nearest(image_id, look_F, count)
        if not near:
            return 0
        return int(self._scorer.mean_score(near, [_spoken(words) for words in candidates]).argmax())

    def nearest(self, image_id: str, look_F: NDArray[np.float32], count: int) -> list[str]:
        """The photos that look most alike, nearest first. None for a look of zeros."""
        if not look_F.any():
            return []
        order = np.argsort(-(self._looks_NF @ look_F), kind="stable")[: count + 1]
        return [self.image_ids[n] for n in order if self.image_ids[n] != image_id][:count]

    @cached_property
    def _scorer(self) -> CiderD:
        return CiderD(self.frequencies, self._words)

    def _words(self, image_id: str) -> list[list[str]]:
        return [_spoken(self._tokenizer.split(text)) for text in self._texts[image_id]]

    def save(self, directory: Path) -> None:
        save_file({"features": np.ascontiguousarray(self.features_NF)}, directory / FEATURES)
        self.frequencies.save(directory / FREQUENCIES)
        write_json(directory / CAPTIONS, list(zip(self.image_ids, map(list, self.captions), strict=True)))

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer, feature_dim: int) -> CaptionMemory:
        """
        Raises:
            CheckpointError: none that `save` wrote, or of features of another width than the model reads.
        """
        try:
            rows = read_json(directory / CAPTIONS)
            features_NF = load_file(directory / FEATURES)["features"]
            if not all(isinstance(texts, list) for _, texts in rows):
                raise ValueError("a photo's captions are no list")
            captions = [tuple(str(text) for text in texts) for _, texts in rows]
            if features_NF.dtype != np.float16 or features_NF.shape != (len(rows), feature_dim) or len(rows) > MOST:
                raise ValueError(
                    f"{features_NF.dtype} {features_NF.shape}: not {len(rows)} photos of {feature_dim} numbers"
                )
            if not np.isfinite(features_NF).all() or not all(captions):
                raise ValueError("a photo without a caption, or of features that are no numbers")
            frequencies = DocumentFrequencies.load(directory / FREQUENCIES)
            return cls(features_NF, captions, [str(image_id) for image_id, _ in rows], tokenizer, frequencies)
        except (DataError, OSError, SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{directory}: no memory of captions: {error}; register the version anew") from None


def captioned(shards: Path, sources: Mapping[str, int], *, regions: bool = True) -> ShardDataset:
    """The photos of the train split that have a caption, each once, however often an epoch has it.

    Args:
        regions: to be read with them; without, the index alone is asked.

    Raises:
        DataError: there are none, they have no regions, or they are more than can be searched.
    """
    photos = ShardDataset(shards, "train", "images", dict.fromkeys(sources, 1), regions=regions, captioned=True)
    if not 0 < len(photos) <= MOST:
        raise DataError(
            f"{shards}: {len(photos):,} captioned training images; `evaluate.consensus_neighbours` looks through 1 "
            f"to {MOST:,} of them. Set it to 0"
        )
    return photos


def _spoken(words: Iterable[str]) -> list[str]:
    return [word for word in words if word not in DROPPED]
