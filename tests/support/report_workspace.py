"""A workspace with the results of three runs whose names and texts are attacks, and the page made of it.

conftest.py of tests/evaluation and of tests/contrib/report_pictures imports the fixtures.
"""

from __future__ import annotations

import dataclasses
import html.parser
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlp_models.common.io import write_json, write_text
from vlp_models.common.workspace import Workspace
from vlp_models.data.features import write_chunk, write_index
from vlp_models.data.sample import RegionArrays
from vlp_models.data.tables import write_table
from vlp_models.params import Params, load_params
from vlp_models.pipeline.stages import report
from vlp_models.tasks import TASKS

HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def params() -> Params:
    loaded = load_params(Path(__file__).parents[2] / "params.yaml")
    run = loaded.finetune["tden-vqa"]
    runs = {task: dataclasses.replace(run, task=task) for task in ("captioning", "vqa", "nlvr") if task in TASKS}
    return dataclasses.replace(loaded, finetune=runs)


def record(task: str, metric: str, value: float | None, **more: Any) -> dict[str, Any]:
    known = {"dataset": "scenes", "split": "test", "model": "tden", "run": task, "task": task, "metric": metric}
    numbers = {"value": value, "low": None, "high": None, "baselines": {}, "n": 3, "seed": 1}
    facts = {"seconds": 1.5, "peak_memory_mb": 100.0, "git": "abc", "data": "def", "note": "", "leakage": None}
    return {**known, **numbers, **facts, **more}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Three images, one of them missing on disk; one run of each task; all names and texts are attacks."""
    made = Workspace(tmp_path)
    made.validated.mkdir(parents=True)
    made.features.mkdir(parents=True)
    ids = [f"scenes/{i}" for i in range(3)]
    for i in range(2):
        Image.new("RGBA", (400, 100), (200, 10, 10, 128)).save(tmp_path / f"{i}.png")
    about = {"provenance": "", "source": "scenes", "split": "test", "sha256": "", "width": 400, "height": 100}
    write_table([{"image_id": x, "path": f"{i}.png", **about} for i, x in enumerate(ids)], "images", made.validated)
    captions = [{"caption_id": x, "image_id": x, "text": HOSTILE, "provenance": ""} for x in ids]
    write_table(captions, "captions", made.validated)
    question = {"text": HOSTILE, "question_type": "is", "answer_type": "yes/no", "answers": [HOSTILE] * 10}
    rows = [{"question_id": x, "image_id": x, "provenance": "", **question} for x in ids]
    write_table(rows, "questions", made.validated)
    statement = {"text": HOSTILE, "label": True, "group": "g", "provenance": ""}
    write_table([{"statement_id": x, "image_id": x, **statement} for x in ids], "statements", made.validated)
    bad = [{"table": "captions", "row_id": "1", "rule": HOSTILE, "reason": "r", "provenance": ""}]
    write_table(bad, "quarantine", made.validated)
    regions = RegionArrays(
        features=np.ones((1, 4), np.float16),
        boxes=np.array([[0.1, 0.1, 0.5, 0.9]], np.float32),
        class_probs=np.array([[0.1, 0.9]], np.float16),
        scores=np.ones(1, np.float32),
    )
    write_chunk(made.features, 0, [(x, regions) for x in ids])
    write_index(made.features)
    write_json(made.features / "manifest.json", {"detector_id": "d", "feature_dim": 4, "classes": ["", HOSTILE]})
    write_json(made.shards / "manifest.json", {"detector_id": "d"})
    predictions = {
        "captioning": [{"image_id": x, "caption": HOSTILE, "greedy": "a cat"} for x in ids],
        "vqa": [{"question_id": x, "image_id": x, "answer": HOSTILE, "top": [[HOSTILE, 0.7]]} for x in ids],
        "nlvr": [
            {"statement_id": x, "image_id": x, "group": "g", "label": True, "prediction": False, "p_true": 0.2}
            for x in ids
        ],
    }
    for task, lines in predictions.items():
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        write_text(made.evaluation(task) / "predictions-test.jsonl", text)
    missing = record("captioning", "METEOR", None, note="not computed: java not found")
    gain = {"value": 29.5, "low": 20.0, "high": 40.0}
    there = {"human": {"value": 300.0, "gain": gain}, HOSTILE: {"value": 70.0, "gain": gain}}
    unseen = {"value": 99.5, "low": 90.0, "high": 105.0, "n": 2, "baselines": there}
    leakage = {"images": 0, "texts": 1, "without_images": None, "without_both": unseen}
    scored = {"low": 110.0, "high": 130.0, "baselines": {HOSTILE: 85.0}, "leakage": leakage}
    cider = record("captioning", "CIDEr", 120.5, **scored)
    write_json(made.evaluation("captioning") / "scores.json", [missing, cider])
    kinds = record("vqa", "accuracy (question type is)", 50.0)
    write_json(made.evaluation("vqa") / "scores.json", [record("vqa", "accuracy", 70.0), kinds])
    write_json(made.evaluation("nlvr") / "scores.json", [record("nlvr", "accuracy", 60.0)])
    write_text(made.curve("pretrain/tden"), "step,loss,mlm,val_loss\n1,3.0,2.0,\n2,2.5,1.5,2.6\n3,nan,1.4,\n")
    counts = {"rows": 10, "good": 9, "bad": 1, "bad_percent": 10.0}
    write_json(made.reports / "validation.json", {"tables": {"captions": counts}, "rules": [], "max_bad_percent": 1.0})
    write_json(made.reports / "detector.json", {"AP": 41.5, "per_class": {HOSTILE: 30.0}, "note": "x"})
    return made


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the order in which they close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "line", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect"):
            assert self.open.pop() == tag


def rendered(params: Params, workspace: Workspace) -> str:
    report.run(params, workspace)
    return (workspace.reports / "index.html").read_text(encoding="utf-8")
