"""Data Docs show the values of a dataset and run no script in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlp_models.curation.validation.rules import OneOf, Rule
from vlp_models.curation.validation.suites import SuiteRunner

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "&lt;b onclick=1&gt;"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a$b", "a${HOME}b", "$HOME", "$$", "a\\$b", "{0} %s #?", "secret|x"])
def test_any_folder_name_is_taken_literally(tmp_path: Path, name: str) -> None:
    """Great Expectations replaces `$NAME` in its config by environment variables."""
    suites = SuiteRunner(tmp_path / name / "docs")
    rule = Rule("images", "split_known", "split", OneOf(("train", "$HOME")), "")
    rows = [{"row": number, "split": split} for number, split in enumerate(["train", "$HOME", "${b} $c"])]
    assert suites.check("images", rows, [rule]) == [[2]]
    suites.build_docs()
    assert (tmp_path / name / "docs" / "index.html").exists()
    assert {path.name for path in tmp_path.iterdir()} == {name}


@pytest.mark.slow
def test_markup_in_values_is_neutralized(tmp_path: Path) -> None:
    suites = SuiteRunner(tmp_path)
    rule = Rule("images", "split_known", "split", OneOf(("train", "test")), "")
    rows = [{"row": number, "split": split} for number, split in enumerate(["train", *HOSTILE])]
    assert suites.check("images", rows, [rule]) == [[1, 2, 3]]
    suites.build_docs()
    pages = "".join(path.read_text() for path in tmp_path.rglob("*.html"))
    assert "img src=x onerror=alert(1)" in pages, "the value is shown"
    assert not [text for text in HOSTILE if text in pages]
