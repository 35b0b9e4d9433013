"""Several checkouts share one environment: each runs its own code, or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlp_models import checkout, doctor
from vlp_models.errors import ParamsError

ROOT = Path(__file__).parent.parent
ENTRY = "import sys\nfrom vlp_models.cli import main\nsys.exit(main())\n"  # what an installed `vlp` is


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """A second checkout, whose `vlp` says who it is."""
    folder = tmp_path / "second"
    (folder / "vlp_models").mkdir(parents=True)
    shutil.copy(ROOT / "params.yaml", folder)
    (folder / "vlp_models" / "__init__.py").touch()
    (folder / "vlp_models" / "cli.py").write_text("import sys\nprint('the second checkout', sys.argv[1:])\n")
    return folder


def run(folder: Path, *arguments: str, script: str = ENTRY) -> subprocess.CompletedProcess[str]:
    """As with an environment that has this checkout installed."""
    entry = folder.parent / "bin" / "vlp"
    entry.parent.mkdir(exist_ok=True)
    entry.write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(entry), *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )


def test_vlp_goes_on_with_the_code_of_the_folder_it_stands_in(second: Path) -> None:
    done = run(second, "stage", "shards")
    assert done.stdout == "the second checkout ['stage', 'shards']\n", done.stderr


def test_a_program_that_uses_another_folders_params_is_refused(second: Path) -> None:
    done = run(second, script="from vlp_models.params import load_params\nload_params()\n")
    assert "ParamsError" in done.stderr and f"set PYTHONPATH={second}" in done.stderr
    with pytest.raises(ParamsError, match=r"code of its own .*but the code of"):
        checkout.refuse_other_code(second)


def test_a_code_that_can_not_be_gone_over_to_is_an_error_and_no_circle(
    second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLP_CODE_OF", f"{os.getpid()} {second / 'vlp_models'}")
    with pytest.raises(ParamsError, match="begin with `vlp`"):
        checkout.run_the_code_of(second)


def test_a_workspace_without_code_and_a_link_to_this_one_are_fine(tmp_path: Path) -> None:
    checkout.refuse_other_code(tmp_path)
    (tmp_path / "vlp_models").symlink_to(ROOT / "vlp_models")
    checkout.refuse_other_code(tmp_path)


def test_doctor_tells_whose_code_runs(second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(folder: Path) -> doctor.Finding:
        return next(finding for finding in doctor.examine(folder) if finding.subject == "code")

    assert (code(second).level, str(second) in code(second).text) == ("problem", True)
    monkeypatch.setattr(doctor, "installed_from", lambda: second)
    assert (code(ROOT).level, str(second) in code(ROOT).text) == ("note", True)
    monkeypatch.setattr(doctor, "installed_from", lambda: ROOT)
    assert code(ROOT).level == "ok"
