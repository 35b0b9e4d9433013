"""validate: stack the tables of all datasets, and split them into good rows and quarantined ones with a reason.

Images are checked first, since every other row depends on one. Rows are streamed in batches, so memory does not grow
with their number. Reports are always written; data/validated is replaced only if no table lost more than
`validate.max_bad_fraction` of its rows. A caption that its image already has is dropped and counted; it is not bad.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vlp_models.common.device import cpu_count
from vlp_models.common.executors import Mapper
from vlp_models.common.io import output_directory, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace, require_output, write_manifest
from vlp_models.curation.duplicates.leakage import (
    FINGERPRINTS,
    Leak,
    compare_sentences,
    find_leaks,
    leaking_images,
    write_leaks,
)
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.curation.validation import FLAGS, VALIDATION_PAGES
from vlp_models.curation.validation.columns import add_derived_columns
from vlp_models.curation.validation.cross_row_facts import Crossing
from vlp_models.curation.validation.rules import Rule, rules_for
from vlp_models.data.formats.base import TRUTH
from vlp_models.data.joins import Database, write_boxed
from vlp_models.data.tables import BATCH_ROWS, ID_COLUMN, LANGUAGES, SPLITS, TableWriter, read_batches
from vlp_models.errors import DataError, MissingToolError
from vlp_models.params import Params, ValidateParams, to_plain
from vlp_models.pipeline.engines import cluster_mapper

if TYPE_CHECKING:
    from vlp_models.curation.validation.suites import SuiteRunner

logger = get_logger(__name__)

Row = dict[str, Any]
EXAMPLES = 3  # in the error
EXAMPLES_OF_RULE, LONGEST = 20, 300  # bad rows that are kept for the page, characters of a value of theirs
# Rules whose rows are bad only because their image is, which is listed on its own.
CONSEQUENCES = ("image_good", "other_images_good")
PAGE, REPORT = "validation.html", "validation.json"
SUITES = "vlp_models.curation.validation.suites"
REPEATED = "repeated captions of a training image"
MAX_PROCESSES = 8  # for the search of near-duplicates, with about 300 MB each
BATCH = 65_536  # rows that are held as Python objects and checked at once


@dataclass(kw_only=True)
class TableResult:
    """The outcome for one table."""

    rows: int = 0  # records, including unreadable ones
    good: int = 0
    bad: int = 0  # rows lost; a row may break several rules
    repeated: int = 0  # captions that their training image already has: dropped, but not bad
    checked: dict[str, int] = field(default_factory=dict)  # rule -> rows it was checked on
    failed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Row]] = field(default_factory=dict)  # rule -> its first quarantined rows
    splits: Counter[str] = field(default_factory=Counter)  # split -> good images

    @property
    def bad_fraction(self) -> float:
        return self.bad / self.rows if self.rows else 0.0

    def first_examples(self, limit: int) -> list[Row]:
        """Return up to `limit` quarantined rows: the first of each rule, then others."""
        of_rules = self.examples.values()
        return [*(rows[0] for rows in of_rules), *(row for rows in of_rules for row in rows[1:])][:limit]

    def quarantine(self, row: Row) -> None:
        self.failed[row["rule"]] += 1
        examples = self.examples.setdefault(row["rule"], [])
        if len(examples) < EXAMPLES_OF_RULE:
            examples.append({name: shorten(value) for name, value in row.items()})


def shorten(value: str | None) -> str | None:
    """Return a value from the data with at most `LONGEST` characters."""
    return value if value is None or len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/validated, reports/validation.json, reports/validation_results and the page (VALIDATION_PAGES).

    Raises:
        DataError: too many bad rows in a table, no good image, or a dataset that `prepare` has not read.
    """
    refused = workspace.work("validate", "refused") / "quarantine.parquet"
    refused.unlink(missing_ok=True)  # of an earlier run
    # one folder per dataset
    sources = [require_output(workspace.interim(name), f"prepare@{name}") for name in params.data]
    duplicates = _find_near_duplicates(sources, params.validate, cluster_mapper(params, workspace))
    # image id -> what it is a copy of, which a rule of the images table reports
    leaks = leaking_images(duplicates) if params.validate.near_duplicates.action == "quarantine" else {}
    flagged: dict[str, str] = {}
    for target in FLAGS.values():
        flagged |= import_target(target)(params.validate, workspace.root)
    # Tables are checked into a new data/validated, which replaces the old one only if the data is not refused.
    with output_directory(workspace.validated) as directory:
        results = _check_tables(sources, params.validate, workspace, directory, {"images": leaks, "captions": flagged})
        captions_in_train = _captions_in_train(directory)
        left_out = {REPEATED: results["captions"].repeated} if results["captions"].repeated else {}
        report = _report(results, params.validate) | {
            "left_out": left_out,
            "across_splits": {"near_duplicates": len(duplicates), "captions": captions_in_train},
        }
        # The reports come first: they explain data that is refused, too.
        write_json(workspace.reports / REPORT, report)
        for target in VALIDATION_PAGES.values():
            import_target(target)(workspace.reports / PAGE, params, results, report, duplicates)
        _refuse(results, params.validate, workspace, sources, directory, refused)
        # What later stages read besides the tables
        write_leaks(directory, duplicates)
        write_boxed(directory)
        counts: dict[str, Any] = {name: result.good for name, result in results.items()}
        counts["quarantine"] = _join_quarantine(sources, directory)
        counts["truth"] = _write_lines(sources, directory, TRUTH)
        counts["left_out"] = left_out
        if languages := _write_lines(sources, directory, LANGUAGES):
            counts["languages"] = languages
        write_manifest(
            directory,
            stage="validate",
            params={"validate": to_plain(params.validate), "sources": list(params.data)},
            counts=counts,
            splits=dict(sorted(results["images"].splits.items())),
        )
    if captions_in_train:
        described = []
        for split, numbers in captions_in_train.items():
            described.append(
                f"{numbers['equal']:,} of {numbers['captions']:,} in {split} "
                f"({numbers['one_word_apart']:,} with one word changed)"
            )
        logger.info("validate: captions that are also in train: %s", ", ".join(described))
    for kind, number in left_out.items():
        logger.info("validate: %s %s left out", f"{number:,}", kind)
    logger.info(
        "validate: %s; %s rows in quarantine; %s",
        ", ".join(f"{result.good:,} {name}" for name, result in results.items() if result.good),
        f"{sum(result.bad for result in results.values()):,}",
        workspace.reports / (PAGE if VALIDATION_PAGES else REPORT),
    )


def _find_near_duplicates(sources: list[Path], params: ValidateParams, mapper: Mapper | None) -> list[Leak]:
    """Return near-duplicates of test images across all datasets (vlp_models/curation/duplicates)."""
    tested = _test_images(_files(sources, "images"))
    rules = NearRules.of(params.near_duplicates)
    files = [source / FINGERPRINTS for source in sources]
    # Great Expectations takes seconds to import: meanwhile other processes search.
    with ThreadPoolExecutor(1) as pool:
        imported = pool.submit(import_module, SUITES)
        leaks = find_leaks(files, tested, rules, workers=cpu_count(MAX_PROCESSES), mapper=mapper)
    try:
        imported.result()  # a second import would find some of its packages loaded, and fail with another error
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise MissingToolError(f"great_expectations: its import failed: {type(error).__name__}: {error}") from error
    return leaks


def _test_images(files: list[Path]) -> dict[str, str]:
    """Return image id -> split for the images outside of train: few, compared to the training images."""
    split_of: dict[str, str] = {}
    for table in read_batches(files, BATCH_ROWS, ["image_id", "split"]):
        rows = zip(table["image_id"].to_pylist(), table["split"].to_pylist(), strict=True)
        split_of |= {image: split for image, split in rows if split in SPLITS[1:]}
    return split_of


def _captions_in_train(directory: Path) -> dict[str, Any]:
    """Return how many captions of each test split are also in train, exactly or except for one word, with an example.

    They are kept: short sentences coincide by chance, and generated ones by design.
    """
    tested = _test_images(_files([directory], "images"))

    def captions() -> Iterator[tuple[str, str]]:
        for table in read_batches(_files([directory], "captions"), BATCH_ROWS, ["image_id", "text"]):
            for image, text in zip(table["image_id"].to_pylist(), table["text"].to_pylist(), strict=True):
                yield tested.get(image, SPLITS[0]), text

    # captions of val and test in memory, those of train streamed past them
    test_captions = [entry for entry in captions() if entry[0] != SPLITS[0]]
    likenesses = compare_sentences(
        [text for _, text in test_captions], (text for split, text in captions() if split == SPLITS[0])
    )
    counts: dict[str, Any] = {}
    for name in SPLITS[1:]:
        rows = [
            (text, likeness) for (split, text), likeness in zip(test_captions, likenesses, strict=True) if split == name
        ]
        if not rows:
            continue
        counts[name] = {"captions": len(rows), "examples": {}}
        for kind in ("equal", "one word apart"):
            texts = [text for text, likeness in rows if likeness == kind]
            counts[name][kind.replace(" ", "_")] = len(texts)
            counts[name]["examples"][kind] = texts[:1]
    return counts


def _check_tables(
    sources: list[Path],
    params: ValidateParams,
    workspace: Workspace,
    directory: Path,
    reasons: Mapping[str, Mapping[str, str]],
) -> dict[str, TableResult]:
    """Write the good rows of each table to `directory`, and the others to one quarantine per table."""
    from vlp_models.curation.validation.suites import SuiteRunner

    raw_results = workspace.reports / "validation_results"  # of Great Expectations
    shutil.rmtree(raw_results, ignore_errors=True)
    suites = SuiteRunner(raw_results)
    results: dict[str, TableResult] = {}
    with Crossing.within(directory) as crossing:
        for name in ID_COLUMN:  # images first
            with (
                TableWriter(name, directory) as good,
                TableWriter("quarantine", _quarantine_folder(directory, name)) as quarantine,
            ):
                rules = rules_for(name, params)
                results[name] = _check_table(
                    name, sources, rules, suites, crossing, reasons.get(name, {}), good, quarantine
                )
            # The other tables' rows are checked against the images, good and quarantined.
            if name == "images":
                crossing.load_images(good.path, quarantine.path)
    return results


def _check_table(
    name: str,
    sources: list[Path],
    rules: list[Rule],
    suites: SuiteRunner,
    crossing: Crossing,
    reasons: Mapping[str, str],
    good: TableWriter,
    quarantine: TableWriter,
) -> TableResult:
    """Split one table's rows into good and quarantined ones."""
    result = TableResult()
    # Records that `prepare` could not read count as bad rows.
    for row in _unreadable(sources):
        if row["table"] == name:
            quarantine.append(row)
            result.quarantine(row)
            result.bad += 1
    # So far the counts are those of `prepare`; the rows below are numbered from 0.
    unread, failed_unread, start = result.bad, result.failed.copy(), 0
    files = _files(sources, name)
    for table, facts in zip(read_batches(files, BATCH), crossing.facts(name, files, BATCH), strict=True):
        rows = add_derived_columns(name, table.to_pylist(), facts, start, reasons)
        # Captions that their image has already are dropped; they break no rule. Val and test keep them: a public
        # test's CIDEr is the mean over all references, equal ones too.
        tested = {image_id for image_id, image in facts.images.items() if image["split"] in ("val", "test")}
        repeated = {row["row"] for row in rows if row.get("same_as") and row["image_id"] not in tested}
        checked = [row for row in rows if row["row"] not in repeated]
        # rule -> numbers of the rows, in the whole table, that break it
        broken = suites.check(name, checked, rules) if checked else [[] for _ in rules]
        for rule, numbers in zip(rules, broken, strict=True):
            for number in numbers:
                row = rows[number - start]
                entry = {
                    "table": name,
                    "row_id": row[ID_COLUMN[name]],
                    "rule": rule.name,
                    "reason": rule.reason.format_map(row),
                    "provenance": row["provenance"],
                }
                # a row that breaks several rules has an entry for each
                quarantine.append(entry)
                result.quarantine(entry)
        bad = {number for numbers in broken for number in numbers}
        # bool (rows,): in the order of the table, to filter it at once.
        is_good = pa.array(
            [number not in bad and number not in repeated for number in range(start, start + len(rows))], pa.bool_()
        )
        good_rows = table.filter(is_good)
        if name == "images":
            result.splits.update(good_rows["split"].to_pylist())
        good.write(good_rows)
        result.bad += len(bad)
        result.repeated += len(repeated)
        start += len(rows)
    result.rows, result.good = start + unread, len(good)
    # Reading checked every record; a rule that `prepare` applies, too, was also checked on the rows it refused there.
    result.checked = dict.fromkeys(failed_unread, result.rows)
    for rule in rules:
        result.checked[rule.name] = start - result.repeated + failed_unread[rule.name]
    return result


def _report(results: dict[str, TableResult], params: ValidateParams) -> dict[str, Any]:
    return {
        "tables": {
            name: {
                "rows": result.rows,
                "good": result.good,
                "bad": result.bad,
                "bad_percent": round(100 * result.bad_fraction, 3),
            }
            for name, result in results.items()
        },
        "max_bad_percent": round(100 * params.max_bad_fraction, 3),
        "rules": [
            {"table": name, "rule": rule, "checked": checked, "failed": result.failed[rule]}
            for name, result in results.items()
            for rule, checked in result.checked.items()
        ],
    }


def _refuse(
    results: dict[str, TableResult],
    params: ValidateParams,
    workspace: Workspace,
    sources: list[Path],
    directory: Path,
    refused: Path,
) -> None:
    """Refuse the data if too many rows are bad, and keep the bad rows in the file `refused`, to be fixed."""
    lines: list[str] = []
    # one paragraph per refused table: its counts, its rules, some of its rows
    for name, result in results.items():
        if result.bad_fraction <= params.max_bad_fraction:
            continue
        lines.append(f"  {name}: {result.bad:,} of {result.rows:,} rows are bad ({result.bad_fraction:.2%})")
        lines += [f"    {rule}: {count:,}" for rule, count in result.failed.most_common() if count]
        # What the images are refused for is listed with them, not again with every row that names one.
        for row in result.first_examples(EXAMPLES):
            if row["rule"] in CONSEQUENCES:
                continue
            lines.append(f"    e.g. {row['row_id'] or '(no id)'} ({row['provenance']}): {row['rule']}: {row['reason']}")
    if not results["images"].good:
        lines.append("  images: no good row is left")
    # The quarantine is what the user has to fix: it outlives the output directory.
    if lines:
        _join_quarantine(sources, directory)
        shutil.move(directory / "quarantine.parquet", refused)  # .work may be another file system
        raise DataError(
            f"validate: more bad rows than validate.max_bad_fraction allows ({params.max_bad_fraction:.2%}):\n"
            + "\n".join(lines)
            + f"\n  All rules: {workspace.reports / (PAGE if VALIDATION_PAGES else REPORT)}."
            + f" All bad rows: {refused}."
            + "\n  Correct the source, or raise validate.max_bad_fraction to continue without these rows;"
            + " data/validated is unchanged."
        )


def _files(sources: list[Path], name: str) -> list[Path]:
    paths = (source / f"{name}.parquet" for source in sources)
    return [path for path in paths if path.exists()]


def _unreadable(sources: list[Path]) -> Iterator[Row]:
    for table in read_batches(_files(sources, "quarantine"), BATCH_ROWS):
        yield from table.to_pylist()


def _quarantine_folder(directory: Path, name: str) -> Path:
    """Return the folder of one table's quarantine, until all are joined."""
    folder = directory / ".quarantine" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _join_quarantine(sources: list[Path], directory: Path) -> int:
    """Join the quarantines of all tables, and add the unreadable lines of ground truth, which have no table."""
    parts = [_quarantine_folder(directory, name) / "quarantine.parquet" for name in ID_COLUMN]
    # in the order of tables
    with TableWriter("quarantine", directory) as writer:
        for table in read_batches(parts, BATCH_ROWS):
            writer.write(table)
        writer.extend(row for row in _unreadable(sources) if row["table"] not in ID_COLUMN)
    shutil.rmtree(directory / ".quarantine")
    return len(writer)


def _write_lines(sources: list[Path], directory: Path, name: str) -> int:
    """Write the lines of a file (ground truth, languages) on good images, if there are any; return their number."""
    files = [source / name for source in sources if (source / name).exists()]
    if not files:
        return 0
    # joined with the good images on disk: neither fits into memory
    schema = pa.schema([("number", pa.int64()), ("image_id", pa.string()), ("line", pa.string())])
    count = 0
    with Database.within(directory) as database:
        database.load("truth", _numbered_lines(files, schema), schema)
        images = directory / "images.parquet"
        database.load(
            "images", read_batches([images], BATCH_ROWS, ["image_id"]), pa.schema([("image_id", pa.string())])
        )
        query = "SELECT line FROM truth t SEMI JOIN images i ON t.image_id = i.image_id ORDER BY number"
        for piece in database.stream(query):
            with (directory / name).open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(piece["line"].to_pylist())
            count += len(piece)
    return count


def _numbered_lines(files: list[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield tables of the JSON lines of files, numbered across them, with the ids of their images."""
    number = 0
    for path in files:
        with path.open(encoding="utf-8", newline="\n") as file:
            while lines := list(islice(file, BATCH_ROWS)):
                ids = [json.loads(line)["image_id"] for line in lines]
                numbers = range(number, number + len(lines))
                yield pa.table([numbers, ids, lines], schema=schema)
                number += len(lines)
