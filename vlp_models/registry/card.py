"""The model card: what a registered version is, in words a stranger can act on."""

from __future__ import annotations

from typing import Any

from vlp_models.models.info import CheckpointInfo


def model_card(
    *,
    name: str,
    info: CheckpointInfo,
    scores: list[dict[str, Any]],
    lineage: dict[str, Any],
    not_served: str = "",
    looks_up: bool = False,
) -> str:
    """Markdown for one registered model: use, figures with intervals, data, how to rebuild it.

    Args:
        not_served: why it can't predict from an image; empty: it can.
        looks_up: whether the bundle holds captions of what it learnt from (tasks/caption_memory.py).
    """
    rows = ["| dataset | split | metric | value | 95% interval | n |", "|---|---|---|---|---|---|"]
    for score in scores:
        value = "not computed" if score.get("value") is None else f"{score['value']:.2f}"
        interval = f"{score['low']:.2f} to {score['high']:.2f}" if score.get("low") is not None else ""
        place = f"{score['dataset']} | {score['split']} | {score['metric']}"
        rows.append(f"| {place} | {value} | {interval} | {score.get('n', '')} |")
    facts = "\n".join(f"- {key}: `{value}`" for key, value in lineage.items())
    sizes = ("hidden", "heads", "intermediate", "layers", "patch")
    size = ", ".join(f"{key} {info.model_config[key]}" for key in sizes if key in info.model_config)
    served = f"It is not served: {not_served}." if not_served else "Input: an image, and a text where the task has one."
    regions = (
        f"""The bundle holds the detector or backbone whose region features it was trained on
(`{info.detector_id}`); with another detector it refuses to load."""
        if info.detector_id
        else "It reads no regions: the bundle holds no detector."
    )
    holds = "The bundle holds the captions that it learnt from, and looks them up." if looks_up else ""
    return f"""# {name}

{info.family.upper()} (model `{info.name}`) fine-tuned for {info.task}. Size: {size or "see config.json"}.
{served} {regions} {holds}

## Figures
{chr(10).join(rows)}

Trained on the datasets named in the lineage. Figures on synthetic scenes say nothing about photographs.

## Lineage
{facts}
"""
