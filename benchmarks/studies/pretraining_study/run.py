"""One arm and seed, from fresh weights to figures."""

from __future__ import annotations

import copy
import os
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from pretraining_study import adapter, measure
from pretraining_study.arms import TASKS, Arm
from pretraining_study.data import Data, Split
from pretraining_study.learn import Learner, pretraining


def run_arm(arm: Arm, seed: int, data: Data) -> dict[str, Any]:
    """
    Returns:
        `test`: metric -> value (measure.METRICS). `val`, `budgets`: what the choice of a budget was made by, and its
        outcome, for each task. `seconds`: CPU seconds of this process's pretraining, fine-tuning and measuring.
    """
    torch.set_num_threads(1)  # a study's seeds run beside each other; the order of additions stays the same
    torch.set_flush_denormal(True)
    setting = data.setting
    split, seconds, began = data.train(seed), {}, time.perf_counter()
    for held_out in (data.val, data.test):  # made once a process: no arm's time
        _ = held_out.true_NI

    start = time.process_time()
    torch.manual_seed(1000 * seed)
    model = adapter.build(arm.family, arm.config, data)
    if arm.pretraining is not None:
        for _ in pretraining(model, arm.pretraining, data, family=arm.family, seed=seed):
            pass
    seconds["pretraining"] = time.process_time() - start

    test: dict[str, float] = {}
    val: dict[str, dict[str, float]] = {}
    chosen: dict[str, int] = {}
    seconds |= {"fine-tuning": 0.0, "measuring": 0.0}
    for task in filter(partial(adapter.can, model), TASKS):
        learners: dict[int, Learner] = {}
        scores: dict[int, float] = {}
        for budget in arm.fine_tuning.budgets:
            start = time.process_time()
            lr = setting.lr * arm.fine_tuning.lr_factor
            learners[budget] = Learner(copy.deepcopy(model), data, split, seed=seed, lr=lr)
            getattr(learners[budget], task)(budget)
            seconds["fine-tuning"] += time.process_time() - start
            start = time.process_time()
            scores[budget] = _score(task, learners[budget], data.val, data)
            seconds["measuring"] += time.process_time() - start
        # the first of equals: the smaller budget
        chosen[task] = max(scores, key=lambda budget: scores[budget])
        val[task] = {str(budget): round(score, 5) for budget, score in scores.items()}
        start = time.process_time()
        best = learners[chosen[task]]
        if task == "captioning":
            test["nll"] = measure.nll(best.model, data.test)
            test |= measure.captions(best.model, data.test, data)
        elif task == "vqa":
            test["vqa"] = measure.vqa(best.model, best.head, data.test, data)
        else:
            test["r1"] = measure.retrieval(best.model, data.test)
        seconds["measuring"] += time.process_time() - start
    return {
        "arm": arm.name,
        "seed": seed,
        "test": test,
        "val": val,
        "budgets": chosen,
        "parameters": _parameters(model),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "wall_seconds": round(time.perf_counter() - began, 2),
        "load": round(os.getloadavg()[0], 2),
    }


def _score(task: str, learner: Learner, split: Split, data: Data) -> float:
    """Higher is better."""
    if task == "captioning":
        return -measure.nll(learner.model, split)
    if task == "vqa":
        return measure.vqa(learner.model, learner.head, split, data)
    return measure.retrieval(learner.model, split)


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
