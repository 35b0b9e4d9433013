"""Each measure is near zero on another sample of the same data and flags a shifted one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vlp_models.contrib.drift.measures import (
    compare,
    compare_embeddings,
    describe,
    js_divergence,
    mmd,
    project,
    psi,
    rate_increase,
)
from vlp_models.contrib.drift.params import DriftParams
from vlp_models.data.tokenizer import SPECIAL_TOKENS, Tokenizer

WORDS = [f"word{number}" for number in range(300)]
TOKENIZER = Tokenizer([*SPECIAL_TOKENS, *WORDS, "w", "##w", "##o"], lowercase=True)


def sample(
    seed: int,
    count: int,
    *,
    longer: int = 0,
    words: int = 0,
    unknown: float = 0.0,
    scale: float = 1.0,
    wide: float = 1.0,
) -> dict[str, Any]:
    """Statistics of `count` captions and images; the keywords shift one thing each."""
    rng = np.random.default_rng(seed)
    captions = []
    for _ in range(count):
        chosen = np.minimum(rng.geometric(0.02, size=rng.integers(5, 14) + longer), 250) - 1 + words
        captions.append(" ".join("unheard" if rng.random() < unknown else WORDS[number] for number in chosen))
    widths = rng.choice([320, 480, 640], count) * scale * wide
    heights = rng.choice([240, 480], count) * scale
    return describe(captions, zip(widths, heights, strict=True), TOKENIZER, most_words=None)


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, 3000])
def test_another_sample_of_the_same_data_does_not_drift(count: int) -> None:
    flagged = []
    for seed in range(8):
        measures = compare(sample(1, 4000), sample(100 + seed, count), DriftParams())
        flagged += [measure["name"] for measure in measures if measure["drifted"]]
        if count == 3000:
            assert all(abs(measure["value"]) < 0.03 for measure in measures), measures
    assert not flagged


@pytest.mark.parametrize(
    ("shift", "name"),
    [
        ({"longer": 4}, "length_psi"),
        ({"words": 40}, "vocabulary_js"),
        ({"unknown": 0.1}, "unknown_words"),
        ({"scale": 2.0}, "resolution_psi"),
        ({"wide": 1.5}, "aspect_psi"),
    ],
)
@pytest.mark.parametrize("count", [60, 3000])
def test_a_shift_is_flagged_by_its_measure(shift: dict[str, Any], name: str, count: int) -> None:
    measures = {m["name"]: m for m in compare(sample(1, 4000), sample(7, count, **shift), DriftParams())}
    assert measures[name]["drifted"], measures[name]
    assert measures[name]["value"] > measures[name]["limit"]


def test_measures_have_their_known_values() -> None:
    a = np.array([50, 50, 0])
    assert psi(a * 1000, a * 10) == pytest.approx(0, abs=1e-9)
    assert psi(np.array([10**7, 10**7]), np.array([10**7, 3 * 10**7])) == pytest.approx(0.25 * np.log(3), rel=1e-3)
    assert js_divergence(a, 7 * a) == pytest.approx(0)
    assert js_divergence(np.array([3, 0]), np.array([0, 9])) == pytest.approx(1)
    assert rate_increase(np.array([10, 90]), np.array([3, 7])) == pytest.approx(0.2)


def test_two_sample_test_is_calibrated_and_detects_shifts() -> None:
    rng = np.random.default_rng(3)
    p_values = [mmd(rng.normal(size=(80, 8)), rng.normal(size=(50, 8)), rng)[1] for _ in range(60)]
    assert np.mean(np.array(p_values) < 0.1) < 0.25, "under no change the p-value is uniform"
    assert min(p_values) > 0.0005
    old = rng.normal(size=(200, 40))
    moved, spread = rng.normal(size=(150, 40)) + 0.6, 2 * rng.normal(size=(150, 40))
    reference = project(old, seed=1)
    for new in (moved, spread):
        measure = compare_embeddings(reference, project(new, seed=1), DriftParams())
        assert measure["drifted"] and measure["value"] < 0.005
    same = compare_embeddings(reference, project(rng.normal(size=(150, 40)), seed=1), DriftParams())
    assert not same["drifted"] and same["mmd_squared"] < 0.02
    constant = np.zeros((30, 4))
    assert mmd(constant, constant, rng) == (pytest.approx(0), 1.0)
