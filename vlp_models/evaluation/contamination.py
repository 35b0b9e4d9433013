"""Train-test contamination: test items whose image or sentence has a near-duplicate in the training data.

Images: `validate` lists near-duplicates across splits and removes them from training, unless
`validate.near_duplicates.action` keeps them. Sentences are compared with every text of the training rows of the run
and of the runs it starts from. Weights imported from elsewhere may have been trained on more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.io import read_json, scratch_directory
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates.leakage import LEAKS, compare_sentences
from vlp_models.data.joins import Database
from vlp_models.data.mapped import MappedValues
from vlp_models.data.sample import Sample
from vlp_models.data.shards.contents import find_changed_data, trained_on_inputs
from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, SPLITS, read_batches, stream_table
from vlp_models.data.views import TABLES
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.score import Evidence, Score
from vlp_models.params import Params, split_start

MIN_ITEMS = 20  # items that must remain to report a score
# Keeps the rows whose image is a training image of these datasets.
_OF_IMAGES = "SEMI JOIN images i ON {}.image_id = i.image_id"


@dataclass(frozen=True, kw_only=True)
class LeakedItems:
    """Ids of samples whose image (`images`) or whose sentence (`texts`) has a near-duplicate in the training data."""

    images: frozenset[str]
    texts: frozenset[str]


class TrainingData:
    """The training split of some datasets, to compare test samples with.

    Args:
        sources: datasets; empty: all.
        scratch: folder for the texts, which are removed with this object.
    """

    def __init__(self, validated: Path, sources: Sequence[str], scratch: Path) -> None:
        with Database.within(scratch) as database:
            images = stream_table("images", validated, ["image_id", "source", "split"])
            training_images = (rows.filter(_is_training_row(rows, sources)) for rows in images)
            database.load("images", training_images, pa.schema([SCHEMAS["images"].field("image_id")]))
            self._copied: set[str] = set()
            if (validated / LEAKS).exists():
                leaks = read_batches([validated / LEAKS], BATCH_ROWS, ["image_id", "copy_of"])
                database.load("leaks", leaks, pa.schema([("image_id", pa.string()), ("copy_of", pa.string())]))
                # `leaks` has (training image, the val or test image that it is a copy of).
                copies = database.stream(f"SELECT DISTINCT copy_of FROM leaks l {_OF_IMAGES.format('l')}")
                self._copied = {name for rows in copies for name in rows["copy_of"].to_pylist()}
            text_files = ExitStack()
            folder = text_files.enter_context(scratch_directory(scratch / "contamination"))
            # The folder goes when this object is garbage-collected, or when the process ends.
            weakref.finalize(self, text_files.close)
            texts = (rows["text"].to_pylist() for rows in _training_texts(database, validated, sources))
            self._texts = MappedValues(folder / "texts.arrow", texts, pa.string())

    def find_leaked(self, samples: Sequence[Sample]) -> LeakedItems:
        """Find the samples with a near-duplicate; a sample's sentences are its text, or the captions of its image."""
        images = {s.sample_id for s in samples if not self._copied.isdisjoint(s.image_ids)}
        sentences = {s.sample_id: s.values.get("captions") or [s.text] for s in samples}
        # Many samples share a sentence, so each is compared once.
        unique = list(dict.fromkeys(text for sample_texts in sentences.values() for text in sample_texts))
        is_leaked = dict(zip(unique, compare_sentences(unique, self._texts), strict=True))
        texts = {name for name, sample_texts in sentences.items() if any(is_leaked[text] for text in sample_texts)}
        return LeakedItems(images=frozenset(images), texts=frozenset(texts))


def read_training_data(params: Params, workspace: Workspace, run: str) -> TrainingData | None:
    """Return the training data of a run; None if the run was trained on data that is no longer in the workspace."""
    config = workspace.checkpoint(f"finetune/{run}") / "config.json"
    if not config.exists():
        return None
    inputs = (read_json(config).get("provenance") or {}).get("inputs", {})
    if not trained_on_inputs(inputs) or find_changed_data(workspace, inputs):
        return None
    return TrainingData(workspace.validated, training_sources(params, run), workspace.root / ".work")


def training_sources(params: Params, run: str) -> list[str]:
    """Return the datasets that a fine-tuning run and the pretrainings before it are trained on; empty: all."""
    datasets: dict[str, None] = {}
    for checkpoint in params.chain(f"finetune/{run}"):
        kind, name = split_start(checkpoint)
        if kind == "initial":
            continue
        sources = (params.pretrain if kind == "pretrain" else params.finetune)[name].sources  # type: ignore[index]
        # One training on all datasets makes the union all of them.
        if not sources:
            return []
        datasets |= dict.fromkeys(sources)
    return list(datasets)


def score_without_leaked(
    score: Score, leaked: LeakedItems, own_interval: Mapping[str, float | None], *, resamples: int, seed: int
) -> dict[str, Any] | None:
    """Score again without the leaked items, in two steps: without leaked images, and without leaked sentences too.

    Args:
        own_interval: `low` and `high` of the score, reused if nothing leaked.

    Returns:
        {images, texts: number of leaked items; without_images, without_both: {value, low, high, n}, or None if fewer
        than `MIN_ITEMS` remain}; None for a score that is not kept item by item.
    """
    evidence = score.evidence
    if evidence is None or not score.kept:
        return None
    # Of each item, the ids of its samples.
    ids_of_items = evidence.samples or [[str(item)] for item in evidence.items or evidence.groups]

    def positions(leaked_ids: frozenset[str]) -> set[int]:
        # A caption's item id is `<image>#<number>`.
        def is_leaked(name: str) -> bool:
            return name in leaked_ids or name.rpartition("#")[0] in leaked_ids

        return {i for i, ids in enumerate(ids_of_items) if any(map(is_leaked, ids))}

    def score_rest(left_out: set[int]) -> dict[str, Any] | None:
        remaining = [i for i in range(len(ids_of_items)) if i not in left_out]
        if len(remaining) < MIN_ITEMS:
            return None
        # Nothing leaked: the score and its interval are already known.
        if not left_out:
            return (
                None if score.value is None else {"value": round(score.value, 4), **own_interval, "n": len(remaining)}
            )
        part = Evidence(
            groups=[evidence.groups[i] for i in remaining],
            parts_NK=evidence.parts_NK[remaining],
            statistic=evidence.statistic,
        )
        # The statistic of the sum over all remaining items: (N, K) -> (1, K) -> one value.
        value = float(part.statistic(part.parts_NK.sum(axis=0, keepdims=True))[0])
        ends = interval(part, resamples=resamples, seed=seed)
        low, high = (None, None) if ends is None else (round(ends[0], 4), round(ends[1], 4))
        return {"value": round(value, 4), "low": low, "high": high, "n": len(remaining)}

    images, texts = positions(leaked.images), positions(leaked.texts)
    without_images = score_rest(images)
    return {
        "images": len(images),
        "texts": len(texts),
        "without_images": without_images,
        # If each item with a leaked sentence has a leaked image, the second step leaves out no more.
        "without_both": without_images if texts <= images else score_rest(images | texts),
    }


def _training_texts(database: Database, validated: Path, sources: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the different texts of the training rows, table by table; `database` has the training images."""
    for name, view in TABLES.items():
        if not view.has_text:
            continue
        if view.has_image:
            columns, condition = ["image_id", "text"], _OF_IMAGES.format("t")
            rows = stream_table(name, validated, columns)
        else:
            columns, condition = ["text"], ""
            # These rows have no image, whose split could be looked up; the rows have their own.
            batches = stream_table(name, validated, ["source", "split", "text"])
            rows = (batch.filter(_is_training_row(batch, sources)) for batch in batches)
        # Each table replaces the one before in the database.
        database.load("texts", rows, pa.schema([SCHEMAS[name].field(column) for column in columns]))
        yield from database.stream(f"SELECT DISTINCT text FROM texts t {condition}")


def _is_training_row(rows: pa.Table, sources: Sequence[str]) -> Any:
    """Return a mask of the rows of the training split and of these datasets."""
    mask = pc.equal(rows["split"], SPLITS[0])
    if sources:
        mask = pc.and_(mask, pc.is_in(rows["source"], value_set=pa.array(sources, pa.string())))
    return mask
