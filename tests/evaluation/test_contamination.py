"""Test items with near-duplicates in the training data: counted, and the scores without them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from vlp_models.curation.duplicates.leakage import Leak, write_leaks
from vlp_models.data.sample import Sample
from vlp_models.data.tables import write_table
from vlp_models.evaluation.contamination import TrainingData, training_sources
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.score import ItemScores, Score, item_scores, mean_score
from vlp_models.metrics.unseen import SEEN_IMAGE, SEEN_TEXT, score_unseen
from vlp_models.params import load_params

ROOT = Path(__file__).parents[2]
ITEMS = 60


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
    def find(sources: list[str], scratch: Path) -> tuple[set[str], set[str]]:
        seen = TrainingData(validated, sources, scratch).find_seen(samples())
        images, texts = ({name for name, slices in seen.items() if kind in slices} for kind in (SEEN_IMAGE, SEEN_TEXT))
        return images, texts

    images = {f"a/test-{n}" for n in range(10)}
    assert find(["a"], validated / "scratch") == (images, {f"a/test-{n}" for n in range(30, 50)})
    assert find([], validated / "scratch")[0] == images | {"a/test-59"}
    assert find(["b"], tmp_path / "scratch") == ({"a/test-59"}, set())
    assert not list((tmp_path / "scratch").rglob("*")), "the texts go with the object"


def item_scores_of(score: Score, seen: dict[str, list[str]], **baselines: Score | float) -> ItemScores:
    scores = item_scores(score, dataset="a", split="test", test="", slices={}, seen=seen, baselines={**baselines})
    assert scores is not None
    return scores


def test_unseen_items_are_scored_with_their_baselines(validated: Path) -> None:
    seen = TrainingData(validated, ["a"], validated / "scratch").find_seen(samples())
    right = np.r_[np.ones(10), np.zeros(20), np.ones(20), np.zeros(10)]  # right exactly where the item is seen
    names = [sample.sample_id for sample in samples()]
    score = mean_score("accuracy", right, names, items=names)
    # Right on the first 30 items, of which 10 are seen; its items are in another order.
    nearest = mean_score("accuracy", (np.arange(ITEMS) < 30)[::-1].astype(float), names[::-1], items=names[::-1])
    other_items = mean_score("accuracy", right[1:], names[1:], items=names[1:])
    items = item_scores_of(score, seen, nearest=nearest, chance=50.0, other_items=other_items)
    assert set(items.baselines) == {"nearest"}, "the others have no values for the same items"
    unseen = score_unseen(items, {"chance": 50.0}, resamples=100, seed=1)
    assert (unseen["images"], unseen["texts"]) == (10, 20)
    assert (unseen["without_images"]["value"], unseen["without_images"]["n"]) == (40.0, 50)
    assert unseen["without_images"]["low"] < 40 < unseen["without_images"]["high"]

    # On the whole test the model is as good as the nearest neighbor; on the unseen items it is never right.
    both = unseen["without_both"]
    assert score.value == nearest.value == 50.0
    assert (both["value"], both["low"], both["high"], both["n"]) == (0.0, 0.0, 0.0, 30)
    assert list(both["baselines"]) == ["nearest", "chance"]
    near, chance = both["baselines"].values()
    assert near["value"] == pytest.approx(100 * 20 / 30, abs=1e-3) and near["low"] < near["value"] < near["high"]
    # The model has no variation there, so the gain's interval is the mirrored one of the baseline.
    assert near["gain"] == {"value": -near["value"], "low": -near["high"], "high": -near["low"]}
    assert chance["gain"] == {"value": -50.0, "low": -50.0, "high": -50.0}
    # Without seen items it is the whole test.
    whole = score_unseen(item_scores_of(score, {}), {}, resamples=100, seed=1)["without_both"]
    low, high = interval(score.evidence, resamples=100, seed=1) or (0.0, 0.0)
    assert whole == {"value": 50.0, "low": pytest.approx(low), "high": pytest.approx(high), "n": 60, "baselines": {}}

    few = item_scores_of(mean_score("accuracy", right[20:50], names[20:50], items=names[20:50]), seen)
    assert score_unseen(few, {}, resamples=100, seed=1)["without_both"] is None, "10 remaining items are too few"


def test_the_gain_on_unseen_items_is_paired(validated: Path) -> None:
    """The model is right wherever the baseline is, and on five items more: the interval is that of the five."""
    names = [sample.sample_id for sample in samples()]
    baseline = mean_score("accuracy", (np.arange(ITEMS) % 2).astype(float), names)
    model = mean_score("accuracy", ((np.arange(ITEMS) % 2) | (np.arange(ITEMS) < 10)).astype(float), names)
    items = item_scores_of(model, {}, nearest=baseline)
    near = score_unseen(items, {}, resamples=2000, seed=1)["without_both"]["baselines"]["nearest"]
    assert near["gain"]["value"] == pytest.approx(100 * 5 / 60, abs=1e-3)
    # Two independent samples of 60 would give about 35 points.
    assert 0 < near["gain"]["low"] < near["gain"]["high"] < 17 < near["high"] - near["low"]


def test_an_images_captions_are_seen_with_it(validated: Path) -> None:
    seen = TrainingData(validated, ["a"], validated / "scratch").find_seen(samples())
    names = [sample.sample_id for sample in samples()]
    captions = [f"{name}#{k}" for name in names for k in range(2)]
    values = np.repeat(np.r_[np.ones(10), np.zeros(20), np.ones(20), np.zeros(10)], 2)
    by_caption = mean_score("R@1", values, np.repeat(names, 2).tolist(), items=captions)
    both = score_unseen(item_scores_of(by_caption, seen), {}, resamples=0, seed=1)["without_both"]
    assert both == {"value": 0.0, "low": None, "high": None, "n": 60, "baselines": {}}


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
    seen = {f"s{group}-1": [SEEN_IMAGE] for group in range(30)}
    for score, count, n in ((accuracy, 30, 90), (consistency, 30, 30)):
        unseen = score_unseen(item_scores_of(score, seen), {}, resamples=0, seed=1)
        assert (unseen["images"], unseen["without_images"]["n"]) == (count, n), score.metric
        assert unseen["without_images"]["value"] == pytest.approx(100 * 30 / 90 if n == 90 else 0.0, abs=1e-3)
