"""report: collect the figures of all runs in reports/summary.json, and render them as one page, reports/index.html."""

from __future__ import annotations

from vlp_models.common.io import write_json, write_text
from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.page import render
from vlp_models.evaluation.report.records import evaluation_records, nested, pipeline_records
from vlp_models.params import Params


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write summary.json (a list of records), metrics.json (headlines, nested for `dvc metrics`) and index.html."""
    evaluations, pipeline = evaluation_records(params, workspace), pipeline_records(workspace)
    write_json(workspace.reports / "summary.json", evaluations + pipeline)
    write_json(workspace.reports / "metrics.json", nested(evaluations, pipeline))
    page = workspace.reports / "index.html"
    write_text(page, render(params, workspace, evaluations))
