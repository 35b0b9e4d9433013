"""pretrain RUN: train a model on its pretraining recipe. A killed or stopped run resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vlp_models.common.io import write_json
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.params import Params, PretrainParams, to_plain
from vlp_models.params.schema import suggestion

MAX_FIGURE_IMAGES = 256  # images of the val split that figures are made from

if TYPE_CHECKING:
    from torch import nn

    from vlp_models.pipeline.training_job import Training, TrainingJob


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write checkpoints/pretrain/KEY, its curve, its training report and the model's figures.

    Raises:
        ParamsError: no such run, or an invalid value.
        DataError, CheckpointError: an input is missing or does not match.
    """
    from vlp_models.models import SHARED_OBJECTIVES
    from vlp_models.pipeline.training_job import TrainingJob

    if key not in params.pretrain:
        raise ParamsError(f"params.yaml: no pretraining run `{key}`{suggestion(key, params.pretrain)}")
    p = params.pretrain[key]
    model = params.models[p.model]
    settings = {"pretrain": {key: to_plain(p)}, "model": {"family": model.family, "config": model.config}}
    modules = list(SHARED_OBJECTIVES.values())
    job = TrainingJob(params, workspace, f"pretrain/{key}", view=p.view, settings=settings, modules=modules)
    job.run(_build, _write_figures)


def _build(job: TrainingJob) -> Training:
    """Return the model with the weights of its start, and its recipe's loss."""
    from torch import nn

    from vlp_models.data.inputs import InputReader, MultiCaptionCollator
    from vlp_models.data.views import VIEWS
    from vlp_models.models import add_objectives, build_model
    from vlp_models.models.checkpoint import build_from_config, part_of, read_weights
    from vlp_models.pipeline.prepared_data import load_start
    from vlp_models.pipeline.training_job import Training
    from vlp_models.training.scheduled_sampling import make_loss

    p, where = cast(PretrainParams, job.section), job.name.replace("/", ".")
    entry = job.params.models[p.model]
    if job.params.model_at(job.start_name) == p.model:
        model = build_from_config(job.start_info, job.data.tokenizer, job.start)
    else:  # another config of the same family: load what fits
        config_at = f"models.{p.model}.config"
        model = build_model(entry.family, entry.config, job.data.facts, where=config_at, init=entry.init)
    weights = read_weights(job.start)
    load_start(model, job.start_info, part_of(weights, "model"), job.start)
    # Objectives that are not the family's own have heads; they continue from the start, too.
    trained: Any = add_objectives(model, p.recipe.objectives, job.data.facts, f"{where}.recipe.objectives", p.model)
    checkpoint: nn.Module = nn.ModuleDict({"model": model})
    if trained is not model:
        trained.load_heads(part_of(weights, "objective_heads"))
        checkpoint = trained
    # how samples become batches: what the model reads of this view
    reader = InputReader(
        model.inputs.for_view(VIEWS[p.view]),  # type: ignore[union-attr,operator]
        job.data.tokenizer,
        max_text_len=p.max_text_len,
        max_regions=p.max_regions,
    )
    # several captions of an image share its pixels or regions
    captions = MultiCaptionCollator(reader=reader, count=p.captions_per_image) if p.captions_per_image else None
    lengths = {"max_text_len": p.max_text_len, "max_regions": p.max_regions}
    return Training(
        model=trained,
        checkpoint=checkpoint,
        info=job.data.describe(model, family=entry.family, name=p.model, **lengths),
        labels=(),
        loss=make_loss(trained, p.recipe, p.scheduled_sampling, name=p.model, section=where),
        loaders=job.loaders(collate=captions or reader.collate, captioned=captions is not None, **reader.flags),
        tags={
            "run": job.name.partition("/")[2],
            "model": p.model,
            "scheduled_sampling": p.scheduled_sampling.scheme,
        },
    )


def _write_figures(job: TrainingJob, training: Training) -> list[Path]:
    """Write the figures of a model for some val images; an empty list for families without any."""
    from vlp_models.models import FIGURES

    model = training.checkpoint.get_submodule("model")  # without the heads of shared objectives
    val, collate, batch_size = training.loaders.val, training.loaders.collate, job.section.batch_size
    figures: list[Any] = []
    family = training.info.family
    if family in FIGURES:
        count = min(len(val), MAX_FIGURE_IMAGES)
        numbers = [i * len(val) // count for i in range(count)]  # evenly spread over val
        device = next(model.parameters()).device
        # Lazily, so that one batch of images is in memory at a time.
        batches = (
            collate([val[i] for i in numbers[start : start + batch_size]]).to(device)
            for start in range(0, count, batch_size)
        )
        figures = import_target(FIGURES[family])(model, batches)
    path = job.workspace.figures(job.name)
    write_json(path, to_plain(figures))
    return [path]
