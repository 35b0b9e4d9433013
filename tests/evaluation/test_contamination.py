"""What a test's items owe to what was there to learn from: counted, and the score without them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from vlp_models.curation.duplicates.leakage import Leak, write_leaks
from vlp_models.data.sample import Sample
from vlp_models.data.tables import write_table
from vlp_models.evaluation.contamination import Learnt, Seen, learnt_sources, without_seen
from vlp_models.metrics.score import mean_score
from vlp_models.params import load_params

ROOT = Path(__file__).parents[2]
ITEMS = 60
WHOLE = {"low": 40.0, "high": 60.0}  # ends of a score over all items


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    """Of 60 tested images, 10 have a copy in train of the dataset a, one in that of b; 20 have a caption of a's."""
    images = [image(f"a/{n}", "a", "train") for n in range(10)] + [image("b/0", "b", "train")]
    images += [image(f"a/test-{n}", "a", "test") for n in range(ITEMS)]
    captions = [caption(f"a/{n}", f"a picture of the number {n} on a wall") for n in range(10)]
    captions += [caption("a/9", f"a sign with the number {n} over a door") for n in range(20)]
    write_table(images, "images", tmp_path)
    write_table(captions, "captions", tmp_path)
    copies = [Leak(image_id=f"a/{n}", copy_of=f"a/test-{n}", split="test", how="mirrored") for n in range(10)]
    copies.append(Leak(image_id="b/0", copy_of="a/test-59", split="test", how="mirrored"))
    copies.append(Leak(image_id="a/gone", copy_of="a/test-58", split="test", how="set aside, so not learnt from"))
    write_leaks(tmp_path, copies)
    return tmp_path


def image(image_id: str, source: str, split: str) -> dict[str, object]:
    about = {"path": f"{image_id}.png", "width": 9, "height": 9, "sha256": "0" * 64, "provenance": ""}
    return {"image_id": image_id, "source": source, "split": split, **about}


def caption(image_id: str, text: str) -> dict[str, object]:
    return {"caption_id": f"{image_id} {text}", "image_id": image_id, "text": text, "provenance": ""}


def samples() -> list[Sample]:
    """The images 30 to 49 have a caption that train has, but for a word."""
    text = ["a sign with no number {n} over a door" if 30 <= n < 50 else "number {n} is here" for n in range(ITEMS)]
    captions = [(words.format(n=n - 30 if 30 <= n < 50 else n), "and this one is new") for n, words in enumerate(text)]
    ids = [f"a/test-{n}" for n in range(ITEMS)]
    return [
        Sample(sample_id=i, image_id=i, source="a", values={"captions": c}) for i, c in zip(ids, captions, strict=True)
    ]


def test_seen_are_those_with_a_copy_in_what_this_run_learnt_from(validated: Path) -> None:
    seen = Learnt(validated, ["a"]).seen(samples())
    assert seen.pictures == {f"a/test-{n}" for n in range(10)}
    assert seen.sentences == {f"a/test-{n}" for n in range(30, 50)}
    assert Learnt(validated, []).seen(samples()).pictures == seen.pictures | {"a/test-59"}
    only_b = Learnt(validated, ["b"]).seen(samples())
    assert (only_b.pictures, only_b.sentences) == ({"a/test-59"}, set())


def test_a_score_without_them_is_that_of_the_others(validated: Path) -> None:
    seen = Learnt(validated, ["a"]).seen(samples())
    right = np.r_[np.ones(10), np.zeros(20), np.ones(20), np.zeros(10)]  # right where it was seen, and nowhere else
    names = [sample.sample_id for sample in samples()]
    found = without_seen(mean_score("accuracy", right, names, items=names), seen, WHOLE, resamples=100, seed=1)
    assert found is not None
    assert (found["pictures"], found["sentences"]) == (10, 20)
    assert (found["without_pictures"]["value"], found["without_pictures"]["n"]) == (40.0, 50)
    assert found["without_pictures"]["low"] < 40 < found["without_pictures"]["high"]
    assert found["without_both"] == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 30}

    captions = [f"{name}#{k}" for name in names for k in range(2)]  # an image's captions are seen with it
    of_captions = mean_score("R@1", np.repeat(right, 2), np.repeat(names, 2).tolist(), items=captions)
    found = without_seen(of_captions, seen, WHOLE, resamples=0, seed=1)
    assert found is not None and found["without_both"] == {"value": 0.0, "low": None, "high": None, "n": 60}

    nothing = Seen(pictures=frozenset(), sentences=frozenset())
    found = without_seen(mean_score("accuracy", right, names, items=names), nothing, WHOLE, resamples=100, seed=1)
    assert found is not None and found["without_both"] == {"value": 50.0, **WHOLE, "n": ITEMS}

    few = mean_score("accuracy", right[20:50], names[20:50], items=names[20:50])
    found = without_seen(few, seen, WHOLE, resamples=100, seed=1)
    assert found is not None and found["without_both"] is None, "10 items say too little"


def test_a_run_learnt_from_its_own_datasets_and_from_those_it_starts_from() -> None:
    params = load_params(ROOT / "params.yaml")
    run = next(iter(params.finetune))
    (before,) = params.pretrain

    def of(own: dict[str, int], earlier: dict[str, int]) -> list[str]:
        finetune = {run: dataclasses.replace(params.finetune[run], sources=own)}
        pretrain = {before: dataclasses.replace(params.pretrain[before], sources=earlier)}
        return learnt_sources(dataclasses.replace(params, finetune=finetune, pretrain=pretrain), run)

    assert of({"a": 1, "b": 1}, {"b": 1, "c": 2}) == ["a", "b", "c"]
    assert of({"a": 1}, {}) == [], "the pretraining saw all of them"
