"""The gate where a store is away, a move is cut off, or somebody deletes by hand: nothing is decided by that."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST
from toy_registry import answers

from vlp_models.errors import BusyError, DataError, TrackingError
from vlp_models.params import load_params
from vlp_models.pipeline import reevaluate
from vlp_models.pipeline.promote import mlflow_errors
from vlp_models.registry.promotion import moves
from vlp_models.registry.promotion.gate import Verdict

ROOT = Path(__file__).parents[2]
GOOD, BETTER, BEST = answers(0.5), answers(0.7), answers(0.9)


def away() -> list[Exception]:
    """What a store that is away raises: MLflow's, the network's, the disk's, and a bucket's."""
    address = {"endpoint_url": "http://bucket"}
    return [
        MlflowException("", error_code=INTERNAL_ERROR),
        requests.ConnectionError("refused"),
        TimeoutError(),
        OSError(errno.EIO, "Input/output error"),
        botocore.exceptions.EndpointConnectionError(**address),  # no OSError
        botocore.exceptions.ConnectTimeoutError(**address),
        botocore.exceptions.ClientError({"Error": {"Code": "SlowDown"}}, "GetObject"),
    ]


@pytest.mark.parametrize(
    "asked",
    [
        "judge.bundle_of",
        "judge.latest_evaluation",
        "judge.read_lineage",
        "judge.evaluations",
        "candidates.latest_evaluation",
        "cohort.evaluations",
    ],
)
def test_a_store_that_does_not_answer_is_no_refusal(new: Any, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    registry = new()
    registry.add(GOOD, cohort="first")
    assert registry.promote().outcome == "promoted"
    registry.add(GOOD, cohort="first")
    registry.add(BEST, cohort="second")
    for error in away():

        def fails(*_: Any, error: Exception = error) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(f"vlp_models.registry.promotion.{asked}", fails)
            with pytest.raises(TrackingError, match="the store does not answer"):
                registry.promote()
        assert registry.kinds() == ["done"]
    assert registry.promote().outcome == "promoted"


def test_what_a_store_has_not_is_told(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = new()
    registry.add(GOOD)
    gone = botocore.exceptions.ClientError({"Error": {"Code": "404", "Message": "Not Found"}}, "HeadObject")
    for error in (gone, MlflowException(f"##### File weights #####\n{gone}"), FileNotFoundError("weights")):

        def fails(*_: Any, error: Exception = error) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("vlp_models.registry.promotion.judge.bundle_of", fails)
            assert "its files can't be had" in registry.promote().reasons[0]


def test_mlflow_that_is_away_has_an_exit_code_of_its_own() -> None:
    params = load_params(ROOT / "params.yaml")
    for error in away():
        if type(error) in (OSError, TimeoutError):
            continue  # may be of any file
        with pytest.raises(TrackingError, match="MLflow at "), mlflow_errors(params):
            raise error
    with pytest.raises(DataError, match=r"MLflow at .*: no such run"), mlflow_errors(params):
        raise MlflowException("no such run", error_code=RESOURCE_DOES_NOT_EXIST)


def test_another_evaluation_that_goes_on_is_no_refusal(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = new()
    registry.add(GOOD)
    assert registry.promote().outcome == "promoted"
    registry.add(BETTER, test="t2")
    monkeypatch.setattr(reevaluate, "PATIENCE", 0.0)
    work = registry.root / "work"
    monkeypatch.setattr(registry, "_reevaluate", lambda *_: reevaluate._alone_in(work))
    with reevaluate._alone_in(work), pytest.raises(BusyError, match="another evaluation of a version"):
        registry.promote()
    assert registry.kinds() == ["done"]


@pytest.mark.parametrize("at", ["_set_alias", "_set_previous", "mirror"])
def test_a_rollback_that_is_cut_off_and_asked_for_again_is_one(
    new: Any, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    registry = new()
    for values in (GOOD, BETTER, BEST):
        registry.add(values)
        assert registry.promote().outcome == "promoted"
    whole, calls = getattr(moves, at), []

    def cut(*arguments: Any) -> None:
        calls.append(at)
        if len(calls) > 1:  # the first is `put_in_order`'s, before the line
            raise requests.ConnectionError("refused")
        whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(moves, at, cut)
        with pytest.raises(requests.ConnectionError):
            registry.rollback()
    assert registry.kinds()[3:] == ["done"], "it is on record"
    again = registry.rollback()
    assert (again.outcome, again.version, again.champion) == ("rolled back", 2, 3)
    assert registry.aliases()["champion"] == 2 and len(registry.kinds()) == 4
    assert registry.rollback().version == 1


def test_deleting_versions_by_hand_brings_nothing_back(new: Any) -> None:
    registry = new()
    for values in (GOOD, BETTER, BEST):
        registry.add(values)
        assert registry.promote().outcome == "promoted"
    assert registry.rollback().version == 2
    registry.client.delete_model_version(registry.model, "2")  # the champion
    registry.add(answers(0.3))
    assert registry.promote().outcome == "refused", "by the champion before it"
    assert registry.aliases() == {"champion": 1, "challenger": 4}
    assert registry.ledger.state(registry.model).withdrawn == {3}
    registry.client.delete_registered_model_alias(registry.model, "champion")  # somebody wants none
    registry.client.delete_model_version(registry.model, "4")
    registry.client.set_registered_model_alias(registry.model, "challenger", "3")
    assert "was rolled back" in registry.promote().reasons[0]
    assert registry.ledger.state(registry.model).champion is None


def test_who_was_rolled_back_does_not_return_from_further_down(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = new()
    monkeypatch.setattr("vlp_models.registry.promotion.promote.judge", lambda *_: Verdict())
    registry.add(GOOD)
    registry.add(BETTER)
    for version in (1, 2, 1):
        assert registry.promote(version).outcome == "promoted"
    assert registry.rollback().version == 2
    registry.client.delete_model_version(registry.model, "2")
    with pytest.raises(DataError, match="no earlier champion"):
        registry.rollback()
    assert "champion" not in registry.aliases() and registry.ledger.state(registry.model).champion is None


def test_a_rollback_before_the_registry_was_lost_is_over(new: Any) -> None:
    registry = new()
    for values, weights in ((GOOD, "a"), (BETTER, "b")):
        registry.add(values, weights=weights)
        assert registry.promote().outcome == "promoted"
    assert registry.rollback().version == 1
    for name in (registry.model, registry.ledger.name):
        registry.client.delete_registered_model(name)
    registry.add(GOOD, weights="a")
    with pytest.raises(DataError, match="no earlier champion"):
        registry.rollback()
    assert registry.aliases()["champion"] == 1
