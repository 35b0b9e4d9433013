"""pretrain: a model learns from image-text pairs without a task. Killed or stopped, it goes on where it was."""

from __future__ import annotations

import functools

from vlp_models.params import Params, to_plain
from vlp_models.stages.workspace import Workspace, measured, write_json


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes checkpoints/pretrain, reports/pretrain.json and reports/curves/pretrain.csv.

    Raises:
        DataError, ParamsError: an input is missing or does not fit.
        Preempted, NonFiniteLossError, CheckpointError: see `training.run.fit`.
    """
    import torch
    from torch import nn

    from vlp_models.data.collate import collate_samples
    from vlp_models.models import build_model
    from vlp_models.stages.fitting import forget, publish, read_inputs, tracking, work_directory
    from vlp_models.training.data import LoaderFactory
    from vlp_models.training.recipe import PretrainingLoss, make_recipe
    from vlp_models.training.run import Plan, fit

    p = params.pretrain
    with measured(workspace, "pretrain"):
        inputs = read_inputs(workspace)
        settings = {"model": to_plain(params.model), "pretrain": to_plain(p)}
        work = work_directory(workspace, "pretrain", params.trainer, settings, inputs.files)
        torch.manual_seed(p.seed)
        model = build_model(
            params.model.name,
            params.model.config,
            vocab_size=inputs.tokenizer.vocab_size,
            feature_dim=inputs.manifest.feature_dim,
            num_classes=inputs.manifest.num_classes,
            mask_id=inputs.tokenizer.mask_id,
        )
        recipe = make_recipe(p.mix, p.objectives, known=model.objectives, seed=p.seed)  # type: ignore[arg-type]
        loaders = LoaderFactory(
            inputs.shards,
            "captions",
            sources=p.sources,
            collate=functools.partial(
                collate_samples, tokenizer=inputs.tokenizer, max_text_len=p.max_text_len, max_regions=p.max_regions
            ),
            batch_size=p.batch_size,
            num_workers=params.trainer.num_workers,
            seed=p.seed,
        )
        with tracking(params, workspace, work, stage="pretrain", settings=settings, tags={}) as tracker:
            result = fit(
                model,
                PretrainingLoss(model=model, recipe=recipe, mask_probability=p.mask_probability),
                loaders,
                plan=Plan(
                    seed=p.seed,
                    max_epochs=p.max_epochs,
                    max_steps=p.max_steps,
                    accumulate=p.accumulate,
                    optimizer=p.optimizer,
                ),
                trainer=params.trainer,
                work=work,
                title="pretrain",
                tracker=tracker,
            )
        if not result.is_main:
            return
        final = publish(
            workspace,
            "pretrain",
            stage="pretrain",
            module=nn.ModuleDict({"model": model}),
            config={
                "model": params.model.name,
                "model_config": to_plain(model.config),
                "task": None,
                "max_text_len": p.max_text_len,
                "max_regions": p.max_regions,
                "detector_id": inputs.manifest.detector_id,
                "feature_dim": inputs.manifest.feature_dim,
                "classes": list(inputs.manifest.classes),
            },
            tokenizer=inputs.tokenizer,
            answers=(),
            settings=settings,
            files=inputs.files,
            counts={"train_samples": len(loaders.train), "val_samples": len(loaders.val)},
            result=result,
        )
        write_json(workspace.reports / "pretrain.json", final)
        forget(work)
