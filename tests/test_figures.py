"""Figures of README and docs are those of their bundles and results files (docs/_ext/figures.py)."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlp_models.contrib.bundles.run_bundle import MANIFEST, archive_bytes, open_bundle

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
try:
    import figures
finally:
    sys.path.pop(0)

RUNS = ROOT / "docs" / "results" / "runs"
FILLED = {
    "README.md": 9,
    "docs/get-started/demo.md": 9,
    "docs/guides/reproducibility.md": 9,
    "docs/design/evaluation.md": 70,
    "docs/results/costs.md": 60,
    "docs/results/gate.md": 180,
    "docs/results/leaderboard.md": 130,
    "docs/results/scenes.md": 11,
    "docs/results/speed.md": 100,
}  # at least so many figures: a lost comment is noticed


def changed_bundle(path: Path, folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Write a copy of a bundle in which a file differs, with matching hashes, as a new run has it."""
    bundle = open_bundle(path)
    files = {**bundle.files, name: change(bundle.files[name])}
    hashes = {own: hashlib.sha256(content).hexdigest() for own, content in files.items() if own != MANIFEST}
    files[MANIFEST] = json.dumps({**bundle.manifest, "files": hashes}).encode()
    (folder / path.name).write_bytes(archive_bytes(files))


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def source(tmp_path: Path) -> Callable[[Any], str]:
    """Return a function that writes one.json and returns the option that names its folder."""

    def write(content: Any) -> str:
        (tmp_path / "one.json").write_text(json.dumps(content), encoding="utf-8")
        return f"--sources={tmp_path}"

    return write


def test_figures_are_those_of_their_sources() -> None:
    sources = figures.Sources()
    filled = [figures.fill(path, sources) for path in figures.pages()]
    assert not [error for one in filled for error in one.errors]
    assert not [str(figure) for one in filled for figure in one.figures if figure.old != figure.new]
    counts = {one.name: len(one.figures) for one in filled}
    assert {name: count for name, count in FILLED.items() if counts[name] < count} == {}


def test_changed_number_is_named_and_not_written_by_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "speed.md"
    text = (ROOT / "docs" / "results" / "speed.md").read_text(encoding="utf-8")
    copy.write_text(text.replace("| 52% |", "| 53% |", 1), encoding="utf-8")
    line = text[: text.index("| 52% |")].count("\n") + 1
    assert figures.main(["--check", str(copy)]) == 1
    assert f"speed.md:{line}: 53 is 52 in roofline-demo-cpu.json models.tden.share" in capsys.readouterr().out
    assert "| 53% |" in copy.read_text(encoding="utf-8")
    assert figures.main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == text


def test_new_bundle_rewrites_scores_captions_and_hashes(tmp_path: Path) -> None:
    def scores(content: bytes) -> bytes:
        records = json.loads(content)
        for record in records:
            if record["split"] == "test" and record["metric"] == "CIDEr":
                record.update(value=1151.06, low=-2.04, high=3.96, baselines={"nearest-neighbor caption": 7.0})
        return json.dumps(records).encode()

    name = "tden-captioning.run.zip"
    changed_bundle(RUNS / name, tmp_path, "scores.json", scores)
    changed_bundle(
        tmp_path / name,
        tmp_path,
        "predictions-test.jsonl",
        lambda content: content.replace(b'"caption": "a purple circle', b'"caption": "two gold circles'),
    )
    pages = [tmp_path / "README.md", tmp_path / "demo.md"]
    for copy, original in zip(pages, (ROOT / "README.md", ROOT / "docs" / "get-started" / "demo.md"), strict=True):
        shutil.copy(original, copy)
    assert figures.main([f"--sources={tmp_path}", *map(str, pages)]) == 0
    assert "| CIDEr | 1151.1 (-2.0 to 4.0)<!--" in pages[0].read_text(encoding="utf-8")
    for copy in pages:
        assert "two gold circles and a purple star." in copy.read_text(encoding="utf-8")
    assert figures.main([f"--sources={tmp_path}", "--check", *map(str, pages)]) == 0
    assert figures.main(["--check", *map(str, pages)]) == 1


def test_changed_bundle_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page: Callable[[str], Path]
) -> None:
    content = bytearray((RUNS / "tden-vqa.run.zip").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "tden-vqa.run.zip").write_bytes(content)
    path = page("seed 1<!-- figures: tden-vqa.run.zip seed -->\n")
    assert figures.main([f"--sources={tmp_path}", str(path)]) == 1
    assert "page.md:1: " in capsys.readouterr().out


TABLE = """<!-- figures: one.json runs[name=$row]
rows: a; -; b
| | times.mean .1f; times.max | share .0% | $row.note |
-->
| | mean, max | share | note |
|---|---|---|---|
| A | **0.0** s of 9 | 1% | `x` |
| by hand | 5.5 of 6 | 7% | `hand` |
| B | 0.0 s of 9 | | `y` |
"""


def test_table_keeps_its_words_rows_by_hand_and_empty_cells(
    page: Callable[[str], Path], source: Callable[[Any], str]
) -> None:
    runs = [
        {"name": "a", "times": [1, 2], "share": 0.25, "a": {"note": "slow"}},
        {"name": "b", "times": [1234, 1235], "share": None, "b": {"note": "fast"}},
    ]
    path = page(TABLE)
    assert figures.main([source({"runs": runs}), str(path)]) == 0
    assert path.read_text(encoding="utf-8").splitlines()[6:] == [
        "| A | **1.5** s of 2.0 | 25% | `slow` |",
        "| by hand | 5.5 of 6 | 7% | `hand` |",
        "| B | 1234.5 s of 1235.0 | | `fast` |",
    ]


@pytest.mark.parametrize(
    ("key", "content", "message"),
    [
        ("speed.p99", {"speed": {"p50": 1, "p95": 2}}, "no key 'p99'; there are 'p50', 'p95'"),
        ("[task=vqa].p", [{"task": "nlvr", "p": 1}], "no entry with task='vqa'; there are 'nlvr'"),
        ("a.3", {"a": [1]}, "no entry 3; there are 1"),
        ("a", {"a": [1, 2]}, "2 values"),
        ("a", {"a": {"b": 1}}, "has the keys 'b'"),
        ("a", {"a": None}, "not a figure"),
        ("a", {"a": float("nan")}, "not a figure"),
        ("a .1f", {"a": "text"}, "in the format '.1f'"),
        ("a; a", {"a": 1}, "2 keys for 1 figures"),
        ("a", {"a": "a | b"}, "cannot be shown"),
        ("a", {"a": "<!-- -->"}, "cannot be shown"),
        ("a", {"a": "two\nlines"}, "cannot be shown"),
        ("__class__", {"a": 1}, "no key '__class__'"),
    ],
)
def test_error_names_file_line_and_what_there_is(
    key: str,
    content: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
    page: Callable[[str], Path],
    source: Callable[[Any], str],
) -> None:
    text = f"words\n\n1<!-- figures: one.json {key} -->\n"
    path = page(text)
    assert figures.main([source(content), str(path)]) == 1
    out = capsys.readouterr().out
    assert "page.md:3: one.json " in out or "page.md:3: 2 keys" in out
    assert message in out
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1<!-- figures: ../one.json a -->", "names no source"),
        ("1<!-- figures: none.json a -->", "no source none.json"),
        ("<!-- figures: one.json\n| a |\n-->\nwords", "not above a table or code block"),
        ("<!-- figures: one.json\n-->\n| |\n|---|\n| 1 |", "names no columns"),
        ("<!-- figures: one.json\nrows: a; b\n| a |\n-->\n| |\n|---|\n| 1 |", "names 2 rows; there are 1"),
        ("<!-- figures: one.json\n| a |\n", "a comment without"),
        ("it is 1<!-- figures: one.json\na -->", "page.md:1: a comment is read as"),
        (
            "- list\n\n  <!-- figures: one.json\n  | a |\n  -->\n  | |\n  |---|\n  | 1 |",
            "page.md:3: a comment is read as",
        ),
        ("1<!--figures: one.json a -->", "a comment is read as"),
        ("1<!--\nfigures: one.json a -->", "page.md:1: a comment is read as"),
        ("<!--figures: one.json\n| a |\n-->\n| |\n|---|\n| 1 |", "a comment is read as"),
        ("<!-- figures: one.json\n| a |\n--> 1<!-- figures: one.json a -->\n| |\n|---|\n| 3 |", "page.md:3: "),
        ("```x``` is code\n1<!-- figures: one.json nothing -->", "page.md:2: one.json nothing"),
        ("```\n```text\n```\n1<!-- figures: one.json nothing -->", "page.md:4: one.json nothing"),
        ("```\n1<!-- figures: one.json a -->", "a code block without its end"),
        ("<!-- figures: one.json\n| a |\n-->\n```\n1  2\n```", "page.md:5: the row has 2 cells, the comment 1 columns"),
    ],
)
def test_comment_that_cannot_be_read_is_an_error(
    text: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    page: Callable[[str], Path],
    source: Callable[[Any], str],
) -> None:
    assert figures.main([source({"a": 1}), "--check", str(page(text))]) == 1
    assert message in capsys.readouterr().out


def test_comment_in_a_code_block_is_an_example(page: Callable[[str], Path], source: Callable[[Any], str]) -> None:
    path = page("```\n1<!-- figures: one.json nothing -->\n```\n2<!-- figures: one.json a -->\n")
    assert figures.main([source({"a": 3}), str(path)]) == 0
    assert path.read_text(encoding="utf-8").splitlines()[1::2] == [
        "1<!-- figures: one.json nothing -->",
        "3<!-- figures: one.json a -->",
    ]
