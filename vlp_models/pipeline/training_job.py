"""What pretraining and fine-tuning share as stages: inputs, identity of the work, results."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vlp_models.common.device import is_main_process
from vlp_models.common.io import output_directory, write_json, write_text
from vlp_models.common.source_hash import code_hash
from vlp_models.common.workspace import Workspace, fingerprint, require_output, write_manifest
from vlp_models.data.inputs import RegionInput
from vlp_models.data.shards.contents import CONTENTS, Kind, learnt_file
from vlp_models.data.shards.dataset import ShardsManifest, check_sources, read_manifest
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError
from vlp_models.models import DataFacts
from vlp_models.models.checkpoint import CheckpointInfo, in_words, load_strictly, write_checkpoint
from vlp_models.models.protocols import Adopts
from vlp_models.params import Params, StreamParams, TrainerParams, to_plain
from vlp_models.pipeline.lineage import lineage_tags, note, provenance_of, training_inputs
from vlp_models.registry.logger import STATE, MLflowRun, track_training

if TYPE_CHECKING:
    from vlp_models.training.run import FitResult


@dataclass(frozen=True, kw_only=True)
class Inputs:
    shards: Path
    manifest: ShardsManifest
    tokenizer: Tokenizer
    files: dict[str, Path]  # whose content is the words' identity; `learned_files` has the samples'


def read_inputs(workspace: Workspace) -> Inputs:
    """
    Raises:
        DataError: an earlier stage has not run.
    """
    shards = require_output(workspace.shards, "shards")
    tokenizer = require_output(workspace.tokenizer, "tokenizer")
    return Inputs(
        shards=shards,
        manifest=read_manifest(shards),
        tokenizer=Tokenizer.load(tokenizer),
        files={"tokenizer": tokenizer},
    )


def learned_files(
    workspace: Workspace, inputs: Inputs, kind: Kind, view: str, sources: Collection[str], stream: StreamParams
) -> dict[str, Path]:
    """The files whose content is the identity of what a run learns from, by the names that its checkpoint gives them.

    Args:
        kind: what of an image its model reads.
        sources: the datasets that it learns from; empty: all.

    Raises:
        DataError: `shards` has not run.
        ParamsError: `sources` names a dataset the shards do not hold.
    """
    check_sources(sources, inputs.manifest.sources)
    name = f"{CONTENTS}/{learnt_file(kind, view, sources)}"
    files = {name: require_output(workspace.root / name, "shards")}
    if stream.address:  # the order of samples follows from how they are packed
        files |= {path.name: path for path in sorted(workspace.shards.glob("index-*.parquet"))}
    return files


def check_same_data(
    before: CheckpointInfo, start: Path, inputs: Inputs, way_out: str = "`dvc repro` makes it anew"
) -> None:
    """
    Args:
        before: of the checkpoint `start`, from which training is to begin.

    Raises:
        CheckpointError: it was made with other features, classes or words.
    """
    manifest = inputs.manifest
    if before.detector_id:
        if before.classes != tuple(manifest.classes):
            raise CheckpointError(
                f"{start}: made from features with {in_words(before.classes)}, the shards hold another detector's or "
                f"backbone's with {in_words(manifest.classes)}; {way_out}"
            )
        for name, now in (("detector_id", manifest.detector_id), ("feature_dim", manifest.feature_dim)):
            if getattr(before, name) != now:
                raise CheckpointError(
                    f"{start}: made from features with {name} {getattr(before, name)!r}, the shards hold {now!r}; "
                    f"{way_out}"
                )
    if Tokenizer.load(start).vocabulary != inputs.tokenizer.vocabulary:
        raise CheckpointError(f"{start}: made with another vocabulary than data/tokenizer; {way_out}")


def stage_of(start: str) -> str:
    """The DVC stage that makes a checkpoint: `pretrain/tden` -> `pretrain@tden`."""
    return start.replace("/", "@", 1)


def data_facts(inputs: Inputs) -> DataFacts:
    return DataFacts(
        vocab_size=inputs.tokenizer.vocab_size,
        mask_id=inputs.tokenizer.mask_id,
        cls_id=inputs.tokenizer.cls_id,
        sep_id=inputs.tokenizer.sep_id,
        feature_dim=inputs.manifest.feature_dim,
        num_classes=inputs.manifest.num_classes,
    )


def describe(
    inputs: Inputs, model: nn.Module, *, family: str, name: str, max_text_len: int, max_regions: int, **more: Any
) -> CheckpointInfo:
    """What the checkpoint of a model that learned from these inputs says of itself. more: of a task."""
    regions = isinstance(model.inputs.image, RegionInput)  # type: ignore[union-attr]
    return CheckpointInfo(
        family=family,
        name=name,
        model_config=to_plain(model.config),
        max_text_len=max_text_len,
        max_regions=max_regions if regions else 0,
        detector_id=inputs.manifest.detector_id if regions else "",
        feature_dim=inputs.manifest.feature_dim if regions else 0,
        classes=inputs.manifest.classes if regions else (),
        **more,
    )


def start_from(model: nn.Module, before: CheckpointInfo, weights: Mapping[str, Tensor], start: Path) -> list[str]:
    """Fills `model` with the weights of a checkpoint of its family; of another architecture, with what fits.

    Returns what was left out, and what stayed as it was, in lines to print.

    Raises:
        CheckpointError: damaged, or it fits nowhere; of a model that is no `Adopts`, a name or a shape differs.
    """
    if _with_defaults(before.model_config, model.config) == to_plain(model.config) or not isinstance(model, Adopts):
        load_strictly(model, weights, start)
        return []
    adopted = model.adopt(weights, before.model_config)
    lines = [f"{start}: of another architecture; taken over as far as it fits"]
    lines += [f"  left out: {', '.join(adopted.left_out)}"] if adopted.left_out else []
    lines += [f"  as they were: {', '.join(adopted.fresh)}"] if adopted.fresh else []
    return lines


def _with_defaults(written: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """A config from before a field was there is that of the field's default."""
    fields = dataclasses.fields(config)
    plain = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return plain | made | dict(written)


def work_directory(
    workspace: Workspace,
    stage: str,
    trainer: TrainerParams,
    settings: dict[str, Any],
    files: dict[str, Path],
    modules: Sequence[str],
    *,
    detector_id: str,
) -> Path:
    """Where the run keeps its state: another one whenever anything that its result depends on changes. What the state
    is made of is noted there, for `vlp forget`.

    detector_id: of the regions that the model reads; empty: it reads none.
    modules: the code that the run begins with (the stage, the model's, the task's); with what they import, it counts.
    """
    hardware = {"accelerator": trainer.accelerator, "devices": trainer.devices, "precision": trainer.precision}
    if (trainer.strategy, trainer.num_nodes) != ("auto", 1):
        hardware |= {"strategy": trainer.strategy, "num_nodes": trainer.num_nodes}
    if trainer.stream.address:
        hardware |= {"stream": [trainer.stream.block_mb, trainer.stream.window]}  # they decide the order of samples
    value = {"trainer": hardware, **settings, "code": code_hash(modules)}
    work = workspace.work(stage.replace("@", "-"), fingerprint(value, files))
    if is_main_process():
        note(work, provenance_of(settings, files, trainer.stream), detector_id)
    return work


def tracking(
    params: Params,
    workspace: Workspace,
    work: Path,
    *,
    stage: str,
    settings: dict[str, Any],
    tags: dict[str, str],
    sources: Iterable[str],
) -> AbstractContextManager[MLflowRun | None]:
    """The MLflow run of a training; none if `tracking.uri` is empty, or in a process that another one leads.

    sources: the datasets that it learns from; none: all.
    """
    if not params.tracking.uri or not is_main_process():
        return track_training(None, work)
    facts = lineage_tags(
        workspace.root, params=to_plain(params), data=workspace.shards / "manifest.json", command=f"dvc repro {stage}"
    )
    run = MLflowRun(
        params.tracking,
        workspace.root,
        work,
        name=stage,
        run_params=settings,
        tags={**facts, **tags, "stage": stage},
        inputs=training_inputs(workspace, sources),
    )
    return track_training(run, work)


def publish(
    workspace: Workspace,
    run: str,
    *,
    module: nn.Module,
    info: CheckpointInfo,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    settings: dict[str, Any],
    files: dict[str, Path],
    counts: dict[str, int],
    start: str,
    result: FitResult,
    stream: StreamParams | None = None,
    tracker: MLflowRun | None = None,
) -> list[Path]:
    """Writes checkpoints/RUN, the curve, and what the training came to and cost (`run`: kind/name). Returns them.

    stream: how the shards were read, which decides the order of samples.
    tracker: the MLflow run that has the curve; `register` adds the scores there.
    """
    from vlp_models.training.log import as_csv, final_numbers

    counts = {**counts, "parameters": sum(p.numel() for p in module.parameters()), "steps": result.steps}
    provenance = provenance_of(settings, files, stream)
    with output_directory(workspace.checkpoint(run)) as directory:
        write_checkpoint(directory, module, dataclasses.replace(info, provenance=provenance), tokenizer, labels)
        write_manifest(directory, stage=stage_of(run), params=settings, counts=counts)
    write_text(workspace.curve(run), as_csv(result.rows))
    last = final_numbers(result.rows)
    report: dict[str, Any] = {
        "model": info.name,
        "family": info.family,
        "start": start,
        **counts,
        "samples": result.samples,
        **{name: last[name] for name in ("loss", "val_loss") if name in last},  # the others: in the curve
        "seconds": result.seconds,
        "samples_per_s": result.samples_per_second,
        "peak_memory_mb": result.peak_memory_mb,
        "precision": result.precision,
        "mlflow_key": tracker.key if tracker is not None else "",
    }
    write_json(workspace.training(run), report)
    return [workspace.checkpoint(run), workspace.curve(run), workspace.training(run)]


def forget(work: Path) -> None:
    """The result is written: the next run of this stage begins anew, with a run of its own in MLflow."""
    from vlp_models.training.resume import clear_resume_points

    clear_resume_points(work)
    (work / STATE).unlink(missing_ok=True)
