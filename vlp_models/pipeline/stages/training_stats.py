"""training_stats: what a model was trained on, in numbers, so that new data can be compared without the old.

Runs after pretrain, and again whenever that does: the statistics are always those of the last trained model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import write_text
from vlp_models.common.workspace import Workspace, record_timing, require_output
from vlp_models.data.drift import describe, project
from vlp_models.data.features import FeatureStore
from vlp_models.data.joins import Database
from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, read_batches
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.models.meta_model import image_kinds
from vlp_models.params import Params, PretrainParams
from vlp_models.params.schema import nearest

SAMPLE = 256  # images whose embeddings are kept
SEED = 1  # of their projection


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/training_stats.json.

    Raises:
        DataError: an input is missing.
    """
    import json

    with record_timing(workspace, "training_stats"):
        validated = require_output(workspace.validated, "validate")
        # what a workspace without models of regions holds of them is left over from earlier params
        regions = "regions" in image_kinds(params).values()
        store = FeatureStore(require_output(workspace.features, "features")) if regions else None
        sources = list(learnt_by(params).sources)
        with Database.within(workspace.root / ".work") as database:
            for name in ("images", "captions"):
                path = validated / f"{name}.parquet"
                database.load(name, read_batches([path] if path.exists() else [], BATCH_ROWS), SCHEMAS[name])
            chosen = _learnt(sources)
            texts = f"SELECT text FROM captions c SEMI JOIN ({chosen}) i ON c.image_id = i.image_id"
            found = describe(
                (row["text"] for row in _rows(database, texts)),
                ((row["width"], row["height"]) for row in _rows(database, chosen)),
                Tokenizer.load(require_output(workspace.tokenizer, "tokenizer")),
            )
            found["batches"] = batches_of((row["path"] for row in _rows(database, chosen)), params.ingest.dataset)
            by_hash = (row["image_id"] for row in _rows(database, f"{chosen} ORDER BY sha256, image_id"))
            found["embedding"] = {
                "detector_id": store.detector_id if store else "",
                "seed": SEED,
                "points": _sample(by_hash, store) if store else [],
            }
        write_text(training_stats_path(workspace), json.dumps(found, sort_keys=True, ensure_ascii=False) + "\n")
    print(f"training_stats: {found['captions']:,} captions, {found['images']:,} images of the train split")


def learnt_by(params: Params) -> PretrainParams:
    """The pretraining that new data is compared with the data of.

    Raises:
        ParamsError: there is none.
    """
    name = params.drift.run or next(iter(params.pretrain), "")
    if name not in params.pretrain:
        raise ParamsError(f"params.yaml: `drift.run: {name}`: no such pretraining{nearest(name, params.pretrain)}")
    return params.pretrain[name]


def training_stats_path(workspace: Workspace) -> Path:
    return workspace.root / "data" / "training_stats.json"


def _learnt(sources: list[str]) -> str:
    """The images that are learnt from, as a query; no source: of every dataset."""
    names = ", ".join("'{}'".format(name.replace("'", "''")) for name in sources)
    return "SELECT * FROM images WHERE split = 'train'" + (f" AND source IN ({names})" if names else "")


def _rows(database: Database, query: str) -> Iterator[dict[str, Any]]:
    return chain.from_iterable(piece.to_pylist() for piece in database.stream(query))


def batches_of(paths: Iterable[str], dataset: str) -> list[str]:
    """The batches of the ingested dataset that these images lie in."""
    root = Path(dataset)
    parts = (Path(path).relative_to(root).parts for path in paths if Path(path).is_relative_to(root))
    return sorted({part[0] for part in parts})


def embed(features: np.ndarray, seed: int) -> list[list[float]]:
    """Means over regions [N, F] as rows that JSON can hold."""
    rows: list[list[float]] = np.round(project(features, seed), 4).tolist()
    return rows


def _sample(image_ids: Iterable[str], store: FeatureStore) -> list[list[float]]:
    """Embeddings of the images with the smallest hashes, which come first: a sample by content, the same on every
    machine."""
    means: list[Any] = []
    for image_id in image_ids:
        if len(means) == SAMPLE:
            break
        regions = store.get(image_id).features
        if len(regions):
            means.append(regions.astype(np.float32).mean(axis=0))
    return embed(np.stack(means), SEED) if means else []
