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

For what no file has, the text as it was recorded, one part of the page a line; source: the command and date, or why
it is no measurement. `#` is a figure that another entry binds:

    [[recorded]]
    source = "make demo, 2026-11-27, two idle cores"
    texts = '''
    took 11 minutes on two cores
    '''

    $row, $2          what `rows` lists, without it the row's first cell; the row's second cell. `-` skips a row
    a.b c.0           a key or an index; keys may contain dots and spaces. `.low` replaces the end of the one before
    [key=a|b]         the entries of a list with one of these values; a further key is then that of each of them
    repository.json   counts of the code: families, tasks, bundles
    .mean             of a list: mean, median, min, max, sd (standard deviation) or count
    .1f +.3f ,.0f .4g format of a number; .0% of a share; .12s the first 12 characters; the next keys have it, too
    <.3f word         "< 0.001" for what is smaller; "five" for 5
    .1f/1e6 .2f*1000  divided or multiplied before
    _                 a number of a cell that the source does not have

Only figures change: numbers, counts in words, verdicts (supported, tied, ...), and texts (a caption; a hash in
backquotes). On the pages of COMPLETE, a figure outside of code that no entry binds is an error.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from vlp_models.contrib.bundles.run_bundle import LINEAGE, SUFFIX, open_bundle, parse_json
from vlp_models.errors import DataError
from vlp_models.models import FAMILIES
from vlp_models.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "docs" / "results" / "runs", ROOT / "benchmarks" / "results")
BINDINGS = Path("docs/_figures")
NAMES = BINDINGS / "names.toml"
COMPLETE = ("README.md", "docs/results/*.md", "docs/guides/comparing.md")
FENCE = re.compile(r"^\s*(```+)[^`]*$")
HEADING = re.compile(r"^#+ +(.*?) *$")
SOURCE = re.compile(r"^[\w.$-]+(?:\.json|\.run\.zip)(?= |$)")
FORMAT = re.compile(r"^(?=[+,./*<]|word$)(word|[+<]?,?(?:\.\d\d?)?[fgs%]?)(?:([*/])(-?\d+(?:e\d)?))?$")
FILTER = re.compile(r"^\[([^=\]]+)=([^\]]*)\]")
DIGITS = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
NUMBER = re.compile(rf"(?:< )?(?<![\w.,/-]){DIGITS}(?![\w])")
COUNTS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
# "one" is a count only before these
COUNTED = "annotator core epoch GPU hour image model photo round run seed thread"
SHARES = "half|(?<!the )third|thirds|quarters?|fifths?|sixth|tenths?|twelfth|(?<!at )once|twice"
LARGE = "hundreds?|thousands?|millions?"
VERDICTS = (
    "too small to matter|may matter|matters|supported|reversed|inconclusive|tied|decided|better|worse|ahead|behind|"
    "promote[sd]?|keeps?|refuses|accepts|beats?|lower|higher|(?:above|below)(?= the| those| \\d)|"
    "no (?:measurable |visible )?(?:gain|overhead|difference)"
)
ONE = rf"one(?= (?:{COUNTED.replace(' ', '|')})s?\b)"
YES = r"(?<=\| )(?:yes|no)(?= \|)"
WORDS = rf"\b(?:{'|'.join([*COUNTS[2:], ONE, SHARES, LARGE, VERDICTS, YES])})\b(?!-)"
# what a page states: a number that is not a part of a name (R@1, BLEU-4, float32), a count, a share or a verdict
CLAIM = re.compile(rf"(?<![\w@])(?<![A-Za-z]-)(?:(?:< )?[-+]?)\d+(?:[.,:]\d+)*|{WORDS}", re.IGNORECASE)
CODE = re.compile(
    r"^ *```(?:bash|mermaid|python|toml|yaml)\n.*?^ *```|`[^`\n]+`|\]\([^)\s]*\)", re.DOTALL | re.MULTILINE
)
SPAN = re.compile(r"`([^`]+)`")
LEAD = re.compile(r"^\s*(?:# )?(?:\.\.\. )?")  # of a comment in a console block
UNSAFE = re.compile(r"[`|<>\[\]\\\x00-\x1f\x7f]")  # in a text: would be read as Markdown
AGGREGATES: dict[str, Callable[[Iterable[Any]], float]] = {
    "mean": lambda numbers: statistics.mean(numbers),
    "median": lambda numbers: statistics.median(numbers),
    "min": min,
    "max": max,
    "sd": lambda numbers: statistics.stdev(numbers),
    "count": lambda entries: len(list(entries)),
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
            if name == "repository.json":
                self.opened[name] = count_repository()
                return self.opened[name]
            path = next((folder / name for folder in self.folders if (folder / name).is_file()), None)
            if path is None:
                raise FigureError(f"no source {name} in {', '.join(str(folder) for folder in self.folders)}")
            try:
                self.opened[name] = bundle_document(path) if name.endswith(SUFFIX) else json.loads(path.read_bytes())
            except (DataError, ValueError, RecursionError) as error:
                raise FigureError(f"{path}: {error}") from None
        return self.opened[name]


def count_repository() -> dict[str, int]:
    """Return what pages count of the code; the families are those of papers."""
    families = [name for name, target in FAMILIES.builtin.items() if ".contrib." not in target]
    return {"families": len(families), "tasks": len(TASKS), "bundles": len(list(FOLDERS[0].glob(f"*{SUFFIX}")))}


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
        if not keys and path == "count":
            return len(value), ""
        if not keys:
            raise FigureError(f"no key {path!r}; there are {listed(value)}")
        key = max(keys, key=len)
        return value[key], path[len(key) :]
    if not isinstance(value, list):
        raise FigureError(f"no key {path!r} in the value {json.dumps(value)[:60]}")
    if match := FILTER.match(path):
        names = match[2].split("|")
        entries = [entry for entry in value if isinstance(entry, Mapping) and str(entry.get(match[1])) in names]
        if not entries:
            present = {str(entry.get(match[1])): None for entry in value if isinstance(entry, Mapping)}
            raise FigureError(f"no entry with {match[1]}={match[2]!r}; there are {listed(present)}")
        return entries, path[match.end() :]
    part, _, rest = path.partition(".")
    if part == "count" or (part in AGGREGATES and value and all(isinstance(entry, int | float) for entry in value)):
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
        if spec == "word":
            shown = dict(enumerate(COUNTS))[value]
        elif spec.startswith("<"):
            shown = format(value, spec[1:])
            if not float(shown) and value > 0:
                shown = f"< {shown[:-1]}1"
        else:
            shown = format(value, spec)
    except (TypeError, ValueError, OverflowError, KeyError) as error:
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
    """A page while its figures are filled in.

    edits: start and end in the text, and the new figure. bound: start and end of what the bindings have, words and all.
    unbound: lines with claims that no binding has, on a page of COMPLETE.
    """

    name: str
    text: str
    sources: Sources
    figures: list[Figure] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    bound: list[tuple[int, int]] = field(default_factory=list)
    unbound: list[str] = field(default_factory=list)

    def fill(self, bindings: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> None:
        """Fill in the figures of a file of bindings; note an error for each binding that does not fit.

        names: of docs/_figures/names.toml.
        """
        fillers: dict[str, Callable[..., None]] = {
            "text": self._fill_text,
            "table": self._fill_table,
            "recorded": self._fill_recorded,
        }
        for kind, entries in bindings.items():
            for entry in entries if isinstance(entries, list) else [entries]:
                try:
                    if kind not in fillers or not isinstance(entry, dict):
                        raise FigureError(f"[[{kind}]] is none of {', '.join(fillers)}")
                    fillers[kind](**entry)
                except (FigureError, TypeError) as error:
                    self.errors.append(f"{self.name}: {error}")
        if any(Path(self.name).match(pattern) for pattern in COMPLETE):
            self._find_unbound([name for group in names.values() for name in group])
        for start, end, new in sorted(self.edits, reverse=True):
            self.text = self.text[:start] + new + self.text[end:]

    def _fill_text(self, text: str, figures: str) -> None:
        for match in self._find(text, 1, str(bindings_of(self.name))):
            values = Keys(self.sources).values(figures)
            if len(values) != text.count("#"):
                raise FigureError(f"{len(values)} keys for {text.count('#')} figures in {text!r}")
            for index, value in enumerate(values, 1):
                self._replace(*match.span(index), value)

    def _fill_recorded(self, source: str, texts: str) -> None:
        for text, count in Counter(filter(None, map(str.strip, texts.splitlines()))).items():
            self._find(text, count, source)

    def _find(self, text: str, count: int, source: str) -> list[re.Match[str]]:
        """Bind a text but for its `#`; return where it is. If one claim of it differs on the page, note that figure."""
        matches = list(phrase(text).finditer(self.text))
        for match in matches:
            figures = [match.span(index) for index in range(1, text.count("#") + 1)]
            edges = [match.start(), *(edge for span in figures for edge in span), match.end()]
            self.bound += zip(edges[::2], edges[1::2], strict=True)
        if len(matches) == count:
            return matches
        claims = [match[0] for match in re.finditer(rf"#|{CLAIM.pattern}", text, re.IGNORECASE)]
        near = []
        for match in phrase(CLAIM.sub("#", text)).finditer(self.text):
            pairs = enumerate(zip(match.groups(), claims, strict=True), 1)
            different = [index for index, (shown, claim) in pairs if claim not in ("#", shown)]
            near += [(match, different[0])] if len(different) == 1 else []
        if len(near) == 1:
            match, index = near[0]
            self._replace(*match.span(index), Value(source, claims[index - 1], text=True))
        else:
            self.errors.append(f"{self.name}: {text!r} occurs {len(matches)} times, not {count} ({source})")
        return []

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
        used = {match for text in (source, *columns) for match in re.findall(r"\$(row|\d)", text)}
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
            for number, ((start, cell), word, column) in enumerate(zip(cells, words, columns, strict=False), 1):
                try:
                    self._fill_cell(start, cell, keys.values(column, replacements) if column and word else [])
                except FigureError as error:
                    self.errors.append(f"{self._location(start)}: {error}")
                    self.bound.append((offset, offset + len(line)))  # one error for the row is enough
                    break
                if str(number) in used or (number == 1 and "row" in used and not rows):
                    self.bound.append((start, start + len(cell)))  # another word would select nothing

    def _fill_cell(self, offset: int, cell: str, values: Sequence[Value | None]) -> None:
        if not values:
            return
        if any(value and re.fullmatch(VERDICTS, value.shown) for value in values):
            spans = [match.span() for match in CLAIM.finditer(cell)]
        elif any(value and value.text for value in values):
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
        self.bound.append((start, end))
        old = self.text[start:end]
        new = value.shown.capitalize() if value.shown in COUNTS and old[:1].isupper() else value.shown
        edit = (start, end, new)
        if any(start < other[1] and other[0] < end and other != edit for other in self.edits):
            raise FigureError(f"{old!r} is bound to {value.key} and to another key")
        if edit not in self.edits:
            self.edits.append(edit)
        self.figures.append(Figure(self._location(start), value.key, old, new))

    def _location(self, offset: int) -> str:
        return f"{self.name}:{self.text.count(chr(10), 0, offset) + 1}"

    def _find_unbound(self, names: Iterable[str]) -> None:
        """Note the lines with claims that no binding has. names: phrases that claim nothing."""
        unclaimed = [CODE, *(phrase(name) for name in names)]
        bound = [*self.bound, *(match.span() for pattern in unclaimed for match in pattern.finditer(self.text))]
        lines: dict[str, list[str]] = {}
        for match in CLAIM.finditer(self.text):
            if not any(start <= match.start() < end for start, end in bound):
                lines.setdefault(self._location(match.start()), []).append(match[0])
        self.unbound = [
            f"{n}: no entry of {bindings_of(self.name)} has {', '.join(claims)}" for n, claims in lines.items()
        ]


@cache
def phrase(text: str) -> re.Pattern[str]:
    """Return a pattern of a part of a page, with a group for each `#`."""
    # any white space of the page matches a space, so that a paragraph may be wrapped again
    parts = [re.escape(re.sub(r"\s+", " ", part)).replace("\\ ", r"\s+") for part in text.split("#")]
    pattern = parts[0]
    for before, after in pairwise(parts):
        quoted = before.endswith("`") and after.startswith("`")
        pattern += (r"([^`\n]+)" if quoted else rf"(?<![\w.])((?:< )?{DIGITS}|(?i:{WORDS}))(?![.,]?\d)") + after
    return re.compile(pattern)


def bindings_of(name: str) -> Path:
    return (BINDINGS / name.removeprefix("docs/")).with_suffix(".toml")


def name_of(bindings: Path, root: Path) -> str:
    """Return the page of a file of bindings: a page of docs, or README.md and other files of the root."""
    stem = bindings.relative_to(root / BINDINGS).with_suffix("")
    return next((name for name in (f"{stem}.md", f"{stem}") if (root / name).is_file()), f"docs/{stem}.md")


def page_names(root: Path) -> list[str]:
    """Return README.md and the pages of docs that are complete or have bindings."""
    names = {str(path.relative_to(root)) for pattern in COMPLETE for path in root.glob(pattern)}
    names |= {name_of(path, root) for path in set((root / BINDINGS).rglob("*.toml")) - {root / NAMES}}
    return sorted(names)


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def fill(name: str, root: Path, sources: Sources) -> Page:
    """Return a page with its figures filled in. It is not written."""
    path, bindings = root / name, root / bindings_of(name)
    page = Page(name, path.read_text(encoding="utf-8") if path.exists() else "", sources)
    if not path.exists():
        page.errors.append(f"{bindings}: no page {path}")
        return page
    try:
        page.fill(read_toml(bindings), read_toml(root / NAMES))
    except tomllib.TOMLDecodeError as error:
        page.errors.append(f"{bindings}: {error}")
    return page


def faults(page: Page) -> list[str]:
    """Return what the check has to say about a page."""
    return [*page.errors, *(str(figure) for figure in page.figures if figure.old != figure.new), *page.unbound]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill in the figures of README and docs from their sources.")
    parser.add_argument("--check", action="store_true", help="change no page; fail if a figure differs")
    parser.add_argument("--sources", type=Path, action="append", default=[], help="a folder to look for sources first")
    parser.add_argument("--root", type=Path, default=ROOT, help="of README.md and docs; default: this repository")
    options = parser.parse_args(arguments)
    sources = Sources([*options.sources, *FOLDERS])
    pages = [fill(name, options.root, sources) for name in page_names(options.root)]
    figures = [figure for page in pages for figure in page.figures]
    different = sum(figure.old != figure.new for figure in figures)
    errors = sum(len(page.errors) for page in pages)
    unbound = sum(len(page.unbound) for page in pages)
    for line in [line for page in pages for line in faults(page)]:
        print(line)
    print(
        f"{len(figures)} figures on {len(pages)} pages, {different} differ from their sources; {unbound} lines without"
    )
    if errors:
        print(f"{errors} errors; no page was written")
    elif different and options.check:
        print("python docs/_ext/figures.py writes them into the pages")
    elif different:
        for page in pages:
            (options.root / page.name).write_text(page.text, encoding="utf-8")
        print("written")
    return int(bool(errors or unbound) or (options.check and bool(different)))


if __name__ == "__main__":
    sys.exit(main())
