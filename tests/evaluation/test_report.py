"""The report page and summary: complete, with files missing, and with hostile text in the data."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from report_workspace import HOSTILE, Page, record, rendered

from vlp_models.common.io import read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report import REPORT_SECTIONS
from vlp_models.evaluation.report.page import ResultTable, _as_cells, headlines, interval_bar, warnings
from vlp_models.evaluation.report.variants import VariantRow
from vlp_models.params import DatasetParams, GateParams, Params
from vlp_models.pipeline.stages import report
from vlp_models.registry.promotion.gate_rule import metric_direction


@pytest.mark.parametrize("with_sections", [True, False])
def test_page_is_complete_self_contained_and_escaped(
    params: Params, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, with_sections: bool
) -> None:
    """Also without the sections that contrib adds."""
    if not with_sections:
        for name in list(REPORT_SECTIONS):
            monkeypatch.delitem(REPORT_SECTIONS, name)
    text = rendered(params, workspace)
    page = Page(text)
    assert not page.open
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    assert not re.search(r"https?://", text)
    for part in ("CIDEr", "120.5", "110.0 to 130.0", "java not found", "Synthetic data", "Tiny model", "Data quality"):
        assert part in text
    # The leakage and its section: the score and the best baseline of the same items.
    for part in ("No image is seen.", "1 of 3", "99.5 (90.0 to 105.0), 2 items", f"{escape(HOSTILE)} 70.0"):
        assert part in text, part
    assert text.count("gain +29.5 (+20.0 to +40.0)") == 2, "in the headline and in the table"
    assert "<img src=x" not in text and "&lt;script&gt;" in text
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_data_in_a_sub_folder_of_a_generator_is_synthetic(params: Params) -> None:
    pairs = DatasetParams(format="nlvr", root="data/raw/scenes/nlvr2")
    photographs = DatasetParams(format="pairs", root="data/raw/scenes-of-mine")
    more = dataclasses.replace(params, data={**params.data, "nlvr2": pairs, "photographs": photographs})
    (caveat,) = (text for text in warnings(more) if text.startswith("Synthetic data"))
    assert "nlvr2" in caveat and "photographs," not in caveat


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


def test_summary_is_a_list_of_records_and_metrics_a_mapping(params: Params, workspace: Workspace) -> None:
    report.run(params, workspace)
    summary = read_json(workspace.reports / "summary.json")
    assert {r["run"] for r in summary} == {*params.finetune, "validation", "detector"}
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


def test_bars_have_the_value_the_interval_and_the_baselines() -> None:
    bar = interval_bar(50, 40, 60, {"majority": 30}, top=100)
    assert 'width="110.0"' in bar and "95% interval 40.0 to 60.0; majority 30.0" in bar


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
            more: dict[str, Any] = {"baselines": baselines, "unseen": None}
            rows.append(_as_cells(VariantRow(**names, **numbers, **more), direction))  # type: ignore[arg-type]
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
        )
        (figure,) = headlines([table], params)
        assert figure["variant"] == ("a" if lower else "b")
        trivial = ["blind baseline", "chance"] if lower else ["chance", "blind baseline"]
        assert [name for name, *_ in figure["bars"]] == ["this model", *trivial, "human"]


@pytest.mark.parametrize(
    ("value", "low", "high", "direction", "mark"),
    [
        (120.0, 110.0, 130.0, "higher", "✓ better"),
        (90.0, 80.0, 100.0, "higher", "≈ not clearly better"),
        (80.0, 70.0, 90.0, "higher", "✗ not better"),
        (80.0, 70.0, 84.0, "lower", "✓ better"),
        (80.0, 70.0, 90.0, "lower", "≈ not clearly better"),
        (90.0, 80.0, 100.0, "lower", "✗ not better"),
    ],
)
def test_a_model_that_does_not_beat_its_baseline_is_marked(
    params: Params, workspace: Workspace, value: float, low: float, high: float, direction: str, mark: str
) -> None:
    gates = {"captioning": GateParams(metric="CIDEr", direction=direction)}  # type: ignore[arg-type]
    params = dataclasses.replace(params, promotion=dataclasses.replace(params.promotion, tasks=gates))
    scored = record("captioning", "CIDEr", value, low=low, high=high, baselines={"constant caption": 85.0})
    write_json(workspace.evaluation("captioning") / "scores.json", [scored])
    text = rendered(params, workspace)
    words = f"{mark} than its best baseline, constant caption 85.0"
    # At the top, on its card, and at its row of the table.
    assert text.count(words) == 3 and text.index(words) < text.index("<main>")


def test_the_top_of_the_page_has_date_commit_and_the_gates_verdict(params: Params, workspace: Workspace) -> None:
    decision = {"action": "refused", "outcome": "inconclusive", "version": 3, "champion": 2, "numbers": {}}
    write_json(workspace.reports / "promotion" / "captioning.json", decision)
    text = rendered(params, workspace)
    top = text[: text.index("<main>")]
    assert re.search(r"Made \d+ \w+ 20\d\d, \d\d:\d\d UTC, from commit abc\.", top)
    assert "CIDEr 120.5" in top and "refused: version 3 (inconclusive); champion: version 2" in top
    assert 'title="vlp promote vqa">· not judged yet' in top
