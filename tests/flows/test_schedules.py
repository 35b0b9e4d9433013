"""`vlp up` registers deployments again: schedules that were active stay active, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli.stack import TO_RESUME, Stack, register_deployments, resume_schedules
from vlp_models.common.io import read_json
from vlp_models.errors import DataError


class Killed(BaseException):
    """Nothing runs after it."""


class Server(Stack):
    """A stack whose `prefect deploy` pauses the first deployment, as Prefect does, and then fails."""

    def __init__(self, root: Path, failure: BaseException | None) -> None:
        super().__init__(root)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.failure = failure
        self.active = {"weekly": True, "model": False}

    def prefect(self, *arguments: str) -> None:
        assert arguments == ("deploy", "--all")
        self.active["weekly"] = False
        if self.failure is not None:
            raise self.failure

    def call(self, path: str, body: Any = None, method: str = "", timeout: float = 60) -> Any:
        if path == "/deployments/filter":
            return [
                {"id": name, "schedules": [{"id": f"{name}-schedule", "active": active}]}
                for name, active in self.active.items()
            ]
        _, _, name, _, schedule = path.split("/")
        assert (schedule, method, body) == (f"{name}-schedule", "PATCH", {"active": True})
        self.active[name] = True
        return None


@pytest.mark.parametrize("failure", [None, DataError("`prefect deploy --all` failed"), KeyboardInterrupt()])
def test_active_schedules_stay_active_if_a_later_deployment_fails(
    tmp_path: Path, failure: BaseException | None
) -> None:
    server = Server(tmp_path, failure)
    if failure is None:
        register_deployments(server)
    else:
        with pytest.raises(type(failure)):
            register_deployments(server)
    assert server.active == {"weekly": True, "model": False}
    assert TO_RESUME not in read_json(server.folder / "record.json")


def test_schedules_paused_by_a_killed_call_are_resumed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Server(tmp_path, Killed())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("vlp_models.cli.stack.resume_schedules", lambda stack: None)
        register_deployments(killed)
    assert killed.active["weekly"] is False and read_json(killed.folder / "record.json")[TO_RESUME] == ["weekly"]

    again = Server(tmp_path, None)
    again.active = dict(killed.active)
    register_deployments(again)
    assert again.active == {"weekly": True, "model": False} and TO_RESUME not in again.record

    again.save(**{TO_RESUME: ["weekly", "deleted"]})
    again.active["weekly"] = False
    resume_schedules(again)
    assert again.active == {"weekly": True, "model": False} and TO_RESUME not in again.record
