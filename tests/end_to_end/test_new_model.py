"""A new model is a folder and a name in params.yaml: the section of CONTRIBUTING.md executed in a clone.

The toy model reads pixels, TDEN reads regions; both are pretrained, fine-tuned, evaluated, registered, served and
promoted by the real commands, at the tiny size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloned_project import copy_project, follow_section, run, run_in_process

from vlp_models.metrics.score import STATISTICS, read_items

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.timeout(1200)]
RUNS = {"tden-retrieval": "tden", "toy-retrieval": "toy", "tden-vqa": "tden", "toy-vqa": "toy"}


@pytest.fixture(scope="module")
def clone(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project where TDEN is trained, after `vlp use`, `vlp run` and `vlp promote vqa` with the new model."""
    folder = copy_project(built_project, tmp_path_factory.mktemp("new-model") / "project")
    run_in_process(folder, "vlp", "use", "--set", "finetune.tden-captioning=null")
    follow_section(folder, "A new model")
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_model_folder_is_short(clone: Path) -> None:
    files = sorted((clone / "plugins" / "toy").glob("*.py"))
    assert [file.name for file in files] == ["__init__.py", "config.py", "info_nce.py", "model.py"]
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert sum(not line.lstrip().startswith("#") for line in lines) <= 275, "besides its comments"


def test_both_models_are_evaluated_on_the_same_test_set(clone: Path) -> None:
    tests: dict[str, dict[str, str]] = {name: {} for name in RUNS}
    for name in RUNS:
        for items in read_items(clone / "reports" / "eval" / name / "items.parquet", STATISTICS):
            tests[name][f"{items.dataset} {items.split} {items.metric}"] = items.test
    assert tests["toy-vqa"] == tests["tden-vqa"] and tests["toy-vqa"]
    assert tests["toy-retrieval"] == tests["tden-retrieval"] and tests["toy-retrieval"]


def test_the_report_shows_both_models_and_the_blind_baseline(clone: Path) -> None:
    records = [record for record in read(clone / "reports" / "summary.json") if record["run"] in RUNS]
    assert {record["run"]: record["model"] for record in records} == RUNS
    (accuracy,) = (r for r in records if (r["run"], r["metric"], r["split"]) == ("toy-vqa", "accuracy", "test"))
    assert accuracy["baselines"]["blind baseline"] is not None
    rows = [json.loads(line) for line in (clone / "reports/eval/toy-vqa/predictions-test.jsonl").open()]
    assert all({"answer", "answer_blind"} <= row.keys() for row in rows)
    page = (clone / "reports" / "index.html").read_text()
    assert all(f'<td data-label="model">{model}</td>' in page for model in RUNS.values())
    for name, model in RUNS.items():
        cost = read(clone / "reports" / "training" / "finetune" / f"{name}.json")
        assert cost["model"] == cost["family"] == model and cost["seconds"] > 0


def test_both_are_versions_of_one_registered_model_and_the_gate_chooses(clone: Path) -> None:
    found = {one["run"]: one for one in read(clone / "reports" / "registered.json")["vqa"]}
    assert {run: one["model"] for run, one in found.items()} == {"toy-vqa": "toy", "tden-vqa": "tden"}
    assert {one["name"] for one in found.values()} == {"vlp-vqa"}
    assert {one["version"] for one in found.values()} == {1, 2}
    decision = read(clone / "reports" / "promotion" / "vqa.json")
    assert decision["action"] == "promoted"
    values = {one["run_model"]: one["value"] for one in decision["candidates"]}
    assert set(values) == {"toy", "tden"} and values[decision["run_model"]] == max(values.values())
    parents = {}
    for name, one in found.items():
        lineage = json.loads(run(clone, "vlp", "lineage", f"vlp-vqa/{one['version']}", "--json").stdout)
        assert (lineage["model"], lineage["family"], lineage["variant"]) == (one["model"], one["family"], name)
        parents[one["model"]] = [parent["role"] for parent in lineage["parents"]]
    assert parents["toy"] == ["starts from", "starts from", "tokenizer"]
    assert parents["tden"] == ["starts from", "starts from", "detector", "tokenizer"]


def test_a_model_that_reads_pixels_is_served_without_a_detector(clone: Path) -> None:
    versions = {one["run"]: one["version"] for one in read(clone / "reports" / "registered.json")["vqa"]}
    bundles = {Path(path).parent.parent for path in clone.glob("mlartifacts/**/bundle/checkpoint/config.json")}
    parts, holds = {"checkpoint", "detector", "features.json"}, {}
    for bundle in bundles:
        config = read(bundle / "checkpoint" / "config.json")
        if config["task"] == "vqa":
            holds[config["name"]] = {path.name for path in bundle.iterdir()} & parts
    assert holds == {"toy": {"checkpoint"}, "tden": parts}
    image = str(next((clone / "data" / "raw" / "scenes" / "images").glob("*.png")))
    model = f"vlp-vqa/{versions['toy-vqa']}"
    answers = run(clone, "vlp", "answer", image, "how many circles are there?", "--model", model).stdout.splitlines()
    assert len(answers) >= 2 and "%" in answers[1]


def test_evaluate_alias_reproduces_the_champions_score(clone: Path) -> None:
    champion = read(clone / "reports" / "promotion" / "vqa.json")
    run(clone, "vlp", "evaluate-alias", "vqa", "champion")
    files = (clone / "reports" / "aliases" / "vqa-champion", clone / "reports" / "eval" / champion["run"])
    now, then = ({one.split: one.test for one in read_items(d / "items.parquet", STATISTICS)} for d in files)
    assert now == then and set(now) == {"val", "test"}
    scores = read(clone / "reports" / "aliases" / "vqa-champion" / "scores.json")
    assert {one["metric"]: one["value"] for one in scores}["accuracy"] == champion["numbers"]["value"]


def test_a_code_change_makes_only_its_own_runs_stale(clone: Path) -> None:
    """Nor does another plugin make any of them stale."""
    assert read_status(clone) == {}
    model, params = clone / "plugins" / "toy" / "model.py", clone / "params.yaml"
    before = {file: file.read_text() for file in (model, params)}
    try:
        model.write_text(before[model] + "\nTOUCHED = True\n")
        run(clone, "vlp", "use", "--set", "plugins.families.more=plugins.toy.model:Toy")
        run(clone, "vlp", "stage", "plan")
        stale = set(read_status(clone)) - {"plan", "register", "report"}
        assert stale == {
            f"{stage}@{name}"
            for stage, names in (
                ("initial", ["toy"]),
                ("pretrain", ["toy"]),
                ("finetune", ["toy-retrieval", "toy-vqa"]),
                ("evaluate", ["toy-retrieval", "toy-vqa"]),
            )
            for name in names
        }
    finally:
        for file, text in before.items():
            file.write_text(text)
        run(clone, "vlp", "stage", "plan")


def read_status(clone: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(clone, "dvc", "status", "--json").stdout)
    return found


def test_without_region_models_there_is_no_detector_stage(clone: Path) -> None:
    gone = ("models.tden", "pretrain.tden", "finetune.tden-retrieval", "finetune.tden-vqa")
    run(clone, "vlp", "use", *(part for name in gone for part in ("--set", f"{name}=null")))
    stages = yaml.safe_load((clone / "dvc.yaml").read_text())["stages"]
    assert not {"detector", "features"} & set(stages)
    deps = [dep for stage in stages.values() for dep in stage.get("do", stage).get("deps", [])]
    assert not [dep for dep in deps if dep.startswith(("data/detector", "data/features", "reports/detector"))]
    run(clone, "vlp", "run", "training_stats")
    assert read(clone / "data" / "training_stats.json")["embedding"] == {"detector_id": "", "points": [], "seed": 1}
