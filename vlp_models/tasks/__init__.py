"""The tasks, by the name params.yaml gives them. A task is one file here, or a folder, and one line below.

Whatever must be known of a task is asked of its class (`base.TaskModel`), which is imported only when it is asked for:
this file imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vlp_models.errors import ParamsError

if TYPE_CHECKING:
    from vlp_models.tasks.base import TaskModel

TASKS: dict[str, str] = {
    "captioning": "vlp_models.tasks.captioning:Captioning",
    "vqa": "vlp_models.tasks.vqa:VQA",
    "nlvr": "vlp_models.tasks.nlvr:NLVR",
    "nlvr2": "vlp_models.tasks.nlvr2:NLVR2",
    "entailment": "vlp_models.tasks.entailment:Entailment",
    "retrieval": "vlp_models.tasks.retrieval:Retrieval",
    "vcr": "vlp_models.tasks.vcr:VCR",
}


def task_class(task: str) -> type[TaskModel]:
    """
    Raises:
        ParamsError: no such task.
    """
    if task not in TASKS:
        raise ParamsError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    module, _, name = TASKS[task].partition(":")
    found: type[TaskModel] = getattr(import_module(module), name)
    return found
