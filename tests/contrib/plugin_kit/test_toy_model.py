"""The example model of CONTRIBUTING: its objective against a slow reference, shared images, and training."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vlp_models.contrib.plugin_kit.scaffolds.family.config import ToyConfig
from vlp_models.contrib.plugin_kit.scaffolds.family.info_nce import info_nce
from vlp_models.contrib.plugin_kit.scaffolds.family.model import Toy
from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.params import to_plain
from vlp_models.pipeline.prepared_data import load_start

SMALL = ToyConfig(vocab_size=20, side=8, patch=4, hidden=16, heads=2, image_layers=1, text_layers=1, max_positions=8)
IDS = ("a", "b", "a", "c")


def made(config: ToyConfig = SMALL) -> Toy:
    torch.manual_seed(0)
    return Toy(config).eval()


def batch() -> Batch:
    torch.manual_seed(1)
    mask_BT = torch.arange(6)[None] < torch.tensor([6, 3, 4, 5])[:, None]
    text = Text(ids_BT=torch.randint(5, 20, (4, 6)) * mask_BT, mask_BT=mask_BT)
    image = Pixels(pixels_B3HW=torch.randn(4, 3, 8, 8))
    return Batch(sample_ids=tuple("0123"), image_ids=IDS, image=image, text=text)


def contrast(model: Toy, batch: Batch, learners: torch.Tensor | None = None) -> float:
    asked = {"contrast": learners}
    losses = model.pretraining_losses(batch, objectives=asked, generator=torch.Generator(), mask_probability=0.15)
    return losses["contrast"].mean.item()


def test_info_nce_equals_a_slow_reference() -> None:
    torch.manual_seed(0)
    texts, images = (F.normalize(torch.randn(4, 8), dim=-1) for _ in range(2))
    loss = info_nce(texts, images, IDS, torch.tensor(5.0))
    total = 0.0
    for i in range(4):
        others = [j for j in range(4) if j == i or IDS[j] != IDS[i]]
        own = math.exp(5 * float(texts[i] @ images[i]))
        total -= math.log(own / sum(math.exp(5 * float(texts[i] @ images[j])) for j in others)) / 2
        total -= math.log(own / sum(math.exp(5 * float(texts[j] @ images[i])) for j in others)) / 2
    assert loss.sum.item() == pytest.approx(total, rel=1e-5) and loss.count == 4
    nothing = info_nce(texts[:0], images[:0], (), torch.tensor(5.0))
    assert nothing.sum.item() == 0 and nothing.count == 0


def test_pairs_that_do_not_learn_are_left_out() -> None:
    """That owners and padding change nothing is checked on every family (test_conformance.py)."""
    model, whole = made(), batch()
    two = contrast(model, whole, torch.tensor([True, True, False, False]))
    assert two == pytest.approx(contrast(model, whole.select(torch.tensor([0, 1]))), rel=1e-5)
    assert contrast(model, whole, torch.zeros(4, dtype=torch.bool)) == 0
    with pytest.raises(ParamsError, match="max_positions is 8"):
        model.embed_text(Text(ids_BT=torch.ones(1, 9, dtype=torch.int64), mask_BT=torch.ones(1, 9, dtype=torch.bool)))


def test_training_matches_texts_and_images() -> None:
    model, whole = made().train(), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        asked = {"contrast": None}
        losses = model.pretraining_losses(whole, objectives=asked, generator=torch.Generator(), mask_probability=0.0)
        optimizer.zero_grad()
        losses["contrast"].mean.backward()
        optimizer.step()
    assert losses["contrast"].parts["contrast_accuracy"].mean == 1


def test_without_partial_load_the_start_must_fit_completely(tmp_path: Path) -> None:
    """A setting that changes no weight is accepted; another width is not."""
    before = made()
    info = CheckpointInfo(family="toy", name="toy", model_config=to_plain(SMALL), max_text_len=8)
    seeing = made(dataclasses.replace(SMALL, augment=False, init_std=0.5))
    assert load_start(seeing, info, before.state_dict(), tmp_path) == []
    torch.testing.assert_close(seeing.patches.weight, before.patches.weight)
    with pytest.raises(CheckpointError, match="of another shape"):
        load_start(made(dataclasses.replace(SMALL, hidden=32)), info, before.state_dict(), tmp_path)
