"""How a registered version describes itself: its model card, its MLflow signature and an example request."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

from vlp_models.data.tables import SPLITS
from vlp_models.registry.promotion.gate_rule import find_best_baseline
from vlp_models.tasks import task_class

if TYPE_CHECKING:
    from vlp_models.models.checkpoint_info import CheckpointInfo

UNSEEN = "Unseen items: test items whose image and sentence have no near-duplicate in the training data."
EXAMPLE_SIDE = 64  # pixels
EXAMPLE_TEXT = "is there a circle?"


def make_model_card(
    *,
    name: str,
    headline: str,
    info: CheckpointInfo,
    scores: list[dict[str, Any]],
    lineage: Mapping[str, Any],
    vocabulary: Mapping[str, Any] | None = None,
    not_served: str = "",
    holds_captions: bool = False,
) -> str:
    """Return the model card of one version as Markdown: use, scores with intervals, data, how to rebuild it.

    Args:
        headline: its main score (`describe_score`).
        vocabulary: reports/tokenizer.json.
        not_served: why it cannot predict from an image; empty: it can.
        holds_captions: whether the bundle holds training captions to look up (tasks/caption_search.py).
    """
    sizes = ("hidden", "heads", "intermediate", "layers", "patch")
    size = ", ".join(f"{key} {info.model_config[key]}" for key in sizes if key in info.model_config)
    use = f"Not served: {not_served}." if not_served else "Input: an image, and a text if the task takes one."
    regions = (
        f" The bundle holds the detector or backbone whose region features it was trained on (`{info.detector_id}`); "
        "with another detector it refuses to load."
    )
    use += regions if info.detector_id else " It reads no regions: the bundle holds no detector."
    use += " The bundle holds its training captions and looks them up." if holds_captions else ""
    facts = "\n".join(f"- {key}: `{value}`" for key, value in lineage.items())
    return f"""# {name}

{headline}

The model `{info.name}` of the family {info.family}, for the task {info.task}. Size: {size or "see config.json"}.
{use}

## Scores
{score_table(scores)}

{UNSEEN}
{describe_vocabulary(vocabulary)}

The lineage names the datasets. Scores on synthetic scenes say nothing about photographs.

## Lineage
{facts}
"""


def describe_vocabulary(report: Mapping[str, Any] | None) -> str:
    """Return which part of CIDEr-D texts keep when encoded and decoded: with the vocabulary no caption scores higher.

    Args:
        report: reports/tokenizer.json; of older versions it lacks the shares.
    """
    shares = [f"{name} {share:.1f}%" for name, share in (report or {}).get("decoded_share", {}).items()]
    return f"CIDEr-D that the vocabulary allows: {', '.join(shares)}." if shares else ""


def describe_score(score: Mapping[str, Any], direction: str) -> str:
    """Return one score with its interval and its best baseline; without markup, for MLflow's table of runs."""
    interval = f" ({score['low']:.1f} to {score['high']:.1f})" if score.get("low") is not None else ""
    text = f"{score['metric']} {score['value']:.1f}{interval} on {score['dataset']} {score['split']}"
    best = find_best_baseline(score, direction)
    return text + (f"; best baseline: {best[0]} {best[1]:.1f}" if best else "")


def score_table(scores: Sequence[Mapping[str, Any]]) -> str:
    """Return the records of scores.json as a Markdown table: each score and its baselines, and both on unseen items.

    The test split comes first.
    """
    columns = ["dataset", "split", "metric", "value", "95% interval", "n", "baselines"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for score in sorted(scores, key=lambda score: -SPLITS.index(score["split"])):
        unseen = (score.get("leakage") or {}).get("without_both") or {}
        parts = {score["metric"]: score}
        if unseen and unseen["n"] < score["n"]:
            parts[f"{score['metric']}, unseen items"] = unseen
        for metric, scored in parts.items():
            value = "not computed" if scored.get("value") is None else f"{scored['value']:.2f}"
            interval = f"{scored['low']:.2f} to {scored['high']:.2f}" if scored.get("low") is not None else ""
            baselines = ", ".join(
                f"{name} {baseline['value'] if isinstance(baseline, Mapping) else baseline:.2f}"
                for name, baseline in (scored.get("baselines") or {}).items()
            )
            cells = [score["dataset"], score["split"], metric, value, interval, str(scored.get("n", "")), baselines]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def make_signature(task: str, prediction: Mapping[str, Any]) -> Any:
    """Return the MLflow signature of a task's model.

    Args:
        prediction: what the model returned for one image; empty if it is not served, which leaves the outputs open.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    request = task_class(task).request
    # Any type and optional: the model itself checks both (pyfunc_model.py). MLflow's own refusal would repeat the whole
    # request.
    names = ["image"] if request is None or not request.text else ["image", "text"]
    columns: list[Any] = [ColSpec(AnyType(), name, required=False) for name in names]
    outputs: list[Any] = [ColSpec(_column_type(value), name) for name, value in prediction.items()]
    return ModelSignature(inputs=Schema(columns), outputs=Schema(outputs) if outputs else None)


def make_example(task: str) -> Any:
    """Return an example request of one row; its image is drawn, so that no training data leaves with the model."""
    import pandas as pd

    request = task_class(task).request
    if request is None:
        return None
    image = _draw_example_image()
    row: dict[str, Any] = {"image": image if request.images == 1 else [image] * request.images}
    return pd.DataFrame([row | ({"text": EXAMPLE_TEXT} if request.text else {})])


def _draw_example_image() -> str:
    """Return a red circle on gray as a base64 PNG."""
    image = Image.new("RGB", (EXAMPLE_SIDE, EXAMPLE_SIDE), (200, 200, 200))
    ImageDraw.Draw(image).ellipse((16, 16, 48, 48), fill=(220, 30, 30))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _column_type(value: Any) -> Any:
    """Return MLflow's type of a value: lists of one type are arrays, mixed ones (answer, probability) may be any."""
    from mlflow.types import DataType
    from mlflow.types.schema import AnyType, Array

    scalars = {bool: DataType.boolean, int: DataType.long, float: DataType.double, str: DataType.string}
    # `type`, not `isinstance`: True is an integer as well.
    if type(value) in scalars:
        return scalars[type(value)]
    if isinstance(value, (list, tuple)) and value:
        # An array is of one kind; a list like (answer, probability) is of several.
        kinds = [_column_type(item) for item in value]
        if all(kind == kinds[0] for kind in kinds) and not isinstance(kinds[0], AnyType):
            return Array(kinds[0])
    return AnyType()
