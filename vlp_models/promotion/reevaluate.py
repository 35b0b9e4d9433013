"""A registered bundle on today's test data, through the real stages: features (its own detector's), shards, evaluate.

They run in a workspace of their own below .work, which is gone afterwards; the project's outputs stay as they are.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlp_models.data.tables import ID_COLUMN, read_table
from vlp_models.errors import DataError
from vlp_models.params import FeaturesParams, FinetuneParams, Params, build, to_plain
from vlp_models.workspace.paths import Workspace, need, read_json

RUN = "champion"
FOLDER = "reevaluate-"


@contextmanager
def reevaluated(params: Params, workspace: Workspace, bundle: Path, lineage: dict[str, Any]) -> Iterator[Path]:
    """Yields the folder with the bundle's predictions and scores (what `evaluate` writes).

    Args:
        bundle: serving/predictor.py.
        lineage: of the version it is to be compared with, whose datasets it is evaluated on.

    Raises:
        DataError: no test data here, or a bundle or lineage that does not say what is needed.
        VLPError: whatever the stages raise.
    """
    from vlp_models.stages import evaluate, features, shards

    config = read_json(bundle / "checkpoint" / "config.json")
    made = build(FeaturesParams, read_json(bundle / "features.json"), where="features", file=str(bundle))
    need(workspace.validated / "manifest.json", "validate")
    run = _run_like(params, lineage, config)
    settings = dataclasses.replace(params, features=_absolute(made, workspace), finetune={RUN: run})
    (workspace.root / ".work").mkdir(exist_ok=True)
    for left in (workspace.root / ".work").glob(f"{FOLDER}*"):  # after a kill; one at a time is in here
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=workspace.root / ".work", prefix=FOLDER) as temporary:
        own = Workspace(Path(temporary))
        for path, there in ((own.checkpoint(RUN), bundle / "checkpoint"), (own.detector, bundle / "detector")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(there.absolute())
        if _same_features(workspace, config, made):
            own.validated.symlink_to(workspace.validated.absolute())
            own.shards.symlink_to(workspace.shards.absolute())
        else:
            _copy_splits(workspace, own, set(params.evaluate.splits))
            features.run(settings, own)
            shards.run(settings, own)
        _check_fits(own, config)
        evaluate.run(settings, own, RUN)
        yield own.evaluation(RUN)


def _run_like(params: Params, lineage: dict[str, Any], config: dict[str, Any]) -> FinetuneParams:
    """The run of the version compared with: same task, same datasets."""
    try:
        plain = lineage["params"]["finetune"][lineage["run"]]
        run = build(FinetuneParams, plain, where=f"finetune.{lineage['run']}", file="the version's params")
    except (KeyError, TypeError):
        raise DataError("the version compared with has no params on record; register it again") from None
    if run.task != config.get("task"):
        raise DataError(f"the bundle is of the task {config.get('task')}, not of {run.task}")
    return dataclasses.replace(run, blank_images=bool(config.get("blank_images")))


def _absolute(made: FeaturesParams, workspace: Workspace) -> FeaturesParams:
    """Imported features are read where they are."""
    return dataclasses.replace(made, path=str((workspace.root / made.path).absolute())) if made.path else made


def _same_features(workspace: Workspace, config: dict[str, Any], made: FeaturesParams) -> bool:
    """Whether data/shards holds just the features that the bundle was trained on."""
    manifests = [directory / "manifest.json" for directory in (workspace.shards, workspace.features)]
    if not all(path.exists() for path in manifests):
        return False
    shards, features = (read_json(path) for path in manifests)
    return features["params"] == to_plain(made) and not _differences(shards, config)


def _check_fits(own: Workspace, config: dict[str, Any]) -> None:
    """
    Raises:
        DataError: the features made of today's data are not those the bundle was trained on.
    """
    differ = _differences(read_json(own.shards / "manifest.json"), config)
    if differ:
        raise DataError(f"the features of today's data do not fit the bundle: {', '.join(differ)} differ")


def _differences(shards: dict[str, Any], config: dict[str, Any]) -> list[str]:
    return [name for name in ("detector_id", "feature_dim", "classes") if shards[name] != config[name]]


def _copy_splits(workspace: Workspace, own: Workspace, splits: set[str]) -> None:
    """The validated tables, of these splits' images alone; image paths from the project's root become absolute."""
    images = read_table("images", workspace.validated)
    images = images.filter(pc.is_in(images["split"], value_set=pa.array(sorted(splits))))
    if not len(images):
        raise DataError(f"{workspace.validated}: no image of {', '.join(sorted(splits))}")
    root = workspace.root.absolute()
    paths = pa.array([os.path.join(root, path) for path in images["path"].to_pylist()])  # noqa: PTH118
    own.validated.mkdir(parents=True)
    pq.write_table(
        images.set_column(images.column_names.index("path"), "path", paths), own.validated / "images.parquet"
    )
    ids = images["image_id"].combine_chunks()
    for name in ID_COLUMN:
        if name not in ("images", "objects"):
            rows = read_table(name, workspace.validated)
            if "image_id" in rows.column_names:  # texts that no image belongs to are learnt from, never evaluated on
                rows = rows.filter(pc.is_in(rows["image_id"], value_set=ids))
                pq.write_table(rows, own.validated / f"{name}.parquet")
    # Objects whole: `features.source: boxes` takes its vocabulary from all of them.
    for name in ("objects.parquet", "truth.jsonl"):
        if (workspace.validated / name).exists():
            (own.validated / name).symlink_to((workspace.validated / name).absolute())
