"""Test items with near-duplicates in the training data: counted, and the score without them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from vlp_models.curation.duplicates.leakage import Leak, write_leaks
from vlp_models.data.sample import Sample
from vlp_models.data.tables import write_table
from vlp_models.evaluation.contamination import LeakedItems, TrainingData, score_without_leaked, training_sources
from vlp_models.metrics.score import mean_score
from vlp_models.params import load_params

ROOT = Path(__file__).parents[2]
ITEMS = 60
WHOLE = {"low": 40.0, "high": 60.0}  # interval of the score over all items


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    """60 test images: 10 have a copy in the training split of a, one in that of b; 20 share a caption with a."""
    images = [image(f"a/{n}", "a", "train") for n in range(10)] + [image("b/0", "b", "train")]
    images += [image(f"a/test-{n}", "a", "test") for n in range(ITEMS)]
    captions = [caption(f"a/{n}", f"a picture of the number {n} on a wall") for n in range(10)]
    captions += [caption("a/9", f"a sign with the number {n} over a door") for n in range(20)]
    write_table(images, "images", tmp_path)
    write_table(captions, "captions", tmp_path)
    copies = [Leak(image_id=f"a/{n}", copy_of=f"a/test-{n}", split="test", how="mirrored") for n in range(10)]
    copies.append(Leak(image_id="b/0", copy_of="a/test-59", split="test", how="mirrored"))
    copies.append(Leak(image_id="a/gone", copy_of="a/test-58", split="test", how="quarantined, so not trained on"))
    write_leaks(tmp_path, copies)
    return tmp_path


def image(image_id: str, source: str, split: str) -> dict[str, object]:
    about = {"path": f"{image_id}.png", "width": 9, "height": 9, "sha256": "0" * 64, "provenance": ""}
    return {"image_id": image_id, "source": source, "split": split, **about}


def caption(image_id: str, text: str) -> dict[str, object]:
    return {"caption_id": f"{image_id} {text}", "image_id": image_id, "text": text, "provenance": ""}


def samples() -> list[Sample]:
    """Images 30 to 49 have a caption that differs from a training caption by one word."""
    text = ["a sign with no number {n} over a door" if 30 <= n < 50 else "number {n} is here" for n in range(ITEMS)]
    captions = [(words.format(n=n - 30 if 30 <= n < 50 else n), "and this one is new") for n, words in enumerate(text)]
    ids = [f"a/test-{n}" for n in range(ITEMS)]
    return [
        Sample(sample_id=i, image_id=i, source="a", values={"captions": c}) for i, c in zip(ids, captions, strict=True)
    ]


def test_finds_items_with_a_copy_in_the_runs_own_training_data(validated: Path, tmp_path: Path) -> None:
    leaked = TrainingData(validated, ["a"], validated / "scratch").find_leaked(samples())
    assert leaked.images == {f"a/test-{n}" for n in range(10)}
    assert leaked.texts == {f"a/test-{n}" for n in range(30, 50)}
    assert TrainingData(validated, [], validated / "scratch").find_leaked(samples()).images == leaked.images | {
        "a/test-59"
    }
    only_b = TrainingData(validated, ["b"], tmp_path / "scratch").find_leaked(samples())
    assert (only_b.images, only_b.texts) == ({"a/test-59"}, set())
    assert not list((tmp_path / "scratch").rglob("*")), "the texts go with the object"


def test_score_without_leaked_items_is_that_of_the_others(validated: Path) -> None:
    leaked = TrainingData(validated, ["a"], validated / "scratch").find_leaked(samples())
    right = np.r_[np.ones(10), np.zeros(20), np.ones(20), np.zeros(10)]  # right exactly where the item leaked
    names = [sample.sample_id for sample in samples()]
    score = mean_score("accuracy", right, names, items=names)
    found = score_without_leaked(score, leaked, WHOLE, resamples=100, seed=1)
    assert found is not None
    assert (found["images"], found["texts"]) == (10, 20)
    assert (found["without_images"]["value"], found["without_images"]["n"]) == (40.0, 50)
    assert found["without_images"]["low"] < 40 < found["without_images"]["high"]
    assert found["without_both"] == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 30}

    captions = [f"{name}#{k}" for name in names for k in range(2)]  # an image's captions leak with it
    by_caption = mean_score("R@1", np.repeat(right, 2), np.repeat(names, 2).tolist(), items=captions)
    found = score_without_leaked(by_caption, leaked, WHOLE, resamples=0, seed=1)
    assert found is not None and found["without_both"] == {"value": 0.0, "low": None, "high": None, "n": 60}

    nothing = LeakedItems(images=frozenset(), texts=frozenset())
    found = score_without_leaked(score, nothing, WHOLE, resamples=100, seed=1)
    assert found is not None and found["without_both"] == {"value": 50.0, **WHOLE, "n": ITEMS}

    few = mean_score("accuracy", right[20:50], names[20:50], items=names[20:50])
    found = score_without_leaked(few, leaked, WHOLE, resamples=100, seed=1)
    assert found is not None and found["without_both"] is None, "10 remaining items are too few"


def test_training_sources_include_those_of_the_pretraining() -> None:
    params = load_params(ROOT / "params.yaml")
    run = next(iter(params.finetune))
    (before,) = params.pretrain

    def sources(own: dict[str, int], earlier: dict[str, int]) -> list[str]:
        finetune = {run: dataclasses.replace(params.finetune[run], sources=own)}
        pretrain = {before: dataclasses.replace(params.pretrain[before], sources=earlier)}
        return training_sources(dataclasses.replace(params, finetune=finetune, pretrain=pretrain), run)

    assert sources({"a": 1, "b": 1}, {"b": 1, "c": 2}) == ["a", "b", "c"]
    assert sources({"a": 1}, {}) == [], "the pretraining is on all datasets"


def test_a_statement_with_a_leaked_image_leaves_consistency() -> None:
    """The score of an item that is about several samples, as a sentence of NLVR is about two images."""
    groups = [f"statement {group}" for group in range(60)]
    samples = [[f"s{group}-{k}" for k in range(2)] for group in range(60)]
    right = [float(group < 30) for group in range(60)]
    consistency = mean_score("consistency", right, groups, samples=samples)
    items = [item for both in samples for item in both]
    item_groups = [group for group in groups for _ in range(2)]
    accuracy = mean_score("accuracy", [value for value in right for _ in range(2)], item_groups, items=items)
    leaked = LeakedItems(images=frozenset(f"s{group}-1" for group in range(30)), texts=frozenset())
    for score, count, n in ((accuracy, 30, 90), (consistency, 30, 30)):
        found = score_without_leaked(score, leaked, WHOLE, resamples=0, seed=1)
        assert found is not None and (found["images"], found["without_images"]["n"]) == (count, n), score.metric
        assert found["without_images"]["value"] == pytest.approx(100 * 30 / 90 if n == 90 else 0.0, abs=1e-3)
