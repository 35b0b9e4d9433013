"""The rules as Great Expectations suites: one per table, in an in-memory context that leaves only Data Docs.

A table is checked a batch at a time. Data Docs have a page for its first batch, and for the first
`MAX_EXTRA_PAGES` later batches in which a rule is broken.

This is the only file that imports Great Expectations, which takes seconds.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")

import great_expectations as gx
import great_expectations.expectations as gxe
import pandas as pd
from great_expectations.data_context.types.base import (
    DataContextConfig,
    InMemoryStoreBackendDefaults,
    ProgressBarsConfig,
)

from vlp_models.curation.validation.rules import Between, Check, Matches, OneOf, Present, Rule

MARKUP_LOOKALIKES = str.maketrans({"<": "\u2039", ">": "\u203a", "&": "\uff06"})
MAX_EXTRA_PAGES = 20  # per table
RESULTS = {"result_format": "COMPLETE", "unexpected_index_column_names": ["row"]}
ROW = "row"  # the column that identifies a row: its id may be the problem


class SuiteRunner:
    """Check tables one by one and collect their results for Data Docs.

    Args:
        docs: the directory of Data Docs.
    """

    def __init__(self, docs: Path) -> None:
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        site = {
            "class_name": "SiteBuilder",
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
            "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": _escape_dollars(docs)},
        }
        config = DataContextConfig(
            store_backend_defaults=InMemoryStoreBackendDefaults(),
            data_docs_sites={"vlp": site},
            progress_bars=ProgressBarsConfig(globally=False),
            analytics_enabled=False,
        )
        self._context = gx.get_context(mode="ephemeral", project_config=config)
        self._source = self._context.data_sources.add_pandas("validate")
        self._checkpoints: dict[str, gx.Checkpoint] = {}
        self._pages: Counter[str] = Counter()

    def check(self, table: str, rows: list[dict[str, Any]], rules: list[Rule]) -> list[list[int]]:
        """Return, for each rule, the positions (`row`) of the rows that break it. `rows` must not be empty."""
        if new := table not in self._checkpoints:
            self._checkpoints[table] = self._checkpoint(table, rules)
        checkpoint = self._checkpoints[table]
        columns = [ROW, *dict.fromkeys(rule.column for rule in rules)]
        frame = pd.DataFrame({column: [_neutralize_markup(row[column]) for row in rows] for column in columns})
        batch = {"dataframe": frame}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not new:
                (definition,) = checkpoint.validation_definitions
                found = definition.data.get_batch(batch_parameters=batch).validate(
                    definition.suite, result_format=RESULTS
                )
                needs_page = not found.success and self._pages[table] < MAX_EXTRA_PAGES
            if new or needs_page:
                (found,) = checkpoint.run(batch_parameters=batch).run_results.values()
                self._pages[table] += not new
        results: dict[str, Any] = {}
        for result in found.results:
            assert result.expectation_config is not None
            results[result.expectation_config.meta["rule"]] = result
        return [_rows(results[rule.name]) for rule in rules]

    def _checkpoint(self, table: str, rules: list[Rule]) -> gx.Checkpoint:
        suite = self._context.suites.add(gx.ExpectationSuite(name=table))
        for rule in rules:
            suite.add_expectation(_expectation(rule))
        definition = self._context.validation_definitions.add(
            gx.ValidationDefinition(
                name=table,
                data=self._source.add_dataframe_asset(table).add_batch_definition_whole_dataframe("all"),
                suite=suite,
            )
        )
        return self._context.checkpoints.add(
            gx.Checkpoint(name=table, validation_definitions=[definition], result_format=RESULTS)
        )

    def build_docs(self) -> None:
        """Write index.html and the pages of every suite checked so far."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._context.build_data_docs()


def _escape_dollars(path: Path) -> str:
    """Return an absolute path for a Great Expectations config, where `$NAME` stands for an environment variable."""
    return str(path.absolute()).replace("$", r"\$")


def _neutralize_markup(value: Any) -> Any:
    """Replace markup characters: Great Expectations writes values into pages unescaped, so a dataset could inject a
    script. No rule checks these characters."""
    return value.translate(MARKUP_LOOKALIKES) if isinstance(value, str) else value


def _expectation(rule: Rule) -> gxe.Expectation:
    shared: dict[str, Any] = {"column": rule.column, "meta": {"rule": rule.name}, "notes": f"{rule.table}.{rule.name}"}
    check: Check = rule.check
    if isinstance(check, Present):
        return gxe.ExpectColumnValuesToNotBeNull(**shared)
    if isinstance(check, OneOf):
        return gxe.ExpectColumnValuesToBeInSet(value_set=list(check.values), **shared)
    if isinstance(check, Between):
        return gxe.ExpectColumnValuesToBeBetween(
            min_value=check.low, max_value=check.high, strict_min=check.above, **shared
        )
    assert isinstance(check, Matches)
    return gxe.ExpectColumnValuesToMatchRegex(regex=check.pattern, **shared)


def _rows(result: Any) -> list[int]:
    if result.exception_info and result.exception_info.get("raised_exception"):
        raise RuntimeError(f"Great Expectations could not check a rule: {result.exception_info}")
    return sorted(int(entry[ROW]) for entry in result.result.get("unexpected_index_list") or [])
