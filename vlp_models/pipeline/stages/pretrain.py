"""pretrain RUN: a model learns without a task, in one pass or two. Killed or stopped, it goes on where it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace, record_timing, require_output
from vlp_models.errors import ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.params.schema import nearest

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from vlp_models.data.batch import Batch
    from vlp_models.data.sample import Sample


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes checkpoints/pretrain/KEY, its curve, reports/training/pretrain/KEY.json and the model's own figures.

    Raises:
        ParamsError: no such run, or a value that can't be.
        DataError, CheckpointError: an input is missing or does not fit.
        Preempted, NonFiniteLossError, CheckpointError: see `training.run.fit`.
    """
    import torch
    from torch import nn

    from vlp_models.data.inputs import InputReader, MultiCaptionCollator
    from vlp_models.data.views import VIEWS
    from vlp_models.models import FAMILIES, build_model
    from vlp_models.models.checkpoint import build_from_config, part_of, read_config, read_weights
    from vlp_models.models.meta_model import image_kind_of
    from vlp_models.pipeline.check_params import check_searches
    from vlp_models.pipeline.training_job import (
        check_same_data,
        data_facts,
        describe,
        forget,
        learned_files,
        publish,
        read_inputs,
        stage_of,
        start_from,
        tracking,
        work_directory,
    )
    from vlp_models.pipeline.unrecorded import keep, restore
    from vlp_models.training.data import LoaderFactory
    from vlp_models.training.run import Plan, fit
    from vlp_models.training.scheduled_sampling import make_loss

    if key not in params.pretrain:
        raise ParamsError(f"params.yaml: no pretraining run `{key}`{nearest(key, params.pretrain)}")
    p, own = params.pretrain[key], params.models[params.pretrain[key].model]
    stage, run_name, start_name = f"pretrain@{key}", f"pretrain/{key}", params.start_of("pretrain", key)
    with record_timing(workspace, stage):
        inputs = read_inputs(workspace)
        start = require_output(workspace.checkpoint(start_name), stage_of(start_name))
        kind = image_kind_of(params, f"initial/{p.model}")
        learned = learned_files(workspace, inputs, kind, p.view, p.sources, params.trainer.stream)
        files = {**learned, **inputs.files, "start": start}
        settings = {"pretrain": {key: to_plain(p)}, "model": {"family": own.family, "config": own.config}}
        modules = ["vlp_models.pipeline.stages.pretrain", FAMILIES[own.family]]
        detector_id = inputs.manifest.detector_id if kind == "regions" else ""
        work = work_directory(workspace, stage, params.trainer, settings, files, modules, detector_id=detector_id)
        if restore(workspace, work, stage):
            forget(work)
            return
        check_searches(params, inputs.shards, run_name)
        before = read_config(start)
        check_same_data(before, start, inputs)
        torch.manual_seed(p.seed)
        if params.model_at(start_name) == p.model:
            model = build_from_config(before, inputs.tokenizer, start)
        else:  # another architecture of the family, which takes over what fits
            model = build_model(own.family, own.config, data_facts(inputs), where=f"models.{p.model}.config")
        for line in start_from(model, before, part_of(read_weights(start), "model"), start):
            print(line, file=sys.stderr)
        if p.captions_per_image > 1 and not getattr(model, "several_texts", False):
            raise ParamsError(
                f"params.yaml: `pretrain.{key}.captions_per_image`: more than one, but `{p.model}` learns from one "
                "text an image; set `view: captions` and drop it"
            )
        loss = make_loss(model, p.recipe, p.scheduled_sampling, name=p.model, section=f"pretrain.{key}")
        reader = InputReader(
            model.inputs.of_view(VIEWS[p.view]),  # type: ignore[union-attr,operator]
            inputs.tokenizer,
            max_text_len=p.max_text_len,
            max_regions=p.max_regions,
        )
        several = MultiCaptionCollator(reader=reader, count=p.captions_per_image)
        collate = several if p.captions_per_image else reader.collate
        loaders = LoaderFactory(
            inputs.shards,
            p.view,
            sources=p.sources,
            collate=collate,
            batch_size=p.batch_size,
            num_workers=params.trainer.num_workers,
            stream=params.trainer.stream,
            seed=p.seed,
            captioned=p.captions_per_image > 0,
            **reader.flags,
        )
        tags = {"run": key, "model": p.model, "scheduled_sampling": p.scheduled_sampling.scheme}
        with tracking(params, workspace, work, stage=stage, settings=settings, tags=tags, sources=p.sources) as tracker:
            result = fit(
                model,
                loss,
                loaders,
                plan=Plan.of(p),
                trainer=params.trainer,
                work=work,
                title=stage,
                tracker=tracker,
            )
        if not result.is_main:
            return
        lengths = {"max_text_len": p.max_text_len, "max_regions": p.max_regions}
        outputs = publish(
            workspace,
            run_name,
            module=nn.ModuleDict({"model": model}),
            info=describe(inputs, model, family=own.family, name=p.model, **lengths),
            tokenizer=inputs.tokenizer,
            labels=(),
            settings=settings,
            files=files,
            counts={"train_samples": len(loaders.train), "val_samples": len(loaders.val)},
            start=start_name,
            result=result,
            stream=params.trainer.stream,
            tracker=tracker,
        )
        write_json(workspace.figures(run_name), to_plain(_figures(model, loaders.val, collate, p.batch_size)))
        keep(workspace, work, stage, [*outputs, workspace.figures(run_name)])
        forget(work)


def _figures(model: Any, val: Dataset[Sample], collate: Callable[[list[Sample]], Batch], batch_size: int) -> list[Any]:
    """What the model shows of itself, of some images of the val split; nothing of a model that has no figures."""
    from vlp_models.models.protocols import MAX_IMAGES, ShowsItself

    if not isinstance(model, ShowsItself):
        return []
    count = min(len(val), MAX_IMAGES)  # type: ignore[arg-type]
    chosen = [i * len(val) // count for i in range(count)]  # type: ignore[arg-type]
    device = next(cast("nn.Module", model).parameters()).device
    return model.figures(
        collate([val[i] for i in chosen[start : start + batch_size]]).to(device)
        for start in range(0, count, batch_size)
    )
