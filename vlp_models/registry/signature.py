"""What a registered model takes and gives, in MLflow's terms, and an example of a request."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageDraw

from vlp_models.tasks import task_class

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
