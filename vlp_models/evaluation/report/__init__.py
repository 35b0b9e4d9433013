"""The report: tables of scores with their baselines, leakage and the gate; folders of contrib add sections to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlp_models.common.plugins import Table
from vlp_models.common.workspace import Workspace
from vlp_models.params import Params

# name -> function of a `ReportContext` that returns a `Section`; in the order of the page
REPORT_SECTIONS = Table("report_sections", {})


@dataclass(frozen=True, kw_only=True)
class ReportContext:
    """What the page is made from.

    records  the scores of all runs
    missing  names of absent files, which the page lists; a section appends those that it lacks
    """

    params: Params
    workspace: Workspace
    records: Sequence[Mapping[str, Any]]
    missing: list[str]


@dataclass(frozen=True, kw_only=True)
class Section:
    """What is added to the page, as rendered HTML (`markupsafe.Markup`, which is not escaped again).

    top           at the top, next to the main figures
    above, below  above and below the results
    in_tables     (task, dataset, split) -> in this table of results, below its first rows
    """

    top: str = ""
    above: str = ""
    below: str = ""
    in_tables: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
