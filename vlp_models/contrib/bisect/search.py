"""Which of several changes lowered a score: halves first, then a minimal set if a change alone does not.

With one cause among n changes it takes log2(n) + 1 trials. If two changes lower the score only together, no half does,
and the minimal set is found as by QuickXplain (Junker, 2004): of k causes with about 2k log2(n / k) + 2k trials. No
trial is made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Subset = frozenset[str]


@dataclass
class Search:
    """Find the changes that lower the score.

    lowers      whether a set of changes, applied to the good side, has the lower score
    candidates  what the cause is among, so far; current if `lowers` raises
    """

    lowers: Callable[[Subset], bool]
    trials: dict[Subset, bool] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)

    def find_causes(self, changes: Sequence[str]) -> list[str]:
        """Return a minimal set of changes that lowers the score; all of them together do."""
        self.trials[frozenset()], self.trials[frozenset(changes)] = False, True
        self.candidates = list(changes)
        while len(self.candidates) > 1:
            middle = len(self.candidates) // 2
            first, second = self.candidates[:middle], self.candidates[middle:]
            # If the first half does not lower the score, the other is assumed to; the trial of the last one checks it.
            self.candidates = first if self._is_lower(first) else second
        if self._is_lower(self.candidates):
            return self.candidates
        # No change alone: the cause is a set that halves have split.
        self.candidates = list(changes)
        return self._explain([], False, list(changes))

    def _is_lower(self, changes: Sequence[str]) -> bool:
        trial = frozenset(changes)
        if trial not in self.trials:
            self.trials[trial] = self.lowers(trial)
        return self.trials[trial]

    def _explain(self, background: list[str], is_new: bool, changes: list[str]) -> list[str]:
        """Return a minimal set of the changes that lowers the score in addition to the background.

        Args:
            is_new: something was added to the background since its last trial.
        """
        if is_new and self._is_lower(background):
            return []
        if len(changes) == 1:
            return changes
        first, second = changes[: len(changes) // 2], changes[len(changes) // 2 :]
        causes_in_second = self._explain([*background, *first], True, second)
        causes_in_first = self._explain([*background, *causes_in_second], bool(causes_in_second), first)
        return [*causes_in_first, *causes_in_second]
