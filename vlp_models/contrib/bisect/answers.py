"""Where a bisection's answer is kept: a tag of the version that it explains, and the report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from vlp_models.common.io import read_json_or_none, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.pages import page_environment
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bisect.card import SINCE, SLICES
from vlp_models.contrib.bisect.page import write_page
from vlp_models.errors import TrackingError
from vlp_models.evaluation.report import ReportContext, Section
from vlp_models.evaluation.report.page import task_title
from vlp_models.evaluation.report.records import read_if_exists
from vlp_models.params import Params
from vlp_models.registry.client import connect, mlflow_errors
from vlp_models.registry.receipts import find_challenger, read_registered

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = get_logger(__name__)

CONCLUSIVE = ("causes", "seed", "untried", "nothing differs")
MAX_TAG = 5000  # characters; MLflow's limit


def write_answer(params: Params, workspace: Workspace, result: Mapping[str, Any]) -> Path:
    """Write reports/bisect-TASK.json and the page, and tag the worse version if the points are versions.

    Returns:
        The page.
    """
    page = workspace.reports / f"bisect-{result['task']}.html"
    write_page(result, page)
    write_json(page.with_suffix(".json"), result)
    if result["are_versions"] and result["answer"]["kind"] in CONCLUSIVE:
        try:
            with mlflow_errors(params):
                name, _, number = result["bad"].rpartition("/")
                client = connect(params.tracking, workspace.root)
                client.set_model_version_tag(name, number, _tag(result["good"]), result["answer"]["sentence"][:MAX_TAG])
        except TrackingError as error:  # the answer took hours, and is in the reports
            logger.warning("%s is not tagged with the answer: %s", result["bad"], error)
    return page


def read_answer(version: ModelVersion, earlier: str) -> str:
    """Return what changed a version's score since an earlier one, such as `vlp-vqa/2`; empty if no bisection has."""
    return str(version.tags.get(_tag(earlier), ""))


def _tag(earlier: str) -> str:
    return f"bisect.since.{earlier.rpartition('/')[2]}"


def is_missing_in_report(root: Path) -> bool:
    """Return whether the report was made before the last bisection."""
    page = root / "reports" / "index.html"
    mark = _mark(root / "reports")
    return bool(mark) and page.exists() and mark not in page.read_text(encoding="utf-8")


def _mark(reports: Path) -> str:
    """Return a comment with the hash of all bisections; empty if there are none."""
    answers = [read_json_or_none(file) for file in sorted(reports.glob("bisect-*.json"))]
    content = json.dumps(answers, sort_keys=True).encode()
    return f"<!-- bisections {hashlib.sha256(content).hexdigest()[:16]} -->" if answers else ""


def report_section(context: ReportContext) -> Section:
    """Return what differs between each task's best run and its champion, and which of it changed the score."""
    reports = context.workspace.reports
    rows = []
    for task, receipts in read_registered(reports).items():
        receipt = find_challenger(receipts) or {}
        facts = {name: text for name, text in receipt.get("facts", {}).items() if name.startswith((SINCE, SLICES))}
        if facts:
            bisected = read_if_exists(reports / f"bisect-{task}.json") or {"good": "", "bad": ""}
            # Between these two versions, not between others.
            is_of_both = bisected["bad"] == f"{receipt['name']}/{receipt['version']}" and any(
                name.endswith(f"(version {bisected['good'].rpartition('/')[2]})") for name in facts
            )
            rows.append({"title": task_title(task), "task": task, "facts": facts, "bisected": is_of_both and bisected})
    section = page_environment(__package__).get_template("section.html.j2").render(rows=rows) if rows else ""
    return Section(below=Markup(section + _mark(reports)))
