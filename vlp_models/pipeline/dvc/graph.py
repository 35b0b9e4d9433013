"""dvc.yaml, made from params.yaml: which stages there are, what each reads and what it writes.

Hand-written YAML can't say that a run depends on the family of the model that its start leads to, or that the report
depends on the runs of params.yaml and no others. `vlp plan` writes it (dvc_file.py); the stage `plan` refuses to go on
with one that is out of date.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlp_models.common.packages import dependency
from vlp_models.common.weight_files import is_source, watched
from vlp_models.common.workspace import WITHDRAWN
from vlp_models.data.content_hashes import CONTENTS, Kind, facts_file, learnt_file
from vlp_models.params import FinetuneParams, ModelParams, Params
from vlp_models.pipeline.dvc.dvc_yaml import Stage
from vlp_models.pipeline.dvc.external import read_by_detector, read_of_others, vocabulary_source

CODE = "data/plan/code"
READS = "data/plan/reads.json"  # what of images the models read
JUDGED_BY = ("promotion.split", "promotion.choose_on", "promotion.tasks")
BOXES = "data/validated/boxed.parquet"
NOTHING = "data/plan/nothing.json"  # where a dependency is optional: DVC wants as many for every run
# Params that change a training's result; how often it logs or saves is none of them.
HARDWARE = ("accelerator", "devices", "num_nodes", "strategy", "precision", "stream")
JUDGING = (
    "beam_size",
    "length_penalty",
    "consensus",
    "consensus_temperature",
    "consensus_neighbours",
    "max_caption_len",
    "splits",
    "blank_control",
    "bootstrap",
)
# Sections that decide which stages there are, and what they read.
SHAPING = (
    "generate",
    "data",
    "detector",
    "features",
    "tokenizer",
    "shards",
    "models",
    "defaults",
    "pretrain",
    "finetune",
    "augment",
    "trainer.stream",
)


def code(kind: str, name: str) -> str:
    """The record of the code behind a stage, a model family, its reading of others' weights, a task, a format or a
    world."""
    return f"{CODE}/{kind}/{name}.json"


def learns(kind: Kind, view: str, sources: Collection[str]) -> str:
    """What a run reads of the shards (`learnt_file`), as a hash."""
    return f"{CONTENTS}/{learnt_file(kind, view, sources)}"


def pipeline(
    params: Params,
    raw: Mapping[str, Any],
    *,
    kinds: Mapping[str, Kind],
    views: Mapping[str, str],
    withdrawn: bool = False,
) -> dict[str, Stage]:
    """The stages by name, as dvc.yaml has them.

    Args:
        raw: params.yaml as it is written: DVC knows only keys that are there.
        kinds: model -> what of an image it reads.
        views: fine-tuning run -> the view of the data that it learns from.
        withdrawn: whether any picture was (`vlp forget`); DVC wants no dependency that is not there.
    """

    def kind_at(checkpoint: str) -> Kind:
        return kinds[params.model_at(checkpoint)]

    def given(*keys: str) -> list[str]:
        """The params among `keys` that the file holds."""
        return [key for key in keys if _holds(raw, key)]

    finetuned = list(params.finetune)
    registered = [name for name, run in params.finetune.items() if not run.blank_images]
    drift_run = params.drift.against or next(iter(params.pretrain), "")
    regions = "regions" in kinds.values()
    # What a training goes by is what it reads of the shards, not how they are packed; but streamed samples come in the
    # order of the packing.
    training = ["${item.learns}", *(["data/shards"] if params.trainer.stream.address else []), "data/tokenizer"]
    # Whoever learns from written captions waits for them. Where nobody does, no run has to say so.
    augmented = any(run.augment.captions for run in params.finetune.values())
    others = {name: read_of_others(source) for name, source in params.data.items()}
    places = range(max(map(len, others.values()), default=0))
    stages: dict[str, Stage] = {
        "plan": {
            "desc": "checks params.yaml as a whole, and lists the code behind each stage; a second",
            "cmd": "vlp stage plan",
            "params": given(*SHAPING),
            "deps": ["vlp_models"],
            "outs": ["data/plan"],
        },
        "generate": _each(
            {name: {"generator": entry.generator} for name, entry in params.generate.items()},
            cmd="vlp stage generate ${key}",
            params=["generate.${key}"],
            deps=[code("stages", "generate"), code("generators", "${item.generator}")],
            outs=["data/raw/${key}"],
        ),
        "prepare": _each(
            {
                name: {"root": source.root, "format": source.format}
                | {f"other_{i}": others[name][i] if i < len(others[name]) else NOTHING for i in places}
                for name, source in params.data.items()
            },
            cmd="vlp stage prepare ${key}",
            params=["data.${key}", *given("validate.max_image_pixels", "validate.near_duplicates")],
            deps=[
                "${item.root}",
                *(f"${{item.other_{i}}}" for i in places),
                *([WITHDRAWN] if withdrawn else []),
                code("stages", "prepare"),
                code("formats", "${item.format}"),
            ],
            outs=["data/interim/${key}"],
        ),
        "validate": {
            "cmd": "vlp stage validate",
            "params": given("validate"),
            "deps": [*(f"data/interim/{name}" for name in params.data), code("stages", "validate")],
            "outs": ["data/validated", "reports/validation.json", "reports/data_docs"],
        },
    }
    if regions:
        settings = ("features.source", "features.timm") if params.features.source == "timm" else ("detector",)
        stages["detector"] = {
            "cmd": "vlp stage detector",
            "params": given(*settings),
            "deps": [*read_by_detector(params), code("stages", "detector")],
            "outs": ["data/detector"],
            "metrics": ["reports/detector.json"],
        }
        stages["features"] = {
            "cmd": "vlp stage features",
            # The backbone of `features.timm` is in data/detector.
            "params": given(*(f"features.{k}" for k in raw.get("features", {}) if k not in ("batch_size", "timm"))),
            "deps": [
                "data/validated/images.parquet",
                *(["data/validated/objects.parquet"] if params.features.source == "boxes" else []),
                "data/detector",
                *([params.features.path] if params.features.path else []),
                code("stages", "features"),
            ],
            "outs": ["data/features"],
        }
    vocabulary = [dependency(source) for source, _ in vocabulary_source(params)]
    worded = any(model.words for model in params.models.values())
    image_weighted = any(is_source(model.weights) for model in params.models.values())
    stages |= {
        "tokenizer": {
            "cmd": "vlp stage tokenizer",
            "params": given("tokenizer"),
            "deps": ["data/validated", *vocabulary, code("stages", "tokenizer")],
            "outs": ["data/tokenizer", "reports/tokenizer.json"],
        },
        "shards": {
            "cmd": "vlp stage shards",
            "params": given("shards"),
            "deps": ["data/validated", READS, *(["data/features"] if regions else []), code("stages", "shards")],
            "outs": ["data/shards", CONTENTS],
        },
        "initial": _each(
            {
                name: {
                    "family": m.family,
                    "begins": watched(m.weights) or (BOXES if m.eyes.steps else NOTHING),
                    "facts": f"{CONTENTS}/{facts_file(kinds[name])}",
                    **(_words(m) if worded else {}),
                    **(_image_weights(m) if image_weighted else {}),
                }
                for name, m in params.models.items()
            },
            desc="a model before its first step: fresh weights, imported ones, or eyes that have learnt to see",
            cmd="vlp stage initial ${key}",
            params=["models.${key}"],
            deps=[
                "${item.begins}",
                *(["${item.words}", "${item.reader}"] if worded else []),
                *(["${item.image_reader}"] if image_weighted else []),
                "${item.facts}",
                "data/tokenizer",
                code("stages", "initial"),
                code("models", "${item.family}"),
            ],
            outs=["checkpoints/initial/${key}"],
        ),
        "pretrain": _each(
            {
                name: {
                    "start": params.start_of("pretrain", name),
                    "model": _other_architecture(params, name),
                    "family": params.models[run.model].family,
                    "learns": learns(kinds[run.model], run.view, run.sources),
                }
                for name, run in params.pretrain.items()
            },
            cmd="vlp stage pretrain ${key}",
            params=["pretrain.${key}", *given("defaults.pretrain", *(f"trainer.{key}" for key in HARDWARE))],
            deps=[
                "checkpoints/${item.start}",
                "${item.model}",
                *training,
                code("stages", "pretrain"),
                code("models", "${item.family}"),
            ],
            outs=["checkpoints/pretrain/${key}", "reports/figures/pretrain/${key}.json"],
            metrics=["reports/training/pretrain/${key}.json"],
            plots=[{"reports/curves/pretrain/${key}.csv": {"x": "step", "y": "loss"}}],
        ),
        "finetune": _each(
            {
                name: {
                    "start": run.start,
                    "task": run.task,
                    "family": params.family_at(run.start),
                    "learns": learns(kind_at(run.start), views[name], run.sources),
                    **({"augment": _augmented(run)} if augmented else {}),
                }
                for name, run in params.finetune.items()
            },
            cmd="vlp stage finetune ${key}",
            params=["finetune.${key}", *given("defaults.finetune", *(f"trainer.{key}" for key in HARDWARE))],
            deps=[
                "checkpoints/${item.start}",
                *training,
                *(["${item.augment}"] if augmented else []),
                code("stages", "finetune"),
                code("models", "${item.family}"),
                code("tasks", "${item.task}"),
            ],
            outs=["checkpoints/finetune/${key}"],
            metrics=["reports/training/finetune/${key}.json"],
            plots=[{"reports/curves/finetune/${key}.csv": {"x": "step", "y": "loss"}}],
        ),
        "augment": _each(
            {
                name: {
                    "start": p.start,
                    "family": params.family_at(p.start),
                    "learns": learns(kind_at(p.start), "images", p.sources),
                }
                for name, p in params.augment.items()
            },
            desc="captions that a model writes of training images",
            cmd="vlp stage augment ${key}",
            params=["augment.${key}"],
            deps=[
                "checkpoints/${item.start}",
                "${item.learns}",
                "data/tokenizer",
                "data/validated/images.parquet",
                code("stages", "augment"),
                code("models", "${item.family}"),
                code("tasks", "captioning"),
            ],
            outs=["data/augmented/${key}"],
        ),
        "evaluate": _each(
            {
                name: {
                    "task": run.task,
                    "family": params.family_at(run.start),
                    "holds": f"{CONTENTS}/{kind_at(run.start)}",
                }
                for name, run in params.finetune.items()
            },
            cmd="vlp stage evaluate ${key}",
            params=["finetune.${key}", *given("defaults.finetune", *(f"evaluate.{key}" for key in JUDGING))],
            deps=[
                "checkpoints/finetune/${key}",
                "${item.holds}",
                "data/validated",
                code("stages", "evaluate"),
                code("models", "${item.family}"),
                code("tasks", "${item.task}"),
            ],
            outs=["reports/eval/${key}"],
        ),
    }
    if drift_run:
        stages["reference"] = {
            "desc": "statistics of what a model was trained on, for `vlp drift`",
            "cmd": "vlp stage reference",
            "params": [f"pretrain.{drift_run}", *given("defaults.pretrain", "drift.against", "incoming.dataset")],
            "deps": [
                f"checkpoints/pretrain/{drift_run}",
                "data/validated",
                *(["data/features"] if regions else []),
                "data/tokenizer",
                code("stages", "reference"),
            ],
            "outs": ["data/reference.json"],
        }
    evaluations = [f"reports/eval/{name}" for name in finetuned]
    # Their classes say how their figures are called, and what is served.
    tasks = [code("tasks", task) for task in sorted({run.task for run in params.finetune.values()})]
    families = [code("models", family) for family in sorted({model.family for model in params.models.values()})]
    spoken_of = [*tasks, *families]
    trainings = [f"{kind}/{name}" for kind in ("pretrain", "finetune") for name in getattr(params, kind)]
    stages["register"] = {
        "cmd": "vlp stage register",
        "params": given("tracking", *JUDGED_BY, *(["features"] if regions else [])),
        "deps": [
            *(f"checkpoints/finetune/{name}" for name in registered),
            *(f"reports/eval/{name}" for name in registered),
            *(f"reports/training/finetune/{name}.json" for name in registered),  # which run of MLflow has its curve
            "reports/validation.json",
            "data/validated",  # an image to try a version out on
            *(["data/detector"] if regions else []),
            code("stages", "register"),
            *spoken_of,
        ],
        "outs": ["reports/registered.json"],
    }
    stages["report"] = {
        "cmd": "vlp stage report",
        "params": given(
            "evaluate.gallery", "evaluate.bootstrap", "evaluate.splits", "models", "finetune", "tracking.metric"
        ),
        "deps": [
            *evaluations,
            *(f"reports/training/{name}.json" for name in trainings),
            *(f"reports/curves/{name}.csv" for name in trainings),
            *(f"reports/figures/pretrain/{name}.json" for name in params.pretrain),
            "reports/validation.json",
            *(["reports/detector.json", "data/features"] if regions else []),
            "data/validated",
            "data/shards/manifest.json",
            code("stages", "report"),
            *spoken_of,
        ],
        "outs": ["reports/index.html", "reports/summary.json"],
        "metrics": ["reports/metrics.json"],
    }
    return {name: stage for name, stage in stages.items() if stage.get("foreach", True)}


def _each(entries: Mapping[str, Mapping[str, str]], **do: Any) -> Stage:
    return {"foreach": {name: dict(entry) for name, entry in entries.items()}, "do": do}


def _words(model: ModelParams) -> dict[str, str]:
    """A BERT's files that the model begins with, and the code that knows where they go."""
    if not model.words:
        return {"words": NOTHING, "reader": NOTHING}
    return {"words": dependency(model.words), "reader": code("words", model.family)}


def _image_weights(model: ModelParams) -> dict[str, str]:
    """The code that knows where timm's weights go."""
    return {"image_reader": code("image_weights", model.family) if is_source(model.weights) else NOTHING}


def _other_architecture(params: Params, run: str) -> str:
    """Where a run trains another model than the one it starts from: that model, before its first step."""
    model = params.pretrain[run].model
    same = params.model_at(params.start_of("pretrain", run)) == model
    return NOTHING if same else f"checkpoints/initial/{model}"


def _augmented(run: FinetuneParams) -> str:
    return f"data/augmented/{run.augment.captions}" if run.augment.captions else NOTHING


def _holds(raw: Mapping[str, Any], key: str) -> bool:
    node: Any = raw
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
