"""How captions are found: by beam search, or by consensus among sampled captions or captions of similar images.

`evaluate.consensus_samples: K` samples K captions in addition to the beam's and chooses one of them:
- without `consensus_neighbors`, the one most similar to the others (minimum Bayes risk, metrics/consensus.py);
- with it, the one most similar to the captions of the N most similar training images: consensus reranking, J. Mao et
  al., "Deep Captioning with Multimodal Recurrent Neural Networks" (2015), after J. Devlin et al., "Exploring Nearest
  Neighbor Approaches for Image Captioning" (2015). Images are compared by the cosine of their pooled region features,
  captions by CIDEr-D (metrics/cider_d.py) with the index's own document frequencies; punctuation is ignored, as in the
  official scores.

A version is served with the search it was scored with: settings and index are saved with the scores and in the bundle.

Shape suffixes: N images in the index, F feature dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import nn

from vlp_models.common.io import read_json, write_json
from vlp_models.data.batch import Batch, Regions
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, VLPError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.coco_tools import DROPPED
from vlp_models.metrics.consensus import most_similar
from vlp_models.models.decoding.sampling import sample
from vlp_models.models.decoding.search import Hypothesis, beam_search, greedy
from vlp_models.models.protocols import Generates, StoresFinished
from vlp_models.params import SEARCH_OPTIONS, EvaluateParams, build

if TYPE_CHECKING:
    from vlp_models.data.shards.dataset import ShardDataset

SETTINGS = "search.json"
FEATURES, CAPTIONS, FREQUENCIES = "index.safetensors", "index.json", "index-frequencies.safetensors"
SAMPLING_SEED = 1  # every image gets the same random numbers
MAX_TOKENS_AT_ONCE = 20_000  # captions x tokens in an untrusted search.json: decoding keeps a state for each
MAX_IMAGES = 200_000  # each caption's search compares all of them


@dataclass(frozen=True, kw_only=True)
class FoundCaptions:
    """One of each per image.

    caption  the chosen caption
    beam     the best of the beam; equal to `caption` unless there is a consensus
    greedy   the most probable token at each step
    """

    caption: list[Hypothesis]
    beam: list[Hypothesis]
    greedy: list[Hypothesis]


class CaptionSearch:
    """The search settings of a captioner, and its index of training captions (`prepare` or `load`)."""

    def __init__(self, tokenizer: Tokenizer, feature_dim: int) -> None:
        """feature_dim: of the regions that the model reads."""
        self.settings = EvaluateParams()
        self.index: CaptionIndex | None = None
        self._tokenizer = tokenizer
        self._feature_dim = feature_dim

    def find(self, model: Generates, batch: Batch) -> FoundCaptions:
        """Decode every image of the batch greedily, by beam, and by consensus if configured."""
        settings = self.settings
        # Greedy captions are scored next to the others, so they are decoded in any case.
        greedy_captions = greedy(model, batch.image, **self._decoder_args)
        beam = greedy_captions
        if settings.beam_size > 1:
            beam = beam_search(
                model,
                batch.image,
                beam_size=settings.beam_size,
                length_penalty=settings.length_penalty,
                set_aside=_sets_aside(model),
                **self._decoder_args,
            )
        caption = self._choose_by_consensus(model, batch, beam) if settings.consensus_samples else beam
        return FoundCaptions(caption=caption, beam=beam, greedy=greedy_captions)

    def _choose_by_consensus(self, model: Generates, batch: Batch, beam: Sequence[Hypothesis]) -> list[Hypothesis]:
        """Choose one of the beam's caption and the sampled ones for each image."""
        settings, generator = self.settings, torch.Generator().manual_seed(SAMPLING_SEED)
        # (K, T) draws, the same for every image: a caption does not depend on the batch it is in.
        sampled = sample(
            model,
            batch.image,
            num_samples=settings.consensus_samples,
            draws_KT=torch.rand(settings.consensus_samples, settings.max_caption_len, generator=generator),
            temperature=settings.consensus_temperature,
            **self._decoder_args,
        )
        # Of each image, the beam's caption and the sampled ones, as tokens and as words.
        groups = [[beam_caption, *samples] for beam_caption, samples in zip(beam, sampled, strict=True)]
        words = [[self._tokenizer.merge(h.ids) for h in group] for group in groups]
        if not settings.consensus_neighbors:
            return [group[most_similar(candidates)] for group, candidates in zip(groups, words, strict=True)]
        if self.index is None:
            raise RuntimeError("call `prepare` or `load` first")
        # (B, R, F) regions -> (B, F): the query is the mean region feature
        queries_BF = cast(Regions, batch.image).pooled_BF().float().cpu().numpy()
        captions = []
        for group, candidates, image_id, query_F in zip(groups, words, batch.image_ids, queries_BF, strict=True):
            number = self.index.choose(image_id, query_F, candidates, settings.consensus_neighbors)
            captions.append(group[number])
        return captions

    @property
    def _decoder_args(self) -> dict[str, Any]:
        return {
            "max_len": self.settings.max_caption_len,
            "bos_id": self._tokenizer.cls_id,
            "eos_id": self._tokenizer.sep_id,
        }

    def describe(self, model: nn.Module) -> str:
        """Return the search as text, such as `beam 5, length penalty 0.5, at most 20 tokens`."""
        s = self.settings
        aside = ", finished captions set aside" if _sets_aside(model) and s.beam_size > 1 else ""
        penalty = f", length penalty {s.length_penalty:g}" if s.length_penalty and s.beam_size > 1 else ""
        consensus = ""
        if s.consensus_samples:
            target = f"captions of {s.consensus_neighbors} similar images" if s.consensus_neighbors else "the others"
            sampled = f"{s.consensus_samples} sampled at {s.consensus_temperature:g}"
            consensus = f", consensus with {sampled} by similarity to {target}"
        return f"beam {s.beam_size}{penalty}{aside}{consensus}, at most {s.max_caption_len} tokens"

    def prepare(self, shards: Path, sources: Mapping[str, int], max_regions: int, saved: Path | None) -> None:
        """Build or load the caption index if the settings need one.

        Args:
            sources: the run's training datasets.
            saved: a folder written by `save`, whose index is used if it has one. Otherwise the index is built from the
                shards, so that an older version is compared under today's search.
        """
        if not self.settings.consensus_neighbors:
            return
        if saved is not None and (saved / FEATURES).exists():
            self.index = CaptionIndex.load(saved, self._tokenizer, self._feature_dim)
            return
        try:
            self.index = CaptionIndex.build(shards, sources, self._tokenizer, max_regions)
        except DataError as error:
            if saved is None:
                raise
            raise DataError(
                f"{saved.parent}: registered without a caption index, and none can be built here ({error}); "
                "register its run again with `vlp run`"
            ) from None

    def save(self, directory: Path) -> None:
        """Write the settings and the index."""
        directory.mkdir()
        write_json(directory / SETTINGS, {name: getattr(self.settings, name) for name in SEARCH_OPTIONS})
        if self.settings.consensus_neighbors and self.index is not None:
            self.index.save(directory)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote.

        Raises:
            CheckpointError: damaged, or not written by `save`.
        """
        file = directory / SETTINGS
        try:
            # Only the options of a search are read, so a bundle cannot change other settings.
            stored = {name: value for name, value in dict(read_json(file)).items() if name in SEARCH_OPTIONS}
            settings = build(EvaluateParams, stored, where="search", file=str(file))
            # The file may come from anyone; a huge beam would take all memory at the first request.
            if max(settings.beam_size, settings.consensus_samples) * settings.max_caption_len > MAX_TOKENS_AT_ONCE:
                raise ValueError(f"more than {MAX_TOKENS_AT_ONCE:,} tokens at once")
            self.settings = settings
        except (VLPError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: invalid caption search settings ({error})") from None
        if self.settings.consensus_neighbors:
            self.index = CaptionIndex.load(directory, self._tokenizer, self._feature_dim)


class CaptionIndex:
    """Training images by their pooled region features, with their captions.

    features_NF  float16, unit length
    captions     of each image, as written
    image_ids    of each image; an image is not its own neighbor
    """

    def __init__(
        self,
        features_NF: NDArray[np.float16],
        captions: Sequence[Sequence[str]],
        image_ids: Sequence[str],
        tokenizer: Tokenizer,
        frequencies: DocumentFrequencies | None = None,
    ) -> None:
        """frequencies: of the captions' n-grams; None: count them (a second for some thousand captions)."""
        self.features_NF = features_NF
        self.captions = captions
        self.image_ids = image_ids
        self._tokenizer = tokenizer
        # Stored in half precision, compared in single.
        self._float_features_NF = features_NF.astype(np.float32)
        self._texts = dict(zip(image_ids, captions, strict=True))
        self.frequencies = frequencies or DocumentFrequencies.count(map(self._words, image_ids))

    @classmethod
    def build(cls, shards: Path, sources: Mapping[str, int], tokenizer: Tokenizer, max_regions: int) -> CaptionIndex:
        """Index the training images of `sources` that have a caption."""
        from vlp_models.data.shards.dataset import mean_region_features

        images = open_captioned_images(shards, sources)
        captions = images.references()
        # Image id -> its number in the shards, each id once.
        numbers = {image_id: number for number, image_id in enumerate(images.image_ids())}
        features_NF = mean_region_features(images, list(numbers.values()), max_regions).astype(np.float16)
        return cls(features_NF, [captions[image_id] for image_id in numbers], list(numbers), tokenizer)

    def choose(
        self, image_id: str, query_F: NDArray[np.float32], candidates: Sequence[Sequence[str]], count: int
    ) -> int:
        """Return the position of the candidate most similar to the captions of the `count` most similar images.

        The first of equals; 0 for a query of zeros. Candidates are split into words.
        """
        neighbors = self.nearest(image_id, query_F, count)
        # A blank image has no neighbors: the first candidate, the beam's caption, stays.
        if not neighbors:
            return 0
        texts = [_without_punctuation(words) for words in candidates]
        # The mean over neighbors: one with many captions counts as much as one with few.
        return int(self._scorer.mean_score(neighbors, texts).argmax())

    def nearest(self, image_id: str, query_F: NDArray[np.float32], count: int) -> list[str]:
        """Return the most similar images, nearest first; [] for a query of zeros."""
        if not query_F.any():
            return []
        # One more than `count`, since a training image finds itself.
        # Index features have unit length and the query is the same for all, so the product ranks by the cosine.
        order = np.argsort(-(self._float_features_NF @ query_F), kind="stable")[: count + 1]
        return [self.image_ids[n] for n in order if self.image_ids[n] != image_id][:count]

    @cached_property
    def _scorer(self) -> CiderD:
        return CiderD(self.frequencies, self._words)

    def _words(self, image_id: str) -> list[list[str]]:
        return [_without_punctuation(self._tokenizer.split(text)) for text in self._texts[image_id]]

    def save(self, directory: Path) -> None:
        """Write features, captions and document frequencies."""
        save_file({"features": np.ascontiguousarray(self.features_NF)}, directory / FEATURES)
        self.frequencies.save(directory / FREQUENCIES)
        write_json(directory / CAPTIONS, list(zip(self.image_ids, map(list, self.captions), strict=True)))

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer, feature_dim: int) -> CaptionIndex:
        """Read what `save` wrote.

        Raises:
            CheckpointError: damaged, not written by `save`, or of another feature dimension than the model reads.
        """
        try:
            # The files may come from anyone, so shapes, numbers and sizes are checked before anything is computed.
            rows = read_json(directory / CAPTIONS)
            features_NF = load_file(directory / FEATURES)["features"]
            if not all(isinstance(texts, list) for _, texts in rows):
                raise ValueError("an image's captions are not a list")
            captions = [tuple(str(text) for text in texts) for _, texts in rows]
            if features_NF.dtype != np.float16 or features_NF.shape != (len(rows), feature_dim):
                shape = (len(rows), feature_dim)
                raise ValueError(f"features are {features_NF.dtype} {features_NF.shape}, expected float16 {shape}")
            if len(rows) > MAX_IMAGES:
                raise ValueError(f"{len(rows):,} images; the limit is {MAX_IMAGES:,}")
            if not np.isfinite(features_NF).all() or not all(captions):
                raise ValueError("an image has no caption, or its features are not finite")
            frequencies = DocumentFrequencies.load(directory / FREQUENCIES)
            return cls(features_NF, captions, [str(image_id) for image_id, _ in rows], tokenizer, frequencies)
        except (DataError, OSError, SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{directory}: invalid caption index: {error}; register the version again") from None


def open_captioned_images(shards: Path, sources: Mapping[str, int], *, regions: bool = True) -> ShardDataset:
    """Open the training images that have a caption, each once.

    Args:
        regions: read them with their regions; False: only the index.

    Raises:
        DataError: no such image, no regions, or more images than the search can compare.
    """
    from vlp_models.data.shards.dataset import ShardDataset

    # Each image once, however often an epoch repeats its dataset.
    images = ShardDataset(shards, "train", "images", dict.fromkeys(sources, 1), regions=regions, captioned=True)
    if not 0 < len(images) <= MAX_IMAGES:
        raise DataError(
            f"{shards}: {len(images):,} captioned training images; `evaluate.consensus_neighbors` supports 1 to "
            f"{MAX_IMAGES:,}. Set it to 0"
        )
    return images


def _without_punctuation(words: Iterable[str]) -> list[str]:
    return [word for word in words if word not in DROPPED]


def _sets_aside(model: object) -> bool:
    return isinstance(model, StoresFinished) and model.stores_finished
