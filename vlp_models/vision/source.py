"""What the features stage draws regions from: a detector, symbols, or imported files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vlp_models.data.sample import RegionArrays

Row = Mapping[str, Any]  # of the images table


class RegionSource(Protocol):
    """Attributes describe every region it returns.

    classes     the background first; empty: no class known
    by_content  whether an image's regions follow from its file alone, and not from other files beside it
    device      that computes them
    """

    detector_id: str
    classes: tuple[str, ...]
    feature_dim: int
    by_content: bool
    device: str

    def regions(
        self, images: Sequence[Row], advance: Callable[[int], None]
    ) -> tuple[list[RegionArrays], list[dict[str, Any]]]:
        """The regions of each image, and rows of the quarantine table for what was left out.

        advance: told how many more images are done.
        """
        ...


def left_out(image: Row, rule: str, reason: str, provenance: str) -> dict[str, Any]:
    """A row of the quarantine table."""
    return {
        "table": "features",
        "row_id": image["image_id"],
        "rule": rule,
        "reason": reason,
        "provenance": provenance,
    }
