"""`vlp compare`: the pairing of items, and verdicts against a plain loop."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from score_files import scores, write_csv, write_samples
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.contrib.compare.comparison import compare
from vlp_models.contrib.compare.read import read_runs
from vlp_models.contrib.compare.scored import Columns
from vlp_models.errors import DataError, ParamsError
from vlp_models.metrics.score import item_scores, mean_score, write_items


def test_own_results_group_their_seeds_and_say_their_test(tmp_path: Path) -> None:
    for model, seed, better in (("tden", 1, 0.0), ("tden", 2, 0.0), ("vlmo", 1, 0.2), ("vlmo", 2, 0.2)):
        values = scores(10 * seed + int(10 * better), better=better)
        score = mean_score("accuracy", values, [f"im{i // 2}" for i in range(200)], items=[f"q{i}" for i in range(200)])
        folder = tmp_path / f"{model}-{seed}"
        folder.mkdir()
        write_items(
            folder / "items.parquet", [item_scores(score, dataset="scenes", split="test", test="abc", slices={})]
        )
        (folder / "scores.json").write_text(json.dumps([{"variant": model, "seed": seed}]))
    found = compare(sorted(tmp_path.iterdir()))
    (row,) = found.rows
    assert (found.baseline, row.challenger, row.items, row.clusters) == ("tden", "vlmo", 200, 100)
    assert len(found.runs["tden"]) == 2 and row.verdict == "promote" and row.value > row.baseline_value > 1  # percent
    other = [item_scores(score, dataset="scenes", split="test", test="other", slices={})]
    write_items(tmp_path / "vlmo-2" / "items.parquet", other)
    with pytest.raises(DataError, match="another test set"):
        compare(sorted(tmp_path.iterdir()))


def test_verdicts_and_their_correction(tmp_path: Path) -> None:
    files = {
        "old": write_csv(tmp_path / "old.csv", scores(1)),
        "same": write_csv(tmp_path / "same.csv", scores(6)),
        "better": write_csv(tmp_path / "better.csv", scores(3, better=0.15)),
        "worse": write_csv(tmp_path / "worse.csv", scores(4, better=-0.15)),
        "equal": write_csv(tmp_path / "equal.csv", scores(1)),
    }
    found = compare(files, relevant=0.2)
    rows = {row.challenger: row for row in found.rows}
    verdicts = {name: row.verdict for name, row in rows.items()}
    assert verdicts == {"same": "keep", "better": "promote", "worse": "keep", "equal": "inconclusive"}
    assert rows["equal"].p == 1.0 and rows["equal"].low is None and "same scores on all items" in rows["equal"].reason
    assert "ruled out" in rows["same"].reason and rows["worse"].reason == "worse"
    assert compare({k: files[k] for k in ("old", "same")}).rows[0].verdict == "inconclusive"
    # p and the intervals are of all four comparisons: the better model's interval alone is narrower.
    for row in rows.values():
        assert row.p is not None and row.p_corrected == pytest.approx(min(1.0, 4 * row.p))
        assert row.low is None or (4 * row.p <= 0.05) == (row.low > 0 or (row.high or 0) < 0)
    alone = compare({k: files[k] for k in ("old", "better")}).rows[0]
    assert alone.low is not None and rows["better"].low is not None and rows["better"].low < alone.low
    assert any("corrected for 4 comparisons (Bonferroni)" in note for note in found.notes)
    # the permutation test, by a plain loop over signs
    gains = np.array(scores(3, better=0.15)) - np.array(scores(1))
    rng, beyond = np.random.default_rng(5), 0
    for _ in range(2000):
        beyond += (gains * rng.choice([-1, 1], size=200)).sum() >= gains.sum()
    assert (rows["better"].p or 0) >= beyond / 2000


def test_few_differing_items_are_no_evidence_for_a_plain_bootstrap_alone(tmp_path: Path) -> None:
    """Four wins, no loss, 196 ties: chance gives that in 1 of 16 cases, and twice that in two directions."""
    before = write_csv(tmp_path / "a.csv", [1.0] * 196 + [0.0] * 4)
    after = write_csv(tmp_path / "b.csv", [1.0] * 200)
    (row,) = compare([before, after]).rows
    assert row.p == pytest.approx(1 / 16, abs=0.015) and row.verdict == "inconclusive"


def test_clusters_are_resampled_together(tmp_path: Path) -> None:
    images = {"cluster": [f"im{i // 10}" for i in range(200)]}
    wins = [float(i // 10 % 4 != 0) for i in range(200)]
    before = [float(i // 10 % 4 == 0) for i in range(200)]
    alone = compare({"a": write_csv(tmp_path / "a.csv", before), "b": write_csv(tmp_path / "b.csv", wins)}).rows[0]
    together = compare(
        {
            "a": write_csv(tmp_path / "a.csv", before, images),
            "b": write_csv(tmp_path / "b.csv", wins, images),
        }
    )
    assert together.rows[0].clusters == 20 and (alone.p or 0) < 0.001 < (together.rows[0].p or 0)


def test_seeds_are_a_level_of_the_bootstrap(tmp_path: Path) -> None:
    """Runs of one model in one file, separated by their column `seed`; seeds that disagree widen the interval."""
    runs = [(model, seed) for model in ("a", "b") for seed in range(3)]
    rows = ["item,score,model,seed"]
    for model, seed in runs:
        shift = (model == "b") * 0.1 + (seed - 1) * 0.1
        rows += [f"q{i},{value},{model},{seed}" for i, value in enumerate(scores(50 + seed, better=shift))]
    (tmp_path / "all.csv").write_text("\n".join(rows))
    found = compare([tmp_path / "all.csv"])
    one = compare({m: write_csv(tmp_path / f"{m}.csv", scores(51, better=(m == "b") * 0.1)) for m in ("a", "b")})
    assert len(found.runs["a"]) == 3
    width, narrow = ((row.high or 0) - (row.low or 0) for row in (found.rows[0], one.rows[0]))
    assert width > 1.5 * narrow
    assert any("one run of b and of the baseline" in note for note in one.notes)
    assert not any("one run of" in note for note in found.notes)


def test_items_that_differ_are_listed_and_never_dropped_silently(tmp_path: Path) -> None:
    a = write_csv(tmp_path / "a.csv", scores(1, 60))
    b = write_csv(tmp_path / "b.csv", scores(2, 58))
    with pytest.raises(DataError, match=r"2 scored only in .*a\.csv: q58, q59.*--common compares the 58"):
        compare([a, b])
    found = compare([a, b], common=True)
    assert found.rows[0].items == 58 and dict(found.left_out) == {str(a): ("q58", "q59")}
    result = CliRunner().invoke(app, ["compare", str(a), str(b), "--common", "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0 and "q58, q59" in result.output
    assert "q58, q59" in (tmp_path / "page.html").read_text()


def test_other_contents_or_clusters_of_an_item_are_refused(tmp_path: Path) -> None:
    for name, digest in (("a", "1"), ("b", "2")):
        rows = [{"doc_id": i, "acc": i % 2, "doc_hash": f"{digest if i == 7 else 0}"} for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="item 7 has other contents"):
        compare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    a = write_csv(tmp_path / "a.csv", scores(1, 30), {"cluster": [i // 2 for i in range(30)]})
    b = write_csv(tmp_path / "b.csv", scores(2, 30), {"cluster": [i // 3 for i in range(30)]})
    with pytest.raises(DataError, match="in other clusters"):
        compare([a, b])
    (run,) = read_runs(a, columns=Columns(cluster="item"))
    assert run.metrics["score"].clusters == run.metrics["score"].items


def test_several_metrics_must_be_chosen(tmp_path: Path) -> None:
    for name in "ab":
        rows = [{"doc_id": i, "acc": i % 2, "f1": i / 30, "details": {"text": "?"}} for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with pytest.raises(DataError, match="choose with --metric: acc; f1"):
        compare(files)
    found = compare(files, metrics=("acc", "f1"))
    assert [row.metric for row in found.rows] == ["acc", "f1"]
    assert any("details" in note for note in found.notes)
    with pytest.raises(DataError, match="no metric bleu"):
        compare(files, metrics=("bleu",))


def test_command_needs_neither_a_project_nor_torch(tmp_path: Path) -> None:
    write_csv(tmp_path / "old.csv", scores(1))
    write_csv(tmp_path / "new.csv", scores(3, better=0.15))
    code = (
        "import sys; sys.argv = ['vlp', 'compare', 'old.csv', 'mine=new.csv', '--json']\n"
        "from vlp_models.cli.main import app\n"
        "unwanted = ('torch', 'pandas', 'mlflow', 'pyarrow', 'scipy')\n"
        "try: app()\n"
        "finally: print([name for name in unwanted if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["rows"][0]["verdict"] == "promote" and found["rows"][0]["challenger"] == "mine"
    assert done.stderr.strip() == "[]"


def test_verdicts_hold_for_all_comparisons_together(tmp_path: Path) -> None:
    """Ten challengers that are as good as the baseline: neither a winner nor a loser, in most of forty families."""
    wrong = 0
    for family in range(40):
        noise = np.random.default_rng(family)
        files = {f"m{i}": write_csv(tmp_path / f"m{i}.csv", noise.random(60).round(4).tolist()) for i in range(11)}
        wrong += any(row.verdict != "inconclusive" for row in compare(files, resamples=600).rows)
    assert wrong <= 6  # 5% of 40, and three deviations


def test_detectable_gain_and_a_relevant_one_are_those_of_a_family(tmp_path: Path) -> None:
    files = {f"m{i}": write_csv(tmp_path / f"m{i}.csv", scores(20 + i)) for i in range(6)}
    alone = compare({name: files[name] for name in ("m0", "m1")}).rows[0].detectable
    assert alone is not None and (compare(files).rows[0].detectable or 0) > 1.1 * alone


def test_two_files_are_two_seeds_only_if_they_are(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    base = write_csv(tmp_path / "base.csv", scores(1))
    first, second = (write_csv(tmp_path / name / "result.csv", scores(seed)) for name, seed in (("a", 2), ("b", 3)))
    with pytest.raises(DataError, match=r"are both called result; name them: NAME=PATH"):
        compare([base, first, second])
    assert len(compare([base, f"new={first}", f"new={second}"]).runs["new"]) == 2
    with pytest.raises(DataError, match="two runs of new with the same scores on every item"):
        compare([base, f"new={first}", f"new={first}"])
    lines = first.read_text().splitlines()
    first.with_name("reversed.csv").write_text("\n".join([lines[0], *reversed(lines[1:])]))
    with pytest.raises(DataError, match="two runs of new with the same scores on every item"):
        compare([base, f"new={first}", f"new={first.with_name('reversed.csv')}"])
    with pytest.raises(DataError, match="resamples cannot show anything"):
        compare([base, f"new={first}"], resamples=20)
    for confidence in (1.0, 0.4, math.nan):
        with pytest.raises(DataError, match=r"must be at least 0\.5"):
            compare([base, f"new={first}"], confidence=confidence)
    mixed = compare([base, f"one={first}", f"two={second}", f"two={write_csv(tmp_path / 'c.csv', scores(4))}"])
    assert any("one run of one and of the baseline" in note for note in mixed.notes)


def test_declared_seeds_may_have_equal_scores(tmp_path: Path) -> None:
    """All items right, or all wrong, is common."""
    files = {
        model: [
            write_csv(tmp_path / f"{model}{seed}.csv", [value] * 30, {"model": [model] * 30, "seed": [seed] * 30})
            for seed in (1, 2)
        ]
        for model, value in (("old", 0.0), ("new", 1.0))
    }
    found = compare([*files["old"], *files["new"]])
    assert found.rows[0].runs == (2, 2) and found.rows[0].verdict == "promote"
    one, other = files["new"]
    assert f"{one}, seed 1 and {other}, seed 2: the same score on every item, although the seeds differ" in found.notes
    with pytest.raises(DataError, match="two runs of new with the seed 1"):
        compare([*files["old"], one, one])


def test_scores_that_are_not_finite_are_named_and_json_stays_json(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [1e308] * 30)
    write_csv(tmp_path / "b.csv", [1e308 * (i % 2) for i in range(30)])
    with np.errstate(all="ignore"):
        result = CliRunner().invoke(app, ["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--json"])
    found = json.loads(result.output, parse_constant=pytest.fail)
    assert found["rows"][0]["reason"] == "not finite"
    result = CliRunner().invoke(
        app, ["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--html", str(tmp_path)]
    )
    assert isinstance(result.exception, ParamsError)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_files_are_read_and_paired_by_the_column(tmp_path: Path, kind: str) -> None:
    """No function of this package is called for each of a million items: the calls are as many for few items."""
    calls: Counter[int] = Counter()
    for count in (100, 5000):
        files = []
        for name, order in (("a", range(count)), ("b", reversed(range(count)))):
            rows: list[dict[str, Any]] = [{"item": f"q{i}", "score": i % 2, "image_id": f"im{i // 3}"} for i in order]
            if kind == "csv":
                columns = {key: [row[key] for row in rows] for key in ("item", "image_id")}
                files.append(write_csv(tmp_path / f"{name}.csv", [row["score"] for row in rows], columns))
            else:
                files.append(write_samples(tmp_path / f"{name}.jsonl", rows))

        def count_call(frame: FrameType, event: str, _: object, count: int = count) -> None:
            if event == "call" and ("compare" in frame.f_code.co_filename or "bootstrap" in frame.f_code.co_filename):
                calls[count] += 1

        sys.setprofile(count_call)
        try:
            compare(files, resamples=100)
        finally:
            sys.setprofile(None)
    assert 0 < calls[5000] < calls[100] + 200
