"""The source files of a stage: those its module imports, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlp_models.common.source_hash import ROOT, hash_sources
from vlp_models.contrib import CONTRIB
from vlp_models.data.views import VIEW_MODULES
from vlp_models.models.meta_model import image_kinds
from vlp_models.params import load_params, read_yaml
from vlp_models.pipeline.check_params import find_in_use
from vlp_models.pipeline.dvc.graph import CODE, build_pipeline
from vlp_models.pipeline.stages.plan import _hash_code, code_modules


def package(folder: Path, **files: str) -> Path:
    root = folder / "vlp_models"
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("/init", "/__init__")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.with_suffix(".py").write_text(text)
    (root / "__init__.py").touch()
    return root


def test_imports_inside_functions_are_followed_and_those_for_type_checkers_are_not(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        a="from typing import TYPE_CHECKING\nfrom vlp_models.b import x\n"
        "if TYPE_CHECKING:\n    import vlp_models.types_only\nelse:\n    import vlp_models.other\n"
        "def f():\n    from vlp_models.room import lazy\n",
        b="import json\nx = 1\n",
        room__lazy="import vlp_models.deep.down\n",
        deep__down="",
        types_only="",
        other="",
        unrelated="",
    )
    (root / "room" / "page.j2").write_text("a template")
    found = hash_sources(["vlp_models.a"], root)
    assert set(found) == {
        "__init__.py",
        "a.py",
        "b.py",
        "other.py",
        "room/__init__.py",
        "room/lazy.py",
        "room/page.j2",
        "deep/__init__.py",
        "deep/down.py",
    }
    before = hash_sources(["vlp_models.a"], root)
    (root / "unrelated.py").write_text("changed = 1\n")
    assert hash_sources(["vlp_models.a"], root) == before
    (root / "deep" / "down.py").write_text("changed = 1\n")
    assert hash_sources(["vlp_models.a"], root) != before


def test_relative_imports_are_followed(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        room__a="from .b import x\nfrom . import c\nfrom ..other import y\n",
        room__b="x = 1\n",
        room__c="",
        other="y = 2\n",
    )
    assert set(hash_sources(["vlp_models.room.a"], root)) == {
        "__init__.py",
        "other.py",
        "room/__init__.py",
        "room/a.py",
        "room/b.py",
        "room/c.py",
    }


def test_new_entry_in_a_table_of_names_changes_no_existing_hash(tmp_path: Path) -> None:
    root = package(tmp_path, tasks__old="", tasks__more="")
    table = root / "tasks" / "__init__.py"
    text = 'TASKS: dict[str, str] = {\n    "old": "vlp_models.tasks.old:Old",\n}\nOTHER = 1\n'
    table.write_text(text)
    before = hash_sources(["vlp_models.tasks.old:Old"], root)
    table.write_text(text.replace("}", '    "more": "vlp_models.tasks.more:More",\n}'))
    assert hash_sources(["vlp_models.tasks.old:Old"], root) == before
    assert hash_sources(["vlp_models.tasks.old:Another"], root) != before, "another class of the same file"
    table.write_text(text.replace("OTHER = 1", "OTHER = 2"))
    assert hash_sources(["vlp_models.tasks.old:Old"], root) != before


def test_missing_module_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such module"):
        hash_sources(["vlp_models.absent"], package(tmp_path, a=""))


def declared(stage: str) -> set[str]:
    """Return the source files that dvc.yaml declares for a stage, for its first run, model or dataset."""
    params = load_params(ROOT.parent / "params.yaml")
    plain = read_yaml(ROOT.parent / "params.yaml")
    found = build_pipeline(params, plain, kinds=image_kinds(params), used=find_in_use(params))[stage]
    item = next(iter(found.get("foreach", {"": {}}).values()))
    files = set()
    for dep in found.get("do", found)["deps"]:
        for key, value in item.items():
            dep = dep.replace(f"${{item.{key}}}", value)
        if dep.startswith(f"{CODE}/"):
            kind, name = Path(dep).parent.name, Path(dep).stem
            files |= set(_hash_code(kind, name, code_modules()[kind][name]))
    return files


def test_serving_code_is_not_a_dependency_of_an_evaluation() -> None:
    assert not [name for name in hash_sources(["vlp_models.pipeline.stages.evaluate"]) if name.startswith("serving/")]


STAGES = ["prepare", "pretrain", "finetune", "evaluate", "register", "report"]
# Imports other packages once, then loads each stage in a forked process; prints the modules of each.
LOAD_STAGES = """
import importlib, json, multiprocessing, sys
from pathlib import Path

for name in json.loads(sys.argv[3]):
    importlib.import_module(name)

def load(stage):
    module = importlib.import_module(f"vlp_models.pipeline.stages.{stage}")
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params
    params = load_params(sys.argv[1])
    key = next(iter(dict(prepare=params.data, pretrain=params.pretrain).get(stage, params.finetune)))
    try:
        module.run(params, Workspace(Path(sys.argv[2])), key)
    except Exception:  # the workspace is empty
        pass
    return [m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "vlp_models"]

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps({stage: pool.map(load, [stage], 1)[0] for stage in json.loads(sys.argv[4])}))
"""
HEAVY = ["torch", "torchvision", "lightning", "mlflow", "great_expectations", "pandas", "pyarrow.dataset", "duckdb"]


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Return the files that each stage loads from this package, also when it is called in an empty workspace."""
    arguments = [str(ROOT.parent / "params.yaml"), "/nonexistent", json.dumps(HEAVY), json.dumps(STAGES)]
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_STAGES, *arguments], env=env, capture_output=True, text=True, check=True
    )
    files: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return files


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_every_module_that_a_stage_loads_is_declared(loaded: dict[str, list[str]], stage: str) -> None:
    files = {str(Path(file).relative_to(ROOT)) for file in loaded[stage]}
    assert f"pipeline/stages/{stage}.py" in files
    empty = {f"data/views/{name}.py" for name in VIEW_MODULES}  # a view that no dataset fills has a table without rows
    # Sections of params.yaml that contrib has are read with the file; a stage depends on the values that it uses.
    sections = {f"contrib/{folder}/{name}.py" for folder in CONTRIB for name in ("__init__", "params")}
    undeclared = files - declared(stage) - sections - (empty if stage == "prepare" else set())
    assert not undeclared, sorted(undeclared)
