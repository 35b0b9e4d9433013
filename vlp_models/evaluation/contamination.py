"""Train-test contamination: test items whose image or sentence has a near-duplicate in the training data.

Images: `validate` lists near-duplicates across splits and removes them from training, unless
`validate.near_duplicates.action` keeps them. Sentences are compared with every text of the training rows of the run
and of the runs it starts from. Weights imported from elsewhere may have been trained on more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
from vlp_models.metrics.unseen import SEEN_IMAGE, SEEN_TEXT
from vlp_models.params import Params, split_start

# Keeps the rows whose image is a training image of these datasets.
_OF_IMAGES = "SEMI JOIN images i ON {}.image_id = i.image_id"


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

    def find_seen(self, samples: Sequence[Sample]) -> dict[str, list[str]]:
        """Return sample id -> `seen=image`, `seen=text` or both, for the samples with a near-duplicate.

        A sample's sentences are its text, or the captions of its image.
        """
        sentences = {s.sample_id: s.values.get("captions") or [s.text] for s in samples}
        # Many samples share a sentence, so each is compared once.
        unique = list(dict.fromkeys(text for sample_texts in sentences.values() for text in sample_texts))
        is_seen = dict(zip(unique, compare_sentences(unique, self._texts), strict=True))
        seen: dict[str, list[str]] = {}
        for sample in samples:
            if not self._copied.isdisjoint(sample.image_ids):
                seen.setdefault(sample.sample_id, []).append(SEEN_IMAGE)
            if any(is_seen[text] for text in sentences[sample.sample_id]):
                seen.setdefault(sample.sample_id, []).append(SEEN_TEXT)
        return seen


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
