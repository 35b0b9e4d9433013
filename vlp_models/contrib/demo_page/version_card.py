"""The page's card for a version: which one it is, what it was trained on, how well it scored, what it cannot do.

Everything comes from what the registry keeps with a version: tags, lineage.json (pipeline/lineage.py), scores.json and
the bundle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.common.packages import PREFIX, library_of
from vlp_models.metrics.bootstrap import count_in_note, explain_few
from vlp_models.params import split_start
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel
from vlp_models.tasks.vqa import UNKNOWN

NOT_RECORDED = "their training data is not recorded"
MEANINGLESS = "its output for photographs is meaningless"
VIEW_PREFIXES = {"texts": "the texts of ", "images": "the images of "}  # of pretrainings that do not read pairs

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class VersionCard:
    """
    selected_by  why this version is shown: `champion`, or `run NAME`
    data         the fine-tuning data, as a sentence
    history      the trainings before, the initial weights and the region extractor: one sentence each
    figures      headline scores with intervals, one sentence per dataset and split
    """

    name: str
    version: int
    selected_by: str
    run: str
    model: str
    family: str
    data: str
    history: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name} version {self.version} ({self.selected_by}; model {self.model})"


def make_version_card(
    *,
    name: str,
    version: int,
    selected_by: str,
    tags: Mapping[str, str],
    lineage: Record | None,
    scores: Sequence[Record],
    bundle: Path | None = None,
) -> VersionCard:
    """Make the card from a version's tags, lineage.json, scores.json and bundle."""
    run = tags.get("run", "unknown")
    return VersionCard(
        name=name,
        version=version,
        selected_by=selected_by,
        run=run,
        model=tags.get("model", "unknown"),
        family=tags.get("family", "unknown"),
        data=describe_training_data(lineage, run),
        history=(*describe_history(lineage, run), *(describe_regions(bundle) if bundle is not None else ())),
        figures=tuple(_describe_scores(scores)),
    )


def describe_training_data(lineage: Record | None, run: str) -> str:
    """Return the datasets of the fine-tuning, and whether they are synthetic."""
    if lineage is None:
        return "It was registered without a record of its data."
    params = lineage.get("params") or {}
    sources = ((params.get("finetune") or {}).get(run) or {}).get("sources") or params.get("data") or {}
    generated = params.get("generate") or {}
    if not sources:
        return "Its record names no dataset."
    images = (((lineage.get("data") or {}).get("shards") or {}).get("counts") or {}).get("train", {}).get("images")
    count = f"; the training split of all datasets has {images:,} images" if images else ""
    text = f"Fine-tuned on {_dataset_names(sources, params)}{count}."
    if all(source in generated for source in sources):
        text += f" These are synthetic scenes, so {MEANINGLESS}."
    return text


def describe_history(lineage: Record | None, run: str) -> list[str]:
    """Return a sentence for each run that `run` starts from, latest first, and for its initial weights."""
    if lineage is None:
        return []
    params, parents = lineage.get("params") or {}, lineage.get("parents") or ()
    starts = {parent["path"].removeprefix("checkpoints/"): parent for parent in parents}
    settings = (params.get("finetune") or {}).get(run) or {}
    sentences = _describe_augmentation(settings, params)
    start, visited = settings.get("start") or "", set[str]()
    while start and start not in visited:
        visited.add(start)
        kind, name = split_start(start)
        parent = starts.get(start) or {}
        if parent.get("note"):  # it was trained again since
            return [*sentences, f"It started from {start}, which has changed since; its training data is not recorded."]
        if kind == "initial":
            return [*sentences, *_describe_initial_weights(name, params, parents)]
        settings = ((parent.get("params") or {}).get(kind) or {}).get(name) or (params.get(kind) or {}).get(name) or {}
        data = VIEW_PREFIXES.get(settings.get("view") or "", "") + _dataset_names(settings.get("sources") or (), params)
        training = f"fine-tuned for {settings.get('task')}" if kind == "finetune" else "pretrained"
        sentences.append(f"Before that it was {training} on {data} (run {name}).")
        sentences += _describe_augmentation(settings, params)
        initial = f"initial/{settings['model']}" if settings.get("model") else ""
        start = settings.get("start") or initial
    return [*sentences, "Its initial weights are not recorded."]


def _describe_augmentation(settings: Record, params: Record) -> list[str]:
    """Return a sentence on generated captions that the fine-tuning was also trained on, if any."""
    augment = settings.get("augment") or {}
    entry = (params.get("augment") or {}).get(augment.get("captions") or "")
    if not entry or augment.get("control"):
        return []
    writer = split_start(entry.get("start") or "")[1]
    data = _dataset_names(((params.get("finetune") or {}).get(writer) or {}).get("sources") or (), params)
    return [f"It was also trained on captions generated by the run {writer}, which was trained on {data}."]


def _describe_initial_weights(model: str, params: Record, parents: Iterable[Record]) -> list[str]:
    """Return sentences on imported weights, a BERT's word embeddings and a vision warm-up; else random weights."""
    settings = (params.get("models") or {}).get(model) or {}
    roles = {parent["role"]: parent for parent in parents}
    sentences = []
    if settings.get("init") or settings.get("image_init"):
        imported = roles.get("imported weights") or {}
        details = ", ".join(filter(None, (imported.get("form"), (settings.get("config") or {}).get("backbone"))))
        weights = _public_name(imported.get("file") or settings.get("init") or settings["image_init"])
        weights += f" ({details})" if details else ""
        sentences.append(f"It was initialized with the weights {weights}; {NOT_RECORDED}.")
    if settings.get("text_init"):
        sentences.append(
            f"Its text encoder was initialized from BERT, {_public_name(settings['text_init'])}; {NOT_RECORDED}."
        )
    initial = next((parent for parent in parents if parent["path"] == f"checkpoints/initial/{model}"), {})
    if warmup := initial.get("vision_warmup"):
        sentences.append(
            f"Its vision encoder was first trained on boxes in {warmup.get('images', 0):,} images of the train split."
        )
    return sentences or ["Its weights were initialized randomly."]


def describe_regions(bundle: Path) -> list[str]:
    """Return a sentence on what computes the regions the version reads; none for a model that reads pixels."""
    config = _read_json_or_empty(bundle / "features.json")
    detector = _read_json_or_empty(bundle / "detector/config.json")
    training = detector.get("training") or {}
    source = config.get("source")
    if source == "grid":
        return ["Its regions are the cells of a plain grid, without a trained detector."]
    if source == "boxes":
        return ["Its regions are annotated objects as symbols: it reads no pixels."]
    if source == "timm":
        model = (detector.get("architecture") or {}).get("model")
        weights = _public_name(training.get("weights") or "")
        return [f"Its regions are cells of timm's {model} with the weights {weights}; {NOT_RECORDED}."]
    if source == "detector" and training.get("source") == "train":
        boxes = f"the boxes of {', '.join(training.get('datasets') or ())}, in {training.get('images', 0):,} images"
        return [f"Its regions come from a detector trained on {boxes}."]
    if source == "detector" and training.get("weights") == "torchvision":
        return ["Its regions come from torchvision's detector, which was trained on COCO's boxes."]
    if source == "detector":
        weights = training.get("file") or _public_name(training.get("weights") or "")
        return [f"Its regions come from a detector with the weights {weights or 'of a file'}; {NOT_RECORDED}."]
    if source:
        return [
            f"Its regions were imported from {_public_name(config.get('path') or '')}; their origin is not recorded."
        ]
    return []


def describe_limits(task_model: TaskModel) -> list[str]:
    """Return what the model cannot do, as far as its checkpoint shows."""
    sentences = []
    if task_model.task == "captioning":
        words = f"{task_model.tokenizer.vocab_size:,} words and word pieces"
        sentences.append(f"Its vocabulary has {words}; it cannot name anything else.")
        sentences.append("It captions every photo, even if it does not recognize anything in it.")
    elif task_model.task == "vqa":
        answers = sum(answer != UNKNOWN for answer in task_model.labels)
        sentences.append(f"It chooses among {answers:,} answers and cannot give any other.")
        sentences.append("It answers every question, even about things that are not in the photo.")
    elif task_model.task == "retrieval":
        sentences.append("It always returns a best photo, even if none fits the text.")
    if task_model.info.classes:
        kinds = len(task_model.info.classes) - 1
        sentences.append(f"What computes its regions distinguishes {kinds:,} classes of objects and may miss others.")
    if task_model.info.blank_images:
        sentences.append("It is a text-only control that was trained without images and ignores the photo.")
    return sentences


def _describe_scores(scores: Sequence[Record]) -> list[str]:
    lines: dict[str, list[str]] = {}  # dataset and split -> metrics with their values
    few: dict[str, str] = {}  # dataset and split -> warning
    for score in scores:
        if score.get("value") is None or score["metric"] not in task_class(score["task"]).headlines:
            continue
        interval = f" ({score['low']:.1f} to {score['high']:.1f})" if score.get("low") is not None else ""
        split = f"{score['dataset']}, split {score['split']}"
        lines.setdefault(split, []).append(f"{score['metric']} {score['value']:.1f}{interval}")
        if (count := count_in_note(score.get("note") or "")) is not None:
            few[split] = f" {explain_few(count, score['split'])}."
    return [f"Scores on {split}: {', '.join(metrics)}.{few.get(split, '')}" for split, metrics in lines.items()]


def _dataset_names(sources: Iterable[str], params: Record) -> str:
    """Return the names of the datasets (all datasets if `sources` is empty), with synthetic ones marked."""
    generated = params.get("generate") or {}
    names = list(sources) or list(params.get("data") or {})
    return ", ".join(f"{name} (synthetic scenes)" if name in generated else name for name in names)


def _public_name(source: str) -> str:
    """Return a package's or library's name as it is, but only the last part of a path: folders stay private."""
    return source if source.startswith(PREFIX) or library_of(source) else Path(source).name


def _read_json_or_empty(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
