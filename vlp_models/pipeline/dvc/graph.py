"""Build dvc.yaml from params.yaml: one function per stage, which returns the stage's params, inputs and outputs.

A hand-written dvc.yaml cannot express that a run depends on the family of the model that its start leads to, or that
the report depends on the runs of params.yaml and on no others. `vlp plan` writes the file; the stage `plan` refuses to
run with one that is out of date.

Stages that exist once per dataset, model or run use DVC's `foreach`: `${key}` is the entry's name, `${item.X}` one of
its values. DVC requires the same dependencies for every entry, so an entry without an optional one depends on NOTHING.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from vlp_models.common.packages import NOTHING, dependency, weights_dependency
from vlp_models.common.plugins import FOLDER as PLUGINS
from vlp_models.common.plugins import Table, has_own_plugins, import_target
from vlp_models.common.source_hash import plugin_record
from vlp_models.common.workspace import WITHDRAWN
from vlp_models.curation.validation import FLAG_FILES, VALIDATION_PAGES
from vlp_models.data.shards.contents import CONTENTS, Kind, facts_file, trained_on_file
from vlp_models.models import baseline_models
from vlp_models.params import EvaluateParams, FeaturesParams, Params, TrackingParams, TrainerParams
from vlp_models.pipeline.dvc.dvc_yaml import Stage
from vlp_models.pipeline.dvc.external import detector_inputs, files_outside_root, plugins_in_use, vocabulary_source
from vlp_models.training import PARTS

CODE = "data/plan/code"
SETTINGS = "data/plan/evaluate"  # per task: what its evaluation depends on of params.yaml's `evaluate`
READS = "data/plan/reads.json"  # which image inputs the models read
BOXES = "data/validated/boxed.parquet"

INSTRUCTIONS = "trainer.reproducible"  # with which instructions a CPU computes

# Options that do not change a stage's result, with the reason. Every other option of the section is a dependency, so
# a new one is declared without a change here.
NO_EFFECT: dict[type, dict[str, str]] = {
    TrainerParams: {
        "num_workers": "loads the same batches in other processes",
        "checkpoint_every_steps": "resume is bitwise equal",
        "log_every_steps": "curves only",
        "torch_threads": "speed, and float rounding",
        "parallel_finetune": "how many fine-tunings `vlp run` trains at a time: float rounding",
        "launcher": "which engine starts the processes",
        "devices": "processes share the same batches: float rounding, and dropout's draws",
        "num_nodes": "as `devices`",
        "strategy": "where weights are kept: float rounding",
        "activation_checkpointing": "equal numbers",
        "compile": "float rounding, and dropout's draws",
    },
    EvaluateParams: {
        "batch_size": "speed and memory only",
        "gallery": "read by the report",
    },
    TrackingParams: {
        "sinks": "where curves are shown; read when a training starts",
    },
    FeaturesParams: {
        "timm": "the backbone is in data/detector",
    },
}


@dataclass(frozen=True, kw_only=True)
class InUse:
    """The views of the data (data/views) and the metrics of plugins that stages depend on.

    filled   dataset -> the views that its reader writes rows of
    trained  fine-tuning run -> the view that it trains on
    tested   fine-tuning run -> the view that it predicts for
    metrics  fine-tuning run -> the metrics of plugins that it is scored by
    """

    filled: Mapping[str, Sequence[str]]
    trained: Mapping[str, str]
    tested: Mapping[str, str]
    metrics: Mapping[str, Sequence[str]]

    def plugins(self, params: Params) -> list[str]:
        """Return `module:object` of the plugins that params.yaml uses."""
        views = {*chain(*self.filled.values()), *self.trained.values(), *self.tested.values()}
        return plugins_in_use(params, views, chain(*self.metrics.values()))


@dataclass(frozen=True)
class Context:
    """What the builders read.

    raw: params.yaml as plain data: DVC accepts only keys that the file holds.
    kinds: image input of each model.
    used: the views and metrics that datasets and runs use.
    exists: whether the project has a file, such as the list of withdrawn images; DVC accepts no other dependencies.
    package: what stands for this package's code: its folder in a clone, else its record (common/packages.py).
    """

    params: Params
    raw: Mapping[str, Any]
    kinds: Mapping[str, Kind]
    used: InUse
    exists: Callable[[str], bool]
    package: str

    def keys(self, *keys: str) -> list[str]:
        """Return those of `keys` that params.yaml holds."""
        return [key for key in keys if _holds(self.raw, key)]

    def options(self, section: str, params: type) -> list[str]:
        """Return the keys of a section that change a result (see NO_EFFECT), those that params.yaml holds."""
        without = NO_EFFECT[params]
        return self.keys(*(f"{section}.{field.name}" for field in fields(params) if field.name not in without))

    def kind_at(self, checkpoint: str) -> Kind:
        """Return the image input of a checkpoint's model."""
        return self.kinds[self.params.model_at(checkpoint)]

    @property
    def plugin_records(self) -> list[str]:
        """The records of the installed packages whose plugins are used."""
        packages = {target.partition(":")[0].partition(".")[0] for target in self.used.plugins(self.params)}
        return [plugin_record(package) for package in sorted(packages - {PLUGINS})]

    @property
    def regions(self) -> bool:
        """Whether any model reads region features."""
        return "regions" in self.kinds.values()

    @property
    def training_inputs(self) -> list[str]:
        """What every training reads: the content of its shards, and their packing where samples are streamed."""
        streamed = ["data/shards"] if self.params.trainer.stream.address else []
        return ["${item.trained_on}", *streamed, "data/tokenizer"]

    @property
    def filled(self) -> list[str]:
        """The code of the views that any dataset fills."""
        return [code("views", view) for view in sorted(set().union(*self.used.filled.values()))]

    @property
    def registered(self) -> list[str]:
        """Fine-tuning runs whose model is registered; blind baselines are not."""
        return [name for name, run in self.params.finetune.items() if not run.blank_images]

    @property
    def trained(self) -> list[str]:
        return [
            *(f"pretrain/{name}" for name in self.params.pretrain),
            *(f"finetune/{n}" for n in self.params.finetune),
        ]

    @property
    def task_and_model_code(self) -> list[str]:
        """The code of the tasks, families and views in use: their classes name the metrics, and are served."""
        # once each, in a fixed order: dvc.yaml is compared as text
        tasks = sorted({run.task for run in self.params.finetune.values()})
        families = sorted({model.family for model in self.params.models.values()})
        views = sorted(set(self.used.tested.values()))
        return [
            *(code("tasks", task) for task in tasks),
            *(code("models", family) for family in families),
            *(code("views", view) for view in views),
        ]


def build_pipeline(
    params: Params,
    raw: Mapping[str, Any],
    *,
    kinds: Mapping[str, Kind],
    used: InUse,
    exists: Callable[[str], bool] = lambda file: False,
    package: str = "vlp_models",
) -> dict[str, Stage]:
    """Return the stages of dvc.yaml by name, in the file's order. See `Context` for the arguments."""
    # A builder returns None, or a `foreach` without entries, for a stage that these params do not need.
    context = Context(params, raw, kinds, used, exists, package)
    built = {name: import_target(target)(context) for name, target in BUILDERS.items()}
    stages = {name: stage for name, stage in built.items() if stage and stage.get("foreach", True)}
    for stage in stages.values():
        # DVC replaces `${NAME}`: only the `do` of a `foreach` has such names; a user's path is taken literally.
        if "foreach" in stage:
            stage["foreach"] = _literal(stage["foreach"])
        else:
            stage["deps"] = _literal(stage["deps"])
    return stages


def code(kind: str, name: str) -> str:
    """Return the file with the source hashes of a stage, model family, converter, task, format, view or generator."""
    return f"{CODE}/{kind}/{name}.json"


def evaluate_settings(task: str) -> str:
    """Return the file with the settings that the evaluation of a task depends on."""
    return f"{SETTINGS}/{task}.json"


def trained_on(kind: Kind, view: str, sources: Collection[str]) -> str:
    """Return the file with the hash of the shard content that a run is trained on (`trained_on_file`)."""
    return f"{CONTENTS}/{trained_on_file(kind, view, sources)}"


def plan(c: Context) -> Stage:
    # The sections that decide which stages there are and what they read, and those that it checks together.
    sections = ("generate", "data", "validate", "detector", "features", "tokenizer", "shards", "evaluate", "drift.run")
    runs = ("models", "defaults", "pretrain", "finetune", "augment", "trainer.stream")
    return {
        "desc": "checks params.yaml as a whole, and lists the code behind each stage; a second",
        "cmd": "vlp stage plan",
        "params": c.keys(*sections, *runs, INSTRUCTIONS, "trainer.torch_threads", "plugins"),
        # this package, the project's plugins and packages of plugins, whose code `plan` hashes file by file
        "deps": [c.package, *([PLUGINS] if has_own_plugins(c.params.plugins) else []), *c.plugin_records],
        "outs": ["data/plan"],
    }


def generate(c: Context) -> Stage:
    return foreach(
        {name: {"generator": entry.generator} for name, entry in c.params.generate.items()},
        cmd="vlp stage generate ${key}",
        params=["generate.${key}"],
        deps=[code("stages", "generate"), code("generators", "${item.generator}")],
        outs=["data/raw/${key}"],
    )


def prepare(c: Context) -> Stage:
    # Files outside of a dataset's root, and the code of its views. A root on the Hub has the commit in its name, so its
    # files are no dependency.
    other_files = {name: files_outside_root(source) for name, source in c.params.data.items()}
    views = {name: [code("views", view) for view in c.used.filled[name]] for name in c.params.data}
    return foreach(
        {
            name: {"root": NOTHING if source.is_remote else source.root, "format": source.format}
            | _padded("other", other_files[name], other_files)
            | _padded("view", views[name], views)
            for name, source in c.params.data.items()
        },
        cmd="vlp stage prepare ${key}",
        params=["data.${key}", *c.keys("validate.max_image_pixels", "validate.near_duplicates")],
        deps=[
            "${item.root}",
            *_each_of("other", other_files),
            *filter(c.exists, [WITHDRAWN]),
            code("stages", "prepare"),
            code("formats", "${item.format}"),
            *_each_of("view", views),
        ],
        outs=["data/interim/${key}"],
    )


def validate(c: Context) -> Stage:
    return {
        "cmd": "vlp stage validate",
        "params": c.keys("validate"),
        "deps": [
            *(f"data/interim/{name}" for name in c.params.data),
            *(file for of in FLAG_FILES.values() for file in import_target(of)(c.params.validate) if c.exists(file)),
            code("stages", "validate"),
            *(code("validation_pages", name) for name in VALIDATION_PAGES),
            *c.filled,
        ],
        "outs": [
            *("data/validated", "reports/validation.json", "reports/validation_results"),
            *("reports/validation.html" for _ in VALIDATION_PAGES),
        ],
    }


def detector(c: Context) -> Stage | None:
    if not c.regions:
        return None
    # a backbone or a detector: other params, other weights
    p, has_backbone = c.params.features, c.params.features.backbone is not None
    source = p.source if has_backbone else c.params.detector.source
    return {
        "cmd": "vlp stage detector",
        "params": c.keys("features.source", f"features.{source}") if has_backbone else c.keys("detector", INSTRUCTIONS),
        "deps": [
            *detector_inputs(c.params),
            code("stages", "detector"),
            *([] if source in ("timm", "none") else [code("detectors", source)]),
        ],
        "outs": ["data/detector"],
        "metrics": ["reports/detector.json"],
    }


def features(c: Context) -> Stage | None:
    if not c.regions:
        return None
    settings = c.params.features
    return {
        "cmd": "vlp stage features",
        "params": [*c.options("features", FeaturesParams), *c.keys(INSTRUCTIONS)],
        "deps": [
            "data/validated/images.parquet",
            *(["data/validated/objects.parquet"] if settings.source == "boxes" else []),
            "data/detector",
            *([settings.path] if settings.path else []),
            code("stages", "features"),
        ],
        "outs": ["data/features"],
    }


def tokenizer(c: Context) -> Stage:
    # a trained vocabulary depends on the texts alone
    vocabulary = [dependency(source) for source, _ in vocabulary_source(c.params)]
    return {
        "cmd": "vlp stage tokenizer",
        "params": c.keys("tokenizer"),
        "deps": ["data/validated", *vocabulary, code("stages", "tokenizer"), *c.filled],
        "outs": ["data/tokenizer", "reports/tokenizer.json"],
    }


def shards(c: Context) -> Stage:
    return {
        "cmd": "vlp stage shards",
        "params": c.keys("shards"),
        "deps": [
            "data/validated",
            READS,
            *(["data/features"] if c.regions else []),
            code("stages", "shards"),
            code("views", "images"),
            *c.filled,
        ],
        "outs": ["data/shards", CONTENTS],
    }


def initial(c: Context) -> Stage:
    models = c.params.models
    # DVC wants equal dependencies of every entry: one model's `text_init` gives all of them the key
    any_text = any(model.text_init for model in models.values())
    any_image = any(model.image_init for model in models.values())
    any_warmup = any(model.vision_warmup.steps for model in models.values())
    entries = {}
    for name, model in models.items():
        entries[name] = {
            "family": model.family,
            # The first of these that the model has: imported weights, timm's weights, or boxes for a warm-up.
            "init": weights_dependency(model.init or model.image_init)
            or (BOXES if model.vision_warmup.steps else NOTHING),
            "facts": f"{CONTENTS}/{facts_file(c.kinds[name])}",
        }
        if any_text:  # a BERT's files, and the code that maps its names
            entries[name]["text_init"] = dependency(model.text_init) if model.text_init else NOTHING
            entries[name]["text_converter"] = code("text_init", model.family) if model.text_init else NOTHING
        if any_image:  # the code that maps the names of timm's weights
            entries[name]["image_converter"] = code("image_init", model.family) if model.image_init else NOTHING
        if any_warmup:
            entries[name]["warmup"] = code("warmups", "vision_warmup") if model.vision_warmup.steps else NOTHING
    return foreach(
        entries,
        desc="a model before its first step: random or imported weights, or a vision encoder after its warm-up",
        cmd="vlp stage initial ${key}",
        params=["models.${key}", *c.keys(INSTRUCTIONS)],
        deps=[
            "${item.init}",
            *(["${item.text_init}", "${item.text_converter}"] if any_text else []),
            *(["${item.image_converter}"] if any_image else []),
            *(["${item.warmup}"] if any_warmup else []),
            "${item.facts}",
            "data/tokenizer",
            code("stages", "initial"),
            code("models", "${item.family}"),
        ],
        outs=["checkpoints/initial/${key}"],
    )


def pretrain(c: Context) -> Stage:
    entries = {}
    for name, run in c.params.pretrain.items():
        start = c.params.start_of("pretrain", name)
        # A run may train another model than the one it starts from; that model's initial weights are then read, too.
        same_model = c.params.model_at(start) == run.model
        entries[name] = {
            "start": start,
            "model": NOTHING if same_model else f"checkpoints/initial/{run.model}",
            "family": c.params.models[run.model].family,
            "trained_on": trained_on(c.kinds[run.model], run.view, run.sources),
            "view": run.view,
        }
    return foreach(
        entries,
        cmd="vlp stage pretrain ${key}",
        params=["pretrain.${key}", *c.keys("defaults.pretrain"), *c.options("trainer", TrainerParams)],
        deps=[
            "checkpoints/${item.start}",
            "${item.model}",
            *c.training_inputs,
            code("stages", "pretrain"),
            code("models", "${item.family}"),
            code("views", "${item.view}"),
        ],
        outs=["checkpoints/pretrain/${key}", "reports/figures/pretrain/${key}.json"],
        metrics=["reports/training/pretrain/${key}.json"],
        plots=[{"reports/curves/pretrain/${key}.csv": {"x": "step", "y": "loss"}}],
    )


def finetune(c: Context) -> Stage:
    runs = c.params.finetune
    entries = {
        name: {
            "start": run.start,
            "task": run.task,
            "family": c.params.family_at(run.start),
            "trained_on": trained_on(c.kind_at(run.start), c.used.trained[name], run.sources),
            "view": c.used.trained[name],
        }
        for name, run in runs.items()
    }
    # checkpoints of parts, and generated captions
    inputs = import_target(PARTS["checkpoints"])(c.params) if PARTS else {name: [] for name in runs}
    for name, run in runs.items():
        if run.augment.captions:
            inputs[name].append(f"data/augmented/{run.augment.captions}")
    for name in runs:
        entries[name] |= _padded("input", inputs[name], inputs)
    return foreach(
        entries,
        cmd="vlp stage finetune ${key}",
        params=["finetune.${key}", *c.keys("defaults.finetune"), *c.options("trainer", TrainerParams)],
        deps=[
            "checkpoints/${item.start}",
            *c.training_inputs,
            *_each_of("input", inputs),
            code("stages", "finetune"),
            code("models", "${item.family}"),
            code("tasks", "${item.task}"),
            code("views", "${item.view}"),
        ],
        outs=["checkpoints/finetune/${key}"],
        metrics=["reports/training/finetune/${key}.json"],
        plots=[{"reports/curves/finetune/${key}.csv": {"x": "step", "y": "loss"}}],
    )


def evaluate(c: Context) -> Stage:
    # Metrics of plugins are code that an evaluation depends on.
    metrics = {name: [code("metrics", metric) for metric in named] for name, named in c.used.metrics.items()}
    baselines: dict[str, list[str]] = {}
    for name in c.params.finetune:
        models = baseline_models(c.params, name).items()
        baselines[name] = [
            path for model, kind in models for path in (f"checkpoints/initial/{model}", code("models", kind))
        ]
    entries = {
        name: {
            "task": run.task,
            "family": c.params.family_at(run.start),
            "contents": f"{CONTENTS}/{c.kind_at(run.start)}",
            "view": c.used.tested[name],
            **_padded("metric", metrics[name], metrics),
            **_padded("baseline", baselines[name], baselines),
        }
        for name, run in c.params.finetune.items()
    }
    return foreach(
        entries,
        cmd="vlp stage evaluate ${key}",
        params=["finetune.${key}", *c.keys("defaults.finetune")],
        deps=[
            "checkpoints/finetune/${key}",
            "${item.contents}",
            "data/validated",
            evaluate_settings("${item.task}"),
            code("stages", "evaluate"),
            code("models", "${item.family}"),
            code("tasks", "${item.task}"),
            code("views", "${item.view}"),
            *_each_of("metric", metrics),
            *_each_of("baseline", baselines),
        ],
        outs=["reports/eval/${key}"],
    )


def register(c: Context) -> Stage:
    return {
        "cmd": "vlp stage register",
        "params": [
            *c.options("tracking", TrackingParams),
            *c.keys("promotion.split", "promotion.select_on", "promotion.tasks"),
            *(c.keys("features") if c.regions else []),
        ],
        "deps": [
            *(f"checkpoints/finetune/{name}" for name in c.registered),
            *(f"reports/eval/{name}" for name in c.registered),
            *(f"reports/training/finetune/{name}.json" for name in c.registered),  # names the MLflow run of its curve
            "reports/validation.json",
            "reports/tokenizer.json",
            "data/validated",  # an image for the smoke test
            *(["data/detector"] if c.regions else []),
            code("stages", "register"),
            *c.task_and_model_code,
        ],
        "outs": ["reports/registered.json"],
    }


def report(c: Context) -> Stage:
    # what the page shows and ranks by
    evaluated = ("evaluate.gallery", "evaluate.bootstrap", "evaluate.splits")
    ranked_by = ("tracking.metric", "tracking.dataset", "promotion.split", "promotion.select_on", "promotion.tasks")
    return {
        "cmd": "vlp stage report",
        "params": c.keys(*evaluated, "models", "finetune", *ranked_by),
        "deps": [
            *(f"reports/eval/{name}" for name in c.params.finetune),
            *(f"reports/training/{run}.json" for run in c.trained),
            *(f"reports/curves/{run}.csv" for run in c.trained),
            *(f"reports/figures/pretrain/{name}.json" for name in c.params.pretrain),
            "reports/validation.json",
            "reports/tokenizer.json",
            *(["reports/detector.json", "data/features"] if c.regions else []),
            "data/validated",
            "data/shards/manifest.json",
            code("stages", "report"),
            *c.task_and_model_code,
        ],
        "outs": ["reports/index.html", "reports/summary.json"],
        "metrics": ["reports/metrics.json"],
    }


CORE = (
    *("plan", "generate", "prepare", "validate", "detector", "features", "tokenizer", "shards", "initial"),
    *("pretrain", "finetune", "evaluate", "register", "report"),
)
# stage -> `module:function` that runs it, called with the params, the workspace and an entry's name
STAGES = Table("stages", {name: f"vlp_models.pipeline.stages.{name}:run" for name in CORE})
# stage -> `module:function` that builds its entry of dvc.yaml; a core stage's is in this file
BUILDERS = Table("stage_builders", {name: f"{__name__}:{name}" for name in CORE})
# The order of dvc.yaml: stages of contrib come before `register`.
for last in ("register", "report"):
    BUILDERS[last] = BUILDERS.pop(last)


def _literal(value: Any) -> Any:
    """Escape what DVC would replace in the strings of a value."""
    if isinstance(value, Mapping):
        return {key: _literal(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    # DVC reads `\${` as the text `${`.
    return value.replace("${", r"\${") if isinstance(value, str) else value


def foreach(entries: Mapping[str, Mapping[str, str]], **do: Any) -> Stage:
    """Return a `foreach` stage with one entry per dataset, model or run."""
    return {"foreach": {name: dict(entry) for name, entry in entries.items()}, "do": do}


def _padded(kind: str, paths: Sequence[str], every: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return an entry's dependencies of a kind by key; as many for every entry as the one with most has."""
    return {key: paths[i] if i < len(paths) else NOTHING for i, key in enumerate(_keys(kind, every))}


def _each_of(kind: str, every: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"${{item.{key}}}" for key in _keys(kind, every)]


def _keys(kind: str, every: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{kind}_{i}" for i in range(max(map(len, every.values()), default=0))]


def _holds(raw: Mapping[str, Any], key: str) -> bool:
    # params.yaml may leave out any key that has a default
    node: Any = raw
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
