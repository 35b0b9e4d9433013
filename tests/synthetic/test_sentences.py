"""The world of sentences: a corpus of texts alone, the same for the same params."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vlp_models.data.formats.pairs import read_texts
from vlp_models.errors import ParamsError
from vlp_models.params import GeneratorParams, SourceParams
from vlp_models.synthetic.scenes.dataset import write_sentences

PARAMS = GeneratorParams(generator="sentences", seed=3, train=4, val=1, test=0)


def test_five_sentences_of_each_scene_and_the_format_reads_them(tmp_path: Path) -> None:
    counts = write_sentences(PARAMS, tmp_path / "one")
    assert counts == {"train": 20, "val": 5, "test": 0, "texts": 25}
    write_sentences(PARAMS, tmp_path / "two")
    write_sentences(replace(PARAMS, seed=4), tmp_path / "other")
    one, two, other = ((tmp_path / name / "train.txt").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other
    source = SourceParams(format="texts", root="one", texts={"train": ["train.txt"], "val": ["val.txt"]})
    rows = read_texts("corpus", source, tmp_path)["texts"]
    assert len(rows) == 25 and all(len(row["text"].split()) > 2 for row in rows)
    with pytest.raises(ParamsError, match="misspelled"):
        write_sentences(replace(PARAMS, misspelled=2.0), tmp_path / "wrong")
