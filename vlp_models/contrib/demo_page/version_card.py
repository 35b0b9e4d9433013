"""The page's card for a version: which one it is, what it was trained on, how well it scored, what it cannot do.

Everything comes from what the registry keeps with a version: tags, lineage.json (pipeline/lineage.py) and scores.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.common.packages import PREFIX, library_of
from vlp_models.metrics.bootstrap import count_in_note, explain_few
from vlp_models.params import split_start
from vlp_models.registry.borrowed import borrowed_sources
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
    history      the trainings before, and weights of others: one sentence each
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
) -> VersionCard:
    """Make the card from a version's tags, lineage.json and scores.json."""
    run = tags.get("run", "unknown")
    return VersionCard(
        name=name,
        version=version,
        selected_by=selected_by,
        run=run,
        model=tags.get("model", "unknown"),
        family=tags.get("family", "unknown"),
        data=describe_training_data(lineage, run),
        history=tuple(describe_history(lineage, run)),
        figures=tuple(_describe_scores(scores)),
    )


def describe_training_data(lineage: Record | None, run: str) -> str:
    """Return the datasets of the fine-tuning, and whether they are synthetic; or that there was none."""
    if lineage is None:
        return "It was registered without a record of its data."
    params = lineage["params"]
    settings = params["finetune"].get(run, {})
    if settings.get("max_epochs") == 0 == settings.get("max_steps", 0):
        return "It was not fine-tuned: its weights are those that it started from."
    # A run without `sources` was trained on all datasets.
    sources = settings.get("sources") or params["data"]
    images = lineage["data"].get("shards", {}).get("counts", {}).get("train", {}).get("images")
    count = f"; the training split of all datasets has {images:,} images" if images else ""
    text = f"Fine-tuned on {_dataset_names(sources, params)}{count}."
    if all(source in params["generate"] for source in sources):
        text += f" These are synthetic scenes, so {MEANINGLESS}."
    return text


def describe_history(lineage: Record | None, run: str) -> list[str]:
    """Return a sentence for each training before that of `run`, latest first, and for each source of other weights."""
    if lineage is None:
        return []
    params = lineage["params"]
    sentences = _describe_augmentation(params["finetune"].get(run, {}), params)
    for parent in lineage["parents"]:
        # Other parents, such as the tokenizer, are no trainings.
        if parent["role"] != "starts from":
            continue
        start = parent["path"].removeprefix("checkpoints/")
        kind, name = split_start(start)
        # The parent that the version started from no longer exists with this content.
        if parent.get("note"):  # it was trained again since
            sentences.append(f"It started from {start}, which has changed since; its training data is not recorded.")
        elif kind != "initial":
            settings = (parent.get("params") or params)[kind][name]  # as at training time
            prefix = VIEW_PREFIXES.get(settings.get("view") or "", "")
            data = prefix + _dataset_names(settings.get("sources") or (), params)
            training = f"fine-tuned for {settings['task']}" if kind == "finetune" else "pretrained"
            sentences.append(f"Before that it was {training} on {data} (run {name}).")
            sentences += _describe_augmentation(settings, params)
        elif warmup := parent.get("vision_warmup"):
            images = f"{warmup['images']:,} images of the train split"
            sentences.append(f"Its vision encoder was first trained on boxes in {images}.")
    # A `checkpoint` is one of this project, which is described above.
    weights = dict.fromkeys(borrowed_sources(lineage))
    borrowed = [(role, source) for role, source, _ in weights if role != "checkpoint"]
    for role, source in borrowed:
        # A package or library, or a path, whose folders stay private.
        name = source if source.startswith(PREFIX) or library_of(source) else Path(source).name
        sentences.append(f"It started from weights of others: {role} {name}; {NOT_RECORDED}.")
    return sentences if borrowed else [*sentences, "No other weights were used."]


def _describe_augmentation(settings: Record, params: Record) -> list[str]:
    """Return a sentence on generated captions that the fine-tuning was also trained on, if any."""
    augment = settings.get("augment") or {}
    entry = params.get("augment", {}).get(augment.get("captions") or "")
    # A control repeats the images' own captions: nothing generated was read.
    if not entry or augment.get("control"):
        return []
    writer = split_start(entry["start"])[1]
    data = _dataset_names(params["finetune"].get(writer, {}).get("sources") or (), params)
    return [f"It was also trained on captions generated by the run {writer}, which was trained on {data}."]


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
        # Class 0 is the background.
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
    names = list(sources) or list(params["data"])
    return ", ".join(f"{name} (synthetic scenes)" if name in params["generate"] else name for name in names)
