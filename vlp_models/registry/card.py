"""How a registered version describes itself: its model cards, its MLflow signature and an example request."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

from vlp_models.registry.licenses import BorrowedWeights
from vlp_models.tasks import task_class

if TYPE_CHECKING:
    from vlp_models.models.checkpoint_info import CheckpointInfo

PIPELINE_TAGS = {"captioning": "image-to-text", "vqa": "visual-question-answering"}  # the Hub's names of tasks
USES = {
    "captioning": 'model.caption("photo.jpg")',
    "vqa": 'model.answer("photo.jpg", "What color is the cat?")',
    "nlvr": 'model.judge("image.png", "There is a yellow circle.")',
    "nlvr2": 'model.judge(["left.png", "right.png"], "Both images show a dog.")',
    "entailment": 'model.predict("photo.jpg", "Two dogs are playing.")',
    "retrieval": 'model.search("a dog in the snow", ["a.jpg", "b.jpg"])',
}
HOLDS_CAPTIONS = " The folder search/ holds captions of the training images, which the model looks up."
EXAMPLE_SIDE = 64  # pixels
EXAMPLE_TEXT = "is there a circle?"


def make_model_card(
    *,
    name: str,
    info: CheckpointInfo,
    scores: list[dict[str, Any]],
    lineage: Mapping[str, Any],
    not_served: str = "",
    holds_captions: bool = False,
) -> str:
    """Return the model card of one version as Markdown: use, scores with intervals, data, how to rebuild it.

    Args:
        not_served: why it cannot predict from an image; empty: it can.
        holds_captions: whether the bundle holds training captions to look up (tasks/caption_search.py).
    """
    sizes = ("hidden", "heads", "intermediate", "layers", "patch")
    size = ", ".join(f"{key} {info.model_config[key]}" for key in sizes if key in info.model_config)
    use = f"Not served: {not_served}." if not_served else "Input: an image, and a text if the task takes one."
    if info.detector_id:
        use += (
            " The bundle holds the detector or backbone whose region features it was trained on "
            f"(`{info.detector_id}`); with another detector it refuses to load."
        )
    else:
        use += " It reads no regions: the bundle holds no detector."
    if holds_captions:
        use += " The bundle holds its training captions and looks them up."
    facts = "\n".join(f"- {key}: `{value}`" for key, value in lineage.items())
    return f"""# {name}

{info.family.upper()} (model `{info.name}`) fine-tuned for {info.task}. Size: {size or "see config.json"}.
{use}

## Scores
{_score_table(scores)}

Trained on the datasets named in the lineage. Scores on synthetic scenes say nothing about photographs.

## Lineage
{facts}
"""


def make_hub_card(
    *,
    title: str,
    info: CheckpointInfo,
    scores: Sequence[Mapping[str, Any]],
    lineage: Mapping[str, Any],
    license: str,
    borrowed: Sequence[BorrowedWeights],
    holds_captions: bool = False,
    int8: str = "",
) -> str:
    """Return the model card of an export: YAML that the Hugging Face Hub reads, then Markdown.

    Args:
        scores: records of scores.json. lineage: the record of `vlp lineage`.
        license: the Hub's identifier.
        borrowed: weights of others that the model started from.
        int8: what the test of the weights of 8 bits found; empty: the weights are those of the scores.
    """
    import yaml

    assert info.task is not None
    # Without other decoders, such as `CIDEr (greedy)`, and differences between them.
    reported = [score for score in scores if "(" not in score["metric"] and "gain over" not in score["metric"]]
    params = lineage.get("params", {})
    # A run may restrict its datasets (`sources`); without it, it was trained on all of them.
    sources = params.get("finetune", {}).get(lineage.get("run", ""), {}).get("sources", {})
    trained_on = sources or params.get("data", {})
    datasets = list(dict.fromkeys([*trained_on, *(score["dataset"] for score in reported)]))
    front = {
        "library_name": "vlp-flows",
        "license": license,
        # The Hub requires a name and a link for a license that it does not list.
        **({"license_name": "see-model-card", "license_link": "README.md"} if license == "other" else {}),
        **({"pipeline_tag": PIPELINE_TAGS[info.task]} if info.task in PIPELINE_TAGS else {}),
        "tags": ["vlp-flows", "vision-language", info.family, info.task],
        "datasets": datasets,
        "metrics": sorted({score["metric"] for score in reported if score["value"] is not None}),
        "model-index": [{"name": title, "results": _results(info.task, reported)}],
    }
    limit = HOLDS_CAPTIONS if holds_captions else ""
    weights = f"\nThe linear layers have weights of 8 bits; the scores are those of float32. {int8}.\n" if int8 else ""
    keys = [key for key in ("git_commit", "run", "model", "family", "variant", "seed") if key in lineage]
    facts = "\n".join(f"- {key}: `{lineage[key]}`" for key in keys)
    text = yaml.safe_dump({key: value for key, value in front.items() if value}, sort_keys=False, allow_unicode=True)
    return f"""---
{text}---

# {title}

{info.family.upper()} fine-tuned for {info.task} with vlp-flows.

```python
from vlp_models import VLP

model = VLP.from_pretrained("PATH OR REPOSITORY")
{USES.get(info.task, 'model.predict("photo.jpg", "a text, if the task takes one")')}
```

## Scores

{_score_table(reported, with_baselines=True) if reported else "None are registered."}

In percent, except for ranks; intervals over the test images. A score without an interval has too few test images.
{weights}
## Data

{_describe_data(lineage, datasets)}

## Limits

The scores hold for images and texts like those of the datasets above; scores on synthetic scenes say nothing about
photographs. The model repeats what its data states, mistakes and biases included.{limit}

## License

{_describe_license(license, borrowed)}

## Lineage

{facts}
"""


def _results(task: str, scores: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the scores as the results of a model-index: one entry per dataset and split."""
    metrics_of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for score in scores:
        if score["value"] is not None:
            # An identifier for the Hub: `CIDEr` -> `cider`, `R@1` -> `r_1`.
            kind = "".join(c if c.isalnum() else "_" for c in score["metric"].lower())
            metric = {"type": kind, "name": score["metric"], "value": round(float(score["value"]), 2)}
            # Grouped by dataset and split, as a model-index lists them.
            metrics_of.setdefault((score["dataset"], score["split"]), []).append(metric)
    return [
        {
            "task": {"type": PIPELINE_TAGS.get(task, task)},
            "dataset": {"name": dataset, "type": dataset, "split": split},
            "metrics": metrics,
        }
        for (dataset, split), metrics in metrics_of.items()
    ]


def _score_table(scores: Sequence[Mapping[str, Any]], *, with_baselines: bool = False) -> str:
    """Return the records of scores.json as a Markdown table."""
    columns = ["dataset", "split", "metric", "value", "95% interval", "n", *(["baselines"] if with_baselines else [])]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for score in scores:
        value = "not computed" if score.get("value") is None else f"{score['value']:.2f}"
        interval = f"{score['low']:.2f} to {score['high']:.2f}" if score.get("low") is not None else ""
        cells = [score["dataset"], score["split"], score["metric"], value, interval, str(score.get("n", ""))]
        if with_baselines:
            baselines = score.get("baselines") or {}
            cells.append(", ".join(f"{name} {baseline:.2f}" for name, baseline in baselines.items()))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _describe_data(lineage: Mapping[str, Any], datasets: Sequence[str]) -> str:
    counts = lineage.get("data", {}).get("shards", {}).get("counts", {}).get("train", {})
    numbers = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count and name != "shards")
    text = f"Trained on {', '.join(datasets) or 'unknown data'}"
    text += f": {numbers} in the train split." if numbers else "."
    validation = lineage.get("validation")
    if validation:
        text += " The data passed validation." if validation["passed"] else " The data did not pass validation."
    return text


def _describe_license(license: str, borrowed: Sequence[BorrowedWeights]) -> str:
    if not borrowed:
        stated = "No license was stated for this model." if license == "unknown" else f"License: `{license}`."
        return f"{stated} All weights were trained from random initial values."
    sources = "; ".join(f"{w.role} `{w.source}` ({w.license or 'unknown license'})" for w in borrowed)
    return f"License: `{license}`. The model started from weights of others, whose licenses apply as well: {sources}."


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
