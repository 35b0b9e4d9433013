"""What an update of each arm's pretraining costs, measured where the machine is busy with other things as well."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch.utils.flop_counter import FlopCounterMode

from pretraining_study import adapter
from pretraining_study.arms import Arm
from pretraining_study.data import Data
from pretraining_study.learn import pretraining

WARM_UP = 4  # updates


def update_costs(arms: Sequence[Arm], data: Data, rounds: int) -> dict[str, float]:
    """CPU seconds of an update, forward, backward and optimizer, by arm: the mean of the first `rounds`, no more than
    any arm has. What a process does only once, at its first updates, counts for none: each arm begins twice.

    The arms take turns, update by update, so that whatever else the machine does is done to all of them.
    """

    def begin(arm: Arm) -> Iterator[int]:
        torch.manual_seed(0)
        seen = data.for_family(arm.family)
        return pretraining(adapter.build(arm.family, arm.config, seen), arm, seen, seen.train(1), seed=0)

    torch.set_num_threads(1)
    pretrained = [arm for arm in arms if arm.pretraining]
    for arm in pretrained:
        for _ in islice(begin(arm), WARM_UP):
            pass
    under_way = {arm.name: begin(arm) for arm in pretrained}
    seconds: dict[str, list[float]] = {name: [] for name in under_way}
    for _ in range(rounds):
        for name, updates in under_way.items():
            start = time.process_time()
            next(updates)
            seconds[name].append(time.process_time() - start)
    return {name: statistics.fmean(values) for name, values in seconds.items()}


def update_flops(arm: Arm, data: Data, rounds: int) -> float:
    """FLOPs of an update, forward and backward: matrix products and convolutions, a multiply-add being two."""
    seen = data.for_family(arm.family)
    torch.manual_seed(0)
    model = adapter.build(arm.family, arm.config, seen)
    torch.backends.cuda.enable_flash_sdp(False)  # the counter does not know its products
    try:
        with FlopCounterMode(display=False) as counter:
            for _ in islice(pretraining(model, arm, seen, seen.train(1), seed=0), rounds):
                pass
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    return counter.get_total_flops() / rounds
