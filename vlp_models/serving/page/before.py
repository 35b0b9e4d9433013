"""What a version had learned before its fine-tuning, in sentences: the runs it starts from, back to its first weights,
and what made the regions that it reads. As far as the registry's record of it (runs/provenance.py) and its bundle say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vlp_models.common.packages import PREFIX
from vlp_models.common.weight_files import library_of
from vlp_models.params import split_start

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
    if own.get("weights"):
        told = roles.get("imported weights") or {}
        what = ", ".join(filter(None, (told.get("form"), (own.get("config") or {}).get("backbone"))))
        weights = _place(told.get("file") or own["weights"]) + (f" ({what})" if what else "")
        found.append(f"It began with the weights {weights}; {NOT_KNOWN}.")
    if own.get("words"):
        found.append(f"Its words began as those of a BERT, {_place(own['words'])}; {NOT_KNOWN}.")
    of_initial = next((parent for parent in parents if parent["path"] == f"checkpoints/initial/{model}"), {})
    if eyes := of_initial.get("eyes"):
        found.append(f"Its eyes first learned from boxes in {eyes.get('images', 0):,} images of the training split.")
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
