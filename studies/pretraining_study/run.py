"""One arm and seed, from fresh weights to figures."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from pretraining_study import adapter, measure
from pretraining_study.arms import Arm
from pretraining_study.data import Data, Split
from pretraining_study.learn import Learner, pretraining
from pretraining_study.vision_warmup import vision_warmup

DRAWS = 6  # captions that are drawn of an image, where some are kept


def run_arm(arm: Arm, seed: int, data: Data) -> dict[str, Any]:
    """
    Returns:
        `test`: metric -> value (measure.METRICS). `val`, `budgets`: what the choice of a budget was made by, and its
        outcome, for each task. `seconds`: CPU seconds of this process's pretraining, fine-tuning and measuring; of an
        arm whose captions another one writes, that one's are in `writing`.
    """
    torch.set_num_threads(1)  # seeds run in parallel; one thread keeps the order of additions
    torch.set_flush_denormal(True)
    setting, tuning = data.setting, arm.fine_tuning
    split, seconds, began = data.train(seed), {}, time.perf_counter()
    for held_out in (data.val, data.test):  # made once a process: no arm's time
        _ = held_out.true_NI
    _ = vision_warmup(arm.family, data)  # likewise

    if tuning.captioner is not None:
        start = time.process_time()
        split = _written_besides(tuning.captioner, tuning.written, split, seed, data)
        seconds["writing"] = time.process_time() - start
    start = time.process_time()
    model = pretrained(arm, seed, data, split)
    seconds["pretraining"] = time.process_time() - start

    test: dict[str, float] = {}
    val: dict[str, dict[str, float]] = {}
    chosen: dict[str, int] = {}
    seconds |= {"fine-tuning": 0.0, "measuring": 0.0}
    for task in filter(partial(adapter.can, model), arm.tasks):
        learners: dict[int, Learner] = {}
        scores: dict[int, float] = {}
        for budget in tuning.budgets:
            start = time.process_time()
            learners[budget] = Learner(copy.deepcopy(model), data, split, seed=seed, lr=setting.lr * tuning.lr_factor)
            learners[budget].learn(task, budget)
            seconds["fine-tuning"] += time.process_time() - start
            start = time.process_time()
            scores[budget] = _score(task, learners[budget], data.val, data)
            seconds["measuring"] += time.process_time() - start
        # the first of equals: the smaller budget
        chosen[task] = max(scores, key=lambda budget: scores[budget])
        val[task] = {str(budget): round(score, 5) for budget, score in scores.items()}
        start = time.process_time()
        test |= _measured(task, learners[chosen[task]], data)
        seconds["measuring"] += time.process_time() - start
    return {
        "arm": arm.name,
        "seed": seed,
        "test": test,
        "val": val,
        "budgets": chosen,
        "parameters": parameters(model),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "wall_seconds": round(time.perf_counter() - began, 2),
        "load": round(os.getloadavg()[0], 2),
    }


def pretrained(arm: Arm, seed: int, data: Data, split: Split) -> nn.Module:
    """Return the model after its vision warm-up and pretraining. split: the target's training images."""
    seeing = vision_warmup(arm.family, data)
    torch.manual_seed(1000 * seed)
    model = adapter.build(arm.family, arm.config, data)
    adapter.begin_with(model, seeing)
    for _ in pretraining(model, arm, data, split, seed=seed):
        pass
    return model.eval()


def _written_besides(captioner: Arm, number: int, split: Split, seed: int, data: Data) -> Split:
    """The training images with new captions besides: at most `number` of each image, the likeliest by token of those
    that the captioner, fine-tuned on the same images, wrote in `DRAWS` tries."""
    learner = Learner(pretrained(captioner, seed, data, split), data, split, seed=seed, lr=data.setting.lr)
    learner.captioning(captioner.fine_tuning.budgets[0])
    chance = torch.Generator().manual_seed(1000 * seed + 12)
    drawn = adapter.write(learner.model, split.images, data.tokenizer, DRAWS, chance)
    new = [
        [text for text in dict.fromkeys(texts) if text not in known][:number]
        for texts, known in zip(drawn, split.references, strict=True)
    ]
    owners = split.captions.owner_N.tolist() + [i for i, texts in enumerate(new) for _ in texts]
    return dataclasses.replace(
        split, captions=data.texts([*split.captions.words, *(text for texts in new for text in texts)], owners)
    )


def _measured(task: str, learner: Learner, data: Data) -> dict[str, float]:
    """On the test images."""
    if task == "captioning":
        generated = measure.captions(learner.model, data.test, data)
        return {"nll": measure.nll(learner.model, data.test), **generated}
    if task == "vqa":
        assert learner.head is not None
        return measure.answers(learner.model, learner.head, data.test, data)
    return measure.retrieval(learner.model, data.test)


def _score(task: str, learner: Learner, split: Split, data: Data) -> float:
    """Higher is better."""
    if task == "captioning":
        return -measure.nll(learner.model, split)
    if task == "vqa":
        assert learner.head is not None
        return measure.answers(learner.model, learner.head, split, data)["vqa"]
    return measure.retrieval(learner.model, split)["r1"]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
