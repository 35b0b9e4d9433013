"""Photos that look alike: a vector for each, and the caption of the most similar one as a draft.

A vector is the mean of the regions that the project's models read. They come from `features.source`: data/detector if
the stage has run, else the backbone of params.yaml with its pretrained weights. Where neither can be read, a photo is
its colors on a grid.

Shape suffixes: N photos, L labeled photos, F features.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vlp_models.common.io import atomic_write
from vlp_models.common.workspace import Workspace
from vlp_models.errors import VLPError
from vlp_models.params import Params, to_plain

if TYPE_CHECKING:
    from PIL.Image import Image

    from vlp_models.vision.region_source import Extractor

FloatArray = NDArray[np.float32]
COMPARED = 5  # similar photos whose captions agree or do not
SAVED_EVERY = 60.0  # seconds between two writes of the features that are known


def open_similarity(params: Params, workspace: Workspace) -> tuple[Extractor, str]:
    """Return an extractor of regions, and how to name what photos are compared by."""
    from vlp_models.vision.extractors import FROM_IMAGES, open_extractor
    from vlp_models.vision.simple_regions import GridExtractor

    source, timm = params.features.source, params.features.timm
    name = {"timm": timm.model, "grid": "colors on a grid"}.get(source, source)
    reason = f"`features.source: {source}` is not trained yet"
    try:
        if source in FROM_IMAGES and (workspace.detector.exists() or source == "grid"):
            return open_extractor(to_plain(params.features), workspace.detector), name
        if source == "timm":
            from vlp_models.vision.timm_backbone import CellExtractor, make_backbone

            return CellExtractor(make_backbone(timm, workspace.root), max_regions=params.features.max_regions), name
    except VLPError as error:
        reason = str(error)
    return GridExtractor(), f"colors on a grid, since {reason}"


class FeatureCache:
    """Features on disk, so that a restart computes those of new and changed photos only. It may be deleted.

    Args:
        by: what they are computed with; those of anything else are dropped.
    """

    def __init__(self, file: Path, extractor: Extractor, by: str) -> None:
        self._file, self._extractor, self._by = file, extractor, f"{by} {extractor.detector_id}"
        self._features: dict[str, FloatArray] = {}  # by name, size and date of the photo's file
        self._saved = time.monotonic()
        # missing or damaged: computed again
        with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as stored:
            if str(stored["by"]) == self._by:
                features_NF = stored["features"].astype(np.float32)
                self._features = dict(zip(stored["keys"].tolist(), features_NF, strict=True))

    def get(self, photo: str, file: Path, open_photo: Callable[[str], Image]) -> FloatArray:
        """Return the mean of a photo's regions with unit length, or zeros: [F]."""
        status = file.stat()
        key = f"{photo} {status.st_size} {status.st_mtime_ns}"
        if key not in self._features:
            (regions,) = self._extractor.extract([open_photo(photo)])
            total_F = np.asarray(regions.features).astype(np.float32).sum(0)
            self._features[key] = total_F / max(float(np.linalg.norm(total_F)), 1e-12)
            if time.monotonic() - self._saved > SAVED_EVERY:
                self.save()
        return self._features[key]

    def save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        features_NF = np.array(list(self._features.values()), np.float16)
        with atomic_write(self._file) as temporary, temporary.open("wb") as file:
            np.savez(file, by=self._by, keys=list(self._features), features=features_NF)
        self._saved = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft. origin: what wrote it; uncertainty: comparable between drafts of one origin, higher is less sure."""

    text: str = ""
    origin: str = ""
    uncertainty: float = 0.0


class SimilarDrafts:
    """Captions of labeled photos."""

    def __init__(self) -> None:
        self._photos: list[str] = []
        self._captions: list[str] = []  # the first of each photo
        self._features_LF: FloatArray = np.zeros((0, 0), np.float32)

    def fit(self, captions: Mapping[str, Sequence[str]], features: Mapping[str, FloatArray]) -> None:
        """Use the labeled photos whose features are known."""
        self._photos = [photo for photo in captions if photo in features]
        self._captions = [captions[photo][0] for photo in self._photos]
        self._features_LF = np.array([features[photo] for photo in self._photos], np.float32)

    def draft(self, vector_F: FloatArray) -> Draft:
        """Return the first caption of the most similar photo; it is uncertain if other similar photos' differ."""
        if not self._photos:
            return Draft()
        # (L, F) @ (F,): cosines, since the vectors have unit length; equal ones in their order
        first, *others = np.argsort(-(self._features_LF @ vector_F), kind="stable")[:COMPARED].tolist()
        text = self._captions[first]
        agreement = [share_of_words(text, self._captions[row]) for row in others]
        uncertainty = 1 - float(np.mean(agreement)) if agreement else 0.0
        return Draft(text=text, origin=f"the caption of {self._photos[first]}", uncertainty=uncertainty)


def share_of_words(text: str, other: str) -> float:
    """Return the share of two captions' words that both have; of their characters, where a script has no spaces."""
    words, others = set(text.casefold().split()), set(other.casefold().split())
    if min(len(words), len(others)) < 2:
        words, others = set(text.casefold()), set(other.casefold())
    return len(words & others) / max(1, len(words | others))
