"""NLVR2 from its files to the registry: models of regions and of pixels, served with two images, evaluated again."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from small_project import SIZES, make_model

from vlp_models.cli.predict import predictions
from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import DatasetParams, GateParams, GeneratorParams, Params, parse_params, read_yaml
from vlp_models.pipeline.promotion_commands import promote_task
from vlp_models.pipeline.reevaluate import reevaluate_bundle
from vlp_models.pipeline.stages import evaluate, features, generate, prepare, register, shards, validate
from vlp_models.registry.client import connect
from vlp_models.registry.versions import download_bundle, find_run_versions

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODELS = {"regions": "tden", "pixels": "toy"}  # run -> model


@pytest.fixture(scope="module")
def params(toy: None) -> Params:
    raw = read_yaml(ROOT / "params.yaml")
    small = {"side": 8, "patch": 4, "hidden": 16, "heads": 2}
    raw["models"] = {"tden": {"family": "tden", "config": SIZES}, "toy": {"family": "toy", "config": small}}
    raw["pretrain"] = {}
    raw["finetune"] = {
        run: {"task": "nlvr2", "start": f"initial/{model}", "evaluate_on": ["pairs"]} for run, model in MODELS.items()
    }
    loaded = parse_params(raw)
    pairs = DatasetParams.of(format="nlvr2", root="data/raw/scenes/nlvr2", validation_directories=["1"])
    generator = GeneratorParams(generator="objects", seed=3, train=4, val=4, test=8, pair_sentences=3, side=64)
    return dataclasses.replace(
        loaded,
        generate={"scenes": generator},
        data={**loaded.data, "pairs": pairs},
        validate=dataclasses.replace(loaded.validate, max_bad_fraction=0.2),
        features=dataclasses.replace(loaded.features, source="grid"),
        evaluate=dataclasses.replace(loaded.evaluate, batch_size=5, bootstrap=50, blind_baseline=["nlvr2"]),
        promotion=dataclasses.replace(
            loaded.promotion, resamples=200, min_images=2, tasks={"nlvr2": GateParams(beat_baselines=False)}
        ),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("project"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        shutil.copy(ROOT / "params.yaml", workspace.root)
        workspace.detector.mkdir(parents=True)
        (workspace.detector / "config.json").write_text("{}")
        generate.run(params, workspace, "scenes")
        for name in params.data:
            prepare.run(params, workspace, name)
        for stage in (validate, features, shards):
            stage.run(params, workspace)
        for seed, (run, model) in enumerate(MODELS.items()):
            make_model(workspace, seed, run, made=params.models[model], name=model, task="nlvr2")
            evaluate.run(params, workspace, run)
        register.run(params, workspace)
    return workspace


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions-test.jsonl").read_text().splitlines()]


def test_run_is_scored_with_its_baselines(made: Workspace, params: Params) -> None:
    counts = read_json(made.shards / "manifest.json")["counts"]
    assert {split: of["image_pairs"] for split, of in counts.items()} == {"train": 12, "val": 12, "test": 24}
    for run in MODELS:
        found = {score["metric"]: score for score in read_json(made.evaluation(run) / "scores.json")}
        assert {score["dataset"] for score in found.values()} == {"pairs"}
        assert found["accuracy"]["n"] == 24 and found["consistency"]["n"] == 6
        assert found["accuracy"]["baselines"]["majority label"] == 50.0
        assert found["accuracy"]["baselines"]["blind baseline"] == 50.0, "the words give nothing away"
        official = (made.evaluation(run) / "nlvr2_pairs_test_predictions.csv").read_text().splitlines()
        assert len(official) == 24 and official[0].startswith("test1-0-0-0,")


@pytest.mark.parametrize("run", MODELS)
def test_version_is_served_with_two_images(
    made: Workspace, params: Params, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pyfunc

    monkeypatch.chdir(made.root)
    version = find_run_versions(connect(params.tracking, made.root), "vlp-nlvr2", list(MODELS))[run]
    assert version.tags["served"] == "yes"
    known = rows(made.evaluation(run))[:3]
    table = read_table("images", made.validated)
    paths = dict(zip(table["image_id"].to_pylist(), table["path"].to_pylist(), strict=True))
    asked = {row["pair_id"]: row["text"] for row in read_table("image_pairs", made.validated).to_pylist()}
    images = [[str(made.root / paths[image_id]) for image_id in row["image_ids"]] for row in known]
    encoded = [[base64.b64encode(Path(path).read_bytes()).decode() for path in pair] for pair in images]
    texts = [asked[row["pair_id"]] for row in known]
    monkeypatch.setenv("VLP_IMAGE_ROOT", str(made.root))  # a served model opens paths only below it
    served = mlflow.pyfunc.load_model(f"models:/vlp-nlvr2/{version.version}")
    for given in (images, encoded):
        found = served.predict(pd.DataFrame({"image": given, "text": texts}))
        assert [p["p_true"] for p in found] == pytest.approx([p["p_true"] for p in known], abs=1e-5)
    turned = predictions("nlvr2", [pair[::-1] for pair in images], texts, f"vlp-nlvr2/{version.version}")
    assert [p["p_true"] for p in turned] != pytest.approx([p["p_true"] for p in known], abs=1e-5)
    with pytest.raises(ParamsError, match=rf"vlp-nlvr2 version {version.version}: a model for nlvr2; name one for vqa"):
        predictions("vqa", [images[0][0]], texts[:1], f"vlp-nlvr2/{version.version}")
    with pytest.raises(DataError, match="takes 2 images per request, as a list; found str"):
        predictions("nlvr2", [images[0][0]], texts[:1], f"vlp-nlvr2/{version.version}")
    with pytest.raises(DataError, match="as a list; found 3"):
        predictions("nlvr2", [[*images[0], images[0][0]]], texts[:1], f"vlp-nlvr2/{version.version}")


@pytest.mark.parametrize("run", MODELS)
def test_version_is_evaluated_again_on_both_images(
    made: Workspace, params: Params, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current shards hold nothing that it reads."""
    monkeypatch.chdir(made.root)
    version = find_run_versions(connect(params.tracking, made.root), "vlp-nlvr2", list(MODELS))[run]
    lineage = {"run": run, "params": {"finetune": {run: {"task": "nlvr2", "sources": {}, "seed": 1}}}}
    lineage["params"]["finetune"][run]["evaluate_on"] = ["pairs"]  # type: ignore[index]
    held = made.shards / "manifest.json"
    manifest = held.read_text()
    held.write_text(json.dumps({**json.loads(manifest), "pixels": False, "detector_id": "another"}))
    try:
        with reevaluate_bundle(params, made, download_bundle(version), lineage) as folder:
            assert rows(folder) == rows(made.evaluation(run))
    finally:
        held.write_text(manifest)


def test_gate_promotes_a_first_champion(made: Workspace, params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.root)
    decision = promote_task(params, made, "nlvr2", by="test")
    assert (decision.action, len(decision.candidates)) == ("promoted", 2), decision.reasons
