"""Several models in one workspace: registered, smoke-tested, refused, promoted, rolled back, verified."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_project import ANSWERS, SIZES, make_data, make_model

from vlp_models.common.io import read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.errors import CheckpointError
from vlp_models.params import GateParams, GeneratorParams, Params, parse_params, read_yaml
from vlp_models.pipeline.promotion_commands import promote_task, rollback_task
from vlp_models.pipeline.stages import evaluate, register
from vlp_models.registry.client import connect
from vlp_models.registry.mlflow_run import KEY_TAG
from vlp_models.registry.receipts import find_lost_versions, read_registered
from vlp_models.registry.versions import download_bundle, find_run_versions, resolve_version
from vlp_models.serving.predictor import Predictor

ROOT = Path(__file__).parents[2]
TOY = {"side": 8, "patch": 4, "hidden": 16, "heads": 2}
RUNS = ("first", "second", "blind", "finder")


@pytest.fixture(scope="module")
def params(toy: None) -> Params:
    """Two models, one of regions and one of pixels; three runs of VQA (one a control), and one of retrieval.

    The regions are a grid: an image alone gives them.
    """
    raw = read_yaml(ROOT / "params.yaml")
    raw["models"] = {"tden": {"family": "tden", "config": SIZES}, "toy": {"family": "toy", "config": TOY}}
    raw["pretrain"] = {}
    raw["finetune"] = {
        "first": {"task": "vqa", "start": "initial/tden"},
        "second": {"task": "vqa", "start": "initial/toy", "variant": "wide", "seed": 7},
        "blind": {"task": "vqa", "start": "initial/tden", "blank_images": True},
        "finder": {"task": "retrieval", "start": "initial/tden"},
    }
    loaded = parse_params(raw)
    gates = {task: GateParams(floors={"all": 0.0}, beat_baselines=False) for task in ("vqa", "retrieval")}
    generator = GeneratorParams(generator="objects", seed=3, train=60, val=2, test=6, questions_per_image=4, side=64)
    return dataclasses.replace(
        loaded,
        generate={"scenes": generator},
        features=dataclasses.replace(loaded.features, source="grid"),
        shards=dataclasses.replace(loaded.shards, pixels="auto"),
        evaluate=dataclasses.replace(loaded.evaluate, batch_size=8, bootstrap=50),
        promotion=dataclasses.replace(loaded.promotion, resamples=200, min_images=2, tasks=gates),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Path:
    """Data, checkpoints and evaluations, nothing registered yet."""
    workspace = Workspace(tmp_path_factory.mktemp("project"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        shutil.copy(ROOT / "params.yaml", workspace.root)
        workspace.detector.mkdir(parents=True)
        (workspace.detector / "config.json").write_text("{}")
        make_data(params, workspace)
        for seed, run in enumerate(RUNS):
            model = params.model_of(run)
            task = params.finetune[run].task
            make_model(workspace, seed, run, made=params.models[model], name=model, task=task)
            evaluate.run(params, workspace, run)
    return workspace.root


@pytest.fixture
def workspace(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    yield Workspace(tmp_path / "copy")


def picture(workspace: Workspace) -> str:
    return str(next(iter(sorted((workspace.root / "data/raw/scenes/images").glob("*.png")))))


@pytest.mark.slow
def test_every_run_but_the_control_is_registered_and_one_becomes_champion(params: Params, workspace: Workspace) -> None:
    register.run(params, workspace)
    client = connect(params.tracking, workspace.root)
    receipts = read_json(workspace.reports / "registered.json")
    assert sorted(r["run"] for r in receipts["vqa"]) == ["first", "second"] and len(receipts["retrieval"]) == 1
    assert [r["challenger"] for r in receipts["vqa"]] == [True, False]
    versions = find_run_versions(client, "vlp-vqa", RUNS)
    assert list(versions) == ["first", "second"]
    tags = versions["second"].tags
    assert {name: tags[name] for name in ("run", "model", "family", "variant", "seed", "served")} == {
        "run": "second",
        "model": "toy",
        "family": "toy",
        "variant": "wide",
        "seed": "7",
        "served": "yes",
    }
    finder = find_run_versions(client, "vlp-retrieval", RUNS)["finder"]
    assert finder.tags["served"] == "no: the task retrieval is not served"
    aliases = client.get_registered_model("vlp-vqa").aliases
    assert set(aliases) == {"run-first", "run-second", "challenger"}
    assert int(aliases["challenger"]) == receipts["vqa"][0]["version"]

    register.run(params, workspace)
    assert read_json(workspace.reports / "registered.json") == receipts, "registering again makes no second version"
    assert len(client.search_model_versions("name='vlp-vqa'")) == 2

    best = receipts["vqa"][0]
    decision = promote_task(params, workspace, "vqa", by="test")
    assert (decision.action, decision.version, decision.run) == ("promoted", best["version"], best["run"])
    assert {c["run"] for c in decision.candidates} == {"first", "second"}
    for version in versions.values():
        predictor = Predictor(download_bundle(version))
        assert predictor.predict([picture(workspace)], ["how many circles?"])[0]["answer"] in ANSWERS
    assert sorted(path.name for path in download_bundle(versions["second"]).iterdir()) == [
        "README.md",
        "checkpoint",
        "content.json",
    ]
    assert {"checkpoint", "detector", "features.json"} <= {p.name for p in download_bundle(versions["first"]).iterdir()}
    assert promote_task(params, workspace, "retrieval", by="test").action == "promoted", "served or not"

    other = receipts["vqa"][1]["version"]
    client.set_registered_model_alias("vlp-vqa", "champion", str(other))  # by hand
    assert promote_task(params, workspace, "vqa", version=other, by="test").action == "unchanged"
    back = rollback_task(params, workspace, "vqa", by="test")
    assert (back.action, back.version, back.champion) == ("rolled back", best["version"], other)
    predictor = Predictor(download_bundle(resolve_version(client, params.tracking, "vlp-vqa")))
    assert predictor.predict([picture(workspace)], ["how many circles?"])[0]["answer"] in ANSWERS


@pytest.mark.slow
def test_versions_lost_by_the_registry_are_found_and_registered_again(params: Params, workspace: Workspace) -> None:
    register.run(params, workspace)
    names = sorted(f"{r['name']}/{r['version']}" for s in read_registered(workspace.reports).values() for r in s)
    assert find_lost_versions(params.tracking, workspace.root) == []

    other = Workspace(workspace.root.with_name("other"))  # as after the loss of mlflow.db
    shutil.copytree(workspace.root, other.root, ignore=shutil.ignore_patterns("mlflow.db*", "mlartifacts"))
    assert sorted(find_lost_versions(params.tracking, other.root)) == names
    assert not (other.root / "mlflow.db").exists(), "checking creates no database"

    client = connect(params.tracking, workspace.root)
    shutil.rmtree(download_bundle(find_run_versions(client, "vlp-retrieval", RUNS)["finder"]).parents[1])
    assert find_lost_versions(params.tracking, workspace.root) == ["vlp-retrieval/1"]
    client.delete_model_version("vlp-vqa", "1")  # as after mlflow.db was put back to an earlier day
    assert sorted(find_lost_versions(params.tracking, workspace.root)) == ["vlp-retrieval/1", "vlp-vqa/1"]
    register.run(params, workspace)
    assert find_lost_versions(params.tracking, workspace.root) == []
    assert read_registered(workspace.reports)["retrieval"][0]["version"] == 2


def test_model_that_cannot_be_served_is_refused_before_mlflow_is_touched(params: Params, workspace: Workspace) -> None:
    """Its regions come from the grid; params.yaml sets a detector, and data/detector is no detector's checkpoint."""
    wrong = dataclasses.replace(params, features=dataclasses.replace(params.features, source="detector"))
    with pytest.raises(CheckpointError, match=r"register: run `(first|second)` \(model `\w+`, task vqa\) cannot be"):
        register.run(wrong, workspace)
    assert not (workspace.root / "mlflow.db").exists() and not (workspace.reports / "registered.json").exists()
    assert not list((workspace.root / ".work").glob(".bundles*"))


@pytest.mark.slow
def test_model_of_imported_regions_is_registered_as_not_served(params: Params, workspace: Workspace) -> None:
    imported = dataclasses.replace(params, features=dataclasses.replace(params.features, source="npz", path="x"))
    register.run(imported, workspace)
    client = connect(params.tracking, workspace.root)
    version = find_run_versions(client, "vlp-vqa", RUNS)["first"]
    assert version.tags["served"].startswith("no: its regions come from `npz`")


@pytest.mark.slow
def test_champion_that_reads_pixels_is_evaluated_again_if_no_current_model_does(
    params: Params, workspace: Workspace
) -> None:
    register.run(params, workspace)
    client = connect(params.tracking, workspace.root)
    number = int(find_run_versions(client, "vlp-vqa", RUNS)["second"].version)
    promoted = promote_task(params, workspace, "vqa", version=number, by="test")
    assert (promoted.action, promoted.run_model) == ("promoted", "toy")

    generator = dataclasses.replace(params.generate["scenes"], seed=4, test=8)
    later = dataclasses.replace(params, generate={"scenes": generator})
    make_data(later, workspace)
    evaluate.run(later, workspace, "second")
    expected = values(workspace.evaluation("second") / "scores.json")["scenes", "accuracy"]

    one = dataclasses.replace(
        later, models={"tden": params.models["tden"]}, finetune={"first": params.finetune["first"]}
    )
    make_data(one, workspace)
    assert read_json(workspace.shards / "manifest.json")["pixels"] is False
    evaluate.run(one, workspace, "first")
    register.run(one, workspace)
    decision = promote_task(one, workspace, "vqa", by="test")
    assert decision.numbers["champion_reevaluated"], decision.reasons
    assert decision.numbers["champion_value"] == pytest.approx(expected, abs=1e-3)
    assert (decision.champion, decision.champion_run_model, decision.run_model) == (number, "toy", "tden")


def values(scores: Path) -> dict[tuple[str, str], Any]:
    return {(record["dataset"], record["metric"]): record["value"] for record in read_json(scores)}


@pytest.mark.slow
def test_version_has_a_signature_scores_and_a_lineage_that_verifies(
    params: Params, workspace: Workspace, recwarn: pytest.WarningsRecorder
) -> None:
    import mlflow.pyfunc

    client = connect(params.tracking, workspace.root)
    experiment = client.get_experiment_by_name(params.tracking.experiment)
    trained = client.create_run(experiment.experiment_id, tags={KEY_TAG: "0a1b"}).info.run_id
    write_json(workspace.training("finetune/second"), {"mlflow_key": "0a1b"})
    register.run(params, workspace)
    versions = find_run_versions(client, "vlp-vqa", RUNS)
    version = versions["second"]
    assert not [w for w in recwarn if "type hints" in str(w.message)]

    model = mlflow.pyfunc.load_model(f"models:/vlp-vqa/{version.version}")
    (made,) = model.predict(model.input_example)
    assert made["answer"] in ANSWERS
    assert {column.name for column in model.metadata.signature.outputs} == made.keys()

    inputs = client.get_run(version.run_id).inputs.dataset_inputs
    assert {(one.dataset.name, one.tags[0].value) for one in inputs} == {
        ("scenes", "training"),
        ("scenes test", "evaluation"),
        ("scenes val", "evaluation"),
    }
    scores = values(workspace.evaluation("second") / "scores.json")
    assert client.get_run(trained).data.metrics["scenes.test.accuracy"] == scores["scenes", "accuracy"]
    # What MLflow's pages show first: the score and its baseline, as columns and in words; then the test's other scores.
    for run_id in (trained, version.run_id):
        shown = client.get_run(run_id).data
        assert shown.metrics["score"] == shown.metrics["scenes.test.accuracy"]
        assert re.match(r"accuracy [\d.]+.* on scenes test", shown.tags["mlflow.note.content"])
    assert shown.tags["mlflow.note.content"] == version.description.split("\n\n")[1]
    assert "| scenes | val |" not in version.description.partition("| scenes | test |")[0]
    assert "hashes" in version.tags and not {"data_manifest", "dvc_lock", "params"} & version.tags.keys()
    view = json.loads(client.get_experiment(experiment.experiment_id).tags["mlflow.sharedViewState.scores"])
    assert view["columnOrder"][:2] == ["metrics.`score`", "metrics.`baseline`"]
    decision = promote_task(params, workspace, "vqa", by="test")
    judged = client.get_model_version("vlp-vqa", str(decision.version)).description.split("\n\n")
    assert judged[2].startswith(f"Gate: {decision.action}: version {decision.version}")
    assert version.tags["trained_in"] == trained and "trained_in" not in versions["first"].tags

    version_checks = pytest.importorskip("vlp_models.contrib.verify.version")

    def found(number: str) -> dict[str, str]:
        return {
            c.subject: c.state
            for c in version_checks.verify(client, workspace, client.get_model_version("vlp-vqa", number))
        }

    number = str(version.version)
    whole = dict.fromkeys(("bundle", "lineage", "parents", "data", "scores"), "holds") | {"code": "unknown"}
    assert found(number) == whole
    shutil.rmtree(workspace.contents)
    assert found(number) == whole | {"data": "unknown"}
    client.log_text(version.run_id, '{"run": "second"}', "lineage/params.yaml")
    assert found(number)["lineage"] == "differs"
    (download_bundle(version) / "checkpoint" / "vocab.txt").write_text("a\n")
    assert found(number)["bundle"] == "differs"
