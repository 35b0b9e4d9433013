"""prepare and validate pass rows through: 300,000 more of them need no more memory.

Rows are many here and pictures few, which takes minutes in place of an hour; benchmarks/scale.py has as many of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scale

PICTURES = 2000
FEW, MANY = 200_000, 500_000  # `validate` holds two batches of 65,536 at a time
SPARE = 128  # MB, by which allocators differ; the rows between the two, held as objects, are twice that and more
SMALL = "from vlp_models.data import outofcore\noutofcore.MEMORY = '128MB'\n"  # DuckDB's, which both sizes fill


def make(root: Path, rows: int) -> None:
    """The benchmark's project, with so many captions: those behind the first are of sound pictures of train."""
    root.mkdir()
    scale.make_project(root, PICTURES, copies=False)
    listing = root / "data" / "raw" / "many" / "pairs.jsonl"
    pairs = map(json.loads, listing.read_text().splitlines())
    sound = [pair["image"] for number, pair in enumerate(pairs) if pair["split"] == "train" and number % 100 != 7]
    with listing.open("a") as file:
        for number in range(PICTURES, rows):
            pair = {"image": sound[number % len(sound)], "caption": scale.caption(number), "split": "train"}
            file.write(json.dumps(pair) + "\n")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "STAGE", SMALL + scale.STAGE)
    most: dict[tuple[str, int], float] = {}
    for rows in (FEW, MANY):
        root = tmp_path / str(rows)
        make(root, rows)
        for stage in ("prepare", "validate"):
            most[stage, rows] = scale.measure(root, stage, 0)["peak_mb"]
        scale.check(root, PICTURES)
        report = json.loads((root / "reports" / "validation.json").read_text())
        assert report["tables"]["captions"]["rows"] == rows
    for stage in ("prepare", "validate"):
        assert most[stage, MANY] < most[stage, FEW] + SPARE, most
