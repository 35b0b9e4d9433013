"""benchmarks/few_photos.py: which photos a draw has."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from few_photos import write_pairs


@pytest.fixture
def flickr8k(tmp_path: Path) -> Path:
    """400 photos of dev and 30 of train; each has a caption twice, and one photo of train is missing."""
    root = tmp_path / "flickr8k"
    (root / "Images").mkdir(parents=True)
    rows = [("image", "caption")]
    for name, count in (("dev", 400), ("train", 30)):
        photos = [f"{name}{n}.jpg" for n in range(count)]
        (root / f"Flickr_8k.{name}Images.txt").write_text("\n".join(photos))
        for photo in photos:
            (root / "Images" / photo).write_bytes(b"")
            rows += [(photo, "a dog , running"), (photo, "a cat ."), (photo, "a dog , running")]
    (root / "Images" / "train7.jpg").unlink()
    with (root / "captions.txt").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return root


def drawn(flickr8k: Path, folder: Path, photos: int, draw: int) -> dict[str, set[str]]:
    write_pairs(flickr8k, folder, photos, draw)
    with (folder / "pairs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all((folder / row["image"]).is_file() for row in rows)
    assert set(Counter(row["image"] for row in rows).values()) == {2}, "a repeated caption is written once"
    return {split: {row["image"] for row in rows if row["split"] == split} for split in ("train", "val", "test")}


def test_draws_differ_in_train_only_and_a_larger_one_contains_the_smaller(flickr8k: Path, tmp_path: Path) -> None:
    first, larger, other = (
        drawn(flickr8k, tmp_path / f"{photos}-{draw}", photos, draw) for photos, draw in ((10, 1), (20, 1), (10, 2))
    )
    assert [len(first[split]) for split in ("train", "val", "test")] == [10, 40, 300]
    assert first["train"] < larger["train"] and first["train"] != other["train"]
    assert {split: first[split] for split in ("val", "test")} == {split: other[split] for split in ("val", "test")}
    with pytest.raises(SystemExit, match="29 train and 400 dev photos with captions; needs 30 and 340"):
        write_pairs(flickr8k, tmp_path / "many", 30, 1)
