"""The line of a model card that compares a version with the champion of its task."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from toy_registry import QUESTIONS, TRACKING, ToyRegistry, answers, toy_items

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bisect.card import SINCE, SLICES, card_fact, summarize
from vlp_models.contrib.bisect.differences import Difference
from vlp_models.metrics.score import write_items
from vlp_models.params import Params, load_params
from vlp_models.registry.client import model_name
from vlp_models.registry.evaluations import ITEMS, get_run_id, log_lineage
from vlp_models.registry.versions import CHAMPION

RUN, TASK = "tden-vqa", "vqa"


def write_project(root: Path, epochs: int) -> dict[str, str]:
    """Write a project whose evaluation has read `max_epochs`; return its files, as they are kept with a version."""
    stages = {f"evaluate@{RUN}": {"params": {"params.yaml": {"finetune.tden-vqa.max_epochs": epochs}}}}
    files = {"dvc.lock": yaml.safe_dump({"stages": stages}), "params.yaml": yaml.safe_dump({"seed": 1})}
    for name, text in files.items():
        (root / name).write_text(text)
    return files


def write_scores(root: Path) -> None:
    """Write scores that answer every "how many" wrong, and the rest as the champion."""
    values = [0.0 if number % QUESTIONS == QUESTIONS - 1 else value for number, value in enumerate(answers(0.5))]
    folder = Workspace(root).evaluation(RUN)
    folder.mkdir(parents=True)
    write_items(folder / ITEMS, [toy_items(values)])


@pytest.fixture
def params() -> Params:
    return dataclasses.replace(load_params(), tracking=TRACKING)


def test_a_card_names_what_differs_from_the_champion(tmp_path: Path, params: Params) -> None:
    registry = ToyRegistry(tmp_path, model_name(TRACKING, TASK))
    version = registry.add(answers(0.5))
    files = write_project(tmp_path, epochs=2)
    write_scores(tmp_path)
    checkpoint = Workspace(tmp_path).checkpoint(f"finetune/{RUN}")
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_text("weights")
    assert card_fact(params, tmp_path, RUN) == {}  # no champion

    registry.client.set_registered_model_alias(registry.model, CHAMPION, str(version))
    line = card_fact(params, tmp_path, RUN)[f"since the champion (version {version})"]
    assert line == f"unknown: {registry.model} version {version} has no lineage with a dvc.lock"

    run_id = get_run_id(registry.client.get_model_version(registry.model, str(version)))
    log_lineage(registry.client, run_id, {"run": RUN}, files)
    assert card_fact(params, tmp_path, RUN)[f"{SINCE} (version {version})"] == "nothing that the run reads"
    write_project(tmp_path, epochs=3)
    facts = card_fact(params, tmp_path, RUN)
    assert facts[f"{SINCE} (version {version})"] == "finetune.tden-vqa.max_epochs: 2 -> 3"
    slices = facts[f"{SLICES} (version {version})"]
    assert slices.startswith("worse: question_type=how many -") and slices.endswith("; 1 undecided")
    # The champion's own checkpoint is not compared with itself.
    registry.client.set_model_version_tag(registry.model, str(version), "weights", f"{hash_path(checkpoint)} regions")
    assert card_fact(params, tmp_path, RUN) == {}


def test_many_changes_are_counted_and_unread_ones_left_out() -> None:
    def change(kind: str, name: str, *stages: str) -> Difference:
        return Difference(kind=kind, name=name, before="1", after="2", stages=stages)

    differences = [change("code", f"models/{n}.py", "finetune") for n in range(4)]
    differences += [change("params", "drift.images"), change("data", "images of ingested, train", "validate")]
    assert summarize(differences) == "images of ingested, train: 1 -> 2; 4 code files"
