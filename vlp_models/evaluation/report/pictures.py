"""Pictures of the report: thumbnails with their region boxes, as data of the page itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from vlp_models.common.workspace import Workspace
from vlp_models.data.features import FeatureStore
from vlp_models.data.tables import read_table
from vlp_models.evaluation.report.charts import boxes_overlay

NARROW = 240  # pixels of a picture's longer side as the page shows it
BOXES_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of the page; `data` is empty where the file can't be shown, and `problem` then says why."""

    image_id: str
    data: str = ""
    width: int = 0
    height: int = 0
    boxes: Markup = field(default_factory=Markup)
    problem: str = ""


class Pictures:
    """Thumbnails by image id; paths, sizes and boxes come from the validated tables and data/features.

    regions: with boxes, for a model that sees them.
    """

    def __init__(self, workspace: Workspace, max_pixels: int, *, regions: bool = False) -> None:
        self._root = workspace.root
        self._max_pixels = max_pixels
        images = read_table("images", workspace.validated)
        self._paths = dict(zip(images["image_id"].to_pylist(), images["path"].to_pylist(), strict=True))
        there = regions and (workspace.features / "index.parquet").exists()
        self._store = FeatureStore(workspace.features) if there else None

    def get(self, image_id: str, longest: int = NARROW) -> Picture:
        from PIL import Image

        path = self._paths.get(image_id)
        if path is None:
            return Picture(image_id=image_id, problem="not in the validated tables")
        try:
            with Image.open(self._root / path) as image:
                if image.width * image.height > self._max_pixels:
                    return Picture(image_id=image_id, problem=f"{image.width} x {image.height} pixels: too large")
                image.draft("RGB", (longest, longest))
                small = _on_grey(image)
                small.thumbnail((longest, longest))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            return Picture(image_id=image_id, problem=f"can't be read: {error}")
        return Picture(
            image_id=image_id,
            data=_as_data(small),
            width=small.width,
            height=small.height,
            boxes=self._boxes(image_id, longest, longest * small.height / small.width),
        )

    def patch(self, image_id: str, box: Sequence[float], side: int = 72) -> Picture:
        """A part of an image, `side` pixels at its longer side. box: x1, y1, x2, y2 as fractions."""
        from PIL import Image

        path = self._paths.get(image_id)
        if path is None:
            return Picture(image_id=image_id, problem="not in the validated tables")
        try:
            with Image.open(self._root / path) as image:
                if image.width * image.height > self._max_pixels:
                    return Picture(image_id=image_id, problem=f"{image.width} x {image.height} pixels: too large")
                whole = _on_grey(image)
                x1, y1, x2, y2 = (round(v * s) for v, s in zip(box, whole.size * 2, strict=True))
                part = whole.crop((x1, y1, max(x1 + 1, x2), max(y1 + 1, y2)))
                factor = side / max(part.size)
                part = part.resize([max(1, round(s * factor)) for s in part.size])
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            return Picture(image_id=image_id, problem=f"can't be read: {error}")
        return Picture(image_id=image_id, data=_as_data(part), width=part.width, height=part.height)

    def _boxes(self, image_id: str, width: float, height: float) -> Markup:
        """The most confident regions with the detector's name for each."""
        if self._store is None or image_id not in self._store:
            return Markup("")
        regions, classes = self._store.get(image_id), self._store.classes
        shown = []
        for box, probabilities in zip(regions.boxes[:BOXES_SHOWN], regions.class_probs[:BOXES_SHOWN], strict=True):
            best = 1 + int(probabilities[1:].argmax()) if len(probabilities) > 1 else 0
            shown.append((box.tolist(), classes[best] if best < len(classes) else str(best)))
        return boxes_overlay(width, height, shown)


def _as_data(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _on_grey(image: Any) -> Any:
    """RGB, as people see it; what is transparent becomes mid-grey, as NLVR's pictures are shown."""
    from PIL import Image

    from vlp_models.data.images import as_seen, turned

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = turned(image).convert("RGBA")
        base = Image.new("RGBA", rgba.size, (205, 205, 205, 255))
        return Image.alpha_composite(base, rgba).convert("RGB")
    return as_seen(image)
