"""The unattended run without Prefect: order, remembered answers, failures, retries, no server."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from flow_project import break_stage, set_flow

from vlp_models.errors import DataError, TrackingError
from vlp_models.flows import pipeline
from vlp_models.flows.parts import Part, retrain_parts
from vlp_models.flows.pipeline import DataDrifted, Outcome, Run, run_without_server, summarize
from vlp_models.flows.process import StageFailed, hold_workspace, is_stale
from vlp_models.params import FlowParams, Params, load_params
from vlp_models.pipeline import promotion_commands

ROOT = Path(__file__).parents[2]
NAMES = [
    "ingest",
    "drift",
    "validate",
    "features",
    "pretrain tden",
    "scheduled sampling tden-two-pass",
    "finetune tden-captioning",
    "finetune tden-vqa",
]
NAMES += ["evaluate", "register", "promote captioning", "promote vqa", "report"]
SLOT = """
from vlp_models.flows.tasks import gpu_slot
with gpu_slot("gpu", print):
    print("ran")
"""


def retrain(project: Path, lines: list[str] | None = None) -> dict[str, Outcome]:
    log = (lines if lines is not None else []).append
    outcomes = run_without_server(project, retrain_parts, name="retrain", log=log)
    return {outcome.part: outcome for outcome in outcomes}


def states(outcomes: dict[str, Outcome]) -> list[str]:
    return [outcome.state for outcome in outcomes.values()]


@pytest.mark.pipeline
def test_all_parts_run_once_without_a_server_and_a_refusal_is_an_answer(project: Path) -> None:
    (project / "answer-promote-vqa").write_text("3 refused: gain 0.2 is below 0.5")
    env = {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_HOME": str(project / "prefect")}
    done = subprocess.run([sys.executable, "-m", "flows.retrain"], cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (project / "report").exists()
    last = done.stderr.splitlines()[-1]
    trained = "pretrain tden, scheduled sampling tden-two-pass, finetune tden-captioning, finetune tden-vqa"
    assert f"ran validate, features, {trained}, evaluate" in last
    assert "promote captioning: done (promote-captioning done)" in last
    assert "promote vqa: refused: gain 0.2 is below 0.5" in last

    assert (project / "training_stats").exists(), "the next drift is measured against this training"

    with patch("vlp_models.flows.pipeline.is_stale", wraps=is_stale) as asked_dvc:
        again = retrain(project)
    assert asked_dvc.call_count == 1, "nothing is stale, so one question is enough"
    assert list(again) == NAMES
    assert states(again) == ["skipped"] * 2 + ["up to date"] * 11
    assert again["ingest"].detail == "no inbox"
    assert summarize(again.values()) == "nothing was stale; nothing ran"
    asked = ["promote-captioning", "promote-vqa"]
    assert (project / "asked.txt").read_text().split() == asked, "the same version is not judged again"

    registered = project / "reports" / "registered.json"
    registered.write_text(registered.read_text().replace("vlp-vqa", "vlp-vqa2"))
    assert retrain(project)["promote vqa"].state == "refused"
    assert (project / "asked.txt").read_text().split() == [*asked, "promote-vqa"]


@pytest.mark.pipeline
def test_failing_stage_ends_the_run_with_its_output(project: Path) -> None:
    break_stage(project, "pretrain", "open('tries', 'a').write('x'); sys.exit('disk on fire')")
    with pytest.raises(StageFailed, match=r"\ndisk on fire\n"):
        retrain(project)
    assert (project / "shards").exists()
    assert not (project / "finetune-tden-vqa").exists() and not (project / "asked.txt").exists()
    assert (project / "tries").read_text() == "x", "no retry: waiting does not help"


@pytest.mark.pipeline
def test_preempted_trainer_is_resumed(project: Path) -> None:
    once = "import pathlib; f = pathlib.Path('tries'); f.open('a').write('x'); len(f.read_text()) > 1 or sys.exit(75)"
    break_stage(project, "pretrain", once)
    lines: list[str] = []
    [part] = [part for part in retrain_parts(load_params(project / "params.yaml")) if part.name == "pretrain tden"]
    assert run_without_server(project, lambda params: [part], name="retrain", log=lines.append)[0].state == "ran"
    assert "pretrain tden: Preempted; trying again in 1 s" in lines


@pytest.mark.pipeline
def test_lost_versions_are_registered_again_and_judged_again(project: Path) -> None:
    """DVC compares files; it cannot detect that mlflow.db is gone."""
    retrain(project)
    asked = (project / "asked.txt").read_text()
    gone = ["vlp-vqa/1"]

    def lost(root: Path) -> list[str]:
        return [gone.pop()] if gone else []

    lines: list[str] = []

    def parts(params: Params) -> list[Part]:
        return [dataclasses.replace(p, lost=lost) if p.name == "register" else p for p in retrain_parts(params)]

    outcomes = run_without_server(project, parts, name="retrain", log=lines.append)
    assert {o.part for o in outcomes if o.state == "ran"} == {"register", "promote captioning", "promote vqa"}
    assert "register: vlp-vqa/1 lost; running it again" in lines
    assert (project / "asked.txt").read_text() == 2 * asked
    assert retrain(project)["register"].state == "up to date"


@pytest.mark.pipeline
def test_promotions_are_judged_again_if_the_registration_fails_at_its_end(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost any more at the second try."""
    retrain(project)
    register = next(part for part in retrain_parts(load_params(project / "params.yaml")) if part.name == "register")
    register = dataclasses.replace(register, lost=lambda root: ["vlp-vqa/1"])
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "is_stale", lambda *_: False)
        patch.setattr(pipeline, "repro", lambda *_, **__: exit(137))
        with pytest.raises(SystemExit):
            Run(project, None, {}).run_part(register, print, contextlib.nullcontext)
    outcomes = retrain(project)
    assert {o.part for o in outcomes.values() if o.state == "ran"} == {"promote captioning", "promote vqa"}


@pytest.mark.parametrize(
    ("answer", "hashed"), [(False, True), (True, False), (TrackingError(""), True), (DataError(""), False)]
)
def test_promotion_is_not_up_to_date_while_the_aliases_are_behind(
    project: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, hashed: bool
) -> None:
    def behind(*_: Any) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    (project / "reports").mkdir(exist_ok=True)
    (project / "reports" / "registered.json").write_text('{"vqa": []}')
    monkeypatch.setattr(promotion_commands, "aliases_are_behind", behind)
    (part,) = (p for p in retrain_parts(load_params(project / "params.yaml")) if p.name == "promote vqa")
    assert bool(part.evidence(project)) is hashed and part.evidence(project) is not None


@pytest.mark.pipeline
def test_new_data_is_drift_checked_until_it_passes(project: Path) -> None:
    (project / "data" / "inbox").mkdir(parents=True)
    (project / "reports" / "ingest.json").write_text('{"new": 3, "content": "abc"}')
    skipped = run_without_server(project, lambda params: retrain_parts(params)[1:2], name="retrain", log=print)
    assert [o.state for o in skipped] == ["skipped"], "nothing is measured before the first training"
    (project / "data" / "training_stats.json").write_text("{}")

    def new_data(params: Params) -> list[Part]:
        return [dataclasses.replace(part, skip="") for part in retrain_parts(params)[:2]]

    def run() -> list[str]:
        return [o.state for o in run_without_server(project, new_data, name="retrain", log=lambda line: None)]

    (project / "answer-drift").write_text("4 caption length 31 exceeds 12")
    for _ in range(2):
        with pytest.raises(DataDrifted, match=r"caption length 31(.|\n)*drift\.gate"):
            run()
    (project / "answer-drift").unlink()
    assert run() == ["ran", "ran"]
    assert run() == ["ran", "up to date"], "the inbox is always checked; the same data is not measured twice"


def test_params_edited_while_a_run_waits_are_used(project: Path) -> None:
    """A run may wait for the workspace for hours."""
    set_flow(project, wait_minutes=1)
    asked: list[int] = []

    def parts(params: Params) -> list[Part]:
        asked.append(params.flow.wait_minutes)
        return []

    with contextlib.ExitStack() as other:
        other.enter_context(hold_workspace(project, "other", 0, lambda line: None))

        def log(line: str) -> None:
            if "waiting up to 60 s for another flow other" in line:
                set_flow(project, wait_minutes=2)
                other.close()

        run_without_server(project, parts, name="retrain", log=log)
    assert asked == [1, 2]


def test_time_limits_are_per_part_and_unknown_parts_are_rejected(project: Path) -> None:
    set_flow(project, timeout_hours={"finetune": 2})
    params = load_params(project / "params.yaml")
    parts: dict[str, Part] = {part.name: part for part in retrain_parts(params)}
    run = Run(project, None, params.flow.timeout_hours)
    assert [run._limits(parts[name])["timeout"] for name in ("finetune tden-vqa", "pretrain tden")] == [7200, 0]
    with pytest.raises(ValueError, match=r"`timeout_hours\.finetun`: unknown part"):
        FlowParams(timeout_hours={"finetun": 2})


@pytest.mark.slow
def test_stage_runs_without_a_gpu_slot_if_there_is_no_server(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path)}
    env |= {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    done = subprocess.run([sys.executable, "-c", SLOT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("no slot of `gpu`, running without one")
    assert done.stdout.splitlines()[1] == "ran"
