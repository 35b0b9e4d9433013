"""The rules as Great Expectations suites, one per table, in an in-memory context.

A table is checked a batch at a time. Great Expectations' results are kept as JSON, one line per batch.

This is the only file that imports Great Expectations, which takes seconds.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")

import great_expectations as gx
import great_expectations.expectations as gxe
import pandas as pd
from great_expectations.core.batch_definition import BatchDefinition
from great_expectations.data_context.types.base import (
    DataContextConfig,
    InMemoryStoreBackendDefaults,
    ProgressBarsConfig,
)

from vlp_models.curation.validation.rules import Between, Check, Matches, OneOf, Present, Rule

# COMPLETE lists every row that breaks a rule, by its column `row`.
RESULTS = {"result_format": "COMPLETE", "unexpected_index_column_names": ["row"]}
ROW = "row"  # the column that identifies a row: its id may be the problem
EVERY_ROW = ("unexpected_list", "unexpected_index_list", "unexpected_index_query")  # left out of the JSON: unbounded


class SuiteRunner:
    """Check tables one by one and write Great Expectations' results to `TABLE.jsonl`.

    Args:
        results: the directory of these files.
    """

    def __init__(self, results: Path) -> None:
        logging.getLogger("great_expectations").setLevel(logging.ERROR)
        # in memory: no files of Great Expectations' own, no telemetry
        config = DataContextConfig(
            store_backend_defaults=InMemoryStoreBackendDefaults(),
            data_docs_sites={},
            progress_bars=ProgressBarsConfig(globally=False),
            analytics_enabled=False,
        )
        self._context = gx.get_context(mode="ephemeral", project_config=config)
        self._source = self._context.data_sources.add_pandas("validate")
        self._suites: dict[str, tuple[BatchDefinition, gx.ExpectationSuite]] = {}
        self._results = results
        self._results.mkdir(parents=True, exist_ok=True)

    def check(self, table: str, rows: list[dict[str, Any]], rules: list[Rule]) -> list[list[int]]:
        """Return, for each rule, the positions (`row`) of the rows that break it. `rows` must not be empty."""
        # a suite serves all batches of its table
        if table not in self._suites:
            suite = self._context.suites.add(gx.ExpectationSuite(name=table))
            for rule in rules:
                suite.add_expectation(expectation_of(rule))
            frames = self._source.add_dataframe_asset(table).add_batch_definition_whole_dataframe("all")
            self._suites[table] = frames, suite
        definition, suite = self._suites[table]
        # only the columns that rules check
        columns = [ROW, *dict.fromkeys(rule.column for rule in rules)]
        values = {}
        for column in columns:
            values[column] = [row[column] for row in rows]
        frame = pd.DataFrame(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = definition.get_batch(batch_parameters={"dataframe": frame}).validate(suite, result_format=RESULTS)
        self._write(table, rows[0][ROW], outcome)
        # results come in any order: match them with the rules by name
        results: dict[str, Any] = {}
        for result in outcome.results:
            assert result.expectation_config is not None
            results[result.expectation_config.meta["rule"]] = result
        return [_rows(results[rule.name]) for rule in rules]

    def _write(self, table: str, first: int, outcome: Any) -> None:
        """Append the results of one batch, whose first row is number `first` of the table; the same rows give the same
        line."""
        outcome = outcome.to_json_dict()
        results = []
        for result in outcome["results"]:
            # without the ids that differ from run to run
            config = result["expectation_config"]
            config = {**config, "kwargs": {k: v for k, v in config["kwargs"].items() if k != "batch_id"}}
            config.pop("id", None)
            summary = {name: value for name, value in result["result"].items() if name not in EVERY_ROW}
            results.append({**result, "expectation_config": config, "result": summary})
        line = {
            "first_row": first,
            "success": outcome["success"],
            "statistics": outcome["statistics"],
            "results": results,
        }
        with (self._results / f"{table}.jsonl").open("a", encoding="utf-8") as file:
            file.write(strict_json(line) + "\n")


def strict_json(value: Any) -> str:
    """Return JSON in which infinite numbers and NaN, which JSON lacks, are strings."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=str), sort_keys=True)


def expectation_of(rule: Rule) -> gxe.Expectation:
    """Return the expectation that checks a rule."""
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
