"""`vlp bisect` on two registered versions of a real project: trainings of seconds, by DVC, in a clone with its code."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloned_project import commit, new_clone, run

CAUSE = "params finetune.vqa.max_steps"


def change_params(project: Path, **sections: dict[str, Any]) -> None:
    file = project / "params.yaml"
    raw = yaml.safe_load(file.read_text())
    for name, values in sections.items():
        raw[name] = {**(raw.get(name) or {}), **values}
    file.write_text(yaml.safe_dump(raw, sort_keys=False))


def register(project: Path, message: str) -> None:
    """Commit, then train and register what is committed."""
    run(project, "vlp", "plan")
    commit(project, message)
    run(project, "vlp", "run")


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_change_that_wrecks_the_score_is_named(tmp_path: Path) -> None:
    project = new_clone(tmp_path / "project")
    run(project, "vlp", "use", "tiny")
    raw = yaml.safe_load((project / "params.yaml").read_text())
    raw["pretrain"], raw["finetune"] = {}, {}
    (project / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    scenes = {
        "generator": "objects",
        "seed": 8,
        "train": 60,
        "val": 4,
        "test": 40,
        "questions_per_image": 4,
        "side": 64,
    }
    change_params(
        project,
        generate={"scenes": scenes},
        features={"source": "grid", "max_regions": 4},
        detector={"source": "none"},
        finetune={"vqa": {"task": "vqa", "start": "initial/tden", "max_steps": 40, "batch_size": 32}},
        evaluate={"splits": ["test"], "blind_baseline": []},
        ingest={"inbox": ""},
    )
    register(project, "good")
    # One change that matters, among a code change and params that do not.
    code = project / "vlp_models" / "tasks" / "vqa.py"
    code.write_text(code.read_text() + "\n\nUNUSED = 1\n")
    raw = yaml.safe_load((project / "params.yaml").read_text())
    raw["finetune"]["vqa"]["max_steps"] = 1
    raw["shards"]["images_per_shard"] = 400
    raw["drift"]["images"] = 100
    (project / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    register(project, "bad")
    versions = ("vlp-vqa/1", "vlp-vqa/2")

    listed = run(project, "vlp", "bisect", *versions, "--list").stdout
    assert "changed   code tasks/vqa.py" in listed and "unread    drift.images" in listed
    lock = (project / "dvc.lock").read_bytes()
    done = run(project, "vlp", "bisect", *versions, "--json")
    result = json.loads(done.stdout)
    assert result["answer"]["causes"] == [[CAUSE]], done.stdout
    assert len(result["trials"]) <= 2 + 2 + 1 + 1
    assert sum(trial["restored"] for trial in result["trials"]) >= 5, "stages that are equal are not run again"
    assert result["command"] == f"vlp bisect vlp-vqa/1 vlp-vqa/2 --try '{CAUSE}'"
    assert result["answer"]["sentence"] in unescape((project / "reports" / "bisect-vqa.html").read_text())
    assert (project / "dvc.lock").read_bytes() == lock, "the project's own results stay"

    # The command that reproduces it, from what is kept; and a version that differs in nothing but its seed.
    again = run(project, "vlp", "bisect", *versions, "--try", CAUSE)
    assert "from an earlier command" in again.stderr and f"{CAUSE} lowered accuracy" in again.stdout
    run(project, "vlp", "use", "--set", "finetune.vqa.seed=2")
    run(project, "vlp", "run")
    seeds = run(project, "vlp", "bisect", "vlp-vqa/2", "vlp-vqa/3").stdout
    assert "answer    Nothing that vlp-vqa/3 read differs from vlp-vqa/2 but seeds" in seeds
