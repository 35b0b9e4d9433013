"""The section `retention` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from vlp_models.params.schema import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class RetentionParams:
    """What `vlp prune` and the unattended flow leave in place; with 0 everything stays.

    versions  newest registered versions of each task that keep their files. Versions with an alias, every champion that
              a rollback can reach, and what this workspace has registered last keep theirs in any case
    commits   newest commits whose data stays in DVC's cache, in addition to that of the workspace and of every version
              that keeps its files
    remote    delete from DVC's default remote, too
    days      of ingested submissions in data/inbox/done, and of resume states of runs that params.yaml no longer has
    """

    versions: NonNegativeInt = 0
    commits: NonNegativeInt = 0
    remote: bool = False
    days: NonNegativeInt = 0

    @property
    def is_on(self) -> bool:
        return bool(self.versions or self.commits or self.days)
