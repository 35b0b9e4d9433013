"""The command line: groups of commands, and what `vlp run` adds to `dvc repro`. tests/test_pipeline.py runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import vlp_models
from vlp_models.cli import pipeline
from vlp_models.cli.main import app
from vlp_models.common.portable import VARIABLES
from vlp_models.common.workspace import REGISTERED, Workspace
from vlp_models.errors import ParamsError, TrackingError
from vlp_models.params import load_params
from vlp_models.pipeline.dvc.repro import REPRO
from vlp_models.pipeline.stages.plan import check_current, check_params
from vlp_models.registry import receipts
from vlp_models.registry.client import resolve_task

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    (tmp_path / ".dvc").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "write_plan", lambda params, workspace: (False, SimpleNamespace(regions=True)))
    monkeypatch.setattr(pipeline, "BEFORE_REPRO", {})
    return tmp_path


def test_every_command_has_a_panel_and_an_imperative_help_line() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.rich_help_panel in result.output
        first = (command.help or "").partition("\n")[0]
        assert first.endswith(".") and not first.split()[0].endswith("s"), f"{name}: {first}"
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0
    assert CliRunner().invoke(app, ["--version"]).output == f"vlp-flows {vlp_models.__version__}\n"


def test_shells_complete_presets() -> None:
    """As the scripts of `vlp --install-completion` ask: with variables, not with arguments."""
    words = {"COMP_WORDS": "vlp use tiny", "COMP_CWORD": "2", "_TYPER_COMPLETE_ARGS": "vlp use tiny"}
    for shell in ("bash", "zsh"):
        result = CliRunner().invoke(app, [], env={**words, "_VLP_COMPLETE": f"complete_{shell}"}, prog_name="vlp")
        assert "tiny-coco" in result.output and "vlmo" not in result.output


@pytest.mark.slow
def test_all_stages_compute_with_the_instructions_of_params(tmp_path: Path) -> None:
    """`vlp stage all` imports NumPy for the list of stages, before the first stage runs."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    code = (
        "from vlp_models.cli import pipeline\n"
        "from vlp_models.common.portable import is_portable\n"
        "pipeline.run_stage = lambda *_: print('portable' if is_portable() else 'not')\n"
        "pipeline.stage('all')\n"
    )
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"portable"}


def exit_code(targets: list[str]) -> int:
    """Return the exit code of `vlp run TARGETS`."""
    with pytest.raises(typer.Exit) as ended:
        pipeline.run(targets)
    return ended.value.exit_code


@pytest.mark.parametrize(
    ("lost", "targets", "code", "registers"),
    [
        (["vlp-vqa/1"], [], 0, True),
        (["vlp-vqa/1"], ["register"], 0, True),
        (["vlp-vqa/1"], ["evaluate"], 0, False),
        (["vlp-vqa/1"], [], 1, False),
        ([], [], 0, False),
        (None, [], 0, False),
    ],
)
@pytest.mark.usefixtures("project")
def test_versions_that_mlflow_lost_are_registered_again(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, lost: list[str] | None, targets: list[str], code: int, registers: bool
) -> None:
    commands: list[list[str]] = []

    def find_lost_versions(params: Any, root: Path) -> list[str]:
        if lost is None:
            raise TrackingError("MLflow does not answer")
        return lost

    monkeypatch.setattr(receipts, "find_lost_versions", find_lost_versions)
    monkeypatch.setattr(pipeline, "supervise_commands", lambda wanted, env: commands.extend(wanted) or code)
    assert exit_code(targets) == code
    assert commands[0] == [*REPRO, *targets]
    expected = [["--force", "--single-item", "register"]] if registers else []
    assert [command[-3:] for command in commands[1:]] == expected
    error = capsys.readouterr().err
    assert ("MLflow has lost vlp-vqa/1; registering again" in error) == registers
    unknown = "cannot check whether the registered versions still exist" in error
    assert unknown == (lost is None), "a server that is down does not fail a finished run"


@pytest.mark.usefixtures("project")
def test_versions_that_the_run_itself_registered_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow takes seconds to import. A result from DVC's cache names no version in MLflow, so it is looked up."""
    asked: list[Path] = []

    def register(commands: list[list[str]], env: dict[str, str]) -> int:
        REGISTERED.touch()
        return 0

    monkeypatch.setattr(receipts, "find_lost_versions", lambda params, root: asked.append(root) or [])
    monkeypatch.setattr(pipeline, "supervise_commands", register)
    assert exit_code([]) == 0 and not asked
    monkeypatch.setattr(pipeline, "supervise_commands", lambda commands, env: 0)
    assert exit_code([]) == 0 and len(asked) == 1


def test_a_project_with_crlf_line_ends_can_be_changed_again_and_again(project: Path, capsys: Any) -> None:
    """As a checkout with git's `core.autocrlf` has them: no line end is doubled, and dvc.yaml is up to date."""
    file, dvc_yaml = project / "params.yaml", project / "dvc.yaml"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    pipeline.use("", [], False)
    dvc_yaml.write_bytes(dvc_yaml.read_bytes().replace(b"\n", b"\r\n"))
    capsys.readouterr()
    for seed in (2, 3):
        pipeline.use("", [f"pretrain.tden.seed={seed}"], False)
        assert capsys.readouterr().out.endswith(f"-> {seed}\n"), "dvc.yaml does not change"
    pipeline.use("", ["finetune.tden-vqa=null"], False)
    assert capsys.readouterr().out == "finetune.tden-vqa: removed\ndvc.yaml updated\n"
    for path in (file, dvc_yaml):
        content = path.read_bytes()
        assert b"\r\r" not in content and content.count(b"\r\n") == content.count(b"\n")
    params, workspace = load_params(file), Workspace()
    check_current(params, workspace, check_params(params))


def test_a_model_is_accepted_for_its_task(project: Path) -> None:
    tracking = load_params(project / "params.yaml").tracking
    assert resolve_task(tracking, "vlp-vqa") == resolve_task(tracking, "vqa") == "vqa"
    with pytest.raises(ParamsError, match="vlp-vqq: no such task"):
        resolve_task(tracking, "vlp-vqq")
