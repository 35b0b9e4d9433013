"""A preset added to a trained workspace: only new runs are trained, although the shards are packed again.

VLMo adds what a workspace with regions lacks: pixels, a text-only dataset, and one of hypotheses. With the real
commands, at the tiny size.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloned_project import copy_project, run, run_in_process

from vlp_models.common.io import hash_path

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.timeout(1200)]
WITH_VLMO = ("vlp", "use", "vlmo", "--set", "models.vlmo.vision_warmup.steps=2")
TRAINED = ("initial@tden", "pretrain@tden", "finetune@tden-vqa")


@pytest.fixture(scope="module")
def clone(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Add VLMo's preset to a project where TDEN is trained, and prepare VLMo's data."""
    folder = copy_project(built_project, tmp_path_factory.mktemp("on-top") / "project")
    run_in_process(folder, "vlp", "use", "--set", "finetune.tden-captioning=null")
    for name in ("params.yaml", "dvc.yaml", "dvc.lock"):
        (folder / f"before-{name}").write_bytes((folder / name).read_bytes())
    manifest = json.loads((folder / "data" / "shards" / "manifest.json").read_text())
    assert manifest["pixels"] is False and manifest["sources"] == ["scenes"]
    run_in_process(folder, *WITH_VLMO)
    run(folder, "dvc", "repro", "initial@vlmo")
    return folder


def stale(clone: Path) -> set[str]:
    found: dict[str, Any] = json.loads(run(clone, "dvc", "status", "--json").stdout)
    return set(found)


def key_of(line: str) -> str:
    """`> vlp stage pretrain tden` -> `pretrain@tden`."""
    return "@".join(line.split()[3:5])


def test_shards_change_and_existing_runs_stay_valid(clone: Path) -> None:
    manifest = json.loads((clone / "data" / "shards" / "manifest.json").read_text())
    assert manifest["pixels"] is True and manifest["sources"] == ["scenes", "scenes_ve", "sentences"]
    todo = stale(clone)
    assert not todo & set(TRAINED)
    assert {"pretrain@vlmo-images", "pretrain@vlmo-texts", "finetune@vlmo-vqa"} <= todo
    dry = run(clone, "dvc", "repro", "--dry", "finetune@tden-vqa").stdout
    assert "Running stage" not in dry


def test_vision_warmup_of_the_new_model_uses_the_existing_boxes(clone: Path) -> None:
    config = json.loads((clone / "checkpoints" / "initial" / "vlmo" / "config.json").read_text())
    assert {"red", "circle"} < set(config["provenance"]["vision_warmup"]["words"])
    deps = yaml.safe_load((clone / "dvc.lock").read_text())["stages"]["initial@vlmo"]["deps"]
    assert "data/validated/boxed.parquet" in [dep["path"] for dep in deps]


def test_going_back_trains_nothing(clone: Path) -> None:
    checkpoint = clone / "checkpoints" / "finetune" / "tden-vqa"
    before = hash_path(checkpoint)
    for name in ("params.yaml", "dvc.yaml", "dvc.lock"):
        (clone / name).write_bytes((clone / f"before-{name}").read_bytes())
    done = run(clone, "dvc", "repro", "finetune@tden-vqa").stdout
    assert not [line for line in done.splitlines() if line.startswith("> vlp stage") and key_of(line) in TRAINED]
    assert hash_path(checkpoint) == before and not stale(clone) & set(TRAINED)
    assert json.loads((clone / "data" / "shards" / "manifest.json").read_text())["pixels"] is False


def test_training_on_repacked_shards_is_bitwise_equal(clone: Path) -> None:
    """A forced training reads the shards with pixels and gives the same weights, bit by bit."""
    weights = clone / "checkpoints" / "pretrain" / "tden" / "model.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(clone / ".work" / "pretrain-tden")  # or the result that is kept there is restored
    run_in_process(clone, *WITH_VLMO)
    run(clone, "dvc", "repro", "initial@vlmo")
    assert json.loads((clone / "data" / "shards" / "manifest.json").read_text())["pixels"] is True
    done = run(clone, "dvc", "repro", "--force", "--single-item", "--no-run-cache", "pretrain@tden").stdout
    assert "> vlp stage pretrain tden" in done
    assert weights.read_bytes() == before
