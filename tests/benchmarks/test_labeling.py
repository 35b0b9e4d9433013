"""benchmarks/labeling.py: keys to type, the simulated order, and verdicts of contrasts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from labeling import FIRST, SEEDS, compare, count_keys, run_typing, simulate_order


def test_keys_are_edits_or_a_new_caption() -> None:
    assert count_keys("", "a dog") == 5 and count_keys("a dog", "a dog") == 0
    assert count_keys("a dog", "two dogs") == 4  # a -> two: 3, and an s
    assert count_keys("a cat", "a dog") == 3 and count_keys("a dog in the long grass", "a dog") == 6, "clear and type"


def test_orders_start_alike_and_the_active_one_covers_groups_first() -> None:
    rng = np.random.default_rng(0)
    # 9 of 10 photos are of one group, the others of 12 groups of their own.
    vectors = [np.eye(13)[0 if n % 10 else 1 + n // 10] + 0.02 * rng.normal(size=13) for n in range(120)]
    features = {f"{n:03}.jpg": (v / np.linalg.norm(v)).astype(np.float32) for n, v in enumerate(vectors)}
    captions = {photo: [f"photo {photo}", "another caption"] for photo in features}
    active, drawn = (simulate_order(features, captions, order, 1, 30) for order in ("active", "random"))
    assert active[:FIRST] == drawn[:FIRST] and len(set(active)) == len(set(drawn)) == 30
    rare = [sum(int(photo[:3]) % 10 == 0 for photo in order) for order in (active, drawn)]
    assert rare[0] == 12 > 2 * rare[1]
    measured = run_typing(active[:20], active[20:], features, captions)
    assert measured["without"]["typed"] == len("photo 000.jpg") and measured["similar"]["typed"] <= 3


def test_contrasts_are_paired_over_seeds_and_missing_rows_are_not_run() -> None:
    rows = {
        (order, seed, 50): {"CIDEr": 10.0 + seed + gain, "similar": {"typed": 40.0}, "without": {"typed": 50.0 + seed}}
        for order, gain in (("active", -1.0), ("random", 0.0))
        for seed in SEEDS
    }
    rows["random", 2, 50]["CIDEr"] += 0.5
    verdicts = {(row["contrast"], row["labels"]): row for row in compare(rows, (50, 200))}
    assert verdicts["similar saves typing", 50]["verdict"] == "supported"
    assert verdicts["similar saves typing", 50]["mean"] == 13.0
    assert verdicts["active gains CIDEr", 50]["verdict"] == "reversed"
    assert verdicts["active costs typing", 50]["verdict"] == "inconclusive"
    assert verdicts["active gains R@1", 50]["verdict"] == verdicts["similar saves typing", 200]["verdict"] == "not run"
