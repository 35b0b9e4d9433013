"""Drafts of captions: the champion's, or the caption of the most similar labeled photo. Both say how sure they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from vlp_models.contrib.label.features import FloatArray
from vlp_models.errors import DataError
from vlp_models.params import Params

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from PIL.Image import Image

    from vlp_models.serving.predictor import Predictor
    from vlp_models.tasks.captioning import Captioning

COMPARED = 5  # similar photos whose captions agree or do not


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft. origin: what wrote it; uncertainty: comparable between drafts of one origin, higher is less sure."""

    text: str = ""
    origin: str = ""
    uncertainty: float = 0.0


@contextmanager
def open_registry(params: Params, root: Path) -> Iterator[MlflowClient]:
    """Connect to MLflow; its errors in the block are VLPErrors.

    Raises:
        DataError: there is no database yet, and none is created.
    """
    from vlp_models.registry.client import connect, database_exists, mlflow_errors, tracking_uri

    uri = tracking_uri(params.tracking, root)
    if not uri or not database_exists(uri):
        raise DataError("no model is registered yet")
    with mlflow_errors(params):
        yield connect(params.tracking, root)


class ChampionDrafts:
    """Captions of the registered champion.

    Args:
        title: the version and its score, for the page.
    """

    def __init__(self, predictor: Predictor, origin: str, title: str) -> None:
        self._predictor, self._origin, self.title = predictor, origin, title

    def draft(self, image: Image) -> Draft:
        """Caption an opened photo; its uncertainty is the mean negative log-probability of a token."""
        task_model = cast("Captioning", self._predictor.task_model)
        batch = task_model.collate(self._predictor.make_samples([[image]])).to(self._predictor.device)
        (caption,) = task_model.caption_search.find(task_model.model, batch).caption  # type: ignore[arg-type]
        # A hypothesis' score includes the token that ends it.
        uncertainty = -caption.score / (len(caption.ids) + 1)
        return Draft(text=task_model.tokenizer.decode(caption.ids), origin=self._origin, uncertainty=uncertainty)


def open_champion(params: Params, root: Path) -> ChampionDrafts:
    """Open the captioning champion.

    Raises:
        VLPError: no version is champion, or it cannot be read.
    """
    from vlp_models.registry.client import model_name
    from vlp_models.registry.evaluations import read_scores
    from vlp_models.registry.promotion.gate_rule import gate_metric
    from vlp_models.registry.versions import CHAMPION, download_verified_bundle, find_version_by_alias
    from vlp_models.serving.predictor import Predictor

    with open_registry(params, root) as client:
        version = find_version_by_alias(client, model_name(params.tracking, "captioning"), CHAMPION)
        if version is None:
            raise DataError("captioning has no champion yet")
        metric = gate_metric(params, "captioning")
        scores = [score for score in read_scores(client, version) if score["metric"] == metric]
        origin = f"{version.name} version {version.version}"
        score = f", {metric} {scores[0]['value']:.1f} on {scores[0]['dataset']} {scores[0]['split']}" if scores else ""
        return ChampionDrafts(Predictor(download_verified_bundle(version)), origin, f"{origin} (champion{score})")


class SimilarDrafts:
    """Captions of labeled photos.

    Shape suffixes: L labeled photos, F features.
    """

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
