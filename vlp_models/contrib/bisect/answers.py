"""Where a bisection's answer is kept: a tag of the version that it explains, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from vlp_models.common.pages import page_environment
from vlp_models.contrib.bisect.card import SINCE, SLICES
from vlp_models.evaluation.report import ReportContext, Section
from vlp_models.evaluation.report.page import task_title
from vlp_models.evaluation.report.records import read_if_exists
from vlp_models.params import Params
from vlp_models.registry.receipts import find_challenger, read_registered

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

TAG = "bisect"
MAX_TAG = 5000  # characters; MLflow's limit


def keep_answer(params: Params, root: Path, result: Mapping[str, Any]) -> None:
    """Tag the worse version with the answer; nothing if that point is a commit."""
    name, _, number = result["bad"].rpartition("/")
    if not name or not number.isdigit():
        return
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.versions import find_version_by_number

    with mlflow_errors(params):
        client = connect(params.tracking, root)
        if find_version_by_number(client, name, int(number)) is not None:
            text = f"since {result['good']}: {result['answer']['sentence']}"
            client.set_model_version_tag(name, number, TAG, text[:MAX_TAG])


def read_answer(version: ModelVersion, earlier: str) -> str:
    """Return what changed a version's score since an earlier one, such as `vlp-vqa/2`; empty if no bisection has."""
    start, _, sentence = version.tags.get(TAG, "").partition(": ")
    return sentence if start == f"since {earlier}" else ""


def is_missing_in_report(root: Path) -> bool:
    """Return whether the last bisection is newer than the report."""
    answer, page = root / "reports" / "bisect.json", root / "reports" / "index.html"
    return answer.exists() and page.exists() and answer.stat().st_mtime > page.stat().st_mtime


def report_section(context: ReportContext) -> Section:
    """Return what differs between each task's best run and its champion, and what of it changed the score."""
    bisected = read_if_exists(context.workspace.reports / "bisect.json") or {}
    rows = []
    for task, receipts in read_registered(context.workspace.reports).items():
        receipt = find_challenger(receipts) or {}
        facts = {key: text for key, text in receipt.get("facts", {}).items() if key.startswith((SINCE, SLICES))}
        if facts:
            is_bisected = bisected.get("bad") == f"{receipt['name']}/{receipt['version']}"
            rows.append({"title": task_title(task), "facts": facts, "bisected": bisected if is_bisected else None})
    if not rows:
        return Section()
    return Section(below=Markup(page_environment(__package__).get_template("section.html.j2").render(rows=rows)))
