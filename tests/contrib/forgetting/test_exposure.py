"""The exposure of a detector and a tokenizer, and of the models trained with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from drawn_workspace import make_workspace, params_with

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.exposure import Exposure, worst
from vlp_models.contrib.forgetting.inputs import first_detector_step, shapes_tokenizer
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import DataError
from vlp_models.params import Params, load_params
from vlp_models.pipeline.stages import tokenizer


def exposure(name: str, state: Any) -> Exposure:
    return Exposure(name=name, state=state, how=f"how of {name}")


@pytest.mark.parametrize(
    ("states", "expected", "how"),
    [
        (("exposed", "exposed"), "exposed", "how of own"),
        (("clean", "clean"), "clean", "how of own"),
        (("clean", "exposed"), "inherited", "before: how of before"),
        (("unknown", "inherited"), "inherited", "before: how of before"),
        (("unknown", "clean"), "unknown", "how of own"),
        (("clean", "unknown"), "unknown", "before: how of before"),
    ],
)
def test_exposure_combines_a_run_and_its_inputs(states: Any, expected: str, how: str) -> None:
    own, before = states
    combined = worst("own", [exposure("own", own), exposure("words", "clean"), exposure("before", before)])
    assert (combined.name, combined.state, combined.how) == ("own", expected, how)


def test_detector_is_exposed_to_the_images_of_its_steps(tmp_path: Path) -> None:
    """Six training images, two a step: each is in one of the first three steps."""
    workspace = make_workspace(tmp_path)

    def step(number: int, **detector: Any) -> int | None:
        return first_detector_step(params_with(detector=detector).detector, workspace, {f"drawn/{number}"})

    steps = [step(number, source="train") for number in range(6)]
    assert sorted(steps) == [1, 1, 2, 2, 3, 3]  # type: ignore[type-var]
    late = steps.index(3)
    assert step(late, source="train", steps=2) is None
    assert step(7, source="train") is None, "of val"
    assert step(0, source="weights") is None
    few = [step(number, source="train", max_images=2) for number in range(6)]
    assert sorted(found for found in few if found) == [1, 1]
    assert first_detector_step(
        params_with(detector={"source": "train"}).detector, workspace, {"drawn/0", "drawn/1"}
    ) == min(steps[:2])  # type: ignore[type-var]


@pytest.fixture
def vocabulary(tmp_path: Path) -> tuple[Params, Workspace]:
    """Twenty images; only the captions of the first mention a zebra, all others are equal."""
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
    params = load_params(Path(__file__).parents[3] / "params.yaml")
    params = dataclasses.replace(params, tokenizer=dataclasses.replace(params.tokenizer, vocab_size=60))
    tokenizer.run(params, workspace)
    return params, workspace


def test_vocabulary_is_exposed_to_texts_that_change_it(vocabulary: tuple[Params, Workspace]) -> None:
    params, workspace = vocabulary
    assert shapes_tokenizer(params.tokenizer, workspace, {"a/0"})
    assert not shapes_tokenizer(params.tokenizer, workspace, {"a/1"})
    assert shapes_tokenizer(params.tokenizer, workspace, {f"a/{n}" for n in range(20)}), "no text would be left"


def test_texts_of_unused_datasets_do_not_shape_the_vocabulary(vocabulary: tuple[Params, Workspace]) -> None:
    params, workspace = vocabulary
    only = dataclasses.replace(params.tokenizer, sources=["a"])
    captions = read_table("captions", workspace.validated).to_pylist()
    images = read_table("images", workspace.validated).to_pylist()
    other = {"image_id": "b/0", "source": "b"}
    write_table([*images, {**images[0], **other}], "images", workspace.validated)
    rows = [{**captions[0], **other, "caption_id": f"b/0#{n}", "text": "a yak stands here"} for n in range(2)]
    write_table([*captions, *({k: row[k] for k in captions[0]} for row in rows)], "captions", workspace.validated)
    assert not shapes_tokenizer(only, workspace, {"b/0"}) and shapes_tokenizer(only, workspace, {"a/0"})
    with pytest.raises(DataError, match=r"does not match params\.yaml"):
        shapes_tokenizer(params.tokenizer, workspace, {"b/0"})
