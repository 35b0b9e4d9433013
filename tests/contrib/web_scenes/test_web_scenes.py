"""The generator `web`: noise has the requested rates, and both formats are readable."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from vlp_models.contrib.web_scenes.dataset import BOILERPLATE, NOUNS, write
from vlp_models.data.formats import read_source
from vlp_models.errors import ParamsError
from vlp_models.params import DatasetParams, GeneratorParams
from vlp_models.synthetic.scenes.language import check, split_words

WEB = GeneratorParams(generator="web", seed=5, train=600, val=5, test=5, side=64)
SHARES = ("mismatched", "hypernyms", "dropped_words", "boilerplate")


def without_boilerplate(text: str) -> tuple[str, bool]:
    """Return the sentence in an alt text, and whether it had boilerplate around it."""
    for phrase in BOILERPLATE:
        before, after = phrase.split("{}")
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            return text[len(before) : len(text) - len(after)], True
    return text, False


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("web") / "made"
    directory.mkdir()
    assert write(WEB, directory)["captions"] == 610
    return directory


def measured(directory: Path) -> dict[str, tuple[float, int]]:
    """Each fault's share and of how many, from pairs.csv, the scenes and the clean sentences."""
    scenes = [json.loads(line) for line in (directory / "scenes.jsonl").read_text().splitlines()]
    notes = [json.loads(line) for line in (directory / "alt_texts.jsonl").read_text().splitlines()]
    with (directory / "pairs.csv").open(newline="") as file:
        texts = [row["caption"] for row in csv.DictReader(file)]
    words = lost = nouns = hypernyms = around = untrue = 0
    for text, note, scene in zip(texts, notes, scenes, strict=True):
        sentence, wrapped = without_boilerplate(text)
        clean, left = split_words(note["clean"]), split_words(sentence)
        words, lost, around = words + len(clean), lost + len(clean) - len(left), around + wrapped
        named, still_named = (sum(word in NOUNS for word in w) for w in (clean, left))
        if len(clean) == len(left):  # a noun that is gone was replaced, not lost
            nouns, hypernyms = nouns + named, hypernyms + named - still_named
        if not check(note["clean"], scene).true:
            untrue += 1
            assert note["mismatched"], "what is not mismatched is true"
    mismatched = sum(note["mismatched"] for note in notes)
    assert untrue >= 0.8 * mismatched, "what is mismatched is hardly ever true by chance"
    n = len(texts)
    return {
        "mismatched": (mismatched / n, n),
        "hypernyms": (hypernyms / max(nouns, 1), nouns),
        "dropped_words": (lost / words, words),
        "boilerplate": (around / n, n),
    }


@pytest.mark.slow
def test_noise_has_the_requested_rates(web: Path) -> None:
    for name, (share, count) in measured(web).items():
        stated = getattr(WEB, name)
        assert abs(share - stated) < 3.5 * math.sqrt(stated * (1 - stated) / count), (name, share, stated)


@pytest.mark.slow
@pytest.mark.parametrize("alone", SHARES)
def test_rates_of_zero_and_one_mean_none_and_all(tmp_path: Path, alone: str) -> None:
    shares: dict[str, Any] = dict.fromkeys(SHARES, 0.0)
    write(
        dataclasses.replace(WEB, train=40, **{**shares, alone: 0.5 if alone == "dropped_words" else 1.0}),
        tmp_path,
    )
    found = {name: share for name, (share, _) in measured(tmp_path).items()}
    assert found.pop(alone) > 0.3
    assert alone == "dropped_words" or measured(tmp_path)[alone][0] == 1
    assert set(found.values()) == {0.0}


@pytest.mark.slow
def test_both_formats_read_the_same_pairs(web: Path) -> None:
    in_coco = DatasetParams.of(
        format="coco",
        root=".",
        captions={"all": ["annotations/captions_scenes.json"]},
        instances={"all": ["annotations/instances_scenes.json"]},
        karpathy="dataset_scenes.json",
        scene_graphs="scenes.jsonl",
    )
    as_coco = read_source("web", in_coco, web)
    as_pairs = read_source("web", DatasetParams.of(format="pairs", root=".", pairs="pairs.csv"), web)
    assert not as_coco["quarantine"] and not as_pairs["quarantine"]
    assert [row["text"] for row in as_coco["captions"]] == [row["text"] for row in as_pairs["captions"]]
    assert [row["split"] for row in as_coco["images"]] == [row["split"] for row in as_pairs["images"]]
    assert as_coco["objects"] and not (web / "v2_OpenEnded_mscoco_scenes_questions.json").exists()


@pytest.mark.slow
def test_longer_dataset_starts_with_the_shorter_ones_alt_texts(web: Path, tmp_path: Path) -> None:
    write(dataclasses.replace(WEB, train=30), tmp_path)
    short, long = ((d / "alt_texts.jsonl").read_text().splitlines() for d in (tmp_path, web))
    assert short[:30] == long[:30]


@pytest.mark.parametrize("change", [{"side": 63}, {"vcr_per_image": 2}, {"simple_pair_sentences": 2}])
def test_invalid_web_params_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ParamsError, match=next(iter(change))):
        write(dataclasses.replace(WEB, **change), tmp_path)
