"""`vlp compare` of packed runs, and the guide's example.

Scenes; Flickr8k's entailment with and without photos, and its captions with and without self-critical training.

    python benchmarks/compare_bundles.py    # writes benchmarks/results/compare_bundles.json

The bundles are in docs/results/runs. tests/docs/test_bundle_comparisons.py computes the results again. If the test of a
gain changes, run this and then docs/_ext/figures.py.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from vlp_models.contrib.bundles.run_bundle import open_bundle
from vlp_models.contrib.compare.comparison import compare

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs" / "results" / "runs"
RESULTS = ROOT / "benchmarks" / "results" / "compare_bundles.json"
# name -> bundles (the first is the baseline) and metrics
COMPARISONS = {
    "vqa": (
        ("scenes-tden-vqa", "scenes-unified-vlp-vqa", "scenes-vlmo-vqa", "scenes-soho-vqa"),
        ("scenes test accuracy",),
    ),
    "retrieval": (
        ("scenes-tden-retrieval", "scenes-vlmo-retrieval"),
        ("scenes test R@1", "scenes test R@1 (image to text)"),
    ),
    "entailment": (("scenes-tden-entailment", "scenes-vlmo-entailment"), ("scenes_ve test accuracy",)),
    "flickr8k entailment": (
        ("flickr8k-tden-entailment-text-only", "flickr8k-tden-entailment"),
        ("snli_ve test accuracy",),
    ),
    "flickr8k self-critical": (
        ("flickr8k-tden-captioning", "flickr8k-tden-captioning-scst"),
        ("flickr8k test CIDEr",),
    ),
}


def compare_bundles(names: tuple[str, ...], metrics: tuple[str, ...]) -> list[dict[str, Any]]:
    """Compare the items of bundles with the first one's."""
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, str | Path] = {}
        for name in names:
            path = Path(folder, f"{name}.parquet")
            path.write_bytes(open_bundle(RUNS / f"{name}.run.zip").files["items.parquet"])
            files[name] = path
        return records(files, metrics)


def compare_example() -> list[dict[str, Any]]:
    """Compare the two made-up files of docs/guides/comparing.md."""
    with tempfile.TemporaryDirectory() as folder:
        return records(write_example(Path(folder)), ("score",))


def write_example(folder: Path) -> dict[str, str | Path]:
    """Write 200 answers: in old.csv every second one is right, in new.csv two of three."""
    for name, step in (("old", 2), ("new", 3)):
        answers = [f"q{number},{int(number % step > 0)}" for number in range(200)]
        (folder / f"{name}.csv").write_text("\n".join(["item,score", *answers]), encoding="utf-8")
    return {name: folder / f"{name}.csv" for name in ("old", "new")}


def records(files: dict[str, str | Path], metrics: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = compare(files, metrics=metrics).rows
    keys = ("metric", "challenger", "gain", "low", "high", "p_corrected", "detectable", "verdict")
    return [{key: getattr(row, key) for key in keys} for row in rows]


def main() -> None:
    results = {name: compare_bundles(*comparison) for name, comparison in COMPARISONS.items()}
    results["example"] = compare_example()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, rows in results.items():
        for row in rows:
            print(name, *(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="  ")


if __name__ == "__main__":
    main()
