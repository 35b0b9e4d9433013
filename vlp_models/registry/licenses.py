"""The weights of others that a registered version started from, and their licenses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vlp_models.common.packages import PREFIX, library_of


@dataclass(frozen=True, kw_only=True)
class BorrowedWeights:
    """What was not trained in the project.

    role: `text weights`, `detector`, ... source: as in params.yaml. license: empty if unknown.
    """

    role: str
    source: str
    license: str


def find_borrowed(lineage: Mapping[str, Any]) -> list[BorrowedWeights]:
    """Return the weights of others in a version, from its lineage record.

    They are those that its chain of checkpoints and its params name, and each checkpoint that has changed since, whose
    own origin is unknown.
    """
    return [
        BorrowedWeights(role=role, source=source, license=_find_license(source, architecture))
        # Each source once, in the order in which they were found.
        for role, source, architecture in dict.fromkeys(_sources(lineage))
    ]


def _sources(lineage: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (role, source, timm's name of the architecture)."""
    params: Mapping[str, Any] = lineage.get("params", {})
    # The models of its chain of checkpoints, and checkpoints that have changed since they were trained from (`note`).
    parents, models = lineage.get("parents", []), {lineage.get("model", "")}
    for parent in parents:
        if parent["role"] == "starts from":
            # `checkpoints/initial/MODEL` -> `MODEL`; an empty string for any other checkpoint, which matches no model.
            models |= {parent["path"].partition("initial/")[2]}
            if parent.get("note"):
                yield "checkpoint", parent["path"], ""
    for name, model in params.get("models", {}).items():
        if name in models:
            config = model.get("config", {})
            backbone = config.get("stem_backbone") or config.get("backbone") or ""
            for role, key, architecture in (
                ("imported", "init", ""),
                ("image weights", "image_init", backbone),
                ("text weights", "text_init", ""),
            ):
                if model.get(key):
                    yield role, model[key], architecture
    # What its regions were computed with.
    if any(parent["role"] == "detector" for parent in parents):
        features, detector = params.get("features", {}), params.get("detector", {})
        if isinstance(backbone := features.get(features.get("source")), Mapping):
            yield "backbone", backbone["weights"], backbone.get("model", "")
        elif features.get("source") == "detector" and detector.get("source") == "weights":
            yield "detector", detector["weights"], ""
    tokenizer = params.get("tokenizer", {})
    if tokenizer.get("source") == "vocab" and tokenizer["vocab"].startswith(PREFIX):
        yield "vocabulary", tokenizer["vocab"], ""


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
