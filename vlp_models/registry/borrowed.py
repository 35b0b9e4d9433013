"""The weights of others that a registered version started from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlp_models.common.packages import PREFIX


def borrowed_sources(lineage: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (role, source, timm's name of the architecture) of the weights of others, from a version's lineage record.

    They are those that its chain of checkpoints and its params name, and each checkpoint that has changed since, whose
    own origin is unknown. Role: `text weights`, `detector`, ... Source: as in params.yaml.
    """
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
            for part in backbone.get("models", [backbone]):
                yield "backbone", part["weights"], part.get("model", "")
        elif features.get("source") == "detector" and detector.get("source") == "weights":
            yield "detector", detector["weights"], ""
    tokenizer = params.get("tokenizer", {})
    if tokenizer.get("source") == "vocab" and tokenizer["vocab"].startswith(PREFIX):
        yield "vocabulary", tokenizer["vocab"], ""
