"""training_stats: statistics of the data a model was trained on, so that drift of new data can be measured without it.

Runs after the training that `drift.run` names: the statistics are always those of the last trained model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import write_text
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.contrib.drift.measures import describe, project
from vlp_models.contrib.drift.params import TRAINING_STATS
from vlp_models.data.features import FeatureStore
from vlp_models.data.joins import Database
from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, read_batches
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.params import Params

SAMPLE = 256  # images whose embeddings are kept
SEED = 1  # of the projection of embeddings


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/training_stats.json.

    Raises:
        DataError: an input is missing.
    """
    from vlp_models.models.meta_model import image_kinds  # imports torch; `vlp drift` reads these files without it

    validated = require_output(workspace.validated, "validate")
    # Without models that read regions, data/features is left over from earlier params.
    regions = "regions" in image_kinds(params).values()
    store = FeatureStore(require_output(workspace.features, "features")) if regions else None
    # The training images of the datasets that the compared run reads; without `sources`, all
    kind, run_name = params.statistics_run().split("/")
    sources = getattr(params, kind)[run_name].sources
    names = ", ".join("'{}'".format(name.replace("'", "''")) for name in sources)
    train_images = "SELECT * FROM images WHERE split = 'train'" + (f" AND source IN ({names})" if names else "")
    # images and their captions, joined on disk
    with Database.within(workspace.root / ".work") as database:
        for name in ("images", "captions"):
            path = validated / f"{name}.parquet"
            database.load(name, read_batches([path] if path.exists() else [], BATCH_ROWS), SCHEMAS[name])
        texts = f"SELECT text FROM captions c SEMI JOIN ({train_images}) i ON c.image_id = i.image_id"
        stats = describe(
            (row["text"] for row in _rows(database, texts)),
            ((row["width"], row["height"]) for row in _rows(database, train_images)),
            Tokenizer.load(require_output(workspace.tokenizer, "tokenizer")),
        )
        # Batches of the ingested dataset that contain these images
        dataset = Path(params.ingest.dataset)
        paths = (Path(row["path"]) for row in _rows(database, train_images))
        # The first folder below the dataset's root is the batch.
        batches = {path.relative_to(dataset).parts[0] for path in paths if path.is_relative_to(dataset)}
        stats["batches"] = sorted(batches)
        by_hash = (row["image_id"] for row in _rows(database, f"{train_images} ORDER BY sha256, image_id"))
        stats["embedding"] = {
            "detector_id": store.detector_id if store else "",
            "seed": SEED,
            "points": _sample(by_hash, store) if store else [],
        }
    write_text(training_stats_path(workspace), json.dumps(stats, sort_keys=True, ensure_ascii=False) + "\n")


def training_stats_path(workspace: Workspace) -> Path:
    return workspace.root / TRAINING_STATS


def _rows(database: Database, query: str) -> Iterator[dict[str, Any]]:
    return chain.from_iterable(piece.to_pylist() for piece in database.stream(query))


def embed(features: np.ndarray, seed: int) -> list[list[float]]:
    """Return projections of mean region features [N, F] as JSON-compatible rows."""
    rows: list[list[float]] = np.round(project(features, seed), 4).tolist()
    return rows


def _sample(image_ids: Iterable[str], store: FeatureStore) -> list[list[float]]:
    """Return embeddings of the images with the smallest hashes, which come first: an equal sample on every machine."""
    means: list[Any] = []  # of the regions of each image, [F]; images without regions are left out
    for image_id in image_ids:
        if len(means) == SAMPLE:
            break
        regions = store.get(image_id).features
        if len(regions):
            means.append(regions.astype(np.float32).mean(axis=0))
    return embed(np.stack(means), SEED) if means else []
