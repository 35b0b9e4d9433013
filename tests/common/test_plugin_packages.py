"""Plugins of an installed package: its record changes with its code, and the stage `plan` depends on it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.packages import recorded_packages
from vlp_models.common.plugins import import_target, use_plugins
from vlp_models.common.source_hash import changed_packages, outdated_plugin_records
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.params import load_params
from vlp_models.pipeline.stages.plan import planned

ROOT = Path(__file__).parents[2]
TASK = ROOT / "vlp_models" / "contrib" / "plugin_kit" / "scaffolds" / "task" / "guess_color.py"
TARGET = "colors_vlp.guess:GuessColor"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of an installed package with a task."""
    site = tmp_path / "site"
    (site / "colors_vlp").mkdir(parents=True)
    (site / "colors_vlp" / "__init__.py").touch()
    shutil.copy(TASK, site / "colors_vlp" / "guess.py")
    about = site / "colors_vlp-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: colors-vlp\nVersion: 1.2\n")
    (about / "top_level.txt").write_text("colors_vlp\n")
    monkeypatch.syspath_prepend(site)
    yield site / "colors_vlp"
    for name in [name for name in sys.modules if name.partition(".")[0] == "colors_vlp"]:
        del sys.modules[name]


def test_an_edit_changes_the_record(package: Path, tmp_path: Path) -> None:
    def record() -> None:
        for path, text in outdated_plugin_records([TARGET, "plugins.mine:Mine"], tmp_path).items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    record()
    assert recorded_packages(tmp_path) == {"colors-vlp": "1.2"}
    module = package / "guess.py"
    code = module.read_text()
    module.write_text(f"# a comment\n{code}")
    assert changed_packages(tmp_path) == [] and outdated_plugin_records([TARGET], tmp_path) == {}
    for text in (f"{code}\n\nLIMIT = 2\n", f"{code}\ndef (\n"):
        module.write_text(text)
        assert changed_packages(tmp_path) == ["colors-vlp"]
    with pytest.raises(ParamsError, match=rf"{module}:{code.count(chr(10)) + 2}: SyntaxError: invalid syntax"):
        outdated_plugin_records([TARGET], tmp_path)
    with pytest.raises(ParamsError, match=rf"cannot be imported: {module}:\d+: SyntaxError: invalid syntax$"):
        import_target(TARGET)
    shutil.rmtree(package)
    with pytest.raises(ParamsError, match=r"cannot be imported: ModuleNotFoundError: No module named 'colors_vlp"):
        import_target(TARGET)
    assert changed_packages(tmp_path) == ["colors-vlp"]


def test_the_plan_depends_on_the_packages_in_use(package: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(ROOT / "params.yaml", tmp_path))

    def dependencies() -> list[str]:
        stages = yaml.safe_load(planned(load_params(file), Workspace(tmp_path)))["stages"]
        return list(stages["plan"]["deps"])

    try:
        apply_overlay(file, None, [f"plugins.tasks.guess_color={TARGET}"])
        assert "packages/colors_vlp.json" not in dependencies(), "installed, but not used"
        apply_overlay(file, None, ["finetune.tden-color={task: guess_color, start: pretrain/tden}"])
        assert "packages/colors_vlp.json" in dependencies()
    finally:
        use_plugins({}, tmp_path)
