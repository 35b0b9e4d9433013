"""A registered bundle on today's test data, through the real stages: what it reads of images, shards, evaluate.

What it reads, the bundle says: regions of its own detector, made as they were for its training, or pixels. Nothing of
that is taken from today's params. The stages run in a workspace of their own below .work, which is gone afterwards; the
project's outputs stay as they are.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlp_models.common.io import output_directory, read_json
from vlp_models.common.lock import file_lock
from vlp_models.common.workspace import SEARCH, Workspace, require_output
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.data.pixels import PixelInput
from vlp_models.data.tables import ID_COLUMN, read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.params import FeaturesParams, FinetuneParams, ModelParams, Params, build, to_plain
from vlp_models.params.schema import nearest
from vlp_models.serving.bundle import CHECKPOINT, DETECTOR, FEATURES, bundle_info
from vlp_models.tasks import TASKS

RUN = "champion"
FOLDER = "reevaluate-"
PATIENCE = 3600.0  # seconds that an evaluation waits for another, as long as for the ledger


@contextmanager
def reevaluated(
    params: Params, workspace: Workspace, bundle: Path, lineage: Mapping[str, Any], *, as_served: bool = False
) -> Iterator[Path]:
    """Yields the folder with the bundle's predictions and scores (what `evaluate` writes).

    Args:
        bundle: serving/bundle.py.
        lineage: of the version it is to be compared with, whose datasets it is evaluated on.
        as_served: answers are searched for as the bundle says; else by today's params, as those of what it is compared
            with: only what is looked up is its own.

    Raises:
        DataError: no test data here, or a bundle or lineage that does not say what is needed.
        BusyError: another evaluation goes on for longer than an hour.
        VLPError: whatever the stages raise.
    """
    from vlp_models.pipeline.stages import evaluate

    info = bundle_info(bundle)
    require_output(workspace.validated / "manifest.json", "validate")
    settings = dataclasses.replace(params, finetune={RUN: _run_like(params, lineage, info)})
    with _alone_in(workspace.root / ".work") as temporary:
        own = Workspace(temporary)
        _link(own.checkpoint(f"finetune/{RUN}"), bundle / CHECKPOINT)
        reads = _inputs(info)
        if isinstance(reads.image, RegionInput):
            _with_regions(settings, workspace, own, bundle, info, reads)
        else:
            _without_regions(settings, workspace, own, reads)
        evaluate.run(settings, own, RUN, search=bundle / SEARCH, as_served=as_served)
        yield own.evaluation(RUN)


@contextmanager
def _alone_in(work: Path) -> Iterator[Path]:
    """A folder for one evaluation at a time; what a killed one left is taken away."""
    with file_lock(work / "locks" / "reevaluate.lock", "evaluation of a version", wait=PATIENCE):
        for left in work.glob(f"{FOLDER}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=work, prefix=FOLDER) as temporary:
            yield Path(temporary)


def _inputs(info: CheckpointInfo) -> ModelInputs:
    """What the bundle's model reads."""
    from vlp_models.models import DataFacts
    from vlp_models.models.meta_model import model_inputs

    facts = {field.name for field in dataclasses.fields(DataFacts)}
    config = {key: value for key, value in info.model_config.items() if key not in facts}
    (found,) = model_inputs({info.name: ModelParams(family=info.family, config=config)})
    return found


def _with_regions(
    params: Params, workspace: Workspace, own: Workspace, bundle: Path, info: CheckpointInfo, reads: ModelInputs
) -> None:
    """Shards with the regions that the bundle was trained on: today's where they are just these, else made anew."""
    from vlp_models.pipeline.stages import features, shards

    written = {"content": "roi", **read_json(bundle / FEATURES)}  # bundles before there was a choice do not say
    made = build(FeaturesParams, written, where="features", file=str(bundle))
    _link(own.detector, bundle / DETECTOR)
    if _same_features(workspace, info, made):
        _link(own.validated, workspace.validated)
        _link(own.shards, workspace.shards)
        _link(own.contents, workspace.contents)
    else:
        _copy_splits(workspace, own, set(params.evaluate.splits))
        settings = dataclasses.replace(_packing(params), features=_absolute(made, workspace))
        features.run(settings, own)
        shards.run(settings, own, inputs=[reads])
    _check_fits(own, info)


def _without_regions(params: Params, workspace: Workspace, own: Workspace, reads: ModelInputs) -> None:
    """Shards with the image files, where the model reads any: today's where they hold them, else made anew."""
    from vlp_models.pipeline.stages import shards

    if not isinstance(reads.image, PixelInput) or _holds_pixels(workspace):
        _link(own.validated, workspace.validated)
        _link(own.shards, require_output(workspace.shards, "shards"))
        _link(own.contents, workspace.contents)
    else:
        _copy_splits(workspace, own, set(params.evaluate.splits))
        shards.run(_packing(params), own, inputs=[reads])


def _packing(params: Params) -> Params:
    """The same, with shards that hold what the bundle reads, not what today's models do."""
    return dataclasses.replace(params, shards=dataclasses.replace(params.shards, pixels="auto"))


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target.absolute())


def _holds_pixels(workspace: Workspace) -> bool:
    manifest = workspace.shards / "manifest.json"
    return manifest.exists() and read_json(manifest).get("pixels") is True


def _run_like(params: Params, lineage: Mapping[str, Any], info: CheckpointInfo) -> FinetuneParams:
    """A run on the datasets of the version compared with, whatever else params.yaml held when that was trained."""
    try:
        then = lineage["params"]["finetune"][lineage["run"]]
        asked = {"task": then["task"], "sources": dict(then["sources"]), "seed": int(then["seed"])}
    except (KeyError, TypeError, ValueError):
        raise DataError("the version compared with has no params on record; register it again") from None
    if asked["task"] != info.task:
        raise DataError(f"the bundle is of the task {info.task}, not of {asked['task']}")
    like = params.finetune.get(lineage["run"]) or next(iter(params.finetune.values()), None)
    if like is None:
        raise DataError("params.yaml has no fine-tuning run; a champion is evaluated as one of them would be")
    asked["evaluate_on"] = list(then.get("evaluate_on", []))
    return dataclasses.replace(like, **asked, blank_images=info.blank_images)


def _absolute(made: FeaturesParams, workspace: Workspace) -> FeaturesParams:
    """Imported features are read where they are."""
    return dataclasses.replace(made, path=str((workspace.root / made.path).absolute())) if made.path else made


def _same_features(workspace: Workspace, info: CheckpointInfo, made: FeaturesParams) -> bool:
    """Whether data/shards holds just the features that the bundle was trained on."""
    manifests = [directory / "manifest.json" for directory in (workspace.shards, workspace.features)]
    if not all(path.exists() for path in manifests):
        return False
    shards, features = (read_json(path) for path in manifests)
    return features["params"] == to_plain(made) and not _differences(shards, info)


def _check_fits(own: Workspace, info: CheckpointInfo) -> None:
    """
    Raises:
        DataError: the features made of today's data are not those the bundle was trained on.
    """
    differ = _differences(read_json(own.shards / "manifest.json"), info)
    if differ:
        raise DataError(f"the features of today's data do not fit the bundle: {', '.join(differ)} differ")


def _differences(shards: Mapping[str, Any], info: CheckpointInfo) -> list[str]:
    of_bundle = {"detector_id": info.detector_id, "feature_dim": info.feature_dim, "classes": list(info.classes)}
    return [name for name, value in of_bundle.items() if shards[name] != value]


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


def evaluate_alias(params: Params, workspace: Workspace, task: str, alias: str) -> Path:
    """Returns the folder of scores and predictions.

    Raises:
        ParamsError: no such task.
        DataError: no version has the alias, or it can't be evaluated on the data that is here.
    """
    from vlp_models.registry.client import connect
    from vlp_models.registry.evaluations import read_lineage
    from vlp_models.registry.versions import download_verified_bundle, find_version_by_alias, model_name

    if task not in TASKS:
        raise ParamsError(f"{task}: no such task{nearest(task, TASKS)}")
    client = connect(params.tracking, workspace.root)
    name = model_name(params.tracking, task)
    version = find_version_by_alias(client, name, alias)
    if version is None:
        raise DataError(f"{name}: no version has the alias `{alias}`")
    lineage = read_lineage(client, version) or {}
    target = workspace.reports / "aliases" / f"{task}-{alias}"
    with (
        reevaluated(params, workspace, download_verified_bundle(version), lineage, as_served=True) as scored,
        output_directory(target) as directory,
    ):
        # what is looked up stays in the bundle: `vlp forget` knows it there
        shutil.copytree(scored, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SEARCH))
    print(f"{name}@{alias} is version {version.version}; scores in {workspace.relative(target)}")
    return target
