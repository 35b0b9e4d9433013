"""Captions are true; the generator `sentences` writes them without images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vlp_models.data.formats import read_source
from vlp_models.errors import ParamsError
from vlp_models.params import DatasetParams, GeneratorParams
from vlp_models.synthetic.scenes.dataset import write, write_sentences
from vlp_models.synthetic.scenes.language import VOCABULARY, check, split_words


@pytest.mark.slow
def test_captions_without_misspellings_are_all_true(tmp_path: Path) -> None:
    write(GeneratorParams(generator="objects", seed=2, train=60, val=0, test=0, side=64, misspelled=0.0), tmp_path)
    scenes = {s["image_id"]: s for s in map(json.loads, (tmp_path / "scenes.jsonl").read_text().splitlines())}
    annotations = json.loads((tmp_path / "annotations" / "captions_scenes.json").read_text())["annotations"]
    for row in annotations:
        assert set(split_words(row["caption"])) <= VOCABULARY
        assert check(row["caption"], scenes[str(row["image_id"])]).true


PARAMS = GeneratorParams(generator="sentences", seed=3, train=4, val=1, test=0)


def test_sentences_has_five_per_scene_and_is_readable(tmp_path: Path) -> None:
    counts = write_sentences(PARAMS, tmp_path / "one")
    assert counts == {"train": 20, "val": 5, "test": 0, "texts": 25}
    write_sentences(PARAMS, tmp_path / "two")
    write_sentences(replace(PARAMS, seed=4), tmp_path / "other")
    one, two, other = ((tmp_path / name / "train.txt").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other
    source = DatasetParams.of(format="texts", root="one", texts={"train": ["train.txt"], "val": ["val.txt"]})
    rows = read_source("corpus", source, tmp_path)["texts"]
    assert len(rows) == 25 and all(len(row["text"].split()) > 2 for row in rows)


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    objects = GeneratorParams(generator="objects", seed=2, train=1, val=0, test=0)
    for key, value in (("questions_per_image", 101), ("simple_pair_sentences", 2), ("side", 63)):
        with pytest.raises(ParamsError, match=f"`{key}`"):
            write(replace(objects, **{key: value}), tmp_path)
