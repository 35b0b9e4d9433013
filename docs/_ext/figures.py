"""Figures of README and docs, filled in from the files that they were measured in.

    python docs/_ext/figures.py                 # write every figure as its source has it
    python docs/_ext/figures.py --check         # name those that differ; `make docs` does this
    python docs/_ext/figures.py --sources DIR   # look for sources in DIR first

A source is a run bundle of docs/results/runs or a JSON file of benchmarks/results. docs/_figures has a TOML file for
each page with such figures: docs/_figures/results/scenes.toml for docs/results/scenes.md. For a part of a sentence:

    [[text]]
    text = "CIDEr is # (# to #)"        # each # is a number of the page, or a text in backquotes; once on the page
    figures = "a.run.zip scores[split=test][metric=CIDEr].value .1f; .low; .high"

For the first table or code block below a heading (`number = 2`: the second), with a string for each column. In a code
block a row is a line, and cells are separated by tabs or two spaces:

    [[table]]
    below = "Scores"
    source = "study.json results[arm=$row].test"
    rows = ["tden", "xgpt"]
    columns = ["", "nll.mean .3f", "cider.mean .1f"]

    $row, $2          what `rows` lists, without it the row's first cell; the row's second cell. `-` skips a row
    a.b c.0           a key or an index; keys may contain dots and spaces. `.low` replaces the end of the one before
    [key=value]       the entries of a list with this value; a further key is then that of each of them
    .mean             of a list: mean, median, min, max or sd (standard deviation)
    .1f +.3f ,.0f     format of a number; .0% of a share; .12s the first 12 characters; the next keys have it, too
    .1f/1e6 .2f*1000  divided or multiplied before
    _                 a number of a cell that the source does not have

Only numbers change, and texts (a caption; a hash in backquotes). All other words, units and bold type remain.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from vlp_models.contrib.bundles.run_bundle import LINEAGE, SUFFIX, open_bundle, parse_json
from vlp_models.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "docs" / "results" / "runs", ROOT / "benchmarks" / "results")
BINDINGS = Path("docs/_figures")
ENTRIES = {"text": {"text", "figures"}, "table": {"below", "number", "source", "rows", "columns"}}
FENCE = re.compile(r"^\s*(```+)[^`]*$")
HEADING = re.compile(r"^#+ +(.*?) *$")
SOURCE = re.compile(r"^[\w.$-]+(?:\.json|\.run\.zip)(?= |$)")
FORMAT = re.compile(r"^(?=[+,./*])(\+?,?(?:\.\d\d?)?[fs%]?)(?:([*/])(\d+(?:e\d)?))?$")
FILTER = re.compile(r"^\[([^=\]]+)=([^\]]*)\]")
DIGITS = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
NUMBER = re.compile(rf"(?<![\w.,/-]){DIGITS}(?![\w])")
SPAN = re.compile(r"`([^`]+)`")
LEAD = re.compile(r"^\s*(?:# )?(?:\.\.\. )?")  # of a comment in a console block
UNSAFE = re.compile(r"[`|<>\[\]\\\x00-\x1f\x7f]")  # in a text: would be read as Markdown
AGGREGATES: dict[str, Callable[[Iterable[float]], float]] = {
    "mean": lambda numbers: statistics.mean(numbers),
    "median": lambda numbers: statistics.median(numbers),
    "min": min,
    "max": max,
    "sd": lambda numbers: statistics.stdev(numbers),
}
SHOWN = 20


class FigureError(Exception):
    """A file of bindings cannot be read or does not fit its page, or a key is not in its source."""


@dataclass(frozen=True)
class Figure:
    """A figure of a page: its key, as it stands there (`old`) and as its source has it (`new`)."""

    location: str  # file and line
    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.location}: {self.old} is {self.new} in {self.key}"


@dataclass(frozen=True)
class Value:
    """What a key selects, formatted. text: not a number."""

    key: str
    shown: str
    text: bool


# ---- Sources ---------------------------------------------------------------------------------------------------------


@dataclass
class Sources:
    """Opened sources by file name. folders: where they are looked for, in this order."""

    folders: Sequence[Path] = FOLDERS
    opened: dict[str, Any] = field(default_factory=dict)

    def open(self, name: str) -> Any:
        if name not in self.opened:
            path = next((folder / name for folder in self.folders if (folder / name).is_file()), None)
            if path is None:
                raise FigureError(f"no source {name} in {', '.join(str(folder) for folder in self.folders)}")
            try:
                self.opened[name] = bundle_document(path) if name.endswith(SUFFIX) else json.loads(path.read_bytes())
            except (DataError, ValueError, RecursionError) as error:
                raise FigureError(f"{path}: {error}") from None
        return self.opened[name]


def bundle_document(path: Path) -> dict[str, Any]:
    """Return a bundle as keys: those of bundle.json (`weights`, ...), id, scores, params, lineage and predictions."""
    bundle = open_bundle(path)
    lineage = bundle.json(LINEAGE)
    predictions = {
        name.removeprefix("predictions-").removesuffix(".jsonl"): [parse_json(line) for line in content.splitlines()]
        for name, content in bundle.files.items()
        if name.startswith("predictions-")
    }
    document = {"id": bundle.id, "scores": bundle.json("scores.json"), "lineage": lineage, "predictions": predictions}
    return {**bundle.manifest, **document, "params": lineage.get("params", {})}


def select(value: Any, path: str) -> Any:
    """Return what a path selects in a JSON document.

    Raises:
        FigureError: a key is not there (the message has those that are), or the path ends at no single value.
    """
    rest = path
    while rest:
        value, rest = step(value, rest.removeprefix("."))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping):
        raise FigureError(f"{path} has the keys {listed(value)}")
    if isinstance(value, list):
        raise FigureError(f"{path} has {len(value)} values; add [key=value], an index or .{', .'.join(AGGREGATES)}")
    if value is None or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise FigureError(f"{path} is {json.dumps(value)}, which is not a figure")
    return value


def step(value: Any, path: str) -> tuple[Any, str]:
    """Follow the first part of a path; return what it selects and the rest of the path."""
    if isinstance(value, Mapping):
        keys = [key for key in value if path == key or path.startswith((f"{key}.", f"{key}["))]
        if not keys:
            raise FigureError(f"no key {path!r}; there are {listed(value)}")
        key = max(keys, key=len)
        return value[key], path[len(key) :]
    if not isinstance(value, list):
        raise FigureError(f"no key {path!r} in the value {json.dumps(value)[:60]}")
    if match := FILTER.match(path):
        entries = [entry for entry in value if isinstance(entry, Mapping) and str(entry.get(match[1])) == match[2]]
        if not entries:
            names = {str(entry.get(match[1])): None for entry in value if isinstance(entry, Mapping)}
            raise FigureError(f"no entry with {match[1]}={match[2]!r}; there are {listed(names)}")
        return entries, path[match.end() :]
    part, _, rest = path.partition(".")
    if part in AGGREGATES and value and all(isinstance(entry, int | float) for entry in value):
        return AGGREGATES[part](value), rest
    if re.fullmatch(r"-?\d{1,6}", part):
        if not -len(value) <= int(part) < len(value):
            raise FigureError(f"no entry {part}; there are {len(value)}")
        return value[int(part)], rest
    if not value:
        raise FigureError(f"no key {path!r} in an empty list")
    steps = [step(entry, path) for entry in value]
    return [selected for selected, _ in steps], steps[0][1]


def listed(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(repr(name) for name in names[:SHOWN]) + (f" and {len(names) - SHOWN} more" * (len(names) > SHOWN))


def show(value: Any, form: str) -> str:
    """Return a value in a format of the head of this file; the percent sign is the page's.

    Raises:
        FigureError: the value has no such format, or would change the page's Markdown.
    """
    match = FORMAT.match(form)
    spec, operator, operand = match.groups() if match else ("", "", "")
    try:
        if operator:
            value = value * float(operand) if operator == "*" else value / float(operand)
        shown = format(value, spec)
    except (TypeError, ValueError, OverflowError) as error:
        raise FigureError(f"{json.dumps(value)[:60]} in the format {form!r}: {error}") from None
    if isinstance(value, str) and (UNSAFE.search(shown) or not shown.strip()):
        raise FigureError(f"the text {shown[:60]!r} cannot be shown on a page")
    return shown.removesuffix("%")


# ---- Keys ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """Reads keys: `SOURCE PATH FORMAT; ...`, where all but the path may be absent."""

    sources: Sources
    source: str = ""
    prefix: str = ""

    def values(self, keys: str, replacements: Mapping[str, str] | None = None) -> list[Value | None]:
        """Return what the keys select; None for `_`. replacements: of $row and the like."""
        values: list[Value | None] = []
        source, prefix, path, form = self.source, self.prefix, "", ""
        for key in keys.split(";"):
            words = key.strip()
            if words == "_":
                values.append(None)
                continue
            if match := SOURCE.match(words):
                source, prefix, words = match[0], "", words[match.end() :].strip()
            name, _, last = words.rpartition(" ")
            if name and FORMAT.match(last):
                words, form = name, last
            path = path.rpartition(".")[0] + words if words.startswith(".") else joined(prefix, words)
            values.append(self._value(substituted(source, replacements), substituted(path, replacements), form))
        return values

    def _value(self, source: str, path: str, form: str) -> Value:
        if not source:
            raise FigureError("names no source (*.run.zip or *.json)")
        try:
            value = select(self.sources.open(source), path)
            return Value(f"{source} {path}", show(value, form), isinstance(value, str))
        except FigureError as error:
            raise FigureError(f"{source} {path}: {error}") from None


def joined(prefix: str, path: str) -> str:
    return f"{prefix}{'' if not prefix or path.startswith('[') else '.'}{path}"


def substituted(text: str, replacements: Mapping[str, str] | None) -> str:
    return re.sub(r"\$(row|\d)", lambda match: (replacements or {}).get(match[1], match[0]), text)


# ---- Pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A table or code block: its rows as offsets in the page and lines."""

    heading: str
    separator: re.Pattern[str]  # of the cells of a row
    rows: list[tuple[int, str]]


def find_blocks(text: str) -> list[Block]:
    """Return the tables and code blocks of a page, in order."""
    blocks: list[Block] = []
    heading, fence, in_table, offset = "", "", False, 0
    for line in text.split("\n"):
        match = FENCE.match(line)
        if fence:
            if match and match[1].startswith(fence) and line.strip() == match[1]:
                fence = ""
            else:
                blocks[-1].rows.append((offset, line))
        elif match:
            fence = match[1]
            blocks.append(Block(heading, re.compile(r"\t| {2,}"), []))
        elif line.startswith("|"):
            if not in_table:
                blocks.append(Block(heading, re.compile(r"\|"), []))
            blocks[-1].rows.append((offset, line))
        elif title := HEADING.match(line):
            heading = title[1]
        in_table = not fence and line.startswith("|")
        offset += len(line) + 1
    return blocks


@dataclass
class Page:
    """A page while its figures are filled in. edits: start and end in the text, and the new figure."""

    name: str
    text: str
    sources: Sources
    figures: list[Figure] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    edits: list[tuple[int, int, str]] = field(default_factory=list)

    def fill(self, bindings: Mapping[str, Any]) -> None:
        """Fill in the figures of a file of bindings; note an error for each binding that does not fit."""
        for kind, entries in bindings.items():
            for entry in entries if isinstance(entries, list) else [entries]:
                try:
                    if kind not in ENTRIES or not isinstance(entry, dict) or not entry.keys() <= ENTRIES[kind]:
                        raise FigureError(f"[[{kind}]] with other keys than [[text]] and [[table]] have")
                    self._fill_text(**entry) if kind == "text" else self._fill_table(**entry)
                except (FigureError, TypeError) as error:
                    self.errors.append(f"{self.name}: {error}")
        for start, end, new in sorted(self.edits, reverse=True):
            self.text = self.text[:start] + new + self.text[end:]

    def _fill_text(self, text: str, figures: str) -> None:
        # any white space of the page matches a space, so that a paragraph may be wrapped again
        parts = [re.escape(re.sub(r"\s+", " ", part)).replace("\\ ", r"\s+") for part in text.split("#")]
        pattern = parts[0]
        for before, after in pairwise(parts):
            quoted = before.endswith("`") and after.startswith("`")
            pattern += (r"([^`\n]+)" if quoted else rf"(?<![\w.])({DIGITS})(?!\d)") + after
        matches = list(re.finditer(pattern, self.text))
        if len(matches) != 1:
            raise FigureError(f"{text!r} occurs {len(matches)} times, not once")
        values = Keys(self.sources).values(figures)
        if len(values) != len(parts) - 1:
            raise FigureError(f"{len(values)} keys for {len(parts) - 1} figures in {text!r}")
        for index, value in enumerate(values, 1):
            self._replace(*matches[0].span(index), value)

    def _fill_table(
        self, below: str, columns: Sequence[str], source: str = "", rows: Sequence[str] = (), number: int = 1
    ) -> None:
        blocks = [block for block in find_blocks(self.text) if block.heading == below]
        if len(blocks) < number:
            raise FigureError(f"{len(blocks)} tables and code blocks below the heading {below!r}, not {number}")
        block = blocks[number - 1]
        table = block.separator.pattern == r"\|"
        lines = block.rows[2:] if table else block.rows
        if rows and len(rows) != len(lines):
            raise FigureError(f"{below!r} has {len(lines)} rows, not {len(rows)}")
        match = SOURCE.match(source)
        keys = Keys(self.sources, match[0] if match else "", source[match.end() :].strip() if match else source)
        for index, (offset, line) in enumerate(lines):
            name = rows[index] if rows else ""
            if name == "-":
                continue
            edges = [0, *(edge for match in block.separator.finditer(line) for edge in match.span()), len(line)]
            spans = list(zip(edges[::2], edges[1::2], strict=True))
            cells = [(offset + start, line[start:end]) for start, end in (spans[1:-1] if table else spans)]
            if len(cells) > len(columns) or (table and len(cells) < len(columns)):
                raise FigureError(f"{below!r}: a row has {len(cells)} cells, not {len(columns)}: {line}")
            words = [cell.strip(" *`") for _, cell in cells]
            replacements = {"row": name or words[0], **{str(n): word for n, word in enumerate(words, 1)}}
            for (start, cell), word, column in zip(cells, words, columns, strict=False):
                if column and word:
                    self._fill_cell(start, cell, keys.values(column, replacements))

    def _fill_cell(self, offset: int, cell: str, values: Sequence[Value | None]) -> None:
        if any(value and value.text for value in values):
            spans = [match.span(1) for match in SPAN.finditer(cell)]
            if not spans and (lead := LEAD.match(cell)):
                spans = [(lead.end(), len(cell.rstrip()))]  # the whole cell
        else:
            spans = [match.span() for match in NUMBER.finditer(cell)]
        if len(spans) != len(values):
            raise FigureError(f"{len(values)} keys for {len(spans)} figures in {cell.strip()!r}")
        for (start, end), value in zip(spans, values, strict=True):
            self._replace(offset + start, offset + end, value)

    def _replace(self, start: int, end: int, value: Value | None) -> None:
        if value is None:
            return
        edit = (start, end, value.shown)
        if any(start < other[1] and other[0] < end and other != edit for other in self.edits):
            raise FigureError(f"{self.text[start:end]!r} is bound to {value.key} and to another key")
        if edit not in self.edits:
            self.edits.append(edit)
        location = f"{self.name}:{self.text.count(chr(10), 0, start) + 1}"
        self.figures.append(Figure(location, value.key, self.text[start:end], value.shown))


def fill(bindings: Path, root: Path, sources: Sources) -> tuple[Path, Page]:
    """Return the page of a file of bindings with its figures filled in. The page is not written."""
    relative = bindings.relative_to(root / BINDINGS).with_suffix(".md")
    path = root / relative if str(relative) == "README.md" else root / "docs" / relative
    page = Page(str(path.relative_to(root)), path.read_text(encoding="utf-8") if path.exists() else "", sources)
    if not path.exists():
        page.errors.append(f"{bindings}: no page {path}")
        return path, page
    try:
        page.fill(tomllib.loads(bindings.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        page.errors.append(f"{bindings}: {error}")
    return path, page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill in the figures of README and docs from their sources.")
    parser.add_argument("--check", action="store_true", help="change no page; fail if a figure differs")
    parser.add_argument("--sources", type=Path, action="append", default=[], help="a folder to look for sources first")
    parser.add_argument("--root", type=Path, default=ROOT, help="of README.md and docs; default: this repository")
    options = parser.parse_args(arguments)
    sources = Sources([*options.sources, *FOLDERS])
    pages = [fill(path, options.root, sources) for path in sorted((options.root / BINDINGS).rglob("*.toml"))]
    figures = [figure for _, page in pages for figure in page.figures]
    different = [figure for figure in figures if figure.old != figure.new]
    errors = [error for _, page in pages for error in page.errors]
    if not options.check and not errors:
        for path, page in pages:
            if any(figure.old != figure.new for figure in page.figures):
                path.write_text(page.text, encoding="utf-8")
    for line in [*errors, *map(str, different)]:
        print(line)
    print(f"{len(figures)} figures on {len(pages)} pages, {len(different)} differ from their sources")
    if errors:
        print(f"{len(errors)} errors; no page was written")
    elif different:
        print("python docs/_ext/figures.py writes them" if options.check else "written")
    return int(bool(errors) or (options.check and bool(different)))


if __name__ == "__main__":
    sys.exit(main())
