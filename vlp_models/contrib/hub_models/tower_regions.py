"""Region features from the image tower of a CLIP, SigLIP or SigLIP 2: its patches are the regions.

The image is prepared as the tower's own processor does; a CLIP crops the center, so the regions cover that window. Each
region is a patch of the last hidden state, or the mean of adjacent ones, as with timm (vision/timm_backbone.py). There
are no classes. data/detector gets the image tower alone: `tower.safetensors` and `config.json`.

Shape suffixes: D hidden size, E embedding, F features (the larger of both), h/w patches, N regions, L tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vlp_models.common.state_dicts import load_external_state_dict, read_state_dict
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.hub_models import transformers_towers
from vlp_models.contrib.hub_models.folder import OPEN_CLIP, check_names, check_weights, find_folder, read_weights
from vlp_models.contrib.hub_models.params import TowerParams
from vlp_models.data.pixels import PixelInput, collate_pixels
from vlp_models.errors import CheckpointError, ParamsError, first_line
from vlp_models.params import Params, build
from vlp_models.vision.saved_network import CONFIG, check_weights_hash, read_architecture, read_config, save_network
from vlp_models.vision.timm_backbone import CellExtractor, LoadedBackbone, average_cells

FORMAT = "vlp-tower/1"
WEIGHTS = "tower.safetensors"
KEY = "features.tower.weights"


# ---- Model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """What rebuilds a tower.

    architecture  transformers' config of the model
    image         how an image is resized and normalized: fields of `PixelInput`
    pooled        whether the first region is the embedding of the whole image
    feature_dim   length of a region's feature
    """

    architecture: dict[str, Any]
    image: dict[str, Any]
    pooled: bool = False
    feature_dim: int = 0


class Tower(nn.Module):
    """An image tower of transformers, `net`, with random weights."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.input = PixelInput(**config.image)
        self.net: Any = transformers_towers.build_image_tower(config.architecture)

    @property
    def has_pooled(self) -> bool:
        return self.config.pooled

    def forward(self, pixels_13HW: Tensor, max_cells: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Return the regions of one image.

        If it has more than `max_cells` patches, adjacent ones are averaged, down to the largest grid that fits.

        Returns:
            features [N, F]: the embedding of the whole image if it is `pooled`, then cells row by row, zeros after the
            shorter of the two; no logits [N, 0]; (rows, columns).
        """
        encoded = transformers_towers.encode_image(self.net, pixels_13HW)
        side = self.net.config.vision_config.patch_size
        rows, columns = (length // side for length in pixels_13HW.shape[-2:])
        # (1, L, D) -> (1, D, h, w): a CLIP has [CLS] before its patches
        patches_1LD = encoded.last_hidden_state[:, -rows * columns :]
        (features,), grid = average_cells([patches_1LD.mT.unflatten(2, (rows, columns))], max_cells)
        if self.has_pooled:
            parts = (encoded.pooler_output, features)
            width = max(part.shape[1] for part in parts)
            features = torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])
        return features, features[:, :0], grid


# ---- Make, load --------------------------------------------------------------------------------------------------


def check_tower(p: TowerParams) -> None:
    """Check the tower that params.yaml names; its weights are not read.

    Raises:
        ParamsError: none is named, or a name on the Hub without a commit.
        CheckpointError: another model, a pickle, or its preprocessing is missing or not supported.
        DataError: no such folder; or see `find_folder`.
    """
    folder = _find(p, Path())
    transformers_towers.read_image_side(folder)
    check_weights(p.weights, folder, KEY)


def _find(p: TowerParams, root: Path, *, weights: bool = False) -> Path:
    if not p.weights:
        raise ParamsError(
            f"params.yaml: `features.source: tower` needs `{KEY}`: a folder with a CLIP or SigLIP, or hf://OWNER/NAME"
        )
    folder = find_folder(p.weights, root, KEY, weights=weights)
    if (folder / OPEN_CLIP).is_file():
        raise CheckpointError(
            f"params.yaml: `{KEY}: {p.weights}`: open_clip's layout; expected that of transformers; timm has the image "
            "towers of open_clip's models: `features.source: timm`"
        )
    return folder


def make_tower(params: Params, workspace: Workspace, directory: Path) -> dict[str, Any]:
    """Write the image tower that params.yaml names to `directory`; return the report of the stage `detector`.

    Raises:
        CheckpointError: see `check_tower`; or the weights are damaged, or of another architecture.
        DataError, ParamsError: see `check_tower`.
    """
    p = params.features.section(TowerParams)
    folder = _find(p, workspace.root, weights=True)
    model = Tower(TowerConfig(**transformers_towers.read_image_side(folder), pooled=p.pooled)).eval()
    state = model.net.state_dict()
    # Without the text side, and numbers of positions that old versions of transformers stored
    parts = tuple({f"{name.partition('.')[0]}." for name in state})
    weights = {k: w for k, w in read_weights(folder).items() if k.startswith(parts) and not k.endswith(".position_ids")}
    check_names(weights, state, folder)
    model.net.load_state_dict({name: tensor.to(state[name].dtype) for name, tensor in weights.items()})
    with torch.inference_mode():
        blank = torch.zeros(1, 3, model.input.height, model.input.width)
        width = model(blank, 1)[0].shape[1]
    config = dataclasses.replace(model.config, feature_dim=width)
    identity = save_network(
        directory / WEIGHTS, FORMAT, model.net, config, (), {"source": "tower", "weights": p.weights}
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "source": "tower",
        "backbone": config.architecture["model_type"],
        "detector_id": identity,
        "counts": {"classes": 0, "parameters": parameters, "feature_dim": width},
        "note": f"{config.architecture['model_type']} with {parameters:,} parameters",
    }


def load_tower(directory: Path, device: str = "cpu") -> LoadedBackbone:
    """Load what `make_tower` wrote.

    Raises:
        CheckpointError: no tower, or a damaged one.
        MissingToolError: transformers is not installed.
    """
    record = read_config(directory, FORMAT, "a tower's config, as `features.source: tower` needs")
    try:
        config = build(TowerConfig, read_architecture(record), where="architecture", file=CONFIG)
        model, classes = Tower(config), tuple(map(str, record["classes"]))
    except (ParamsError, ValueError, TypeError, KeyError, AttributeError) as error:  # the file may come from anywhere
        raise CheckpointError(
            f"{directory / CONFIG}: not a tower's config ({first_line(error)}); `dvc repro detector`"
        ) from None
    load_external_state_dict(model.net, read_state_dict(directory / WEIGHTS), directory / WEIGHTS, CONFIG)
    check_weights_hash(directory / WEIGHTS, record, "tower")
    # CellExtractor reads of a backbone what `Tower` has, too.
    return LoadedBackbone(model=cast(Any, model.to(device).eval()), classes=classes, detector_id=record["detector_id"])


# ---- Regions -----------------------------------------------------------------------------------------------------


class TowerExtractor(CellExtractor):
    """Extracts the regions of images with the tower in `directory`.

    Args:
        settings: section `features` of params.yaml, or of a bundle's features.json.
    """

    packages = ("transformers",)

    def __init__(self, settings: Mapping[str, Any], directory: Path, device: str) -> None:
        super().__init__(load_tower(directory, device), max_regions=settings["max_regions"])

    def prepare(self, image_3HW: Tensor) -> tuple[Tensor, Sequence[float]]:
        """Return the tower's input, float32 [1, 3, H, W], and the part of the image that it shows.

        A CLIP shows the center.
        """
        picture = Image.fromarray(image_3HW.permute(1, 2, 0).numpy())
        pixels = collate_pixels([picture], cast(Any, self._model).input, [None])
        window = (0, 0, 1, 1) if pixels.placement is None else pixels.placement.window_B4[0].clamp(0, 1).tolist()
        return pixels.pixels_B3HW.to(self._device), window
