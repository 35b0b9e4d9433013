"""Pictures of the report, embedded as data URIs: thumbnails with region boxes, and patches of model figures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.report_pictures.charts import boxes_overlay
from vlp_models.contrib.report_pictures.model_figures import Figure
from vlp_models.data.features import FeatureStore
from vlp_models.data.mapped import ImagePaths
from vlp_models.params import Params

NARROW = 240  # pixels of a picture's longer side as the page shows it
PATCH_SIDE = 72  # pixels of a patch's longer side
BOXES_SHOWN = 6
CELLS = (
    "timm",
    "tower",
    "joined",
    "grid",
)  # values of `features.source` whose regions are cells of a grid, not objects


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture. `data` is empty if the file cannot be shown; `problem` then is the reason."""

    image_id: str
    data: str = ""
    width: int = 0
    height: int = 0
    boxes: Markup = field(default_factory=Markup)
    problem: str = ""


class Pictures:
    """Thumbnails by image id, from the validated tables and, with `regions`, boxes of objects from data/features."""

    def __init__(self, workspace: Workspace, max_pixels: int, *, regions: bool = False) -> None:
        self._root = workspace.root
        self._max_pixels = max_pixels
        self._paths = ImagePaths(workspace.validated)
        has_regions = regions and (workspace.features / "index.parquet").exists() and not _reads_cells(workspace)
        self._store = FeatureStore(workspace.features) if has_regions else None

    def get(self, image_id: str, longest: int = NARROW) -> Picture:
        """Return a thumbnail whose longer side is at most `longest` pixels."""
        opened = self._open(image_id, draft=longest)
        if isinstance(opened, Picture):
            return opened
        # The boxes are drawn for the size that the page shows, which may be larger than a small image.
        # In place, with the aspect ratio kept; a smaller image is not enlarged.
        opened.thumbnail((longest, longest))
        return Picture(
            image_id=image_id,
            data=_as_data(opened),
            width=opened.width,
            height=opened.height,
            # The boxes have the size of a picture whose longer side is `longest`.
            boxes=self._boxes(image_id, *(longest * side / max(opened.size) for side in opened.size)),
        )

    def patch(self, image_id: str, box: Sequence[float]) -> Picture:
        """Return a part of an image, PATCH_SIDE pixels at its longer side. box: x1, y1, x2, y2 as fractions."""
        opened = self._open(image_id)
        if isinstance(opened, Picture):
            return opened
        # In pixels, at least one wide and high.
        # `opened.size * 2` is (width, height, width, height), which scales x1, y1, x2, y2.
        x1, y1, x2, y2 = (round(v * s) for v, s in zip(box, opened.size * 2, strict=True))
        part = opened.crop((x1, y1, max(x1 + 1, x2), max(y1 + 1, y2)))
        factor = PATCH_SIDE / max(part.size)
        part = part.resize([max(1, round(s * factor)) for s in part.size])
        return Picture(image_id=image_id, data=_as_data(part), width=part.width, height=part.height)

    def _open(self, image_id: str, draft: int | None = None) -> Any:
        """Return the image as RGB, or a `Picture` with the problem. draft: the size that a JPEG may be decoded at."""
        from PIL import Image

        path = self._paths.find(image_id)
        if path is None:
            return Picture(image_id=image_id, problem="not in the validated tables")
        try:
            with Image.open(self._root / path) as image:
                # From the header, before anything is decoded.
                if image.width * image.height > self._max_pixels:
                    return Picture(image_id=image_id, problem=f"{image.width} x {image.height} pixels: too large")
                if draft:
                    # A JPEG is decoded at a half, a quarter or an eighth of its size where that is still large enough.
                    image.draft("RGB", (draft, draft))
                return _flatten_on_gray(image)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            return Picture(image_id=image_id, problem=f"cannot be read: {error}")

    def _boxes(self, image_id: str, width: float, height: float) -> Markup:
        """Draw the most confident regions with their class names."""
        if self._store is None or image_id not in self._store:
            return Markup("")
        regions, classes = self._store.get(image_id), self._store.classes
        labeled_boxes = []
        # boxes (R, 4) as fractions, class_probs (R, C); a detector's most confident regions come first.
        for box, probabilities in zip(regions.boxes[:BOXES_SHOWN], regions.class_probs[:BOXES_SHOWN], strict=True):
            # The most likely class without background, which is class 0.
            best = 1 + int(probabilities[1:].argmax()) if len(probabilities) > 1 else 0
            labeled_boxes.append((box.tolist(), classes[best] if best < len(classes) else str(best)))
        return boxes_overlay(width, height, labeled_boxes)


def _reads_cells(workspace: Workspace) -> bool:
    """Return whether data/features has the cells of a grid: a CNN trained on ImageNet has a class for every cell."""
    return read_json(workspace.features / "manifest.json").get("params", {}).get("source") in CELLS


def _as_data(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _flatten_on_gray(image: Any) -> Any:
    """Return the image upright as RGB, with transparent pixels in the gray that NLVR shows its images on."""
    from PIL import Image

    from vlp_models.data.images import apply_exif_orientation, to_upright_rgb

    # Modes with an alpha channel, or a palette with a transparent color.
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = apply_exif_orientation(image).convert("RGBA")
        base = Image.new("RGBA", rgba.size, (205, 205, 205, 255))
        return Image.alpha_composite(base, rgba).convert("RGB")
    return to_upright_rgb(image)


@dataclass(frozen=True, kw_only=True)
class PatchGroup:
    name: str
    note: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, kw_only=True)
class ModelFigure:
    """A figure that a pretrained model saved (model_figures.py), with its patches cut from the images."""

    title: str
    about: str
    run: str
    groups: Sequence[PatchGroup]


def read_figures(params: Params, workspace: Workspace) -> list[ModelFigure]:
    """Read the figures that the pretrainings of params.yaml saved."""
    pictures = None
    figures = []
    for run in params.pretrain:
        file = workspace.figures(f"pretrain/{run}")
        for value in read_json(file) if file.exists() else ():
            figure = Figure.from_plain(value)
            # The tables of image paths are read only if there is a figure.
            pictures = pictures or Pictures(workspace, params.validate.max_image_pixels)
            groups = [
                PatchGroup(
                    name=group.name,
                    note=group.note,
                    pictures=[pictures.patch(patch.image_id, patch.box) for patch in group.patches],
                )
                for group in figure.groups
            ]
            figures.append(ModelFigure(title=figure.title, about=figure.about, run=run, groups=groups))
    return figures
