"""What `vlp run` and `vlp history` print: scores, pages that exist, files to commit, decisions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli import registry
from vlp_models.cli.results import Scores, print_next_steps, print_places, print_results, read_scores
from vlp_models.common.workspace import Workspace, find_uncommitted
from vlp_models.params import load_params
from vlp_models.registry.client import connect
from vlp_models.registry.versions import SCORES_VIEW

ROOT = Path(__file__).parents[2]


def record(split: str, value: float, **changes: Any) -> dict[str, Any]:
    baselines = {"blind baseline": 40.0, "per question text": 41.1}
    return {
        "task": "vqa",
        "metric": "accuracy",
        "headline": True,
        "dataset": "scenes",
        "run": "a-run",
        "model": "tden",
        "note": "",
        "split": split,
        "value": value,
        "low": 1.0,
        "high": 99.0,
        "baselines": baselines,
        "leakage": None,
    } | changes


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def show(*records: dict[str, Any], columns: str = "", before: Scores | None = None) -> str:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        (tmp_path / "summary.json").write_text(json.dumps(records))
        print_results(tmp_path / "summary.json", before)
        return capsys.readouterr().out

    return show


def test_only_first_metrics_are_shown_and_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(
        json.dumps([record("test", 52.5), record("test", 61.5, metric="accuracy (what)", headline=False)])
    )
    code = (
        "import sys; from pathlib import Path; from vlp_models.cli.results import print_results; "
        "print_results(Path('summary.json')); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "52.5" in done.stdout and "61.5" not in done.stdout


def test_val_is_shown_only_without_test_scores(printed: Any) -> None:
    both = printed(record("val", 51.5), record("test", 52.5), record("val", 53.5, dataset="photographs"))
    assert "52.5" in both and "53.5" in both and "51.5" not in both
    assert "vqa: scenes test" in both and "vqa: photographs val" in both


def test_score_and_best_baseline_without_seen_items_are_next_to_each_other(printed: Any) -> None:
    assert "seen" not in printed(record("test", 52.5))
    # On all items another baseline is the best one.
    there = {"per question text": 38.9, "blind baseline": 39.6, "human": 88.8}
    baselines = {name: {"value": value} for name, value in there.items()}
    leakage = {"without_both": {"value": 47.3, "low": None, "high": None, "n": 30, "baselines": baselines}}
    text = printed(record("test", 52.5), record("test", 50.0, run="another", leakage=leakage), columns="160")
    (line,) = [line for line in text.splitlines() if "another" in line]
    assert re.search(r"50\.0.*41\.1 per question text.*47\.3.*39\.6 blind baseline", line), text
    # Evaluations of earlier releases have no baselines there.
    leakage["without_both"].pop("baselines")
    assert "47.3" in printed(record("test", 50.0, leakage=leakage))


def test_the_best_baseline_is_the_highest_or_the_lowest_rank_and_people_are_none(printed: Any) -> None:
    text = printed(record("test", 52.5, baselines={"human": 99.0, "majority answer": 21.3, "blind baseline": 39.5}))
    assert "39.5 blind baseline" in text and "99.0" not in text.replace("1.0 to 99.0", "") and "21.3" not in text
    ranks = {"blind": 40.0, "chance": 50.0}
    assert "40.0 blind" in printed(record("test", 7.0, task="retrieval", metric="median rank", baselines=ranks))


def test_a_score_that_changed_has_the_previous_one_next_to_it(printed: Any, tmp_path: Path) -> None:
    assert "before" not in printed(record("test", 52.5))
    before = read_scores(tmp_path / "summary.json")
    text = printed(record("test", 61.5), record("test", 44.0, run="another"), before=before)
    assert "before" in text and "52.5" in text
    assert read_scores(tmp_path / "missing.json") == {}


@pytest.mark.parametrize("columns", ["", "80"])
def test_no_cell_is_truncated(printed: Any, columns: str) -> None:
    words = printed(record("test", 52.5, run="a-longer-run-name"), columns=columns).split()
    for word in ("accuracy", "a-longer-run-name", "52.5", "question", "41.1"):
        assert word in words


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


def test_the_address_of_the_experiment_is_looked_up_once(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    params, workspace = load_params(project / "params.yaml"), Workspace(project)
    client = connect(params.tracking, project)
    experiment = client.get_experiment_by_name(params.tracking.experiment)
    assert experiment is not None
    addresses = []
    for _ in range(3):
        print_places(params, workspace)
        addresses.append(capsys.readouterr().out.splitlines()[-1])
        if len(addresses) == 1:  # the first version is registered
            client.set_experiment_tag(experiment.experiment_id, SCORES_VIEW, "{}")
        else:
            monkeypatch.setattr("vlp_models.registry.client.connect", None)
    assert addresses[0].endswith("workflowType=machine_learning")
    assert addresses[1] == addresses[2] == addresses[0] + "&viewStateShareKey=scores"


def test_dates_of_the_history_are_not_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    entry = {"seq": 1, "time": "2026-11-25T10:11:12Z", "action": "promoted", "version": 3, "from": 2, "by": "someone"}
    entry |= {"run": "tden-captioning-seed-2", "run_model": "tden-large", "decision": {"numbers": {"value": 104.25}}}
    registry.print_history([entry])
    lines = capsys.readouterr().out.splitlines()
    assert any("2026-11-25 10:11  promoted" in line for line in lines) and max(map(len, lines)) <= 80
    assert "gain" not in lines[0], "no entry has one"
