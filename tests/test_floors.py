"""Imports point down only, and the command line starts fast."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent


def test_imports_point_down() -> None:
    result = subprocess.run(["lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_every_module_is_in_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {name.strip() for layer in contracts[0]["layers"] for name in layer.split("|")}
    modules = {f"vlp_models.{path.stem}" for path in (ROOT / "vlp_models").iterdir() if (path / "__init__.py").exists()}
    assert modules - {"vlp_models.contrib"} <= layers, "add the folder to [tool.importlinter] in pyproject.toml"
    assert set(contracts[1]["source_modules"]) == layers, "and to the contract on contrib"


def test_files_do_not_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("vlp_models", exclude_type_checking_imports=True, cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['vlp', '--help']\n"
        "from vlp_models.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'mlflow', 'prefect', 'pandas', 'great_expectations', 'numpy', 'pyarrow'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    start = time.perf_counter()
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout
    assert "HEAVY []" in output, output[-300:]
    assert time.perf_counter() - start < 20, "it hangs"


def test_orchestration_does_not_import_torch() -> None:
    heavy = "{'torch', 'great_expectations', 'mlflow'}"
    code = f"import vlp_models.flows.retrain, sys; print('HEAVY', sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "HEAVY []" in result.stdout, result.stdout + result.stderr[-500:]


def test_test_files_have_different_names() -> None:
    """pytest imports a test file by its base name: of two with the same name it runs one."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
