"""Backbones on disk, in data/detector as a detector is: `backbone.safetensors` and `config.json`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor

from vlp_models.common.state_dicts import load_exactly, read_state_dict
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.params import TimmParams, build, to_plain
from vlp_models.vision.backbone import Backbone, BackboneConfig
from vlp_models.vision.config import BACKGROUND
from vlp_models.vision.state import CONFIG, check_identity, identity_of, read_architecture, read_config, write_config
from vlp_models.vision.weights import check_model, data_config, read_backbone_weights, whose

FORMAT = "vlp-backbone/1"
WEIGHTS = "backbone.safetensors"
SECTION = "params.yaml: `features.timm"
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True, kw_only=True)
class LoadedBackbone:
    """A backbone ready for use (eval mode) and what it is. detector_id: "" before it is on disk."""

    model: Backbone
    classes: tuple[str, ...]  # names, background first; empty: it has no classifier
    detector_id: str = ""


def make_backbone(p: TimmParams, root: Path) -> LoadedBackbone:
    """As params.yaml describes it, with its weights. As many classes as the weights' classifier has.

    What a picture must be like is timm's data config of the model, or of the one that `weights` names: side, mean,
    standard deviation and interpolation.

    Raises:
        ParamsError: timm has no such model or level, it gives no map of cells, or it can't take pictures of this side.
        MissingToolError, CheckpointError: see `read_backbone_weights`; weights of another architecture; a file of
            class names that has another number of them.
    """
    check_model(p.model, f"{SECTION}.model`")
    fresh: Any = timm.create_model(p.model, pretrained=False)
    last = len(fresh.feature_info) - 1
    if any(not 0 <= level <= last for level in p.levels) or len(set(p.levels)) != len(p.levels):
        raise ParamsError(f"{SECTION}.levels: {p.levels}`: {p.model} has the feature maps 0 to {last}, each once")
    side = fresh.pretrained_cfg["input_size"][-1]
    if p.side and p.side != side and fresh.pretrained_cfg.get("fixed_input_size"):
        raise ParamsError(f"{SECTION}.side: {p.side}`: {p.model} takes pictures of {side} pixels and no others")
    state = read_backbone_weights(p.weights, p.model, root, f"{SECTION}.weights`")
    data = data_config(whose(p.weights, p.model))
    interpolation = data["interpolation"]
    config = BackboneConfig(
        model=p.model,
        num_classes=_classifier_rows(fresh, state),
        levels=tuple(sorted(p.levels)),
        side=p.side or data["input_size"][-1],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=interpolation if interpolation in INTERPOLATIONS else "bicubic",
    )
    model = Backbone(config).eval()
    load_exactly(model.net, state, p.weights, f"{SECTION}.model: {p.model}`")
    model.config = dataclasses.replace(config, feature_dim=_feature_dim(model))
    return LoadedBackbone(model=model, classes=_names(config.num_classes, p, root))


def save_backbone(directory: Path, backbone: LoadedBackbone, training: Mapping[str, Any]) -> str:
    """Writes both files and returns the id: the start of the sha256 of weights, architecture and classes."""
    from safetensors.torch import save_file

    state = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.model.net.state_dict().items()}
    save_file(state, directory / WEIGHTS)
    what = {"architecture": to_plain(backbone.model.config), "classes": list(backbone.classes)}
    identity = identity_of(directory / WEIGHTS, what)
    write_config(directory, FORMAT, {**what, "detector_id": identity, "training": dict(training)})
    return identity


def load_backbone(directory: Path, device: str = "cpu") -> LoadedBackbone:
    """Reads what `save_backbone` wrote.

    Raises:
        CheckpointError: no backbone there, a damaged one, or one whose classifier has not the classes it names.
    """
    record = read_config(directory, FORMAT, "a backbone's config, as `features.source: timm` needs")
    try:
        config = build(BackboneConfig, read_architecture(record), where="architecture", file=CONFIG)
        classes = tuple(map(str, record["classes"]))
        check_model(config.model, CONFIG)
        model = Backbone(config)
    except Exception as error:  # the file is from outside: whatever timm makes of it, the file is at fault
        raise CheckpointError(
            f"{directory / CONFIG}: not a backbone's config ({error}); `dvc repro detector`"
        ) from None
    if len(classes) != (config.num_classes + 1 if config.num_classes else 0):
        raise CheckpointError(
            f"{directory / CONFIG}: names {max(0, len(classes) - 1)} classes, but the classifier has "
            f"{config.num_classes}; `dvc repro --force detector` makes it anew"
        )
    load_exactly(model.net, read_state_dict(directory / WEIGHTS), directory / WEIGHTS, CONFIG)
    check_identity(directory / WEIGHTS, record, "backbone")
    return LoadedBackbone(model=model.to(device).eval(), classes=classes, detector_id=record["detector_id"])


def _classifier_rows(net: Any, state: Mapping[str, Tensor]) -> int:
    """How many classes the weights tell apart; 0: they come without a classifier."""
    name = net.pretrained_cfg.get("classifier") or ()
    first = name if isinstance(name, str) else next(iter(name), "")
    weight = state.get(f"{first}.weight")
    return 0 if weight is None else int(weight.shape[0])


def _feature_dim(model: Backbone) -> int:
    """
    Raises:
        ParamsError: the model has no map, or none for pictures of this side.
    """
    side = model.config.side
    try:
        with torch.inference_mode():
            blank = torch.zeros(1, 3, side, side)
            features, logits, grid = model(blank, 4)
            own = model.map_of(blank).shape[-2:]
    except (
        RuntimeError,
        AttributeError,
        TypeError,
        ValueError,
        IndexError,
        AssertionError,
        NotImplementedError,
    ) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ParamsError(
            f"{SECTION}.model: {model.config.model}`: gives no cells of pictures of {side} pixels ({said})"
        ) from None
    if own == (1, 1):  # a class token alone, or a picture of one cell, whatever `levels` have
        raise ParamsError(
            f"{SECTION}.model: {model.config.model}`: has no map of pictures of {side} pixels, one cell only"
        )
    if logits.shape != (math.prod(grid), model.config.num_classes):
        raise ParamsError(f"{SECTION}.model: {model.config.model}`: its classifier does not read single cells")
    return int(features.shape[1])


def _names(count: int, p: TimmParams, root: Path) -> tuple[str, ...]:
    """
    Raises:
        CheckpointError: no such file of names, or one of another number than the classifier has classes.
    """
    if not count:
        return ()
    if p.classes:
        path = root / p.classes
        try:
            names = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{SECTION}.classes`: {path}: {error}") from None
        if len(names) != count:
            raise CheckpointError(f"{path}: {len(names)} names, but the backbone's classifier has {count} classes")
        return (BACKGROUND, *names)
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return (BACKGROUND, *(f"class {number}" for number in range(1, count + 1)))
    info = ImageNetInfo(subset)
    words = [description.partition(",")[0] for description in info.label_descriptions()]
    often = Counter(words)  # two classes are called crane: those have their WordNet id behind the word
    names = [
        word if often[word] == 1 else f"{word} ({synset})"
        for word, synset in zip(words, info.label_names(), strict=True)
    ]
    return (BACKGROUND, *names)
