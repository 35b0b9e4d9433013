"""Whether every run of params.yaml can be, asked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from vlp_models.common.packages import library_of
from vlp_models.errors import ParamsError
from vlp_models.models.meta_model import meta_model, model_inputs
from vlp_models.params import ModelParams, Params
from vlp_models.params.runs import split_start
from vlp_models.params.schema import check_known, nearest
from vlp_models.tasks import task_class
from vlp_models.vision.pretrained_weights import check_model, whose


def check_runs(params: Params) -> None:
    """
    Raises:
        ParamsError: an unknown generator, format, family or task, a config that the family refuses, an option that the
            task does not have, a task or objective that the model does not support, longer texts than the model
            has positions for, a model that timm does not have, or shards that can't hold what the models read.
    """
    from vlp_models.data.formats import FORMATS
    from vlp_models.data.inputs import required_content
    from vlp_models.models import FAMILIES
    from vlp_models.models.convert import IMAGE_READERS, READERS
    from vlp_models.synthetic import GENERATORS
    from vlp_models.tasks import TASKS, task_class
    from vlp_models.tasks.base import check_model, check_texts_per_image, read_options

    for name, entry in params.generate.items():
        check_known(entry.generator, GENERATORS, f"generate.{name}.generator")
    for name, source in params.data.items():
        check_known(source.format, FORMATS, f"data.{name}.format")
    for name, model in params.models.items():
        if model.family not in FAMILIES:
            raise ParamsError(f"params.yaml: `models.{name}.family: {model.family}`{nearest(model.family, FAMILIES)}")
        meta_model(model, f"models.{name}.config")
        if model.text_init and model.family not in READERS:
            raise ParamsError(
                f"params.yaml: `models.{name}.text_init`: a {model.family} cannot start from BERT weights; "
                f"{', '.join(READERS)} can"
            )
        if model.image_init and model.family not in IMAGE_READERS:
            raise ParamsError(
                f"params.yaml: `models.{name}.image_init: {model.image_init}`: these weights fill the image side of "
                f"{' or '.join(IMAGE_READERS)}, not of a {model.family}, which reads no pixels; it gets them by "
                "`features.source: timm`"
            )
        unnamed = model.family == "vlmo" and model.image_init == "timm" and model.config.get("stem") != "timm"
        if library_of(model.image_init) == "torchvision" or unnamed:
            raise ParamsError(
                f"params.yaml: `models.{name}.image_init: {model.image_init}`: name the timm model, as in "
                "timm:vit_base_patch16_224"
            )
        _check_timm(f"models.{name}.image_init", model.image_init, whose(model.image_init, ""))
        if model.vision_warmup.steps:
            _check_warmup(name, model)
    required_content(
        model_inputs(params.models),
        params.shards.pixels,
        params.validate.min_image_side,
        params.validate.max_image_pixels,
    )
    if params.features.source == "timm":
        timm = params.features.timm
        _check_timm("features.timm.model", timm.model, timm.model)
        _check_timm("features.timm.weights", timm.weights, whose(timm.weights, ""))
    for name in params.promotion.tasks:
        check_known(name, TASKS, "promotion.tasks")
    for name, run in params.pretrain.items():
        known = getattr(meta_model(params.models[run.model], f"models.{run.model}.config"), "objectives", ())
        for objective in run.recipe.objectives:
            if objective not in known:
                where = f"params.yaml: `pretrain.{name}.recipe.objectives.{objective}`"
                raise ParamsError(f"{where}: {run.model} can't learn that{nearest(objective, known)}")
        _check_datasets(f"pretrain.{name}", run.sources, params)
        model, where = params.models[run.model], f"models.{run.model}.config"
        _check_length(f"pretrain.{name}.max_text_len", run.max_text_len, model, where)
    for name, finetune in params.finetune.items():
        if finetune.task not in TASKS:
            raise ParamsError(f"params.yaml: `finetune.{name}.task: {finetune.task}`{nearest(finetune.task, TASKS)}")
        task = task_class(finetune.task)
        options = read_options(task, finetune.options, where=f"finetune.{name}.options")
        if finetune.augment.captions and task.training_view(options) != "captions":
            raise ParamsError(
                f"params.yaml: `finetune.{name}.augment`: {finetune.task} does not learn from captions (with these "
                "options); leave it out"
            )
        if finetune.texts_per_image > 1 and params.trainer.stream.address:
            raise ParamsError(
                f"params.yaml: `finetune.{name}.texts_per_image` and `trainer.stream.address` each ask for an order of "
                "their own: leave one of them out"
            )
        of = params.model_of(name)
        tried = meta_model(params.models[of], f"models.{of}.config")
        check_model(f"{finetune.task} (`finetune.{name}` in params.yaml)", task, tried, of)
        check_texts_per_image(f"finetune.{name}", task, tried, options, finetune.texts_per_image)
        model, where = _fine_tuned(name, params)
        _check_length(f"finetune.{name}.max_text_len", finetune.max_text_len, model, where)
        if finetune.task == "captioning":
            _check_length("evaluate.max_caption_len", params.evaluate.max_caption_len, model, where, told=True)
        _check_datasets(f"finetune.{name}", (*finetune.sources, *finetune.evaluate_on), params)
    for name, augment in params.augment.items():
        model, where = _fine_tuned(split_start(augment.start)[1], params)
        _check_length(f"augment.{name}.max_caption_len", augment.max_caption_len, model, where, told=True)


def _fine_tuned(run: str, params: Params) -> tuple[ModelParams, str]:
    """A fine-tuning's model with the configs of all runs that it starts from; the place of the last that says one."""
    kind, before = split_start(params.finetune[run].start)
    name = params.model_of(run)
    model, where = _fine_tuned(before, params) if kind == "finetune" else (params.models[name], f"models.{name}.config")
    own = params.finetune[run].config
    return replace(model, config={**model.config, **own}), f"finetune.{run}.config" if own else where


def _check_length(where: str, asked: int, model: ModelParams, said: str, *, told: bool = False) -> None:
    """Else the first text that is long enough ends the run, hours in. told: a caption that the model writes; said:
    where its config stands."""
    config = getattr(meta_model(model, said), "config", None)
    limit = getattr(config, "max_text", getattr(config, "max_positions", None))
    if limit is None:
        return
    limit -= told and hasattr(config, "max_text")  # Unified VLP's [MASK] stands where the next word will
    if asked > limit:
        raise ParamsError(
            f"params.yaml: `{where}: {asked}`: a {model.family} of these settings has places for {limit} tokens; raise "
            f"`max_positions` in `{said}`, or lower this"
        )


def _check_timm(where: str, said: str, name: str) -> None:
    """A name that timm does not know would be found out in `detector` or `initial`, after all that comes before."""
    if name:
        check_model(name, f"params.yaml: `{where}: {said}`")


def _check_warmup(name: str, model: ModelParams) -> None:
    from vlp_models.models.protocols import EncodesCells

    where = f"params.yaml: `models.{name}.vision_warmup`"
    if model.init or model.image_init:
        raise ParamsError(f"{where} is for a freshly initialized image side; remove it, or `init` and `image_init`")
    if not isinstance(meta_model(model, f"models.{name}.config"), EncodesCells):
        raise ParamsError(f"{where}: a {model.family} reads no pixels")


def _check_datasets(where: str, named: Iterable[str], params: Params) -> None:
    for source in named:
        if source not in params.data:
            raise ParamsError(f"params.yaml: `{where}` names the dataset {source}{nearest(source, params.data)}")


def learning_views(params: Params) -> dict[str, str]:
    """The view that each fine-tuning run learns from."""
    from vlp_models.tasks import task_class
    from vlp_models.tasks.base import read_options

    found = {}
    for name, run in params.finetune.items():
        task = task_class(run.task)
        found[name] = task.training_view(read_options(task, run.options, where=f"finetune.{name}.options"))
    return found


def check_searches(params: Params, shards: Path, checkpoint: str) -> None:
    """Of each run that `checkpoint` (`pretrain/RUN`, `finetune/RUN`) leads to.

    Raises:
        DataError: one of them learns from what its search can't look things up in.
    """
    for name, run in params.finetune.items():
        if checkpoint in params.chain(f"finetune/{name}") and not run.blank_images:
            task_class(run.task).check_search(params.evaluate, shards, run.sources)
