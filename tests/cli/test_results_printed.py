"""What `vlp run` prints at its end: the page that exists, and the files to commit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlp_models.cli import versions
from vlp_models.cli.results import find_uncommitted, print_next_steps, print_places
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.params import load_params
from vlp_models.pipeline import parallel_finetune
from vlp_models.pipeline.dvc import repro
from vlp_models.registry.client import resolve_task

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project in a subfolder of a git repository, with its params.yaml committed."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(ROOT / "params.yaml", project)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    return project


def write(project: Path, *names: str) -> None:
    for name in names:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        with (project / name).open("a") as file:
            file.write("\n")


def test_every_file_of_the_project_that_git_lacks_is_listed(project: Path) -> None:
    assert find_uncommitted(project) == []
    write(project, "notes.txt", "../dvc.lock", "packages/a.json", "packages/b.json", "promotions/ledger.jsonl")
    write(project, "dvc.lock", "params.yaml", "data/raw/pairs.dvc")
    assert find_uncommitted(project) == ["dvc.lock", "packages", "params.yaml", "promotions", "data/raw/pairs.dvc"]
    subprocess.run(["git", "add", *find_uncommitted(project)], cwd=project, check=True)
    (project / ".git").write_text("broken")
    assert find_uncommitted(project) == []


def test_the_gate_is_explained_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registered = {
        task: [{"name": f"vlp-{task}", "version": 1, "run": task, "challenger": True}] for task in ("captioning", "vqa")
    }
    write(project, "reports/registered.json")
    (project / "reports/registered.json").write_text(json.dumps(registered))
    write(project, "dvc.lock")
    print_next_steps(load_params(project / "params.yaml"), Workspace(project))
    printed = capsys.readouterr().out
    assert "vlp promote captioning " in printed and "vlp promote vqa\n" in printed
    assert printed.count("let the gate decide") == 1 and "git add dvc.lock && git commit" in printed


def test_only_pages_that_exist_are_named(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    params, workspace = load_params(project / "params.yaml"), Workspace(project)
    for page, expected in {
        "": "",
        "validation.html": f"validation {workspace.reports}/validation.html\n",
        "index.html": f"report     {workspace.reports}/index.html\n",
    }.items():
        if page:
            write(project, f"reports/{page}")
        print_places(params, workspace)
        assert capsys.readouterr().out == expected, "and no MLflow before its database exists"


@pytest.mark.parametrize("partial", [True, False])
def test_up_to_date_is_left_out_in_the_middle_of_a_run(partial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if partial:
        monkeypatch.setenv(repro.PARTIAL, "1")
    code = (
        f"from vlp_models.pipeline.dvc.repro import ShortLog, sys; ShortLog(sys.stdout).write('{repro.UP_TO_DATE}\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ("" if partial else f"{repro.UP_TO_DATE}\n")


def test_a_model_is_accepted_for_its_task(project: Path) -> None:
    tracking = load_params(project / "params.yaml").tracking
    assert resolve_task(tracking, "vlp-vqa") == resolve_task(tracking, "vqa") == "vqa"
    with pytest.raises(ParamsError, match="vlp-vqq: no such task"):
        resolve_task(tracking, "vlp-vqq")


def test_dates_of_the_history_are_not_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    entry = {"seq": 1, "time": "2026-11-25T10:11:12Z", "action": "promoted", "version": 3, "from": 2, "by": "someone"}
    entry |= {"run": "tden-captioning-seed-2", "run_model": "tden-large", "decision": {"numbers": {"value": 104.25}}}
    versions.print_history([entry])
    lines = capsys.readouterr().out.splitlines()
    assert any("2026-11-25 10:11  promoted" in line for line in lines) and max(map(len, lines)) <= 80
    assert "gain" not in lines[0], "no entry has one"


def test_fine_tunings_that_new_inputs_leave_valid_are_not_run_in_parallel(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretraining is run first: with the same result, one fine-tuning is left, which `dvc repro` runs."""
    answers = iter([{"pretrain@tden"}, {"finetune@tden-vqa"}])
    monkeypatch.setattr(parallel_finetune, "_find_stale", lambda *given: next(answers))
    calls: list[list[list[str]]] = []

    def run(commands: list[list[str]], environment: dict[str, str], at_once: int = 1) -> int:
        assert repro.PARTIAL in environment
        calls.append(commands)
        return 0

    params = load_params(project / "params.yaml")
    assert parallel_finetune.finetune_in_parallel(params, project, {}, run) == 0
    assert calls == [[[*repro.REPRO, "pretrain@tden"]]]
    calls.clear()
    both = {"finetune@tden-captioning", "finetune@tden-vqa"}
    monkeypatch.setattr(parallel_finetune, "_find_stale", lambda *given: both)
    assert parallel_finetune.finetune_in_parallel(params, project, {}, run) == 0
    runs = [name for name in params.finetune if f"finetune@{name}" in both]
    chains = [[*repro.REPRO, "--single-item", f"finetune@{name}", f"evaluate@{name}"] for name in runs]
    assert calls[1:] == [chains], "each is evaluated at once, while the other may still train"
