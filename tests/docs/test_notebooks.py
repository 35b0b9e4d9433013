"""The notebooks of examples/notebooks store no outputs, and their code cells run in order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cloned_project import copy_project, new_clone, run

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((ROOT / "examples" / "notebooks" / name).read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return notebook["cells"]


def run_cells(name: str, folder: Path, code: Path) -> str:
    """Run the code cells in one namespace, like a kernel: the value of a last expression is printed."""
    script = ["import ast", "namespace = {'__name__': '__main__'}"]
    for number, cell in enumerate(cells(name)):
        if cell["cell_type"] == "code":
            script.append(f"tree = ast.parse({''.join(cell['source'])!r})")
            script.append("last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None")
            script.append(f"exec(compile(tree, '{name} cell {number}', 'exec'), namespace)")
            script.append("if last: print(eval(compile(ast.Expression(last.value), 'last line', 'eval'), namespace))")
    (folder / "cells.py").write_text("\n".join(script))
    paths = (f"PYTHONPATH={code}", "MPLBACKEND=agg")
    return run(folder, "env", *paths, sys.executable, "cells.py").stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_store_no_outputs(path: Path) -> None:
    for cell in cells(path.name):
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_own_photos_become_captions(tmp_path: Path) -> None:
    printed = run_cells("own_photos.ipynb", tmp_path, new_clone(tmp_path / "clone"))
    assert "CIDEr" in printed and "'run': 'tden-captioning'" in printed


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_comparison_ends_with_a_verdict(built_project: Path, tmp_path: Path) -> None:
    project = copy_project(built_project, tmp_path / "project")
    folder = project / "examples" / "notebooks"
    printed = run_cells("reading_a_comparison.ipynb", folder, project)
    assert "gain of tden-vqa-longer" in printed and "question_type=" in printed
    assert "inconclusive" in printed or "keep" in printed or "promote" in printed
