"""The section of params.yaml that says how the pipeline runs unattended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlp_models.errors import ParamsError

PARTS = (
    "ingest",
    "drift",
    "validate",
    "features",
    "pretrain",
    "scheduled_sampling",
    "finetune",
    "evaluate",
    "register",
    "promote",
    "report",
)


@dataclass(frozen=True, kw_only=True)
class FlowParams:
    """Every default is what a params.yaml without the section gets.

    webhook: `env:NAME` takes the URL from that environment variable, so that no secret lies in this file.
    gpu_limit: the Prefect global concurrency limit whose slot a stale GPU stage takes; empty: none.
    """

    webhook: str = ""
    webhook_timeout: float = 5.0  # seconds for the whole call
    notify: Literal["all", "failures"] = "all"
    gpu_limit: str = "gpu"
    retry_delays: list[int] = field(default_factory=lambda: [10, 30, 60])  # seconds before each retry
    wait_minutes: float = 720.0  # for another run to let go of the workspace
    timeout_hours: dict[str, float] = field(default_factory=dict)  # part -> hours; a part without one may take for ever

    def __post_init__(self) -> None:
        unknown = [name for name in self.timeout_hours if name not in PARTS]
        if unknown:
            raise ParamsError(f"params.yaml: `flow.timeout_hours.{unknown[0]}` is no part; parts: {', '.join(PARTS)}")
        if any(not hours > 0 for hours in self.timeout_hours.values()):
            raise ParamsError("params.yaml: `flow.timeout_hours` must be positive; leave a part out for no limit")
        if not 0 < self.webhook_timeout <= 600:
            raise ParamsError(f"params.yaml: `flow.webhook_timeout: {self.webhook_timeout}`: 600 seconds at most")
        if not self.wait_minutes >= 0 or any(delay < 0 for delay in self.retry_delays):
            raise ParamsError("params.yaml: `flow`: seconds and minutes must not be negative")
        if self.webhook and not self.webhook.startswith(("env:", "http://", "https://")):
            raise ParamsError("params.yaml: `flow.webhook` must be env:NAME, or a URL with http:// or https://")
