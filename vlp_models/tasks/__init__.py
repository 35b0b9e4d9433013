"""The downstream tasks, by their name in params.yaml; contrib/reasoning_tasks has four more.

To add a task, edit (1 to 3, 5 and 8 only if nothing existing fits):
1. `data/views/`: a file with the view (table) that its samples come from, and a line in `VIEW_MODULES`.
2. `data/formats/`: a reader that fills that table from the dataset's own files, and names it in `@fills`.
3. `curation/validation/rules.py` (derived columns: `columns.py`): rules that the view's columns do not imply.
4. `tasks/<task>.py`: a `TaskModel` (base.py): head, loss, prediction, scores, official result file, options; and one
   line in `TASKS` below. `baselines_to_beat` names the baselines that a first champion must be better than.
5. `metrics/`: its metric. `SEED_STD` and `RELEVANT_GAIN` in `params/operations.py` have the gate's defaults by metric.
6. params.yaml: a run under `finetune:`; `tracking.metric` ranks its versions, `promotion.tasks` configures its gate.
7. Optional: a gallery in `contrib/report_pictures/galleries.py` (without one: the fields of its predictions),
   and the demo page: `TASKS` in `contrib/demo_page/commands.py`, `handlers.py` and `version_card.py`.
8. `PROTOCOL_NAMES` in `tasks/base.py`: the name of a new ability that models must implement (`models/protocols.py`).

`vlp new task NAME` writes a complete example over an existing view (contrib/plugin_kit/scaffolds/task), and `vlp try
NAME` checks it. A task's class is imported only when it is used: this file imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import ParamsError

if TYPE_CHECKING:
    from vlp_models.tasks.base import TaskModel

TASKS = Table(
    "tasks",
    {
        "captioning": "vlp_models.tasks.captioning:Captioning",
        "vqa": "vlp_models.tasks.vqa:VQA",
        "retrieval": "vlp_models.tasks.retrieval:Retrieval",
    },
)


def check_task(task: str) -> None:
    """
    Raises:
        ParamsError: there is no such task; names the nearest one.
    """
    from vlp_models.params.schema import suggestion

    if task not in TASKS:
        raise ParamsError(f"{task}: no such task{suggestion(task, TASKS)}")


def task_class(task: str) -> type[TaskModel]:
    """Import and return the class of a task.

    Raises:
        ParamsError: unknown task; names the nearest one.
    """
    from vlp_models.params.schema import suggestion

    if task not in TASKS:
        raise ParamsError(f"unknown task {task!r}{suggestion(task, TASKS)}")
    task_type: type[TaskModel] = import_target(TASKS[task])
    return task_type
