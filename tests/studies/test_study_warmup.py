"""The image's side learns to see once, before everything else, and every arm and seed begins with the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pretraining_study import adapter
from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.data import SYMBOLS, Data
from pretraining_study.run import pretrained, run_arm
from pretraining_study.setting import Setting
from pretraining_study.vision_warmup import _loss, cells, vision_warmup
from torch import nn

pytestmark = pytest.mark.slow

SETTING = Setting(
    side=48, vision_warmup=40, web=24, train=4, val=3, test=6, questions=2, hidden=16, heads=2, batch=8, lr=1e-2
)


@pytest.fixture(scope="module")
def data() -> Data:
    torch.set_num_threads(1)
    return Data(SETTING)


def test_what_lies_on_a_cell_is_what_is_drawn_there_in_front(data: Data) -> None:
    scene = data.web_scenes[0]
    found = cells([scene], 6).view(6, 6, len(SYMBOLS))
    for row in range(6):
        for column in range(6):
            x, y = (column + 0.5) * scene.side / 6, (row + 0.5) * scene.side / 6
            on_it = [o for o in scene.objects if o.box[0] <= x < o.box[2] and o.box[1] <= y < o.box[3]]
            wanted = {on_it[-1].shape, on_it[-1].color, on_it[-1].size, on_it[-1].texture} if on_it else set()
            assert {SYMBOLS[i] for i in found[row, column].nonzero().flatten()} == wanted
    assert found.any() and not found.any(-1).all()


@pytest.mark.parametrize(
    ("family", "parts"), [("soho", {"backbone", "neck", "visual_norm"}), ("vlmo", {"image_embedding"})]
)
def test_warm_up_beats_fresh_weights_and_is_shared_by_all_arms(family: str, parts: set[str], data: Data) -> None:
    seeing = vision_warmup(family, data)
    assert {name.partition(".")[0] for name in seeing} == parts
    assert vision_warmup(family, data) is seeing and not vision_warmup(
        family, Data(dataclasses.replace(SETTING, vision_warmup=0))
    )
    true_ICS, rows = cells(data.web_scenes, 6), torch.arange(24)
    fresh = adapter.build(family, {}, data)
    torch.manual_seed(1)
    expected = []
    for model in (fresh, seen(family, data)):
        head = nn.Linear(SETTING.hidden, len(SYMBOLS))  # trained alone, on frozen features
        optimizer = torch.optim.Adam(head.parameters(), lr=3e-2)
        model.train().requires_grad_(False)
        for _ in range(60):
            loss = _loss(model, head, data, true_ICS, rows, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        expected.append(float(loss.detach()))
    assert expected[1] < 0.8 * expected[0]


def seen(family: str, data: Data) -> nn.Module:
    model = adapter.build(family, {}, data)
    adapter.begin_with(model, vision_warmup(family, data))
    return model


def test_arms_of_any_seed_begin_with_them(data: Data) -> None:
    arms: dict[str, Any] = {"family": "soho", "fine_tuning": FineTuning(budgets=(1,)), "tasks": ("vqa",)}
    one = Arm(name="a", label="a", **arms)
    other = Arm(name="b", label="b", config={"dictionary_size": 0}, **arms)
    for arm, seed in ((one, 1), (one, 2), (other, 1)):
        start = pretrained(arm, seed, data, data.train(seed)).state_dict()
        assert all(torch.equal(start[name], value) for name, value in vision_warmup("soho", data).items())
    pretraining = dataclasses.replace(one, pretraining=(Pretraining(objectives=("mlm", "mvm", "itm"), updates=1),))
    moved = pretrained(pretraining, 1, data, data.train(1)).state_dict()
    assert not torch.equal(moved["neck.conv.weight"], vision_warmup("soho", data)["neck.conv.weight"]), (
        "not frozen here"
    )
    frozen = Pretraining(objectives=("mlm", "mvm", "itm"), updates=1, frozen=("cnn", "cnn_stem"))
    kept = pretrained(dataclasses.replace(one, pretraining=(frozen,)), 1, data, data.train(1)).state_dict()
    assert all(
        torch.equal(kept[name], value) for name, value in vision_warmup("soho", data).items() if "backbone" in name
    )
    assert run_arm(one, 1, data)["test"] != run_arm(one, 2, data)["test"]
    with pytest.raises(KeyError, match="no color in this model"):
        adapter.begin_with(seen("soho", data), {"color": torch.zeros(1)})
