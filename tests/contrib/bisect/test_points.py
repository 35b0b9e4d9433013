"""Points, their differences and a trial's data, in git and DVC projects without any training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ingest_project
import numpy as np
import pytest
import yaml
from cloned_project import commit, run

from vlp_models.common.source_hash import hash_source_text
from vlp_models.contrib.bisect.bisect import open_bisection
from vlp_models.contrib.bisect.changes import Changes, find_changes
from vlp_models.contrib.bisect.decision import value_of
from vlp_models.contrib.bisect.differences import Origin, find_cached
from vlp_models.contrib.bisect.points import Point, read_points, read_scores
from vlp_models.contrib.bisect.trials import TrialRunner
from vlp_models.errors import DataError
from vlp_models.metrics.score import ItemScores, write_items
from vlp_models.params import load_params
from vlp_models.registry.promotion.gate_rule import gate_spec

ROOT = Path(__file__).parents[3]

# Writes what the real stages would: images with their batches, and an evaluation.
PREPARE = """
import pathlib, pyarrow, pyarrow.parquet as parquet
paths = sorted(map(str, pathlib.Path("data/accepted").glob("*/images/*/*")))
rows = [{"image_id": p, "source": "ingested", "split": "train", "sha256": p, "path": p} for p in paths]
pathlib.Path("data/validated").mkdir(parents=True)
parquet.write_table(pyarrow.Table.from_pylist(rows), "data/validated/images.parquet")
"""
EVALUATE = 'import shutil; shutil.copytree("scores", "reports/eval/vqa")'


def write_scores(folder: Path, rate: float) -> None:
    values = (np.arange(100) < 100 * rate).astype(float)
    names = [str(i) for i in range(100)]
    scores = ItemScores(
        dataset="tested",
        split="test",
        metric="accuracy",
        test="t",
        note="",
        statistic="mean",
        items=names,
        groups=names,
        parts_NK=np.column_stack([values, np.ones(100)]),
        slices=[[] for _ in names],
    )
    folder.mkdir(exist_ok=True)
    write_items(folder / "items.parquet", [scores])


def test_a_commit_is_read_as_params_are_and_named_for_good(tmp_path: Path) -> None:
    run(tmp_path, "git", "init", "-q", "-b", "main")
    (tmp_path / "params.yaml").write_text("languages: [en, no]\nfinetune: {vqa: {lr: 1e-4}}\n")
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump({"stages": {"evaluate@vqa": {"cmd": "true"}}}))
    commit(tmp_path, "first")
    run(tmp_path, "git", "tag", "first")
    first, main = read_points(tmp_path, load_params(), ("first", "main"))
    # As DVC reads it, YAML 1.2: `no` is a text, and 1e-4 a number.
    assert first.params == {"languages": ["en", "no"], "finetune": {"vqa": {"lr": 0.0001}}}
    # A branch names another commit tomorrow.
    assert (first.name, main.name) == ("first", main.commit[:10])


def test_the_code_of_what_only_one_point_uses_is_a_change(tmp_path: Path) -> None:
    """A model family that was added, or was there and has changed, is not in the code of the good point's stages."""
    run(tmp_path, "git", "init", "-q", "-b", "main")
    points = []
    for name, text in (("good", "a = 1"), ("bad", "a = 2")):
        package = tmp_path / "vlp_models"
        (package / "cli").mkdir(parents=True, exist_ok=True)
        for source in ("cli/__init__.py", "models/equal.py", "models/changed.py"):
            (package / source).parent.mkdir(exist_ok=True)
            (package / source).write_text(text if "changed" in source else "")
        hashes = {
            source: hash_source_text((package / source).read_bytes(), source)
            for source in ("models/equal.py", "models/changed.py")
        }
        (tmp_path / name).write_text(json.dumps(hashes))
        commit(tmp_path, name)
        dependency = {"path": "data/plan/code/models/family.json", "md5": name}
        stages = {"evaluate@vqa": {"deps": [dependency] if name == "bad" else []}}
        origin = Origin(target="evaluate@vqa", stages=stages, params={}, packages={})
        sha = run(tmp_path, "git", "rev-parse", "HEAD").stdout.strip()
        points.append(Point(name=name, origin=origin, commit=sha))
    changes = find_changes(tmp_path, *points, lambda md5: tmp_path / md5 if md5 else None, "test")
    assert [change.id for change in changes.tried] == ["code models/changed.py"] and not changes.untried


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make two weekly commits: the second has a batch of data more, and fewer steps, which the evaluation reads."""
    root = ingest_project.make_project(tmp_path / "project", dvc=True).root
    monkeypatch.chdir(root)
    raw = yaml.safe_load((root / "params.yaml").read_text())
    raw["finetune"] = {"vqa": {"task": "vqa", "start": "initial/tden", "max_steps": 40}}
    evaluate = {"cmd": "python evaluate.py", "deps": ["data/validated"], "params": ["finetune.vqa"]}
    stages: dict[str, Any] = {
        "validate": {"cmd": "python prepare.py", "deps": ["data/accepted"], "outs": ["data/validated"]},
        "evaluate": {"foreach": ["vqa"], "do": {**evaluate, "outs": ["reports/eval/vqa"]}},
    }
    (root / "prepare.py").write_text(PREPARE)
    (root / "evaluate.py").write_text(EVALUATE)
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    commit(root, "start")
    for name, steps, rate in (("good", 40, 0.8), ("bad", 1, 0.6)):
        raw["finetune"]["vqa"]["max_steps"] = steps
        raw["drift"]["images"] = 10 * steps
        (root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
        workspace = ingest_project.Workspace(root)
        seeds = range(3) if name == "good" else range(10, 14)
        ingest_project.simple_submission(workspace, name, seeds)
        ingest_project.ingest_counts(workspace)
        shutil.rmtree(root / "scores", ignore_errors=True)
        write_scores(root / "scores", rate)
        run(root, "dvc", "repro", "-q")
        commit(root, name)
        run(root, "git", "tag", name)
    return root


def interrupt_after_one() -> Callable[[Path, Path], None]:
    """Return a function that restores one file, and then stops as Ctrl-C does."""
    restored: list[Path] = []

    def restore(source: Path, target: Path) -> None:
        if restored:
            raise KeyboardInterrupt
        restored.append(shutil.copyfile(source, target))

    return restore


def test_the_changes_of_a_week_and_the_data_of_a_trial(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, find = load_params(), find_cached(project)
    good, bad = read_points(project, params, ("good", "bad"))
    changes = find_changes(project, good, bad, find, "test")
    batch = next(change for change in changes.tried if change.kind == "data")
    assert [change.describe() for change in changes.tried] == [
        "params finetune.vqa.max_steps: 40 -> 1",
        f"{batch.id}: added",
    ]
    assert changes.unread == ["drift.images"] and not changes.untried

    # A trial's project has the data of the dvc.lock of the point, to the byte.
    runner = TrialRunner(
        root=project, folder=project / ".work" / "trial", good=good, bad=bad, changes=changes, find=find
    )
    runner.check_data()
    for trial, point in (([], good), ([batch], bad), ([], good)):
        runner.prepare()
        runner._write_data(trial)
        stages = {"read": {"cmd": "true", "deps": ["data/accepted"]}}
        (runner.project / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
        (runner.project / "dvc.lock").unlink(missing_ok=True)
        run(runner.project, "dvc", "repro", "-q")
        lock = yaml.safe_load((runner.project / "dvc.lock").read_text())
        (recorded,) = point.origin.stages["validate"]["deps"]
        assert lock["stages"]["read"]["deps"][0]["md5"] == recorded["md5"], point.name

    # Ctrl-C while a batch is restored: a trial without it does not find a part of it.
    runner._write_data([])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("vlp_models.contrib.bisect.trials.link_or_copy", interrupt_after_one())
        runner._write_data([batch])
    assert (runner.project / batch.name).exists()
    runner._write_data([])
    assert not (runner.project / batch.name).exists()

    # What is outside of the project, or behind a link to it, is never written.
    outside = TrialRunner(**vars(runner) | {"changes": dataclasses.replace(changes, data={"../x": "0"})})
    with pytest.raises(DataError, match=r"\.\./x: outside of the project"):
        outside.check_data()
    (project / "data" / "raw" / "words.txt").write_text("a word")
    (runner.project / "data" / "raw").symlink_to(project / "data" / "raw")
    linked = TrialRunner(**vars(runner) | {"changes": dataclasses.replace(changes, data={"data/raw/words.txt": "0"})})
    linked._write_data([])
    assert (project / "data" / "raw" / "words.txt").read_text() == "a word"

    bisection = open_bisection(project, params, ("good", "bad"), run="", seeds=3, deadline=float("inf"))
    assert bisection.seen == pytest.approx(20.0) and bisection.metric == "accuracy"
    assert bisection.list_changes().candidates == [change.id for change in changes.tried]
    lower = dataclasses.replace(params.promotion.gate("vqa"), direction="lower")
    promotion = dataclasses.replace(params.promotion, tasks={**params.promotion.tasks, "vqa": lower})
    worse = open_bisection(
        project,
        dataclasses.replace(params, promotion=promotion),
        ("bad", "good"),
        run="",
        seeds=3,
        deadline=float("inf"),
    )
    assert worse.seen == pytest.approx(20.0) and worse.metric == "minus accuracy", "lower values are better"

    # What cannot be compared is refused before anything is trained.
    for names, message in (
        (("good", "nothing"), "nothing: neither a commit here nor a usable version"),
        (("good~1", "bad"), r"commit good~1 has no dvc\.lock"),
    ):
        with pytest.raises(DataError, match=message):
            read_points(project, params, names)
    with pytest.raises(DataError, match="bad and bad are both bad"):
        open_bisection(project, params, ("bad", "bad"), run="", seeds=3, deadline=float("inf"))
    with pytest.raises(DataError, match="bad has no evaluation of other; it has: vqa"):
        read_points(project, params, ("bad", "good"), "other")
    (project / f"{batch.name}.dvc").unlink()
    folder = find(batch.after)
    assert folder is not None
    folder.unlink()
    shutil.rmtree(project / batch.name)
    with pytest.raises(DataError, match=r"not in DVC's cache; restore it or `dvc fetch"):
        open_bisection(project, params, ("good", "bad"), run="", seeds=3, deadline=float("inf"))


def make_point(root: Path, name: str, md5: str) -> Point:
    """Commit what is there; return a point that read data/raw/lists with this md5."""
    commit(root, name)
    stages = {"evaluate@vqa": {"deps": [{"path": "data/raw/lists", "md5": md5}]}}
    origin = Origin(target="evaluate@vqa", stages=stages, params={}, packages={})
    return Point(name=name, origin=origin, commit=run(root, "git", "rev-parse", "HEAD").stdout.strip())


@pytest.mark.parametrize("is_folder", [False, True])
def test_raw_data_in_git_alone_is_tried_only_if_its_content_is_there(tmp_path: Path, is_folder: bool) -> None:
    """A folder, or a file with changes that were not committed, would be what is there now on both sides."""
    run(tmp_path, "git", "init", "-q")
    path, points = tmp_path / "data" / "raw" / "lists", []
    for name in ("good", "bad"):
        file = path / "list.txt" if is_folder else path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
        md5 = "0123.dir" if is_folder else hashlib.md5(name.encode()).hexdigest()
        points.append(make_point(tmp_path, name, f"{name}{md5}" if is_folder else md5))
    changes = find_changes(tmp_path, *points, lambda md5: None, "test")
    assert bool(changes.tried) is not is_folder and ("data data/raw/lists" in changes.untried) is is_folder
    if not is_folder:
        path.write_text("edited, then run")
        dirty = make_point(tmp_path, "later", "f" * 32)
        assert "data data/raw/lists" in find_changes(tmp_path, points[0], dirty, lambda md5: None, "test").untried


def make_runner(root: Path) -> TrialRunner:
    """Return the runner of a comparison without changes."""
    point = Point(name="good", origin=Origin(target="evaluate@vqa", stages={}, params={}, packages={}))
    changes = Changes(tried=[], untried={}, unread=[], data={})
    return TrialRunner(root=root, folder=root, good=point, bad=point, changes=changes, find=lambda md5: None)


def test_a_trial_has_its_own_code_first_and_keeps_the_rest_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "plugins-on-the-path")
    runner = make_runner(tmp_path)
    (runner.project / "vlp_models").mkdir(parents=True)
    log = tmp_path / "log.txt"
    with log.open("wb") as stream:
        assert runner._call([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], stream) == 0
    own, *others = log.read_text().split()[-1].split(os.pathsep)
    assert own == str(runner.project) and "plugins-on-the-path" in others


def test_a_run_bundle_is_a_point_with_its_own_scores(tmp_path: Path) -> None:
    bundle = ROOT / "docs" / "results" / "runs" / "scenes-tden-vqa.run.zip"
    params = load_params(ROOT / "params.yaml")
    point, same = read_points(tmp_path, params, (str(bundle), str(bundle)))
    assert (point.name, point.commit) == (str(bundle), "") and point.origin.target in point.origin.stages
    spec = gate_spec(params, "vqa")
    measured = read_scores(point, spec, lambda md5: None)
    records = json.loads(zipfile.ZipFile(bundle).read("scores.json"))
    expected = next(r["value"] for r in records if (r["metric"], r["split"]) == (spec.metric, spec.split))
    assert value_of(measured.evidence) == pytest.approx(expected)
    assert same == point
    with pytest.raises(DataError, match=r"none\.run\.zip: no such file"):
        read_points(tmp_path, params, (str(bundle), "none.run.zip"))
