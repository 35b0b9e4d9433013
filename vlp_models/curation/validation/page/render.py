"""The validation page: one self-contained HTML file with the verdict, every rule and examples of bad rows.

Its size depends on the number of rules, not of rows: at most `EXAMPLES` rows of each are shown; the quarantine has all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlp_models.common.pages import page_environment
from vlp_models.curation.duplicates.leakage import Leak

EXAMPLES = 20  # per list
LONGEST = 300  # characters of a value from the data
# Rules whose rows are bad only because their image is, which is listed on its own.
CONSEQUENCES = ("image_good", "other_images_good")
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


def shorten(value: str | None) -> str | None:
    """Return a value from the data with at most `LONGEST` characters."""
    return value if value is None or len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"


def render(validation: Validation) -> str:
    """Render the HTML. Autoescaping is on: ids, captions and paths come from the data."""
    environment = page_environment("vlp_models.curation.validation.page")
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
        EXAMPLES=EXAMPLES,
    )


def format_percent(part: int, total: int) -> str:
    """Format a share: two decimals, but never 0% of something."""
    share = 100 * part / total if total else 0.0
    return "<0.01%" if 0 < share < 0.01 else f"{share:.2f}".rstrip("0").rstrip(".") + "%"
