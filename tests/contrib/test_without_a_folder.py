"""Any folder of vlp_models/contrib can be deleted: everything else imports and plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cloned_project import ROOT, copy_tracked_files, environment, run

from vlp_models.contrib import CONTRIB

# Heavy packages are imported once; then each copy of the project plans, in a fork, and imports its modules: without
# contrib all of them, else those of the other folders of contrib (and what they import).
TRY_COPIES = """
import importlib, os, pkgutil, sys, traceback
import dvc.repo, great_expectations, lightning, mlflow, prefect, torch
failed = []
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)
            sys.path.insert(0, folder)
            import vlp_models
            assert vlp_models.__file__.startswith(folder)
            package = vlp_models if folder.endswith("/all") else importlib.import_module("vlp_models.contrib")
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as error:
                    if error.name.startswith("vlp_models"):  # else an optional package is not installed
                        raise
            from vlp_models.cli.main import app
            app(["plan"], standalone_mode=False)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(folder)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def copy_without(folder: Path, *deleted: str, tests: bool = False) -> Path:
    """Copy the project without some folders of contrib."""
    without = [f"vlp_models/contrib/{name}" for name in deleted]
    copy_tracked_files(folder, without=without if tests else [*without, "tests", "benchmarks", "docs"])
    return folder


def use_grid(project: Path) -> None:
    """Make regions without contrib/detector, which the default params.yaml needs."""
    file = project / "params.yaml"
    text = file.read_text(encoding="utf-8").replace("source: detector ", "source: grid ")
    file.write_text(text.replace("source: train ", "source: none ", 1), encoding="utf-8")


def test_the_design_page_lists_all_kinds_of_entries() -> None:
    page = (ROOT / "docs/design/code.md").read_text(encoding="utf-8")
    assert not {kind for kinds in CONTRIB.values() for kind in kinds if f"`{kind}`" not in page}


@pytest.mark.slow
def test_everything_else_imports_and_plans(tmp_path: Path) -> None:
    copies = [copy_without(tmp_path / name, name) for name in CONTRIB]
    complete, copies = copy_without(tmp_path / "complete"), [*copies, copy_without(tmp_path / "all", *CONTRIB)]
    for copy in (complete, *copies):
        use_grid(copy)
    tried = subprocess.run(
        [sys.executable, "-c", TRY_COPIES, str(complete), *map(str, copies)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert tried.returncode == 0, tried.stderr[-4000:]
    planned = yaml.safe_load((complete / "dvc.yaml").read_text())["stages"]
    for copy, deleted in zip(copies, [[name] for name in CONTRIB] + [list(CONTRIB)], strict=True):
        absent = {stage for name in deleted for stage in CONTRIB[name].get("stages", {})}
        expected = {stage: dict(entry) for stage, entry in planned.items() if stage not in absent}
        if "validation_page" in deleted:
            page = ("data/plan/code/validation_pages/page.json", "reports/validation.html")
            for key in ("deps", "outs"):
                expected["validate"][key] = [path for path in expected["validate"][key] if path not in page]
        stages = yaml.safe_load((copy / "dvc.yaml").read_text())["stages"]
        assert list(stages.items()) == list(expected.items()), copy


# Settings of own-pairs that are packages, which need not be installed, and that it does without
WITHOUT_PACKAGES = ("models.tden.text_init=", "models.tden-dual.text_init=", "tokenizer.source=train")


@pytest.mark.slow
def test_what_needs_a_missing_detector_is_refused_and_other_presets_work(tmp_path: Path) -> None:
    project = copy_without(tmp_path / "project", "detector")
    warm_up = "models.v={family: vlmo, vision_warmup: {steps: 1}}"
    refused = {
        "`features.source: detector` is unknown; it": ("plan",),
        "`detector.source: train` is unknown; it": ("use", "--set", "features.source=grid"),
        "`models.v.vision_warmup`": ("use", "--set", "features.source=timm", "--set", warm_up),
    }
    for start, command in refused.items():
        error = run(project, "vlp", *command, check=False).stderr
        assert f"{start} needs vlp_models/contrib/detector, which is not installed" in error, error
    changes = [part for change in (*WITHOUT_PACKAGES, "features.timm.weights=timm") for part in ("--set", change)]
    run(project, "vlp", "use", "own-pairs", *changes)
    assert "detector" in yaml.safe_load((project / "dvc.yaml").read_text())["stages"]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_unit_tests_of_the_core_pass_without_contrib(tmp_path: Path) -> None:
    project = copy_without(tmp_path / "project", *CONTRIB, tests=True)
    unit = [sys.executable, "-m", "pytest", "-m", "not (long or pipeline or server or slow)", "-n", "2"]
    done = subprocess.run([*unit, "tests"], cwd=project, env=environment(project), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
