"""How a captioner looks for its words: by a beam, or for what the beam's caption and drawn ones agree on.

What a version is scored by is what it is served with: the search is kept beside the scores, and in the bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import nn

from vlp_models.common.io import read_json, write_json
from vlp_models.data.batch import Batch, Regions
from vlp_models.data.shards.dataset import ShardDataset, pooled
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, VLPError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.coco_tools import DROPPED
from vlp_models.metrics.consensus import most_alike
from vlp_models.models.decoding.sampling import sample as draw
from vlp_models.models.decoding.search import Hypothesis, beam_search, greedy
from vlp_models.models.protocols import Generates, SetsAside
from vlp_models.params import EvaluateParams, build

FILE = "search.json"
DRAWS = 1  # the seed of what is drawn for a consensus: every image has the same
MOST = 20_000  # captions at once times tokens of each, in a foreign search.json: a state is held for all of them
KEPT = (  # of `evaluate`: what a caption depends on
    "beam_size",
    "length_penalty",
    "consensus",
    "consensus_temperature",
    "consensus_neighbours",
    "max_caption_len",
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of each image.

    said    the caption
    beam    the best of the beam; the same as `said` unless there is a consensus
    greedy  the most probable token each time
    """

    said: list[Hypothesis]
    beam: list[Hypothesis]
    greedy: list[Hypothesis]


class CaptionSearch:
    """memory: what `consensus_neighbours` asks for; made by `prepare` or `load`."""

    def __init__(self, tokenizer: Tokenizer, feature_dim: int) -> None:
        """feature_dim: of the regions that the model reads."""
        self.settings = EvaluateParams()
        self.memory: CaptionMemory | None = None
        self._tokenizer = tokenizer
        self._feature_dim = feature_dim

    def find(self, model: Generates, batch: Batch) -> Found:
        settings = self.settings
        plain = greedy(model, batch.image, **self._ends)
        best = plain
        if settings.beam_size > 1:
            best = beam_search(
                model,
                batch.image,
                beam_size=settings.beam_size,
                length_penalty=settings.length_penalty,
                set_aside=_sets_aside(model),
                **self._ends,
            )
        said = self._most_alike(model, batch, best) if settings.consensus else best
        return Found(said=said, beam=best, greedy=plain)

    def in_words(self, model: nn.Module) -> str:
        s = self.settings
        aside = ", finished captions set aside" if _sets_aside(model) and s.beam_size > 1 else ""
        ranked = f", length penalty {s.length_penalty:g}" if s.length_penalty and s.beam_size > 1 else ""
        drawn = f"{s.consensus} drawn at {s.consensus_temperature:g}"
        alike = f", the most alike of it and {drawn}" if s.consensus else ""
        if s.consensus_neighbours:
            alike = f", of it and {drawn} the most like captions of {s.consensus_neighbours} similar photos"
        return f"beam {s.beam_size}{ranked}{aside}{alike}, at most {s.max_caption_len} tokens"

    @property
    def best(self) -> str:
        """What `Found.beam` is, in words."""
        return f"the best of a beam of {self.settings.beam_size}"

    @property
    def chosen(self) -> str:
        """What `Found.said` is, in words."""
        s = self.settings
        if not s.consensus:
            return self.best
        others = "those of similar photos" if s.consensus_neighbours else "the others"
        return f"of the beam's and {s.consensus} drawn the one most like {others}"

    def prepare(self, shards: Path, sources: Mapping[str, int], max_regions: int, kept: Path | None) -> None:
        """
        Args:
            sources: what the run learnt from.
            kept: a folder of `save` whose memory is taken, if it has one; else, and without it, one is made of the
                shards: a version that was registered before is compared with others by the search of today.

        Raises:
            DataError: see `CaptionMemory.of`.
            CheckpointError: see `CaptionMemory.load`.
        """
        if not self.settings.consensus_neighbours:
            return
        if kept is not None and (kept / FEATURES).exists():
            self.memory = CaptionMemory.load(kept, self._tokenizer, self._feature_dim)
            return
        try:
            self.memory = CaptionMemory.of(shards, sources, self._tokenizer, max_regions)
        except DataError as error:
            if kept is None:
                raise
            raise DataError(
                f"{kept.parent}: registered without captions to look up, and none can be made here ({error}); "
                "`vlp run` registers its run anew, with them"
            ) from None

    def save(self, directory: Path) -> None:
        directory.mkdir()
        write_json(directory / FILE, {name: getattr(self.settings, name) for name in KEPT})
        if self.settings.consensus_neighbours and self.memory is not None:
            self.memory.save(directory)

    def load(self, directory: Path) -> None:
        """
        Raises:
            CheckpointError: nothing that `save` wrote.
        """
        file = directory / FILE
        try:
            said = {name: value for name, value in dict(read_json(file)).items() if name in KEPT}
            settings = build(EvaluateParams, said, where="search", file=str(file))
            if max(settings.beam_size, settings.consensus) * settings.max_caption_len > MOST:
                raise ValueError(f"more than {MOST:,} tokens at once")
            self.settings = settings
        except (VLPError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: does not say how captions are searched for ({error})") from None
        if self.settings.consensus_neighbours:
            self.memory = CaptionMemory.load(directory, self._tokenizer, self._feature_dim)

    def _most_alike(self, model: Generates, batch: Batch, best: Sequence[Hypothesis]) -> list[Hypothesis]:
        """For each image, of `best` and those drawn beside it, the one that is most like the others, or like the
        captions of photos that look alike."""
        settings, seeded = self.settings, torch.Generator().manual_seed(DRAWS)
        drawn = draw(
            model,
            batch.image,
            num_samples=settings.consensus,
            draws_KT=torch.rand(settings.consensus, settings.max_caption_len, generator=seeded),
            temperature=settings.consensus_temperature,
            **self._ends,
        )
        groups = [[one, *others] for one, others in zip(best, drawn, strict=True)]
        words = [[self._tokenizer.merge(h.ids) for h in group] for group in groups]
        if not settings.consensus_neighbours:
            return [group[most_alike(said)] for group, said in zip(groups, words, strict=True)]
        if self.memory is None:
            raise RuntimeError("`prepare` or `load` comes first")
        looks_BF = cast(Regions, batch.image).pooled_BF().float().cpu().numpy()
        return [
            group[self.memory.choose(image_id, look_F, said, settings.consensus_neighbours)]
            for group, said, image_id, look_F in zip(groups, words, batch.image_ids, looks_BF, strict=True)
        ]

    @property
    def _ends(self) -> dict[str, Any]:
        """How the decoders begin and end."""
        return {
            "max_len": self.settings.max_caption_len,
            "bos_id": self._tokenizer.cls_id,
            "eos_id": self._tokenizer.sep_id,
        }


def _sets_aside(model: object) -> bool:
    return isinstance(model, SetsAside) and model.sets_aside


MOST_PHOTOS = 200_000  # photos: each caption's search goes through all of them
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
        return int(self._scorer.mean_score(near, [_without_punctuation(words) for words in candidates]).argmax())

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
        return [_without_punctuation(self._tokenizer.split(text)) for text in self._texts[image_id]]

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
            if (
                features_NF.dtype != np.float16
                or features_NF.shape != (len(rows), feature_dim)
                or len(rows) > MOST_PHOTOS
            ):
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
    if not 0 < len(photos) <= MOST_PHOTOS:
        raise DataError(
            f"{shards}: {len(photos):,} captioned training images; `evaluate.consensus_neighbours` looks through 1 "
            f"to {MOST_PHOTOS:,} of them. Set it to 0"
        )
    return photos


def _without_punctuation(words: Iterable[str]) -> list[str]:
    return [word for word in words if word not in DROPPED]
