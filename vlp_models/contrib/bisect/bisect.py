"""Confirm the drop over seeds, search for the changes that cause it, and answer in one sentence."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from vlp_models.contrib.bisect.changes import Changes, find_changes
from vlp_models.contrib.bisect.decision import CompareRule, Decision, confirm_drop, decide, take_common, value_of
from vlp_models.contrib.bisect.differences import find_cached
from vlp_models.contrib.bisect.points import read_points, read_scores, require_measurement
from vlp_models.contrib.bisect.search import Search, Subset
from vlp_models.contrib.bisect.trials import OutOfTimeError, Run, TrialRunner
from vlp_models.errors import DataError, shorten_list
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.score import Evidence
from vlp_models.params import Params
from vlp_models.registry.promotion.gate_rule import gate_rule, gate_spec
from vlp_models.tasks.scoring import read_item_scores

Kind = Literal["causes", "seed", "inconclusive", "not lower", "nothing differs", "untried", "out of time", "listed"]
MIN_SEEDS = 2  # of the two points; a trial starts with one, since all trials vary alike
MAX_CAUSES = 3  # independent ones that are searched for

Train = Callable[[Subset, int], tuple[Run, Evidence | None]]


class UndecidedError(Exception):
    """A trial is not decided after all seeds."""

    def __init__(self, trial: Subset, decision: Decision) -> None:
        super().__init__()
        self.trial, self.decision = trial, decision


@dataclass(kw_only=True)
class Trial:
    """One set of changes. decision: against the good side; None for that side, and for one that does not run."""

    changes: Subset
    runs: list[Run] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    decision: Decision | None = None
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result. causes: each a set of changes that lowers the score only together; candidates: if it is not found."""

    kind: Kind
    sentence: str
    causes: Sequence[Sequence[str]] = ()
    candidates: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(kw_only=True)
class Bisection:
    """One comparison.

    train   trains a set of changes with a seed: its run, and its scores per item
    seen    the drop between the points as they are, in the metric's unit, positive
    groups  test images that both were scored on
    seeds   of a trial at most
    report  called with each line of progress
    """

    names: tuple[str, str]
    task: str
    metric: str
    changes: Changes
    train: Train
    rule: CompareRule
    seen: float
    groups: int = MIN_GROUPS
    seeds: int = 5
    are_versions: bool = False
    report: Callable[[str], None] = print
    trials: dict[Subset, Trial] = field(default_factory=dict)
    drop: Decision | None = None

    def answer(self) -> Answer:
        """Return the answer; whatever the budget allows."""
        if (untrained := self._answer_untrained()) is not None:
            return untrained
        ids = [change.id for change in self.changes.tried]
        search = Search(self._is_lower)
        causes: list[list[str]] = []
        notes: list[str] = []
        try:
            early = self._confirm(frozenset(ids))
            if early is not None:
                return early
            remaining = ids
            while len(causes) < MAX_CAUSES and (not causes or self._is_rest_lower(remaining)):
                search = Search(self._is_lower)
                causes.append(search.find_causes(remaining))
                remaining = [name for name in remaining if name not in causes[-1]]
        except UndecidedError as error:
            if not causes:
                return self._inconclusive(error, search.candidates)
            notes.append("whether the other changes lower the score as well is not decided")
        except OutOfTimeError:
            if not causes:
                return self._out_of_time(search.candidates or ids)
            notes.append("no time was left to try whether the other changes lower the score as well")
        return self._explain(causes, notes)

    def _answer_untrained(self) -> Answer | None:
        """Return the answer if it needs no training."""
        ids = [change.id for change in self.changes.tried]
        good, bad = self.names
        if not ids and not self.changes.untried:
            return Answer(
                kind="nothing differs",
                sentence=f"Nothing that {bad} read differs from {good} but seeds: the difference in {self.metric} of "
                f"{-self.seen:+.2f} is the seed alone."
                if self.seen
                else f"Nothing that {bad} read differs from {good}, and their scores are equal.",
            )
        if self.seen <= 0:
            return Answer(
                kind="not lower",
                sentence=f"{bad} does not score lower than {good} on the test items of both: {self.metric} differs by "
                f"{-self.seen:+z.2f}{'; the better one comes first' if self.seen < 0 else ''}.",
            )
        if not ids:
            return Answer(
                kind="untried",
                sentence=f"Nothing that a trial can change differs between {good} and {bad}; what may have lowered "
                f"{self.metric} by {self.seen:.2f} is {_join(list(self.changes.untried))}, or the seed.",
            )
        return None

    def try_changes(self, ids: Sequence[str]) -> Answer:
        """Make one trial of these changes, without a search."""
        if (untrained := self._answer_untrained()) is not None:
            return untrained
        trial = frozenset(ids)
        try:
            early = self._confirm(frozenset(change.id for change in self.changes.tried))
            if early is not None:
                return early
            lower = self._is_lower(trial)
        except UndecidedError as error:
            return self._inconclusive(error, list(ids))
        except OutOfTimeError:
            return self._out_of_time(ids)
        decision = self.trials[trial].decision
        text = f" ({_interval(decision)})" if decision else ""
        return Answer(
            kind="causes" if lower else "not lower",
            sentence=f"{_join(ids)} {'lowered' if lower else 'did not lower'} {self.metric}{text}.",
            causes=[list(ids)] if lower else [],
        )

    def list_changes(self) -> Answer:
        """Return what a trial can change, without training."""
        if (untrained := self._answer_untrained()) is not None:
            return untrained
        names, count = self.names, len(self.changes.tried)
        return Answer(
            kind="listed",
            sentence=f"{count} change{'s' if count != 1 else ''} between {names[0]} and {names[1]} may have caused the "
            f"difference of {-self.seen:+.2f} in {self.metric}.",
            candidates=[change.id for change in self.changes.tried],
        )

    def _confirm(self, everything: Subset) -> Answer | None:
        """Train both sides with seeds of their own until the drop is confirmed; return the answer if it is not.

        The points' own results are what raised the question, and a bad seed does so more often: they do not count.
        """
        good, bad = self.names
        if self.groups < MIN_GROUPS:
            raise DataError(f"the test has {self.groups} images that both were scored on; a test needs {MIN_GROUPS}")
        for count in range(MIN_SEEDS, self.seeds + 1):
            sides = [self._runs(side, count) for side in (frozenset[str](), everything)]
            for side, name in ((frozenset[str](), good), (everything, bad)):
                if self.trials[side].failed:
                    raise DataError(f"{name} does not train here: {self.trials[side].failed}")
            decision = confirm_drop(sides[1], sides[0], self.rule, seen=self.seen, looks=self.seeds - MIN_SEEDS + 1)
            self.trials[everything].decision = self.drop = decision
            self.report(f"{bad} against {good}, {count} seeds a side: {_interval(decision)}")
            if decision.lower is not None:
                break
        if decision.lower:
            return None
        if decision.lower is None:
            return self._inconclusive(UndecidedError(everything, decision), [])
        untried = self.changes.untried
        if untried:
            return Answer(
                kind="untried",
                sentence=f"All changes that a trial can make do not lower {self.metric} ({_interval(decision)}, and "
                f"{self.seen:.2f} was seen); what remains is {_join(list(untried))}, or the seed.",
            )
        return Answer(
            kind="seed",
            sentence=f"The seed alone: trained again with {_seeds(decision)}, {bad} differs from {good} by "
            f"{_interval(decision)} in {self.metric}, which rules out half of the drop of {self.seen:.2f}.",
        )

    def _runs(self, changes: Subset, count: int) -> list[Evidence]:
        """Return the evidence of a trial's first seeds; fewer if one does not run."""
        trial = self.trials.setdefault(changes, Trial(changes=changes))
        while len(trial.runs) < count and not trial.failed:
            number = len(trial.runs) + 1
            run, evidence = self.train(changes, number)
            trial.runs.append(run)
            name = f"trial {len(self.trials)}: {self._name(changes)}, seed {number}"
            work = f"{run.seconds:,.0f} s, {run.restored} stages restored, {run.ran} run"
            if run.kept:
                work = "from an earlier command"
            if evidence is None and trial.evidence:
                # Memory may have been short, for example: the changes themselves do run.
                raise DataError(f"{name}: failed, and trained with other seeds; run the command again. {run.reason}")
            if evidence is None:
                trial.failed = run.reason or "no scores"
                self.report(f"{name}: does not run ({trial.failed}), {work}")
            else:
                trial.evidence.append(evidence)
                self.report(f"{name}: {self.metric} {self._score(evidence):.2f}, {work}")
        return trial.evidence[:count]

    def _is_lower(self, changes: Subset) -> bool:
        """Decide a trial with as many seeds as it needs. One that does not run does not have the lower score."""
        assert self.drop is not None
        # All that it has: a trial of everything was made with several seeds to confirm the drop.
        made = len(self.trials[changes].runs) if changes in self.trials else 1
        for count in range(made, self.seeds + 1):
            runs = self._runs(changes, count)
            trial, good = self.trials[changes], self.trials[frozenset()]
            if trial.failed:
                return False
            other_trials = [t.evidence for t in self.trials.values() if t is not trial and t is not good and t.evidence]
            last = count == self.seeds
            decision = decide(
                runs, good.evidence, self.rule, drop=-self.drop.value, other_trials=other_trials, last=last
            )
            trial.decision = decision
            if decision.lower is not None:
                break
            # A second side with more seeds decides more than one side alone.
            self._runs(frozenset(), count + 1 if count < self.seeds else count)
        self.report(f"{self._name(changes)}: {_verdict(decision.lower)}, {_interval(decision)}")
        if decision.lower is None:
            raise UndecidedError(changes, decision)
        return decision.lower

    def _is_rest_lower(self, remaining: Sequence[str]) -> bool:
        """Return whether the changes that are no cause lower the score, too: another cause is among them."""
        return bool(remaining) and self._is_lower(frozenset(remaining))

    def _score(self, run: Evidence) -> float:
        return self.rule.sign * value_of(run)

    def _name(self, changes: Subset) -> str:
        if not changes:
            return self.names[0]
        if len(changes) == len(self.changes.tried):
            return f"{self.names[1]} ({len(changes)} changes)" if len(changes) > 1 else self.names[1]
        return shorten_list(sorted(changes), 3)

    def _explain(self, causes: list[list[str]], notes: list[str]) -> Answer:
        described = {change.id: change.describe() for change in self.changes.tried}
        parts = []
        for cause in causes:
            decision = self.trials.get(frozenset(cause), Trial(changes=frozenset())).decision
            together = " only together" if len(cause) > 1 else ""
            by = _interval(decision) if decision else "the drop"
            parts.append(f"{_join([described[name] for name in cause])} lowered {self.metric}{together} ({by})")
            if decision is None or not decision.lower:
                # Trials that do not run, or changes that cancel each other, mislead the search.
                notes.append(f"not verified: {_join(cause)} alone does not show the lower score, but with others")
        rest = frozenset(change.id for change in self.changes.tried) - {name for cause in causes for name in cause}
        trial = self.trials.get(rest)
        remainder = ""
        if rest and trial and trial.decision and trial.decision.lower is False:
            remainder = f"; the other {'change does' if len(rest) == 1 else f'{len(rest)} changes together do'} not"
        return Answer(kind="causes", sentence=f"{'; and '.join(parts)}{remainder}.", causes=causes, notes=notes)

    def _inconclusive(self, error: UndecidedError, candidates: Sequence[str]) -> Answer:
        more = error.decision.more_seeds
        way = (
            "no number of seeds would decide; the test set is too small"
            if more is None
            else f"about {more} more seed{'s' if more != 1 else ''} a side would decide (--seeds {self.seeds + more})"
        )
        among = f" The cause is among {shorten_list(list(candidates), 6)}." if candidates else ""
        return Answer(
            kind="inconclusive",
            sentence=f"Inconclusive: {self._name(error.trial)} differs from {self.names[0]} by "
            f"{_interval(error.decision)} in {self.metric} over {_seeds(error.decision)}; {way}.{among}",
            candidates=candidates,
        )

    def _out_of_time(self, candidates: Sequence[str]) -> Answer:
        state = "the drop is not confirmed yet" if self.drop is None or not self.drop.lower else "the drop is confirmed"
        return Answer(
            kind="out of time",
            sentence=f"The budget is used up: {state}, and the cause is among {shorten_list(list(candidates), 8)}; the "
            "same command continues.",
            candidates=candidates,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the table of trials, in the order in which they were made."""
        return [
            {
                "changes": sorted(trial.changes),
                "name": self._name(trial.changes),
                "seeds": len(trial.evidence),
                "score": fmean(map(self._score, trial.evidence)) if trial.evidence else None,
                "gain": trial.decision.value if trial.decision else None,
                "low": trial.decision.low if trial.decision else None,
                "high": trial.decision.high if trial.decision else None,
                "decision": "does not run" if trial.failed else _decided(trial),
                "seconds": round(sum(run.seconds for run in trial.runs)),
                "restored": sum(run.restored for run in trial.runs),
                "ran": sum(run.ran for run in trial.runs),
            }
            for trial in self.trials.values()
            if trial.runs  # else the budget ended before
        ]

    def result(self, answer: Answer) -> dict[str, Any]:
        """Return everything as plain data."""
        changes: Mapping[str, Any] = asdict(self.changes)
        return {"good": self.names[0], "bad": self.names[1], "are_versions": self.are_versions} | {
            "task": self.task,
            "metric": self.metric,
            "seen": self.seen,
            "answer": asdict(answer),
            "changes": [change.describe() for change in self.changes.tried],
            "untried": changes["untried"],
            "unread": changes["unread"],
            "notes": changes["notes"],
            "trials": self.rows(),
        }


def open_bisection(
    root: Path, params: Params, names: tuple[str, str], *, run: str, seeds: int, deadline: float
) -> Bisection:
    """Read both points and what differs.

    Raises:
        DataError: the points cannot be compared; raised before anything is trained.
    """
    good, bad = read_points(root, params, names, run)
    if good.name == bad.name:
        raise DataError(f"{names[0]} and {names[1]} are both {good.name}")
    task = str(((good.params.get("finetune") or {}).get(good.run) or {}).get("task", ""))
    rule, spec, find = gate_rule(params, task), gate_spec(params, task), find_cached(root)
    sign = -1.0 if rule.direction == "lower" else 1.0
    changes = find_changes(root, good, bad, find, spec.split)
    scores = [read_scores(point, spec, find).evidence for point in (good, bad)]
    # On the items of both: the test set may have changed.
    (bad_scores,), (good_scores,) = take_common([scores[1]], [scores[0]])
    if not good_scores.groups:
        raise DataError(f"{good.name} and {bad.name} were scored on different test sets, without a common item")
    seen = sign * (value_of(good_scores) - value_of(bad_scores))
    key = hashlib.sha256(json.dumps([good.origin.stages, bad.origin.stages, good.run], sort_keys=True).encode())
    folder = root / ".work" / "bisect" / key.hexdigest()[:12]
    runner = TrialRunner(root=root, folder=folder, good=good, bad=bad, changes=changes, find=find, deadline=deadline)
    runner.check_data()

    def train(trial: Subset, number: int) -> tuple[Run, Evidence | None]:
        result = runner.run(trial, number)
        if result.scores is None:
            return result, None
        return result, require_measurement(read_item_scores(result.scores), spec, "a trial").evidence

    return Bisection(
        names=(good.name, bad.name),
        task=task,
        are_versions=good.is_version and bad.is_version,
        # All values are then higher if better, and all sentences of one form.
        metric=spec.metric if sign > 0 else f"minus {spec.metric}",
        changes=changes,
        train=train,
        rule=CompareRule(
            sign=sign,
            seed_std=rule.seed_std_of(spec.metric),
            resamples=params.promotion.resamples,
            seed=params.promotion.seed,
        ),
        seen=seen,
        groups=len(set(good_scores.groups)),
        seeds=seeds,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _decided(trial: Trial) -> str:
    return "good side" if not trial.changes else _verdict(trial.decision.lower if trial.decision else None)


def _verdict(lower: bool | None) -> str:
    return "inconclusive" if lower is None else "lower" if lower else "not lower"


def _interval(decision: Decision) -> str:
    return f"{decision.value:+.2f}, {decision.low:+.2f} to {decision.high:+.2f}"


def _seeds(decision: Decision) -> str:
    a, b = decision.seeds
    return f"{a} seeds a side" if a == b else f"{a} and {b} seeds"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
