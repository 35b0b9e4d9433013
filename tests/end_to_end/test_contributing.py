"""CONTRIBUTING.md executed block by block: a task, a generator and a dataset. A model: test_new_model.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cloned_project import follow_section, new_clone, run, run_in_process

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = new_clone(tmp_path_factory.mktemp("contributing") / "project")
    run_in_process(folder, "vlp", "use", "tiny")
    return folder


def test_a_task_is_a_file_and_a_name(clone: Path) -> None:
    """Its stages are in dvc.yaml; tests/contrib/plugin_kit/test_a_new_task.py runs them."""
    follow_section(clone, "A new task")
    text = (clone / "dvc.yaml").read_text()
    assert text.count("task: guess_color") == 2  # finetune, evaluate
    refused = run(clone, "vlp", "use", "--set", "finetune.x={task: guess_colr, start: pretrain/tden}", check=False)
    assert refused.returncode == 2 and "did you mean `guess_color`" in refused.stderr


def test_a_generator_and_a_dataset_are_a_file_and_a_name_each(clone: Path) -> None:
    follow_section(clone, "A new generator")
    follow_section(clone, "A new dataset")
    manifest = json.loads((clone / "data" / "validated" / "manifest.json").read_text())
    assert manifest["counts"]["images"] == 40 + 10 and manifest["counts"]["captions"] == 200 + 10
    status = json.loads(run(clone, "dvc", "status", "--json", "validate").stdout)
    assert status == {}, "both depend on their code"


def test_unknown_names_are_errors_before_anything_runs(clone: Path) -> None:
    for key, name in (("generate.scenes.generator", "objects"), ("data.scenes.format", "coco")):
        done = run(clone, "vlp", "use", "--set", f"{key}={name}x", check=False)
        assert done.returncode == 2 and f"did you mean `{name}`" in done.stderr, done.stderr
