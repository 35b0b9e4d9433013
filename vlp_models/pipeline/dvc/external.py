"""What params.yaml takes from outside the datasets: vocabularies, first weights, backbones and detectors; and what a
dataset reads of another's folder."""

from __future__ import annotations

import os
from pathlib import Path

from vlp_models.common.packages import dependency, library_of
from vlp_models.params import Params, SourceParams


def vocabulary_source(params: Params) -> list[tuple[str, str]]:
    """What the tokenizer is read from, and where params.yaml says so; nothing where it is learnt."""
    p = params.tokenizer
    return [(p.vocab, "tokenizer.vocab")] if p.source == "vocab" and p.vocab else []


def packages(params: Params, *, regions: bool) -> list[tuple[str, str]]:
    """What params.yaml may take from installed packages, with the places where it says so.

    regions: whether any model reads them; without, neither backbone nor detector is needed.
    """
    first = [
        (source, f"models.{name}.{key}")
        for name, model in params.models.items()
        for key, source in (("init", model.init), ("image_init", model.image_init), ("text_init", model.text_init))
        if source
    ]
    return [*vocabulary_source(params), *first, *(_eyes(params) if regions else [])]


def _eyes(params: Params) -> list[tuple[str, str]]:
    """The weights of backbone or detector that are no library's own, with the place where params.yaml says so."""
    if params.features.source == "timm":
        found = [(params.features.timm.weights, "features.timm.weights")]
    else:
        found = [(params.detector.weights, "detector.weights")] if params.detector.source == "weights" else []
    return [(weights, where) for weights, where in found if weights and not library_of(weights)]


def read_by_detector(params: Params) -> list[str]:
    """What the stage that makes detector or backbone ready reads."""
    if params.features.source == "timm":
        classes = params.features.timm.classes
        return [*(dependency(weights) for weights, _ in _eyes(params)), *([classes] if classes else [])]
    learnt = [] if params.detector.source == "none" else ["data/validated/boxed.parquet"]
    return [*learnt, *(dependency(weights) for weights, _ in _eyes(params))]


def read_of_others(source: SourceParams) -> list[str]:
    """Files that a dataset names and that are not below its `root`, as Karpathy's list of COCO is for Visual Genome."""
    by_split = (
        source.captions,
        source.instances,
        source.questions,
        source.annotations,
        source.texts,
        source.split_files,
    )
    listed = [file for lists in by_split for files in lists.values() for file in files]
    named = [file for file in (source.karpathy, source.scene_graphs, *source.exclude, *listed) if file]
    paths = {os.path.normpath(Path(source.root, file)) for file in named}
    return sorted(path for path in paths if not Path(path).is_relative_to(os.path.normpath(source.root)))
