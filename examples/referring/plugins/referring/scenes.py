"""Referring expressions for the synthetic scenes, from the scene graphs that the generator `objects` writes.

An object is referred to by its shape and as few attributes as exclude every other object: "the circle", "the small blue
star". If no attributes do, its place is added: "the red square at the top". An object without such an expression is
skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from vlp_models.data.formats.base import Row, Tables, fills, image_row, join_id
from vlp_models.data.formats.files import read_text, require_directory
from vlp_models.params import SourceParams
from vlp_models.synthetic.scenes.scene import Scene, SceneObject, is_at

ATTRIBUTES = ("color", "size", "texture")
PHRASES = {
    "middle": "in the middle",
    "top": "at the top",
    "bottom": "at the bottom",
    "left": "on the left",
    "right": "on the right",
}


@fills("expressions")
def read(name: str, params: SourceParams, base: Path) -> Tables:
    """Read `<root>/scenes.jsonl` and the images next to it.

    Raises:
        DataError: the folder or the file is missing.
    """
    root = require_directory(base, params.root, f"set data.{name}.root to a folder that the generator `objects` wrote")
    tables = Tables()
    lines = read_text(root / "scenes.jsonl", "scene graphs").splitlines()
    for number, line in enumerate(lines, 1):
        provenance = f"scenes.jsonl:{number}"
        with tables.record("images", provenance):
            scene = Scene.from_dict(json.loads(line))
            image_id = join_id(name, scene.image_id)
            path = str(root / "images" / f"COCO_scenes_{int(scene.image_id):012d}.png")
            tables["images"].append(
                image_row(image_id, source=name, split=scene.split, path=path, provenance=provenance)
            )
            for row in _rows(scene, image_id, provenance):
                tables["expressions"].append(row)
    return tables


def _rows(scene: Scene, image_id: str, provenance: str) -> Iterator[Row]:
    for number, item in enumerate(scene.objects):
        if text := expression(item, scene):
            yield {
                "expression_id": f"{image_id}/{number}",
                "image_id": image_id,
                "text": text,
                "boxes": [[float(v) for v in item.box]],
                "provenance": provenance,
            }


def expression(item: SceneObject, scene: Scene) -> str:
    """Return the shortest expression that is true of this object only; empty if no expression is."""
    others = [other for other in scene.objects if other is not item and other.shape == item.shape]
    for count in range(len(ATTRIBUTES) + 1):
        for chosen in combinations(ATTRIBUTES, count):
            same = [o for o in others if all(getattr(o, name) == getattr(item, name) for name in chosen)]
            if not same:
                return _phrase(item, chosen)
            for place, words in PHRASES.items():
                if is_at(item, place) and not any(is_at(o, place) for o in same) and count:
                    return f"{_phrase(item, chosen)} {words}"
    return ""


def _phrase(item: SceneObject, chosen: tuple[str, ...]) -> str:
    """Return "the small striped red circle" with the chosen attributes only."""
    adjectives = [getattr(item, name) for name in ("size", "texture", "color") if name in chosen]
    return " ".join(["the", *adjectives, item.shape])
