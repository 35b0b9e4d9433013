"""The gate before a real MLflow on SQLite: who becomes champion, who is refused and why, what a kill leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_registry import IMAGES, QUESTIONS, ToyRegistry, answers, toy_items

from vlp_models.errors import DataError
from vlp_models.registry.promotion.ledger import LedgerError
from vlp_models.registry.promotion.moves import _set_alias

HERE = Path(__file__).parent
GOOD, BETTER, BEST = answers(0.5), answers(0.7), answers(0.9)


def test_better_wins_and_worse_and_equal_are_refused_with_their_numbers(new: Any) -> None:
    registry = new()
    assert registry.add(GOOD) == 1
    assert registry.promote().outcome == "promoted"
    registry.add(BETTER)
    second = registry.promote()
    assert (second.outcome, second.champion) == ("promoted", 1)
    assert second.numbers["gain"] == pytest.approx(100 * (np.mean(BETTER) - np.mean(GOOD)), abs=1e-3)
    assert second.numbers["gain_low"] > 0 and second.numbers["share_above_min_gain"] >= 0.95
    assert second.answer == "promote"
    assert registry.aliases() == {"champion": 2, "previous": 1}

    registry.add(GOOD)
    worse = registry.promote()
    assert (worse.outcome, worse.answer) == ("refused", "keep") and worse.reasons[0].startswith("gain: accuracy")
    noise = list(BETTER)
    noise[:QUESTIONS] = [1.0] * QUESTIONS  # one image of sixty: more, but within the noise
    registry.add(noise)
    equal = registry.promote()
    assert equal.outcome == "refused" and equal.numbers["gain"] > 0 and equal.numbers["share_above_min_gain"] < 0.95
    assert equal.answer == "cannot tell" and equal.numbers["detectable"] > equal.numbers["relevant_gain"]
    registry.add(BETTER)
    assert registry.promote().numbers["gain"] == 0.0
    assert registry.aliases() == {"champion": 2, "previous": 1, "challenger": 5}

    last = registry.ledger.entries()[-1]
    assert (last["kind"], last["version"], last["by"]) == ("refused", 5, "test")
    assert last["decision"]["reasons"] == list(registry.promote().reasons)
    tags = registry.client.get_model_version(registry.model, "5").tags
    assert tags["promotion.outcome"] == "promote: refused" and tags["promotion.reasons"].startswith("gain:")
    assert registry.client.get_model_version(registry.model, "2").tags["promotion.outcome"] == "promote: done"


def test_no_champion_still_means_floors_and_validation(new: Any) -> None:
    registry = new(floors={"all": 40.0, "question_type=how many": 80.0, "objects=9": 1.0})
    how_many = [float(i % QUESTIONS != QUESTIONS - 1) for i in range(IMAGES * QUESTIONS)]  # knows all but numbers
    registry.add(how_many, validation={"passed": False, "reasons": ["captions: 9 of 10 rows are bad"]})
    refused = registry.promote()
    assert refused.outcome == "refused" and refused.numbers["value"] == 80.0
    assert refused.reasons == [
        "failed validation: captions: 9 of 10 rows are bad",
        "floor: accuracy 0.00 of question_type=how many is below 80",
        "floor: no test item is in the slice objects=9",
    ]
    assert [row["held"] for row in refused.numbers["floors"]] == [True, False, False]
    registry.unvalidated = True  # allows a missing validation, never a failed one
    assert "failed validation" in registry.promote().reasons[0]
    forced = registry.promote(force_first=True)
    assert forced.outcome == "promoted" and forced.forced and len(forced.reasons) == 3
    registry.add([1.0] * len(GOOD), validation=None)
    assert [r for r in registry.promote(force_first=True).reasons if "floor" not in r] == []
    registry.unvalidated = False
    assert any(r.startswith("unvalidated") for r in registry.promote(force_first=True).reasons)


def test_what_can_not_be_measured_is_refused(new: Any) -> None:
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
    experiment = registry.client.get_run(run_id).info.artifact_uri.removeprefix("file://")
    (Path(experiment) / "model" / "artifacts" / "bundle" / "weights").write_text("flipped")
    assert "not those that were registered" in registry.promote().reasons[0]
    assert registry.promote(force_first=True).outcome == "refused"  # nothing was measured
    (Path(experiment) / "model" / "artifacts" / "bundle" / "weights").unlink()
    assert "unreadable version" in registry.promote().reasons[0]
    assert set(registry.kinds()) == {"refused"} and len(registry.kinds()) == 7
    assert "champion" not in registry.aliases()


def test_on_other_test_data_the_champion_is_evaluated_anew_once(new: Any) -> None:
    registry = new()
    registry.add(GOOD)
    registry.promote()
    registry.add(BETTER, test="t2")
    refused = registry.promote()
    assert refused.outcome == "refused"
    assert "can't be compared with: no test data here" in refused.reasons[0]
    with pytest.MonkeyPatch.context() as patch:  # a fault of the program's own is a recorded refusal, too
        patch.setattr(registry, "_reevaluate", lambda bundle, lineage: 1 / 0)
        assert "its evaluation failed: ZeroDivisionError" in registry.promote().reasons[0]
    registry.reevaluated = toy_items(GOOD, test="t3")  # the workspace has moved on: neither one's test
    assert "the test data differ" in registry.promote().reasons[0]
    registry.reevaluated = toy_items(BEST, test="t2")
    decided = registry.promote()
    assert decided.outcome == "refused" and decided.numbers["champion_reevaluated"]
    assert decided.numbers["champion_value"] == pytest.approx(100 * np.mean(BEST), abs=1e-3)
    count = registry.reevaluations
    again = registry.promote()
    assert not again.numbers["champion_reevaluated"] and registry.reevaluations == count  # it was stored
    registry.add(BETTER, test="t1", note="tokenised otherwise")
    registry.reevaluated = toy_items(GOOD, test="t1", note="tokenised otherwise")
    other = registry.promote()
    assert other.outcome == "promoted" and other.numbers["champion_reevaluated"]


def test_rollback_twice_and_no_further_and_no_return_by_itself(new: Any) -> None:
    registry = new()
    for values in (GOOD, BETTER, BEST):
        registry.add(values)
        assert registry.promote().outcome == "promoted"
    assert registry.aliases() == {"champion": 3, "previous": 2}
    registry.client.set_registered_model_alias(registry.model, "challenger", "3")  # as `register` does each week
    assert registry.rollback().version == 2
    assert registry.aliases() == {"champion": 2, "previous": 1, "challenger": 3}
    assert "was rolled back" in registry.promote().reasons[0]
    assert registry.rollback().version == 1
    assert registry.aliases() == {"champion": 1, "challenger": 3}
    with pytest.raises(DataError, match="no earlier champion"):
        registry.rollback()
    assert registry.promote(3).outcome == "promoted"  # asked for by its number
    assert registry.promote(3).outcome == "unchanged"
    state = registry.ledger.state(registry.model)
    assert registry.aliases() == {"champion": 3, "previous": 1}
    assert (state.champion, state.previous) == (3, 1)


def test_a_changed_copy_is_made_anew_and_a_changed_ledger_is_an_error(new: Any, capsys: Any) -> None:
    registry = new()
    for values in (GOOD, BETTER):
        registry.add(values)
        registry.promote()
    path, log = registry.ledger.path, registry.ledger.name
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    registry.add(GOOD)
    refused = registry.promote()
    whole = path.read_text()
    for text, message in (
        (whole.replace('"by": "test"', '"by": "eve"', 1), "line 1: not what the registry has"),
        ("".join(lines[1:]), "line 1: not what the registry has"),
        (lines[0] + "x\n" + "".join(lines[1:]), "line 2: not what the registry has"),
        (whole + "x\n", "line 4: not what the registry has"),
        (f"<<<<<<< ours\n{whole}", "line 1: not what the registry has"),  # as git leaves it after a merge
    ):
        path.write_text(text)
        capsys.readouterr()
        assert registry.promote().reasons == refused.reasons
        assert message in capsys.readouterr().err
        assert path.read_text().startswith(whole)
        (aside,) = path.parent.glob(f"{path.name}.aside-*")
        assert aside.read_text() == text
        aside.unlink()
        whole = path.read_text()

    changed = registry.client.get_model_version(log, "2").tags["line"].replace('"by": "test"', '"by": "eve"')
    registry.client.set_model_version_tag(log, "2", "line", changed)
    with pytest.raises(LedgerError, match=f"{log} version 3, line 3: the chain is broken here"):
        registry.promote()
    registry.client.delete_registered_model(log)  # the way out that the error names
    assert registry.promote().reasons == refused.reasons
    assert "lines that the registry lacks go there" in capsys.readouterr().err
    assert len(registry.client.search_model_versions(f"name='{log}'")) == len(registry.kinds())


@pytest.mark.parametrize("done", ["stash", "checkout", "clone"])
def test_what_git_does_to_the_copy_blocks_nothing(new: Any, done: str) -> None:
    registry = new()
    path = registry.ledger.path
    registry.add(GOOD)
    registry.promote()
    _git(path.parent, "init", "-q")
    _git(path.parent, "add", path.name)
    _git(path.parent, "commit", "-qm", "one promotion")
    older = path.read_text()
    registry.add(BETTER)
    registry.promote()
    registry.add(BEST)

    def git() -> None:
        if done == "clone":  # of a repository that the ledger was never added to
            path.unlink()
            return
        _git(path.parent, *(["stash", "-q"] if done == "stash" else ["checkout", "-q", "HEAD", path.name]))
        assert path.read_text() == older

    git()
    assert registry.promote().champion == 2 and registry.kinds() == ["done"] * 3
    git()
    back = registry.rollback()
    assert back.version == 2 and registry.kinds() == ["done"] * 4 and registry.aliases()["champion"] == 2


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def test_of_two_checkouts_on_one_registry_one_wins(new: Any, tmp_path: Path) -> None:
    """Each with a ledger file, and so a lock, of its own."""
    registry = new()
    registry.add(GOOD)
    registry.promote()
    registry.add(BETTER)
    registry.add(BETTER)
    several = [process(registry, version, ledger=str(tmp_path / f"{version}.jsonl")) for version in (2, 3)]
    for one in several:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in several:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    ended = [one.communicate(timeout=120) for one in several]
    assert sorted(out.strip() for out, _ in ended) == ["promoted", "refused"], ended
    registry.add(GOOD)
    assert registry.promote().champion == registry.aliases()["champion"] and registry.kinds().count("done") == 2


def test_checkouts_that_catch_up_at_once_write_the_same_alias(new: Any) -> None:
    """MLflow looks for an alias and inserts it where it finds none: of several that look at once, one inserts."""
    registry = new()
    version = registry.add(GOOD)
    start = threading.Barrier(4)

    def write(alias: str) -> None:
        start.wait(60)
        _set_alias(registry.client, registry.model, alias, version)

    with ThreadPoolExecutor(4) as pool:
        for attempt in range(8):
            list(pool.map(write, [f"toy-{attempt}"] * 4))
    assert {registry.aliases()[f"toy-{attempt}"] for attempt in range(8)} == {version}


def test_after_the_loss_of_the_registry_who_was_champion_is_so_again(new: Any, capsys: Any) -> None:
    """mlflow.db is gone, with model and ledger; registered again, the versions have other numbers."""
    registry = new()
    for values, weights in ((GOOD, "a"), (BETTER, "b")):
        registry.add(values, weights=weights)
        assert registry.promote().outcome == "promoted"
    for name in (registry.model, registry.ledger.name):
        registry.client.delete_registered_model(name)
    registry.add(BETTER, weights="b")
    registry.add(BEST, weights="c")
    decision = registry.promote()
    assert (decision.outcome, decision.version, decision.champion) == ("promoted", 2, 1)
    assert registry.kinds() == ["done", "done", "adopted", "done"]
    said = capsys.readouterr().err
    assert "2 lines that the registry lacks go there" in said and "the ledger's champion is version 2" in said
    assert registry.rollback().version == 1
    with pytest.raises(DataError, match="no earlier champion"):
        registry.rollback()


def test_a_champion_set_past_the_ledger_is_taken_over(new: Any, capsys: pytest.CaptureFixture[str]) -> None:
    registry = new()
    registry.add(GOOD)
    registry.client.set_registered_model_alias(registry.model, "champion", "1")
    registry.add(BETTER)
    assert registry.promote().champion == 1
    assert registry.kinds() == ["adopted", "done"] and "taken over" in capsys.readouterr().err
    registry.client.set_registered_model_alias(registry.model, "champion", "1")  # an earlier one is one as well
    registry.add(BEST)
    assert registry.promote().champion == 1
    assert registry.kinds() == ["adopted", "done", "adopted", "done"]
    assert registry.aliases() == {"champion": 3, "previous": 1}
    assert registry.rollback().version == 1


def process(registry: ToyRegistry, version: int, kill: str = "", ledger: str = "") -> subprocess.Popen[str]:
    """A promotion in a process of its own, that connects and then waits for a line."""
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, str(HERE / "toy_registry.py"), str(registry.root), registry.model, str(version), kill, ledger],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_of_two_promotions_at_once_one_wins(new: Any) -> None:
    registry = new()
    registry.add(GOOD)
    registry.promote()
    registry.add(BETTER)
    registry.add(BETTER)
    several = [process(registry, version) for version in (2, 3)]
    for one in several:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in several:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    outcomes = [one.communicate(timeout=60)[0].strip() for one in several]
    assert sorted(outcomes) == ["promoted", "refused"]  # the second one met the first one's equal
    assert registry.kinds().count("done") == 2  # the chain is whole, too, or this raises
    assert registry.aliases()["champion"] == registry.ledger.state(registry.model).champion


def test_a_kill_in_between_is_mended_by_the_next_call(new: Any) -> None:
    """Before the ledger's line: nothing has happened. After it, wherever: the aliases and MLflow's tags follow."""
    points = {"before the line": 1, "before the alias": 2, "after the alias": 2, "before the tags": 2}
    killed = {}
    for kill in points:
        registry = new()
        registry.add(GOOD)
        registry.promote()
        registry.add(BETTER)
        killed[kill] = (registry, process(registry, 2, kill))
    for kill, (registry, one) in killed.items():
        champion = points[kill]
        one.communicate("go\n", timeout=120)
        assert one.returncode == -9
        assert registry.aliases()["champion"] == (1 if kill.startswith("before the") and "tags" not in kill else 2)

        registry.add(GOOD)
        next_call = registry.promote()  # refused by either champion
        assert next_call.outcome == "refused" and next_call.champion == champion
        assert registry.kinds() == [*["done"] * champion, "refused"]
        state = registry.ledger.state(registry.model)
        assert state.champion == champion and state.pending is None
        previous = {"previous": 1} if champion == 2 else {}
        assert registry.aliases() == {"champion": champion, "challenger": 3} | previous
        head = json.loads(registry.client.get_registered_model(registry.model).tags["promotion.head"])
        assert head["seq"] == len(registry.kinds())
        outcome = registry.client.get_model_version(registry.model, "2").tags.get("promotion.outcome")
        assert outcome == ("promote: done" if champion == 2 else None)
