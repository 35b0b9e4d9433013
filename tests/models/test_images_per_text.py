"""Several images of a text in one sequence (`Batch.group_images`), in each family that fuses or generates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from paper_families import PAPER_FAMILIES
from torch import nn

from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.trial import Trial, build_trial, generator, small_config, train
from vlp_models.data.batch import Batch, PixelSets, Regions
from vlp_models.data.sample import Sample, SampleImage
from vlp_models.errors import ParamsError
from vlp_models.models.decoding.search import beam_search, greedy
from vlp_models.models.protocols import Fuses, Generates, LocatesStates, ReadsSeveralImages
from vlp_models.objectives.loss import WeightedLosses
from vlp_models.tasks import task_class
from vlp_models.tasks.base import implements, read_options

FUSES = ("tden", "unified_vlp", "vlmo", "soho")
GENERATES = ("tden", "unified_vlp", "xgpt")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> SampleScenes:
    return write_sample_scenes(tmp_path_factory.mktemp("scenes"))


def built(scenes: SampleScenes, family: str, images: int = 3, **config: Any) -> Trial:
    """Return a model in eval mode, whose vectors of places are large, so that they count also in small models."""
    trial = build_trial(family, small_config(family, {"images_per_text": images, **config}), scenes)
    if images > 1:
        nn.init.normal_(trial.model.place_embedding.later, std=10.0)  # type: ignore[union-attr, arg-type]
    trial.model.eval()
    return trial


def rows(trial: Trial, counts: Sequence[int], shift: int = 0) -> Batch:
    """Return one text per count, each with that many different images."""
    reader = trial.reader()
    single = trial.scenes.samples("captions", reader)[::2]
    made, first = [], 0
    for number, count in enumerate(counts):
        own = [single[(first + i + shift) % len(single)] for i in range(count)]
        others = tuple(SampleImage(image_id=s.image_id, regions=s.regions, pixels=s.pixels) for s in own[1:])
        made.append(dataclasses.replace(own[0], sample_id=f"s{number}", text=single[number].text, others=others))
        first += count
    return reader.collate(made)


@torch.no_grad()
def fused(model: nn.Module, batch: Batch) -> torch.Tensor:
    assert isinstance(model, Fuses)
    return model.fuse(batch.group_images(), batch.text).pooled_BP


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, atol=1e-5, rtol=1e-4))


def test_every_family_reads_several_images(scenes: SampleScenes) -> None:
    for family in PAPER_FAMILIES:
        model = built(scenes, family).model
        assert isinstance(model, ReadsSeveralImages) and model.images_per_text == 3
        plain = build_trial(family, small_config(family), scenes).model
        assert isinstance(plain, ReadsSeveralImages) and plain.images_per_text == 1
        more = set(model.state_dict()) - set(plain.state_dict())
        assert more == {"place_embedding.later"} and not set(plain.state_dict()) - set(model.state_dict())
    assert {f for f in PAPER_FAMILIES if implements(built(scenes, f).model, Fuses)} == set(FUSES)
    assert {f for f in PAPER_FAMILIES if implements(built(scenes, f).model, Generates)} == set(GENERATES)


@pytest.mark.parametrize("family", PAPER_FAMILIES)
def test_fresh_weights_are_those_of_a_model_of_one_image(family: str, scenes: SampleScenes) -> None:
    from vlp_models.models import build_model

    models = []
    for images in (1, 2):
        torch.manual_seed(5)
        config = small_config(family, {"images_per_text": images})
        models.append(build_model(family, config, scenes.facts, where="x").state_dict())
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())
    assert not models[1]["place_embedding.later"].any()


@pytest.mark.parametrize("family", FUSES)
def test_one_image_in_a_row_is_fused_as_alone(family: str, scenes: SampleScenes) -> None:
    trial = built(scenes, family)
    alone = rows(trial, [1, 1, 1])
    assert alone.image_owner_M is None and alone.group_images() is alone.image
    together = dataclasses.replace(alone, image_owner_M=torch.arange(3))
    assert isinstance(together.group_images(), PixelSets if family in ("vlmo", "soho") else Regions)
    torch.testing.assert_close(fused(trial.model, together), fused(trial.model, alone))


@pytest.mark.parametrize("family", FUSES)
def test_each_image_counts_with_its_place_and_rows_are_independent(family: str, scenes: SampleScenes) -> None:
    trial = built(scenes, family)
    batch = rows(trial, [2, 3, 1])
    found_NP = fused(trial.model, batch)
    for row in range(3):
        own = fused(trial.model, batch.select(torch.tensor([row])))
        assert close(own[0], found_NP[row]), "a row depends on the others, or on their missing images"
    owner = batch.image_owner_M
    assert owner is not None

    def with_images(order: Sequence[int]) -> torch.Tensor:
        return fused(trial.model, dataclasses.replace(batch, image=batch.image.select(torch.tensor(order))))

    swapped = with_images([1, 0, 2, 3, 4, 5])
    assert not close(swapped[0], found_NP[0]), "the places of the images matter"
    assert close(swapped[1:], found_NP[1:])
    other = with_images([0, 1, 2, 3, 5, 5])
    assert not close(other[1], found_NP[1]) and close(other[[0, 2]], found_NP[[0, 2]])


@pytest.mark.parametrize("family", FUSES)
def test_the_images_of_a_row_attend_to_each_other(family: str, scenes: SampleScenes) -> None:
    """The first image's states change with the second image, which two separate passes cannot do."""
    trial = built(scenes, family)
    assert isinstance(trial.model, LocatesStates)
    batch = rows(trial, [2])
    with torch.no_grad():
        found = trial.model.locate(batch.group_images(), batch.text)
        other = dataclasses.replace(batch, image=batch.image.select(torch.tensor([0, 0])))
        moved = trial.model.locate(other.group_images(), other.text)
    assert found.place_NR is not None
    first = found.mask_NR & (found.place_NR == 0)
    second = found.mask_NR & (found.place_NR == 1)
    assert first.any() and second.any()
    assert not close(moved.states_NRD[first], found.states_NRD[first])
    assert torch.equal(moved.boxes_NR4[first], found.boxes_NR4[first])


def test_more_images_than_the_config_allows_are_refused(scenes: SampleScenes) -> None:
    for family in FUSES:
        trial = built(scenes, family, images=1)
        with pytest.raises(
            ParamsError, match=r"2 images for one text, but config.images_per_text .* is 1; set it to 2"
        ):
            fused(trial.model, rows(trial, [2]))


def test_unified_vlp_of_the_authors_measures_each_image_alone(scenes: SampleScenes) -> None:
    """Their geometry is in units of the image's largest x and y."""
    from vlp_models.models.unified_vlp.regions import compat_geometry

    trial = built(scenes, "unified_vlp", compat_reference=True)
    batch = rows(trial, [2])
    apart = compat_geometry(batch.image)
    together = compat_geometry(batch.group_images())
    torch.testing.assert_close(together.flatten(0, 1), apart.flatten(0, 1))


@pytest.mark.parametrize("family", GENERATES)
def test_captions_of_two_frames_decode_as_they_are_trained(family: str, scenes: SampleScenes) -> None:
    trial = built(scenes, family)
    model, batch = trial.model, rows(trial, [2, 1, 2])
    assert isinstance(model, Generates)
    image = batch.group_images()
    ids = {"bos_id": scenes.tokenizer.cls_id, "eos_id": scenes.tokenizer.sep_id}
    with torch.no_grad():
        forced = model.generation_logits(image, batch.text)
        state, token = model.start(image, max_len=5), torch.full((3,), ids["bos_id"])
        for step in range(5):
            logits, state = model.step(token, state)
            assert close(logits, forced[:, step]), step
            token = batch.text.ids_BT[:, step + 1]
        # The second frame counts, and its row only.
        frames = dataclasses.replace(batch, image=batch.image.select(torch.tensor([0, 0, 2, 3, 4])))
        other = model.generation_logits(frames.group_images(), batch.text)
    length = int(batch.text.mask_BT[0].sum()) - 1
    assert not close(other[0, :length], forced[0, :length]) and close(other[2, :4], forced[2, :4])
    assert len(greedy(model, image, max_len=6, **ids)) == 3
    assert len(beam_search(model, image, max_len=6, beam_size=2, **ids)) == 3


def pairs(trial: Trial) -> list[Sample]:
    return trial.scenes.samples("image_pairs", trial.reader())


@pytest.mark.parametrize("family", FUSES)
def test_nlvr2_reads_a_pair_in_one_pass(family: str, scenes: SampleScenes) -> None:
    task = task_class("nlvr2")
    trial = built(scenes, family, images=2)
    options = read_options(task, {"one_pass": True})
    made = task(trial.model, scenes.tokenizer, trial.info("nlvr2", dataclasses.asdict(options)))
    batch = made.collate(pairs(trial))
    reached, values = train(made, lambda update: WeightedLosses.of(made.loss(batch, generator=generator(update))))
    assert "model.place_embedding.later" in reached and len(values) == 2
    found = made.predict(batch, pairs(trial))
    assert len(found) == len(batch) and {record["prediction"] for record in found} <= {True, False}
    two_passes = task(trial.model, scenes.tokenizer, trial.info("nlvr2"))
    widths = [next(iter(head.parameters())).shape[1] for head in (made.head, two_passes.head)]
    assert widths == [trial.model.fused_dim, 2 * trial.model.fused_dim]


def test_one_pass_needs_a_model_of_two_images(scenes: SampleScenes) -> None:
    trial = built(scenes, "tden", images=1)
    with pytest.raises(ParamsError, match=r"set `models.tden.config.images_per_text: 2`"):
        task_class("nlvr2")(trial.model, scenes.tokenizer, trial.info("nlvr2", {"one_pass": True}))
