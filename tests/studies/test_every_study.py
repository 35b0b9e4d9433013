"""The studies of all models are whole: their arms run, differ, and are what their contrasts ask about."""

from __future__ import annotations

import dataclasses

import objectives
import pytest
import soho
import torch
import unified_vlp
import vlmo
import xgpt
from pretraining_study.arms import Arm
from pretraining_study.contrasts import judge
from pretraining_study.data import Data
from pretraining_study.run import run_arm
from pretraining_study.study import Study
from pretraining_study.write_up import write_up

SMALL = {"web": 40, "train": 6, "val": 4, "test": 4, "questions": 2, "hidden": 16, "heads": 2, "batch": 8}
CAPTIONS, ANSWERS, MATCHES = {"nll", "cider", "true"}, {"answer_nll", "vqa"}, {"match_nll", "r1"}
STUDIES = {
    "unified_vlp": (unified_vlp.STUDY, CAPTIONS | ANSWERS),
    "xgpt": (xgpt.STUDY, CAPTIONS),
    "vlmo": (vlmo.STUDY, ANSWERS | MATCHES),
    "soho": (soho.STUDY, ANSWERS | MATCHES),
    "objectives": (objectives.STUDY, CAPTIONS),
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_contrasts_arms_are_there(name: str) -> None:
    study, _ = STUDIES[name]
    plan = study.plan
    assert {c.first for c in plan.contrasts} | {c.second for c in plan.contrasts} == {a.name for a in study.arms}
    assert all(reached > 0.8 for _, _, reached in plan.power_table())


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_runs_and_is_another_one(name: str) -> None:
    """By a few updates of each, and twice the same; what was found then makes a page."""
    study, metrics = STUDIES[name]
    setting = dataclasses.replace(study.setting, **SMALL, vision_warmup=min(2, study.setting.vision_warmup))
    data = Data(setting)
    found = {arm.name: {1: run_arm(tiny(arm), 1, data)} for arm in study.arms}
    for arm in study.arms:
        test = found[arm.name][1]["test"]
        assert test.keys() == ({"r1"} if arm.tasks == ("retrieval",) else metrics)
        assert all(torch.tensor(list(test.values())).isfinite())
    expected = [found[arm.name][1]["test"] for arm in study.arms if arm.tasks != ("retrieval",)]
    first = [next(iter(test.values())) for test in expected]
    assert len(set(first)) == len(first), "two arms are the same"
    last = study.arms[-1]
    assert run_arm(tiny(last), 1, data)["test"] == found[last.name][1]["test"]
    page(study, found)


def tiny(arm: Arm) -> Arm:
    return arm.scaled(0.01)


def page(study: Study, found: dict[str, dict[int, dict]]) -> None:  # type: ignore[type-arg]
    """Of two seeds, the second made up: as the first, a little less."""
    for rows in found.values():
        rows[2] = {**rows[1], "test": {metric: 0.9 * value - 0.01 for metric, value in rows[1]["test"].items()}}
    plan = study.plan
    values = {arm: {seed: result["test"] for seed, result in rows.items()} for arm, rows in found.items()}
    text = write_up(study, plan, judge(plan, values), found, {})
    assert f"The plan has {plan.seeds} seeds: this is a first part of it." in text
    for arm in study.arms:
        assert f"(`{arm.name}`) | 2 |" in text
    for contrast in plan.contrasts:
        assert contrast.question in text
