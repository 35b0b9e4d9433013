"""The gate's copy of attributes of the core's tasks, read without torch, equals that of the task's class."""

from __future__ import annotations

from vlp_models.tasks import TASKS, task_class
from vlp_models.tasks.judging import CORE, Judging, judging_of


def test_tasks_of_the_core_are_judged_as_their_classes_say() -> None:
    assert CORE.keys() == {name for name, target in TASKS.items() if not target.startswith("vlp_models.contrib.")}
    for name, judging in CORE.items():
        own = task_class(name)
        beat = tuple(own.baselines_to_beat)
        assert judging == Judging(metric=own.metric, direction=own.direction, baselines_to_beat=beat), name
        assert judging_of(name) is judging
