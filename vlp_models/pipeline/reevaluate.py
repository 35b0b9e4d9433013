"""Evaluate a registered bundle on the current test data through the real stages: features, shards, evaluate.

The bundle decides what its model reads: regions of its own detector, made as they were for its training, or pixels.
Nothing of that is taken from the current params. The stages run in a temporary workspace below .work; the project's
outputs stay as they are.
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

from vlp_models.common.io import output_directory, read_json, symlink_or_copy
from vlp_models.common.lock import file_lock
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import SEARCH, Workspace, require_output
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.data.pixels import PixelInput
from vlp_models.data.tables import ID_COLUMN, SCHEMAS, read_rows, read_rows_of
from vlp_models.errors import DataError
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.params import FeaturesParams, FinetuneParams, ModelParams, Params, build, to_plain
from vlp_models.registry.client import resolve_task
from vlp_models.serving.bundle import CHECKPOINT, DETECTOR, FEATURES, read_bundle_info

logger = get_logger(__name__)

RUN = "champion"
FOLDER = "reevaluate-"
MAX_WAIT = 3600.0  # seconds to wait for another evaluation


@contextmanager
def reevaluate_bundle(
    params: Params, workspace: Workspace, bundle: Path, lineage: Mapping[str, Any], *, as_served: bool = False
) -> Iterator[Path]:
    """Yield the folder with the bundle's predictions and scores (what `evaluate` writes).

    Args:
        bundle: serving/bundle.py.
        lineage: of the version that it is compared with; it is evaluated on that version's datasets.
        as_served: search for captions with the bundle's own settings; otherwise with the current params, as for the
            version it is compared with. What is looked up is always the bundle's own.

    Raises:
        DataError: there is no test data here, or the bundle or lineage lacks what is needed.
        BusyError: another evaluation is running for longer than an hour.
        VLPError: a stage failed.
    """
    from vlp_models.pipeline.stages import evaluate

    info = read_bundle_info(bundle)
    require_output(workspace.validated / "manifest.json", "validate")
    # params with one run, the bundle's, in a workspace of its own
    settings = dataclasses.replace(params, finetune={RUN: _make_run(params, lineage, info)})
    with temporary_workspace(workspace.root / ".work") as folder:
        scratch = Workspace(folder)
        symlink_or_copy(bundle / CHECKPOINT, scratch.checkpoint(f"finetune/{RUN}"))
        inputs = _read_model_inputs(info)
        if isinstance(inputs.image, RegionInput):
            _prepare_regions(settings, workspace, scratch, bundle, info, inputs)
        else:
            _prepare_pixels(settings, workspace, scratch, inputs)
        evaluate.run(settings, scratch, RUN, search=bundle / SEARCH, as_served=as_served)
        yield scratch.evaluation(RUN)


@contextmanager
def temporary_workspace(work: Path) -> Iterator[Path]:
    """Yield a folder for one evaluation at a time; remove what a killed one has left."""
    with file_lock(work / "locks" / "reevaluate.lock", "evaluation of a version", wait=MAX_WAIT):
        for leftover in work.glob(f"{FOLDER}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=work, prefix=FOLDER) as temporary:
            yield Path(temporary)


def _read_model_inputs(info: CheckpointInfo) -> ModelInputs:
    """Return what the bundle's model reads."""
    from vlp_models.models import DataFacts
    from vlp_models.models.meta_model import model_inputs

    # A checkpoint's config has what the data decided (vocabulary, features); params.yaml has only the rest.
    facts = {field.name for field in dataclasses.fields(DataFacts)}
    config = {key: value for key, value in info.model_config.items() if key not in facts}
    (inputs,) = model_inputs({info.name: ModelParams(family=info.family, config=config)})
    return inputs


def _make_run(params: Params, lineage: Mapping[str, Any], info: CheckpointInfo) -> FinetuneParams:
    """Return a run on the datasets of the version compared with, as params.yaml had them when that was trained."""
    try:
        recorded = lineage["params"]["finetune"][lineage["run"]]
        settings = {"task": recorded["task"], "sources": dict(recorded["sources"]), "seed": int(recorded["seed"])}
    except (KeyError, TypeError, ValueError):
        raise DataError("the version compared with has no params on record; register it again") from None
    if settings["task"] != info.task:
        raise DataError(f"the bundle is for the task {info.task}, not {settings['task']}")
    # evaluation settings that the record does not have, such as the batch size
    template = params.finetune.get(lineage["run"]) or next(iter(params.finetune.values()), None)
    if template is None:
        raise DataError("params.yaml has no fine-tuning run to take the evaluation's settings from")
    settings["evaluate_on"] = list(recorded.get("evaluate_on", []))
    return dataclasses.replace(template, **settings, blank_images=info.blank_images)


def _prepare_regions(
    params: Params, workspace: Workspace, scratch: Workspace, bundle: Path, info: CheckpointInfo, inputs: ModelInputs
) -> None:
    """Link data/shards if it holds the features that the bundle was trained on; otherwise make such shards."""
    from vlp_models.pipeline.stages import features, shards

    trained_on = build(FeaturesParams, read_json(bundle / FEATURES), where="features", file=str(bundle))
    symlink_or_copy(bundle / DETECTOR, scratch.detector)
    # The project's shards serve, if the same detector and settings made their regions.
    manifests = [folder / "manifest.json" for folder in (workspace.shards, workspace.features)]
    if (
        all(path.exists() for path in manifests)
        and read_json(workspace.features / "manifest.json")["params"] == to_plain(trained_on)
        and not _find_differences(workspace.shards, info)
    ):
        symlink_or_copy(workspace.validated, scratch.validated)
        symlink_or_copy(workspace.shards, scratch.shards)
        symlink_or_copy(workspace.contents, scratch.contents)
    else:
        # Regions are extracted again, by the bundle's own detector with its own settings.
        _copy_splits(workspace, scratch, set(params.evaluate.splits))
        if trained_on.path:  # imported features are read from the project
            path = str((workspace.root / trained_on.path).absolute())
            trained_on = dataclasses.replace(trained_on, path=path)
        settings = dataclasses.replace(_pack_for_bundle(params), features=trained_on)
        features.run(settings, scratch)
        shards.run(settings, scratch, inputs=[inputs])
    if differences := _find_differences(scratch.shards, info):
        raise DataError(f"the features of the current data do not fit the bundle: {', '.join(differences)} differ")


def _prepare_pixels(params: Params, workspace: Workspace, scratch: Workspace, inputs: ModelInputs) -> None:
    """Link data/shards if it holds the images that the model reads, if any; otherwise make such shards."""
    from vlp_models.pipeline.stages import shards

    manifest = workspace.shards / "manifest.json"
    has_pixels = manifest.exists() and read_json(manifest).get("pixels") is True
    if has_pixels or not isinstance(inputs.image, PixelInput):
        symlink_or_copy(workspace.validated, scratch.validated)
        symlink_or_copy(require_output(workspace.shards, "shards"), scratch.shards)
        symlink_or_copy(workspace.contents, scratch.contents)
    else:
        _copy_splits(workspace, scratch, set(params.evaluate.splits))
        shards.run(_pack_for_bundle(params), scratch, inputs=[inputs])


def _pack_for_bundle(params: Params) -> Params:
    """Return params whose shards hold what the bundle reads, not what the current models do."""
    return dataclasses.replace(params, shards=dataclasses.replace(params.shards, pixels="auto"))


def _find_differences(shards: Path, info: CheckpointInfo) -> list[str]:
    manifest = read_json(shards / "manifest.json")
    expected = {"detector_id": info.detector_id, "feature_dim": info.feature_dim, "classes": list(info.classes)}
    return [name for name, value in expected.items() if manifest[name] != value]


def _copy_splits(workspace: Workspace, scratch: Workspace, splits: set[str]) -> None:
    """Copy the validated tables with the images of these splits only; make image paths absolute."""
    split_names = pa.array(sorted(splits))
    images = read_rows("images", workspace.validated, lambda rows: pc.is_in(rows["split"], value_set=split_names))
    if not len(images):
        raise DataError(f"{workspace.validated}: no image of {', '.join(sorted(splits))}")
    # relative paths would be below the temporary workspace
    root = workspace.root.absolute()
    paths = pa.array([os.path.join(root, path) for path in images["path"].to_pylist()])  # noqa: PTH118
    scratch.validated.mkdir(parents=True)
    pq.write_table(
        images.set_column(images.column_names.index("path"), "path", paths), scratch.validated / "images.parquet"
    )
    ids = images["image_id"].combine_chunks()
    for name in ID_COLUMN:
        if name not in ("images", "objects") and "image_id" in SCHEMAS[name].names:
            # texts without an image are for training only
            pq.write_table(read_rows_of(ids, name, workspace.validated), scratch.validated / f"{name}.parquet")
    # All objects: `features.source: boxes` takes its vocabulary from them.
    for name in ("objects.parquet", "truth.jsonl"):
        if (workspace.validated / name).exists():
            symlink_or_copy(workspace.validated / name, scratch.validated / name)


def evaluate_alias(params: Params, workspace: Workspace, task: str, alias: str) -> Path:
    """Score a registered model on the current test split into reports/aliases/TASK-ALIAS; return that folder.

    Raises:
        ParamsError: unknown task.
        DataError: no version has the alias, or it cannot be evaluated on the data here.
    """
    from vlp_models.registry.client import connect, model_name
    from vlp_models.registry.evaluations import read_lineage
    from vlp_models.registry.versions import download_verified_bundle, find_version_by_alias

    task = resolve_task(params.tracking, task)
    client = connect(params.tracking, workspace.root)
    name = model_name(params.tracking, task)
    version = find_version_by_alias(client, name, alias)
    if version is None:
        raise DataError(f"{name}: no version has the alias `{alias}`")
    # its own lineage: it is evaluated on the datasets that it was trained for
    lineage = read_lineage(client, version) or {}
    target = workspace.reports / "aliases" / f"{task}-{alias}"
    with (
        reevaluate_bundle(params, workspace, download_verified_bundle(version), lineage, as_served=True) as scored,
        output_directory(target) as directory,
    ):
        # Captions to look up stay in the bundle, where `vlp forget` finds them.
        shutil.copytree(scored, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SEARCH))
    logger.info("%s@%s is version %s; scores in %s", name, alias, version.version, workspace.relative(target))
    return target
