"""`vlp run` trains fine-tunings in parallel, and prints one line instead of DVC's many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import zc.lockfile

from vlp_models.contrib.parallel_finetune import run as parallel_finetune
from vlp_models.errors import DataError
from vlp_models.params import load_params
from vlp_models.pipeline.dvc import repro

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("partial", [True, False])
def test_up_to_date_is_left_out_in_the_middle_of_a_run(partial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if partial:
        monkeypatch.setenv(repro.PARTIAL, "1")
    code = (
        f"from vlp_models.pipeline.dvc.repro import ShortLog, sys; ShortLog(sys.stdout).write('{repro.UP_TO_DATE}\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ("" if partial else f"{repro.UP_TO_DATE}\n")


def test_fine_tunings_that_new_inputs_leave_valid_are_not_run_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretraining is run first: with the same result, one fine-tuning is left, which `dvc repro` runs."""
    answers = iter([{"pretrain@tden"}, {"finetune@tden-vqa"}])
    monkeypatch.setattr(parallel_finetune, "_find_stale", lambda *arguments: next(answers))
    calls: list[list[list[str]]] = []

    def run(commands: list[list[str]], environment: dict[str, str], at_once: int = 1) -> int:
        assert repro.PARTIAL in environment
        calls.append(commands)
        return 0

    params = load_params(ROOT / "params.yaml")
    assert parallel_finetune.finetune_in_parallel(params, tmp_path, {}, run) == 0
    assert calls == [[[*repro.REPRO, "pretrain@tden"]]]
    calls.clear()
    answers = iter([{"prepare@scenes"}, set()])  # new raw data: everything behind it may have to run
    assert parallel_finetune.finetune_in_parallel(params, tmp_path, {}, run) == 0
    assert calls == [[[*repro.REPRO, "pretrain@tden"]]]
    calls.clear()
    both = {"finetune@tden-captioning", "finetune@tden-vqa"}
    monkeypatch.setattr(parallel_finetune, "_find_stale", lambda *arguments: both)
    assert parallel_finetune.finetune_in_parallel(params, tmp_path, {}, run) == 0
    runs = [name for name in params.finetune if f"finetune@{name}" in both]
    chains = [[*repro.REPRO, "--single-item", f"finetune@{name}", f"evaluate@{name}"] for name in runs]
    assert calls[1:] == [chains], "each is evaluated at once, while the other may still train"


def test_a_failure_of_dvc_runs_nothing_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_finetune, "read_stale", Mock(side_effect=DataError("dvc status: busy")))
    assert parallel_finetune.finetune_in_parallel(load_params(ROOT / "params.yaml"), tmp_path, {}, Mock()) == 0


@pytest.mark.slow
def test_calls_at_the_same_time_wait_for_dvcs_lock(tmp_path: Path) -> None:
    subprocess.run(["dvc", "init", "--quiet", "--no-scm"], cwd=tmp_path, check=True)
    (tmp_path / "dvc.yaml").write_text("stages: {hello: {cmd: echo hello > hello, outs: [hello]}}")
    lock = zc.lockfile.LockFile(tmp_path / ".dvc" / "tmp" / "lock")
    process = subprocess.Popen([*repro.REPRO, "hello"], cwd=tmp_path, env={**os.environ, repro.PARTIAL: "1"})
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(8)  # a start takes two seconds
    lock.close()
    assert process.wait(60) == 0
    assert (tmp_path / "hello").exists()
