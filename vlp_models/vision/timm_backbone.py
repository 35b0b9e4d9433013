"""A timm backbone as what turns a picture into cells: its last feature map, others by choice, and its classifier.

Shape suffixes: C channels, F features, h/w cells of a map, N cells that are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.common.state_dicts import load_strict, read_state_dict
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.params import TimmParams, build, to_plain
from vlp_models.vision.detector import BACKGROUND
from vlp_models.vision.detector_checkpoint import (
    CONFIG,
    check_identity,
    identity_of,
    read_architecture,
    read_config,
    write_config,
)
from vlp_models.vision.image_io import one_thread, to_tensor
from vlp_models.vision.pretrained_weights import check_model, data_config, pretrained_model_name, read_backbone_weights
from vlp_models.vision.region_source import ImageRegionSource

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Layout = Literal["NCHW", "NHWC", "NLC"]


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Enough, with its class names, to build it again.

    model        timm's name
    num_classes  of its classifier; 0: it has none
    levels       feature maps beside the last one, by their places in timm's `feature_info`
    side         pixels of the square that every picture becomes
    mean, std, interpolation  as timm's data config has them for the model
    feature_dim  numbers a cell has
    """

    model: str
    num_classes: int
    levels: tuple[int, ...]
    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation
    feature_dim: int = 0


class Backbone(nn.Module):
    """`net` is timm's model, whole. Its weights are random."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.net: Any = timm.create_model(config.model, pretrained=False, num_classes=config.num_classes)

    def forward(self, pixels_13HW: Tensor, max_cells: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """The cells of one picture, row by row.

        The grid is that of the finest map asked for; coarser maps are repeated in it. Where it has more than
        `max_cells`, neighbours are averaged, down to the largest grid that fits. The classifier reads each cell as if
        the whole picture were like it.

        Returns:
            features [N, F], of each chosen level and then what the classifier's last layer reads; logits [N, classes];
            (rows, columns).
        """
        last, levels = self._maps(pixels_13HW)
        layout, maps = self._layout(last), [*levels, self._as_map(last)]
        finest = max((m.shape[-2:] for m in maps), key=math.prod)
        maps = [m if m.shape[-2:] == finest else F.interpolate(m, size=finest, mode="nearest") for m in maps]
        rows, columns = (min(side, math.isqrt(max_cells)) for side in finest)
        cells = [F.adaptive_avg_pool2d(m, (rows, columns)).flatten(2)[0].T for m in maps]
        hidden, logits = self._classify(cells[-1], layout)
        return torch.cat([*cells[:-1], hidden], dim=1), logits, (rows, columns)

    def _maps(self, pixels_13HW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the classifier reads, as timm has it, and the chosen levels [1, C, h, w]."""
        levels = self.config.levels
        if not levels:
            return self.net.forward_features(pixels_13HW), []
        last, found = self.net.forward_intermediates(pixels_13HW, indices=sorted(levels), output_fmt="NCHW")
        return last, list(found)

    def map_of(self, pixels_13HW: Tensor) -> Tensor:
        """What the classifier reads, as a map: [1, C, h, w]."""
        return self._as_map(self._maps(pixels_13HW)[0])

    def _layout(self, last: Tensor) -> Layout:
        if last.dim() == 3:
            return "NLC"
        return "NCHW" if last.shape[1] == self.net.num_features else "NHWC"

    def _as_map(self, last: Tensor) -> Tensor:
        """[1, C, h, w]"""
        layout = self._layout(last)
        if layout == "NLC":  # a square of patches, behind tokens that are none
            patches_1LC = last[:, self._prefix() :]
            return patches_1LC.mT.unflatten(2, (math.isqrt(patches_1LC.shape[1]), -1))
        return last.permute(0, 3, 1, 2) if layout == "NHWC" else last

    def _classify(self, cells_NC: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Each cell before and behind the classifier's last layer: [N, ...], [N, classes]."""
        if layout == "NLC":  # whichever token is read, it is the cell
            alone = cells_NC[:, None].expand(-1, 1 + self._prefix(), -1)
        else:
            alone = cells_NC[:, :, None, None] if layout == "NCHW" else cells_NC[:, None, None]
        hidden = self.net.forward_head(alone, pre_logits=True).flatten(1)
        logits = self.net.forward_head(alone) if self.config.num_classes else hidden[:, :0]
        return hidden, logits

    def _prefix(self) -> int:
        return int(getattr(self.net, "num_prefix_tokens", 0))


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
    data = data_config(pretrained_model_name(p.weights, p.model))
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
    load_strict(model.net, state, p.weights, f"{SECTION}.model: {p.model}`")
    model.config = dataclasses.replace(config, feature_dim=_feature_dim(model))
    return LoadedBackbone(model=model, classes=_class_names(config.num_classes, p, root))


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
    load_strict(model.net, read_state_dict(directory / WEIGHTS), directory / WEIGHTS, CONFIG)
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


def _class_names(count: int, p: TimmParams, root: Path) -> tuple[str, ...]:
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


RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class CellExtractor:
    """Turns images into regions, those first whose class is surest.

    Args:
        max_regions: at most; a finer map is averaged down to a grid of that many, so that no part of a picture is lost.
    """

    def __init__(self, backbone: LoadedBackbone, *, max_regions: int) -> None:
        config = backbone.model.config
        self.detector_id = backbone.detector_id
        self.classes = backbone.classes
        self.feature_dim = config.feature_dim
        self._model = backbone.model
        self._device = next(backbone.model.parameters()).device
        self.device = self._device.type
        self._side, self._resampling = config.side, RESAMPLING[config.interpolation]
        self._mean, self._std = (torch.tensor(value, device=self._device) for value in (config.mean, config.std))
        self._max_regions = max_regions

    @classmethod
    def load(cls, directory: Path, device: str = "cpu", *, max_regions: int) -> CellExtractor:
        """An extractor from data/detector or a copy of it.

        Raises:
            CheckpointError: there is no backbone, or a damaged one.
        """
        return cls(load_backbone(directory, device), max_regions=max_regions)

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """The regions of each image, in the order given; one at a time and, on a CPU, with one thread, so that an
        image's regions are the same to the last bit whoever made them (`RegionExtractor.extract`).

        Args:
            images: pictures, or uint8 tensors [3, H, W], of any sizes.

        Raises:
            DataError: an image of next to no pixels.
        """
        with one_thread() if self.device == "cpu" else nullcontext():
            return [self._extract(to_tensor(image) if isinstance(image, Image.Image) else image) for image in images]

    @torch.inference_mode()
    def _extract(self, image_3HW: Tensor) -> RegionArrays:
        features, logits, (rows, columns) = self._model(self.pixels(image_3HW), self._max_regions)
        probs = torch.nn.functional.pad(logits.float().softmax(-1), (1, 0)) if self.classes else logits  # no background
        scores = probs.max(dim=1).values if self.classes else probs.new_ones(len(features))
        order = scores.argsort(descending=True, stable=True)
        top, left = np.divmod(np.arange(rows * columns), columns)
        boxes = np.stack([left / columns, top / rows, (left + 1) / columns, (top + 1) / rows], axis=1)
        features, probs, scores = (tensor[order].float().cpu() for tensor in (features, probs, scores))
        return RegionArrays(
            features=features.numpy().astype(np.float16),
            boxes=boxes[order.cpu().numpy()].astype(np.float32),
            class_probs=probs.numpy().astype(np.float16),
            scores=scores.numpy(),
        )

    def pixels(self, image_3HW: Tensor) -> Tensor:
        """The picture as the backbone takes it: float32 [1, 3, side, side]."""
        height, width = image_3HW.shape[1:]
        if min(height, width) < LEAST_SIDE:
            raise DataError(
                f"an image of {width} x {height} pixels shows nothing: {LEAST_SIDE} are the least, each way"
            )
        picture = Image.fromarray(image_3HW.permute(1, 2, 0).numpy()).resize((self._side, self._side), self._resampling)
        scaled_HW3 = torch.from_numpy(np.array(picture)).to(self._device).float() / 255
        return ((scaled_HW3 - self._mean) / self._std).permute(2, 0, 1)[None].contiguous()


class CellSource(ImageRegionSource):
    """A `RegionSource` of cells."""
