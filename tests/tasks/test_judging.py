"""The gate's copy of a task's attributes, read without torch, equals that of the task's class."""

from __future__ import annotations

from vlp_models.tasks import TASKS, task_class
from vlp_models.tasks.judging import BUILT_IN, Judging, judging_of


def test_built_in_tasks_are_judged_as_their_classes_say() -> None:
    assert BUILT_IN.keys() == TASKS.builtin.keys()
    for name, judging in BUILT_IN.items():
        own = task_class(name)
        beat = tuple(own.baselines_to_beat)
        assert judging == Judging(metric=own.metric, direction=own.direction, baselines_to_beat=beat), name
        assert judging_of(name) is judging
