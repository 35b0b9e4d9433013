"""An edited figure, count or verdict of README and docs/results is found by the check of `make docs`."""

from __future__ import annotations

import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
try:
    import figures
finally:
    sys.path.pop(0)

EDITS = 100
# what is no claim: commands, other code, addresses; and names with a number in them (R@1, BLEU-4, lite0)
CODE = re.compile(r"```(?:bash|mermaid|python|toml|yaml)\n.*?\n```|`[^`\n]+`|\]\([^)\s]*\)|\$[^$\n]+\$", re.DOTALL)
FIGURE = re.compile(r"(?<![\w@])(?<![A-Za-z]-)\d+(?:[.,:]\d+)*(?![\w@]|-bit)")
COUNTS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
COUNT = re.compile(rf"\b(?:{'|'.join(COUNTS)}|one(?= (?:seed|core|thread|GPU|run)s?\b))\b(?!-)", re.IGNORECASE)
SHARES = [
    "half",
    "third",
    "quarter",
    "fifth",
    "sixth",
    "tenth",
    "thirds",
    "quarters",
    "fifths",
    "tenths",
    "once",
    "twice",
]
SHARE = re.compile(rf"(?<!the )(?<!at )\b(?:{'|'.join(SHARES)})\b(?!-)")
VERDICTS = [
    ["supported", "reversed", "inconclusive"],
    ["promote", "keep", "inconclusive"],
    ["promotes", "keeps"],
    ["better", "worse"],
    ["tied", "decided"],
    ["may matter", "matters", "too small to matter"],
    ["ahead", "behind"],
    ["beats", "loses to"],
    ["lower", "higher"],
    ["no gain", "a gain"],
    ["no measurable", "a measurable"],
]
VERDICT_WORDS = "|".join(word for words in VERDICTS for word in words)
VERDICT = re.compile(rf"(?<!vlp )\b(?:{VERDICT_WORDS})\b(?! from| end)|(?<=\| )(?:yes|no)(?= \|)")


@dataclass(frozen=True)
class Edit:
    """A change of a page: the text from start to end becomes new."""

    page: str
    start: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def describe(self, text: str) -> str:
        line = text.count("\n", 0, self.start) + 1
        context = text[max(self.start - 30, 0) : self.start], text[self.end : self.end + 30]
        return f"{self.page}:{line}: {context[0]!r} {text[self.start : self.end]!r} -> {self.new!r} {context[1]!r}"


def claims(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    code = [match.span() for match in CODE.finditer(text)]
    return [match for match in pattern.finditer(text) if not any(a <= match.start() < b for a, b in code)]


def other_figure(figure: str, rng: random.Random) -> str:
    """Change a figure by at least one unit of its last digit; its form stays."""
    index = rng.choice([index for index, letter in enumerate(figure) if letter.isdigit()])
    digit = rng.choice([digit for digit in "123456789" if digit != figure[index]])
    return figure[:index] + digit + figure[index + 1 :]


def other_word(word: str, rng: random.Random) -> str:
    groups = [["yes", "no"], COUNTS, SHARES[:6], SHARES[6:10], SHARES[10:], *VERDICTS]
    others = [other for group in groups if word.lower() in group for other in group if other != word.lower()]
    other = rng.choice(others or COUNTS)
    return other.capitalize() if word[0].isupper() else other


def draw_edits(pages: dict[str, str], seed: int) -> Iterator[Edit]:
    """Draw edits without end: half of figures, the others of counts, shares and verdicts."""
    rng = random.Random(seed)
    kinds = [FIGURE, FIGURE, FIGURE, COUNT, VERDICT, rng.choice([SHARE, VERDICT])]
    matches = {
        pattern: [(name, match) for name, text in pages.items() for match in claims(text, pattern)]
        for pattern in {*kinds, SHARE}
    }
    while True:
        kind = rng.choice(kinds)
        name, match = rng.choice(matches[kind])
        new = other_figure(match[0], rng) if kind is FIGURE else other_word(match[0], rng)
        yield Edit(name, *match.span(), new)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_edits_are_found(seed: int, tmp_path: Path) -> None:
    names = sorted(str(path.relative_to(ROOT)) for pattern in figures.COMPLETE for path in ROOT.glob(pattern))
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in names}
    shutil.copytree(ROOT / figures.BINDINGS, tmp_path / figures.BINDINGS)
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    sources = figures.Sources()
    assert not [line for name in names for line in figures.faults(figures.fill(name, tmp_path, sources))]

    missed = []
    for _, edit in zip(range(EDITS), draw_edits(pages, seed), strict=False):
        (tmp_path / edit.page).write_text(edit.apply(pages[edit.page]), encoding="utf-8")
        if not figures.faults(figures.fill(edit.page, tmp_path, sources)):
            missed.append(edit.describe(pages[edit.page]))
        (tmp_path / edit.page).write_text(pages[edit.page], encoding="utf-8")
    assert len(missed) <= 0.03 * EDITS, "\n".join(missed)
