"""Ledger and MLflow's aliases: completed after a kill, followed after a loss, refused where they disagree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow import MlflowClient
from toy_registry import KILLS, ToyRegistry, answers

from vlp_models.errors import DataError
from vlp_models.registry.promotion import promote as promotion
from vlp_models.registry.promotion.gate import Verdict
from vlp_models.registry.promotion.ledger import Ledger, LedgerError
from vlp_models.registry.promotion.reconcile import LEDGER_TAG, aliases_follow

SUPPORT = Path(__file__).parents[1] / "support"
GOOD, BETTER, BEST = answers(0.5), answers(0.7), answers(0.9)


def start_promotion(registry: ToyRegistry, version: int, kill: str = "") -> subprocess.Popen[str]:
    """Start a promotion in a process of its own, which connects and then waits for a line on stdin."""
    paths = [str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "toy_registry.py"), str(registry.root), registry.model, str(version), kill],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def promoted(new: Any, *values: list[float], weights: str = "") -> ToyRegistry:
    """Return a registry whose versions were promoted one after the other. weights: of each, a letter; empty: any."""
    registry: ToyRegistry = new()
    for n, own in enumerate(values):
        registry.add(own, weights=weights[n : n + 1])
        assert registry.promote().action == "promoted"
    return registry


@pytest.mark.slow
def test_one_of_two_concurrent_promotions_wins(new: Any) -> None:
    registry = promoted(new, GOOD)
    registry.add(BETTER)
    registry.add(BETTER)
    several = [start_promotion(registry, version) for version in (2, 3)]
    for one in several:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in several:
        assert one.stdin is not None
        print("go", file=one.stdin, flush=True)
    actions = [one.communicate(timeout=120)[0].strip() for one in several]
    assert sorted(actions) == ["promoted", "refused"]  # the second one met its equal
    assert registry.actions().count("promoted") == 2
    assert registry.aliases()["champion"] == registry.ledger.state(registry.model).champion


@pytest.mark.slow
def test_next_call_completes_what_a_kill_interrupted(new: Any) -> None:
    """Before the ledger's line, nothing has happened. After it, aliases and tag follow."""
    killed = {}
    for kill in KILLS:
        registry = promoted(new, GOOD)
        registry.add(BETTER)
        killed[kill] = (registry, start_promotion(registry, 2, kill))
    for kill, (registry, process) in killed.items():
        process.communicate("go\n", timeout=120)
        assert process.returncode == -9
        assert registry.aliases()["champion"] == (1 if kill in ("before the line", "before the alias") else 2)

        champion = 1 if kill == "before the line" else 2
        registry.add(GOOD)
        next_decision = registry.promote()  # refused by either champion
        assert next_decision.action == "refused" and next_decision.champion == champion
        assert registry.actions() == [*["promoted"] * champion, "refused"]
        state = registry.ledger.state(registry.model)
        previous = {"previous": 1} if champion == 2 else {}
        assert registry.aliases() == {"champion": champion, "challenger": 3} | previous
        tags = registry.client.get_registered_model(registry.model).tags
        assert state.champion == champion and tags[LEDGER_TAG] == state.head


@pytest.mark.slow
@pytest.mark.parametrize("method", ["set_registered_model_alias", "set_registered_model_tag"])
def test_interrupted_rollback_is_completed_and_not_repeated(
    new: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    registry = promoted(new, GOOD, BETTER, BEST)

    def fail(*_: Any) -> None:
        raise requests.ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, method, fail)
        with pytest.raises(requests.ConnectionError):
            registry.rollback()
    assert registry.actions()[3:] == ["rolled back"], "it is on record"
    again = registry.rollback()
    assert (again.action, again.version, again.champion) == ("rolled back", 2, 3)
    assert registry.aliases()["champion"] == 2 and len(registry.actions()) == 4
    assert registry.rollback().version == 1


@pytest.mark.slow
def test_repeated_rollback_of_a_named_champion_is_one_rollback(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stores the last tag, and its answer is lost."""
    registry = promoted(new, GOOD, BETTER, BEST)
    store = MlflowClient.set_registered_model_tag

    def lose_answer(*arguments: Any) -> None:
        store(*arguments)
        raise requests.ReadTimeout("read timed out")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_tag", lose_answer)
        with pytest.raises(requests.ReadTimeout):
            registry.rollback(3)
    again = registry.rollback(3)
    assert (again.action, again.version, again.champion) == ("rolled back", 2, 3)
    assert registry.aliases()["champion"] == 2 and registry.actions()[3:] == ["rolled back"]
    with pytest.raises(DataError, match="version 1 is not the champion by the ledger; version 2 is"):
        registry.rollback(1)
    assert registry.rollback(2).version == 1


@pytest.mark.slow
def test_aliases_that_do_not_follow_the_ledger_are_found(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the unattended flow calls `vlp promote`, which moves them."""
    registry = promoted(new, GOOD, BETTER)

    def follow() -> bool:
        return aliases_follow(registry.client, registry.ledger, registry.model)

    assert follow()
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: exit(137))
        with pytest.raises(SystemExit):
            registry.rollback()
    assert registry.aliases()["champion"] == 2 and not follow()
    registry.promote()
    assert registry.aliases()["champion"] == 1 and follow()


@pytest.mark.slow
def test_kill_during_a_withdrawal_brings_no_champion_back(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = promoted(new, GOOD, BETTER)
    registry.add(BEST)

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "delete_registered_model_alias", kill)
        with pytest.raises(KeyboardInterrupt):
            registry.withdraw(1, 2)
    assert registry.aliases()["champion"] == 2
    assert registry.promote(3).action == "promoted"
    assert registry.aliases() == {"champion": 3}
    assert [p.version for p in registry.ledger.state(registry.model).champions] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["delete_registered_model_alias", "set_registered_model_alias"])
def test_interrupted_withdrawal_leaves_no_model_without_its_champion(
    new: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    registry = promoted(new, GOOD, BETTER)

    def fail(*_: Any) -> None:
        raise requests.ConnectionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, method, fail)
        with pytest.raises(requests.ConnectionError):
            registry.withdraw(2)
    # The next champion is set first, in one call, so there is always one.
    assert registry.aliases()["champion"] == (1 if method.startswith("delete") else 2)
    registry.add(GOOD)
    assert registry.promote().champion == 1
    assert registry.aliases() == {"champion": 1, "challenger": 3}


def test_lost_registry_gets_its_champion_back_under_another_number(new: Any, capsys: Any) -> None:
    """mlflow.db is gone; registered again, the versions have other numbers."""
    registry = promoted(new, GOOD, BETTER, weights="ab")
    registry.delete_all()
    registry.add(GOOD, weights="x")
    with pytest.raises(
        LedgerError, match=r"version 2, champion by the ledger, is no longer registered.*vlp run regist"
    ):
        registry.promote()
    registry.add(BETTER, weights="b")
    registry.add(BEST, weights="c")
    decision = registry.promote()
    assert (decision.action, decision.version, decision.champion) == ("promoted", 3, 2)
    assert "MLflow's aliases were behind the ledger; champion is now version 2" in capsys.readouterr().err
    assert registry.aliases() == {"champion": 3, "previous": 2}
    assert registry.rollback().version == 2
    with pytest.raises(DataError, match="no earlier champion"):
        registry.rollback()


@pytest.mark.slow
def test_rollback_before_the_registry_was_lost_is_not_repeated(new: Any) -> None:
    registry = promoted(new, GOOD, BETTER, weights="ab")
    assert registry.rollback().version == 1
    registry.delete_all()
    registry.add(BETTER, weights="b")
    registry.add(GOOD, weights="a")
    with pytest.raises(DataError, match="no earlier champion"):
        registry.rollback()
    assert registry.aliases()["champion"] == 2
    registry.client.set_registered_model_alias(registry.model, "challenger", "1")
    assert "was rolled back" in registry.promote().reasons[0], "by its content, not by its number"


@pytest.mark.slow
def test_deleted_champion_is_reported_and_rollback_is_the_way_out(new: Any) -> None:
    registry = promoted(new, GOOD, BETTER, BEST)
    assert registry.rollback().version == 2
    registry.client.delete_model_version(registry.model, "2")
    registry.add(answers(0.3))
    with pytest.raises(LedgerError, match=r"version 2, champion by the ledger, is no longer registered.*`vlp rollback"):
        registry.promote()
    assert registry.rollback().version == 1
    assert registry.promote().action == "refused"
    assert registry.aliases() == {"champion": 1, "challenger": 4}
    registry.client.delete_model_version(registry.model, "1")
    gone = registry.rollback()
    assert (gone.version, gone.champion) == (None, 1) and registry.aliases() == {"challenger": 4}
    assert registry.promote(3).action == "promoted", "a first champion again"


def test_rolled_back_version_does_not_return_from_further_down(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = new()
    monkeypatch.setattr(promotion, "judge", lambda *_: Verdict())
    registry.add(GOOD)
    registry.add(BETTER)
    for version in (1, 2, 1):
        assert registry.promote(version).action == "promoted"
    assert registry.rollback().version == 2
    registry.client.delete_model_version(registry.model, "2")
    assert registry.rollback().version is None
    assert "champion" not in registry.aliases() and registry.ledger.state(registry.model).champion is None


def test_alias_moved_by_hand_is_refused_until_accepted_or_set_back(new: Any) -> None:
    registry = promoted(new, GOOD, BETTER)
    registry.add(BEST)
    registry.client.set_registered_model_alias(registry.model, "champion", "1")
    for call in (registry.promote, registry.rollback, lambda: registry.withdraw(3)):
        with pytest.raises(
            LedgerError, match=r"is version 2, by MLflow version 1; somebody moved the alias.*--version 1"
        ):
            call()
    registry.client.set_registered_model_alias(registry.model, "champion", "2")
    assert registry.rollback().version == 1
    registry.client.set_registered_model_alias(registry.model, "champion", "3")
    accepted = registry.promote(3)
    assert accepted.action == "unchanged" and "recorded in the ledger" in accepted.reasons[0]
    assert registry.actions() == ["promoted", "promoted", "rolled back", "accepted"]
    assert registry.aliases() == {"champion": 3, "previous": 1}
    assert registry.rollback().version == 1
    registry.client.delete_registered_model_alias(registry.model, "champion")
    with pytest.raises(LedgerError, match="by MLflow none"):
        registry.promote()
    registry.client.delete_registered_model_tag(registry.model, LEDGER_TAG)  # the way out that it names
    assert registry.promote(2).action == "promoted" and registry.aliases()["previous"] == 1


@pytest.mark.slow
def test_checkout_without_the_last_line_is_refused_until_it_pulls(new: Any) -> None:
    registry = promoted(new, GOOD)
    stale = Ledger(registry.root / "checkout.jsonl")
    stale.path.write_bytes(registry.ledger.path.read_bytes())
    registry.add(BETTER)
    assert registry.promote(ledger=stale).action == "promoted", "both checkouts were at the same line"
    registry.add(BEST)
    with pytest.raises(LedgerError, match=r"a line that is not in this ledger.*git pull.*--version 2"):
        registry.promote()
    registry.ledger.path.write_bytes(stale.path.read_bytes())  # as `git pull` would
    assert registry.promote().action == "promoted"
    assert registry.actions() == ["promoted"] * 3
    with pytest.raises(LedgerError, match="git pull"):
        registry.promote(ledger=stale)
    stale.path.unlink()  # a clone of a repository that the ledger was never committed to
    with pytest.raises(LedgerError, match="git pull"):
        registry.promote(ledger=stale)
    assert registry.promote(3, ledger=stale).action == "unchanged"
    assert [entry["action"] for entry in stale.entries()] == ["accepted"]


def test_checkout_that_decides_while_another_one_judges_wins(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = promoted(new, GOOD)
    other = Ledger(registry.root / "checkout.jsonl")
    other.path.write_bytes(registry.ledger.path.read_bytes())
    registry.add(BETTER)
    registry.add(BEST)
    judge = promotion.judge

    def judge_slowly(*arguments: Any) -> Verdict:
        monkeypatch.setattr(promotion, "judge", judge)
        assert registry.promote(2, ledger=other).action == "promoted"
        return judge(*arguments)

    monkeypatch.setattr(promotion, "judge", judge_slowly)
    with pytest.raises(LedgerError, match=r"another checkout decided meanwhile.*git pull"):
        registry.promote(3)
    assert registry.actions() == ["promoted"] and registry.aliases()["champion"] == 2


def test_damaged_ledger_is_never_overridden(new: Any) -> None:
    registry = promoted(new, GOOD, BETTER)
    whole = registry.ledger.path.read_bytes()
    registry.ledger.path.write_bytes(whole.replace(b'"by": "test"', b'"by": "eve"', 1))
    registry.add(BEST)
    for version in (None, 2, 3):
        with pytest.raises(LedgerError, match="line 1: the line was changed"):
            registry.promote(version)
    with pytest.raises(LedgerError, match="line 1: the line was changed"):
        registry.rollback()
    assert registry.aliases() == {"champion": 2, "previous": 1, "challenger": 3}
    registry.ledger.path.write_bytes(whole)
    assert registry.promote().action == "promoted"
