"""reference: what a model was trained on, in numbers, so that new data can be compared without the old.

Runs after pretrain, and again whenever that does: the statistics are always those of the last trained model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.drift.statistics import describe, project
from vlp_models.data.features import FeatureStore
from vlp_models.data.tables import read_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.params import Params, PretrainParams
from vlp_models.params.schema import nearest
from vlp_models.runs.check import reads
from vlp_models.workspace.paths import Workspace, measured, need, write_text

SAMPLE = 256  # images whose embeddings are kept
SEED = 1  # of their projection


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/reference.json.

    Raises:
        DataError: an input is missing.
    """
    import json

    with measured(workspace, "reference"):
        validated = need(workspace.validated, "validate")
        regions, _ = reads(params)  # what a workspace without them holds is left over from earlier params
        store = FeatureStore(need(workspace.features, "features")) if regions else None
        sources = list(learnt_by(params).sources)
        images = read_table("images", validated)
        images = images.filter(pc.equal(images["split"], "train"))
        if sources:
            images = images.filter(pc.is_in(images["source"], pa.array(sources)))
        captions = read_table("captions", validated)
        texts = captions.filter(pc.is_in(captions["image_id"], images["image_id"].combine_chunks()))["text"]
        found = describe(
            texts.to_pylist(),
            zip(images["width"].to_pylist(), images["height"].to_pylist(), strict=True),
            Tokenizer.load(need(workspace.tokenizer, "tokenizer")),
        )
        found["batches"] = batches_of(images["path"].to_pylist(), params.incoming.dataset)
        found["embedding"] = {
            "detector_id": store.detector_id if store else "",
            "seed": SEED,
            "points": _sample(images, store) if store else [],
        }
        write_text(reference_path(workspace), json.dumps(found, sort_keys=True, ensure_ascii=False) + "\n")
    print(f"reference: {found['captions']:,} captions, {found['images']:,} images of the train split")


def learnt_by(params: Params) -> PretrainParams:
    """The pretraining that new data is compared with the data of.

    Raises:
        ParamsError: there is none.
    """
    name = params.drift.against or next(iter(params.pretrain), "")
    if name not in params.pretrain:
        raise ParamsError(f"params.yaml: `drift.against: {name}`: no such pretraining{nearest(name, params.pretrain)}")
    return params.pretrain[name]


def reference_path(workspace: Workspace) -> Path:
    return workspace.root / "data" / "reference.json"


def batches_of(paths: list[str], dataset: str) -> list[str]:
    """The batches of the incoming dataset that these images lie in."""
    root = Path(dataset)
    parts = (Path(path).relative_to(root).parts for path in paths if Path(path).is_relative_to(root))
    return sorted({part[0] for part in parts})


def embed(features: np.ndarray, seed: int) -> list[list[float]]:
    """Means over regions [N, F] as rows that JSON can hold."""
    rows: list[list[float]] = np.round(project(features, seed), 4).tolist()
    return rows


def _sample(images: pa.Table, store: FeatureStore) -> list[list[float]]:
    """Embeddings of the images with the smallest hashes: a sample by content, the same on every machine."""
    means: list[Any] = []
    for image_id in images.sort_by("sha256")["image_id"].to_pylist():
        if len(means) == SAMPLE:
            break
        regions = store.get(image_id).features
        if len(regions):
            means.append(regions.astype(np.float32).mean(axis=0))
    return embed(np.stack(means), SEED) if means else []
