"""Whether a run can be searched as `evaluate` asks, asked of the shards before hours of training."""

from __future__ import annotations

from pathlib import Path

from vlp_models.params import Params
from vlp_models.tasks import task_class


def check_searches(params: Params, shards: Path, checkpoint: str) -> None:
    """Of each run that `checkpoint` (`pretrain/RUN`, `finetune/RUN`) leads to.

    Raises:
        DataError: one of them learns from what its search can't look things up in.
    """
    for name, run in params.finetune.items():
        if checkpoint in params.chain(f"finetune/{name}") and not run.blank_images:
            task_class(run.task).check_search(params.evaluate, shards, run.sources)
