"""Checks of params.yaml that need the code of models, tasks and formats: does every run make sense?

They run before anything is computed, so that a mistake does not end a run hours later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from vlp_models.common.packages import is_installed, library_of
from vlp_models.common.plugins import import_target
from vlp_models.data.shards import streaming
from vlp_models.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from vlp_models.errors import MissingToolError, ParamsError
from vlp_models.metrics import METRICS
from vlp_models.models import add_objectives, own_objectives
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.models.meta_model import META_FACTS, meta_model, model_inputs, without_weights
from vlp_models.params import FinetuneParams, ModelParams, Params, PretrainParams, RecipeParams, TimmParams
from vlp_models.params.runs import TrainingParams, split_start
from vlp_models.params.schema import check_known, suggestion
from vlp_models.pipeline.dvc.graph import STAGES, InUse
from vlp_models.tasks import TASKS, task_class
from vlp_models.tasks.base import TaskModel
from vlp_models.training import sharded_strategy
from vlp_models.vision import BACKBONE_CHECKS, WARMUPS, pretrained_weights
from vlp_models.vision.pretrained_weights import pretrained_model_name


def check_runs(params: Params) -> None:
    """Check every section that names a model, a task, a format or a dataset.

    Raises:
        ParamsError: an unknown generator, format, family or task, a config that the family rejects, an option that the
            task does not have, a task, a recipe or a part in `optimizer.groups` that the model does not support, texts
            longer than the model has positions, a model that timm does not have, shards without what the models read,
            or views that clash.
    """
    from vlp_models.data.formats import source_params
    from vlp_models.data.inputs import required_content
    from vlp_models.data.views import index_columns
    from vlp_models.synthetic import GENERATORS

    # data
    for name, entry in params.generate.items():
        check_known(entry.generator, GENERATORS, f"generate.{name}.generator")
    for name, source in params.data.items():
        source_params(name, source)
    # Called for its errors: views whose names or columns clash.
    index_columns()
    _check_evaluate(params)
    if params.trainer.reproducible == "portable" and params.trainer.torch_threads > 1:
        raise ParamsError(
            f"params.yaml: `trainer.torch_threads: {params.trainer.torch_threads}`: with `reproducible: portable` each "
            "process has one thread; set `reproducible: machine`, or `trainer.devices` for several processes"
        )
    # models, and what they read
    for name, model in params.models.items():
        if model.text_init and params.tokenizer.special_tokens:
            raise ParamsError(
                f"params.yaml: `models.{name}.text_init` does not work with `tokenizer.special_tokens`; remove one of "
                "them"
            )
        _check_model(name, model)
    required_content(
        model_inputs(params.models),
        params.shards.pixels,
        params.validate.min_image_side,
        params.validate.max_image_pixels,
    )
    for key, backbone in params.features.backbones.items():
        if isinstance(backbone, TimmParams):
            _check_timm(f"{key}.model", backbone.model, backbone.model)
            _check_timm(f"{key}.weights", backbone.weights, pretrained_model_name(backbone.weights, ""))
    if check := BACKBONE_CHECKS.get(params.features.source):
        import_target(check)(params.features.backbone)
    # runs
    for name in params.promotion.tasks:
        check_known(name, TASKS, "promotion.tasks")
    if params.trainer.stream.address:
        streaming("open")  # a missing folder of contrib is an error here, not in a training
    for name, pretraining in params.pretrain.items():
        _check_pretraining(name, pretraining, params)
    for name, finetuning in params.finetune.items():
        _check_finetuning(name, finetuning, params)
    if params.trainer.strategy == "fsdp":
        sharded_strategy()  # a missing folder of contrib is an error here, not in a training
    if params.augment and "augment" not in STAGES:
        raise MissingToolError("params.yaml: `augment` needs vlp_models/contrib/augment, which is not installed")
    for name, augment in params.augment.items():  # it starts from a fine-tuned captioner
        model, where = _finetuned_model(split_start(augment.start)[1], params)
        _check_length(f"augment.{name}.max_caption_len", augment.max_caption_len, model, where, generated=True)


def _check_evaluate(params: Params) -> None:
    """Check the names of tasks and metrics in `evaluate` and `tracking`."""
    for task in params.evaluate.blind_baseline:
        check_known(task, TASKS, "evaluate.blind_baseline")
    for where, tasks in (("tracking.metric", params.tracking.metric), ("tracking.dataset", params.tracking.dataset)):
        for task in tasks:
            check_known(task, TASKS, where)
    # key of params.yaml -> the metrics that it names
    named = {"evaluate.metrics": params.evaluate.metrics}
    for name, settings in params.evaluate.tasks.items():
        check_known(name, TASKS, "evaluate.tasks")
        named[f"evaluate.tasks.{name}.metrics"] = settings.metrics or []
    for where, metrics in named.items():
        for metric in metrics:
            check_known(metric, METRICS, where)


def _check_model(name: str, model: ModelParams) -> None:
    from vlp_models.models import FAMILIES
    from vlp_models.models.convert import IMAGE_READERS, INIT_READERS, TEXT_READERS
    from vlp_models.models.protocols import EncodesCells

    where, init = f"params.yaml: `models.{name}", model.image_init
    if model.family not in FAMILIES:
        raise ParamsError(f"{where}.family: {model.family}`: no such family{suggestion(model.family, FAMILIES)}")
    built = meta_model(model, f"models.{name}.config")
    for key in ("text_init", "image_init"):
        if getattr(model, key) and key not in INIT_READERS:
            raise MissingToolError(f"{where}.{key}` needs vlp_models/contrib/public_weights, which is not installed")
    if model.text_init and model.family not in TEXT_READERS:
        raise ParamsError(
            f"{where}.text_init`: a {model.family} cannot start from BERT weights; {', '.join(TEXT_READERS)} can"
        )
    if init and model.family not in IMAGE_READERS:
        raise ParamsError(
            f"{where}.image_init: {init}`: these weights are for the image side of {' or '.join(IMAGE_READERS)}, not "
            f"of a {model.family}, which reads no pixels; it uses them through `features.source: timm`"
        )
    # VLMo's weights depend on the timm model, except for its CNN stem, whose config names one.
    lacks_name = model.family == "vlmo" and init == "timm" and model.config.get("stem") != "timm"
    if library_of(init) == "torchvision" or lacks_name:
        raise ParamsError(f"{where}.image_init: {init}`: name the timm model, as in timm:vit_base_patch16_224")
    _check_timm(f"models.{name}.image_init", init, pretrained_model_name(init, ""))
    if model.vision_warmup.steps:
        if model.init or init:
            raise ParamsError(
                f"{where}.vision_warmup` is for a randomly initialized image side; remove it, or `init` and "
                "`image_init`"
            )
        if not isinstance(built, EncodesCells):
            raise ParamsError(f"{where}.vision_warmup`: a {model.family} reads no pixels")
        if "vision_warmup" not in WARMUPS:
            raise MissingToolError(f"{where}.vision_warmup` needs vlp_models/contrib/detector, which is not installed")


def _check_pretraining(name: str, run: PretrainParams, params: Params) -> None:
    from vlp_models.training.scheduled_sampling import make_loss

    model, config_at, where = params.models[run.model], f"models.{run.model}.config", f"pretrain.{name}"
    built = meta_model(model, config_at)
    _check_classes(f"{where}.recipe.objectives", model, config_at, run, params)
    with without_weights():  # heads of objectives are built without memory, too
        trained = add_objectives(built, run.recipe.objectives, META_FACTS, f"{where}.recipe.objectives", run.model)
    make_loss(trained, run.recipe, run.scheduled_sampling, name=run.model, section=where)
    reason = getattr(trained, "ignores_mask_probability", "")
    if reason and run.recipe.mask_probability != RecipeParams.mask_probability:
        raise ParamsError(
            f"params.yaml: `{where}.recipe.mask_probability` has no effect on {run.model}: {reason}; remove it"
        )
    if run.captions_per_image > 1 and not getattr(built, "several_texts", False):
        raise ParamsError(
            f"params.yaml: `{where}.captions_per_image: {run.captions_per_image}`: `{run.model}` trains on one text "
            "per image; set `view: captions` and remove it"
        )
    _check_groups(where, trained, run)
    _check_datasets(where, run.sources, params)
    _check_length(f"{where}.max_text_len", run.max_text_len, model, config_at)


def _check_classes(where: str, model: ModelParams, config_at: str, run: PretrainParams, params: Params) -> None:
    """Refuse objectives that need class probabilities (TDEN's moc) of an encoder without any: SigLIP, DINO."""
    if not params.features.backbones:
        return
    key, backbone = next(iter(params.features.backbones.items()))  # classes are those of the first
    setting = f"features.source: {params.features.source}"
    # No source of contrib has classes but by timm.
    if isinstance(backbone, TimmParams):
        encoder = pretrained_model_name(backbone.weights, backbone.model)
        if backbone.classes or pretrained_weights.has_classifier(encoder):
            return
        setting = f"{key}.model: {encoder}"
    lost = {*own_objectives(meta_model(model, config_at))} - {
        *own_objectives(meta_model(model, config_at, classes=False))
    }
    for name in lost & run.recipe.objectives.keys():
        raise ParamsError(
            f"params.yaml: `{where}.{name}` needs class probabilities, which `{setting}` does not have; remove it as "
            f"well: `--set {where}.{name}=null`"
        )


def _check_groups(where: str, model: nn.Module, run: TrainingParams) -> None:
    if run.optimizer.groups:
        from vlp_models.training.optim import check_groups  # takes a second to import

        check_groups(model, run.optimizer.groups, f"{where}.optimizer")


def _check_finetuning(name: str, run: FinetuneParams, params: Params) -> None:
    from vlp_models.tasks.base import check_model, check_texts_per_image, read_options

    where = f"params.yaml: `finetune.{name}"
    if run.task not in TASKS:
        raise ParamsError(f"{where}.task: {run.task}`: no such task{suggestion(run.task, TASKS)}")
    task = task_class(run.task)
    options = read_options(task, run.options, where=f"finetune.{name}.options")
    if run.augment.captions and task.training_view(options) != "captions":
        raise ParamsError(f"{where}.augment`: {run.task} with these options does not train on captions; remove it")
    # pairs of options that exclude each other
    if run.texts_per_image > 1 and params.trainer.stream.address:
        raise ParamsError(
            f"{where}.texts_per_image` and `trainer.stream.address` require different orders of the samples; remove "
            "one of them"
        )
    if params.trainer.strategy == "fsdp" and run.adapters:
        raise ParamsError(f"{where}.lora` does not work with `trainer.strategy: fsdp`; set the strategy to auto")
    if params.trainer.strategy == "fsdp" and getattr(options, "self_critical", None):
        raise ParamsError(
            f"{where}.options.self_critical` does not work with `trainer.strategy: fsdp`; set the strategy to auto"
        )
    if run.adapters and not is_installed("peft"):
        raise MissingToolError(f"{where}.lora` needs peft, which is not installed: the extra `lora`")
    # the model, as its section of params.yaml describes it, and with the configs of the runs that lead to this one
    model_name = params.model_of(name)
    built = meta_model(params.models[model_name], f"models.{model_name}.config")
    if run.adapters and getattr(built, "images_per_text", 1) > 1:
        raise ParamsError(f"{where}.lora` does not work with `images_per_text` above 1; remove one of them")
    check_model(f"{run.task} (`finetune.{name}` in params.yaml)", task, built, model_name)
    check_texts_per_image(f"finetune.{name}", task, built, options, run.texts_per_image)
    model, config_at = _finetuned_model(name, params)
    _check_length(f"finetune.{name}.max_text_len", run.max_text_len, model, config_at)
    _check_task(name, run, task, meta_model(model, config_at), model_name)
    # evaluation: metrics of plugins, and captions that must fit
    settings = task.evaluate_settings(params.evaluate, run.task)
    # A plugin's metric would hide the task's own of the same name.
    for metric in settings.metrics:
        if metric in (task.metric, *task.headlines):
            raise ParamsError(
                f"params.yaml: `evaluate.metrics: {metric}`: {run.task} has a metric of this name itself; rename yours"
            )
    # Only a task whose search writes captions has this limit.
    if "max_caption_len" in (task.search_options or ()):
        key = "evaluate.max_caption_len"
        if run.task in params.evaluate.tasks and params.evaluate.tasks[run.task].max_caption_len:
            key = f"evaluate.tasks.{run.task}.max_caption_len"
        _check_length(key, settings.max_caption_len, model, config_at, generated=True)
    _check_datasets(f"finetune.{name}", (*run.sources, *run.evaluate_on), params)


def _check_task(name: str, run: FinetuneParams, task: type[TaskModel], model: nn.Module, model_name: str) -> None:
    """Check what a task refuses of this model when it is built, and the parts of both in `optimizer.groups`.

    A plugin's task may need a real tokenizer: it is checked when it trains.
    """
    if run.task not in TASKS.builtin:
        return
    # Only what a task reads when it is built.
    info = CheckpointInfo(
        family="",
        name=model_name,
        model_config={},
        max_text_len=run.max_text_len,
        feature_dim=META_FACTS.feature_dim,
        options=run.options,
    )
    # any labels: the real ones come from the data
    labels = {"labels": ("yes", "no")} if task.has_labels else {}
    try:
        with without_weights():
            built = task(model, Tokenizer(SPECIAL_TOKENS, lowercase=True), info, **labels)
    except ParamsError as error:
        reason = str(error).removeprefix("params.yaml: ")
        raise ParamsError(f"params.yaml: `finetune.{name}`: {reason}") from None
    _check_groups(f"finetune.{name}", built, run)


def _finetuned_model(run: str, params: Params) -> tuple[ModelParams, str]:
    """Return a fine-tuned model with the configs of its chain of runs applied, and the last section that sets one."""
    kind, start = split_start(params.finetune[run].start)
    if kind == "finetune":
        model, where = _finetuned_model(start, params)
    else:
        name = params.model_of(run)
        model, where = params.models[name], f"models.{name}.config"
    # The start's model, then what this run's own `config` changes of it.
    config = params.finetune[run].config
    return replace(model, config={**model.config, **config}), f"finetune.{run}.config" if config else where


def _check_length(where: str, length: int, model: ModelParams, config_at: str, *, generated: bool = False) -> None:
    """Refuse texts longer than the model's positions, which would fail at the first long text.

    Args:
        config_at: the section of params.yaml that sets the model's config.
        generated: the text is a caption that the model writes.
    """
    config = getattr(meta_model(model, config_at), "config", None)
    # A plugin's model may have no config, or one without a limit.
    limit = getattr(config, "max_text", getattr(config, "max_positions", None))
    if limit is None:
        return
    limit -= generated and hasattr(config, "max_text")  # Unified VLP puts [MASK] where the next word goes
    if length > limit:
        raise ParamsError(
            f"params.yaml: `{where}: {length}`: this {model.family} has positions for {limit} tokens; raise "
            f"`max_positions` in `{config_at}`, or lower this"
        )


def _check_timm(where: str, value: str, name: str) -> None:
    """Refuse a model that timm does not have, which would otherwise fail in `detector` or `initial`."""
    if name:
        pretrained_weights.check_model(name, f"params.yaml: `{where}: {value}`")


def _check_datasets(where: str, named: Iterable[str], params: Params) -> None:
    for source in named:
        if source not in params.data:
            raise ParamsError(
                f"params.yaml: `{where}` names the dataset {source}, which does not exist"
                f"{suggestion(source, params.data)}"
            )


def find_in_use(params: Params) -> InUse:
    """Return the views that datasets fill, those that fine-tuning runs train on and predict for, and their metrics.

    Args:
        params: they have passed `check_runs`.

    Raises:
        ParamsError: a task of a plugin reads a view that does not exist.
    """
    from vlp_models.data.formats import filled_views
    from vlp_models.data.views import VIEW_MODULES
    from vlp_models.tasks.base import read_options

    # what the reader of each dataset declares (`fills`)
    filled = {name: filled_views(source.format) for name, source in params.data.items()}
    trained, tested, metrics = {}, {}, {}
    for name, run in params.finetune.items():
        task = task_class(run.task)
        trained[name] = task.training_view(read_options(task, run.options, where=f"finetune.{name}.options"))
        tested[name] = task.prediction_view
        for view in (trained[name], tested[name]):
            if view not in VIEW_MODULES:
                raise ParamsError(
                    f"params.yaml: `finetune.{name}.task: {run.task}` reads the view `{view}`, which does not exist"
                    f"{suggestion(view, VIEW_MODULES)}"
                )
        metrics[name] = task.evaluate_settings(params.evaluate, run.task).metrics
    return InUse(filled=filled, trained=trained, tested=tested, metrics=metrics)
