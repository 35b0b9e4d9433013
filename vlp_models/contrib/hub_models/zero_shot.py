"""The scores of two towers as they were loaded, a baseline of every retrieval of a project that has some."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlp_models.common.workspace import Workspace
from vlp_models.metrics.score import Score
from vlp_models.tasks.base import TaskModel
from vlp_models.tasks.scoring import EvalContext


def score_untrained(
    workspace: Workspace, name: str, trained: TaskModel, split: str, context: EvalContext, batch_size: int = 100
) -> list[Score]:
    """Return the scores of retrieval of checkpoints/initial/NAME for one dataset and split; none if it is missing.

    Args:
        name: of the model in params.yaml.
        trained: the model that they are compared with, whose options and device are used.
    """
    from vlp_models.data.shards.dataset import ShardDataset
    from vlp_models.data.tokenizer import Tokenizer
    from vlp_models.evaluation.predict import predict_all
    from vlp_models.models.checkpoint import build_from_config, load_checkpoint_weights, read_config, read_weights
    from vlp_models.tasks.retrieval import Retrieval

    directory = workspace.checkpoint(f"initial/{name}")
    if not directory.exists():  # an old version is evaluated again in another project
        return []
    info, tokenizer = read_config(directory), Tokenizer.load(directory)
    model: Any = build_from_config(info, tokenizer, directory)
    info = dataclasses.replace(
        info,
        task=Retrieval.task,
        options={"fold": trained.options.fold},
        max_text_len=model.config.max_positions,
    )
    task = Retrieval(model, tokenizer, info)
    load_checkpoint_weights(task, read_weights(directory), directory)
    task.to(next(trained.parameters()).device).eval()
    dataset = ShardDataset(workspace.shards, split, task.prediction_view, {context.source: 1}, **task.reader.flags)
    predictions, samples = predict_all(
        task, dataset, batch_size=batch_size, with_blind=False, description=f"zero-shot {name} on {split}"
    )
    return task.score(predictions, samples, context).scores
