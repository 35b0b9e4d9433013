"""Images with several texts each, as samples of pretraining, in every family."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.trial import Trial, build_trial, generator, small_config
from vlp_models.data.batch import Batch

SHARE = 0.4  # masked


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> SampleScenes:
    return write_sample_scenes(tmp_path_factory.mktemp("scenes"))


def batch_of(trial: Trial, *, shared: bool) -> Batch:
    """Return six texts, two for each image."""
    reader = trial.reader()
    return reader.collate(trial.scenes.samples(trial.view, reader)[:6], share_images=shared)


OWN = [
    ("tden", ("mlm", "moc", "msg", "ism"), {}),
    ("unified_vlp", ("seq2seq", "bidirectional"), {}),
    ("xgpt", ("ic", "imlm", "ida", "tifg"), {}),
    ("vlmo", ("itc", "itm", "mlm"), {}),
    ("soho", ("mlm", "mvm", "itm"), {"mvm_probability": 1.0}),
]


@pytest.mark.parametrize(("family", "names", "config"), OWN)
def test_a_sample_may_be_an_image_with_several_texts(
    family: str, names: tuple[str, ...], config: dict[str, Any], scenes: SampleScenes
) -> None:
    """Learners are samples: images with two texts each, or the same texts as samples that share an image."""
    trial = build_trial(family, small_config(family) | config, scenes)
    model: Any = trial.model.eval()
    by_text = batch_of(trial, shared=True)
    by_image = dataclasses.replace(by_text, sample_ids=by_text.image_ids)
    learners_B = torch.tensor([True, False, True])
    learners_N = learners_B[by_text.text.owner_N]
    assert len(by_image) == 3 and len(learners_N) == 6
    found, expected = (
        model.pretraining_losses(
            batch, objectives=dict.fromkeys(names, learners), generator=generator(3), mask_probability=SHARE
        )
        for batch, learners in ((by_image, learners_B), (by_text, learners_N))
    )
    for name in names:
        assert 0 < float(found[name].count) == float(expected[name].count)
        torch.testing.assert_close(found[name].sum, expected[name].sum, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "names", "config"),
    [
        ("tden", ("mlm", "msg", "ism"), {}),  # `moc` draws regions by image
        ("tden", ("ism",), {"ism_source": "cross_modal"}),
        ("tden", ("ism",), {"ism_negatives": "hardest"}),
        ("vlmo", ("itc", "itm", "mlm"), {"contrast": "both"}),
        ("xgpt", OWN[2][1], {"cross_attention": "shared_merged"}),
        ("xgpt", OWN[2][1], {"structure": "enc"}),
        *OWN[1:3],
    ],
)
def test_texts_that_share_an_image_equal_texts_with_copies(
    family: str, names: tuple[str, ...], config: dict[str, Any], scenes: SampleScenes
) -> None:
    trial = build_trial(family, small_config(family) | config, scenes)
    model: Any = trial.model.eval()
    shared, copied = (
        model.pretraining_losses(
            batch_of(trial, shared=shared),
            objectives=dict.fromkeys(names),
            generator=generator(3),
            mask_probability=SHARE,
        )
        for shared in (True, False)
    )
    for name in names:
        assert 0 < float(shared[name].count) == float(copied[name].count)
        torch.testing.assert_close(shared[name].sum, copied[name].sum)
