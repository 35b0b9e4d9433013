"""One vector per photo, by which photos are similar: the mean of the regions that the project's models read.

They come from `features.source`: data/detector if the stage has run, else the backbone of params.yaml with its
pretrained weights. Where neither can be read, a photo is its colors on a grid.

Shape suffixes: N photos, F features.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vlp_models.common.io import atomic_write, stat_file
from vlp_models.common.workspace import Workspace
from vlp_models.errors import VLPError
from vlp_models.params import Params, to_plain

if TYPE_CHECKING:
    from PIL.Image import Image

    from vlp_models.vision.region_source import Extractor

FloatArray = NDArray[np.float32]


def open_similarity(params: Params, workspace: Workspace) -> tuple[Extractor, str]:
    """Return an extractor of regions, and how to name what photos are compared by."""
    from vlp_models.vision.extractors import FROM_IMAGES, open_extractor
    from vlp_models.vision.simple_regions import GridExtractor

    settings, source = to_plain(params.features), params.features.source
    try:
        if source in FROM_IMAGES and (workspace.detector.exists() or source == "grid"):
            return open_extractor(settings, workspace.detector), _describe(params)
        if source == "timm":
            from vlp_models.vision.timm_backbone import CellExtractor, make_backbone

            backbone = make_backbone(params.features.timm, workspace.root)
            return CellExtractor(backbone, max_regions=params.features.max_regions), _describe(params)
    except VLPError as error:
        return GridExtractor(), f"colors on a grid, since {error}"
    return GridExtractor(), f"colors on a grid, since `features.source: {source}` is not trained yet"


def _describe(params: Params) -> str:
    source = params.features.source
    return {"timm": params.features.timm.model, "grid": "colors on a grid"}.get(source, source)


def extract(extractor: Extractor, image: Image) -> FloatArray:
    """Return the mean of an image's regions with unit length, or zeros: [F]."""
    (regions,) = extractor.extract([image])
    if not len(regions):
        return np.zeros(extractor.feature_dim, np.float32)
    mean_F = np.asarray(regions.features).astype(np.float32).mean(0)
    return mean_F / max(float(np.linalg.norm(mean_F)), 1e-12)


class FeatureCache:
    """Features on disk, so that a restart computes those of new and changed photos only. It may be deleted.

    Args:
        by: what they are computed with; those of anything else are dropped.
    """

    def __init__(self, file: Path, by: str) -> None:
        self._file, self._by = file, by
        self._features: dict[str, tuple[tuple[int, ...], FloatArray]] = {}
        try:
            with np.load(file, allow_pickle=False) as stored:
                if str(stored["by"]) == by:
                    rows = zip(stored["photos"], stored["states"], stored["features"], strict=True)
                    for photo, state, vector_F in rows:
                        self._features[str(photo)] = (tuple(map(int, state)), vector_F.astype(np.float32))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # missing or damaged: computed again
            self._features = {}

    def get(self, photo: str, file: Path) -> FloatArray | None:
        """Return a photo's features if its file has not changed."""
        state, vector_F = self._features.get(photo, ((), None))
        return vector_F if vector_F is not None and state == self._state(file) else None

    def set(self, photo: str, file: Path, vector_F: FloatArray) -> None:
        self._features[photo] = (self._state(file), vector_F)

    def save(self) -> None:
        if not self._features:
            return
        arrays: dict[str, Any] = {
            "by": np.array(self._by),
            "photos": np.array(list(self._features)),
            "states": np.array([state for state, _ in self._features.values()], np.int64),
            "features": np.stack([vector_F for _, vector_F in self._features.values()]).astype(np.float16),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._file) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)

    @staticmethod
    def _state(file: Path) -> tuple[int, ...]:
        # Size and date; a change of permissions or links changes no pixel.
        return stat_file(file.stat())[1:3]


def most_similar(features_NF: FloatArray, vector_F: FloatArray, count: int) -> Sequence[int]:
    """Return the rows nearest to a vector by the cosine, nearest first; equal ones in their order."""
    return np.argsort(-(features_NF @ vector_F), kind="stable")[:count].tolist()
