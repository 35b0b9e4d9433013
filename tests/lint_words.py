"""`make lint`: keep private vocabulary, vague names and British spelling out of code, messages and docs.

    python tests/lint_words.py [PATH ...]      default: every tracked source and text file

A line that needs one of the words for good reason (a quotation, generated text) ends with `plain-ok`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".j2", ".sh", ".lock", ".cff")
SKIPPED = ("tests/lint_words.py", "tests/fuzz/corpus/", "tests/golden/", "benchmarks/results/")

# word -> what to write
WORDS = {
    "anew": "again",
    "beside": "next to, alongside, besides",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "told": "given, logged, reported",
    "tell": "report, distinguish",
    "tells": "reports, distinguishes",
    "said": "logged, reported",
    "says": "sets, states, names",
    "saw": "was trained on, read",
    "sees": "reads",
    "knows": "stores, supports",
    "speaks": "names",
    "spoken": "predicted",
    "learnt": "learned, trained on",
    "eyes": "vision encoder, vision warm-up",
    "world": "generator, synthetic dataset",
    "worlds": "generators, synthetic datasets",
    "whoever": "name the thing",
    "lest": "so that ... not",
    "yardstick": "metric spec",
    "outline": "meta model",
    "adopt": "load partially",
    "adopted": "loaded",
    "foreign": "external, state-dict mapping",
    "begun": "started",
    "till": "until",
}
PHRASES = {
    r"at hand": "available",
    r"there is none": "not found",
    r"is no number": "is not finite",
    r"(?:can't|cannot|can not) (?:tell|be told)": "inconclusive",
    r"value that (?:can't|cannot) be": "invalid value",
    r"of (?:which|whom) (?:the|it|a)\b": "split the sentence",
    r"what it is made of": "provenance",
    r"taken? in\b": "ingest",
    r"by heart": "overfits",
    r"goes? by\b": "depends on",
    r"for people": "human-readable",
    r"\bluck\b": "seed variance, biased upward",
    r"\bas there\b": "as in ... (name it)",
    r"what they were": "their ...",
    r"(?:behavi|col|hon|fav|lab|neighb)our(?!hood embedding)": "American spelling: -or",
    r"(?:optimi|normali|initiali|regulari|tokeni|seriali|recogni|generali|summari|memori|organi)"
    r"s(?:e|er|ed|es|ing|ation)\b": "American spelling: -ize",
    r"\bcentre": "center",
    r"\blicence": "license",
    r"\bmodell(?:ed|ing)\b": "modeled, modeling",
    r"\blabell(?:ed|ing)\b": "labeled, labeling",
    r"\bcancell(?:ed|ing)\b": "canceled",
    r"\bgrey\b": "gray",
}
# Names of variables, arguments and attributes that do not say what the value is, in the package.
VAGUE = {"found", "own", "one", "place", "known", "kept", "what", "wanted", "ours", "theirs", "given"}
NAMED_PLAINLY = ("vlp_models/", "flows/")
ALLOWED = re.compile(r"world[ _]?size|real[- ]world", re.I)  # terms of the field
TOKEN = re.compile(r"[A-Za-z]+")
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
PATTERNS = [(re.compile(pattern, re.I), advice) for pattern, advice in PHRASES.items()]


def find(text: str) -> list[tuple[int, str, str]]:
    """Return (line number, word, advice) for each hit; identifiers are split at underscores and capitals."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.rstrip(" -`*/>").endswith("plain-ok"):
            continue
        line = ALLOWED.sub("", line)
        for word in TOKEN.findall(CAMEL.sub(" ", line)):
            if word.lower() in WORDS:
                found.append((number, word, WORDS[word.lower()]))
        found += [(number, hit[0], advice) for pattern, advice in PATTERNS if (hit := pattern.search(line))]
    return found


def find_vague_names(text: str) -> list[tuple[int, str, str]]:
    """Return (line number, name, advice) for each vague name that a module assigns, or takes as an argument."""
    lines, hits = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.strip("_") in VAGUE and not lines[node.lineno - 1].endswith("plain-ok"):
            hits.append((node.lineno, name, "a name that says what the value is"))
    return hits


def main(paths: list[str]) -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    hits = 0
    for name in filter(None, listed.split("\0")):
        if not name.endswith(SUFFIXES) or name.startswith(SKIPPED) or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        vague = find_vague_names(text) if name.startswith(NAMED_PLAINLY) and name.endswith(".py") else []
        for number, word, advice in [*find(text), *vague]:
            print(f"{name}:{number}: `{word}`: write {advice}")
            hits += 1
    print(f"{hits} words to replace" if hits else "plain English: no hits")
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
