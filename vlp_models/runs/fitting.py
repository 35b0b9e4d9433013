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
from vlp_models.models.checkpoint import load_strictly, part_of, read_config, read_weights, write_checkpoint
from vlp_models.params import Params, TrainerParams, to_plain
from vlp_models.tracking.lineage import lineage
from vlp_models.tracking.logger import STATE, MLflowRun, tracked
from vlp_models.workspace.paths import (
    Workspace,
    fingerprint,
    hash_path,
    is_main_process,
    need,
    output_directory,
    write_manifest,
    write_text,
)

if TYPE_CHECKING:
    from vlp_models.training.run import FitResult


PRESET = "preset.yaml"  # beside imported weights: the model.config they belong to


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


def check_same_data(
    before: dict[str, Any], init: Path, inputs: Inputs, way_out: str = "`dvc repro` makes it anew"
) -> None:
    """
    Args:
        before: config.json of the checkpoint `init`, from which training is to start.

    Raises:
        CheckpointError: it was made with other features, classes or words.
    """
    manifest = inputs.manifest
    for name, now in (("detector_id", manifest.detector_id), ("feature_dim", manifest.feature_dim)):
        if before[name] != now:
            raise CheckpointError(
                f"{init}: made from features with {name} {before[name]!r}, the shards hold {now!r}; {way_out}"
            )
    if list(before["classes"]) != list(manifest.classes):
        raise CheckpointError(f"{init}: made with other detector classes than the shards'; {way_out}")
    if Tokenizer.load(init).vocabulary != inputs.tokenizer.vocabulary:
        raise CheckpointError(f"{init}: made with another vocabulary than data/tokenizer; {way_out}")


def start_from(model: nn.Module, name: str, init: Path, inputs: Inputs) -> None:
    """Fills `model` with the weights of the checkpoint `init`, of the same architecture and data.

    Raises:
        CheckpointError: damaged, or made for another architecture, other features or another vocabulary.
    """
    before = read_config(init)
    check_same_data(before, init, inputs, "import it anew")
    own = to_plain(model.config)
    settings = {"dropout", "attention_dropout", "init_std", "mask_scheme", "zero_overlapping_regions"}
    settings |= {"ism_margin", "ism_negatives", "segment_types"}  # no weight's shape or place: free to differ
    differ = [
        f"{key}: {own.get(key)} here, {value} there"
        for key, value in before["model_config"].items()
        if key not in settings and own.get(key) != value
    ]
    if before["model"] != name or differ:
        what = "; ".join(differ) or f"a {before['model']}"
        raise CheckpointError(
            f"{init}: of another architecture than params.yaml's `model` ({what}); `vlp use {init / PRESET}` sets it"
        )
    load_strictly(model, part_of(read_weights(init), "model"), init)


def work_directory(
    workspace: Workspace, stage: str, trainer: TrainerParams, settings: dict[str, Any], files: dict[str, Path]
) -> Path:
    """Where the run keeps its state: another one whenever anything that its result depends on changes."""
    hardware = {"accelerator": trainer.accelerator, "devices": trainer.devices, "precision": trainer.precision}
    if (trainer.strategy, trainer.num_nodes) != ("auto", 1):
        hardware |= {"strategy": trainer.strategy, "num_nodes": trainer.num_nodes}
    return workspace.work(stage, fingerprint({"trainer": hardware, **settings}, files))


def tracking(
    params: Params, workspace: Workspace, work: Path, *, stage: str, settings: dict[str, Any], tags: dict[str, str]
) -> AbstractContextManager[MLflowRun | None]:
    """The MLflow run of a training; none if `tracking.uri` is empty, or in a process that another one leads."""
    if not params.tracking.uri or not is_main_process():
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
    """Writes the checkpoint and the curve. Returns the run's final numbers."""
    from vlp_models.training.curve import as_csv, final_numbers

    counts = {**counts, "parameters": sum(p.numel() for p in module.parameters()), "steps": result.steps}
    provenance = {"params": settings, "inputs": {key: hash_path(path) for key, path in files.items()}}
    with output_directory(workspace.checkpoint(name)) as directory:
        write_checkpoint(directory, module, {**config, "provenance": provenance}, tokenizer, answers)
        write_manifest(directory, stage=stage, params=settings, counts=counts)
    write_text(curve_file(workspace, name), as_csv(result.rows))
    return {
        **counts,
        **final_numbers(result.rows),
        "seconds": result.seconds,
        "samples_per_s": result.samples_per_second,
    }


def curve_file(workspace: Workspace, name: str) -> Path:
    return workspace.reports / "curves" / f"{name}.csv"


def forget(work: Path) -> None:
    """The result is written: the next run of this stage begins anew, with a run of its own in MLflow."""
    from vlp_models.training.resume import clear

    clear(work)
    (work / STATE).unlink(missing_ok=True)
