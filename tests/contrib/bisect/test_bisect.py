"""Answers of a bisection whose trainings are synthetic scores of known truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlp_models.contrib.bisect.bisect import Answer, Bisection
from vlp_models.contrib.bisect.changes import Change, Changes, find_changes, seed_sections
from vlp_models.contrib.bisect.commands import parse_budget
from vlp_models.contrib.bisect.decision import CompareRule
from vlp_models.contrib.bisect.differences import Origin
from vlp_models.contrib.bisect.page import format_result, write_page
from vlp_models.contrib.bisect.points import Point
from vlp_models.contrib.bisect.search import Subset
from vlp_models.contrib.bisect.trials import OutOfTimeError, Run, set_value, trial_params
from vlp_models.errors import DataError, ParamsError
from vlp_models.metrics.score import Evidence, mean_percent

NAMES = ("vlp-vqa/1", "vlp-vqa/2")
ITEMS = 2000
Effect = Callable[[Subset], float | None]  # the true score of a set of changes; None: it does not run


def make_changes(count: int, *, untried: dict[str, str] | None = None) -> Changes:
    changes = [
        Change(kind="params", name=f"p{i}", before=0, after=1, stages=("finetune@vqa",), path=(f"p{i}",))
        for i in range(count)
    ]
    return Changes(tried=changes, untried=untried or {}, unread=["drift.images"], data={})


def bisect(
    effect: Effect, count: int, *, seen: float = 10.0, seed_std: float = 1.0, untried: dict[str, str] | None = None
) -> tuple[Answer, Bisection]:
    rng = np.random.default_rng(4)
    names = [str(i) for i in range(ITEMS)]

    def train(trial: Subset, number: int) -> tuple[Run, Evidence | None]:
        mean = effect(trial)
        if mean is None:
            return Run(scores=None, seconds=1.0, reason="models.x is unknown"), None
        rate = (mean + rng.normal(0, seed_std)) / 100
        parts = np.column_stack([(rng.random(ITEMS) < rate).astype(float), np.ones(ITEMS)])
        evidence = Evidence(groups=names, parts_NK=parts, statistic=mean_percent, items=names)
        return Run(scores=Path("x"), seconds=60.0, ran=2, restored=7), evidence

    bisection = Bisection(
        names=NAMES,
        task="vqa",
        metric="accuracy",
        changes=make_changes(count, untried=untried),
        train=train,
        rule=CompareRule(seed_std=seed_std, resamples=400),
        seen=seen,
        report=lambda line: None,
    )
    return bisection.answer(), bisection


def test_one_cause_among_eight_takes_few_trials() -> None:
    answer, bisection = bisect(lambda trial: 50.0 if "params p5" in trial else 60.0, 8)
    assert answer.kind == "causes" and answer.causes == [["params p5"]]
    # the good side, the bad one, log2(8) halves and the rest; the last half is the change itself
    assert len(bisection.trials) <= 2 + 3 + 1 + 1
    assert answer.sentence.startswith("params p5: 0 -> 1 lowered accuracy (-")
    assert answer.sentence.endswith("; the other 7 changes together do not.")
    assert all(len(trial.runs) <= 3 for trial in bisection.trials.values())


def test_two_changes_that_matter_only_together() -> None:
    together = {"params p1", "params p6"}
    answer, _ = bisect(lambda trial: 50.0 if together <= trial else 60.0, 8)
    assert [set(cause) for cause in answer.causes] == [together] and "only together" in answer.sentence


def test_two_independent_causes_are_both_found() -> None:
    answer, _ = bisect(lambda trial: 60.0 - 7 * len({"params p0", "params p6"} & trial), 8, seen=14.0)
    assert {cause[0] for cause in answer.causes} == {"params p0", "params p6"}


def test_a_change_that_does_not_run_without_another() -> None:
    def effect(trial: Subset) -> float | None:
        if "params p3" in trial and "params p2" not in trial:
            return None
        return 50.0 if "params p3" in trial else 60.0

    answer, bisection = bisect(effect, 4)
    assert [set(cause) for cause in answer.causes] == [{"params p2", "params p3"}]
    assert "does not run" in {row["decision"] for row in bisection.rows()}


def test_the_seed_alone() -> None:
    answer, bisection = bisect(lambda trial: 60.0, 8)
    assert answer.kind == "seed" and answer.sentence.startswith("The seed alone:")
    assert len(bisection.trials) == 2


def test_without_differences_nothing_is_trained() -> None:
    def fail(trial: Subset) -> float:
        raise AssertionError("no training is needed")

    assert bisect(fail, 0)[0].kind == "nothing differs"
    answer, bisection = bisect(fail, 3, seen=-1.0)
    assert answer.kind == "not lower" and bisection.try_changes(["params p1"]) == answer
    answer, _ = bisect(fail, 0, untried={"packages torch": "one environment runs all"})
    assert answer.kind == "untried" and "packages torch, or the seed" in answer.sentence


def test_what_no_trial_can_change_remains_if_the_others_do_not_lower_the_score() -> None:
    answer, _ = bisect(lambda trial: 60.0, 2, untried={"packages torch": "one environment runs all"})
    assert answer.kind == "untried" and "what remains is packages torch" in answer.sentence


def test_inconclusive_names_the_seeds_that_are_needed() -> None:
    answer, _ = bisect(lambda trial: 58.0 if trial else 60.0, 2, seen=3.0, seed_std=4.0)
    assert answer.kind == "inconclusive" and "more seed" in answer.sentence and "--seeds" in answer.sentence


def test_the_budget_ends_with_the_candidates() -> None:
    made: list[Subset] = []

    def effect(trial: Subset) -> float:
        made.append(trial)
        if len(made) == 6:
            raise OutOfTimeError
        return 50.0 if "params p5" in trial else 60.0

    answer, bisection = bisect(effect, 8)
    assert len(bisection.rows()) == 3, "a trial without a training is not in the table"
    assert answer.kind == "out of time" and "params p5" in answer.candidates and len(answer.candidates) == 4
    assert "the drop is confirmed" in answer.sentence


def test_too_few_test_images_are_refused_before_anything_is_trained() -> None:
    _, bisection = bisect(lambda trial: 60.0, 0)
    bisection.changes, bisection.groups = make_changes(2), 8
    with pytest.raises(DataError, match="the test has 8 images that both were scored on; a test needs 20"):
        bisection.answer()
    assert not bisection.trials


def test_a_point_that_does_not_train_is_refused() -> None:
    with pytest.raises(DataError, match=r"vlp-vqa/1 does not train here: models\.x is unknown"):
        bisect(lambda trial: None, 2)


def test_a_seed_that_fails_after_others_is_not_taken_for_changes_that_do_not_run() -> None:
    made: list[Subset] = []

    def effect(trial: Subset) -> float | None:
        made.append(trial)
        # The second seed of the first half, which has the cause, fails.
        return None if made.count(trial) == 2 and len(trial) == 2 else 50.0 if "params p1" in trial else 60.0

    with pytest.raises(DataError, match=r"params p0, params p1, seed 2: failed, and trained with other seeds"):
        bisect(effect, 4, seed_std=3.0)


def test_the_result_as_text_json_and_page(tmp_path: Path) -> None:
    answer, bisection = bisect(lambda trial: 50.0 if "params p1" in trial else 60.0, 2)
    result = bisection.result(answer) | {"command": 'vlp bisect a b --try "params p1"'}
    text = "\n".join(format_result(json.loads(json.dumps(result))))
    assert "unread    drift.images" in text and f"answer    {answer.sentence}" in text
    assert "vlp-vqa/2 (2 changes)" in text and "not lower" in text
    write_page(result, tmp_path / "bisect.html")
    page = (tmp_path / "bisect.html").read_text()
    assert "params p1" in page and "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_a_trial_varies_the_seeds_of_the_whole_chain_and_logs_nothing() -> None:
    raw: dict[str, Any] = {
        "defaults": {"finetune": {"seed": 5}},
        "models": {"tden": {"family": "tden"}},
        "pretrain": {"a": {"model": "tden"}, "b": {"start": "pretrain/a", "seed": 2}},
        "finetune": {"vqa": {"task": "vqa", "start": "pretrain/b"}},
        "tracking": {"uri": "http://mlflow", "sinks": ["wandb"]},
    }
    assert seed_sections(raw, "vqa") == [("finetune", "vqa"), ("pretrain", "b"), ("pretrain", "a"), ("models", "tden")]

    good = make_point("good", raw)
    change = Change(kind="params", name="pretrain.b.lr", before="-", after=0, stages=(), path=("pretrain", "b", "lr"))
    made = trial_params(good, good, [change], 2)
    assert made["finetune"]["vqa"]["seed"] == 7 and made["pretrain"]["b"] == {"start": "pretrain/a", "seed": 4, "lr": 0}
    assert made["models"]["tden"]["seed"] == 3 and made["tracking"] == {"uri": ""}
    assert "seed" not in raw["finetune"]["vqa"], "the point's own params stay"
    set_value(made, ["pretrain", "b", "lr"], "-")
    assert "lr" not in made["pretrain"]["b"]


def make_point(name: str, raw: dict[str, Any]) -> Point:
    """Return a point whose only stage reads the sections `generate` and `finetune`."""
    read = {section: raw[section] for section in ("generate", "finetune") if section in raw}
    stages = {"evaluate@vqa": {"params": {"params.yaml": read}}}
    origin = Origin(target="evaluate@vqa", stages=stages, params=raw, packages={})
    return Point(name=name, origin=origin, params=raw)


def test_a_trial_never_has_the_seed_of_a_point_and_other_seeds_are_changes(tmp_path: Path) -> None:
    good, bad = (
        make_point(name, {"generate": {"scenes": {"seed": seed}}, "finetune": {"vqa": {"start": "", "seed": seed}}})
        for name, seed in (("good", 1), ("bad", 2))
    )
    # Seed 2 is the bad point's own: its result raised the question, and would be restored.
    assert [trial_params(good, bad, [], number)["finetune"]["vqa"]["seed"] for number in (1, 2)] == [3, 4]
    changes = find_changes(tmp_path, good, bad, lambda md5: None, "test")
    assert [change.describe() for change in changes.tried] == ["params generate.scenes.seed: 1 -> 2"]


def test_a_budget_is_a_time() -> None:
    assert parse_budget("2h") == 7200 and parse_budget("1h30m") == 5400 and parse_budget("90m") == 5400
    for text in ("2", "h", "2 h", "2d"):
        with pytest.raises(ParamsError, match="--budget"):
            parse_budget(text)
