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

ROOT = Path(__file__).parents[2]
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
    "docs/results/gate-scenarios.md": 300,
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
def page(tmp_path: Path) -> Callable[[str, str], Path]:
    """Return a function that writes docs/page.md and its bindings to a folder of their own."""

    def write(text: str, bindings: str) -> Path:
        path = tmp_path / "docs" / "page.md"
        (tmp_path / figures.BINDINGS).mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        (tmp_path / figures.BINDINGS / "page.toml").write_text(bindings, encoding="utf-8")
        return path

    return write


@pytest.fixture
def fill(tmp_path: Path) -> Callable[..., int]:
    """Return a function that fills in docs/page.md from the content of one.json."""

    def run(content: Any, *options: str) -> int:
        (tmp_path / "one.json").write_text(json.dumps(content), encoding="utf-8")
        return figures.main([f"--root={tmp_path}", f"--sources={tmp_path}", *options])

    return run


def copy_pages(root: Path, *names: str) -> list[Path]:
    """Copy pages and their bindings to another root."""
    (root / figures.NAMES).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / figures.NAMES, root / figures.NAMES)
    for name in names:
        for source in (name, figures.BINDINGS / Path(name.removeprefix("docs/")).with_suffix(".toml")):
            (root / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, root / source)
    return [root / name for name in names]


def test_figures_are_those_of_their_sources() -> None:
    sources = figures.Sources()
    pages = [figures.fill(name, ROOT, sources) for name in figures.page_names(ROOT)]
    assert not [error for page in pages for error in page.errors]
    assert not [str(figure) for page in pages for figure in page.figures if figure.old != figure.new]
    counts = {page.name: len(page.figures) for page in pages}
    assert {name: count for name, count in FILLED.items() if counts[name] < count} == {}


def test_pages_have_no_comments() -> None:
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
    assert [str(page) for page in pages if "<!--" in page.read_text(encoding="utf-8")] == []


def test_changed_number_is_named_and_not_written_by_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy,) = copy_pages(tmp_path, "docs/results/speed.md")
    text = copy.read_text(encoding="utf-8")
    copy.write_text(text.replace("| 52% |", "| 53% |", 1), encoding="utf-8")
    line = text[: text.index("| 52% |")].count("\n") + 1
    assert figures.main(["--check", f"--root={tmp_path}"]) == 1
    assert f"speed.md:{line}: 53 is 52 in roofline-demo-cpu.json models.tden.share" in capsys.readouterr().out
    assert "| 53% |" in copy.read_text(encoding="utf-8")
    assert figures.main([f"--root={tmp_path}"]) == 0
    assert copy.read_text(encoding="utf-8") == text


def test_new_bundle_rewrites_scores_captions_and_hashes(tmp_path: Path) -> None:
    def scores(content: bytes) -> bytes:
        records = json.loads(content)
        for record in records:
            if record["split"] == "test" and record["metric"] == "CIDEr":
                record.update(value=1151.06, low=-2.04, high=3.96, baselines={"nearest-neighbor caption": 7.0})
        return json.dumps(records).encode()

    name = "scenes-tden-captioning.run.zip"
    changed_bundle(RUNS / name, tmp_path, "scores.json", scores)
    changed_bundle(
        tmp_path / name,
        tmp_path,
        "predictions-test.jsonl",
        lambda content: content.replace(b'"caption": "a purple circle', b'"caption": "two gold circles'),
    )
    pages = copy_pages(tmp_path, "README.md", "docs/get-started/demo.md")
    assert figures.main([f"--sources={tmp_path}", f"--root={tmp_path}"]) == 0
    assert "| CIDEr | 1151.1 (-2.0 to 4.0) |" in pages[0].read_text(encoding="utf-8")
    for copy in pages:
        assert "two gold circles and a purple star." in copy.read_text(encoding="utf-8")
    assert figures.main([f"--sources={tmp_path}", "--check", f"--root={tmp_path}"]) == 0
    assert figures.main(["--check", f"--root={tmp_path}"]) == 1


def test_changed_bundle_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page: Callable[[str, str], Path]
) -> None:
    content = bytearray((RUNS / "scenes-tden-vqa.run.zip").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "scenes-tden-vqa.run.zip").write_bytes(content)
    page("seed 1\n", '[[text]]\ntext = "seed #"\nfigures = "scenes-tden-vqa.run.zip seed"\n')
    assert figures.main([f"--sources={tmp_path}", f"--root={tmp_path}"]) == 1
    assert "docs/page.md: scenes-tden-vqa.run.zip seed" in capsys.readouterr().out


TABLE = """# Runs

```
# not a heading
```

| | mean, max | share | note |
|---|---|---|---|
| A | **0.0** s of 9 | 1% | `x` |
| by hand | 5.5 of 6 | 7% | `hand` |
| B | 0.0 s of 9 | | `y` |
"""
BINDING = """[[table]]
below = "Runs"
number = 2
source = "one.json runs[name=$row]"
rows = ["a", "-", "b"]
columns = ["", "times.mean .1f; times.max", "share .0%", "$row.note"]
"""


def test_table_keeps_its_words_rows_by_hand_and_empty_cells(
    page: Callable[[str, str], Path], fill: Callable[..., int]
) -> None:
    runs = [
        {"name": "a", "times": [1, 2], "share": 0.25, "a": {"note": "slow"}},
        {"name": "b", "times": [1234, 1235], "share": None, "b": {"note": "fast"}},
    ]
    path = page(TABLE, BINDING)
    assert fill({"runs": runs}) == 0
    assert path.read_text(encoding="utf-8").splitlines()[8:] == [
        "| A | **1.5** s of 2.0 | 25% | `slow` |",
        "| by hand | 5.5 of 6 | 7% | `hand` |",
        "| B | 1234.5 s of 1235.0 | | `fast` |",
    ]


def test_text_may_be_wrapped_and_keeps_its_other_numbers(
    page: Callable[[str, str], Path], fill: Callable[..., int]
) -> None:
    path = page(
        "On 3 photos, CIDEr is\n1,200.5 (-1 to 2), hash `ab`.\n",
        '[[text]]\ntext = "CIDEr is # (-1 to #), hash `#`"\nfigures = "one.json a .1f; b .0f; c .2s"\n',
    )
    assert fill({"a": 7, "b": 8, "c": "cd"}) == 0
    assert path.read_text(encoding="utf-8") == "On 3 photos, CIDEr is\n7.0 (-1 to 8), hash `cd`.\n"


VERDICTS = """# Claims
All five arms, over Three seeds:

| claim | p | verdict |
|---|---|---|
| 1 | 0.5 | **tied**; may matter |
| 2 | < 0.001 | inconclusive; matters |
"""
VERDICT_BINDING = """[[text]]
text = "All # arms, over # seeds"
figures = "one.json claims[verdict=supported|reversed].count word; seeds word"

[[table]]
below = "Claims"
source = "one.json claims[number=$row]"
columns = ["", "p <.3f", "verdict; size"]
"""


def test_counts_verdicts_and_small_probabilities_are_filled_in(
    page: Callable[[str, str], Path], fill: Callable[..., int]
) -> None:
    path = page(VERDICTS, VERDICT_BINDING)
    claims = [
        {"number": 1, "p": 1e-9, "verdict": "supported", "size": "too small to matter"},
        {"number": 2, "p": 0.04, "verdict": "reversed", "size": "may matter"},
    ]
    assert fill({"claims": claims, "seeds": 12}) == 0
    assert path.read_text(encoding="utf-8").splitlines()[1::2] == [
        "All two arms, over Twelve seeds:",
        "| claim | p | verdict |",
        "| 1 | < 0.001 | **supported**; too small to matter |",
    ]
    assert "| 2 | 0.040 | reversed; may matter |" in path.read_text(encoding="utf-8")


RECORDED = """[[recorded]]
source = "make demo, by hand"
texts = '''
took 11 minutes on two
with # of 20 photos
'''

[[text]]
text = "cores, with #"
figures = "one.json photos"
"""


@pytest.mark.parametrize(
    ("page_text", "message"),
    [
        ("It took 12 minutes on two cores, with 7 of 20 photos.", "README.md:1: 12 is 11 in make demo, by hand"),
        ("It took 11 minutes on six cores, with 7 of 20 photos.", "README.md:1: six is two in make demo, by hand"),
        (
            "It took 11 minutes on two cores, with 7 of 20 photos on 3.",
            "README.md:1: no entry of docs/_figures/README.toml has 3",
        ),
        ("It took 11 minutes on two\ncores, with 8 of 20 photos.", "README.md:2: 8 is 7 in one.json photos"),
        ("It ran 11 minutes on two cores, with 7 of 20 photos.", "'took 11 minutes on two' occurs 0 times, not 1"),
        ("It took 11 minutes on two cores, with 7 of 20 photos, on Python 3.11.", ""),
    ],
)
def test_claim_of_a_complete_page_needs_a_source_or_a_record(
    page_text: str, message: str, tmp_path: Path, fill: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / figures.BINDINGS).mkdir(parents=True)
    (tmp_path / "README.md").write_text(page_text, encoding="utf-8")
    (tmp_path / figures.BINDINGS / "README.toml").write_text(RECORDED, encoding="utf-8")
    (tmp_path / figures.NAMES).write_text('versions = ["Python 3.11"]\n', encoding="utf-8")
    assert fill({"photos": 7}, "--check") == int(bool(message))
    assert message in capsys.readouterr().out


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
def test_error_names_the_page_and_what_there_is(
    key: str,
    content: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
    page: Callable[[str, str], Path],
    fill: Callable[..., int],
) -> None:
    path = page("words 1\n", f'[[text]]\ntext = "words #"\nfigures = "one.json {key}"\n')
    assert fill(content) == 1
    out = capsys.readouterr().out
    assert out.startswith("docs/page.md: ") and message in out
    assert path.read_text(encoding="utf-8") == "words 1\n"


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ('[[text]]\ntext = "one #"\nfigures = "../one.json a"', "names no source"),
        ('[[text]]\ntext = "one #"\nfigures = "none.json a"', "no source none.json"),
        ('[[text]]\ntext = "other #"\nfigures = "one.json a"', "'other #' occurs 0 times, not 1"),
        ('[[text]]\ntext = "#"\nfigures = "one.json a"', "'#' occurs 5 times, not 1"),
        ('[[text]]\ntext = "one #"', "missing 1 required positional argument: 'figures'"),
        ('[[text]]\ntext = "one #"\nfigure = "one.json a"', "unexpected keyword argument 'figure'"),
        ('[[cell]]\ntext = "one #"', "[[cell]] is none of text, table, recorded"),
        ("[[text]\n", "page.toml: "),
        ('[[table]]\nbelow = "Title"\nsource = "one.json"', "missing 1 required positional argument: 'columns'"),
        ('[[table]]\nbelow = "Title"\ncolumns = ["", "a"]\nnumber = 3', "2 tables and code blocks below the heading"),
        ('[[table]]\nbelow = "Other"\ncolumns = ["", "a"]', "0 tables and code blocks below the heading 'Other'"),
        ('[[table]]\nbelow = "Title"\ncolumns = ["a"]', "a row has 2 cells, not 1"),
        ('[[table]]\nbelow = "Title"\nrows = ["a", "b"]\ncolumns = ["", "a"]', "has 1 rows, not 2"),
        ('[[table]]\nbelow = "Title"\nnumber = 2\ncolumns = ["a"]', "a row has 2 cells, not 1"),
        (
            '[[text]]\ntext = "one #"\nfigures = "one.json a"\n[[text]]\ntext = "one #"\nfigures = "one.json b"',
            "'1' is bound to one.json b and to another key",
        ),
    ],
)
def test_binding_that_does_not_fit_its_page_is_an_error(
    bindings: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    page: Callable[[str, str], Path],
    fill: Callable[..., int],
) -> None:
    page("# Title\none 1\n\n| | |\n|---|---|\n| 2 | 3 |\n\n```\n4  5\n```\n", bindings)
    assert fill({"a": 1, "b": 2}, "--check") == 1
    assert message in capsys.readouterr().out


def test_bindings_without_their_page_are_an_error(
    page: Callable[[str, str], Path], fill: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    page("", "").unlink()
    assert fill({}) == 1
    assert "page.toml: no page " in capsys.readouterr().out
