"""Scenes ask in VCR's form: the real reader takes it, every label is true, and text alone decides nothing."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from vlp_models.contrib.reasoning_tasks.scenes.vcr import make_questions
from vlp_models.data.formats import read_source
from vlp_models.params import DatasetParams, GeneratorParams
from vlp_models.synthetic.scenes.dataset import write
from vlp_models.synthetic.scenes.scene import COLORS, Scene, is_at, sample_scene

PARAMS = GeneratorParams(
    generator="objects", seed=3, train=8, val=2, test=3, questions_per_image=2, side=64, vcr_per_image=3
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vcr") / "scenes"
    assert write(PARAMS, directory)["choices"] > 13
    return directory


def test_vcr_reader_reads_the_files(made: Path) -> None:
    tables = read_source("vcr", DatasetParams.of(format="vcr", root="scenes"), made.parent)
    assert not tables["quarantine"]
    lines = {split: (made / f"{split}.jsonl").read_text().splitlines() for split in ("train", "val", "test")}
    assert len(tables["choices"]) == sum(map(len, lines.values()))
    splits = Counter(row["split"] for row in tables["images"])
    assert splits["train"] <= 8 and splits["test"] <= 3
    for row in tables["choices"]:
        assert len(set(row["answers"])) == len(set(row["rationales"])) == 4
        assert row["text"].split()[-2] in ("circle", "square", "triangle", "star")


def test_labels_are_true_of_the_scene(made: Path) -> None:
    scenes = {s["image_id"]: Scene.from_dict(s) for s in map(json.loads, (made / "scenes.jsonl").open())}
    for split in ("train", "val", "test"):
        for record in map(json.loads, (made / f"{split}.jsonl").open()):
            scene = scenes[record["img_id"].partition("-")[2]]
            item = scene.objects[next(t for t in record["question"] if isinstance(t, list))[0]]
            for kind in ("answer", "rationale"):
                for place, tokens in enumerate(record[f"{kind}_choices"]):
                    words = {t for t in tokens if isinstance(t, str)}
                    corner = words & {"top", "bottom", "left", "right"}
                    true = item.color in words or not words & set(COLORS)
                    true &= all(is_at(item, word) or _side(item, word) for word in corner)
                    assert true == (place == record[f"{kind}_label"])


def _side(item: object, word: str) -> bool:
    x, y = item.x, item.y  # type: ignore[attr-defined]
    return {"top": y < 0.5, "bottom": y > 0.5, "left": x < 0.5, "right": x > 0.5}[word]


@pytest.mark.slow
def test_text_alone_is_at_chance() -> None:
    """The best text-only rule trained on one half of 6,000 questions scores chance on the other half."""
    right: dict[str, list[float]] = defaultdict(list)
    asked = []
    for number in range(3000):
        rng = np.random.default_rng([5, number])
        asked += list(make_questions(sample_scene(rng, image_id=str(number), split="train", side=64), 3, rng))
    half = len(asked) // 2
    for kind, given in (("answer", "question"), ("rationale", "answer_choices")):
        wins: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        for number, record in enumerate(asked):
            context = record[given] if given == "question" else record[given][record["answer_label"]]
            keys = [f"{_words(context)}|{_words(choice)}" for choice in record[f"{kind}_choices"]]
            if number < half:
                seen.update(keys)
                wins[keys[record[f"{kind}_label"]]] += 1
            else:
                best = max(range(4), key=lambda i: wins[keys[i]] / max(1, seen[keys[i]]))
                right[kind].append(best == record[f"{kind}_label"])
    for kind, found in right.items():
        assert 0.21 < np.mean(found) < 0.29, kind
    places = Counter(record["answer_label"] for record in asked)
    assert min(places.values()) > 0.9 * len(asked) / 4


def _words(tokens: list[object]) -> str:
    return " ".join(t if isinstance(t, str) else "X" for t in tokens)
