"""The studies' statistics against answers known from elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from pretraining_study.contrasts import INCONCLUSIVE, REVERSED, SUPPORTED, Contrast, Plan, judge, read_plan
from pretraining_study.statistics import detectable, paired, power, seeds_needed
from pretraining_study.write_up import against

from vlp_models.metrics.gain import holm


def test_paired_gives_the_textbooks_numbers() -> None:
    """Student's own data (1908): hours of sleep gained by ten patients with two drugs; t = -4.0621, p = 0.00283."""
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired(one, two)
    assert found.n == 10 and found.mean == pytest.approx(-1.58) and found.deviation == pytest.approx(1.22999, abs=1e-5)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == (pytest.approx(-2.4598858, abs=1e-6), pytest.approx(-0.7001142, abs=1e-6))


def test_differences_without_a_deviation_are_certain_or_nothing() -> None:
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1
    assert paired([2.0, 3.0], [1.0, 2.0]).p == 0
    with pytest.raises(ValueError, match="two seeds"):
        paired([1.0], [2.0])


def test_holm_is_holms() -> None:
    """As R's p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm") has it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1, 1]


def test_power_is_that_of_the_tables() -> None:
    """Cohen's d of 0.5, paired: 34 pairs for 80% at 0.05 (G*Power's example: 0.8078)."""
    assert power(34, difference=0.5, deviation=1, alpha=0.05) == pytest.approx(0.8078, abs=2e-4)
    assert seeds_needed(difference=0.5, deviation=1, alpha=0.05) == 34
    assert 0.49 < detectable(34, deviation=1, alpha=0.05) < 0.5
    assert power(8, difference=1e-9, deviation=1, alpha=0.05) == pytest.approx(0.05, abs=1e-6)
    assert power(12, difference=5, deviation=1, alpha=0.007) == pytest.approx(1.0)


def test_power_is_how_often_the_test_finds_it() -> None:
    rng = np.random.default_rng(0)
    tries, zeros = 4000, [0.0] * 6
    found = sum(paired(rng.normal(1.2, 1, 6).tolist(), zeros).p < 0.05 for _ in range(tries)) / tries
    assert found == pytest.approx(power(6, difference=1.2, deviation=1, alpha=0.05), abs=0.025)


def contrast(first: str, second: str, **other: object) -> Contrast:
    plain = {"question": "?", "metric": "nll", "expected": first, "smallest": 0.01, "deviation": 0.01, "paper": "-"}
    return Contrast(first=first, second=second, **{**plain, **other})  # type: ignore[arg-type]


def test_verdicts_say_what_the_differences_say() -> None:
    noise = {seed: 0.001 * (-1) ** seed for seed in range(1, 7)}
    means = {"a": 1.0, "b": 1.1, "c": 1.1001}
    values = {
        arm: {seed: {"nll": mean + (n if arm == "c" else 0), "cider": 100 * mean} for seed, n in noise.items()}
        for arm, mean in means.items()
    }
    plan = Plan(
        alpha=0.05,
        seeds=6,
        contrasts=(
            contrast("a", "b"),
            contrast("b", "a"),
            contrast("b", "c"),
            contrast("b", "a", metric="cider"),
            contrast("b", "a", expected="a"),
        ),
    )
    findings = judge(plan, values)
    assert [f.verdict for f in findings] == [SUPPORTED, REVERSED, INCONCLUSIVE, SUPPORTED, SUPPORTED]
    assert [f.size for f in findings] == ["matters", "matters", "too small to matter", "matters", "matters"]


def test_correction_is_over_all_contrasts() -> None:
    """A difference that alone would be found at 0.03 is inconclusive among three."""
    values = {
        "a": {1: {"nll": 0.0}, 2: {"nll": 0.0}, 3: {"nll": 0.0}, 4: {"nll": 0.0}},
        "b": {1: {"nll": 1.0}, 2: {"nll": 2.0}, 3: {"nll": 1.0}, 4: {"nll": 3.2}},
    }
    alone = judge(Plan(alpha=0.05, seeds=4, contrasts=(contrast("a", "b"),)), values)
    assert 0.02 < alone[0].adjusted_p < 0.05 and alone[0].verdict == SUPPORTED
    three = Plan(alpha=0.05, seeds=4, contrasts=(contrast("a", "b"), contrast("a", "b"), contrast("a", "b")))
    assert {f.verdict for f in judge(three, values)} == {INCONCLUSIVE}


def test_a_plan_that_cannot_be_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    row = 'question = "?"\nfirst = "a"\nsecond = "b"\nmetric = "nll"\nexpected = "a"\nsmallest = 1\ndeviation = 1\n'
    head = "alpha = 0.05\nseeds = 3\n"
    file = tmp_path / "plan.toml"
    for text, expected in (
        (head, "no \\[\\[contrast"),
        (head + "[[contrast]]\n" + row, "paper"),
        (head + "[[contrast]]\n" + row.replace('"b"', '"x"') + 'paper = ""\n', "no arm 'x'"),
        (head + "[[contrast]]\n" + row.replace("nll", "mll") + 'paper = ""\n', "no metric 'mll'"),
        (head + "[[contrast]]\n" + row.replace("smallest = 1", "smallest = 0") + 'paper = ""\n', "smallest"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=expected):
            read_plan(file, ["a", "b"])


@pytest.mark.parametrize(
    ("ciders", "expected"),
    [((3.0, 4.0, 5.0), ""), ((-3.0, -4.0, -5.0), "CIDEr -4.0"), ((-9.0, 0.0, 5.0), ""), ((), "")],
)
def test_generated_output_that_contradicts_the_likelihood_is_reported(ciders: tuple[float, ...], expected: str) -> None:
    """Less of an NLL is better, more of CIDEr: the first arm has less of both in the second case."""
    contrast = Contrast(
        question="?", first="a", second="b", metric="nll", expected="a", smallest=0.1, deviation=0.1, paper=""
    )
    values: dict[str, dict[int, dict[str, float]]] = {
        "a": {seed: {"nll": 1.0 + seed / 100} for seed in range(3)},
        "b": {seed: {"nll": 2.0} for seed in range(3)},
    }
    for seed, more in enumerate(ciders):
        values["a"][seed]["cider"], values["b"][seed]["cider"] = 50 + more, 50.0
    found = {arm: {seed: {"test": test} for seed, test in rows.items()} for arm, rows in values.items()}
    (finding,) = judge(Plan(alpha=0.05, seeds=3, contrasts=(contrast,)), values)
    assert finding.verdict == SUPPORTED
    assert (expected in against(finding, found)) if expected else against(finding, found) == ""
