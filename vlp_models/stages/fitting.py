"""What pretraining and fine-tuning share as stages: inputs, identity of the work, results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vlp_models.data.dataset import ShardsManifest, read_manifest
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import write_checkpoint
from vlp_models.params import Params, TrainerParams, to_plain
from vlp_models.stages.workspace import (
    Workspace,
    fingerprint,
    hash_path,
    need,
    output_directory,
    write_manifest,
    write_text,
)
from vlp_models.tracking.lineage import lineage
from vlp_models.tracking.logger import STATE, MLflowRun, tracked

if TYPE_CHECKING:
    from vlp_models.training.run import FitResult


@dataclass(frozen=True, kw_only=True)
class Inputs:
    shards: Path
    manifest: ShardsManifest
    tokenizer: Tokenizer
    files: dict[str, Path]  # whose content is the data's identity


def read_inputs(workspace: Workspace) -> Inputs:
    """
    Raises:
        DataError: an earlier stage has not run.
    """
    shards = need(workspace.shards, "shards")
    tokenizer = need(workspace.tokenizer, "tokenizer")
    # The index lists every sample with its text and place, the manifest names the detector: no need to read the tars.
    indices = {path.name: path for path in sorted(shards.glob("index-*.parquet"))}
    files = {"manifest": shards / "manifest.json", **indices, "tokenizer": tokenizer}
    return Inputs(shards=shards, manifest=read_manifest(shards), tokenizer=Tokenizer.load(tokenizer), files=files)


def check_same_data(before: dict[str, Any], init: Path, inputs: Inputs) -> None:
    """That a checkpoint, `before` its config.json, was made from these features and this vocabulary.

    Raises:
        CheckpointError: it was not.
    """
    manifest = inputs.manifest
    for name, now in (("detector_id", manifest.detector_id), ("feature_dim", manifest.feature_dim)):
        if before[name] != now:
            raise CheckpointError(
                f"{init}: made from features with {name} {before[name]!r}, the shards hold {now!r}; `dvc repro` makes "
                "it anew from these"
            )
    if list(before["classes"]) != list(manifest.classes):
        raise CheckpointError(f"{init}: made with other detector classes than the shards'; `dvc repro` makes it anew")
    if Tokenizer.load(init).vocabulary != inputs.tokenizer.vocabulary:
        raise CheckpointError(f"{init}: made with another vocabulary than data/tokenizer; `dvc repro` makes it anew")


def work_directory(
    workspace: Workspace, stage: str, trainer: TrainerParams, settings: dict[str, Any], files: dict[str, Path]
) -> Path:
    """Where the run keeps its state: another one whenever anything that its result depends on changes."""
    hardware = {"accelerator": trainer.accelerator, "devices": trainer.devices, "precision": trainer.precision}
    return workspace.work(stage, fingerprint({"trainer": hardware, **settings}, files))


def tracking(
    params: Params, workspace: Workspace, work: Path, *, stage: str, settings: dict[str, Any], tags: dict[str, str]
) -> AbstractContextManager[MLflowRun | None]:
    """The MLflow run of a training; none if `tracking.uri` is empty."""
    if not params.tracking.uri:
        return tracked(None, work)
    facts = lineage(
        workspace.root, params=to_plain(params), data=workspace.shards / "manifest.json", command=f"dvc repro {stage}"
    )
    run = MLflowRun(
        params.tracking, workspace.root, work, name=stage, run_params=settings, tags={**facts, **tags, "stage": stage}
    )
    return tracked(run, work)


def publish(
    workspace: Workspace,
    name: str,
    *,
    stage: str,
    module: nn.Module,
    config: dict[str, Any],
    tokenizer: Tokenizer,
    answers: Sequence[str],
    settings: dict[str, Any],
    files: dict[str, Path],
    counts: dict[str, int],
    result: FitResult,
) -> dict[str, Any]:
    """Writes the checkpoint and the curve, then lets go of the resume state. Returns the run's final numbers."""
    from vlp_models.training.curve import as_csv, final_numbers

    counts = {**counts, "parameters": sum(p.numel() for p in module.parameters()), "steps": result.steps}
    provenance = {"params": settings, "inputs": {key: hash_path(path) for key, path in files.items()}}
    with output_directory(workspace.checkpoint(name)) as directory:
        write_checkpoint(directory, module, {**config, "provenance": provenance}, tokenizer, answers)
        write_manifest(directory, stage=stage, params=settings, counts=counts)
    write_text(workspace.reports / "curves" / f"{name}.csv", as_csv(result.rows))
    return {
        **counts,
        **final_numbers(result.rows),
        "seconds": result.seconds,
        "samples_per_s": result.samples_per_second,
    }


def forget(work: Path) -> None:
    """The result is written: the next run of this stage begins anew, with a run of its own in MLflow."""
    from vlp_models.training.resume import clear

    clear(work)
    (work / STATE).unlink(missing_ok=True)
