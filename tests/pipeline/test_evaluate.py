"""evaluate on tiny untrained models: real scenes, real shards, real checkpoints; the figures checked by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.features import write_chunk, write_index
from vlp_models.data.sample import RegionArrays
from vlp_models.data.tables import read_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.metrics.score import read_items, write_items
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint import CheckpointInfo, write_checkpoint
from vlp_models.params import FinetuneParams, GeneratorParams, Params, load_params
from vlp_models.pipeline.stages import evaluate, generate, prepare, shards
from vlp_models.tasks import task_class

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_items_suffice")]

ANSWERS = ["yes", "no", "1", "2", "red", "blue"]
CLASSES = ["background", "circle", "square"]
LAYERS = dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 1)
SIZES = {"hidden": 16, "heads": 2, "intermediate": 32, **LAYERS}


@pytest.fixture(scope="module")
def params() -> Params:
    loaded = load_params(Path(__file__).parents[2] / "params.yaml")
    scenes = GeneratorParams(generator="objects", seed=3, train=10, val=2, test=6, questions_per_image=4, side=64)
    tasks = ("captioning", "vqa", "retrieval")
    runs = {task: dataclasses.replace(loaded.finetune["tden-vqa"], task=task) for task in tasks}
    return dataclasses.replace(
        loaded,
        generate={"scenes": scenes},
        finetune=runs,
        evaluate=dataclasses.replace(
            loaded.evaluate, splits=["test"], batch_size=4, bootstrap=50, blind_baseline=["vqa"]
        ),
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("evaluate"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        generate.run(params, workspace, "scenes")
        prepare.run(params, workspace, "scenes")
    shutil.copytree(workspace.interim("scenes"), workspace.validated)
    images = read_table("images", workspace.validated).to_pylist()
    rng = np.random.default_rng(0)
    regions = [(row["image_id"], random_regions(rng)) for row in images]
    workspace.features.mkdir(parents=True)
    write_chunk(workspace.features, 0, regions)
    write_index(workspace.features)
    manifest = {"detector_id": "abc", "feature_dim": 4, "classes": CLASSES}
    (workspace.features / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    shards.run(params, workspace)
    texts = read_table("captions", workspace.validated)["text"].to_pylist()
    tokenizer = Tokenizer.train(texts, 300, 1, True)
    for task in params.finetune:
        write_model(workspace.checkpoint(f"finetune/{task}"), task, tokenizer)
    for task in params.finetune:
        evaluate.run(params, workspace, task)
    return workspace


def random_regions(rng: np.random.Generator) -> RegionArrays:
    count = int(rng.integers(1, 4))
    return RegionArrays(
        features=rng.normal(size=(count, 4)).astype(np.float16),
        boxes=np.tile(np.array([0.1, 0.2, 0.6, 0.7], np.float32), (count, 1)),
        class_probs=rng.dirichlet(np.ones(len(CLASSES)), size=count).astype(np.float16),
        scores=np.linspace(0.9, 0.5, count, dtype=np.float32),
    )


def write_model(directory: Path, task: str, tokenizer: Tokenizer, blank_images: bool = False) -> None:
    torch.manual_seed(0)
    info = CheckpointInfo(
        family="tden",
        name="small",
        model_config=SIZES,
        task=task,
        max_text_len=16,
        max_regions=4,
        detector_id="abc",
        feature_dim=4,
        classes=tuple(CLASSES),
        blank_images=blank_images,
    )
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, feature_dim=4, num_classes=len(CLASSES)
    )
    model = build_model("tden", SIZES, facts)
    labels = ANSWERS if task == "vqa" else []
    directory.mkdir(parents=True)
    write_checkpoint(directory, task_class(task)(model, tokenizer, info, labels=labels), info, tokenizer, labels)


def scores(workspace: Workspace, run: str) -> dict[str, dict[str, Any]]:
    return {record["metric"]: record for record in read_json(workspace.evaluation(run) / "scores.json")}


def predictions(workspace: Workspace, run: str) -> list[dict[str, Any]]:
    text = (workspace.evaluation(run) / "predictions-test.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def of_split(workspace: Workspace, table: str, split: str) -> list[dict[str, Any]]:
    images = read_table("images", workspace.validated).to_pylist()
    ids = {row["image_id"] for row in images if row["split"] == split}
    return [row for row in read_table(table, workspace.validated).to_pylist() if row["image_id"] in ids]


def test_every_image_and_question_is_predicted_once(workspace: Workspace) -> None:
    for run, table, key in (
        ("captioning", "images", "image_id"),
        ("vqa", "questions", "question_id"),
        ("retrieval", "images", "image_id"),
    ):
        expected = sorted(row[key] for row in of_split(workspace, table, "test"))
        assert sorted(row[key] for row in predictions(workspace, run)) == expected


def test_prediction_records_match_the_contract(workspace: Workspace, params: Params) -> None:
    keys = {"dataset", "split", "model", "family", "run", "variant", "task", "metric", "value", "low", "high", "n"}
    keys |= {"baselines", "seed", "seconds", "peak_memory_mb", "git", "data", "note", "leakage"}
    for run in params.finetune:
        for record in scores(workspace, run).values():
            assert set(record) == keys
            assert record["value"] is not None or record["note"].startswith("not computed: ")
            if record["low"] is not None:
                assert record["low"] <= record["value"] + 1e-9 and record["value"] <= record["high"] + 1e-9


def test_item_scores_average_to_the_scores(workspace: Workspace, params: Params, tmp_path: Path) -> None:
    for run in params.finetune:
        path, found = workspace.evaluation(run) / "items.parquet", scores(workspace, run)
        several = read_items(path)
        stored = {items.metric: items for items in several}
        plain = {name for name, record in found.items() if record["value"] is not None and "(" not in name}
        assert {name for name in plain if name != "median rank" and "gain over" not in name} <= stored.keys()
        for name, items in stored.items():
            evidence = items.evidence()
            value = evidence.statistic(evidence.parts_NK.sum(axis=0, keepdims=True))[0]
            assert value == pytest.approx(found[name]["value"], abs=1e-3)
            assert all("dataset=scenes" in own for own in items.slices)
        write_items(tmp_path / "again.parquet", several)
        assert (tmp_path / "again.parquet").read_bytes() == path.read_bytes()
    vqa = {items.metric: items for items in read_items(workspace.evaluation("vqa") / "items.parquet")}["accuracy"]
    asked = {row["question_id"]: row for row in of_split(workspace, "questions", "test")}
    for name, group, own in zip(vqa.items, vqa.groups, vqa.slices, strict=True):
        assert group == asked[name]["image_id"] and f"question_type={asked[name]['question_type']}" in own
        assert any(slice_.startswith("objects=") for slice_ in own)


def test_captioning_baselines(workspace: Workspace) -> None:
    found = scores(workspace, "captioning")
    assert {"BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "faithful captions", "CIDEr (greedy)"} <= found.keys()
    assert set(found["CIDEr"]["baselines"]) == {"human", "constant caption", "nearest-neighbor caption"}
    assert found["CIDEr"]["baselines"]["human"] > found["CIDEr"]["value"]  # an untrained model
    assert found["faithful captions"]["baselines"]["human"] > 50
    assert found["CIDEr"]["n"] == 6
    for metric in ("CIDEr", "BLEU-4", "METEOR", "faithful captions"):
        own, gain = found[metric], found[f"{metric}, gain over nearest-neighbor caption"]
        borrowed = own["baselines"]["nearest-neighbor caption"]
        assert gain["value"] == pytest.approx(own["value"] - borrowed, abs=1e-3)
        assert gain["low"] <= gain["value"] <= gain["high"]


def test_vqa_baselines_use_the_train_split(workspace: Workspace) -> None:
    found = scores(workspace, "vqa")
    names = {"majority answer", "per question type", "per question text", "blind baseline"}
    assert set(found["accuracy"]["baselines"]) == names
    assert found["accuracy (blind baseline)"]["value"] == found["accuracy"]["baselines"]["blind baseline"]
    gain = found["gain over blind baseline"]
    assert gain["value"] == pytest.approx(
        found["accuracy"]["value"] - found["accuracy (blind baseline)"]["value"], abs=1e-3
    )
    assert gain["low"] <= gain["value"] <= gain["high"]
    assert found["accuracy"]["n"] == len(of_split(workspace, "questions", "test"))
    assert all("answer_blind" in row and len(row["top"]) == 5 for row in predictions(workspace, "vqa"))


def test_retrieval_ranks_every_caption_and_image(workspace: Workspace) -> None:
    found, rows = scores(workspace, "retrieval"), predictions(workspace, "retrieval")
    ranks = [caption["rank"] for row in rows for caption in row["captions"]]
    assert len(ranks) == len(of_split(workspace, "captions", "test")) == found["R@1"]["n"] == 30
    assert found["R@5"]["value"] == pytest.approx(100 * np.mean(np.array(ranks) <= 5))
    assert found["R@1"]["baselines"]["chance"] == pytest.approx(100 / 6, abs=1e-3)
    assert found["median rank"]["value"] == np.floor(np.median(ranks))
    assert found["median rank (image to text)"]["n"] == 6
    for row in rows:
        caption = row["captions"][0]  # untrained embeddings lie close together, but hardly tie
        assert caption["rank"] > 5 or caption["top"][caption["rank"] - 1][0] == row["image_id"]
        assert all(1 <= caption["rank"] <= 6 for caption in row["captions"]) and 1 <= row["rank"] <= 26


def test_retrieval_does_not_depend_on_the_batch_size(workspace: Workspace, params: Params) -> None:
    before = predictions(workspace, "retrieval")
    one = dataclasses.replace(params, evaluate=dataclasses.replace(params.evaluate, batch_size=1))
    evaluate.run(one, workspace, "retrieval")

    def places(rows: list[dict[str, Any]]) -> list[Any]:
        return [(row["image_id"], row["rank"], [caption["rank"] for caption in row["captions"]]) for row in rows]

    assert places(predictions(workspace, "retrieval")) == places(before)
    blank = dataclasses.replace(params, evaluate=dataclasses.replace(params.evaluate, blind_baseline=["retrieval"]))
    with pytest.raises(ParamsError, match="compare with chance"):
        evaluate.run(blank, workspace, "retrieval")


def test_official_files(workspace: Workspace) -> None:
    captions = read_json(workspace.evaluation("captioning") / "captions_scenes_test_results.json")
    assert all(isinstance(row["image_id"], int) and isinstance(row["caption"], str) for row in captions)
    answers = read_json(workspace.evaluation("vqa") / "vqa_scenes_test_results.json")
    assert all(isinstance(row["question_id"], int) and row["answer"] in ANSWERS for row in answers)


def test_equal_work_gives_equal_files(workspace: Workspace, params: Params) -> None:
    directory = workspace.evaluation("vqa")
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    evaluate.run(params, workspace, "vqa")
    after = {file.name: file.read_bytes() for file in directory.iterdir()}
    volatile = {"seconds", "peak_memory_mb", "git"}

    def stable(content: bytes) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k not in volatile} for record in json.loads(content)]

    assert stable(before.pop("scores.json")) == stable(after.pop("scores.json"))
    assert before == after


def test_blind_training_is_evaluated_blind(workspace: Workspace, params: Params) -> None:
    """The text-only control reads nothing here either: all images of one question get one answer."""
    tokenizer = Tokenizer.load(workspace.checkpoint("finetune/vqa"))
    write_model(workspace.checkpoint("finetune/text-only"), "vqa", tokenizer, blank_images=True)
    run: FinetuneParams = dataclasses.replace(params.finetune["vqa"], blank_images=True)
    evaluate.run(dataclasses.replace(params, finetune={"text-only": run}), workspace, "text-only")
    texts = {row["question_id"]: row["text"] for row in of_split(workspace, "questions", "test")}
    answers: dict[str, set[str]] = {}
    for row in predictions(workspace, "text-only"):
        answers.setdefault(texts[row["question_id"]], set()).add(row["answer"])
    assert all(len(given) == 1 for given in answers.values())
    blank = {row["question_id"]: row["answer_blind"] for row in predictions(workspace, "vqa")}
    assert {row["question_id"]: row["answer"] for row in predictions(workspace, "text-only")} == blank


def test_evaluate_on_scores_any_dataset(workspace: Workspace, params: Params) -> None:
    """Its sources say nothing of it where `evaluate_on` does; what is not there is an error, not a silent nothing."""
    elsewhere = dataclasses.replace(params.finetune["vqa"], sources={"other": 1}, evaluate_on=["scenes"], variant="d")
    evaluate.run(dataclasses.replace(params, finetune={"vqa": elsewhere}), workspace, "vqa")
    found = scores(workspace, "vqa")["accuracy"]
    assert (found["dataset"], found["model"], found["family"], found["variant"]) == ("scenes", "small", "tden", "d")
    lost = dataclasses.replace(elsewhere, evaluate_on=["flickr30k"])
    with pytest.raises(ParamsError, match="no dataset `flickr30k`"):
        evaluate.run(dataclasses.replace(params, finetune={"vqa": lost}), workspace, "vqa")


def test_errors_name_the_way_out(workspace: Workspace, params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParamsError, match="no run `vaq`"):
        evaluate.run(params, workspace, "vaq")
    with pytest.raises(DataError, match="finetune@other"):
        evaluate.run(dataclasses.replace(params, finetune={"other": params.finetune["vqa"]}), workspace, "other")
    before = (workspace.evaluation("vqa") / "scores.json").read_bytes()
    monkeypatch.setattr("vlp_models.evaluation.predict.predict_all", lambda *_, **options: ([], []))
    with pytest.raises(DataError, match="nothing to score in test"):
        evaluate.run(params, workspace, "vqa")
    assert (workspace.evaluation("vqa") / "scores.json").read_bytes() == before
