"""Retrieval and VCR through every stage, from generated files to the report, on a handful of scenes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import with_values
from toy_dataset import TINY, TRAINER

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table
from vlp_models.errors import ParamsError
from vlp_models.params import Params, load_params
from vlp_models.pipeline.stages import (
    detector,
    evaluate,
    features,
    finetune,
    generate,
    initial,
    prepare,
    pretrain,
    report,
    shards,
    tokenizer,
    validate,
)
from vlp_models.tasks.base import load_task_model
from vlp_models.tasks.scoring import EvalContext

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_items_suffice")]

ROOT = Path(__file__).parents[2]


def tiny_params(root: Path) -> Params:
    """The preset on top of params.yaml, at the smallest size; ground-truth objects instead of a detector."""
    (root / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    small = ["train=24", "val=4", "test=6", "side=64", "questions_per_image=2", "hypotheses_per_image=3"]
    settings = [f"generate.scenes.{s}" for s in small]
    apply_overlay(root / "params.yaml", ROOT / "vlp_models" / "presets" / "scenes-tasks.yaml", settings)
    params = load_params(root / "params.yaml")
    runs = {name: replace(params.finetune[f"tden-{name}"], max_epochs=1, batch_size=8) for name in ("retrieval", "vcr")}
    runs["vcr_answer"] = replace(runs["vcr"], options={"subtask": "answer"})
    runs["entailment"] = replace(runs["vcr"], task="entailment", options={}, evaluate_on=["scenes_ve"])
    runs["nlvr2"] = replace(params.finetune["tden-nlvr2"], max_epochs=1, batch_size=8)
    asked = ["vcr", "entailment", "nlvr2"]
    return replace(
        params,
        validate=replace(params.validate, max_bad_fraction=0.2),
        detector=replace(params.detector, source="none"),
        features=replace(params.features, source="boxes"),
        tokenizer=replace(params.tokenizer, vocab_size=300, min_answer_count=1),
        models={"tden": replace(params.models["tden"], config=TINY)},
        trainer=replace(TRAINER, checkpoint_every_steps=100),
        pretrain={"tden": replace(params.pretrain["tden"], max_steps=2, batch_size=8)},
        finetune=runs,
        evaluate=replace(params.evaluate, splits=["test"], batch_size=5, bootstrap=50, gallery=4, blind_baseline=asked),
        tracking=replace(params.tracking, uri=""),
    )


def spoil(raw: Path) -> None:
    """A VCR question whose tag has no object, and a caption without an image."""
    lines = (raw / "train.jsonl").read_text().splitlines()
    bad = json.loads(lines[0]) | {"annot_id": "train-bad", "question": ["What", "is", [99], "?"]}
    (raw / "train.jsonl").write_text("\n".join([*lines, json.dumps(bad)]) + "\n")
    captions = json.loads((raw / "annotations/captions_scenes.json").read_text())
    captions["annotations"].append({"id": 9999, "image_id": 9999, "caption": "A lost circle."})
    (raw / "annotations/captions_scenes.json").write_text(json.dumps(captions))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Params]:
    workspace = Workspace(tmp_path_factory.mktemp("tasks"))
    params = tiny_params(workspace.root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        generate.run(params, workspace, "scenes")
        spoil(workspace.raw("scenes"))
        for name in params.data:
            prepare.run(params, workspace, name)
        for stage in (validate, detector, features, tokenizer, shards):
            stage.run(params, workspace)
        initial.run(params, workspace, "tden")
        pretrain.run(params, workspace, "tden")
        for run in params.finetune:
            finetune.run(params, workspace, run)
            evaluate.run(params, workspace, run)
        report.run(params, workspace)
    return workspace, params


def scores(workspace: Workspace, run: str) -> dict[str, dict[str, Any]]:
    return {record["metric"]: record for record in read_json(workspace.evaluation(run) / "scores.json")}


def test_bad_records_are_counted_with_a_reason(done: tuple[Workspace, Params]) -> None:
    quarantine = read_table("quarantine", done[0].validated).to_pylist()
    found = {row["row_id"]: (row["table"], row["rule"], row["reason"]) for row in quarantine}
    assert found["scenes_vcr/train-bad"][:2] == ("choices", "tag_known")
    assert "the tag 99 has no object" in found["scenes_vcr/train-bad"][2]
    assert found["scenes/9999"][:2] == ("captions", "image_known")
    assert len(found) == 2


def test_shards_and_vocabulary_contain_the_questions(done: tuple[Workspace, Params]) -> None:
    workspace, _ = done
    counts = read_json(workspace.shards / "manifest.json")["counts"]
    for split, bad in (("train", 1), ("test", 0)):
        asked = (workspace.root / "data" / "raw" / "scenes" / f"{split}.jsonl").read_text().splitlines()
        assert counts[split]["choices"] == len(asked) - bad > 3, split
    sample = ShardDataset(workspace.shards, "train", "choices")[0]
    assert len(sample["answers"]) == len(sample["rationales"]) == 4
    assert sample["boxes"] and all(0 <= v <= 1 for box in sample["boxes"] for v in box)
    words = (workspace.tokenizer / "vocab.txt").read_text().split()
    assert {"corner", "color", "there"} & set(words)


def test_retrieval_is_scored_both_ways_against_chance(done: tuple[Workspace, Params]) -> None:
    found = scores(done[0], "retrieval")
    assert found["R@1"]["baselines"] == {"chance": pytest.approx(100 / 6, abs=1e-3)}
    assert {record["dataset"] for record in found.values()} == {"scenes"}  # scenes_vcr has no captions
    for name in ("R@1", "R@5", "R@10", "median rank"):
        for metric in (name, f"{name} (image to text)"):
            assert found[metric]["low"] <= found[metric]["value"] <= found[metric]["high"]


def test_vcr_is_scored_for_answers_rationales_and_both(done: tuple[Workspace, Params]) -> None:
    workspace, _ = done
    found = scores(workspace, "vcr")
    assert found["Q->AR"]["value"] <= min(found["Q->A"]["value"], found["QA->R"]["value"])
    assert found["Q->AR"]["baselines"]["chance"] == 6.25 and "blind baseline" in found["Q->A"]["baselines"]
    assert found["Q->AR (blind baseline)"]["value"] == found["Q->AR"]["baselines"]["blind baseline"]
    assert "gain over blind baseline" in found
    alone = scores(workspace, "vcr_answer")
    assert alone["Q->A"]["value"] is not None and alone["Q->A (blind baseline)"]["value"] is not None
    assert alone["QA->R"]["value"] is None and "was not trained on it" in alone["Q->AR"]["note"]


def test_entailment_is_scored_against_its_baselines(done: tuple[Workspace, Params]) -> None:
    workspace, _ = done
    found = scores(workspace, "entailment")
    assert {record["dataset"] for record in found.values()} == {"scenes_ve"}
    assert found["accuracy"]["n"] == 18  # three hypotheses of each of six scenes
    assert {"majority label", "blind baseline", "one annotator"} <= found["accuracy"]["baselines"].keys()
    assert found["accuracy"]["baselines"]["one annotator"] > 80
    for name in ("macro F1", "recall (entailment)", "recall (neutral)", "recall (contradiction)"):
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    assert "Entailment, neutral or contradiction" in (workspace.reports / "index.html").read_text()


def test_the_leaderboards_file_is_written_where_labels_are_hidden(
    done: tuple[Workspace, Params], tmp_path: Path
) -> None:
    workspace, _ = done
    model = load_task_model(workspace.checkpoint("finetune/vcr"))
    dataset = ShardDataset(workspace.shards, "test", "choices")
    known = [dataset[i] for i in range(3)]
    place = EvalContext(source="scenes_vcr", validated=workspace.validated)
    hidden = [with_values(sample, answer_label=None, rationale_label=None) for sample in known]
    for samples, written in ((known, False), (hidden, True)):
        rows = model.predict(model.collate(samples), samples)
        path = model.write_official(rows, place, "test", tmp_path)
        assert (path is not None) is written
        scored = model.score(rows, samples, place)
        assert (scored.scores[0].value is None) is written
    lines = (tmp_path / "vcr_scenes_vcr_test_predictions.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[1].startswith("test-")


def test_nlvr2_is_scored_against_its_baselines(done: tuple[Workspace, Params]) -> None:
    found = scores(done[0], "nlvr2")
    assert {record["dataset"] for record in found.values()} == {"scenes_nlvr2"}
    assert found["accuracy"]["n"] == 4 * found["consistency"]["n"] == 24  # of six scenes one set, six sentences
    assert found["accuracy"]["baselines"] == {"majority label": 50.0, "blind baseline": 50.0}


def test_the_report_shows_both(done: tuple[Workspace, Params]) -> None:
    workspace, _ = done
    page = (workspace.reports / "index.html").read_text()
    for text in (
        "Images found by caption",
        "Answers and rationales",
        "Image retrieval by caption",
        "median rank",
        "True or false of two",
    ):
        assert text in page
    assert page.count('<div class="two"><div class="picture">') >= 2, "both pictures of a pair, side by side"
    metrics = read_json(workspace.reports / "metrics.json")
    assert {"retrieval", "vcr", "vcr_answer", "entailment", "nlvr2"} <= metrics["evaluate"].keys()


def test_invalid_option_stops_the_pipeline_before_it_starts(
    done: tuple[Workspace, Params], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlp_models.cli.pipeline import write_plan

    workspace, _ = done
    monkeypatch.chdir(workspace.root)
    text = (workspace.root / "params.yaml").read_text()
    (workspace.root / "params.yaml").write_text(text.replace("negatives: all", "negative: all"))
    with pytest.raises(
        ParamsError,
        match=r"`finetune\.tden-retrieval\.options\.negative`.*its options: scorer, loss, temperature",
    ):
        write_plan(load_params(), workspace)


def test_registry_ranks_a_run_with_two_datasets(done: tuple[Workspace, Params]) -> None:
    from vlp_models.registry.promotion.ranking import rank_runs

    workspace, params = done
    best = {task: several[0].run for task, several in rank_runs(params, workspace).items()}
    assert best == {"retrieval": "retrieval", "vcr": "vcr", "entailment": "entailment", "nlvr2": "nlvr2"}
