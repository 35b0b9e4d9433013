"""What a model shows of itself in the report: groups of image patches, such as those that one of its codes gathers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_IMAGES = 256  # of the val split, that a model is shown for its figures


@dataclass(frozen=True, kw_only=True)
class Patch:
    """box: x1, y1, x2, y2 as fractions of the image's width and height."""

    image_id: str
    box: tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str
    note: str
    patches: tuple[Patch, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """about: what is shown, in a sentence or two."""

    title: str
    about: str
    groups: tuple[Group, ...]

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Figure:
        groups = tuple(
            Group(
                name=group["name"],
                note=group["note"],
                patches=tuple(Patch(image_id=p["image_id"], box=tuple(p["box"])) for p in group["patches"]),
            )
            for group in value["groups"]
        )
        return cls(title=value["title"], about=value["about"], groups=groups)
