"""The report page and summary: complete, with files missing, and with hostile text in the data."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlp_models.common.io import read_json, write_json, write_text
from vlp_models.common.workspace import Workspace
from vlp_models.data.features import write_chunk, write_index
from vlp_models.data.sample import RegionArrays
from vlp_models.data.tables import read_table, write_table
from vlp_models.evaluation.report.charts import boxes_overlay, interval_bar, line_chart, nice_ticks
from vlp_models.evaluation.report.curves import CURVES, read_curves
from vlp_models.evaluation.report.galleries import GALLERIES, Card, Examples, choose_highlights
from vlp_models.evaluation.report.page import ResultTable, _as_cells, headlines, warnings
from vlp_models.evaluation.report.pictures import Picture, Pictures, read_figures
from vlp_models.evaluation.report.variants import VariantRow
from vlp_models.params import DatasetParams, GateParams, Params, load_params
from vlp_models.pipeline.stages import report
from vlp_models.registry.promotion.ranking import metric_direction

HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def params() -> Params:
    loaded = load_params(Path(__file__).parents[2] / "params.yaml")
    run = loaded.finetune["tden-vqa"]
    runs = {task: dataclasses.replace(run, task=task) for task in ("captioning", "vqa", "nlvr")}
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
    cider = record("captioning", "CIDEr", 120.5, low=110.0, high=130.0, baselines={HOSTILE: 85.0})
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


def test_page_is_complete_and_self_contained(params: Params, workspace: Workspace) -> None:
    text = rendered(params, workspace)
    page = Page(text)
    assert not page.open
    sources = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(sources) == 6 + 6, "of the six highlights, and two of each gallery"
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    assert not re.search(r"https?://", text)
    for part in ("CIDEr", "120.5", "110.0 to 130.0", "java not found", "Synthetic data", "Tiny model", "Data quality"):
        assert part in text
    assert "scenes/2: cannot be read" in text


def test_data_in_a_sub_folder_of_a_generator_is_synthetic(params: Params) -> None:
    pairs = DatasetParams(format="nlvr", root="data/raw/scenes/nlvr2")
    photographs = DatasetParams(format="pairs", root="data/raw/scenes-of-mine")
    more = replace(params, data={**params.data, "nlvr2": pairs, "photographs": photographs})
    (caveat,) = (text for text in warnings(more) if text.startswith("Synthetic data"))
    assert "nlvr2" in caveat and "photographs," not in caveat


def test_highlights_are_right_and_wrong_ones_of_different_images() -> None:
    def examples(name: str, rights: str) -> Examples:
        cards = [
            Card(picture=Picture(image_id=str(place), data="x"), lines=[], right={"+": True, "-": False}.get(letter))
            for place, letter in enumerate(rights)
        ]
        gallery = GALLERIES["captioning"]
        return Examples(gallery=gallery, model=name, run=name, split="test", cards=[], sample=cards, total=9)

    def chosen(*galleries: Examples) -> list[tuple[str, str]]:
        return [(one.run, card.picture.image_id) for one, card in choose_highlights(galleries).cards]

    a, b = examples("a", "++++-+"), examples("b", "++---+")
    assert chosen(a, b) == [("a", "0"), ("b", "1"), ("a", "2"), ("a", "4"), ("b", "3"), ("b", "2")]
    assert "8 of the 12" in choose_highlights([a, b]).rule
    assert chosen(examples("a", "++++++-")) == [("a", f"{n}") for n in (0, 1, 2, 3, 4, 6)]
    assert chosen(examples("a", "??+")) == [("a", "2"), ("a", "0"), ("a", "1")]
    assert "are right" not in choose_highlights([examples("a", "??")]).rule and not choose_highlights([]).cards


def test_box_labels_stay_within_the_picture() -> None:
    drawn = boxes_overlay(240, 100, [([0.9, 0.0, 1.0, 0.5], "blue triangle"), ([0, 0.5, 1, 1], "x" * 99)])
    ends = re.findall(r'<text class="c." x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]*)', drawn)
    assert ends[0] == ("238.0", "13.0", "end", "blue triangle"), "at the right edge, and inside the box at the top"
    assert len(ends[1][3]) * 7.5 < 240 and ends[1][3].endswith("…")


def test_a_chart_has_one_quantity(params: Params, workspace: Workspace) -> None:
    """Losses, accuracies in percent and any other figure are charts of their own, with names that are read."""
    text = "step,loss,mlm,mlm_accuracy,val_loss,codes_used\n1,3.0,2.0,0.2,,40\n2,2.5,1.5,0.4,2.6,60\n"
    write_text(workspace.curve("pretrain/tden"), text)
    (loss, accuracy, other) = read_curves(params, workspace)
    assert (loss.quantity, [name for name, _ in loss.legend]) == ("Loss", ["total", "masked words"])
    assert loss.has_validation and 'class="line c0 dashed"' in loss.chart
    assert (accuracy.quantity, accuracy.last) == ("Accuracy, %", "40.00 after 2 steps")
    assert (other.quantity, other.last) == ("Codes used", "60.00 after 2 steps")


def test_every_curve_has_its_own_name() -> None:
    """Of two lines with one name a chart would have one."""
    assert len(set(CURVES.values())) == len(CURVES)


def test_an_objective_has_the_same_color_in_all_charts(params: Params, workspace: Workspace) -> None:
    write_text(workspace.curve("pretrain/tden"), "step,loss,mlm,moc,ism\n1,3.0,2.0,1.0,1.0\n2,2.5,1.5,0.5,0.5\n")
    pretrain = params.pretrain["tden"]
    recipe = dataclasses.replace(pretrain.recipe, objectives={"ism": 1.0, "moc": 1.0})
    write_text(workspace.curve("pretrain/other"), "step,loss,ism,moc,ism_accuracy\n1,3.0,2.0,1.0,0.5\n")
    both = {"tden": pretrain, "other": dataclasses.replace(pretrain, recipe=recipe)}
    charts = read_curves(dataclasses.replace(params, pretrain=both), workspace)
    colors: dict[str, set[int]] = {}
    for chart in charts:
        assert len({number for _, number in chart.legend}) == len(chart.legend)
        for name, number in chart.legend:
            colors.setdefault(name, set()).add(number)
    assert {"total", "masked words", "image-sentence matching"} <= colors.keys() and len(charts) == 3
    assert all(len(numbers) == 1 for numbers in colors.values()), colors


def test_few_test_images_are_a_warning_at_the_top_and_in_place_of_intervals(
    params: Params, workspace: Workspace
) -> None:
    few = record("captioning", "CIDEr", 104.2, note="no 95% interval: 2 test items, 20 are needed")
    write_json(workspace.evaluation("captioning") / "scores.json", [few])
    text = rendered(params, workspace)
    warning = "Only 2 test images: these scores show that the pipeline runs, not how good the model is."
    assert text.index("<h1>") < text.index(warning) < text.index('class="lead"')
    assert "No interval: only 2 test images." in text and text.count("o 95% interval of scores on fewer than 20") == 1
    write_json(workspace.evaluation("captioning") / "scores.json", [record("captioning", "CIDEr", 104.2)])
    assert "these scores show" not in rendered(params, workspace)


def test_rules_are_counted_as_on_the_validation_page(params: Params, workspace: Workspace) -> None:
    rules = [{"table": "captions", "rule": f"r{n}", "checked": n, "failed": 0} for n in range(3)]
    found = read_json(workspace.reports / "validation.json") | {"rules": rules}
    write_json(workspace.reports / "validation.json", found)
    assert "1 quarantined, by 2 rules." in rendered(params, workspace), "a rule that checked no row is none"


def test_text_from_the_data_is_escaped(params: Params, workspace: Workspace) -> None:
    text = rendered(params, workspace)
    assert "<script" not in text and "<img src=x" not in text
    assert "&lt;script&gt;" in text
    assert not [name for _, attributes in Page(text).tags for name in attributes if name.startswith("on")]


def test_summary_is_a_list_of_records_and_metrics_a_mapping(params: Params, workspace: Workspace) -> None:
    report.run(params, workspace)
    summary = read_json(workspace.reports / "summary.json")
    assert {r["run"] for r in summary} == {"captioning", "vqa", "nlvr", "validation", "detector"}
    assert len({frozenset(r) for r in summary}) == 1  # the same keys everywhere
    nested = read_json(workspace.reports / "metrics.json")
    assert nested["evaluate"]["captioning"]["scenes test"] == {"CIDEr": 120.5}  # not computed: absent, not zero
    assert nested["evaluate"]["vqa"]["scenes test"] == {"accuracy": 70.0}
    assert nested["detector"]["AP"] == 41.5


def test_dvc_metrics_show_reads_the_headlines(params: Params, workspace: Workspace) -> None:
    report.run(params, workspace)
    stage = {"cmd": "x", "metrics": [{"reports/metrics.json": {"cache": False}}]}
    write_json(workspace.root / "dvc.yaml", {"stages": {"report": stage}})  # JSON is YAML
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "--no-scm", "-q"], cwd=workspace.root, check=True, capture_output=True)
    done = subprocess.run(
        [*dvc, "metrics", "show", "--json"], cwd=workspace.root, check=True, capture_output=True, text=True
    )
    shown = json.loads(done.stdout)[""]["data"]["reports/metrics.json"]["data"]
    assert shown["evaluate"]["vqa"]["scenes test"]["accuracy"] == 70.0


def test_boxes_are_drawn_only_for_models_that_read_regions(params: Params, workspace: Workspace) -> None:
    image_id = read_table("images", workspace.validated)["image_id"][0].as_py()
    boxes = {flag: Pictures(workspace, 10**9, regions=flag).get(image_id).boxes for flag in (True, False)}
    assert "<rect" in boxes[True] and not boxes[False]


def test_unused_detector_report_is_ignored(params: Params, workspace: Workspace) -> None:
    """As in a workspace whose last model that reads regions was removed."""
    write_json(workspace.shards / "manifest.json", {"detector_id": "", "pixels": True})
    report.run(params, workspace)
    assert not [record for record in read_json(workspace.reports / "summary.json") if record["run"] == "detector"]
    assert "detector" not in read_json(workspace.reports / "metrics.json")


@pytest.mark.parametrize(
    "absent",
    ["data", "reports/eval", "reports/eval/vqa", "reports/curves", "reports/validation.json", "data/features"],
)
def test_sections_without_files_are_left_out(params: Params, workspace: Workspace, absent: str, tmp_path: Path) -> None:
    (workspace.root / absent).rename(tmp_path / "gone")
    assert not Page(rendered(params, workspace)).open


def test_empty_workspace_gives_a_page_that_reports_it(params: Params, tmp_path: Path) -> None:
    text = rendered(params, Workspace(tmp_path))
    assert "no run has been evaluated" in text
    assert read_json(tmp_path / "reports" / "summary.json") == []


def test_long_curves_are_thinned(params: Params, workspace: Workspace) -> None:
    """A curve of 50,000 steps is rendered quickly, in a small page."""
    lines = "".join(f"{i},{3 - i / 50_000}\n" for i in range(50_000))
    write_text(workspace.curve("finetune/vqa"), f"step,loss\n{lines}")
    start = time.perf_counter()
    text = rendered(params, workspace)
    assert time.perf_counter() - start < 10
    assert len(text) < 400_000


def test_charts() -> None:
    assert nice_ticks(0, 97) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(5, 5)[-1] >= 5
    assert line_chart({"loss": [(1, float("nan"))]}, "t") == ""
    bar = interval_bar(50, 40, 60, {"majority": 30}, top=100)
    assert 'width="110.0"' in bar and "95% interval 40.0 to 60.0; majority 30.0" in bar


def test_model_figures_are_on_the_page(params: Params, workspace: Workspace) -> None:
    """Patches are cut from the images, text is escaped, and a missing image is named."""
    pretrained = dataclasses.replace(params, pretrain={**params.pretrain, "shows": params.pretrain["tden"]})
    boxes = [("scenes/0", [0.0, 0.0, 0.5, 1.0]), ("scenes/2", [0, 0, 1, 1]), ("elsewhere", [0, 0, 1, 1])]
    patches = [{"image_id": image_id, "box": box} for image_id, box in boxes]
    saved = {"title": "Codes", "about": HOSTILE, "groups": [{"name": "code 1", "note": "two", "patches": patches}]}
    write_json(workspace.figures("pretrain/shows"), [saved])
    (figure,) = read_figures(pretrained, workspace)
    (first, lost, unknown) = figure.groups[0].pictures
    assert (first.width, first.height) == (72, 36) and first.data
    assert "cannot be read" in lost.problem and "not in the validated" in unknown.problem
    report.run(pretrained, workspace)
    page = (workspace.reports / "index.html").read_text()
    assert "Codes · shows" in page and first.data in page and HOSTILE not in page
    assert read_figures(params, workspace) == []


def test_the_best_value_and_the_order_of_baselines_follow_the_metrics_direction(params: Params) -> None:
    baselines = {"blind baseline": 40.0, "chance": 50.0, "human": 2.0}
    run = dataclasses.replace(params.finetune["vqa"], task="retrieval")
    gate = GateParams(metric="R@10", direction="lower")  # params.yaml comes first
    promotion = dataclasses.replace(params.promotion, tasks={"retrieval": gate})
    params = dataclasses.replace(params, finetune={"retrieval": run}, promotion=promotion)
    for metric, lower in (("R@1", False), ("median rank", True), ("R@10", True)):
        direction = metric_direction(params, "retrieval", metric)
        assert direction == ("lower" if lower else "higher")
        rows = []
        for variant, value in (("a", 7.0), ("b", 9.0)):
            names = {"metric": metric, "variant": variant, "model": "m", "runs": (variant,), "control": False}
            numbers = {"value": value, "low": None, "high": None, "deviation": None, "n": 3, "few": None, "costs": {}}
            rows.append(_as_cells(VariantRow(**names, **numbers, baselines=baselines), direction))  # type: ignore[arg-type]
        assert rows[0]["best_baseline"] == (("blind baseline", 40.0) if lower else ("chance", 50.0))
        table = ResultTable(
            task="retrieval",
            title="",
            dataset="scenes",
            split="test",
            rows=rows,
            details=[],
            costs=[],
            absent=[],
            comparison=None,
        )
        (figure,) = headlines([table], params)
        assert figure["variant"] == ("a" if lower else "b")
        trivial = ["blind baseline", "chance"] if lower else ["chance", "blind baseline"]
        assert [name for name, *_ in figure["bars"]] == ["this model", *trivial, "human"]
