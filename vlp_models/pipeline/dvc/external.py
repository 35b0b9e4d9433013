"""External inputs that params.yaml names: vocabularies, initial weights, backbones, and files outside a dataset."""

from __future__ import annotations

import os
from pathlib import Path

from vlp_models.common.packages import dependency, library_of
from vlp_models.params import Params, SourceParams


def vocabulary_source(params: Params) -> list[tuple[str, str]]:
    """Return source and params key of the tokenizer's vocabulary; empty if the tokenizer is trained."""
    tokenizer = params.tokenizer
    return [(tokenizer.vocab, "tokenizer.vocab")] if tokenizer.source == "vocab" and tokenizer.vocab else []


def named_sources(params: Params, *, regions: bool) -> list[tuple[str, str]]:
    """Return source and params key of everything that may be an installed package.

    Args:
        regions: whether any model reads them; otherwise neither backbone nor detector is needed.
    """
    initial = [
        (source, f"models.{name}.{key}")
        for name, model in params.models.items()
        for key, source in (("init", model.init), ("image_init", model.image_init), ("text_init", model.text_init))
        if source
    ]
    return [*vocabulary_source(params), *initial, *(_image_weights(params) if regions else [])]


def detector_inputs(params: Params) -> list[str]:
    """Return the dependencies of the stage `detector`, which prepares the detector or backbone."""
    weights = [dependency(source) for source, _ in _image_weights(params)]
    if params.features.source == "timm":
        classes = params.features.timm.classes
        return [*weights, *([classes] if classes else [])]
    return [*([] if params.detector.source == "none" else ["data/validated/boxed.parquet"]), *weights]


def files_outside_root(source: SourceParams) -> list[str]:
    """Return the files that a dataset names and that are not below its `root`.

    For example Karpathy's list of COCO images for Visual Genome.
    """
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


def _image_weights(params: Params) -> list[tuple[str, str]]:
    """Return source and params key of the backbone's or detector's weights, unless a library downloads them."""
    if params.features.source == "timm":
        found = [(params.features.timm.weights, "features.timm.weights")]
    else:
        found = [(params.detector.weights, "detector.weights")] if params.detector.source == "weights" else []
    return [(weights, key) for weights, key in found if weights and not library_of(weights)]
