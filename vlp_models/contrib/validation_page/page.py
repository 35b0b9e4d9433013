"""The validation page: one self-contained HTML file with the verdict, every rule and examples of bad rows.

Its size depends on the number of rules, not of rows: `EXAMPLES_OF_RULE` rows of each are shown; the quarantine has all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_text
from vlp_models.common.pages import page_environment
from vlp_models.curation.duplicates.leakage import Leak
from vlp_models.curation.validation.rules import rules_for
from vlp_models.params import Params
from vlp_models.pipeline.stages.validate import CONSEQUENCES, EXAMPLES_OF_RULE, TableResult, shorten

# Rules that `prepare` applies while it reads; the others are in rules.py.
READING = {
    "annotation_found": "the question has an annotation",
    "box_readable": "a box is x1, y1, x2, y2 and a confidence",
    "image_decodes": "the image file decodes completely",
    "image_exists": "the image file exists",
    "image_inside": "the image file is below the dataset's folder",
    "image_not_a_bomb": "the image has at most validate.max_image_pixels pixels",
    "image_not_empty": "the image file is not empty",
    "image_present": "the image file exists",
    "image_readable": "the file is an image of a supported format",
    "image_still": "the image is not an animation",
    "metadata_readable": "the metadata file exists and can be read",
    "path_inside": "the path is below the dataset's folder",
    "record_readable": "the record can be read in its format",
    "split_disjoint": "an image is in one split",
    "split_known": "the split is train, val or test",
    "text_utf8": "the text is UTF-8",
}


@dataclass(frozen=True, kw_only=True)
class TableSummary:
    """One table: rows read, valid and quarantined. is_refused: too many rows are quarantined."""

    name: str
    rows: int
    good: int
    bad: int
    is_refused: bool


@dataclass(frozen=True, kw_only=True)
class RuleSummary:
    """One rule of one table.

    checked, failed  rows
    examples         the first rows of the quarantine
    expectation      type and arguments of the Great Expectations expectation; None for a rule of `prepare`
    """

    table: str
    name: str
    description: str
    checked: int
    failed: int
    examples: Sequence[Mapping[str, Any]] = ()
    expectation: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What `validate` found.

    left_out         what was dropped without being bad -> number
    near_duplicates  copies across splits; action: what is done with them, `quarantine` or `count`
    captions         split -> captions that train has as well (`across_splits` in validation.json)
    """

    datasets: Sequence[str]
    max_bad_fraction: float
    tables: Sequence[TableSummary]
    rules: Sequence[RuleSummary]
    left_out: Mapping[str, int] = field(default_factory=dict)
    near_duplicates: Sequence[Leak] = ()
    action: str = "quarantine"
    captions: Mapping[str, Any] = field(default_factory=dict)


def describe_reading_rule(name: str) -> str:
    """Return a rule of `prepare` in plain words."""
    return READING.get(name, name.replace("_", " "))


def write_page(
    path: Path, params: Params, results: dict[str, TableResult], report: dict[str, Any], duplicates: list[Leak]
) -> None:
    """Write the page with the verdict, every rule and examples of bad rows."""
    from vlp_models.curation.validation.suites import expectation_of, strict_json  # imports Great Expectations

    limit = params.validate.max_bad_fraction
    summaries = []
    for table, result in results.items():
        rules = {rule.name: rule for rule in rules_for(table, params.validate)}
        for name, checked in result.checked.items():
            rule = rules.get(name)  # None: a rule of reading
            expectation = None
            if rule:
                config = expectation_of(rule).configuration
                arguments = {key: value for key, value in config.kwargs.items() if value is not None}
                expectation = config.type, strict_json(arguments)
            summaries.append(
                RuleSummary(
                    table=table,
                    name=name,
                    description=rule.description if rule else describe_reading_rule(name),
                    checked=checked,
                    failed=result.failed[name],
                    examples=result.examples.get(name, ()),
                    expectation=expectation,
                )
            )
    tables = [
        TableSummary(name=n, rows=r.rows, good=r.good, bad=r.bad, is_refused=r.bad_fraction > limit)
        for n, r in results.items()
    ]
    validation = Validation(
        datasets=list(params.data),
        max_bad_fraction=limit,
        tables=tables,
        rules=summaries,
        left_out=report["left_out"],
        near_duplicates=duplicates,
        action=params.validate.near_duplicates.action,
        captions=report["across_splits"]["captions"],
    )
    write_text(path, render(validation))


def render(validation: Validation) -> str:
    """Render the HTML. Autoescaping is on: ids, captions and paths come from the data."""
    environment = page_environment("vlp_models.contrib.validation_page")
    environment.filters["percent"] = format_percent
    environment.filters["shorten"] = shorten
    # The rules with the most bad rows come first.
    failed = sorted((rule for rule in validation.rules if rule.failed), key=lambda rule: -rule.failed)
    # rows that are bad only because their image is: counted, without examples
    broken = [rule for rule in failed if rule.name not in CONSEQUENCES]
    consequences = [replace(rule, examples=()) for rule in failed if rule.name in CONSEQUENCES]
    passed = [rule for rule in validation.rules if not rule.failed and rule.checked]
    expectations = [rule for rule in validation.rules if rule.expectation and rule.checked]
    tables = [table for table in validation.tables if table.rows]
    refused = [table for table in validation.tables if table.is_refused]
    images = next((table for table in validation.tables if table.name == "images"), None)
    return environment.get_template("page.html.j2").render(
        validation=validation,
        tables=tables,
        refused=refused,
        has_images=images is not None and images.good > 0,
        limit=f"{100 * validation.max_bad_fraction:g}%",
        broken=broken,
        consequences=consequences,
        passed=passed,
        expectations=expectations,
        copies=sorted(Counter(leak.split for leak in validation.near_duplicates).items()),
        EXAMPLES=EXAMPLES_OF_RULE,
    )


def format_percent(part: int, total: int) -> str:
    """Format a share: two decimals, but never 0% of something."""
    share = 100 * part / total if total else 0.0
    return "<0.01%" if 0 < share < 0.01 else f"{share:.2f}".rstrip("0").rstrip(".") + "%"
