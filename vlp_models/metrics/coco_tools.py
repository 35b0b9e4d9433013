"""The tools behind COCO's caption scores: the Penn Treebank tokenizer and METEOR 1.5, Java programs that pycocoevalcap
ships, and a Python tokenizer to use without Java.

pycocoevalcap's own wrappers write temporary files into site-packages, lose alignment on odd line breaks, never time out
and leave METEOR's process behind; these do not. The Python tokenizer has the rules that captions need: it gives all 28
probes of tests/golden/golden_caption_metrics.json exactly, and tests/metrics/test_caption.py states how often it agrees
with Java on other text.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from vlp_models.common.environment import program_environment
from vlp_models.common.unicode_words import (
    CHARACTERS,
    JOINERS,
    LETTER,
    MARKS,
    WORD,
    separate_characters,
    unspaced_scripts,
)
from vlp_models.errors import MissingToolError, ProcessLostError, VLPError

NOT_FOUND = "java not found"
TOKENIZER_TIMEOUT = 600.0  # seconds; COCO's 5k test split takes three
METEOR_TIMEOUT = 3600.0
NEXT_LINE = "a"  # after each text to tokenize
STATISTICS = 23  # numbers that METEOR counts per segment
STOPPING = 1.0  # seconds for a failing program to finish its message


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
    and shift every later caption to the wrong image. Each text is tokenized as if it were alone: the program also reads
    the start of the next line, so that `plan B.` ends in `b` before an upper-case letter and in `b.` elsewhere.

    Raises:
        MissingToolError: Java is missing or failed.
        ProcessLostError: it was killed.
    """
    # Relative to the folder of the jar, and no name of a file: Java splits the one at colons, the program the other at
    # blanks.
    directory = package_directory() / "tokenizer"
    command = [find_java(), "-Dfile.encoding=UTF-8", "-XX:+UseSerialGC", "-cp", "stanford-corenlp-3.4.1.jar"]
    command += ["edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]
    lines = "".join(f"{' '.join(text.split())}\n{NEXT_LINE}\n" for text in texts)
    # A lone surrogate, which UTF-8 cannot encode, becomes a question mark instead of an error.
    content = lines.encode("utf-8", errors="replace")
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=program_environment(),
            input=content,
            capture_output=True,
            timeout=TOKENIZER_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingToolError(f"java failed: {error}") from None
    if done.returncode:
        raise explain_failure("java", done.returncode, done.stderr, done.stdout)
    # Every other line is `NEXT_LINE`, and the output ends with a line break.
    result = done.stdout.decode("utf-8", errors="replace").split("\n")[:-1:2]
    if len(result) != len(texts):
        raise MissingToolError(f"java failed: {len(texts)} captions gave {len(result)} lines of tokens")
    return result


class Meteor:
    """METEOR 1.5 for English as one process (about 5 s to start, 0.5 GB); a context manager.

    Raises:
        MissingToolError: Java is missing, METEOR failed or timed out, or its answer is not the numbers asked for.
        ProcessLostError: it was killed.
    """

    def __init__(self) -> None:
        directory = package_directory() / "meteor"
        command = [find_java(), "-Dfile.encoding=UTF-8", "-Xmx2G", "-jar", "meteor-1.5.jar"]
        # Its own address of the paraphrases is wrong where the path has a blank or an umlaut.
        command += ["-", "-", "-stdio", "-l", "en", "-norm", "-a", "data/paraphrase-en.gz"]
        # A file and not a pipe: a full pipe that is not read would block the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        try:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env=program_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._errors.close()
            raise MissingToolError(f"METEOR failed: {error}") from None
        self._start_timer()

    def _start_timer(self) -> None:
        # A process that hangs is ended, so that reading its answer is an error and not endless.
        self._timer = threading.Timer(METEOR_TIMEOUT, self._give_up)
        self._timer.daemon = True
        self._is_late = False
        self._timer.start()

    def _give_up(self) -> None:
        self._is_late = True
        self._process.kill()

    def use_again(self) -> bool:
        """Give it the whole time again. Return whether it still runs."""
        self._timer.cancel()
        self._start_timer()
        return self._process.poll() is None

    def __enter__(self) -> Meteor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                # Closing writes what is still buffered, which a dead process does not read.
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def statistics(self, candidate: str, references: Sequence[str]) -> list[float]:
        """Return the 23 counts of one segment (lengths, matches by kind, chunks) for tokenized text. They add up:
        `meteor_from_statistics` of the sum is the program's score of the corpus.

        METEOR's `MeteorStats.addStats` does not add the chunk of a segment whose words all match in one chunk, such as
        a caption that equals a reference, so that segment has 0 chunks here.

        As in pycocoevalcap, `|||`, which separates the fields of a line, is removed from the candidate and not from a
        reference, which the program then reads as two.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = " ||| ".join(["SCORE", *references, candidate.replace("|||", "")])
        answer = b""
        try:
            self._process.stdin.write(f"{line}\n".encode("utf-8", errors="replace"))
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            counts = [float(value) for value in answer.split()]
            if len(counts) == STATISTICS and all(map(math.isfinite, counts)):
                # The chunk of a segment whose words all match: lengths are the first two counts, chunks the 21st.
                matched = [sum(counts[4:20:2]), sum(counts[5:20:2])]  # words of the candidate, of the reference
                if matched == counts[:2] and counts[20] == 1:
                    counts[20] = 0.0
                return counts
        except (OSError, ValueError):  # it died, or wrote something else, such as why the virtual machine did not start
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOPPING)  # for the rest of its message
        code = self._process.poll() or 0  # 0 as well while it runs
        self._process.kill()
        self._process.wait()
        if self._is_late:
            raise MissingToolError(f"METEOR failed: no answer within {METEOR_TIMEOUT:g} s")
        self._errors.seek(0)
        raise explain_failure("METEOR", code, self._errors.read(), answer + self._process.stdout.read())


def explain_failure(program: str, code: int, errors: bytes, output: bytes) -> VLPError:
    """Return the error for a Java program's end: why it cannot run here, or ProcessLostError if it was killed.

    Scores without it would be recorded for good, although the next try may have them.
    """
    killed = -code if code < 0 else code - 128  # a shell, as in a container's `java`, adds 128
    if killed in (signal.SIGKILL, signal.SIGTERM):
        return ProcessLostError(
            f"{program} was killed ({signal.Signals(killed).name}); the system does so if memory runs out: free some. "
            "No score is recorded; the same command computes them"
        )
    reason = program_reason(errors, output)
    if "Error occurred during initialization of VM" in reason:
        reason += "; free memory or raise the limit on it (`ulimit -v`)"
    return MissingToolError(f"{program} failed: {reason}")


def program_reason(errors: bytes, output: bytes) -> str:
    """Return the program's own words for its failure: the first two lines of stderr, else of stdout.

    Java's virtual machine writes to stdout why it did not start.
    """
    for text in (errors, output):
        stripped = [line.strip() for line in text.decode("utf-8", errors="replace").splitlines()]
        lines = [line for line in stripped if line and not line.startswith("Picked up ")]  # JAVA_TOOL_OPTIONS
        if lines:
            return ": ".join(line[:200] for line in lines[:2])
    return "it exited without output"


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
_END = rf"(?!{CHARACTERS})"
_EMOJI_PARTS = rf"[{MARKS}\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]*"  # marks, skin tones, tags of flags
# The first alternative that matches wins, so links, addresses and abbreviations precede the words they contain.
_TOKEN = re.compile(
    rf"""
      https?://[^\s"<>]+ | www\.[^\s"<>]+
    | [\w.+-]+@[\w-]+(?:\.[\w-]+)+                                  # mail address
    | [#@]{LETTER}{CHARACTERS}*                                     # tag, user
    | (?:cannot|gonna|gotta|wanna|lemme|gimme|'tis|'twas|d'ye){_END}
    | 'n' | '(?:n|em|til|cause|\d\ds)(?![{MARKS}\w'])
    | {CHARACTERS}+?(?=n't{_END}) | n't{_END}                         # is n't
    | '(?:s|re|ve|ll|d|m){_END}
    | y'(?=all{_END})
    | (?:{LETTER}\.){{2,}}                                            # u.s.
    | (?:{_TITLES})\.(?=\s|$) | no\.(?=\d)                                 # mr.
    | o'(?:{LETTER})+ | c\+\+ | c\#
    | \d+(?:[.,:/-]\d+)+ | [.,]\d+
    | {WORD}(?:[-.&/_]{WORD})*
    | \.{{2,}} | -{{2,}} | `` | ''
    | [\U0001f1e6-\U0001f1ff]{{2}}                                    # flag
    | [^\s{JOINERS}]{_EMOJI_PARTS}(?:\u200d[^\s{JOINERS}]{_EMOJI_PARTS})*
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """Tokens of captions, and how they were found.

    tokens    caption -> its tokens joined by spaces
    no_java   why the Python tokenizer was used for all captions; empty if the Penn Treebank tokenizer was
    dropped   caption -> a letter or symbol that the Penn Treebank tokenizer drops, so the Python tokenizer was used
    """

    tokens: Mapping[str, str]
    no_java: str
    dropped: Mapping[str, str]

    def note(self, captions: Iterable[str]) -> str:
        """Return how these captions were tokenized, for scores that depend on it; empty: as COCO's are."""
        texts = set(captions)
        notes = [f"ptb-like tokenizer ({self.no_java})"] if self.no_java else []
        lost = sorted(self.dropped[text] for text in texts if text in self.dropped)
        if lost:
            example = unicodedata.name(lost[0], "unnamed")
            notes.append(
                f"ptb-like tokenizer for {len(lost)} of {len(texts)} captions: the Penn Treebank tokenizer drops "
                f"letters or symbols from them, such as U+{ord(lost[0]):04X} {example}"
            )
        return "; ".join(filter(None, [*notes, _unspaced_note(texts)]))

    def meteor_note(self, captions: Iterable[str]) -> str:
        """Return what METEOR, whose rules are English, counts instead of the words of these captions; empty: words."""
        texts = set(captions)
        notes = [_unspaced_note(texts)]
        split = sum(any(map(_splits_in_meteor, self.tokens[text])) for text in texts)
        if split:
            notes.append(
                f"METEOR splits words with combining marks, or with letters beyond U+FFFF, into letters "
                f"({split} of {len(texts)} captions)"
            )
        return "; ".join(filter(None, notes))


def _splits_in_meteor(character: str) -> bool:
    kind = unicodedata.category(character)[0]
    return not character.isascii() and (kind == "M" or (kind == "L" and ord(character) > 0xFFFF))


def _unspaced_note(texts: set[str]) -> str:
    """Return which captions have no spaces between words, and what their scores count instead; empty: none."""
    scripts: set[str] = set()
    unspaced = 0  # captions
    for text in texts:
        scripts_of_text = unspaced_scripts(text)
        scripts |= scripts_of_text
        unspaced += bool(scripts_of_text)
    if not unspaced:
        return ""
    unit = "characters (Tibetan: syllables)" if "Tibetan" in scripts else "characters"
    return (
        f"{unspaced} of {len(texts)} captions have no spaces between words ({', '.join(sorted(scripts))}) and no "
        f"tokenizer here finds the words: scored over {unit}"
    )


def tokenize(texts: Sequence[str]) -> tuple[Mapping[str, str], str]:
    """Return text -> its tokens joined by spaces, and a note; see `tokenize_captions`."""
    tokenization = tokenize_captions(texts)
    return tokenization.tokens, tokenization.note(texts)


def tokenize_captions(texts: Sequence[str]) -> Tokenization:
    """Tokenize by the Penn Treebank tokenizer if Java is available.

    The Python tokenizer takes the place of the Penn Treebank tokenizer without Java; for a caption from which the Penn
    Treebank tokenizer drops letters or symbols (it does so with those beyond U+FFFF and with the vowel signs of many
    scripts); and for a caption in a script without spaces between words, which is split into characters. Composed and
    decomposed accents are the same.
    """
    # Each text once, in an order that does not depend on the caller's.
    composed = {text: _composed(text) for text in sorted(set(texts))}
    try:
        lines, no_java = ptb_lines(list(composed.values())), ""
    except MissingToolError as error:
        return Tokenization(tokens={text: ptb_like(text) for text in composed}, no_java=str(error), dropped={})
    tokens, dropped = {}, {}
    for (text, composed_text), line in zip(composed.items(), lines, strict=True):
        lost = _first_dropped(composed_text, line)
        if lost:
            dropped[text] = lost
        exact = not lost and not unspaced_scripts(composed_text)
        # Not at U+00A0: the tokenizer has it within a token, such as a phone number or `1 1/2`.
        tokens[text] = _without_punctuation(line.split(" ")) if exact else ptb_like(composed_text)
    return Tokenization(tokens=tokens, no_java=no_java, dropped=dropped)


def _first_dropped(text: str, line: str) -> str:
    """Return the first letter, mark, digit or pictograph of a text that its line of tokens lacks; empty: none.

    ASCII is compared only if no token is left: the Penn Treebank tokenizer respells British words and brackets.
    """
    if text.isascii():
        return "" if line.strip() else next((c for c in text if c.isalnum()), "")
    # How often each character must occur in the line, less how often it does.
    lost = Counter(filter(_must_stay, text.translate(_PLAIN).lower().casefold()))
    lost.subtract(line.casefold())
    return next((character for character in lost if lost[character] > 0), "")


def _must_stay(character: str) -> bool:
    if character.isascii():
        return False
    kind = unicodedata.category(character)
    is_fraction = "\u2044" in unicodedata.normalize("NFKD", character)  # becomes 1/2
    return (kind[0] in "LMN" and not is_fraction) or kind == "So" or character in "\u200c\u200d"


def _composed(text: str) -> str:
    """Compose accents; "İ" becomes the "i" of Turkish, which Unicode lower-cases to "i" and a combining dot."""
    return unicodedata.normalize("NFC", text).replace("İ", "i").replace("i\u0307", "i")


def ptb_like(text: str) -> str:
    """Tokenize one caption as Stanford's tokenizer does for ordinary English; tokens joined by spaces."""
    text = separate_characters(_composed(text).lower().translate(_PLAIN))
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        if token in _SPLIT_WORDS:
            tokens += _SPLIT_WORDS[token].split()
        else:
            tokens.append(_BRACKETS.get(token, token))
    return _without_punctuation(tokens)


# To ASCII punctuation, to a space, or to nothing: soft hyphens, direction marks and variation selectors.
_PLAIN = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "--", "—": "--", "…": "..."}
    | dict(zip("。｡、､，！？：；（）「」『』", '..,,,!?:;()""""', strict=True))  # of Chinese and Japanese
    | dict.fromkeys("\u0f0b\u0f0c\u0f0d\u200b\u2060\ufeff", " ")  # between syllables of Tibetan; of no width
    | dict.fromkeys(["\u00ad", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))])
    | dict.fromkeys(map(chr, range(0xFE00, 0xFE10)))  # variation selectors: with or without color
)


def _without_punctuation(tokens: Sequence[str]) -> str:
    return " ".join(token for token in tokens if token not in DROPPED and token != '"')
