"""Versions that must not be served any more: their aliases go, on record, also where a kill comes in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_registry import ToyRegistry, answers

from vlp_models.registry.promotion.promote import withdraw


def take_off(registry: ToyRegistry, *versions: int) -> None:
    withdraw(
        registry.client,
        registry.ledger,
        task="vqa",
        model=registry.model,
        versions=set(versions),
        why="forget",
        by="test",
    )


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyRegistry:
    """Version 2 is champion, 1 was before it, 3 is challenger."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # which MLflow sets
    registry = ToyRegistry(tmp_path, "toy-vqa", seed_std=0.0)
    for share in (0.3, 0.6):
        registry.add(answers(share))
        assert registry.promote().outcome == "promoted"
    registry.add(answers(0.62))
    return registry


def test_a_champion_that_is_withdrawn_makes_place_for_the_one_before(registry: ToyRegistry) -> None:
    take_off(registry, 2, 3)
    assert registry.aliases() == {"champion": 1}
    assert (registry.ledger.state("toy-vqa").champion, registry.ledger.state("toy-vqa").withdrawn) == (1, {2, 3})
    take_off(registry, 1)
    assert registry.aliases() == {}
    registry.add(answers(0.31))
    assert registry.promote().outcome == "promoted", "a first champion needs no gain over what must not be served"
    assert registry.aliases()["champion"] == 4


def test_a_kill_between_the_line_and_the_aliases_brings_no_champion_back(
    registry: ToyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(registry.client), "delete_registered_model_alias", killed)
        with pytest.raises(KeyboardInterrupt):
            take_off(registry, 1, 2)
    assert registry.aliases()["champion"] == 2
    assert registry.promote(3).outcome == "promoted"
    assert registry.aliases()["champion"] == 3 and registry.ledger.state("toy-vqa").champions == [3]
