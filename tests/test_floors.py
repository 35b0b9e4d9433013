"""Imports point down only, and the command line starts fast."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_imports_point_down() -> None:
    result = subprocess.run(["lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


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
    code = f"import flows.retrain, sys; print('HEAVY', sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "HEAVY []" in result.stdout, result.stdout + result.stderr[-500:]
