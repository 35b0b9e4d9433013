"""Figures of README and docs, filled in from the files that they were measured in.

    python docs/_ext/figures.py                 # write every figure as its source has it
    python docs/_ext/figures.py --check         # name those that differ; `make docs` does this
    python docs/_ext/figures.py --sources DIR   # look for sources in DIR first

A source is a run bundle of docs/results/runs or a JSON file of benchmarks/results. A page names it in an HTML comment,
which is not visible. On a line, the comment follows its figures, one key for each:

    CIDEr is 151.2 (141.5 to 162.3)<!-- figures: a.run.zip scores[split=test][metric=CIDEr].value .1f; .low; .high -->

Above a table, it has one cell for each column:

    <!-- figures: study.json results[arm=$row].test
    rows: tden; xgpt
    | | nll.mean .3f | cider.mean .1f |
    -->
    | | NLL | CIDEr |
    |---|---|---|
    | TDEN | 1.648 | 64.7 |
    | XGPT | 1.293 | 47.8 |

Above a code block, a row is a line and cells are separated by tabs or two spaces.

    $row, $2          what `rows:` lists, without it the row's first cell; the row's second cell. `-` skips a row
    a.b c.0           a key or an index; keys may contain dots and spaces. `.low` replaces the end of the one before
    [key=value]       the entries of a list with this value; a further key is then that of each of them
    .mean             of a list: mean, median, min, max or sd (standard deviation)
    .1f +.3f ,.0f     format of a number; .0% of a share; .12s the first 12 characters; the next keys have it, too
    .1f/1e6 .2f*1000  divided or multiplied before
    _                 a number that the source does not have

Only numbers change, and texts (a caption; a hash in backquotes). All other words, units and bold type remain.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.contrib.bundles.run_bundle import LINEAGE, SUFFIX, open_bundle, parse_json
from vlp_models.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "docs" / "results" / "runs", ROOT / "benchmarks" / "results")
OPEN, CLOSE = "<!-- figures:", "-->"
INLINE = re.compile(rf"{OPEN}(.*?){CLOSE}")
COMMENT = re.compile(r"<!--\s*figures:")  # as somebody may write it
FENCE = re.compile(r"^\s*(```+)[^`]*$")
SOURCE = re.compile(r"^[\w.$-]+(?:\.json|\.run\.zip)(?= |$)")
FORMAT = re.compile(r"^(?=[+,./*])(\+?,?(?:\.\d\d?)?[fs%]?)(?:([*/])(\d+(?:e\d)?))?$")
FILTER = re.compile(r"^\[([^=\]]+)=([^\]]*)\]")
NUMBER = re.compile(r"(?<![\w.,/-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
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
    """A comment cannot be read, or its key is not in the source."""


@dataclass(frozen=True)
class Figure:
    """A figure of a page: its key, as it stands there (`old`) and as its source has it (`new`)."""

    place: str  # file and line
    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.place}: {self.old} is {self.new} in {self.key}"


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
        found = [entry for entry in value if isinstance(entry, Mapping) and str(entry.get(match[1])) == match[2]]
        if not found:
            there = {str(entry.get(match[1])): None for entry in value if isinstance(entry, Mapping)}
            raise FigureError(f"no entry with {match[1]}={match[2]!r}; there are {listed(there)}")
        return found, path[match.end() :]
    part, _, rest = path.partition(".")
    if part in AGGREGATES and value and all(isinstance(one, int | float) for one in value):
        return AGGREGATES[part](value), rest
    if re.fullmatch(r"-?\d{1,6}", part):
        if not -len(value) <= int(part) < len(value):
            raise FigureError(f"no entry {part}; there are {len(value)}")
        return value[int(part)], rest
    if not value:
        raise FigureError(f"no key {path!r} in an empty list")
    each = [step(entry, path) for entry in value]
    return [found for found, _ in each], each[0][1]


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
    """Reads the keys of a comment: `SOURCE PATH FORMAT; ...`, where all but the path may be absent."""

    sources: Sources
    source: str = ""
    prefix: str = ""

    def values(self, keys: str, replacements: Mapping[str, str] | None = None) -> list[Value | None]:
        """Return what the keys select; None for `_`. replacements: of $row and the like."""
        found: list[Value | None] = []
        source, prefix, path, form = self.source, self.prefix, "", ""
        for key in keys.split(";"):
            words = key.strip()
            if words == "_":
                found.append(None)
                continue
            if own := SOURCE.match(words):
                source, prefix, words = own[0], "", words[own.end() :].strip()
            name, _, last = words.rpartition(" ")
            if name and FORMAT.match(last):
                words, form = name, last
            path = path.rpartition(".")[0] + words if words.startswith(".") else joined(prefix, words)
            found.append(self._value(substituted(source, replacements), substituted(path, replacements), form))
        return found

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


@dataclass
class Page:
    """A page while its figures are filled in. figures: those found so far; errors: of its comments."""

    name: str
    lines: list[str]
    sources: Sources
    figures: list[Figure] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def fill(self) -> None:
        """Fill in the figures of all comments outside of code blocks."""
        number, fence = 0, ""
        while number < len(self.lines):
            line = self.lines[number]
            match = FENCE.match(line)
            if fence:
                fence = "" if match and match[1].startswith(fence) and line.strip() == match[1] else fence
            elif match:
                fence = match[1]
            elif line.startswith(OPEN):
                number = self._fill_block(number)
            else:
                self._guard(number, functools.partial(self._fill_line, number))
            number += 1
        if fence:
            self.errors.append(f"{self.name}: a code block without its end {fence}")

    def _guard(self, number: int, action: Callable[[], None]) -> None:
        """Do something for a line; note an error with the line's number."""
        try:
            action()
        except FigureError as error:
            self.errors.append(f"{self.name}:{number + 1}: {error}")

    def _fill_line(self, number: int) -> None:
        """Fill in the figures before each comment of a line."""
        line = self.lines[number]
        with_next = "\n".join(self.lines[number : number + 2])
        comments = [match for match in COMMENT.finditer(with_next) if match.start() < len(line)]
        if len(comments) != len(INLINE.findall(line)):
            raise FigureError(f"a comment is read as `{OPEN} ... {CLOSE}` on one line, or from the start of a line")
        done, rest = "", self.lines[number]
        while match := INLINE.search(rest):
            before, cell = rest[: match.start()], 0
            if self.lines[number].startswith("|"):
                cell = before.rfind("|") + 1
            values = Keys(self.sources).values(match[1])
            done += before[:cell] + self._replace(number, before[cell:], values, last=True) + match[0]
            rest = rest[match.end() :]
        self.lines[number] = done + rest

    def _fill_block(self, start: int) -> int:
        """Fill in the table or code block below a comment; return the comment's last line."""
        end = next((n for n in range(start, len(self.lines)) if CLOSE in self.lines[n]), None)
        if end is None:
            self.errors.append(f"{self.name}:{start + 1}: a comment without {CLOSE}")
            return len(self.lines)
        text, _, after = "\n".join(self.lines[start : end + 1]).removeprefix(OPEN).partition(CLOSE)
        if after.strip():
            self.errors.append(f"{self.name}:{end + 1}: {after.strip()!r} after a comment for the block below")
        self._guard(start, functools.partial(self._fill_rows, text, end + 1))
        return end

    def _fill_rows(self, comment: str, first: int) -> None:
        head, *others = [line.strip() for line in comment.strip().splitlines()]
        source = SOURCE.match(head)
        keys = Keys(self.sources, source[0] if source else "", head[source.end() :].strip() if source else head)
        columns = [cell.strip() for line in others if line.startswith("|") for cell in line.strip("|").split("|")]
        names = [name.strip() for line in others if line.startswith("rows:") for name in line[5:].split(";")]
        if not columns:
            raise FigureError("names no columns (a line | ... | ... |) for the table or code block below")
        rows, separator = self._rows(first)
        if names and len(names) != len(rows):
            raise FigureError(f"names {len(names)} rows; there are {len(rows)}")
        for at, number in enumerate(rows):
            name = names[at] if names else ""
            if name != "-":
                self._guard(number, functools.partial(self._fill_row, number, separator, name, keys, columns))

    def _rows(self, first: int) -> tuple[list[int], re.Pattern[str]]:
        """Return the numbers of the lines of the table or code block at a line, and what separates their cells."""
        while first < len(self.lines) and self.lines[first].startswith(OPEN):  # a further comment for the same block
            first = next((n for n in range(first, len(self.lines)) if CLOSE in self.lines[n]), first) + 1
        opening = self.lines[first] if first < len(self.lines) else ""
        if opening.startswith("|"):
            end = next((n for n in range(first, len(self.lines)) if not self.lines[n].startswith("|")), len(self.lines))
            return list(range(first + 2, end)), re.compile(r"(\|)")
        if opening.startswith("```"):
            end = next((n for n in range(first + 1, len(self.lines)) if self.lines[n].startswith("```")), first)
            return list(range(first + 1, end)), re.compile(r"(\t| {2,})")
        raise FigureError("is not above a table or code block")

    def _fill_row(self, number: int, separator: re.Pattern[str], name: str, keys: Keys, columns: list[str]) -> None:
        """Fill in the cells of a row that are not empty."""
        parts = separator.split(self.lines[number])  # cells at even places
        table = separator.pattern == r"(\|)"
        cells = list(range(2, len(parts) - 1, 2)) if table else list(range(0, len(parts), 2))
        if len(cells) > len(columns) or (table and len(cells) < len(columns)):
            raise FigureError(f"the row has {len(cells)} cells, the comment {len(columns)} columns")
        texts = [parts[at].strip(" *`") for at in cells]
        replacements = {"row": name or texts[0], **{str(n): text for n, text in enumerate(texts, 1)}}
        for at, text, column in zip(cells, texts, columns, strict=False):
            if column and text:
                parts[at] = self._replace(number, parts[at], keys.values(column, replacements), last=False)
        self.lines[number] = "".join(parts)

    def _replace(self, number: int, text: str, values: list[Value | None], *, last: bool) -> str:
        """Replace the figures of a text. last: its last ones; otherwise it has no others."""
        if any(value and value.text for value in values):
            spans = [match.span(1) for match in SPAN.finditer(text)]
            if not spans and not last and (lead := LEAD.match(text)):
                spans = [(lead.end(), len(text.rstrip()))]  # the whole cell
        else:
            spans = [match.span() for match in NUMBER.finditer(text)]
        if len(spans) < len(values) or (len(spans) > len(values) and not last):
            raise FigureError(f"{len(values)} keys for {len(spans)} figures in {text.strip()!r}")
        done = text
        for (start, end), value in reversed(list(zip(spans[-len(values) :], values, strict=True))):
            if value is not None:
                done = done[:start] + value.shown + done[end:]
                place = f"{self.name}:{number + 1}"
                self.figures.append(Figure(place, value.key, text[start:end], value.shown))
        return done


def pages() -> list[Path]:
    """Return README and all pages of the docs."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    return sorted([*ROOT.glob("*.md"), *docs])


def fill(path: Path, sources: Sources) -> Page:
    """Return a page with its figures filled in. The file is not written."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    page = Page(name, path.read_text(encoding="utf-8").split("\n"), sources)
    page.fill()
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill in the figures of README and docs from their sources.")
    parser.add_argument("pages", nargs="*", type=Path, help="default: README and all pages of the docs")
    parser.add_argument("--check", action="store_true", help="change no page; fail if a figure differs")
    parser.add_argument("--sources", type=Path, action="append", default=[], help="a folder to look for sources first")
    options = parser.parse_args(arguments)
    sources = Sources([*options.sources, *FOLDERS])
    found = {path: fill(path.resolve(), sources) for path in options.pages or pages()}
    figures = [figure for page in found.values() for figure in page.figures]
    different = [figure for figure in figures if figure.old != figure.new]
    errors = [error for page in found.values() for error in page.errors]
    if not options.check and not errors:
        for path, page in found.items():
            if any(figure.old != figure.new for figure in page.figures):
                path.write_text("\n".join(page.lines), encoding="utf-8")
    for line in [*errors, *map(str, different)]:
        print(line)
    filled = sum(bool(page.figures) for page in found.values())
    print(f"{len(figures)} figures on {filled} pages, {len(different)} differ from their sources")
    if errors:
        print(f"{len(errors)} errors; no page was written")
    elif different:
        print("python docs/_ext/figures.py writes them" if options.check else "written")
    return int(bool(errors) or (options.check and bool(different)))


if __name__ == "__main__":
    sys.exit(main())
