"""The tools behind COCO's caption scores: the Penn Treebank tokenizer and METEOR 1.5, Java programs that pycocoevalcap
ships, and a Python tokenizer to use without Java.

pycocoevalcap's own wrappers write temporary files into site-packages, lose alignment on odd line breaks, never time out
and leave METEOR's process behind; these do not. The Python tokenizer has the rules that captions need: it gives all 28
probes of tests/golden/golden_caption_metrics.json exactly, and tests/metrics/test_caption.py states how often it agrees
with Java on other text.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from vlp_models.errors import DataError, MissingToolError
from vlp_models.metrics.score import FloatArray

NOT_FOUND = "java not found"
TOKENIZER_TIMEOUT = 600.0  # seconds; COCO's 5k test split takes three
METEOR_TIMEOUT = 3600.0


def find_java() -> str:
    """Return the path of the java program.

    Raises:
        MissingToolError: not on PATH; the message becomes the note of a score.
    """
    java = shutil.which("java")
    if java is None:
        raise MissingToolError(NOT_FOUND)
    return java


def package_directory() -> Path:
    """Return the folder of pycocoevalcap, which contains the jars."""
    spec = find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        raise MissingToolError("pycocoevalcap is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def ptb_lines(texts: Sequence[str]) -> list[str]:
    """Return one line of space-separated, lower-case Penn Treebank tokens per text, with punctuation.

    All whitespace is collapsed first: a carriage return, form feed, vertical tab or U+2028 would count as a line end
    and shift every later caption to the wrong image.

    Raises:
        MissingToolError: Java is missing or failed.
    """
    java = find_java()
    jar = package_directory() / "tokenizer" / "stanford-corenlp-3.4.1.jar"
    with tempfile.TemporaryDirectory(prefix="vlp-ptb-") as directory:
        file = Path(directory) / "captions.txt"
        lines = "\n".join(" ".join(text.split()) for text in texts)
        file.write_bytes((lines + "\n").encode("utf-8", errors="replace"))
        command = [java, "-Dfile.encoding=UTF-8", "-XX:+UseSerialGC", "-cp", str(jar)]
        command += ["edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase", str(file)]
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, timeout=TOKENIZER_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingToolError(f"java failed: {error}") from None
    if done.returncode:
        raise MissingToolError(f"java failed: {_first_line(done.stderr)}")
    result = done.stdout.decode("utf-8").split("\n")[:-1]
    if len(result) != len(texts):
        raise MissingToolError(f"java failed: {len(texts)} captions gave {len(result)} lines of tokens")
    return result


class Meteor:
    """METEOR 1.5 for English as one process (about 5 s to start, 0.5 GB); a context manager.

    Raises:
        MissingToolError: Java is missing, or METEOR died or timed out.
    """

    def __init__(self, timeout: float = METEOR_TIMEOUT) -> None:
        directory = package_directory() / "meteor"
        command = [find_java(), "-Dfile.encoding=UTF-8", "-Xmx2G", "-jar", "meteor-1.5.jar"]
        command += ["-", "-", "-stdio", "-l", "en", "-norm"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._timer = threading.Timer(timeout, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Meteor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def statistics(self, candidate: str, references: Sequence[str]) -> list[float]:
        """Return the 23 additive counts of one segment (lengths, matches by kind, chunks) for tokenized text."""
        fields = [" ".join(text.replace("|||", " ").split()) for text in ("SCORE", *references, candidate)]
        return [float(value) for value in self._ask(" ||| ".join(fields), 1)[0].split()]

    def score(self, statistics_NK: FloatArray) -> float:
        """Return the corpus score, 0 to 1. METEOR adds the statistics of segments, so they can be passed as one sum."""
        total = " ".join(str(value) for value in statistics_NK.sum(axis=0))
        return float(self._ask(f"EVAL ||| {total}", 2)[-1])

    def _ask(self, line: str, answers: int) -> list[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{line}\n".encode("utf-8", errors="replace"))
            self._process.stdin.flush()
            got = [self._process.stdout.readline().decode("utf-8").strip() for _ in range(answers)]
        except OSError:
            got = [""]
        if not all(got):
            self._process.kill()
            self._process.wait()
            self._errors.seek(0)
            raise MissingToolError(f"METEOR failed: {_first_line(self._errors.read())}")
        return got


def _first_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[0][:200] if lines else "it exited without output"


# Dropped after tokenization, as in coco-caption. It lower-cases first, so brackets (`-lrb-`) stay.
DROPPED = frozenset(
    ["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", ".", "?", "!", ",", ":", "-", "--", "...", ";"]
)

_TITLES = (
    "mr|mrs|ms|dr|st|jr|sr|co|inc|ltd|corp|vs|etc|ave|blvd|rd|mt|ft|prof|gen|rep|sen|gov|rev|no|"
    "jan|feb|mar|apr|jun|jul|aug|sept|sep|oct|nov|dec"
)
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_SPLIT_WORDS = {
    "cannot": "can not", "gonna": "gon na", "gotta": "got ta", "wanna": "wan na", "lemme": "lem me", "gimme": "gim me",
    "'tis": "'t is", "'twas": "'t was", "d'ye": "d' ye",
}  # fmt: skip
_TOKEN = re.compile(
    rf"""
      https?://[^\s"<>]+ | www\.[^\s"<>]+
    | [\w.+-]+@[\w-]+(?:\.[\w-]+)+                                  # mail address
    | [#@][^\W\d_]\w*                                               # tag, user
    | (?:cannot|gonna|gotta|wanna|lemme|gimme|'tis|'twas|d'ye)\b
    | 'n' | '(?:n|em|til|cause|\d\ds)(?![\w'])
    | \w+?(?=n't\b) | n't\b                                         # is n't
    | '(?:s|re|ve|ll|d|m)\b
    | y'(?=all\b)
    | (?:[^\W\d_]\.){{2,}}                                            # u.s.
    | (?:{_TITLES})\.(?=\s|$) | no\.(?=\d)                                 # mr.
    | o'[^\W\d_]+ | c\+\+ | c\#
    | \d+(?:[.,:/-]\d+)+ | [.,]\d+
    | \w+(?:[-.&/_]\w+)*
    | \.{{2,}} | -{{2,}} | `` | ''
    | \S
    """,
    re.VERBOSE,
)


def tokenize(texts: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return text -> its tokens joined by spaces, and a note: empty, or why the Python tokenizer was used.

    Raises:
        DataError: no token for a text with a letter or digit, which would silently score zero.
    """
    unique = sorted(set(texts))
    try:
        lines, note = [_without_punctuation(line.split()) for line in ptb_lines(unique)], ""
    except MissingToolError as error:
        lines, note = [ptb_like(text) for text in unique], f"ptb-like tokenizer ({error})"
    for text, line in zip(unique, lines, strict=True):
        if not line and any(character.isalnum() for character in text):
            raise DataError(f"the tokenizer returned nothing for the caption {text[:80]!r}")
    return dict(zip(unique, lines, strict=True)), note


def ptb_like(text: str) -> str:
    """Tokenize one caption as Stanford's tokenizer does for ordinary English; tokens joined by spaces."""
    text = text.lower().translate(_PLAIN)
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        tokens.extend(_SPLIT_WORDS[token].split() if token in _SPLIT_WORDS else [_BRACKETS.get(token, token)])
    return _without_punctuation(tokens)


_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "--", "—": "--", "…": "..."})


def _without_punctuation(tokens: Sequence[str]) -> str:
    return " ".join(token for token in tokens if token not in DROPPED and token != '"')
