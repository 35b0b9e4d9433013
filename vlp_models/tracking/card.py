"""The model card: what a registered version is, in words a stranger can act on."""

from __future__ import annotations

from typing import Any


def model_card(*, name: str, config: dict[str, Any], scores: list[dict[str, Any]], lineage: dict[str, Any]) -> str:
    """Markdown for one registered model: use, figures with intervals, data, how to rebuild it."""
    rows = ["| dataset | split | metric | value | 95% interval | n |", "|---|---|---|---|---|---|"]
    for score in scores:
        value = "not computed" if score.get("value") is None else f"{score['value']:.2f}"
        interval = f"{score['low']:.2f} to {score['high']:.2f}" if score.get("low") is not None else ""
        place = f"{score['dataset']} | {score['split']} | {score['metric']}"
        rows.append(f"| {place} | {value} | {interval} | {score.get('n', '')} |")
    facts = "\n".join(f"- {key}: `{value}`" for key, value in lineage.items())
    model_config = config.get("model_config", {})
    size = ", ".join(f"{key} {model_config[key]}" for key in ("hidden", "heads", "intermediate") if key in model_config)
    return f"""# {name}

{config["model"].upper()} fine-tuned for {config["task"]}. Size: {size or "see config.json"}.
Input: an image (and a question or statement). The bundle holds the detector whose region features it was trained on
(`{config.get("detector_id")}`); with another detector it refuses to load.

## Figures
{chr(10).join(rows)}

Trained on the datasets named in the lineage. Figures on synthetic scenes say nothing about photographs.

## Lineage
{facts}
"""
