"""The model card: what a registered version is, in words a stranger can act on."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageDraw

from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.tasks import task_class


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


SIDE = 64  # of the example's picture
QUESTION = "is there a circle?"


def signature(task: str, predicted: Mapping[str, Any]) -> Any:
    """
    Args:
        predicted: what the model said of an image; empty where it is not served, and gives nothing.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    columns: list[Any] = [ColSpec(AnyType(), "image")]
    if _asks(task):
        columns.append(ColSpec(DataType.string, "text"))
    outputs: list[Any] = [ColSpec(_type_of(value), name) for name, value in predicted.items()]
    return ModelSignature(inputs=Schema(columns), outputs=Schema(outputs) if outputs else None)


def example(task: str) -> Any:
    """A request of one row, with a drawn picture: none of the data leaves with the model."""
    import pandas as pd

    words = task_class(task).words
    if words is None:
        return None
    picture = drawn()
    row: dict[str, Any] = {"image": picture if words.images == 1 else [picture] * words.images}
    return pd.DataFrame([row | ({"text": QUESTION} if words.text else {})])


def drawn() -> str:
    """A red circle on grey, PNG in base64."""
    image = Image.new("RGB", (SIDE, SIDE), (200, 200, 200))
    ImageDraw.Draw(image).ellipse((16, 16, 48, 48), fill=(220, 30, 30))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _asks(task: str) -> bool:
    words = task_class(task).words
    return words is not None and bool(words.text)


def _type_of(value: Any) -> Any:
    """Lists of equal things are arrays; what has no one type (an answer with its probability) may be anything."""
    from mlflow.types import DataType
    from mlflow.types.schema import AnyType, Array

    plain = {bool: DataType.boolean, int: DataType.long, float: DataType.double, str: DataType.string}
    if type(value) in plain:
        return plain[type(value)]
    if isinstance(value, (list, tuple)) and value:
        kinds = [_type_of(item) for item in value]
        if all(kind == kinds[0] for kind in kinds) and not isinstance(kinds[0], AnyType):
            return Array(kinds[0])
    return AnyType()
