"""Region features from a timm backbone: the cells of its feature map are the regions.

This needs no boxes to train on and works on photographs. The whole image is scaled to the backbone's square; nothing is
cropped, unlike in ImageNet classification. Each cell is a region: its box is the cell's part of the image, and its
class probabilities come from the backbone's own classifier.

A backbone is saved in data/detector, as a detector is: `backbone.safetensors` and `config.json`.

Shape suffixes: C channels, F features, h/w cells of a map, N cells that are kept, L tokens.
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
from vlp_models.common.state_dicts import load_external_state_dict, read_state_dict
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import CheckpointError, DataError, ParamsError, first_line
from vlp_models.params import TimmParams, build
from vlp_models.vision.image_io import one_thread, to_tensor
from vlp_models.vision.pretrained_weights import (
    check_model,
    data_config,
    has_classifier,
    pretrained_model_name,
    read_backbone_weights,
)
from vlp_models.vision.region_source import BACKGROUND
from vlp_models.vision.saved_network import CONFIG, check_weights_hash, read_architecture, read_config, save_network

FORMAT = "vlp-backbone/1"
WEIGHTS = "backbone.safetensors"
POOLED = -1  # of `levels`: a region of the whole image
SECTION = "params.yaml: `features.timm"
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Layout = Literal["NCHW", "NHWC", "NLC"]


# ---- Model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The architecture of a backbone; with its class names, enough to rebuild it.

    model        timm's model name
    num_classes  of its classifier; 0: no classifier
    levels       feature maps to use besides the last one, as indices into timm's `feature_info`; POOLED
    side         pixels; images are resized to this square
    mean, std, interpolation  from timm's data config of the model
    feature_dim  length of a cell's feature
    """

    model: str
    num_classes: int
    levels: tuple[int, ...]
    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation
    feature_dim: int = 0


class TimmBackbone(nn.Module):
    """A whole timm model, `net`, with random weights."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.net: Any = timm.create_model(config.model, pretrained=False, num_classes=config.num_classes)
        self._prefix_tokens = int(getattr(self.net, "num_prefix_tokens", 0))  # such as [CLS], before the patches

    def forward(self, pixels_13HW: Tensor, max_cells: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Return the cells of one image, row by row.

        The grid is that of the finest map; coarser maps are repeated in it. If it has more than `max_cells`, adjacent
        cells are averaged, down to the largest grid that fits. The classifier reads each cell as if the whole image
        were like it.

        Returns:
            features [N, F], those of each chosen level and then the input of the classifier's last layer; logits
            [N, classes]; (rows, columns). With POOLED the first row is the whole image, and the cells follow.
        """
        last, levels = self._maps(pixels_13HW)
        layout, maps = self._layout(last), [*levels, self._as_map(last)]
        finest = max((m.shape[-2:] for m in maps), key=math.prod)
        for number, feature_map in enumerate(maps):
            if feature_map.shape[-2:] != finest:
                maps[number] = F.interpolate(feature_map, size=finest, mode="nearest")
        cells, grid = average_cells(maps, max_cells)
        hidden, logits = self._classify(self._repeat(cells[-1], layout))
        features = torch.cat([*cells[:-1], hidden], dim=1)
        if self.has_pooled:
            pooled, pooled_logits = self._classify(last)
            whole = torch.cat([*(m.mean((2, 3)) for m in maps[:-1]), pooled], dim=1)
            features, logits = torch.cat([whole, features]), torch.cat([pooled_logits, logits])
        return features, logits, grid

    @property
    def has_pooled(self) -> bool:
        return POOLED in self.config.levels

    def map_of(self, pixels_13HW: Tensor) -> Tensor:
        """Return the classifier's input as a map, [1, C, h, w]."""
        return self._as_map(self._maps(pixels_13HW)[0])

    def _maps(self, pixels_13HW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the classifier's input in timm's layout, and the chosen levels [1, C, h, w]."""
        levels = sorted(set(self.config.levels) - {POOLED})
        if not levels:
            return self.net.forward_features(pixels_13HW), []
        last, maps = self.net.forward_intermediates(pixels_13HW, indices=levels, output_fmt="NCHW")
        return last, list(maps)

    def _layout(self, last: Tensor) -> Layout:
        # Tokens, or a map whose channels come first or last: only the right place has the model's width.
        if last.dim() == 3:
            return "NLC"
        return "NCHW" if last.shape[1] == self.net.num_features else "NHWC"

    def _as_map(self, last: Tensor) -> Tensor:
        """Return [1, C, h, w] from any layout."""
        layout = self._layout(last)
        if layout == "NLC":  # prefix tokens, then a square of patches
            patches_1LC = last[:, self._prefix_tokens :]
            return patches_1LC.mT.unflatten(2, (math.isqrt(patches_1LC.shape[1]), -1))
        return last.permute(0, 3, 1, 2) if layout == "NHWC" else last

    def _repeat(self, cells_NC: Tensor, layout: Layout) -> Tensor:
        """Return N images of one cell each, in timm's layout."""
        if layout == "NLC":  # repeat the cell, so that any token the classifier reads is the cell
            return cells_NC[:, None].expand(-1, 1 + self._prefix_tokens, -1)
        return cells_NC[:, :, None, None] if layout == "NCHW" else cells_NC[:, None, None]

    def _classify(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the classifier's last layer for each image, [N, ...], and its logits [N, classes]."""
        hidden = self.net.forward_head(images, pre_logits=True).flatten(1)
        logits = self.net.forward_head(images) if self.config.num_classes else hidden[:, :0]
        return hidden, logits


def average_cells(maps: Sequence[Tensor], max_cells: int) -> tuple[list[Tensor], tuple[int, int]]:
    """Average adjacent cells of maps of equal size to at most `max_cells`; return [N, C] of each, and rows, columns."""
    rows, columns = (min(side, math.isqrt(max_cells)) for side in maps[0].shape[-2:])
    # [1, C, h, w] -> [N, C], row by row
    return [F.adaptive_avg_pool2d(m, (rows, columns)).flatten(2)[0].T for m in maps], (rows, columns)


# ---- Make, save, load --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadedBackbone:
    """A backbone in eval mode.

    classes: names, background first; empty without a classifier. detector_id: empty before it is saved.
    """

    model: TimmBackbone
    classes: tuple[str, ...]
    detector_id: str = ""


def make_backbone(p: TimmParams, root: Path) -> LoadedBackbone:
    """Build the backbone that params.yaml describes and load its weights.

    The number of classes is that of the weights' classifier. Side, mean, standard deviation and interpolation come from
    timm's data config of the model, or of the one that `weights` names.

    Raises:
        ParamsError: timm has no such model or level, the model gives no map of cells, or does not support the side.
        MissingToolError: `weights` names a package that is not installed.
        CheckpointError: no such weights, weights of another architecture, or a file of class names with another number
            of names.
    """
    check_model(p.model, f"{SECTION}.model`")
    # Without weights: it only lists the model's feature maps, input size and classifier.
    fresh: Any = timm.create_model(p.model, pretrained=False)
    last = len(fresh.feature_info) - 1
    if any(not 0 <= level <= last for level in p.levels) or len(set(p.levels)) != len(p.levels):
        raise ParamsError(f"{SECTION}.levels: {p.levels}`: {p.model} has the feature maps 0 to {last}, each once")
    side = fresh.pretrained_cfg["input_size"][-1]
    if p.side and p.side != side and fresh.pretrained_cfg.get("fixed_input_size"):
        raise ParamsError(f"{SECTION}.side: {p.side}`: {p.model} only supports images of {side} pixels")
    state = read_backbone_weights(p.weights, p.model, root, f"{SECTION}.weights`")
    name = pretrained_model_name(p.weights, p.model)
    data = data_config(name)
    interpolation = data["interpolation"]
    # The weights' classifier has one row per class. timm names it by a string, several by a sequence, or none.
    names = fresh.pretrained_cfg.get("classifier") or ()
    classifier = names if isinstance(names, str) else next(iter(names), "")
    weight = state.get(f"{classifier}.weight")
    if not p.classes and not has_classifier(name):  # it is a projection
        weight, state = None, {key: w for key, w in state.items() if not classifier or not key.startswith(classifier)}
    config = BackboneConfig(
        model=p.model,
        num_classes=0 if weight is None else int(weight.shape[0]),
        levels=tuple(sorted([*p.levels, *[POOLED] * p.pooled])),
        side=p.side or data["input_size"][-1],
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=interpolation if interpolation in RESAMPLING else "bicubic",
    )
    model = TimmBackbone(config).eval()
    load_external_state_dict(model.net, state, p.weights, f"{SECTION}.model: {p.model}`")
    model.config = dataclasses.replace(config, feature_dim=_measure_feature_dim(model))
    return LoadedBackbone(model=model, classes=_class_names(config.num_classes, p, root))


def save_backbone(directory: Path, backbone: LoadedBackbone, training: Mapping[str, Any]) -> str:
    """Write weights and config.json; return the id, a hash of weights, architecture and classes."""
    return save_network(
        directory / WEIGHTS, FORMAT, backbone.model.net, backbone.model.config, backbone.classes, training
    )


def load_backbone(directory: Path, device: str = "cpu") -> LoadedBackbone:
    """Load what `save_backbone` wrote.

    Raises:
        CheckpointError: no backbone, a damaged one, or class names that do not fit its classifier.
    """
    record = read_config(directory, FORMAT, "a backbone's config, as `features.source: timm` needs")
    try:
        config = build(BackboneConfig, read_architecture(record), where="architecture", file=CONFIG)
        classes = tuple(map(str, record["classes"]))
        check_model(config.model, CONFIG)
        model = TimmBackbone(config)
    except Exception as error:  # an external file may make timm raise anything
        raise CheckpointError(
            f"{directory / CONFIG}: not a backbone's config ({error}); `dvc repro detector`"
        ) from None
    # The names start with the background, which is no class of the classifier.
    if len(classes) != (config.num_classes + 1 if config.num_classes else 0):
        raise CheckpointError(
            f"{directory / CONFIG}: names {max(0, len(classes) - 1)} classes, but the classifier has "
            f"{config.num_classes}; `dvc repro --force detector` makes it again"
        )
    load_external_state_dict(model.net, read_state_dict(directory / WEIGHTS), directory / WEIGHTS, CONFIG)
    check_weights_hash(directory / WEIGHTS, record, "backbone")
    return LoadedBackbone(model=model.to(device).eval(), classes=classes, detector_id=record["detector_id"])


def _measure_feature_dim(model: TimmBackbone) -> int:
    """Run a blank image and return the length of a cell's feature."""
    side, key = model.config.side, f"{SECTION}.model: {model.config.model}`"
    try:
        with torch.inference_mode():
            blank = torch.zeros(1, 3, side, side)
            features, logits, grid = model(blank, 4)
            shape = model.map_of(blank).shape[-2:]
    except Exception as error:  # what timm raises for an unsupported side depends on the architecture
        raise ParamsError(f"{key}: no feature map for images of {side} pixels ({first_line(error)})") from None
    if shape == (1, 1):  # only a class token, or the image is a single cell, whatever `levels` have
        raise ParamsError(f"{key}: no feature map for images of {side} pixels, only one cell")
    if logits.shape != (math.prod(grid) + model.has_pooled, model.config.num_classes):
        raise ParamsError(f"{key}: its classifier does not work on single cells")
    return int(features.shape[1])


def _class_names(count: int, p: TimmParams, root: Path) -> tuple[str, ...]:
    """Return the class names, background first: from the file `classes`, ImageNet's, or numbers."""
    if not count:
        return ()
    if p.classes:
        path = root / p.classes
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{SECTION}.classes`: {path}: {error}") from None
        names = [line.strip() for line in lines if line.strip()]
        if len(names) != count:
            raise CheckpointError(f"{path}: {len(names)} names, but the backbone's classifier has {count} classes")
        return (BACKGROUND, *names)
    # ImageNet's own names, if the number of classes is that of one of its versions.
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None:
        return (BACKGROUND, *(f"class {number}" for number in range(1, count + 1)))
    info = ImageNetInfo(subset)
    words = [description.partition(",")[0] for description in info.label_descriptions()]
    frequency = Counter(words)  # two classes are called crane: their WordNet ids are appended
    names = [
        word if frequency[word] == 1 else f"{word} ({synset})"
        for word, synset in zip(words, info.label_names(), strict=True)
    ]
    return (BACKGROUND, *names)


# ---- Regions -----------------------------------------------------------------------------------------------------


class CellExtractor:
    """Extracts cells from images, sorted by the probability of their class.

    Args:
        max_regions: maximum per image; a finer map is averaged to a grid of at most that many cells, so that no part of
            the image is lost.
    """

    packages: tuple[str, ...] = ("timm",)

    def __init__(self, backbone: LoadedBackbone, *, max_regions: int) -> None:
        self.detector_id = backbone.detector_id
        self.classes = backbone.classes
        self.feature_dim = backbone.model.config.feature_dim
        self._model = backbone.model
        self._device = next(backbone.model.parameters()).device
        self.device = self._device.type
        self._max_regions = max_regions

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """Return the regions of each image, in order.

        One image at a time and, on a CPU, with one thread, so that the features are bitwise reproducible (see
        `RegionExtractor.extract`).

        Args:
            images: PIL images, or uint8 tensors [3, H, W], of any size.

        Raises:
            DataError: an image is too small.
        """
        regions = []
        with one_thread() if self.device == "cpu" else nullcontext():
            for image in images:
                regions.append(self._extract(to_tensor(image) if isinstance(image, Image.Image) else image))
        return regions

    @torch.inference_mode()
    def _extract(self, image_3HW: Tensor) -> RegionArrays:
        height, width = image_3HW.shape[1:]
        if min(height, width) < LEAST_SIDE:
            raise DataError(f"an image of {width} x {height} pixels is too small; the minimum side is {LEAST_SIDE}")
        cells = max(1, self._max_regions - self._model.has_pooled)
        pixels, (x1, y1, x2, y2) = self.prepare(image_3HW)
        features, logits, (rows, columns) = self._model(pixels, cells)
        # A column of zeros for the background, which the classifier does not have.
        if self.classes:
            probs = F.pad(logits.float().softmax(-1), (1, 0))
            scores = probs.max(dim=1).values
        else:
            # (N, 0): without a classifier there are no classes, and all cells are equally certain.
            probs, scores = logits, logits.new_ones(len(features))
        # The most certain cells first; equal ones row by row.
        order = scores.argsort(descending=True, stable=True)
        # Row and column of each cell -> left, top, right, bottom as fractions of the input, then of the image: [N, 4]
        top, left = np.divmod(np.arange(rows * columns), columns)
        boxes = np.stack([left / columns, top / rows, (left + 1) / columns, (top + 1) / rows], axis=1)
        if self._model.has_pooled:
            boxes = np.concatenate([[[0, 0, 1, 1]], boxes])
        boxes = boxes * [x2 - x1, y2 - y1, x2 - x1, y2 - y1] + [x1, y1, x1, y1]
        features, probs, scores = (tensor[order].float().cpu() for tensor in (features, probs, scores))
        return RegionArrays(
            features=features.numpy().astype(np.float16),
            boxes=boxes[order.cpu().numpy()].astype(np.float32),
            class_probs=probs.numpy().astype(np.float16),
            scores=scores.numpy(),
        )

    def prepare(self, image_3HW: Tensor) -> tuple[Tensor, Sequence[float]]:
        """Return the backbone's input, float32 [1, 3, side, side], and the part of the image that it shows: all."""
        config = self._model.config
        # (3, H, W) uint8 -> (1, 3, side, side), with the mean and deviation of the backbone's training
        picture = Image.fromarray(image_3HW.permute(1, 2, 0).numpy())
        picture = picture.resize((config.side, config.side), RESAMPLING[config.interpolation])
        mean, std = (torch.tensor(value, device=self._device) for value in (config.mean, config.std))
        scaled_HW3 = torch.from_numpy(np.array(picture)).to(self._device).float() / 255
        return ((scaled_HW3 - mean) / std).permute(2, 0, 1)[None].contiguous(), (0, 0, 1, 1)
