"""What was decided on a version, in plain data: for the ledger, the report and the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vlp_models.registry.promotion.gate import Answer

Outcome = Literal["promoted", "refused", "unchanged", "rolled back"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided on `version` of the registered model `model`.

    outcome: what happened to the aliases. answer: what the gate said: promote, keep (the champion) or cannot tell;
        empty where it was not asked.
    champion: the version that held the place before. run, run_model: which run made `version`, and whose model that
    is; champion_run, champion_run_model: the same of `champion`. candidates: all that were looked at, best first.
    """

    outcome: Outcome
    task: str
    model: str
    version: int | None
    champion: int | None
    reasons: list[str]
    numbers: dict[str, Any]
    answer: Answer | Literal[""] = ""
    forced: bool = False
    run: str = ""
    run_model: str = ""
    champion_run: str = ""
    champion_run_model: str = ""
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))

    def makers(self) -> dict[str, str]:
        """What every ledger entry says of the two versions' origin."""
        return {
            "run": self.run,
            "run_model": self.run_model,
            "from_run": self.champion_run,
            "from_run_model": self.champion_run_model,
        }
