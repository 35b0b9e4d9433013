"""Eight synthetic scenes as a complete dataset: tables, shards and a tokenizer, for the checks of this package.

Every view (data/views) has rows about them, every image has regions and pixels, so any family or task can read them.
The same eight scenes each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import write_json
from vlp_models.data.inputs import InputReader, ModelInputs
from vlp_models.data.pixels import encode
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset, ShardsManifest, read_manifest
from vlp_models.data.shards.write import ImageRecord, ShardWriter
from vlp_models.data.tables import SCHEMAS, write_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import OTHER_IMAGES, TABLES, VIEWS, Column, View
from vlp_models.models import DataFacts
from vlp_models.synthetic.scenes.captions import write_captions
from vlp_models.synthetic.scenes.questions import Balance, annotate, choose
from vlp_models.synthetic.scenes.scene import Scene, render, sample_scene
from vlp_models.vision.simple_regions import SymbolSource

SCENES, SIDE = 8, 64
SOURCE, SPLIT = "scenes", "train"
SEED = 11
MAX_TEXT_LEN, MAX_REGIONS = 32, 12
ANSWERS = 16  # labels of question answering
Rows = dict[str, list[dict[str, Any]]]  # table -> rows


@dataclass(frozen=True)
class SampleScenes:
    """The dataset in a folder: `validated` and `shards` as the stages of these names write them, and `tokenizer`."""

    root: Path
    tokenizer: Tokenizer
    manifest: ShardsManifest

    @classmethod
    def open(cls, root: Path) -> SampleScenes:
        return cls(root, Tokenizer.load(root / "tokenizer"), read_manifest(root / "shards"))

    @property
    def facts(self) -> DataFacts:
        return DataFacts.of(self.tokenizer, self.manifest)

    def reader(self, inputs: ModelInputs, view: str) -> InputReader:
        """Return the reader of a model that is pretrained on this view."""
        inputs = inputs.for_view(VIEWS[view])
        return InputReader(inputs, self.tokenizer, max_text_len=MAX_TEXT_LEN, max_regions=MAX_REGIONS)

    def samples(self, view: str, reader: InputReader, *, seeded: bool = False, limit: int = 16) -> list[Sample]:
        """Return samples of a view with what the reader needs of their images; `seeded` as in training.

        Neighbors have the same image.
        """
        dataset = ShardDataset(self.root / "shards", SPLIT, view, **reader.flags)
        samples = dataset.__getitems__(range(min(limit, len(dataset))))
        # one seed per image: texts of one image share it, as the training loader draws them
        return [replace(s, seed=int(s.image_id.rpartition("/")[2] or 0)) for s in samples] if seeded else samples


def write_sample_scenes(root: Path) -> SampleScenes:
    """Write the dataset into an existing folder; takes less than a second."""
    scenes = [
        sample_scene(_rng(number, 0), image_id=f"{SOURCE}/{number}", split=SPLIT, side=SIDE) for number in range(SCENES)
    ]
    tables = [_rows_of(scene, number) for number, scene in enumerate(scenes)]  # of each scene
    for name, view in TABLES.items():  # all other views, also of plugins
        if name not in tables[0] and view.has_image:
            for number, scene in enumerate(scenes):
                # Rows with several images name the next scene, in a circle.
                other = scenes[(number + 1) % SCENES]
                tables[number][name] = _any_rows(view, scene, other, tables[number]["captions"])
    texts = [
        {
            "text_id": f"{SOURCE}/t{number}",
            "source": SOURCE,
            "split": SPLIT,
            "text": write_captions(scene, _rng(number, 3))[0],
        }
        for number, scene in enumerate(scenes)
    ]
    _write_tables(root / "validated", scenes, tables, texts)
    _write_shards(root / "shards", scenes, tables, texts)
    # Every text about an image goes into the vocabulary.
    words = [text for by_table in tables for name, rows in by_table.items() for text in _words(name, rows)]
    Tokenizer.train(words, size=600, min_frequency=1, lowercase=True).save(root / "tokenizer")
    answers = Counter(row["answers"][0] for by_table in tables for row in by_table["questions"])
    write_json(root / "tokenizer" / "answers.json", [answer for answer, _ in answers.most_common(ANSWERS)])
    return SampleScenes.open(root)


def _rng(number: int, stream: int) -> np.random.Generator:
    # One stream per purpose: another draw for captions leaves the images as they are.
    return np.random.default_rng([SEED, number, stream])


def _rows_of(scene: Scene, number: int) -> Rows:
    """Return the rows of each table with one image: two captions and three questions."""
    image_id, rng = scene.image_id, _rng(number, 1)
    return {
        "captions": [
            {"caption_id": f"{image_id}/c{i}", "text": text} for i, text in enumerate(write_captions(scene, rng)[:2])
        ],
        "questions": [
            {
                "question_id": f"{image_id}/q{i}",
                "text": question.text,
                "question_type": question.kind,
                "answer_type": question.answer_type,
                "answers": [str(answer["answer"]) for answer in annotate(question, rng)],
            }
            for i, question in enumerate(choose(scene, 3, Balance(), rng))
        ],
    }


def _any_rows(view: View, scene: Scene, other: Scene, captions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return two rows of a view: captions as texts, and plain values of each column's type."""
    boxes = [[float(v) for v in item.box] for item in scene.objects]

    def value(column: Column, text: str, number: int) -> Any:
        if column == OTHER_IMAGES:
            return [other.image_id]
        # Both truth values and several numbers occur, so that a task has something to distinguish.
        by_type = {"bool": number == 0, "int32": number, "strings": (text.split() * 4)[:4], "boxes": boxes}
        choices = column.values or (text,)
        return by_type.get(column.type, choices[number % len(choices)])

    return [
        {view.id_column: f"{scene.image_id}/{view.name}{number}"}
        | {column.name: value(column, caption["text"], number) for column in view.columns}
        for number, caption in enumerate(captions)
    ]


def _words(table: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of rows, for the vocabulary."""
    for row in rows:
        for column in TABLES[table].columns:
            if column.name == "text" or column.words:
                value = row[column.name]
                yield from [value] if isinstance(value, str) else value


def _write_tables(
    folder: Path, scenes: Sequence[Scene], tables: Sequence[Rows], texts: Sequence[dict[str, Any]]
) -> None:
    folder.mkdir()
    images = [
        {
            "image_id": scene.image_id,
            "source": SOURCE,
            "split": SPLIT,
            "path": f"{scene.image_id}.png",
            "width": SIDE,
            "height": SIDE,
            "sha256": "0" * 64,
            "provenance": SOURCE,
        }
        for scene in scenes
    ]
    write_table(images, "images", folder)
    for name in TABLES:
        if "image_id" in SCHEMAS[name].names:
            rows = [
                {"image_id": scene.image_id, "provenance": SOURCE, **row}
                for scene, by_table in zip(scenes, tables, strict=True)
                for row in by_table.get(name, ())
            ]
            write_table(rows, name, folder)
    # Rows of `texts` have no image.
    write_table([{**row, "provenance": SOURCE} for row in texts], "texts", folder)
    truth = "".join(json.dumps(scene.to_dict()) + "\n" for scene in scenes)
    (folder / "truth.jsonl").write_text(truth, encoding="utf-8")


def _write_shards(
    folder: Path, scenes: Sequence[Scene], tables: Sequence[Rows], texts: Sequence[dict[str, Any]]
) -> None:
    folder.mkdir()
    objects = [
        {
            "image_id": scene.image_id,
            "category": item.category,
            "attributes": [item.size, item.texture],
            **dict(zip(("x1", "y1", "x2", "y2"), item.box, strict=True)),
        }
        for scene in scenes
        for item in scene.objects
    ]
    source = SymbolSource(objects, MAX_REGIONS)
    images = [{"image_id": scene.image_id, "width": SIDE, "height": SIDE} for scene in scenes]
    # Regions come from the objects of the scene, so no detector is needed.
    regions = source.regions(images, lambda count: None)[0]
    writer = ShardWriter(folder, SPLIT, images_per_shard=len(scenes))
    for number, (scene, rows) in enumerate(zip(scenes, tables, strict=True)):
        record = ImageRecord(
            image_id=scene.image_id,
            source=SOURCE,
            width=SIDE,
            height=SIDE,
            regions=regions[number],
            rows=rows,
            pixels=encode(render(scene, _rng(number, 4))),
            pixels_extension="png",
        )
        writer.add(record)
    writer.add_without_image("texts", texts)
    manifest = {
        "feature_dim": source.feature_dim,
        "classes": list(source.classes),
        "detector_id": source.detector_id,
        "sources": [SOURCE],
        "counts": {SPLIT: writer.close()},
    }
    write_json(folder / "manifest.json", manifest)
