"""benchmarks/caption_metrics.py: readers of Flickr8k's judgments, Kendall's tau of resampled images, verdicts."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from vlp_models.errors import DataError
from vlp_models.metrics.caption import CaptionSet

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from caption_metrics import (
    FIXED_CORPUS,
    GROUP_OF,
    PairCounts,
    bootstrap,
    choose_metric,
    contrast_all,
    correlate,
    draw_pairs,
    main,
    score_each,
)
from flickr8k_judgments import Judgments, read_captions, read_crowd, read_expert

TOKENS = """\
a.jpg#0\tA dog runs .
a.jpg#1\tA brown dog is running .
b.jpg#0\tTwo girls sit on a bench .
b.jpg#1\tGirls on a bench .
c.jpg.1#0\tA man climbs a rock .
"""
EXPERT = """\
a.jpg\tb.jpg#0\t1\t1\t2
a.jpg\ta.jpg#1\t4\t4\t4
b.jpg\ta.jpg#0\t1\t2\t1
c.jpg\ta.jpg#0\t2\t3\t3
"""
CROWD = """\
a.jpg\tb.jpg#0\t0\t0\t3
a.jpg\ta.jpg#1\t1\t3\t0
b.jpg\ta.jpg#0\t0.333333333333\t1\t2
"""


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def slow_tau(scores: list[float], ratings: list[float], variant: str) -> float:
    """Compute the definition, pair by pair."""
    pairs = [(i, j) for i in range(len(scores)) for j in range(i)]
    signs = [(np.sign(scores[i] - scores[j]), np.sign(ratings[i] - ratings[j])) for i, j in pairs]
    balance = sum(x * y for x, y in signs)
    if variant == "b":
        scale = np.sqrt(float(sum(x != 0 for x, _ in signs)) * sum(y != 0 for _, y in signs))
    else:
        classes = min(len(set(scores)), len(set(ratings)))
        scale = len(scores) ** 2 * (classes - 1) / classes / 2
    return 100 * balance / scale if scale else 0.0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 3)), min_size=2, max_size=30),
    st.sampled_from(["b", "c"]),
    st.integers(0, 2**16),
)
@settings(max_examples=150)
def test_tau_of_resampled_images_is_that_of_the_repeated_observations(
    rows: list[tuple[int, int, int]], variant: str, seed: int
) -> None:
    scores, ratings, named = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    images, image_N = np.unique(named, return_inverse=True)
    counts_SG = np.vstack([np.ones(len(images)), np.random.default_rng(seed).integers(0, 3, (3, len(images)))])
    counts_SG[:, 0] += 1  # no resample is empty
    found = PairCounts.count(scores, ratings, image_N).tau(counts_SG, variant)
    for tau, counts_G in zip(found, counts_SG, strict=True):
        times = counts_G[image_N].astype(int)
        x, y = np.repeat(scores, times), np.repeat(ratings, times)
        assert tau == pytest.approx(slow_tau(x.tolist(), y.tolist(), variant), abs=1e-9)
        if len(set(x)) > 1 and len(set(y)) > 1:
            assert tau == pytest.approx(100 * kendalltau(x, y, variant=variant).statistic, abs=1e-9)


def test_files_of_judgments_are_read(tmp_path: Path) -> None:
    captions = read_captions(write(tmp_path, "token.txt", TOKENS))
    found = read_expert(write(tmp_path, "expert.txt", EXPERT), captions)
    assert found.images == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert found.ratings_N.tolist() == [1, 1, 2, 1, 2, 1, 2, 3, 3]
    assert found.other_experts_N is not None and found.other_experts_N.tolist()[:3] == [1.5, 1.5, 1]
    assert found.left_out == 1, "a caption among the image's references is left out"
    assert found.references["a"] == ["A dog runs .", "A brown dog is running ."]
    assert found.references["c"] == ["A man climbs a rock ."], "listed as c.jpg.1"

    found = read_crowd(write(tmp_path, "crowd.txt", CROWD), captions)
    assert found.ratings_N.tolist() == [0, 1, 1 / 3]
    assert found.candidates[1] == "A brown dog is running .", "a judged reference is a candidate only"
    assert found.references == {"a": ["A dog runs ."], "b": ["Two girls sit on a bench .", "Girls on a bench ."]}


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("token", "a.jpg#0 A dog", "1 tab-separated fields instead of 2"),
        ("token", "a.jpg\tA dog", "'a.jpg' is not a caption id"),
        ("token", "a.jpg#0\tA dog", "caption a.jpg#0 is listed twice"),
        ("token", "d.jpg#0\t ", "caption d.jpg#0 is empty"),
        ("expert", "a.jpg\tb.jpg#0\t1\t2", "4 tab-separated fields instead of 5"),
        ("expert", "a.jpg\tb.jpg#0\t1\t2\t5", "ratings 1, 2, 5: each must be 1, 2, 3 or 4"),
        ("expert", "a.jpg\tb.jpg#7\t1\t2\t3", "unknown caption b.jpg#7"),
        ("expert", "z.jpg\tb.jpg#0\t1\t2\t3", "z.jpg has no caption to be its reference"),
        ("crowd", "a.jpg\tb.jpg#0\t0.5\t1\t2", "a share of 0.5 is not that of 1 yes and 2 no"),
        ("crowd", "a.jpg\tb.jpg#0\t0\t0\t0", "must be whole numbers, not both 0"),
        ("crowd", "a.jpg\tb.jpg#0\t0.5\t1\t-1", "must be whole numbers"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, name: str, line: str, message: str) -> None:
    text = {"token": TOKENS, "expert": EXPERT, "crowd": CROWD}[name]
    file = write(tmp_path, f"{name}.txt", text + line + "\n")
    captions = read_captions(write(tmp_path, "good.txt", TOKENS))
    readers: dict[str, Callable[[], object]] = {
        "token": lambda: read_captions(file),
        "expert": lambda: read_expert(file, captions),
        "crowd": lambda: read_crowd(file, captions),
    }
    with pytest.raises(DataError) as error:
        readers[name]()
    assert str(error.value).startswith(f"{file}:{len(text.splitlines()) + 1}: ") and message in str(error.value)


def test_image_without_a_remaining_reference_and_files_without_judgments_are_named(tmp_path: Path) -> None:
    captions = read_captions(write(tmp_path, "token.txt", TOKENS))
    both = write(tmp_path, "crowd.txt", "a.jpg\ta.jpg#0\t1\t3\t0\na.jpg\ta.jpg#1\t1\t3\t0\n")
    with pytest.raises(DataError, match="all captions of a are judged for it"):
        read_crowd(both, captions)
    only = write(tmp_path, "expert.txt", "a.jpg\ta.jpg#1\t4\t4\t4\n")
    with pytest.raises(DataError, match=r"expert\.txt: no judgments"):
        read_expert(only, captions)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    for file in (binary, tmp_path / "missing.txt"):
        with pytest.raises(DataError, match=file.name):
            read_expert(file, captions)


def planted(noise: dict[str, float], images: int = 150) -> tuple[Judgments, dict[str, np.ndarray]]:
    """Return ratings of captions of a known quality, and scores that measure it with more or less noise."""
    rng = np.random.default_rng(3)
    image_N = np.repeat(np.arange(images), 9)
    quality_N = rng.normal(0, 1, len(image_N)) + rng.normal(0, 1, images)[image_N]
    ratings_N = np.digitize(quality_N + rng.normal(0, 0.5, len(image_N)), [0, 1, 2]) + 1.0
    judgments = Judgments(
        images=[f"{i:04d}" for i in image_N], candidates=[""] * len(image_N), references={}, ratings_N=ratings_N
    )
    return judgments, {name: quality_N + rng.normal(0, std, len(image_N)) for name, std in noise.items()}


def test_planted_better_and_worse_metrics_are_found_and_equal_ones_are_not() -> None:
    noise = {"CIDEr": 1.0, "good": 0.4, "equal": 1.0, "bad": 3.0, "caption length": 0.1}
    judgments, scores = planted(noise)
    found = correlate(judgments, scores, resamples=1000)
    rows = contrast_all({"expert": found["c"], "crowd": found["b"]}, groups=150)
    verdicts = {(row["set"], row["metric"]): row["verdict"] for row in rows}
    for name in ("expert", "crowd"):
        assert verdicts[name, "good"] == "higher" and verdicts[name, "bad"] == "lower"
        assert verdicts[name, "equal"] == "inconclusive"
    assert len(rows) == 6, "a control is not contrasted"
    assert choose_metric(rows, found["c"]) == "good"
    assert choose_metric([row for row in rows if row["metric"] != "good"], found["c"]) == "CIDEr"
    few = contrast_all({"expert": found["c"]}, groups=19)
    assert {row["verdict"] for row in few} == {"inconclusive"}


def test_metric_that_is_higher_on_one_file_and_lower_on_the_other_is_not_chosen() -> None:
    estimates = bootstrap({"m": lambda counts_SG: counts_SG.sum(1), "CIDEr": lambda c: c.sum(1)}, 5, 10)
    rows = [{"metric": "m", "verdict": verdict} for verdict in ("higher", "lower")]
    assert choose_metric(rows, estimates) == "CIDEr"
    assert choose_metric(rows[:1], estimates) == "m"


def test_intervals_are_over_images_and_cover_the_true_tau() -> None:
    """Observations of an image share its error: resampling single observations would give a smaller interval."""
    judgments, scores = planted({"m": 1.0}, images=4000)
    _, image_N = np.unique(judgments.images, return_inverse=True)
    scores_N = scores["m"] + np.random.default_rng(4).normal(0, 2, 4000)[image_N]
    truth = PairCounts.count(scores_N[:9000], judgments.ratings_N[:9000], image_N[:9000])
    tau = truth.tau(np.ones((1, 1000)), "c")[0]
    covered = 0
    for start in range(0, 36_000, 360):  # 100 draws of 40 images
        part = slice(start, start + 360)
        pairs = PairCounts.count(scores_N[part], judgments.ratings_N[part], np.repeat(np.arange(40), 9))
        estimate = bootstrap({"m": partial(pairs.tau, variant="c")}, 40, 500)["m"]
        low, high = estimate.interval()
        covered += low <= tau <= high
    assert 88 <= covered <= 99
    single = PairCounts.count(scores_N[part], judgments.ratings_N[part], np.arange(360))
    low_single, high_single = bootstrap({"m": partial(single.tau, variant="c")}, 360, 500)["m"].interval()
    assert high - low > 1.3 * (high_single - low_single)


def test_scores_of_single_captions_are_those_of_pycocoevalcap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no Java
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.rouge.rouge import Rouge

    candidates = {"0": "a dog runs", "1": "a brown dog is running", "2": "girls on a bench in a park"}
    references = {"0": ["a dog is running", "the dog runs fast"], "1": ["a brown dog is running"], "2": ["two girls"]}
    captions = {i: dict(enumerate(own)) for i, own in references.items()}
    scores, _ = score_each(
        {"x": CaptionSet(candidates=candidates, references=references)},
        {i: {str(n): text for n, text in own.items()} for i, own in captions.items()},
    )
    own = {i: [text] for i, text in candidates.items()}
    _, bleu = Bleu(4).compute_score(references, own, verbose=0)
    for n in range(4):
        assert scores["x"][f"BLEU-{n + 1}"] == pytest.approx([100 * value for value in bleu[n]], rel=1e-9)
    _, rouge = Rouge().compute_score(references, own)
    assert scores["x"]["ROUGE-L"] == pytest.approx(100 * rouge)
    assert scores["x"]["caption length"].tolist() == [3, 5, 7]
    assert scores["x"][FIXED_CORPUS][1] == scores["x"][FIXED_CORPUS].max(), "equal to its reference"


def test_known_pairs_differ_as_stated() -> None:
    texts = ["A dog runs in snow .", "A cat sits", "Two girls jump", "nothing to replace", "a man in a red hat"]
    captions = {f"{i}": {"0": text, "1": f"{text} today"} for i, text in enumerate(texts)}
    for image, pair in draw_pairs(captions).items():
        assert pair.described in captions[image].values() and pair.described not in pair.references
        assert pair.other not in captions[image].values()
        if pair.replaced is None:
            assert image == "3"
            continue
        changed = [(a, b) for a, b in zip(pair.described.split(), pair.replaced.split(), strict=True) if a != b]
        assert len(changed) == 1 and changed[0][1] in GROUP_OF[changed[0][0].lower()]
        assert all(changed[0][1] not in text.split() for text in captions[image].values())
    with pytest.raises(DataError, match="1 images have two captions"):
        draw_pairs({"a": {"0": "x", "1": "y"}, "b": {"0": "z"}})


def test_script_scores_files_in_the_published_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratings follow how much of a caption's content is the image's: every metric but the length must find it."""
    monkeypatch.setenv("PATH", "")  # no Java: a tenth of the time
    rng = random.Random(2)
    things = ["dog", "cat", "girl", "man", "horse", "boat", "truck", "bird"]
    actions = ["running", "sitting", "jumping", "sleeping", "waiting"]
    images = {f"{n}.jpg": (rng.choice(things), rng.choice(actions)) for n in range(60)}
    forms = ["a {} is {}", "the {} is {} outside", "one {} , {} there", "some {} {} now", "there is a {} {}"]
    tokens = [f"{i}#{n}\t{form.format(*what)} ." for i, what in images.items() for n, form in enumerate(forms)]
    expert, crowd = [], []
    for image, what in images.items():
        for other in rng.sample(list(images), 8):
            shared = sum(a == b for a, b in zip(what, images[other], strict=True))
            number, yes = rng.randrange(5), {0: 0, 1: 1, 2: 3}[shared]
            expert.append(f"{image}\t{other}#{number}\t" + "\t".join(str(min(4, 1 + shared + n % 2)) for n in range(3)))
            if other != image:
                crowd.append(f"{image}\t{other}#{number}\t{yes / 3:.12g}\t{yes}\t{3 - yes}")
    files = [
        write(tmp_path, name, "\n".join(lines) + "\n")
        for name, lines in (("token.txt", tokens), ("expert.txt", expert), ("crowd.txt", crowd))
    ]
    out = tmp_path / "out.json"
    arguments = ["--captions", files[0], "--expert", files[1], "--crowd", files[2], "--out", out, "--resamples", "200"]
    main([str(argument) for argument in arguments])
    record = json.loads(out.read_text())
    found = record["judgments"]
    assert found["expert"]["images"] == 60 and found["expert"]["reported"] == "tau_c"
    assert found["expert"]["observations"] == 3 * (len(expert) - found["expert"]["pairs_left_out"])
    assert found["crowd"]["observations"] == len(crowd)
    for name in ("expert", "crowd"):
        taus = {metric: row[found[name]["reported"]] for metric, row in found[name]["metrics"].items()}
        assert taus["CIDEr"]["value"] > 20 and taus["ROUGE-L"]["value"] > 20 > abs(taus["caption length"]["value"])
        assert all(row["low"] <= row["value"] <= row["high"] for row in taus.values())
    assert found["chosen_by_the_rule"] in found["expert"]["metrics"]
    assert any(note.startswith("METEOR: not computed: java not found") for note in record["notes"])
    assert record["known_pairs"]["another image"]["accuracy"]["CIDEr"]["value"] > 80
    assert json.loads(capsys.readouterr().out) == record
    with pytest.raises(SystemExit, match=r"caption_metrics: .*token\.txt:1: 2 tab-separated fields instead of 5"):
        main(["--captions", str(files[0]), "--expert", str(files[0]), "--out", str(out)])
