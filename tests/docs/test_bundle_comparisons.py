"""The verdicts of `vlp compare` in README and docs are those of the present code (benchmarks/compare_bundles.py)."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlp_models.cli.main import app

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    from compare_bundles import COMPARISONS, RESULTS, compare_bundles, write_example
finally:
    sys.path.pop(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_recorded_comparison_is_what_compare_prints(name: str) -> None:
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))[name]
    for row, expected in zip(compare_bundles(*COMPARISONS[name]), recorded, strict=True):
        assert row == pytest.approx(expected, abs=5e-4), (
            "run python benchmarks/compare_bundles.py, then docs/_ext/figures.py"
        )


def test_compare_prints_what_its_guide_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    write_example(tmp_path)
    page = (ROOT / "docs" / "guides" / "comparing.md").read_text(encoding="utf-8")
    command, output = re.findall(r"```console\n\$ vlp (compare .*?)\n(.*?)```", page, re.DOTALL)[0]
    assert CliRunner().invoke(app, shlex.split(command)).stdout.split() == output.split()
