"""Which registered versions saw a picture, and what aliases they have: the champion above all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import SEARCH, Workspace
from vlp_models.data.shards.contents import learned_from
from vlp_models.errors import VLPError
from vlp_models.forgetting.data_versions import DataVersion, DataVersions
from vlp_models.forgetting.learning import Learning, settings_of
from vlp_models.forgetting.saw import DETECTOR, TOKENIZER, Checkpoints, Verdict, worst
from vlp_models.params import Params
from vlp_models.registry.client import find_model, store_errors
from vlp_models.registry.evaluations import read_lineage
from vlp_models.registry.versions import model_name
from vlp_models.tasks.caption_search import CAPTIONS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

BUNDLE = "artifacts/bundle"  # of a version's files
CONFIG = f"{BUNDLE}/checkpoint/config.json"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A version of a registered model, and what is told of it. aliases: champion, previous, run-RUN, ..."""

    model: str
    version: int
    task: str
    run: str
    aliases: tuple[str, ...]
    content: str
    verdict: Verdict


def lineages(client: MlflowClient, params: Params) -> dict[tuple[str, int], dict[str, Any]]:
    """What each version's lineage says; versions without one are left out."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for _, version in _all(client, params):
        try:
            record = read_lineage(client, version)
        except VLPError:
            record = None
        if record is not None:
            found[version.name, int(version.version)] = record
    return found


def registered(
    client: MlflowClient,
    params: Params,
    workspace: Workspace,
    checkpoints: Checkpoints,
    data: DataVersions,
    records: Mapping[tuple[str, int], Mapping[str, Any]],
) -> list[Registered]:
    """Every version of every task's model, the newest first.

    Args:
        records: their lineages.
    """
    here = {
        hash_path(path.parent): f"finetune/{path.parent.name}"
        for path in (workspace.root / "checkpoints" / "finetune").glob("*/config.json")
    }
    lies = data.here()
    asked = lies.images if lies is not None else frozenset[str]()
    found = []
    for task, version in _all(client, params):
        name = f"{version.name} version {version.version}"
        held = here.get(version.tags.get("weights", "")[:64])
        if held:
            told = checkpoints.of(held)
            verdict = Verdict(name=name, state=told.state, how=f"{held}: {told.how}", sight=told.sight)
        else:
            record = records.get((version.name, int(version.version)))
            verdict = _by_lineage(name, version, record, checkpoints, data)
        if verdict.state in ("never", "unknown"):
            verdict = _with_captions(verdict, version, asked)
        found.append(
            Registered(
                model=version.name,
                version=int(version.version),
                task=task,
                run=version.tags.get("run", ""),
                aliases=tuple(sorted(_aliases(client, version))),
                content=version.tags.get("content", ""),
                verdict=verdict,
            )
        )
    return found


def _all(client: MlflowClient, params: Params) -> list[tuple[str, ModelVersion]]:
    from vlp_models.tasks import TASKS

    found = []
    for task in TASKS:
        name = model_name(params.tracking, task)
        if find_model(client, name) is not None:
            versions = client.search_model_versions(f"name='{name}'")
            found += [(task, version) for version in sorted(versions, key=lambda v: -int(v.version))]
    return found


def _aliases(client: MlflowClient, version: ModelVersion) -> list[str]:
    model = find_model(client, version.name)
    aliases = dict(model.aliases) if model is not None else {}
    return [alias for alias, number in aliases.items() if int(number) == int(version.version)]


def _by_lineage(
    name: str,
    version: ModelVersion,
    record: Mapping[str, Any] | None,
    checkpoints: Checkpoints,
    data: DataVersions,
) -> Verdict:
    """Of a version whose checkpoint is not here any more: by its lineage, and the data of that time."""
    if record is None:
        return Verdict(name=name, state="unknown", how="it was registered without a lineage")
    try:
        provenance = _provenance(version)
        run = f"finetune/{record['run']}"
        then = data.of(provenance.get("inputs", {}))
        parts = [_own(run, provenance, then, checkpoints)]
        whole = data.at(record.get("dvc", {}))
        if whole is not None and not whole.images and whole.complete:
            # Detector, tokenizer and earlier runs were made of that same data.
            return Verdict(name=name, state="never", how="the data that it learnt from did not have it")
        for parent in record.get("parents", []):
            parts.append(_parent(parent, then, checkpoints))
        return worst(name, parts)
    except (VLPError, OSError, KeyError, TypeError, ValueError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        return Verdict(name=name, state="unknown", how=f"can't be told: {line}")


def _with_captions(verdict: Verdict, version: ModelVersion, asked: Collection[str]) -> Verdict:
    """The verdict, unless the version holds what one of the pictures is called, or can't be asked."""
    try:
        if looks_up(version, asked):
            return replace(verdict, state="saw", how="it looks up the picture's captions", sight=None)
    except store_errors() as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        return replace(verdict, state="unknown", how=f"whether it looks up captions can't be told: {line}")
    return verdict


def looks_up(version: ModelVersion, images: Collection[str]) -> bool:
    """Whether a captioner's version holds what one of the pictures is called: it holds all that it may learn from, also
    what a short training did not come to.

    Raises:
        one of `store_errors`: the store does not answer, which says nothing of what it holds.
    """
    import mlflow.artifacts

    if not images:
        return False
    folder = f"models:/{version.name}/{version.version}/{BUNDLE}/{SEARCH}"
    # Of a file that is not there, only a local store says so; a bucket or a server fails as if it were away.
    if not any(Path(file.path).name == CAPTIONS for file in mlflow.artifacts.list_artifacts(folder)):
        return False
    with tempfile.TemporaryDirectory() as temporary:
        file = mlflow.artifacts.download_artifacts(f"{folder}/{CAPTIONS}", dst_path=temporary)
        try:
            return any(image_id in images for image_id, _ in json.loads(Path(file).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise OSError(f"{CAPTIONS} is damaged: {error}") from None


def _provenance(version: ModelVersion) -> Mapping[str, Any]:
    """What the version's checkpoint says it was made of."""
    import mlflow.artifacts

    with tempfile.TemporaryDirectory() as temporary:
        try:
            uri = f"models:/{version.name}/{version.version}/{CONFIG}"
            file = mlflow.artifacts.download_artifacts(uri, dst_path=temporary)
        except store_errors() as error:
            raise OSError(f"its files can't be had: {error}") from None
        found = json.loads(Path(file).read_text(encoding="utf-8")).get("provenance", {})
        return found if isinstance(found, Mapping) else {}


def _own(run: str, provenance: Mapping[str, Any], data: DataVersion | None, checkpoints: Checkpoints) -> Verdict:
    settings = settings_of(run, provenance)
    if settings is None:
        return Verdict(name=run, state="unknown", how="it does not say how it was trained")
    return checkpoints.own(Learning.of(run, settings), data, provenance, regions=bool(data and _has_regions(data)))


def _has_regions(data: DataVersion) -> bool:
    return bool(json.loads((data.shards / "manifest.json").read_text(encoding="utf-8"))["detector_id"])


def _parent(parent: Mapping[str, Any], data: DataVersion | None, checkpoints: Checkpoints) -> Verdict:
    """parent: as lineage has it (runs/provenance.py)."""
    name = parent["path"].removeprefix("checkpoints/")
    file = checkpoints.workspace.root / parent["path"]
    if parent["role"] in ("imported weights", "a BERT's words"):
        return Verdict(name=name, state="never", how="made elsewhere")
    if file.exists() and parent.get("sha256") == hash_path(file):
        return checkpoints.of(name if parent["path"] not in (DETECTOR, TOKENIZER) else parent["path"])
    if parent["role"] == "starts from" and name.startswith("initial/") and not parent.get("vision_warmup"):
        return Verdict(name=name, state="never", how="before its first step")
    if parent["role"] == "starts from" and "params" in parent:
        own = checkpoints.data.of(parent["inputs"]) if learned_from(parent.get("inputs", {})) else data
        return _own(name, parent, own, checkpoints)
    return Verdict(name=name, state="unknown", how="it is not here any more")
