"""What the page says of a version: which it is, what it learned from, how well it did, what it can't do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.serving.page.before import datasets, eyes_of, runs_before
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
