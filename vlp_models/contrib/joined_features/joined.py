"""Region features of several timm models side by side: a region is a cell of each, one feature after the other.

The models see the same image in their own sizes, and average their cells down to one grid, which `features.max_regions`
must allow for all. As in vision/timm_backbone.py with one model, regions are sorted by the probability of their
class; classes are the first model's. data/detector has a folder per model, 0, 1, ..., and a config.json with their ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.joined_features.params import JoinedParams
from vlp_models.data.sample import RegionArrays
from vlp_models.errors import CheckpointError, ParamsError, VLPError
from vlp_models.params import Params
from vlp_models.vision.saved_network import read_config, write_config
from vlp_models.vision.timm_backbone import CellExtractor, load_backbone, make_backbone, save_backbone

FORMAT = "vlp-joined/1"


def check_joined(p: JoinedParams) -> None:
    """Raise a ParamsError if fewer than two models are named."""
    if len(p.models) < 2:
        raise ParamsError(
            f"params.yaml: `features.joined.models` names {len(p.models)} models; name two or more, or set "
            "`features.source: timm` and `features.timm`"
        )


def make_joined(params: Params, workspace: Workspace, directory: Path) -> dict[str, Any]:
    """Write the models that params.yaml names to `directory`; return the report of the stage `detector`.

    Raises:
        ParamsError: fewer than two models, their grids differ, or see `make_backbone`.
        CheckpointError, MissingToolError: see `make_backbone`.
    """
    p = params.features.section(JoinedParams)
    check_joined(p)
    ids, counts = [], {"classes": 0, "parameters": 0, "feature_dim": 0}
    for number, part in enumerate(p.models):
        try:
            backbone = make_backbone(part, workspace.root)
        except VLPError as error:  # they name the section of a single model
            raise type(error)(str(error).replace("features.timm", f"features.joined.models.{number}")) from None
        config = backbone.model.config
        (directory / str(number)).mkdir()
        ids.append(save_backbone(directory / str(number), backbone, {"source": "joined", "weights": part.weights}))
        counts["classes"] = counts["classes"] if number else config.num_classes
        counts["parameters"] += sum(parameter.numel() for parameter in backbone.model.parameters())
        counts["feature_dim"] += config.feature_dim
    identity = hashlib.sha256(" ".join(ids).encode()).hexdigest()[:16]
    write_config(directory, FORMAT, {"detector_id": identity, "parts": ids})
    extractor = JoinedExtractor({"max_regions": params.features.max_regions}, directory, "cpu")
    try:
        extractor.extract([Image.new("RGB", (64, 64))])  # do all give the same cells?
    except CheckpointError as error:
        raise ParamsError(f"params.yaml: `features.max_regions: {params.features.max_regions}`: {error}") from None
    names = " and ".join(part.model for part in p.models)
    return {
        "source": "joined",
        "backbone": names,
        "detector_id": identity,
        "counts": counts,
        "note": f"{names} with {counts['parameters']:,} parameters",
    }


class JoinedExtractor:
    """Extracts the joined regions of images with the models in `directory`.

    Args:
        settings: section `features` of params.yaml, or of a bundle's features.json.
    """

    packages = ("timm",)

    def __init__(self, settings: Mapping[str, Any], directory: Path, device: str) -> None:
        record = read_config(directory, FORMAT, "the config of joined backbones, as `features.source: joined` needs")
        parts = record.get("parts")
        folders = [directory / str(number) for number in range(len(parts) if isinstance(parts, list) else 0)]
        backbones = [load_backbone(folder, device) for folder in folders]
        if not parts or [backbone.detector_id for backbone in backbones] != parts:
            raise CheckpointError(f"{directory}: not the models of its config.json; `dvc repro --force detector`")
        self._parts = [CellExtractor(backbone, max_regions=settings["max_regions"]) for backbone in backbones]
        self.detector_id = record["detector_id"]
        self.classes, self.device = self._parts[0].classes, self._parts[0].device
        self.feature_dim = sum(part.feature_dim for part in self._parts)

    def extract(self, images: Sequence[Image.Image | Tensor]) -> list[RegionArrays]:
        """Return the regions of each image, in order; see `CellExtractor.extract`.

        Raises:
            DataError: an image is too small. CheckpointError: the models' regions differ.
        """
        regions_by_part = [part.extract(images) for part in self._parts]
        return [_join(regions) for regions in zip(*regions_by_part, strict=True)]


def _join(parts: Sequence[RegionArrays]) -> RegionArrays:
    """Return the first model's regions with the features of all at the same boxes."""
    first = parts[0]
    # Each model sorts its cells by its own classes: row i of the first is row places[i] of another, by row and column.
    rows, features = np.lexsort(first.boxes.T), [first.features]
    for other in parts[1:]:
        order = np.lexsort(other.boxes.T)
        if len(other.boxes) != len(first.boxes) or not np.allclose(other.boxes[order], first.boxes[rows], atol=1e-5):
            raise CheckpointError(
                f"the models give {len(first.boxes)} and {len(other.boxes)} regions; set fewer, down to the "
                "coarsest model's cells, and `pooled` for all models or none"
            )
        places = np.empty_like(rows)
        places[rows] = order
        features.append(other.features[places])
    return RegionArrays(
        features=np.concatenate(features, axis=1),
        boxes=first.boxes,
        class_probs=first.class_probs,
        scores=first.scores,
    )
