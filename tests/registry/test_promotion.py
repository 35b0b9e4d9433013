"""The gate with a real MLflow on SQLite: which version becomes champion, which is refused, and why."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import botocore.exceptions
import numpy as np
import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST
from toy_registry import IMAGES, QUESTIONS, answers, toy_items

from vlp_models.errors import BusyError, DataError, TrackingError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.params import load_params
from vlp_models.pipeline import reevaluate
from vlp_models.pipeline.promotion_commands import explain
from vlp_models.registry.client import mlflow_errors

ROOT = Path(__file__).parents[2]
GOOD, BETTER, BEST = answers(0.5), answers(0.7), answers(0.9)


@pytest.mark.slow
def test_better_wins_and_worse_and_equal_are_refused_with_their_numbers(new: Any) -> None:
    registry = new()
    assert registry.add(GOOD) == 1
    assert registry.promote().action == "promoted"
    registry.add(BETTER)
    second = registry.promote()
    assert (second.action, second.champion) == ("promoted", 1)
    assert second.numbers["gain"] == pytest.approx(100 * (np.mean(BETTER) - np.mean(GOOD)), abs=1e-3)
    assert second.numbers["gain_low"] > 0 and second.numbers["p"] <= 0.05
    assert second.outcome == "promote"
    assert registry.aliases() == {"champion": 2, "previous": 1}

    registry.add(GOOD)
    worse = registry.promote()
    assert (worse.action, worse.outcome) == ("refused", "keep") and worse.reasons[0].startswith("gain: accuracy")
    noise = list(BETTER)
    noise[:QUESTIONS] = [1.0] * QUESTIONS  # one image of sixty: better, but within the noise
    registry.add(noise)
    equal = registry.promote()
    assert equal.action == "refused" and equal.numbers["gain"] > 0 and equal.numbers["p"] > 0.05
    assert equal.outcome == "inconclusive" and equal.numbers["detectable"] > equal.numbers["relevant_gain"]
    registry.add(BETTER)
    assert registry.promote().numbers["gain"] == 0.0
    assert registry.aliases() == {"champion": 2, "previous": 1, "challenger": 5}

    last = registry.ledger.entries()[-1]
    assert (last["action"], last["version"], last["by"]) == ("refused", 5, "test")
    assert last["decision"]["reasons"] == list(registry.promote().reasons)


def test_first_champion_must_meet_floors_and_validation(new: Any) -> None:
    registry = new(floors={"all": 40.0, "question_type=how many": 80.0, "objects=9": 1.0})
    how_many = [float(i % QUESTIONS != QUESTIONS - 1) for i in range(IMAGES * QUESTIONS)]  # wrong on numbers only
    registry.add(how_many, validation={"passed": False, "reasons": ["captions: 9 of 10 rows are bad"]})
    refused = registry.promote()
    assert refused.action == "refused" and refused.numbers["value"] == 80.0
    assert refused.reasons == [
        "failed validation: captions: 9 of 10 rows are bad",
        "floor: accuracy 0.00 of question_type=how many is below 80",
        "floor: no test item is in the slice objects=9",
    ]
    assert [row["met"] for row in refused.numbers["floors"]] == [True, False, False]
    registry.allow_unvalidated = True  # allows a missing validation, never a failed one
    assert "failed validation" in registry.promote().reasons[0]
    forced = registry.promote(force="a demo for Friday")
    assert forced.action == "promoted" and forced.forced and len(forced.reasons) == 3
    assert registry.ledger.entries()[-1]["decision"]["force_reason"] == "a demo for Friday"
    registry.add([1.0] * len(GOOD), validation=None)
    assert [r for r in registry.promote(force="no effect").reasons if "floor" not in r] == []
    registry.allow_unvalidated = False
    assert any(r.startswith("unvalidated") for r in registry.promote(force="no effect").reasons)


def test_first_champion_must_beat_the_simple_baselines(new: Any) -> None:
    registry = new()
    registry.add(GOOD, baselines={"majority answer": 40.0, "per question type": 90.0, "blind baseline": 99.0})
    refused = registry.promote()
    assert (refused.action, refused.outcome) == ("refused", "keep")
    assert refused.reasons == [
        f"baseline: accuracy {100 * np.mean(GOOD):.2f} on toy test is not better than 90.00, which the "
        f"per question type baseline has on the same {len(GOOD)} items"
    ], "a blind model is not a simple baseline"
    assert [(row["name"], row["met"]) for row in refused.numbers["baselines"]] == [
        ("majority answer", True),
        ("per question type", False),
    ]
    assert "champion" not in registry.aliases() and registry.actions() == ["refused"]
    output = "\n".join(explain(refused))
    assert refused.reasons[0] in output and 'vlp promote vqa --force "why"' in output

    forced = registry.promote(force="to try the page")
    assert forced.action == "promoted" and "  forced: to try the page" in explain(forced)
    registry.add(BEST, baselines={"majority answer": 99.0})
    assert registry.promote().action == "promoted", "later champions are compared with the champion"

    accepted = new(beat_baselines=False)
    accepted.add(GOOD, baselines={"majority answer": 90.0})
    assert accepted.promote().action == "promoted"
    lower = new(direction="lower")
    lower.add(GOOD, baselines={"majority answer": 100 * float(np.mean(GOOD))})
    assert lower.promote().reasons[0].startswith("baseline: "), "an equal value is not better"
    lower.add(GOOD, baselines={"majority answer": 60.0})
    assert lower.promote().action == "promoted"


@pytest.mark.parametrize(("unseen", "passes"), [((30.0, 40.0), False), ((50.0, 40.0), True), (None, True)])
def test_first_champion_is_compared_without_leaked_images(
    new: Any, unseen: tuple[float, float] | None, passes: bool
) -> None:
    """Its value and a baseline's are of the same items: without leaked images, or all if too few remain."""
    registry = new()
    without_images = None
    if unseen:
        without_images = {"value": unseen[0], "n": 25, "baselines": {"majority answer": {"value": unseen[1]}}}
    # Better than the baseline on the whole test; what it is without seen sentences does not count.
    without_both = {"value": 0.0, "n": 21, "baselines": {"majority answer": {"value": 90.0}}}
    leakage = {"without_images": without_images, "without_both": without_both}
    registry.add(GOOD, baselines={"majority answer": 41.0}, leakage=leakage)
    decision = registry.promote()
    assert (decision.action == "promoted") == passes
    value, baseline, n = (*unseen, 25) if unseen else (100 * float(np.mean(GOOD)), 41.0, len(GOOD))
    (row,) = decision.numbers["baselines"]
    assert row == {"name": "majority answer", "dataset": "toy", "value": baseline, "own": value, "n": n, "met": passes}


def test_too_few_test_images_are_inconclusive(new: Any) -> None:
    registry = new()
    few = MIN_GROUPS - 1
    registry.add([1.0] * (few * QUESTIONS), baselines={"majority answer": 10.0})
    refused = registry.promote()
    assert (refused.action, refused.outcome) == ("refused", "inconclusive")
    assert refused.reasons[0].startswith(f"too few images: the test has {few} and needs {MIN_GROUPS} ")
    registry.add([0.0] * (few * QUESTIONS), baselines={"majority answer": 10.0})
    worse = registry.promote()
    assert worse.outcome == "inconclusive" and len(worse.reasons) == 2, "a baseline that wins by chance is no evidence"
    assert registry.promote(force="a toy").action == "promoted"
    registry.add([1.0] * (few * QUESTIONS))
    assert registry.promote().outcome == "inconclusive", "nor is one champion better than the other"
    enough = new()
    enough.add([1.0] * (MIN_GROUPS * QUESTIONS), baselines={"majority answer": 10.0})
    assert enough.promote().action == "promoted"


@pytest.mark.slow
def test_version_that_cannot_be_measured_is_refused(new: Any) -> None:
    registry = new()
    with pytest.raises(DataError, match="no challenger"):
        registry.promote()
    registry.add([float("nan"), *GOOD[1:]])
    assert registry.promote().reasons[0].startswith("non-finite")
    registry.add(GOOD, metric="BLEU-4")
    assert "missing metric: no scores per item of accuracy" in registry.promote().reasons[0]
    registry.add(GOOD, items=[])
    assert "missing metric" in registry.promote().reasons[0]
    assert registry.promote(99).reasons == [f"unregistered: {registry.model} has no version 99"]
    version = registry.add(GOOD)
    run_id = registry.client.get_model_version(registry.model, str(version)).run_id
    run_folder = registry.client.get_run(run_id).info.artifact_uri.removeprefix("file://")
    weights = Path(run_folder) / "model" / "artifacts" / "bundle" / "weights"
    weights.write_text("flipped")
    assert "not those that were registered" in registry.promote().reasons[0]
    assert registry.promote(force="why not").action == "refused"  # nothing was measured
    weights.unlink()
    assert "unreadable version" in registry.promote().reasons[0]
    assert registry.actions() == ["refused"] * 7
    assert "champion" not in registry.aliases()


@pytest.mark.slow
def test_champion_is_evaluated_again_once_on_other_test_data(new: Any) -> None:
    registry = new()
    registry.add(GOOD)
    registry.promote()
    registry.add(BETTER, test="t2")
    refused = registry.promote()
    assert refused.action == "refused"
    assert "cannot compare with the champion, version 1: no test data here" in refused.reasons[0]
    with pytest.MonkeyPatch.context() as patch:  # a bug of the program is a recorded refusal as well
        patch.setattr(registry, "_reevaluate", lambda bundle, lineage: 1 / 0)
        assert "its evaluation failed: ZeroDivisionError" in registry.promote().reasons[0]
    registry.reevaluated = toy_items(GOOD, test="t3")  # the workspace has neither version's test
    assert "the test data differ" in registry.promote().reasons[0]
    registry.reevaluated = toy_items(BEST, test="t2")
    decided = registry.promote()
    assert decided.action == "refused" and decided.numbers["champion_reevaluated"]
    assert decided.numbers["champion_value"] == pytest.approx(100 * np.mean(BEST), abs=1e-3)
    count = registry.reevaluations
    again = registry.promote()
    assert not again.numbers["champion_reevaluated"] and registry.reevaluations == count  # it was stored
    registry.add(BETTER, test="t1", note="other tokenizer")
    registry.reevaluated = toy_items(GOOD, test="t1", note="other tokenizer")
    other = registry.promote()
    assert other.action == "promoted" and other.numbers["champion_reevaluated"]


def test_rollback_goes_back_to_the_first_champion_and_rolled_back_versions_need_their_number(new: Any) -> None:
    registry = new()
    for values in (GOOD, BETTER, BEST):
        registry.add(values)
        assert registry.promote().action == "promoted"
    assert registry.aliases() == {"champion": 3, "previous": 2}
    registry.client.set_registered_model_alias(registry.model, "challenger", "3")  # as `register` does every week
    assert registry.rollback().version == 2
    assert registry.aliases() == {"champion": 2, "previous": 1, "challenger": 3}
    assert "was rolled back" in registry.promote().reasons[0]
    assert registry.rollback().version == 1
    assert registry.aliases() == {"champion": 1, "challenger": 3}
    with pytest.raises(DataError, match="no earlier champion"):
        registry.rollback()
    assert registry.promote(3).action == "promoted"
    assert registry.promote(3).action == "unchanged"
    assert registry.aliases() == {"champion": 3, "previous": 1}
    assert registry.ledger.state(registry.model).champion == 3


@pytest.mark.slow
def test_withdrawn_champion_is_replaced_by_the_previous_one(new: Any) -> None:
    registry = new(seed_std=0.0)
    for share in (0.3, 0.6):
        registry.add(answers(share))
        assert registry.promote().action == "promoted"
    registry.add(answers(0.62))
    assert registry.withdraw(2, 3) == 1
    assert registry.aliases() == {"champion": 1}
    assert registry.actions() == ["promoted", "promoted", "withdrawn"]
    assert registry.withdraw(1) is None
    assert registry.aliases() == {}
    registry.add(answers(0.31))
    assert registry.promote().action == "promoted", "a first champion needs no gain over a withdrawn one"
    assert registry.aliases()["champion"] == 4


def store_errors() -> list[Exception]:
    """Return what a store that is away raises: MLflow's errors, the network's, the disk's and a bucket's."""
    address = {"endpoint_url": "http://bucket"}
    return [
        MlflowException("", error_code=INTERNAL_ERROR),
        requests.ConnectionError("refused"),
        TimeoutError(),
        OSError(errno.EIO, "Input/output error"),
        botocore.exceptions.EndpointConnectionError(**address),  # not an OSError
        botocore.exceptions.ConnectTimeoutError(**address),
        botocore.exceptions.ClientError({"Error": {"Code": "SlowDown"}}, "GetObject"),
    ]


@pytest.mark.slow
def test_store_that_does_not_answer_is_no_refusal(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = new()
    registry.add(GOOD, variant="first")
    assert registry.promote().action == "promoted"
    registry.add(GOOD, variant="first")
    registry.add(BEST, variant="second")
    functions = ("read_latest_evaluation", "read_lineage", "read_evaluations")
    away = [("judge.download_bundle", error) for error in store_errors()]
    away += [(f"judge.{function}", store_errors()[0]) for function in functions]
    for function, error in [*away, ("candidates.read_latest_evaluation", store_errors()[1])]:
        with monkeypatch.context() as patch:
            patch.setattr(f"vlp_models.registry.promotion.{function}", MagicMock(side_effect=error))
            with pytest.raises(TrackingError, match="the artifact store does not answer"):
                registry.promote()
        assert registry.actions() == ["promoted"]
    assert registry.promote().action == "promoted"


def test_missing_files_are_a_refusal(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = new()
    registry.add(GOOD)
    missing = botocore.exceptions.ClientError({"Error": {"Code": "404", "Message": "Not Found"}}, "HeadObject")
    for error in (missing, MlflowException(f"##### File weights #####\n{missing}"), FileNotFoundError("weights")):
        with monkeypatch.context() as patch:
            patch.setattr("vlp_models.registry.promotion.judge.download_bundle", MagicMock(side_effect=error))
            assert "cannot read its files" in registry.promote().reasons[0]


def test_mlflow_that_is_away_has_its_own_error_type() -> None:
    params = load_params(ROOT / "params.yaml")
    for error in store_errors():
        if type(error) in (OSError, TimeoutError):
            continue  # could be about any file
        with pytest.raises(TrackingError, match="MLflow at "), mlflow_errors(params):
            raise error
    with pytest.raises(DataError, match=r"MLflow at .*: no such run"), mlflow_errors(params):
        raise MlflowException("no such run", error_code=RESOURCE_DOES_NOT_EXIST)


def test_another_running_evaluation_is_no_refusal(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = new()
    registry.add(GOOD)
    assert registry.promote().action == "promoted"
    registry.add(BETTER, test="t2")
    monkeypatch.setattr(reevaluate, "MAX_WAIT", 0.0)
    work = registry.root / "work"
    monkeypatch.setattr(registry, "_reevaluate", lambda *_: reevaluate.temporary_workspace(work))
    with reevaluate.temporary_workspace(work), pytest.raises(BusyError, match="another evaluation of a version"):
        registry.promote()
    assert registry.actions() == ["promoted"]
