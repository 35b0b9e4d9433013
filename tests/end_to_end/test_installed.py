"""The wheel in an environment without a clone: init, run, promotion, an unattended flow, upgrades of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from cloned_project import environment, new_clone
from prefect_server import free_port

from vlp_models.cli.project import TEMPLATE, template_files

ROOT = Path(__file__).parents[2]


# Of the extras `train` and `pipeline`, but not of `serve`
BEYOND_SERVE = ["lightning", "transformers", "scipy", "pyarrow", "duckdb", "cv2", "pandas", "webdataset"]
BEYOND_SERVE += ["pycocoevalcap", "pycocotools", "great_expectations", "prefect", "dvc", "mlflow", "sqlalchemy"]


class Installation:
    """A virtual environment with the wheel; the packages that it depends on are those of the tests' environment."""

    def __init__(self, folder: Path, wheel: Path, without: Collection[str] = ()) -> None:
        """
        Args:
            without: packages that it does not have.
        """
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.site = next(folder.glob("lib/python*/site-packages"))
        dependencies = Path(pytest.__file__).parents[1]
        if without:
            chosen = folder / "dependencies"
            chosen.mkdir()
            for entry in dependencies.iterdir():
                if re.split(r"[.-]", entry.name)[0] not in without:
                    (chosen / entry.name).symlink_to(entry)
            dependencies = chosen
        (self.site / "dependencies.pth").write_text(str(dependencies))
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-cache", "--no-deps"]
        subprocess.run([*install, "--python", self.bin / "python", wheel], check=True)
        for tool in ("dvc", "prefect"):
            (self.bin / tool).write_text(f'#!/bin/sh\nexec {self.bin}/python -m {tool} "$@"\n')
            (self.bin / tool).chmod(0o755)

    @property
    def package(self) -> Path:
        return self.site / "vlp_models"

    def __call__(self, folder: Path, command: str, code: int = 0) -> str:
        """Run a command and return what it prints."""
        env = environment(folder) | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        env.pop("PYTHONPATH")
        done = subprocess.run(["bash", "-ec", command], cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == code, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr


def build_wheel(folder: Path) -> Path:
    clone = new_clone(folder / "clone")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([*command, folder / "dist", clone], check=True, env=env)
    return next((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def vlp(tmp_path: Path, wheel: Path) -> Installation:
    return Installation(tmp_path / "environment", wheel)


@pytest.mark.slow
def test_wheels_of_the_same_source_are_equal(wheel: Path, tmp_path: Path) -> None:
    assert build_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_the_template_is_this_repository() -> None:
    for name, file in template_files().items():
        if name not in ("README.md", ".gitignore"):
            assert file.read_bytes() == (ROOT / name).read_bytes(), f"copy {name} to {file}"
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert set((TEMPLATE / "gitignore").read_text().splitlines()) <= set(ignored)


@pytest.mark.pipeline
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_project_runs_promotes_and_retrains_without_a_clone(vlp: Installation, wheel: Path, tmp_path: Path) -> None:
    made = vlp(tmp_path, "vlp init my-project")
    assert "vlp run" in made
    project = tmp_path / "my-project"
    vlp(project, "vlp use tiny && git commit -qam 'Small' && vlp run")
    assert "accuracy" in (project / "reports" / "index.html").read_text()
    assert "champion" in vlp(project, "vlp promote captioning --force 'the first one'")
    photo = next((project / "data" / "raw" / "scenes" / "images").iterdir())
    caption = vlp(project, f"vlp caption {photo}")
    vlp(project, f"vlp export captioning {tmp_path / 'captioner'} --to hf")
    assert caption_with_the_extra_serve(tmp_path, wheel, photo) in caption
    assert "files, as in vlp-flows 0.1.0, which is installed" in vlp(project, "vlp verify vlp-captioning/1")
    assert "promote captioning" in vlp(project, "python -m flows.retrain")
    assert vlp(project, "dvc status") == "Data and pipelines are up to date.\n"


def caption_with_the_extra_serve(folder: Path, wheel: Path, photo: Path) -> str:
    """Load the export in another environment, which has no package beyond the extra `serve`."""
    serve = Installation(folder / "serve", wheel, without=BEYOND_SERVE)
    code = f"from vlp_models import VLP; print(VLP.from_pretrained('captioner').caption('{photo}'))"
    caption = serve(folder, f'python -c "{code}"').strip()
    assert caption and "No module named 'pandas'" in serve(folder, "python -c 'import pandas'", code=1)
    return caption


@pytest.mark.pipeline
def test_an_upgrade_makes_stale_what_it_changes(vlp: Installation, tmp_path: Path) -> None:
    vlp(tmp_path, "vlp init project")
    project, task = tmp_path / "project", vlp.package / "tasks" / "vqa.py"
    vlp(project, "vlp use tiny && dvc repro -q validate")
    task.write_text(task.read_text().replace('"""', '"""A better docstring. ', 1))
    assert "vlp-flows 0.1.0, changed: nothing becomes stale" in vlp(project, "vlp plan")
    assert "didn't change, skipping" in vlp(project, "dvc repro validate")
    task.write_text(task.read_text() + "\nCHANGED = True\n")
    refused = vlp(project, "dvc repro -f -s validate", code=255)
    assert "packages/vlp-flows.json: its code has changed; run `vlp plan`, which lists what becomes stale" in refused
    assert re.search(r"other code for .*tasks/vqa; their stages are stale", vlp(project, "vlp plan"))
    info = next(vlp.site.glob("vlp_flows-*.dist-info")) / "METADATA"
    info.write_text(info.read_text().replace("Version: 0.1.0", "Version: 0.2.0"))
    assert "vlp-flows 0.1.0 -> 0.2.0" in vlp(project, "vlp plan")


@pytest.mark.slow
def test_changes_of_the_template_are_shown_and_merged(vlp: Installation, tmp_path: Path) -> None:
    vlp(tmp_path, "vlp init project --template pairs")
    project, template = tmp_path / "project", vlp.package / "template"
    assert "changes nothing" in vlp(project, "vlp upgrade")
    params = (template / "params.yaml").read_text()
    (template / "params.yaml").write_text(params.replace("max_caption_words: 80", "max_caption_words: 90"))
    (template / "flows" / "new.py").write_text("NEW = 1\n")
    shown = vlp(project, "vlp upgrade")
    assert "+  max_caption_words: 90" in shown and "+NEW = 1" in shown
    vlp(project, "sed -i 's/log_every_steps: 10/log_every_steps: 20/' params.yaml && vlp upgrade --apply")
    merged = (project / "params.yaml").read_text()
    assert "max_caption_words: 90" in merged and "log_every_steps: 20" in merged and "own-pairs" not in shown
    assert (project / "flows" / "new.py").exists() and "changes nothing" in vlp(project, "vlp upgrade")
    vlp(project, "sed -i 's/max_caption_words: 90/max_caption_words: 70/' params.yaml")
    (template / "params.yaml").write_text(params.replace("max_caption_words: 80", "max_caption_words: 100"))
    conflict = vlp(project, "vlp upgrade --apply", code=2)
    assert "params.yaml: your edits and the template's meet; resolve the marked conflicts" in conflict


@pytest.mark.slow
def test_a_folder_in_use_and_an_unknown_template_are_refused(vlp: Installation, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    message = "used: is not empty (notes.txt); name another folder, or move that away"
    assert message in vlp(tmp_path, "vlp init used", code=2)
    assert "no template `pair`; did you mean `pairs`?" in vlp(tmp_path, "vlp init new --template pair", code=2)
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new-*"))


@pytest.mark.server
@pytest.mark.long
def test_the_unattended_stack_runs_a_deployment_without_a_clone(vlp: Installation, tmp_path: Path) -> None:
    vlp(tmp_path, "vlp init project")
    project = tmp_path / "project"
    port = free_port()
    try:
        vlp(project, f"vlp use tiny && git commit -qam 'Small' && vlp up --port {port}")
        api = f"PREFECT_API_URL=http://127.0.0.1:{port}/api NO_PROXY=127.0.0.1"
        vlp(project, f"{api} prefect deployment run retrain/weekly --watch")
        assert (project / "reports" / "index.html").exists()
    finally:
        vlp(project, "vlp down")
        shutil.rmtree(project / ".work" / "stack", ignore_errors=True)
