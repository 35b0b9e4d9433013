"""A params file or preset that would end the process, or fill the memory, is an error in words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlp_models.cli.presets import apply_overlay
from vlp_models.errors import ParamsError
from vlp_models.params import load_params, read_yaml
from vlp_models.params.nesting import check_nesting

ROOT = Path(__file__).parent.parent
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 50_000, "line 1: nested more than 50 levels deep"),
        ("{a: " * 3_000, "line 1: nested more than 50 levels deep"),
        (LAUGHS, "more than 200,000 values"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: 2026-13-45", "month must be in"),
    ],
    ids=["brackets", "braces", "billion laughs", "digits", "date"],
)
def test_it_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """In a process of its own: where the check fails, that process ends without a word."""
    file = tmp_path / "params.yaml"
    file.write_text(text)
    script = f"from vlp_models.params import read_yaml\nread_yaml({str(file)!r})\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ParamsError" in done.stderr and words in done.stderr, done.stderr[-500:]
    if words != "month must be in":  # the overlay's reader keeps such a date as it is written
        shutil.copy(ROOT / "params.yaml", tmp_path / "kept.yaml")
        with pytest.raises(ParamsError, match=r"params.yaml: not valid YAML"):
            apply_overlay(tmp_path / "kept.yaml", file, [])
        assert (tmp_path / "kept.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_anchors_are_counted_by_what_they_stand_for() -> None:
    check_nesting("a: &a [1, 2, 3]\nb: [*a, *a]\n")
    with pytest.raises(ValueError, match="line 34"):
        check_nesting("a: &a [" + "1, " * 6_000 + "1]\n" + "".join(f"b{n}: *a\n" for n in range(100)))


def test_what_is_shipped_is_far_from_the_limits() -> None:
    load_params(ROOT / "params.yaml")
    for preset in (ROOT / "presets").glob("*.yaml"):
        read_yaml(preset)
