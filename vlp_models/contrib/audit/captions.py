"""Findings on the captions alone: empty of content, copied on many images, in another language than the others."""

from __future__ import annotations

import math
import re
import statistics
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlp_models.common.unicode_words import split_words
from vlp_models.contrib.audit.params import Kind
from vlp_models.curation.validation.text import caption_key


@dataclass(frozen=True)
class Finding:
    """score: 0 to 1, higher is more suspicious; better: a caption that fits better; copy_of: an image that is shown."""

    kind: Kind
    score: float
    reason: str
    better: str = ""
    copy_of: str = ""


# ---- Empty --------------------------------------------------------------------------------------------------------

# Words that name no content: of a picture, of placeholders, and what joins them. Word lists of one language only help
# where it is used; file names, dates and numbers are the same in all.
PLACEHOLDERS = re.compile(
    "images?|img|photos?|photograph|pictures?|pic|snapshot|screenshot|untitled|captions?|description|placeholder|"
    "unknown|none|null|na|nan|todo|tbd|test|thumbnail|dscn?|pxl|jpe?g|png|gif|webp|bmp|"
    "bild|foto|fotografie|imagen|imagem|immagine"
)
FILLERS = re.compile(
    "an?|the|of|from|with|in|on|no|not|this|that|is|are|here|available|file|some|my|new|eine?|von|una?|de"
)
_FILE = re.compile(r"\S+\.(jpe?g|png|gif|webp|bmp|tiff?|heic)", re.IGNORECASE)
_CAMERA = re.compile(r"(img|dsc[a-z]?|pxl|p|screenshot|photo|image|wp|mvimg)[\W_]*\d[\d\W_]*", re.IGNORECASE)
_DATE = re.compile(r"\d{1,4}[-/.:]\d{1,2}[-/.:]\d{1,4}")


def find_empty(text: str) -> Finding | None:
    """Return a finding if nothing in the caption describes an image."""
    plain = text.strip().strip("\"'.!?()[]{}<>")
    if _FILE.fullmatch(plain) or _CAMERA.fullmatch(plain):
        return Finding("empty", 1.0, "a file name")
    words = split_words(_DATE.sub(" ", plain).casefold())
    described = [word for word in words if any(map(str.isalpha, word)) and not FILLERS.fullmatch(word)]
    if not described:
        return Finding("empty", 1.0, "no content word")
    if all(map(PLACEHOLDERS.fullmatch, described)):
        return Finding("empty", 0.95, f"only {', '.join(dict.fromkeys(described))}")
    return None


# ---- Copied -------------------------------------------------------------------------------------------------------

COPIES = 4  # images with the same caption, at least
UNUSUAL = 10  # times as many as is usual in the dataset
SHARE = 0.0005  # of the images, at least


def find_copied(texts: Sequence[str], owners: Sequence[int]) -> list[Finding | None]:
    """Return a finding for each caption that is on more images than is usual: of a placeholder, or of a wrong join."""
    keys = [caption_key(text) for text in texts]
    images: dict[str, set[int]] = defaultdict(set)
    for key, owner in zip(keys, owners, strict=True):
        images[key].add(owner)
    counts = [len(images[key]) for key in keys]
    usual = statistics.median(counts)
    least = max(COPIES, UNUSUAL * usual, SHARE * len(set(owners)))
    return [
        Finding("copied", 1 - usual / count, f"the same caption is on {count:,} images") if count >= least else None
        for count in counts
    ]


# ---- Language -----------------------------------------------------------------------------------------------------

MIN_CAPTIONS = 20  # of a language, to judge others by
LENGTH = 3  # letters of an n-gram
UNLIKELY = 4.0  # robust standard deviations below the median
SMOOTHING = 0.1


def find_language(texts: Sequence[str], languages: Sequence[str]) -> list[Finding | None]:
    """Return a finding for each caption whose script or letters differ from most captions of its language.

    languages: the code that each caption names, or `unknown`.
    """
    findings: list[Finding | None] = [None] * len(texts)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, language in enumerate(languages):
        rows_of[language].append(row)
    for language, rows in rows_of.items():
        if len(rows) >= MIN_CAPTIONS:
            name = "most captions" if len(rows_of) == 1 else f"most captions in `{language}`"
            for row, finding in zip(rows, _find_outliers([texts[r] for r in rows], name), strict=True):
                findings[row] = finding
    return findings


def _find_outliers(texts: Sequence[str], name: str) -> Iterator[Finding | None]:
    scripts = [_script(text) for text in texts]
    usual, count = Counter(filter(None, scripts)).most_common(1)[0] if any(scripts) else ("", 0)
    distances = _find_distances(texts)
    for script, distance in zip(scripts, distances, strict=True):
        if script and script != usual and count > len(texts) / 2:
            yield Finding("language", 0.99, f"in {script.title()} script, {name} are in {usual.title()}")
        elif distance > UNLIKELY:
            yield Finding("language", 1 - UNLIKELY / (2 * distance), f"its letters are unlike those of {name}")
        else:
            yield None


def _find_distances(texts: Sequence[str]) -> list[float]:
    """Return how unlikely each caption's letters are by the other captions, in robust standard deviations."""
    grams = [_grams(text) for text in texts]
    totals: Counter[str] = Counter()
    for counts in grams:
        totals.update(counts)
    before, letters = _starts(totals), max(2, len({gram[-1] for gram in totals}))
    likelihoods, lengths = [], []
    for counts in grams:
        own_before, total = _starts(counts), 0.0
        for gram, count in counts.items():
            # the probability of a letter after the two before it, by the other captions
            others = before[gram[:-1]] - own_before[gram[:-1]]
            total += count * math.log((totals[gram] - count + SMOOTHING) / (others + SMOOTHING * letters))
            # After an unseen context every letter is equally likely; the context itself counts as unlikely.
            if not others:
                total -= count
        length = max(1, counts.total())
        likelihoods.append(total / length)
        lengths.append(math.sqrt(length))
    middle = statistics.median(likelihoods)
    # The spread of a short caption is larger: it is scaled by the root of its length.
    deviations = [(value - middle) * length for value, length in zip(likelihoods, lengths, strict=True)]
    spread = 1.4826 * statistics.median(map(abs, deviations)) or 1.0
    return [-deviation / spread for deviation in deviations]


def _starts(counts: Counter[str]) -> Counter[str]:
    """Return how often the letters before the last one of n-grams occur."""
    starts: Counter[str] = Counter()
    for gram, count in counts.items():
        starts[gram[:-1]] += count
    return starts


def _script(text: str) -> str:
    """Return the script of most letters, as Unicode names it (LATIN, CYRILLIC, CJK); empty without letters."""
    if text.isascii():
        return "LATIN" if any(map(str.isalpha, text)) else ""
    names = Counter(unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha())
    return min(names, key=lambda name: (-names[name], name)) if names else ""


def _grams(text: str) -> Counter[str]:
    padded = f"  {' '.join(split_words(text.casefold()))} "
    return Counter(padded[i : i + LENGTH] for i in range(len(padded) - LENGTH + 1))
