"""The gate where a store is away, a move is cut off, or somebody deletes by hand: nothing is decided by that."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR
from toy_registry import answers

from vlp_models.errors import TrackingError
from vlp_models.promotion import moves

GOOD, BETTER, BEST = answers(0.5), answers(0.7), answers(0.9)


@pytest.mark.parametrize("asked", ["judge.bundle_of", "judge.latest_evaluation", "candidates.latest_evaluation"])
def test_a_store_that_does_not_answer_is_no_refusal(new: Any, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    registry = new()
    registry.add(GOOD)
    for error in (requests.ConnectionError("refused"), TimeoutError(), MlflowException("", error_code=INTERNAL_ERROR)):

        def away(*_: Any, error: Exception = error) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(f"vlp_models.promotion.{asked}", away)
            with pytest.raises((TrackingError, MlflowException)):
                registry.promote()
        assert registry.kinds() == []
    assert registry.promote().outcome == "promoted"


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
