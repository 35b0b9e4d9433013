"""Unified VLP's study is whole: its arms run, differ, and are what its contrasts ask about."""

from __future__ import annotations

import pytest
from pretraining_study import adapter
from pretraining_study.data import Data
from pretraining_study.run import run_arm
from pretraining_study.setting import Setting
from unified_vlp import ARMS, STUDY

TINY = Setting(web=40, train=6, val=4, test=4, questions=2, hidden=16, heads=2, batch=8)


@pytest.fixture(scope="module")
def data() -> Data:
    return Data(TINY)


def test_every_contrasts_arms_are_there() -> None:
    plan = STUDY.plan
    assert {c.first for c in plan.contrasts} | {c.second for c in plan.contrasts} == {arm.name for arm in ARMS}
    assert all(reached > 0.8 for _, _, reached in plan.power_table())


def test_every_arm_runs_and_is_another_one(data: Data) -> None:
    results = {arm.name: run_arm(arm.scaled(0.01), 1, data) for arm in ARMS}
    likelihoods = [result["test"]["nll"] for result in results.values()]
    assert len(set(likelihoods)) == len(ARMS)
    for result in results.values():
        assert {"nll", "cider", "true", "vqa"} == set(result["test"])
    again = run_arm(ARMS[-1].scaled(0.01), 1, data)
    assert again["test"] == results[ARMS[-1].name]["test"]


def test_it_is_asked_for_what_it_can_do(data: Data) -> None:
    model = adapter.build("unified_vlp", {}, data)
    assert [adapter.can(model, task) for task in ("captioning", "vqa", "retrieval")] == [True, True, False]
    assert all(adapter.can(adapter.build("tden", {}, data), task) for task in ("captioning", "vqa", "retrieval"))
