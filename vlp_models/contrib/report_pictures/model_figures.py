"""Figures of a pretrained model: groups of image patches, such as those of one code of a visual dictionary.

A pretraining writes them to reports/figures/pretrain/RUN.json (`FIGURES` in models/__init__.py); the report crops the
patches from the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    """Groups of image patches for the report, such as those mapped to one code. about: a caption of a sentence or
    two."""

    title: str
    about: str
    groups: tuple[Group, ...]

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Figure:
        groups = []
        for group in value["groups"]:
            patches = tuple(Patch(image_id=patch["image_id"], box=tuple(patch["box"])) for patch in group["patches"])
            groups.append(Group(name=group["name"], note=group["note"], patches=patches))
        return cls(title=value["title"], about=value["about"], groups=tuple(groups))
