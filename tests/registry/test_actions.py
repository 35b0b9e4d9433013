"""From registration to promotion and lineage through the real stages, on tiny scenes and untrained models."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_project import SIZES, make_data, make_model

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.checkpoint import read_config
from vlp_models.params import GateParams, GeneratorParams, ModelParams, Params, load_params, to_plain
from vlp_models.pipeline.promotion_commands import promote_task
from vlp_models.pipeline.reevaluate import evaluate_alias
from vlp_models.pipeline.stages import evaluate, features, register, shards
from vlp_models.registry.client import connect
from vlp_models.registry.versions import resolve_version

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def params() -> Params:
    """VQA alone, ground truth as regions; a gate with a floor any model meets."""
    loaded = load_params(ROOT / "params.yaml")
    gate = GateParams(metric="accuracy", floors={"all": 0.0}, beat_baselines=False)
    generator = GeneratorParams(generator="objects", seed=3, train=60, val=2, test=6, questions_per_image=4, side=64)
    return dataclasses.replace(
        loaded,
        generate={"scenes": generator},
        features=dataclasses.replace(loaded.features, source="boxes"),
        models={"tden": ModelParams(family="tden", config=SIZES)},
        finetune={"vqa": loaded.finetune["tden-vqa"]},
        evaluate=dataclasses.replace(loaded.evaluate, batch_size=8, bootstrap=50),
        promotion=dataclasses.replace(loaded.promotion, resamples=200, min_images=2, tasks={"vqa": gate}),
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Any:
    """Version 1 of vlp-vqa is champion."""
    workspace = Workspace(tmp_path_factory.mktemp("project"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "")
        patch.delenv("MLFLOW_TRACKING_URI")
        patch.setenv("MLFLOW_REGISTRY_URI", "")  # MLflow sets it for its child processes: not for those of other tests
        patch.chdir(workspace.root)
        shutil.copy(ROOT / "params.yaml", workspace.root)
        (workspace.root / "dvc.lock").write_text("stages: {shards: {outs: [{path: data/shards, md5: abc.dir}]}}\n")
        workspace.detector.mkdir(parents=True)
        (workspace.detector / "config.json").write_text("{}")
        make_data(params, workspace)
        make_model(workspace, seed=0)
        evaluate.run(params, workspace, "vqa")
        register.run(params, workspace)
        decision = promote_task(params, workspace, "vqa", by="test")
        assert (decision.action, decision.version) == ("promoted", 1), decision.reasons
        yield workspace


def accuracy(workspace: Workspace) -> float:
    records = read_json(workspace.evaluation("vqa") / "scores.json")
    return float(next(r["value"] for r in records if (r["metric"], r["split"]) == ("accuracy", "test")))


def test_alias_is_scored_like_its_run(params: Params, workspace: Workspace) -> None:
    target = evaluate_alias(params, workspace, "vqa", "champion")
    assert target == workspace.reports / "aliases" / "vqa-champion"
    scored, was = (
        {(s["metric"], s["split"]): s["value"] for s in read_json(folder / "scores.json")}
        for folder in (target, workspace.evaluation("vqa"))
    )
    assert scored == was
    with pytest.raises(DataError, match="vlp-vqa: no version has the alias `previous`"):
        evaluate_alias(params, workspace, "vqa", "previous")


def test_lineage_needs_only_the_registry(
    workspace: Workspace, params: Params, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_lineage = pytest.importorskip("vlp_models.contrib.lineage.commands").print_lineage
    elsewhere = Workspace(tmp_path)  # a machine that has only access to MLflow
    uri = f"sqlite:///{workspace.root / 'mlflow.db'}"
    tracking = dataclasses.replace(params.tracking, uri=uri)
    there = dataclasses.replace(params, tracking=tracking)
    print_lineage(there, elsewhere, "vlp-vqa@champion")
    short = capsys.readouterr().out.splitlines()
    assert short[1].startswith("metric ") and len(short) < 25 and f"sha256 {'2' * 12}" in "\n".join(short)
    assert not any("dvc md5" in line for line in short)
    print_lineage(there, elsewhere, "vlp-vqa@champion", hashes=True)
    output = capsys.readouterr().out
    for words in (
        "vlp-vqa version 1: vqa, run vqa",
        "git commit   ",
        f"{hash_path(workspace.root / 'dvc.lock')}  dvc.lock",
        "abc.dir  data/shards",
        f"{hash_path(workspace.root / 'params.yaml')}  params.yaml",
        "captions: empty text 1",
        "validation   passed",
        f"starts from checkpoints/pretrain/tden  sha256 {'1' * 64}",
        "detector data/detector  boxes",
        f"tokenizer data/tokenizer  sha256 {'2' * 64}",
        f"scenes test accuracy {accuracy(workspace):.2f}",
        "dvc repro finetune@vqa",
    ):
        assert words in output, output
    print_lineage(there, elsewhere, "vqa/1", file="params.yaml")
    assert capsys.readouterr().out == (workspace.root / "params.yaml").read_text()
    print_lineage(there, elsewhere, "vqa", as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert record["params"] == to_plain(params) and record["metrics"] and record["data"]["shards"]["counts"]


def test_champion_is_evaluated_again_on_new_test_data_from_its_own_bundle(workspace: Workspace, params: Params) -> None:
    """If the shards hold its features, they are read; otherwise its own features are extracted."""
    champion = workspace.root / "kept"
    shutil.copytree(workspace.checkpoint("finetune/vqa"), champion)
    classes = list(read_config(champion).classes)
    for seed, regions in ((4, params.features.max_regions), (5, 4)):
        generator = dataclasses.replace(params.generate["scenes"], seed=seed, test=8)
        new = dataclasses.replace(params, generate={"scenes": generator})
        make_data(new, workspace)
        assert read_json(workspace.shards / "manifest.json")["classes"] == classes, "choose another seed"
        shutil.rmtree(workspace.checkpoint("finetune/vqa"))
        shutil.copytree(champion, workspace.checkpoint("finetune/vqa"))
        evaluate.run(new, workspace, "vqa")
        expected = accuracy(workspace)  # of the champion, with its own features

        if regions != params.features.max_regions:
            new = dataclasses.replace(new, features=dataclasses.replace(new.features, max_regions=regions))
            features.run(new, workspace)
            shards.run(new, workspace)
        make_model(workspace, seed=seed)
        evaluate.run(new, workspace, "vqa")
        register.run(new, workspace)
        decision = promote_task(new, workspace, "vqa", by="test")
        assert decision.numbers["champion_reevaluated"], decision.reasons
        assert decision.numbers["champion_value"] == pytest.approx(expected, abs=1e-3)
        assert decision.numbers["value"] == pytest.approx(accuracy(workspace), abs=1e-3)
        assert not list((workspace.root / ".work").glob("reevaluate-*"))
        again = promote_task(new, workspace, "vqa", by="test")
        assert again.action == "unchanged" or not again.numbers["champion_reevaluated"]
        assert read_json(workspace.reports / "promotion" / "vqa.json") == again.to_plain()
        if decision.action == "promoted":
            shutil.rmtree(champion)
            shutil.copytree(workspace.checkpoint("finetune/vqa"), champion)


def test_registering_the_same_weights_again_adds_new_scores(workspace: Workspace, params: Params) -> None:
    client = connect(params.tracking, workspace.root)
    make_model(workspace, seed=50)
    found = []

    def scored_on(*splits: str) -> Params:
        settings = dataclasses.replace(params, evaluate=dataclasses.replace(params.evaluate, splits=list(splits)))
        evaluate.run(settings, workspace, "vqa")
        return settings

    for splits in (("test",), ("test", "val")):
        register.run(scored_on(*splits), workspace)
        version = resolve_version(client, params.tracking, "vlp-vqa@challenger")
        found.append((version.version, version.tags["evaluation"]))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
    with pytest.raises(ParamsError, match="no run of vqa has accuracy on test"):
        register.run(scored_on("val"), workspace)


def test_failed_validation_is_recorded_and_refused(workspace: Workspace, params: Params) -> None:
    report = read_json(workspace.reports / "validation.json")
    report["tables"]["captions"] |= {"bad": 9, "rows": 10}
    write_json(workspace.reports / "validation.json", report)
    make_model(workspace, seed=99)
    evaluate.run(params, workspace, "vqa")
    register.run(params, workspace)
    decision = promote_task(params, workspace, "vqa", by="test")
    assert decision.action == "refused"
    assert "failed validation: captions: 9 of 10 rows are bad" in decision.reasons


def test_exit_codes_and_output_of_the_commands(workspace: Workspace) -> None:
    """Run the real commands, one process each."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def vlp(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vlp_models.cli.main", *words]
        return subprocess.run(command, cwd=workspace.root, env=env, capture_output=True, text=True)

    refused = vlp("promote", "vqa", "--by", "eve")
    assert refused.returncode == 3 and "refused" in refused.stdout and "failed validation" in refused.stdout
    assert read_json(workspace.reports / "promotion" / "vqa.json")["action"] == "refused"
    unknown = vlp("promote", "vaq")
    assert unknown.returncode == 2 and "vaq: no such task" in unknown.stderr
    table = vlp("history", "vqa")
    assert table.returncode == 0 and "promoted" in table.stdout and "refused" in table.stdout and "eve" in table.stdout
    ledger = workspace.root / "promotions" / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(b"")
    lost = vlp("promote", "vqa")
    assert lost.returncode == 2 and "ledger.jsonl" in lost.stderr and "git pull" in lost.stderr, lost.stderr
    assert "Traceback" not in lost.stderr
    ledger.write_bytes(whole)
    status = vlp("status")
    assert status.returncode == 0 and "champion" in status.stdout and "eve" in status.stdout


def test_status_of_an_empty_folder_names_what_is_missing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['vlp', 'status']\n"
        "from vlp_models.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "print('HEAVY', sorted({'torch', 'mlflow', 'numpy', 'pyarrow', 'pandas'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "HEAVY []" in done.stdout and f"{tmp_path}: no params.yaml here" in done.stderr, done.stdout + done.stderr
