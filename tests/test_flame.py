"""benchmarks/flame.py: sampled stacks become boxes and shares."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

STACKS = """\
main (run.py:1);step (model.py:5);linear (linear.py:9);at::mm<float, pair<int>>::call (libtorch.so);copy (libmkl.so) 60
main (run.py:1);step (model.py:6);linear (linear.py:9);at::mm<double>::call (libtorch.so);multiply (libmkl.so) 30
main (run.py:1);step (model.py:7) 10
main (run.py:2);load (files.py:3) 900
"""


def test_shares_are_of_the_samples_below_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import flame

    stacks, output = tmp_path / "stacks.txt", tmp_path / "flame.svg"
    stacks.write_text(STACKS)
    monkeypatch.setattr(sys, "argv", ["flame.py", str(stacks), "--below", "step", "--output", str(output)])
    flame.main()
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "100 samples below step; most ended in",
        " 60.0%  copy",
        " 30.0%  multiply",
        " 10.0%  step",
    ]
    svg = ElementTree.parse(output).getroot()
    boxes = {group[0].text: float(group[1].get("width", "")) for group in svg}
    assert boxes == {
        "step: 100.0%": 1200,
        "linear: 90.0%": 1080,
        "at::mm::call: 90.0%": 1080,
        "copy: 60.0%": 720,
        "multiply: 30.0%": 360,
    }
    monkeypatch.setattr(sys, "argv", ["flame.py", str(stacks), "--below", "fit", "--output", str(output)])
    with pytest.raises(SystemExit):
        flame.main()
    assert "no sample is below fit" in capsys.readouterr().err
