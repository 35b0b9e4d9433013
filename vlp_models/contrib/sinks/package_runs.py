"""A training's curve as a run in Weights & Biases or Trackio.

Nothing leaves the machine unless the environment allows it: W&B is offline without WANDB_API_KEY or WANDB_MODE.
"""

from __future__ import annotations

import os
import uuid
from abc import abstractmethod
from pathlib import Path
from typing import Any

from vlp_models.registry.curve_loggers import NOT_METRICS, CurveLogger, Status

# Nothing but the curve is sent: no code, no console output, no crash reports, no usage statistics.
ENVIRONMENT = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_SILENT": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


class PackageRun(CurveLogger):
    """One run of a package; it starts with the first line, so that a training that fails at once leaves none."""

    def __init__(self, name: str, title: str, project: str, root: Path, work: Path, run_params: dict[str, str]) -> None:
        """
        Args:
            name: of the package. root: runs are stored in .work/NAME there. work: the training's work directory.
        """
        super().__init__(name, title, work / f"{name}.json", {"id": uuid.uuid4().hex[:12], "step": 0})
        self.project, self.folder, self.run_params = project, root / ".work" / name, run_params

    def _send(self, log: Path) -> None:
        rows = self._new_rows(log)
        if not rows:
            return
        if self._connection is None:
            # `setdefault`: what the user has set stays.
            for key, value in ENVIRONMENT.items():
                os.environ.setdefault(key, value)
            self._connection = self._start()
        try:
            for row in rows:
                numbers = {name: float(value) for name, value in row.items() if name not in NOT_METRICS}
                self._connection.log(numbers, step=row["step"])
                self._state["step"] = row["step"]
        finally:
            # Also after an error: rows that were sent must not be sent twice.
            self._save_state()

    @abstractmethod
    def _start(self) -> Any:
        """Return a new run, or the one of a training that is resumed."""


class WandbRun(PackageRun):
    def _start(self) -> Any:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        # Online only if the environment has a key or names the mode.
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        settings = wandb.Settings(
            console="off", silent=True, init_timeout=20, x_disable_stats=True, x_disable_meta=True
        )
        return wandb.init(
            project=self.project,
            name=self.title,
            id=self._state["id"],
            # W&B resumes online runs only.
            resume="allow" if mode == "online" else None,
            config=self.run_params,
            dir=self.folder,
            mode=mode,
            settings=settings,
        )

    def _finish(self, status: Status, ended: int | None) -> None:
        if self._connection is not None:
            self._connection.finish(exit_code=0 if status == "FINISHED" else 1)


class TrackioRun(PackageRun):
    def _start(self) -> Any:
        os.environ.setdefault("TRACKIO_DIR", str(self.folder.absolute()))  # read at import
        import trackio

        name = f"{self.title}-{self._state['id']}".replace("/", "-")
        return trackio.init(project=self.project, name=name, config=self.run_params, resume="allow")

    def _finish(self, status: Status, ended: int | None) -> None:
        if self._connection is not None:
            import trackio

            trackio.finish()  # `run.finish` would be called again, and print, when the process ends
