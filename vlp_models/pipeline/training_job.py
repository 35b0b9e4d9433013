"""One training of params.yaml as a DVC stage: what `pretrain` and `finetune` share.

    TrainingJob(params, workspace, "pretrain/tden", view=..., settings=...).run(build)

reads the prepared data and the start checkpoint, finds the work directory of exactly this work, trains what `build`
returns (resuming after a kill), publishes checkpoint, curve and training report, and clears the resume state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vlp_models.common.device import is_main_process
from vlp_models.common.io import output_directory, write_json, write_text
from vlp_models.common.packages import is_installed
from vlp_models.common.plugins import import_target
from vlp_models.common.portable import is_portable
from vlp_models.common.source_hash import code_hash
from vlp_models.common.workspace import Workspace, fingerprint, require_output, write_manifest
from vlp_models.data.shards import STREAMING
from vlp_models.data.shards.contents import CONTENTS, trained_on_file
from vlp_models.data.shards.dataset import check_sources
from vlp_models.models import FAMILIES
from vlp_models.models.checkpoint import ADAPTER_FOLDER, CheckpointInfo, read_config, write_checkpoint
from vlp_models.models.meta_model import image_kind_of
from vlp_models.params import FinetuneParams, Params, PretrainParams, split_start, to_plain
from vlp_models.pipeline.lineage import lineage_tags, provenance_of, record_provenance, training_inputs
from vlp_models.pipeline.prepared_data import PreparedData, stage_of
from vlp_models.pipeline.unrecorded_results import (
    remove_outdated_work,
    restore_unrecorded_result,
    save_unrecorded_result,
)
from vlp_models.registry.curve_loggers import CurveLogger, log_curves, open_sinks, sink_state_files
from vlp_models.registry.mlflow_run import STATE, MLflowRun
from vlp_models.tasks import task_class
from vlp_models.training import ADAPTERS, STRATEGIES
from vlp_models.training.data import LoaderFactory
from vlp_models.training.log import as_csv, final_numbers
from vlp_models.training.resume import clear_resume_points
from vlp_models.training.run import Plan, fit

if TYPE_CHECKING:
    from vlp_models.training.module import LossFunction
    from vlp_models.training.run import FitResult


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a stage builds to be trained and published.

    model: what is trained. checkpoint: what is saved; its parts are `model` and, for a task, `head`.
    """

    model: nn.Module
    checkpoint: nn.Module
    info: CheckpointInfo
    labels: Sequence[str]
    loss: LossFunction
    loaders: LoaderFactory
    tags: dict[str, str]


class TrainingJob:
    """One pretraining or fine-tuning run.

    name, stage: `pretrain/RUN`, `pretrain@RUN`. section: the run's section of params.yaml.
    start, start_info: the checkpoint that it starts from, and its description.
    files: the inputs that identify the run, by the names that its provenance gives them.
    work: where its resume state is (training/resume.py lists the files).
    """

    def __init__(
        self,
        params: Params,
        workspace: Workspace,
        name: str,
        *,
        view: str,
        settings: dict[str, Any],
        files: Mapping[str, Path] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """
        Args:
            view: the samples it trains on.
            settings: the params that its result depends on, apart from `trainer`.
            files: inputs besides shards, tokenizer and start.
            modules: code that its result depends on, besides the stage, the model and everything they import.

        Raises:
            DataError: an earlier stage has not run.
            ParamsError: `sources` names a dataset the shards do not have.
            CheckpointError: the start is damaged.
        """
        kind, key = split_start(name)
        self.params, self.workspace = params, workspace
        self.name, self.stage = name, stage_of(name)
        self.view, self.settings = view, settings
        self.section: PretrainParams | FinetuneParams = getattr(params, kind)[key]
        # what it reads: prepared data, and the checkpoint of the run or model that it starts from
        self.data = PreparedData.load(workspace)
        self.start_name = params.start_of(kind, key)
        self.start = require_output(workspace.checkpoint(self.start_name), stage_of(self.start_name))
        self.start_info = read_config(self.start)
        # The run depends on the content of the samples that it trains on, not on the whole of data/shards.
        image_kind = image_kind_of(params, name)
        check_sources(self.section.sources, self.data.manifest.sources)
        content = f"{CONTENTS}/{trained_on_file(image_kind, view, self.section.sources)}"
        self.files = {content: require_output(workspace.root / content, "shards")}
        if params.trainer.stream.address:  # the order of samples depends on how they are packed
            self.files |= {path.name: path for path in sorted(workspace.shards.glob("index-*.parquet"))}
        self.files |= {"tokenizer": self.data.tokenizer_path, "start": self.start, **(files or {})}
        # A run may continue with another strategy, so the code of all of them counts.
        modules = [*modules, *STRATEGIES.values(), *(STREAMING.values() if params.trainer.stream.address else ())]
        self.work = self._work_directory(
            [f"vlp_models.pipeline.stages.{kind}", FAMILIES[self.start_info.family], *modules]
        )
        # for `vlp forget`, in case the training is interrupted
        if is_main_process():
            detector_id = self.data.manifest.detector_id if image_kind == "regions" else ""
            self._provenance = provenance_of(self.settings, self.files, params.trainer.stream)
            record_provenance(self.work, self._provenance, detector_id)

    def _work_directory(self, modules: Sequence[str]) -> Path:
        """Return the folder of the resume state: another one whenever something that the result depends on changes."""
        trainer = self.params.trainer
        # what decides the bits of the result besides params and inputs
        hardware: dict[str, Any] = {"accelerator": trainer.accelerator, "precision": trainer.precision}
        hardware["portable"] = is_portable()  # a state of a notebook, which may not be, is not a command's
        if trainer.stream.address:  # block size and window decide the order of samples
            hardware |= {"stream": [trainer.stream.block_mb, trainer.stream.window]}
        identity = {"trainer": hardware, **self.settings, "code": code_hash(modules)}
        return self.workspace.work(self.stage.replace("@", "-"), fingerprint(identity, self.files))

    def run(
        self,
        build: Callable[[TrainingJob], Training],
        write_more: Callable[[TrainingJob, Training], list[Path]] | None = None,
    ) -> None:
        """Train and publish, or restore a result that DVC has not recorded yet.

        Args:
            build: returns what to train. torch's random state is seeded with the run's seed before the call.
            write_more: writes outputs of its own from the trained model, and returns them.

        Raises:
            DataError: a later evaluation could not search these shards.
            CheckpointError: the start does not match the prepared data.
        """
        if restore_unrecorded_result(self.workspace, self.work, self.stage):
            if is_main_process():
                self.clear_resume_state()
            return
        check_searches(self.params, self.data.shards, self.name)
        self.data.check_compatible(self.start_info, self.start)
        # New weights (heads) are drawn from the run's seed.
        torch.manual_seed(self.section.seed)
        training = build(self)
        # Only the first process logs curves.
        mlflow, sinks = self._open_curve_loggers(training.tags) if is_main_process() else (None, [])
        with log_curves([*sinks, mlflow] if mlflow is not None else sinks, self.work) as tracker:
            result = fit(
                training.model,
                training.loss,
                training.loaders,
                plan=Plan.of(self.section),
                trainer=self.params.trainer,
                work=self.work,
                title=self.stage,
                tracker=tracker,
            )
        if not result.is_main:  # rank 0 publishes
            return
        outputs = self._publish(training, result, mlflow, sinks)
        if write_more is not None:
            outputs += write_more(self, training)
        # Saved before the resume state goes, so that a kill in between leaves one of the two.
        save_unrecorded_result(self.workspace, self.work, self.stage, outputs)
        self.clear_resume_state()

    def loaders(self, **more: Any) -> LoaderFactory:
        """Return the loaders of the run's view and sources; `more` are fields of `LoaderFactory`."""
        trainer, p = self.params.trainer, self.section
        common: dict[str, Any] = {"sources": p.sources, "batch_size": p.batch_size, "seed": p.seed}
        common |= {"num_workers": trainer.num_workers, "stream": trainer.stream}
        return LoaderFactory(self.data.shards, self.view, **common, **more)

    def _open_curve_loggers(self, tags: dict[str, str]) -> tuple[MLflowRun | None, list[CurveLogger]]:
        """Return the MLflow run of the training (None without MLflow or `tracking.uri`), and its sinks."""
        params, workspace = self.params, self.workspace
        sinks = open_sinks(params.tracking, workspace.root, self.work, title=self.stage, run_params=self.settings)
        if not params.tracking.uri or not is_installed("mlflow"):
            return None, sinks
        facts = lineage_tags(
            workspace.root,
            params=to_plain(params),
            data=workspace.shards / "manifest.json",
            command=f"dvc repro {self.stage}",
        )
        mlflow = MLflowRun(
            params.tracking,
            workspace.root,
            self.work,
            title=self.stage,
            run_params=self.settings,
            tags={**facts, **tags, "stage": self.stage},
            inputs=training_inputs(workspace, self.section.sources),
        )
        return mlflow, sinks

    def _publish(
        self, training: Training, result: FitResult, mlflow: MLflowRun | None, sinks: Sequence[CurveLogger]
    ) -> list[Path]:
        """Write checkpoint, curve and training report; return their paths.

        Args:
            mlflow: the run that has the curve; `register` adds the scores there.
        """
        # checkpoint, with its manifest and what it was made from
        loaders, info, workspace = training.loaders, training.info, self.workspace
        counts = {"train_samples": len(loaders.train), "val_samples": len(loaders.val)}
        adapters = self.section.adapters if isinstance(self.section, FinetuneParams) else None
        final = workspace.checkpoint(self.name)
        with output_directory(final) as directory:
            info = dataclasses.replace(info, provenance=self._provenance)
            if adapters:
                import_target(ADAPTERS["publish"])(
                    directory / ADAPTER_FOLDER,
                    training.checkpoint,
                    adapters,
                    self.start,
                    info,
                    self.data.tokenizer,
                    training.labels,
                    location=final / ADAPTER_FOLDER,
                )
            counts |= {"parameters": sum(p.numel() for p in training.checkpoint.parameters()), "steps": result.steps}
            # the manifest first: SHA256SUMS covers it
            write_manifest(directory, stage=self.stage, params=self.settings, counts=counts)
            write_checkpoint(directory, training.checkpoint, info, self.data.tokenizer, training.labels)
        # curve and training report, which the report shows
        write_text(workspace.curve(self.name), as_csv(result.rows))
        last = final_numbers(result.rows)
        report: dict[str, Any] = {
            "model": info.name,
            "family": info.family,
            "start": self.start_name,
            **counts,
            "samples": result.samples,
            **{name: last[name] for name in ("loss", "val_loss") if name in last},  # the others: in the curve
            "seconds": result.seconds,
            "samples_per_s": result.samples_per_second,
            "peak_memory_mb": result.peak_memory_mb,
            "precision": result.precision,
            "mlflow_key": mlflow.key if mlflow is not None else "",
        }
        failures = {sink.name: sink.failures for sink in sinks if sink.failures}
        if failures:
            report["sink_failures"] = failures
        write_json(workspace.training(self.name), report)
        return [workspace.checkpoint(self.name), workspace.curve(self.name), workspace.training(self.name)]

    def clear_resume_state(self) -> None:
        """Delete the resume state of a published run; the next one starts over, with an MLflow run of its own.

        Delete what trainings of the run with other params, code or inputs, interrupted weeks ago, have left as well.
        """
        clear_resume_points(self.work)
        for state in (self.work / STATE, *sink_state_files(self.work)):
            state.unlink(missing_ok=True)
        remove_outdated_work(self.work)


def check_searches(params: Params, shards: Path, checkpoint: str) -> None:
    """Check the runs that start from `checkpoint` (`pretrain/RUN`, `finetune/RUN`), and itself.

    Raises:
        DataError: the evaluation of one of them could not search what it was trained on.
    """
    for name, run in params.finetune.items():
        # The chain of a run is itself and everything that it starts from.
        if checkpoint in params.chain(f"finetune/{name}") and not run.blank_images:
            task = task_class(run.task)
            task.check_search(task.evaluate_settings(params.evaluate, run.task), shards, run.sources)
