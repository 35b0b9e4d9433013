"""Which registered versions were trained on an image, and their aliases."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import SEARCH, Workspace
from vlp_models.contrib.forgetting.data_versions import DataVersion, DataVersions
from vlp_models.contrib.forgetting.exposure import DETECTOR, TOKENIZER, CheckpointExposures, Exposure, worst
from vlp_models.contrib.forgetting.replay import TrainingRun, run_settings
from vlp_models.data.shards.contents import trained_on_inputs
from vlp_models.errors import VLPError, first_line
from vlp_models.params import Params
from vlp_models.registry.client import find_model, model_name, store_errors
from vlp_models.registry.evaluations import read_lineage
from vlp_models.tasks.caption_search import CAPTIONS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

BUNDLE = "artifacts/bundle"  # within a version's files
CONFIG = f"{BUNDLE}/checkpoint/config.json"


@dataclass(frozen=True, kw_only=True)
class RegisteredVersion:
    """A version of a registered model and its exposure; aliases: champion, previous, run-RUN, ..."""

    model: str
    version: int
    task: str
    run: str
    aliases: tuple[str, ...]
    content: str
    exposure: Exposure


def read_lineages(client: MlflowClient, params: Params) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the lineage of every version that has one."""
    lineages: dict[tuple[str, int], dict[str, Any]] = {}
    for _, version, _ in _all_versions(client, params):
        with suppress(VLPError):
            record = read_lineage(client, version)
            if record is not None:
                lineages[version.name, int(version.version)] = record
    return lineages


def find_registered(
    client: MlflowClient,
    params: Params,
    workspace: Workspace,
    checkpoints: CheckpointExposures,
    data: DataVersions,
    lineages: Mapping[tuple[str, int], Mapping[str, Any]],
) -> list[RegisteredVersion]:
    """Return every version of every task's model with its exposure, newest first."""
    # A version whose checkpoint is in the workspace has its exposure.
    checkpoint_of = {
        hash_path(path.parent): f"finetune/{path.parent.name}"
        for path in (workspace.root / "checkpoints" / "finetune").glob("*/config.json")
    }
    here = data.here()
    images = here.images if here is not None else frozenset[str]()
    registered = []
    for task, version, aliases in _all_versions(client, params):
        name = f"{version.name} version {version.version}"
        # The tag starts with the 64 hexadecimal digits of the checkpoint's hash.
        checkpoint = checkpoint_of.get(version.tags.get("weights", "")[:64])
        if checkpoint:
            exposure = checkpoints.of(checkpoint)
            exposure = replace(exposure, name=name, how=f"{checkpoint}: {exposure.how}")
        else:
            lineage = lineages.get((version.name, int(version.version)))
            exposure = _by_lineage(name, version, lineage, checkpoints, data)
        # Even a version that was not trained on an image may store its captions.
        if exposure.state in ("clean", "unknown"):
            try:
                if stores_captions_of(version, images):
                    exposure = replace(exposure, state="exposed", how="it stores the image's captions", first=None)
            except store_errors() as error:
                how = f"whether it stores the captions cannot be determined: {first_line(error)}"
                exposure = replace(exposure, state="unknown", how=how)
        registered.append(
            RegisteredVersion(
                model=version.name,
                version=int(version.version),
                task=task,
                run=version.tags.get("run", ""),
                aliases=aliases,
                content=version.tags.get("content", ""),
                exposure=exposure,
            )
        )
    return registered


def _all_versions(client: MlflowClient, params: Params) -> Iterator[tuple[str, ModelVersion, tuple[str, ...]]]:
    """Yield the task, version and aliases of every registered version, newest first."""
    from vlp_models.tasks import TASKS

    for task in TASKS:
        name = model_name(params.tracking, task)
        model = find_model(client, name)
        if model is not None:
            # Version numbers are text: 10 must come after 9.
            for version in sorted(client.search_model_versions(f"name='{name}'"), key=lambda v: -int(v.version)):
                aliases = [alias for alias, number in model.aliases.items() if int(number) == int(version.version)]
                yield task, version, tuple(sorted(aliases))


def _by_lineage(
    name: str,
    version: ModelVersion,
    lineage: Mapping[str, Any] | None,
    checkpoints: CheckpointExposures,
    data: DataVersions,
) -> Exposure:
    """Determine the exposure of a version whose checkpoint is gone, from its lineage and the data of that time."""
    if lineage is None:
        return Exposure(name=name, state="unknown", how="registered without a lineage")
    try:
        provenance = _provenance(version)
        then = data.of(provenance.get("inputs", {}))
        parts = [_run_exposure(f"finetune/{lineage['run']}", provenance, then, checkpoints)]
        recorded = data.at(lineage.get("dvc", {}))
        if recorded is not None and not recorded.images and recorded.complete:
            # The detector, tokenizer and earlier runs used the same data.
            return Exposure(name=name, state="clean", how="not in the data of that version")
        parts += [_parent(parent, then, checkpoints) for parent in lineage.get("parents", [])]
        return worst(name, parts)
    except (VLPError, OSError, KeyError, TypeError, ValueError) as error:
        return Exposure(name=name, state="unknown", how=f"cannot be determined: {first_line(error)}")


def stores_captions_of(version: ModelVersion, images: Collection[str]) -> bool:
    """Return whether a captioner's version stores captions of one of the images, for caption retrieval.

    It stores all captions of its training data, even those that a short training did not reach.

    Raises:
        one of `store_errors`: the store does not answer.
    """
    import mlflow.artifacts

    if not images:
        return False
    folder = f"models:/{version.name}/{version.version}/{BUNDLE}/{SEARCH}"
    # Only a local store distinguishes a missing file; a bucket or server fails as if it were unreachable.
    if not any(Path(file.path).name == CAPTIONS for file in mlflow.artifacts.list_artifacts(folder)):
        return False
    with tempfile.TemporaryDirectory() as temporary:
        file = mlflow.artifacts.download_artifacts(f"{folder}/{CAPTIONS}", dst_path=temporary)
        try:
            return any(image_id in images for image_id, _ in json.loads(Path(file).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise OSError(f"{CAPTIONS} is damaged: {error}") from None


def _provenance(version: ModelVersion) -> Mapping[str, Any]:
    """Return the provenance in the version's checkpoint."""
    import mlflow.artifacts

    with tempfile.TemporaryDirectory() as temporary:
        try:
            uri = f"models:/{version.name}/{version.version}/{CONFIG}"
            file = mlflow.artifacts.download_artifacts(uri, dst_path=temporary)
        except store_errors() as error:
            raise OSError(f"its files are unreachable: {error}") from None
        provenance = json.loads(Path(file).read_text(encoding="utf-8")).get("provenance", {})
        return provenance if isinstance(provenance, Mapping) else {}


def _run_exposure(
    run: str, provenance: Mapping[str, Any], data: DataVersion | None, checkpoints: CheckpointExposures
) -> Exposure:
    settings = run_settings(run, provenance)
    if settings is None:
        return Exposure(name=run, state="unknown", how="its training settings are missing")
    # The version of the shards has regions if a detector made some.
    regions = bool(data and json.loads((data.shards / "manifest.json").read_text(encoding="utf-8"))["detector_id"])
    return checkpoints.own(TrainingRun.from_settings(run, settings), data, provenance, regions=regions)


def _parent(parent: Mapping[str, Any], data: DataVersion | None, checkpoints: CheckpointExposures) -> Exposure:
    """Determine the exposure of one parent of a lineage (pipeline/lineage.py)."""
    name = parent["path"].removeprefix("checkpoints/")
    file = checkpoints.workspace.root / parent["path"]
    if parent["role"] in ("imported weights", "text weights", "image weights"):
        return Exposure(name=name, state="clean", how="trained elsewhere")
    # The parent still exists with the same content: use its own exposure.
    if file.exists() and parent.get("sha256") == hash_path(file):
        return checkpoints.of(name if parent["path"] not in (DETECTOR, TOKENIZER) else parent["path"])
    if parent["role"] == "starts from" and name.startswith("initial/") and not parent.get("vision_warmup"):
        return Exposure(name=name, state="clean", how="not trained yet")
    if parent["role"] == "starts from" and "params" in parent:
        # A parent may have been trained on other data than its child.
        if trained_on_inputs(parent.get("inputs", {})):
            data = checkpoints.data.of(parent["inputs"])
        return _run_exposure(name, parent, data, checkpoints)
    return Exposure(name=name, state="unknown", how="no longer available")
