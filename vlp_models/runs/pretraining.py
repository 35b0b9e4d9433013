"""What the stages that learn from image-text pairs share: pretrain and scheduled_sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from vlp_models.data.collate import collate_samples
from vlp_models.models import build_model
from vlp_models.params import PairsParams, Params, to_plain
from vlp_models.runs.fitting import Inputs, curve_file, forget, publish, tracking, work_directory
from vlp_models.training.data import LoaderFactory
from vlp_models.training.module import LossFunction
from vlp_models.training.run import Plan, fit
from vlp_models.workspace.finished import keep, restore
from vlp_models.workspace.paths import Workspace, write_json


def fresh_model(params: Params, inputs: Inputs, seed: int) -> nn.Module:
    """The model of params.yaml with its initial weights, which depend on `seed` alone."""
    import torch

    torch.manual_seed(seed)
    return build_model(
        params.model.name,
        params.model.config,
        vocab_size=inputs.tokenizer.vocab_size,
        feature_dim=inputs.manifest.feature_dim,
        num_classes=inputs.manifest.num_classes,
        mask_id=inputs.tokenizer.mask_id,
    )


def learn_from_pairs(
    params: Params,
    workspace: Workspace,
    inputs: Inputs,
    p: PairsParams,
    *,
    stage: str,
    prepare: Callable[[], tuple[nn.Module, LossFunction]],
) -> None:
    """Trains on pairs and writes checkpoints/STAGE, reports/STAGE.json and reports/curves/STAGE.csv.

    `prepare` makes the model and its loss.

    Raises:
        Preempted, NonFiniteLossError, CheckpointError: see `training.run.fit`.
    """
    settings: dict[str, Any] = {"model": to_plain(params.model), stage: to_plain(p)}
    work = work_directory(workspace, stage, params.trainer, settings, inputs.files)
    if restore(workspace, work, stage):
        forget(work)
        return
    model, loss = prepare()
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
    with tracking(params, workspace, work, stage=stage, settings=settings, tags={}) as tracker:
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
    final = publish(
        workspace,
        stage,
        stage=stage,
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
    report = workspace.reports / f"{stage}.json"
    write_json(report, final)
    keep(workspace, work, stage, [workspace.checkpoint(stage), curve_file(workspace, stage), report])
    forget(work)
