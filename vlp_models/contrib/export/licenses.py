"""The weights of others that a registered version started from, and their licenses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vlp_models.common.packages import PREFIX, library_of
from vlp_models.registry.borrowed import borrowed_sources


@dataclass(frozen=True, kw_only=True)
class BorrowedWeights:
    """What was not trained in the project.

    role: `text weights`, `detector`, ... source: as in params.yaml. license: empty if unknown.
    """

    role: str
    source: str
    license: str


def find_borrowed(lineage: Mapping[str, Any]) -> list[BorrowedWeights]:
    """Return the weights of others in a version, from its lineage record, with their licenses."""
    return [
        BorrowedWeights(role=role, source=source, license=_find_license(source, architecture))
        # Each source once, in the order in which they were found.
        for role, source, architecture in dict.fromkeys(borrowed_sources(lineage))
    ]


def _find_license(source: str, architecture: str) -> str:
    """Return the license of a source of weights; empty if it is unknown.

    Args:
        architecture: timm's name, for `timm` without one.
    """
    if source.startswith(PREFIX):
        return license_of(source.removeprefix(PREFIX))
    if library_of(source) == "timm":  # each of timm's weights has a license of its own; that of timm's code is another
        with contextlib.suppress(ImportError, RuntimeError):
            import timm

            # `timm:NAME` names the weights; `timm` alone means those of the architecture.
            config: Any = timm.get_pretrained_cfg(source.partition(":")[2] or architecture)
            return str((config and config.license) or "")
        return ""
    return license_of("torchvision") if library_of(source) else ""


def license_of(name: str) -> str:
    """Return the license that an installed package's metadata names; empty if it names none, or is not installed."""
    try:
        fields = metadata.metadata(name).json
    except metadata.PackageNotFoundError:
        return ""
    # Three fields name a license: an SPDX expression, free text (perhaps all of the license), or classifiers.
    text = next((line.strip() for line in str(fields.get("license", "")).splitlines() if line.strip()), "")
    classified = [c.rpartition(" :: ")[2] for c in fields.get("classifier", ()) if c.startswith("License :: ")]
    named = str(fields.get("license_expression") or text or ", ".join(classified))
    return "" if named.lower() in ("unknown", "other", "none") else named
