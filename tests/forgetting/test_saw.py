"""What a detector and a vocabulary saw, and what follows for whatever is made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from drawn_workspace import make_workspace, params_with

from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import DataError
from vlp_models.forgetting.saw import Verdict, worst
from vlp_models.params import Params, load_params
from vlp_models.pipeline.stages import tokenizer
from vlp_models.pipeline.stages.detector import first_step_with


def verdict(name: str, state: Any) -> Verdict:
    return Verdict(name=name, state=state, how=f"how of {name}")


@pytest.mark.parametrize(
    ("states", "expected", "how"),
    [
        (("saw", "saw"), "saw", "how of own"),
        (("never", "never"), "never", "how of own"),
        (("never", "saw"), "through", "before: how of before"),
        (("unknown", "through"), "through", "before: how of before"),
        (("unknown", "never"), "unknown", "how of own"),
        (("never", "unknown"), "unknown", "before: how of before"),
    ],
)
def test_a_checkpoint_is_what_it_learnt_and_what_it_was_made_of(states: Any, expected: str, how: str) -> None:
    own, before = states
    told = worst("own", [verdict("own", own), verdict("words", "never"), verdict("before", before)])
    assert (told.name, told.state, told.how) == ("own", expected, how)


def test_a_detector_saw_the_training_images_that_its_steps_came_to(tmp_path: Path) -> None:
    """Six images to learn from, two a step: each in one of the first three steps."""
    workspace = make_workspace(tmp_path)

    def step(number: int, **detector: Any) -> int | None:
        return first_step_with(params_with(detector=detector).detector, workspace, {f"drawn/{number}"})

    steps = [step(number, source="train") for number in range(6)]
    assert sorted(steps) == [1, 1, 2, 2, 3, 3]  # type: ignore[type-var]
    late = steps.index(3)
    assert step(late, source="train", steps=2) is None
    assert step(7, source="train") is None, "of val"
    assert step(0, source="weights") is None
    few = [step(number, source="train", max_images=2) for number in range(6)]
    assert sorted(found for found in few if found) == [1, 1]
    assert first_step_with(
        params_with(detector={"source": "train"}).detector, workspace, {"drawn/0", "drawn/1"}
    ) == min(steps[:2])  # type: ignore[type-var]


@pytest.fixture
def words(tmp_path: Path) -> tuple[Params, Workspace]:
    """Twenty pictures; of the first alone a zebra is told, twice, and of the others all the same."""
    workspace = Workspace(tmp_path)
    workspace.validated.mkdir(parents=True)
    texts = {0: ["a zebra stands here", "the zebra again"]} | {n: ["a dog stands here"] * 2 for n in range(1, 20)}
    about = {"source": "a", "path": "x.png", "width": 9, "height": 9, "sha256": "", "provenance": ""}
    images = [{"image_id": f"a/{n}", "split": "train", **about} for n in texts]
    write_table(images, "images", workspace.validated)
    captions = [
        {"caption_id": f"a/{n}#{i}", "image_id": f"a/{n}", "text": text, "provenance": ""}
        for n, several in texts.items()
        for i, text in enumerate(several)
    ]
    write_table(captions, "captions", workspace.validated)
    params = load_params(Path(__file__).parents[2] / "params.yaml")
    params = dataclasses.replace(params, tokenizer=dataclasses.replace(params.tokenizer, vocab_size=60))
    tokenizer.run(params, workspace)
    return params, workspace


def test_a_vocabulary_saw_the_texts_without_which_it_would_be_another(words: tuple[Params, Workspace]) -> None:
    params, workspace = words
    assert tokenizer.shaped_by(params.tokenizer, workspace, {"a/0"})
    assert not tokenizer.shaped_by(params.tokenizer, workspace, {"a/1"})
    assert tokenizer.shaped_by(params.tokenizer, workspace, {f"a/{n}" for n in range(20)}), "no text would be left"


def test_texts_that_a_vocabulary_was_not_learnt_from_did_not_shape_it(words: tuple[Params, Workspace]) -> None:
    params, workspace = words
    only = dataclasses.replace(params.tokenizer, sources=["a"])
    captions = read_table("captions", workspace.validated).to_pylist()
    images = read_table("images", workspace.validated).to_pylist()
    other = {"image_id": "b/0", "source": "b"}
    write_table([*images, {**images[0], **other}], "images", workspace.validated)
    told = [{**captions[0], **other, "caption_id": f"b/0#{n}", "text": "a yak stands here"} for n in range(2)]
    write_table([*captions, *({k: row[k] for k in captions[0]} for row in told)], "captions", workspace.validated)
    assert not tokenizer.shaped_by(only, workspace, {"b/0"}) and tokenizer.shaped_by(only, workspace, {"a/0"})
    with pytest.raises(DataError, match=r"not what params\.yaml makes"):
        tokenizer.shaped_by(params.tokenizer, workspace, {"b/0"})
