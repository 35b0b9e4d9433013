"""validate: the door. The tables of every dataset, stacked; good rows go on, bad ones to quarantine with a reason.

Images are judged first, since every other row depends on one. The reports are written in any case; data/validated is
replaced only if no table lost more than `validate.max_bad_fraction` of its rows.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlp_models.data.boxed import write_boxed
from vlp_models.data.tables import ID_COLUMN, SPLITS, read_table, write_table
from vlp_models.duplicates.leaks import FILE, Copy, find_copies, where_else, write_copies
from vlp_models.duplicates.search import NearRules
from vlp_models.duplicates.sentences import Sentences
from vlp_models.errors import DataError
from vlp_models.params import Params, ValidateParams, to_plain
from vlp_models.validation.columns import derive
from vlp_models.validation.rules import Rule, rules_for
from vlp_models.workspace.paths import (
    Workspace,
    measured,
    need,
    output_directory,
    write_json,
    write_manifest,
)

Row = dict[str, Any]
EXAMPLES = 3


@dataclass(kw_only=True)
class _Verdict:
    """What became of one table."""

    rows: int  # records met, the unreadable ones included
    good: pa.Table
    quarantine: list[Row]
    bad: int  # rows lost; one may break several rules
    checked: dict[str, int] = field(default_factory=dict)  # rule -> rows it was asked about
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def bad_fraction(self) -> float:
        return self.bad / self.rows if self.rows else 0.0


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/validated, reports/validation.json and reports/data_docs.

    Raises:
        DataError: too many bad rows in a table, no good image at all, or a dataset that `prepare` has not seen.
    """
    with measured(workspace, "validate"):
        sources = [need(workspace.interim(name), f"prepare@{name}") for name in params.data]
        unreadable = [row for source in sources for row in read_table("quarantine", source).to_pylist()]
        copies = _copies(sources, params.validate)
        leaks = where_else(copies) if params.validate.near_duplicates.action == "set_aside" else {}
        verdicts = _judge(sources, unreadable, params.validate, workspace.reports / "data_docs", leaks)
        repeated = repeated_captions(verdicts["images"].good, verdicts["captions"].good)
        report = _report(verdicts, params.validate) | {"across_splits": {"copies": len(copies), **repeated}}
        write_json(workspace.reports / "validation.json", report)
        _refuse(verdicts, params.validate, workspace)
        good = set(verdicts["images"].good["image_id"].to_pylist())
        with output_directory(workspace.validated) as directory:
            for name, verdict in verdicts.items():
                write_table(verdict.good.to_pylist(), name, directory)
            write_copies(directory, copies)
            write_boxed(verdicts["images"].good, verdicts["objects"].good, directory)
            quarantine = [row for verdict in verdicts.values() for row in verdict.quarantine]
            quarantine += [row for row in unreadable if row["table"] not in verdicts]  # lines of ground truth
            write_table(quarantine, "quarantine", directory)
            truth = [line for source in sources for line in _truth(source, good)]
            if truth:
                (directory / "truth.jsonl").write_text("".join(truth), encoding="utf-8")
            counts: dict[str, Any] = {name: len(verdict.good) for name, verdict in verdicts.items()}
            write_manifest(
                directory,
                stage="validate",
                params={"validate": to_plain(params.validate), "sources": list(params.data)},
                counts=counts | {"quarantine": len(quarantine), "truth": len(truth)},
                splits=dict(sorted(Counter(verdicts["images"].good["split"].to_pylist()).items())),
            )
    for split, found in repeated["captions"].items():
        print(
            f"validate: of {found['captions']:,} captions of {split}, {found['equal']:,} are also in train, "
            f"{found['one_word_apart']:,} but for a word"
        )
    lost = sum(verdict.bad for verdict in verdicts.values())
    print(
        "validate: "
        + ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        + f"; {lost:,} rows in quarantine; {workspace.reports / 'data_docs' / 'index.html'}"
    )


def _copies(sources: list[Path], params: ValidateParams) -> list[Copy]:
    """Of pictures that are tested on, across all datasets (vlp_models/duplicates)."""
    splits: dict[str, str] = {}
    for source in sources:
        table = read_table("images", source, columns=["image_id", "split"])
        splits |= zip(table["image_id"].to_pylist(), table["split"].to_pylist(), strict=True)
    rules = NearRules(bits=params.near_duplicates.bits, keypoints=params.near_duplicates.keypoints)
    return find_copies([source / FILE for source in sources], splits.get, rules)


def repeated_captions(images: pa.Table, captions: pa.Table) -> dict[str, Any]:
    """Of each split that is tested on, how many of its captions are in train, too, or all but one word of them; the
    first of each as an example. They stay: short sentences meet by chance, and generated ones by design."""
    splits = dict(zip(images["image_id"].to_pylist(), images["split"].to_pylist(), strict=True))
    tested: dict[str, list[str]] = {split: [] for split in SPLITS[1:]}
    learnt = Sentences()
    for image_id, text in zip(captions["image_id"].to_pylist(), captions["text"].to_pylist(), strict=True):
        if splits[image_id] == SPLITS[0]:
            learnt.add(text)
        else:
            tested[splits[image_id]].append(text)
    found: dict[str, Any] = {}
    for split, texts in tested.items():
        like: dict[str, list[str]] = {"equal": [], "one word apart": []}
        for text in texts:
            if likeness := learnt.like(text):
                like[likeness].append(text)
        if texts:
            counts = {name.replace(" ", "_"): len(same) for name, same in like.items()}
            found[split] = {"captions": len(texts), **counts, "examples": {n: same[:1] for n, same in like.items()}}
    return {"captions": found}


def _judge(
    sources: list[Path], unreadable: list[Row], params: ValidateParams, docs: Path, leaks: Mapping[str, str]
) -> dict[str, _Verdict]:
    from vlp_models.validation.suites import Suites

    shutil.rmtree(docs, ignore_errors=True)
    suites = Suites(docs)
    verdicts: dict[str, _Verdict] = {}
    images: dict[str, Row] = {}
    bad_images: set[str] = set()
    for name in ID_COLUMN:  # images come first
        table = pa.concat_tables([read_table(name, source) for source in sources])
        rules = rules_for(name, params)
        rows = derive(name, table.to_pylist(), images, bad_images, leaks)
        broken = suites.check(name, rows, rules) if rows else [[] for _ in rules]
        set_aside = [row for row in unreadable if row["table"] == name]
        verdicts[name] = _verdict(name, table, rows, rules, broken, set_aside)
        if name == "images":
            images = {row["image_id"]: row for row in verdicts[name].good.to_pylist()}
            bad_images = {row["row_id"] for row in verdicts[name].quarantine} - images.keys()
    suites.build_docs()
    return verdicts


def _verdict(
    name: str, table: pa.Table, rows: list[Row], rules: list[Rule], broken: list[list[int]], set_aside: list[Row]
) -> _Verdict:
    """Sorts one table's rows; `set_aside` are those that could not even be read."""
    quarantine = list(set_aside)
    failed = Counter(row["rule"] for row in set_aside)
    for rule, numbers in zip(rules, broken, strict=True):
        failed[rule.name] += len(numbers)
        for number in numbers:
            row = rows[number]
            quarantine.append(
                {
                    "table": name,
                    "row_id": row[ID_COLUMN[name]],
                    "rule": rule.name,
                    "reason": rule.reason.format_map(row),
                    "provenance": row["provenance"],
                }
            )
    bad = {number for numbers in broken for number in numbers}
    total = len(rows) + len(set_aside)
    return _Verdict(
        rows=total,
        good=table.filter(pa.array([number not in bad for number in range(len(rows))], pa.bool_())),
        quarantine=quarantine,
        bad=len(bad) + len(set_aside),
        checked=dict.fromkeys(failed, total) | {rule.name: len(rows) for rule in rules},
        failed=failed,
    )


def _report(verdicts: dict[str, _Verdict], params: ValidateParams) -> dict[str, Any]:
    return {
        "tables": {
            name: {
                "rows": verdict.rows,
                "good": len(verdict.good),
                "bad": verdict.bad,
                "bad_percent": round(100 * verdict.bad_fraction, 3),
            }
            for name, verdict in verdicts.items()
        },
        "max_bad_percent": round(100 * params.max_bad_fraction, 3),
        "rules": [
            {"table": name, "rule": rule, "checked": checked, "failed": verdict.failed[rule]}
            for name, verdict in verdicts.items()
            for rule, checked in verdict.checked.items()
        ],
    }


def _refuse(verdicts: dict[str, _Verdict], params: ValidateParams, workspace: Workspace) -> None:
    lines: list[str] = []
    for name, verdict in verdicts.items():
        if verdict.bad_fraction <= params.max_bad_fraction:
            continue
        lines.append(f"  {name}: {verdict.bad:,} of {verdict.rows:,} rows are bad ({verdict.bad_fraction:.2%})")
        lines += [f"    {rule}: {count:,}" for rule, count in verdict.failed.most_common() if count]
        for row in _examples(verdict.quarantine):
            lines.append(f"    e.g. {row['row_id'] or '(no id)'} ({row['provenance']}): {row['rule']}: {row['reason']}")
    if not len(verdicts["images"].good):
        lines.append("  images: no good one is left")
    if lines:
        docs = workspace.reports / "data_docs" / "index.html"
        raise DataError(
            f"validate: more bad rows than validate.max_bad_fraction allows ({params.max_bad_fraction:.2%}):\n"
            + "\n".join(lines)
            + f"\n  All rules: {workspace.reports / 'validation.json'} and {docs}."
            + "\n  Correct the source, or raise validate.max_bad_fraction to go on without these rows;"
            + " data/validated is as it was."
        )


def _examples(quarantine: list[Row]) -> list[Row]:
    """The first row of each rule, then the others."""
    first: dict[str, Row] = {}
    for row in quarantine:
        first.setdefault(row["rule"], row)
    others = [row for row in quarantine if row is not first[row["rule"]]]
    return [*first.values(), *others][:EXAMPLES]


def _truth(source: Path, good_images: set[str]) -> Iterator[str]:
    path = source / "truth.jsonl"
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if json.loads(line)["image_id"] in good_images:
                yield line
