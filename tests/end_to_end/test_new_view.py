"""A view of a plugin with its reader, task and metric, by the real commands at the tiny size."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from cloned_project import copy_project, run, run_in_process

pytestmark = [pytest.mark.pipeline, pytest.mark.slow, pytest.mark.timeout(1200)]

VIEW = '''"""Whether an image is light or dark."""

from vlp_models.data.views import TEXT, Column, View

SHADES = ("light", "dark")
VIEW = View(
    name="shades",
    id_column="shade_id",
    columns=(TEXT, Column(name="shade", type="string", required=True, values=SHADES, slices=True)),
)
'''
READER = '''"""The photos of a Karpathy file, by their number: even ones are light."""

import json

from vlp_models.data.formats.base import Tables, fills, image_row, join_id
from vlp_models.data.formats.files import require_directory


@fills("shades")
def read(name, params, base):
    root, tables = require_directory(base, params.root, "set the folder"), Tables()
    for number, record in enumerate(json.loads(next(root.glob("dataset_*.json")).read_text())["images"]):
        image = join_id(name, number)
        path = str(root / "images" / record["filename"])
        tables["images"].append(image_row(image, source=name, split=record["split"], path=path, provenance=str(number)))
        row = {"shade_id": image, "image_id": image, "text": "how light is it", "provenance": str(number)}
        tables["shades"].append(row | {"shade": "dark" if number % 2 else "light"})
    return tables
'''
METRIC = '''"""How often a model answers that an image is dark."""

from vlp_models.metrics.extra import Metric
from vlp_models.metrics.score import mean_score


def score(predictions, samples):
    values = [float(row["color"] == "dark") for row in predictions]
    return mean_score("dark", values, [s.image_id for s in samples], items=[s.sample_id for s in samples])


METRIC = Metric(name="dark", score=score)
'''
USE = (
    "plugins.metrics.dark=plugins.dark:METRIC",
    "evaluate.tasks.shade={metrics: [dark], blind_baseline: true}",
    "plugins.views.shades=plugins.shades:VIEW",
    "plugins.formats.shades_file=plugins.shades_file:read",
    "generate.more={generator: objects, seed: 9, train: 12, val: 4, test: 4, questions_per_image: 1, side: 96}",
    "data.more={format: shades_file, root: data/raw/more}",
    "tokenizer.sources=[scenes]",  # else new words train everything again
    "finetune.tden-shades={task: shade, start: pretrain/tden, max_epochs: 1}",
    "promotion.tasks.shade={metric: dark, beat_baselines: false}",
)


@pytest.fixture(scope="module")
def clone(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project where TDEN is trained, after `vlp run` with a view, a format and a task more."""
    folder = copy_project(built_project, tmp_path_factory.mktemp("new-view") / "project")
    run_in_process(folder, "vlp", "new", "task", "shade")
    task = folder / "plugins" / "shade.py"
    text = task.read_text()
    for before, after in (
        ('"questions"', '"shades"'),
        ("return read_answers(tokenizer)", "return list(SHADES)"),
        ('s["answers"][0]', 's["shade"]'),
        ('sample["answers"][0]', 'sample["shade"]'),
        ('sample["answers"]', 'sample["shade"]'),
        ('s["answers"]', 's["shade"]'),
        ("from vlp_models.common.io", "from plugins.shades import SHADES\nfrom vlp_models.common.io"),
    ):
        assert before in text, before
        text = text.replace(before, after)
    task.write_text(text)
    (folder / "plugins" / "shades.py").write_text(VIEW)
    (folder / "plugins" / "shades_file.py").write_text(READER)
    (folder / "plugins" / "dark.py").write_text(METRIC)
    run_in_process(folder, "vlp", "use", *(part for change in USE for part in ("--set", change)))
    (folder / "run.txt").write_text(run(folder, "vlp", "run").stdout)
    return folder


def stale(clone: Path) -> set[str]:
    """Return the stages that changed code makes stale; `plan` has listed it."""
    run_in_process(clone, "vlp", "stage", "plan")
    return set(json.loads(run(clone, "dvc", "status", "--json").stdout)) - {"plan"}


def test_rows_of_the_view_reach_training_scores_and_slices(clone: Path) -> None:
    counts = json.loads((clone / "data" / "shards" / "manifest.json").read_text())["counts"]
    assert {split: found["shades"] for split, found in counts.items()} == {"train": 12, "val": 4, "test": 4}
    scores = json.loads((clone / "reports" / "eval" / "tden-shades" / "scores.json").read_text())
    assert {(s["metric"], s["split"], s["n"]) for s in scores} >= {("accuracy", "test", 4), ("accuracy", "val", 4)}
    import pyarrow.parquet as pq

    slices = pq.read_table(clone / "reports" / "eval" / "tden-shades" / "items.parquet")["slices"].to_pylist()
    assert {"shade=light", "shade=dark"} <= {name for own in slices for name in own}


def test_a_metric_of_a_plugin_is_reported_registered_and_decided_by(clone: Path) -> None:
    scores = json.loads((clone / "reports" / "eval" / "tden-shades" / "scores.json").read_text())
    (dark,) = (s for s in scores if (s["metric"], s["split"]) == ("dark", "test"))
    assert dark["extra"] and dark["n"] == 4 and set(dark["baselines"]) == {"blind baseline"}
    others = json.loads((clone / "reports" / "eval" / "tden-vqa" / "scores.json").read_text())
    assert "dark" not in {s["metric"] for s in others} and not any("extra" in s for s in others)
    assert "<td>dark</td>" in (clone / "reports" / "index.html").read_text().replace('<td data-label="metric">', "<td>")
    headlines = json.loads((clone / "reports" / "metrics.json").read_text())["evaluate"]
    assert all("dark" in found for found in headlines["tden-shades"].values())
    with contextlib.closing(sqlite3.connect(clone / "mlflow.db")) as database:
        logged = {name for (name,) in database.execute("select key from metrics")}
    assert any("dark" in name for name in logged), "the version's run has it"
    run(clone, "vlp", "promote", "shade", check=False)  # eight images decide nothing, but by this metric
    decision = json.loads((clone / "reports" / "promotion" / "shade.json").read_text())
    assert decision["numbers"]["metric"] == "dark" and decision["numbers"]["value"] == dark["value"]


def test_existing_models_are_not_trained_again(clone: Path) -> None:
    shown = (clone / "run.txt").read_text()
    assert "Running stage 'finetune@tden-shades'" in shown
    for trained in ("pretrain@tden", "finetune@tden-vqa", "finetune@tden-captioning"):
        assert f"Running stage '{trained}'" not in shown


def test_the_registered_version_has_the_view(clone: Path) -> None:
    (content,) = (
        found
        for path in clone.glob("mlartifacts/**/bundle/content.json")
        if "shade" in (found := json.loads(path.read_text())).get("plugins", {}).get("tasks", {})
    )
    assert content["plugins"]["views"] == {"shades": "plugins.shades:VIEW"}
    assert "plugins:shades.py" in content["code"] and "data/views/choices.py" not in content["code"]
    image = str(next((clone / "data" / "raw" / "more" / "images").glob("*.png")))
    done = run(clone, "vlp", "predict", "shade", image, "how light is it", "--model", "vlp-shade/1")
    assert "light" in done.stdout or "dark" in done.stdout


def test_a_change_of_one_view_makes_only_its_users_stale(clone: Path) -> None:
    assert stale(clone) == set()
    views = clone / "vlp_models" / "data" / "views"
    touched: dict[Path, set[str]] = {
        views / "choices.py": set(),
        clone / "plugins" / "shades.py": {"more", "tden-shades"},
    }
    touched[views / "questions.py"] = {"scenes", "tden-vqa"}
    touched[clone / "plugins" / "dark.py"] = {"dark"}
    common = {"validate", "tokenizer", "shards", "register", "report"}
    for file, users in touched.items():
        before = file.read_text()
        file.write_text(before + "\nTOUCHED = True\n")
        try:
            run(clone, "vlp", "stage", "plan")
            found = set(json.loads(run(clone, "dvc", "status", "--json").stdout)) - {"plan"}
        finally:
            file.write_text(before)
        if users == {"dark"}:
            assert found == {"evaluate@tden-shades"}  # the others follow if the scores change
            continue
        expected = {f"prepare@{user}" for user in users & {"scenes", "more"}}
        expected |= {f"{stage}@{user}" for user in users - {"scenes", "more"} for stage in ("finetune", "evaluate")}
        assert found == expected | (common if users else set()), file.name
    run(clone, "vlp", "stage", "plan")


def test_a_new_view_that_nothing_uses_makes_nothing_stale(clone: Path) -> None:
    (clone / "plugins" / "spare.py").write_text(VIEW.replace("shades", "spare").replace("shade_id", "spare_id"))
    run_in_process(clone, "vlp", "use", "--set", "plugins.views.spare=plugins.spare:VIEW")
    assert stale(clone) == set()
