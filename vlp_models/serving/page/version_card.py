"""What the page says of a version: which it is, what it learned from, how well it did, what it can't do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.common.packages import PREFIX, library_of
from vlp_models.params import split_start
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel
from vlp_models.tasks.vqa import UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Origin:
    """
    chosen   how it came here: `champion`, or `run NAME`
    data     what it was fine-tuned on, in a sentence
    before   what it had learned before that, and what its eyes and words had: a sentence each
    figures  its headline figures with intervals, a sentence for each dataset and split
    """

    name: str
    version: int
    chosen: str
    run: str
    model: str
    family: str
    data: str
    before: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        return f"{self.name} version {self.version} ({self.chosen}; model {self.model})"


def origin(
    *,
    name: str,
    version: int,
    chosen: str,
    tags: Mapping[str, str],
    lineage: Mapping[str, Any] | None,
    scores: Sequence[Mapping[str, Any]],
    bundle: Path | None = None,
) -> Origin:
    """Of what the registry keeps with a version: its tags, lineage.json, scores.json, and its bundle."""
    run = tags.get("run", "unknown")
    return Origin(
        name=name,
        version=version,
        chosen=chosen,
        run=run,
        model=tags.get("model", "unknown"),
        family=tags.get("family", "unknown"),
        data=trained_on(lineage, run),
        before=(*runs_before(lineage, run), *(eyes_of(bundle) if bundle is not None else ())),
        figures=tuple(_figures(scores)),
    )


def trained_on(lineage: Mapping[str, Any] | None, run: str) -> str:
    """The datasets of the fine-tuning, and whether they were drawn by a program."""
    if lineage is None:
        return "It was registered without a record of its data."
    params = lineage.get("params") or {}
    sources = ((params.get("finetune") or {}).get(run) or {}).get("sources") or params.get("data") or {}
    generated = params.get("generate") or {}
    if not sources:
        return "Its record names no dataset."
    images = (((lineage.get("data") or {}).get("shards") or {}).get("counts") or {}).get("train", {}).get("images")
    count = f"; the training split of all datasets held {images:,} images" if images else ""
    text = f"Fine-tuned on {datasets(sources, params)}{count}."
    if all(one in generated for one in sources):
        text += " These are drawn scenes, no photographs: what it says of a photograph means nothing."
    return text


def limits(task_model: TaskModel) -> list[str]:
    """What it can't do, as far as its checkpoint tells."""
    found = []
    if task_model.task == "captioning":
        words = f"It knows {task_model.tokenizer.vocab_size:,} words and pieces of words."
        found.append(f"{words} What it has no word for, it calls something else, or leaves out.")
        found.append("It captions every photo, also one it can make nothing of.")
    elif task_model.task == "vqa":
        answers = sum(answer != UNKNOWN for answer in task_model.labels)
        found.append(f"It chooses among {answers:,} answers; any other it can't give.")
        found.append("It answers every question, also one about what the photo doesn't show.")
    elif task_model.task == "retrieval":
        found.append("Some photo always comes first, also where none fits the text.")
    if task_model.info.classes:
        kinds = len(task_model.info.classes) - 1
        found.append(f"The regions it reads are told apart by {kinds:,} classes of things; others it may miss.")
    if task_model.info.blank_images:
        found.append("It is a control that was trained without images: it does not look at the photo.")
    return found


def _figures(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    places: dict[str, list[str]] = {}
    for score in scores:
        if score.get("value") is None or score["metric"] not in task_class(score["task"]).headlines:
            continue
        sure = f" ({score['low']:.1f} to {score['high']:.1f})" if score.get("low") is not None else ""
        place = f"{score['dataset']}, split {score['split']}"
        places.setdefault(place, []).append(f"{score['metric']} {score['value']:.1f}{sure}")
    return [f"Measured on {place}: {', '.join(lines)}." for place, lines in places.items()]


NOT_KNOWN = "what these learned from is not on record"
OF_VIEW = {"texts": "the texts of ", "images": "the images of "}  # a pretraining that does not learn from pairs

Record = Mapping[str, Any]


def datasets(sources: Iterable[str], params: Record) -> str:
    """Their names; of none, those of all. Drawn ones are called so."""
    generated = params.get("generate") or {}
    named = list(sources) or list(params.get("data") or {})
    return ", ".join(f"{one} (generated scenes)" if one in generated else one for one in named)


def runs_before(lineage: Record | None, run: str) -> list[str]:
    """A sentence for each run that the fine-tuning `run` starts from, the latest first, and for its first weights."""
    if lineage is None:
        return []
    params, parents = lineage.get("params") or {}, lineage.get("parents") or ()
    starts = {parent["path"].removeprefix("checkpoints/"): parent for parent in parents}
    own = (params.get("finetune") or {}).get(run) or {}
    found = _written_captions(own, params)
    start, seen = own.get("start") or "", set[str]()
    while start and start not in seen:
        seen.add(start)
        kind, name = split_start(start)
        parent = starts.get(start) or {}
        if parent.get("note"):  # it was made anew
            return [*found, f"Before that came {start}, which is another now; what it had learned is not on record."]
        if kind == "initial":
            return [*found, *_first_weights(name, params, parents)]
        settings = ((parent.get("params") or {}).get(kind) or {}).get(name) or (params.get(kind) or {}).get(name) or {}
        what = OF_VIEW.get(settings.get("view") or "", "") + datasets(settings.get("sources") or (), params)
        learned = f"fine-tuned for {settings.get('task')}" if kind == "finetune" else "pretrained"
        found += [f"Before that it was {learned} on {what}, by the run {name}.", *_written_captions(settings, params)]
        first = f"initial/{settings['model']}" if settings.get("model") else ""
        start = settings.get("start") or first
    return [*found, "What it began with is not on record."]


def eyes_of(bundle: Path) -> list[str]:
    """What made the regions that the version reads; nothing of one that reads none."""
    made, detector = _read(bundle / "features.json"), _read(bundle / "detector" / "config.json")
    training = detector.get("training") or {}
    source = made.get("source")
    if source == "grid":
        return ["Its regions are plain cells of a grid: nothing has learned to see them."]
    if source == "boxes":
        return ["Its regions are annotated objects, given as symbols: it sees no pixel of them."]
    if source == "timm":
        model = (detector.get("architecture") or {}).get("model")
        weights = _place(training.get("weights") or "")
        return [f"Its regions are cells of timm's {model}, with the weights {weights}; {NOT_KNOWN}."]
    if source == "detector" and training.get("source") == "train":
        boxes = f"the boxes of {', '.join(training.get('datasets') or ())}, in {training.get('images', 0):,} images"
        return [f"Its regions come from a detector that learned from {boxes}."]
    if source == "detector" and training.get("weights") == "torchvision":
        return ["Its regions come from torchvision's detector, which learned from COCO's boxes."]
    if source == "detector":
        weights = training.get("file") or _place(training.get("weights") or "")
        return [f"Its regions come from a detector with the weights {weights or 'of a file'}; {NOT_KNOWN}."]
    if source:
        return [f"Its regions were imported from {_place(made.get('path') or '')}; what made them is not on record."]
    return []


def _written_captions(settings: Record, params: Record) -> list[str]:
    """Of a fine-tuning that learned from captions that a model wrote."""
    augment = settings.get("augment") or {}
    entry = (params.get("augment") or {}).get(augment.get("captions") or "")
    if not entry or augment.get("control"):
        return []
    writer = split_start(entry.get("start") or "")[1]
    learned = datasets(((params.get("finetune") or {}).get(writer) or {}).get("sources") or (), params)
    return [f"It learned also from captions that the run {writer} wrote, which had learned from {learned}."]


def _first_weights(model: str, params: Record, parents: Iterable[Record]) -> list[str]:
    """What the model began with: imported weights, a BERT's words, eyes of its own; else with nothing."""
    own = (params.get("models") or {}).get(model) or {}
    roles = {parent["role"]: parent for parent in parents}
    found = []
    if own.get("init") or own.get("image_init"):
        told = roles.get("imported weights") or {}
        what = ", ".join(filter(None, (told.get("form"), (own.get("config") or {}).get("backbone"))))
        weights = _place(told.get("file") or own.get("init") or own["image_init"]) + (f" ({what})" if what else "")
        found.append(f"It began with the weights {weights}; {NOT_KNOWN}.")
    if own.get("text_init"):
        found.append(f"Its words began as those of a BERT, {_place(own['text_init'])}; {NOT_KNOWN}.")
    of_initial = next((parent for parent in parents if parent["path"] == f"checkpoints/initial/{model}"), {})
    if warmup := of_initial.get("vision_warmup"):
        found.append(
            f"Its vision encoder was first trained on boxes in {warmup.get('images', 0):,} images of the train split."
        )
    return found or ["Its weights were random before that."]


def _place(source: str) -> str:
    """A package or a library's name as it is; of a path the last part: folders are the server's business."""
    return source if source.startswith(PREFIX) or library_of(source) else Path(source).name


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
