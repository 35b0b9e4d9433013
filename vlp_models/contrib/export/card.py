"""The model card of an export, and the license that it states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlp_models.common.plugins import import_target
from vlp_models.contrib.export.licenses import BorrowedWeights
from vlp_models.models import family_class
from vlp_models.registry.card import UNSEEN, describe_vocabulary, score_table
from vlp_models.tasks import task_class
from vlp_models.vision import EXTRACTORS

if TYPE_CHECKING:
    from vlp_models.models.checkpoint_info import CheckpointInfo

PIPELINE_TAGS = {"captioning": "image-to-text", "vqa": "visual-question-answering"}  # the Hub's names of tasks
HOLDS_CAPTIONS = " The folder search/ holds captions of the training images, which the model looks up."
# As packages name their licenses -> the Hugging Face Hub's identifier
IDENTIFIERS = {
    **dict.fromkeys(("apache-2.0", "apache 2.0", "apache license 2.0", "apache 2.0 license"), "apache-2.0"),
    **dict.fromkeys(("apache software license", "apache license, version 2.0"), "apache-2.0"),
    **dict.fromkeys(("mit", "mit license"), "mit"),
    **dict.fromkeys(("bsd", "bsd license"), "bsd"),
    **{name: name for name in ("bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "unlicense")},
    **{name: name for name in ("cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0", "gpl-3.0", "lgpl-3.0", "mpl-2.0")},
}


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
    # The model, and what reads images for it if it reads regions.
    target = EXTRACTORS.get(params.get("features", {}).get("source", "")) if info.detector_id else None
    readers = [family_class(info.family), *([import_target(target)] if target else [])]
    packages = sorted({name for reader in readers for name in getattr(reader, "packages", ())})
    needed = f" It needs `pip install {' '.join(packages)}`, too." if packages else ""
    keys = [key for key in ("git_commit", "run", "model", "family", "variant", "seed") if key in lineage]
    facts = "\n".join(f"- {key}: `{lineage[key]}`" for key in keys)
    text = yaml.safe_dump({key: value for key, value in front.items() if value}, sort_keys=False, allow_unicode=True)
    return f"""---
{text}---

# {title}

A model of the family {info.family} for {info.task}, made with vlp-flows.{needed}

```python
from vlp_models import VLP

model = VLP.from_pretrained("PATH OR REPOSITORY")
model.{task_class(info.task).example}
```

## Scores

{score_table(reported) if reported else "None are registered."}

In percent, except for ranks; intervals over the test images. A score without an interval has too few test images.
{UNSEEN} {describe_vocabulary(lineage.get("vocabulary"))}
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


def hub_identifier(borrowed: list[BorrowedWeights]) -> str:
    """Return the Hub's identifier of the license that all borrowed weights have; `other` if they have no single one.

    `unknown` without borrowed weights: no license is stated.
    """
    if not borrowed:
        return "unknown"
    names = {IDENTIFIERS.get(weights.license.lower(), "other") for weights in borrowed}
    return names.pop() if len(names) == 1 else "other"
