"""training_stats and vlp drift: new batches are compared with statistics of the training data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ingest_project import ROOT, encoded, make_project, make_submission, params_of, picture

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.drift import new_pairs, training_stats
from vlp_models.contrib.ingest import ingest
from vlp_models.errors import ParamsError
from vlp_models.params import load_params
from vlp_models.pipeline.stages import features, prepare, report, tokenizer, validate

COLORS = ("red", "green", "blue")


def ingest_images(
    workspace: Workspace, name: str, seeds: range, caption: str = "a {} picture of a thing", dark: int = 1
) -> None:
    rows = [(f"{seed}.jpg", caption.format(COLORS[seed % 3]), "") for seed in seeds]
    pictures = {f"{seed}.jpg": picture(seed).point(lambda value: value // dark) for seed in seeds}
    make_submission(workspace, name, rows, {file: encoded(image) for file, image in pictures.items()})
    ingest.run(params_of(workspace), workspace)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Ingest 60 pairs and run the stages that training needs."""
    workspace = make_project(tmp_path_factory.mktemp("drift") / "p")
    ingest_images(workspace, "first", range(60))
    params = params_of(workspace)
    for name in params.data:
        prepare.run(params, workspace, name)
    for stage in (validate, features, tokenizer, training_stats):
        stage.run(params, workspace)
    return workspace


def test_training_stats_are_small_complete_and_repeatable(trained: Workspace) -> None:
    path = training_stats.training_stats_path(trained)
    found = json.loads(path.read_text())
    assert found["captions"] == 64 and found["images"] == 64, "of the train split: 60 and the 4 of `tested`"
    assert len(found["batches"]) == 1
    assert len(found["embedding"]["points"]) == 64 and found["embedding"]["detector_id"] == "grid-4-8"
    assert path.stat().st_size < 200_000
    before = hash_path(path)
    training_stats.run(params_of(trained), trained)
    assert hash_path(path) == before


@pytest.mark.slow
def test_new_batches_are_compared_and_a_shift_stops_the_gate(trained: Workspace) -> None:
    nothing = new_pairs.run(params_of(trained), trained)
    assert (nothing["drifted"], nothing["measures"]) == (False, []), "all batches were trained on"

    ingest_images(trained, "alike", range(100, 160))
    alike = new_pairs.run(params_of(trained), trained)
    assert [m["name"] for m in alike["measures"]] == [
        "length_psi",
        "resolution_psi",
        "aspect_psi",
        "vocabulary_js",
        "unknown_words",
        "embedding_mmd_p",
    ]
    assert not alike["drifted"], alike["measures"]

    ingest_images(
        trained, "shifted", range(200, 320), "{} gleams zeppelin overhead without any precedent whatsoever", dark=4
    )
    raw = yaml.safe_load((trained.root / "params.yaml").read_text())
    raw["drift"]["gate"] = True
    (trained.root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    command = [sys.executable, "-m", "vlp_models.cli.main", "drift"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=trained.root, env=env, capture_output=True, text=True)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "stopped by drift.gate" in done.stdout
    written = json.loads((trained.reports / "drift.json").read_text())
    assert written["gate"] and written["drifted"] and written["captions"] == 180
    flagged = {measure["name"] for measure in written["measures"] if measure["drifted"]}
    assert flagged >= {"vocabulary_js", "unknown_words", "length_psi", "embedding_mmd_p"}
    assert not flagged & {"resolution_psi", "aspect_psi"}

    page = report.render(load_params(ROOT / "params.yaml"), trained, [])
    assert "Drift of new data" in page and "embedding_mmd_p" in page


def test_before_the_first_training_there_is_nothing_to_compare(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    ingest_images(workspace, "first", range(3))
    found = new_pairs.run(params_of(workspace), workspace)
    assert (found["drifted"], found["measures"]) == (False, [])
    assert "dvc repro training_stats" in found["notes"][0]


def test_an_unknown_run_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["drift"]["run"] = "finetune/tden-vqa"
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ParamsError, match=r"drift.run: finetune/tden-vqa`: no such run.*`?tden-vqa"):
        load_params(tmp_path / "params.yaml").statistics_run()
