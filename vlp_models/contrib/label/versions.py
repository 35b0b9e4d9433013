"""What the registry has for labeling: the champion, whose captions are drafts, and how versions score by their data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from PIL import Image

from vlp_models.contrib.label.gain import VersionScores
from vlp_models.contrib.label.similar import Draft
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.registry.client import connect, database_exists, mlflow_errors, model_name, tracking_uri
from vlp_models.registry.evaluations import CURRENT_EVALUATION, read_lineage, read_scores
from vlp_models.registry.promotion.gate_rule import gate_metric
from vlp_models.registry.versions import CHAMPION, download_verified_bundle, find_version_by_alias
from vlp_models.serving.predictor import Predictor
from vlp_models.tasks.captioning import Captioning

MAX_VERSIONS = 100  # of the newest, whose records are read


@contextmanager
def open_registry(params: Params, root: Path) -> Iterator[Any]:
    """Yield a client of MLflow, whose errors in the block are VLPErrors.

    Raises:
        DataError: there is no database yet, and none is created.
    """
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

    def draft(self, image: Image.Image) -> Draft:
        """Caption an opened photo; its uncertainty is the mean negative log-probability of a token."""
        task_model = cast(Captioning, self._predictor.task_model)
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
    with open_registry(params, root) as client:
        version = find_version_by_alias(client, model_name(params.tracking, "captioning"), CHAMPION)
        if version is None:
            raise DataError("captioning has no champion yet")
        metric = gate_metric(params, "captioning")
        scores = [score for score in read_scores(client, version) if score["metric"] == metric]
        origin = f"{version.name} version {version.version}"
        score = f", {metric} {scores[0]['value']:.1f} on {scores[0]['dataset']} {scores[0]['split']}" if scores else ""
        return ChampionDrafts(Predictor(download_verified_bundle(version)), origin, f"{origin} (champion{score})")


def read_version_scores(params: Params, root: Path) -> VersionScores | None:
    """Return the scores of the newest captioning version and those comparable to it; None without any.

    Comparable versions are of the same run, and were scored on the same test by the same metric.

    Raises:
        VLPError: there is no registry, or it does not answer.
    """
    metric = gate_metric(params, "captioning")
    points: dict[tuple[int, float], None] = {}  # a run that is registered again counts once
    run, evaluation, test = "", "", ""
    with open_registry(params, root) as client:
        versions = list(client.search_model_versions(f"name='{model_name(params.tracking, 'captioning')}'"))
        versions.sort(key=lambda version: -int(version.version))
        for version in versions[:MAX_VERSIONS]:
            tags = version.tags.get("run", ""), version.tags.get(CURRENT_EVALUATION, "")
            if points and tags != (run, evaluation):
                continue
            record = read_lineage(client, version) or {}
            images = record.get("data", {}).get("shards", {}).get("counts", {}).get("train", {}).get("images")
            score = next((s for s in read_scores(client, version) if s["metric"] == metric), None)
            if images and score and score["value"] is not None:
                (run, evaluation), test = tags, f"{score['dataset']} {score['split']}"
                points[int(images), float(score["value"])] = None
    if not points:
        return None
    sizes, scores = zip(*points, strict=True)
    return VersionScores(run=run, metric=metric, test=test, sizes=sizes, scores=scores)
