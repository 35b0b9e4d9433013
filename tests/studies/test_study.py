"""A study end to end at a tiny size: real models and losses, resumed results, a written page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pretraining_study import adapter, measure
from pretraining_study.arms import Arm, FineTuning, Pretraining, of_equal_compute
from pretraining_study.data import Data, take
from pretraining_study.judging import ROWS
from pretraining_study.learn import Learner, orders
from pretraining_study.results import Results
from pretraining_study.run import run_arm
from pretraining_study.setting import Setting
from pretraining_study.study import Study, main, time_left, work
from tden import ARMS, COST_A, STUDY

from vlp_models.synthetic.scenes.captions import Noise, without_boilerplate
from vlp_models.synthetic.scenes.language import check, split_words

TINY = Setting(web=40, train=4, val=3, test=6, questions=3, hidden=16, heads=2, batch=8, feature_dim=12)
PLAN = """
alpha = 0.05
seeds = 2
[[contrast]]
question = "Does pretraining help?"
first = "single"
second = "none"
metric = "nll"
expected = "single"
smallest = 0.01
deviation = 0.01
paper = "yes"
"""
TWO = (
    Arm(name="none", label="none at its best", fine_tuning=FineTuning(budgets=(1, 3))),
    Arm(
        name="single",
        label="one pass",
        pretraining=(Pretraining(objectives=("mlm", "moc", "ism", "msg"), updates=2),),
        fine_tuning=FineTuning(budgets=(2,)),
    ),
)


@pytest.fixture(scope="module")
def data() -> Data:
    torch.set_num_threads(1)
    return Data(TINY)


def test_tdens_study_is_whole() -> None:
    """Every contrast's arms are there, and what was written down before fits the seeds."""
    plan = STUDY.plan
    assert plan.seeds >= 2 and all(reached > 0.8 for _, _, reached in plan.power_table())
    assert {c.first for c in plan.contrasts} | {c.second for c in plan.contrasts} == {arm.name for arm in ARMS}
    updates = {arm.name: arm.updates for arm in ARMS}
    assert updates["two-pass-a"] == of_equal_compute(updates["single"], COST_A) < updates["two-pass-c"]
    assert updates["two-pass-c"] < updates["single"] == updates["encoder-alone"] == updates["two-pass-a-long"]


@pytest.mark.slow
def test_every_arm_of_tdens_study_runs_and_is_another_one(data: Data) -> None:
    figures = {}
    for arm in ARMS:
        test = run_arm(arm.scaled(0.005), 1, data)["test"]
        judged = {metric for task in ROWS for metric in (task, f"{task}_nll")}
        assert test.keys() == measure.METRICS.keys() - judged - {"match_nll"}, "a margin has no likelihood"
        assert torch.isfinite(torch.tensor(list(test.values()))).all(), arm.name
        figures[arm.name] = test["nll"]
    assert len(set(figures.values())) == len(ARMS), figures


def test_the_same_seed_gives_the_same_figures_and_another_one_others(data: Data) -> None:
    first, again, other = (run_arm(TWO[1], seed, data)["test"] for seed in (1, 1, 2))
    assert first == again != other


def test_data_follow_the_setting(data: Data) -> None:
    images, texts = data.web
    assert len(images) == len(texts) == TINY.web
    assert images.mask_IR.sum(1).min() >= 2
    assert torch.allclose(images.class_probs_IRC.sum(2), images.mask_IR.float(), atol=1e-5)
    one, two = data.train(1), data.train(2)
    assert {s.image_id for s in one.scenes}.isdisjoint(s.image_id for s in two.scenes)
    assert [len(expected) for expected in one.references] == [5] * TINY.train and len(one.questions) == TINY.train * 3
    for split in (one, data.val, data.test):
        for text, owner in zip(split.captions.words, split.captions.owner_N.tolist(), strict=True):
            assert check(text, split.scenes[owner].to_dict()).true, text
    clean = Data(
        Setting(**{**TINY.__dict__, "noise": Noise(mismatched=0, hypernyms=0, dropped_words=0, boilerplate=1)})
    )
    for text, scene in zip(clean.web[1].words, clean.web_scenes, strict=True):
        sentence, around = without_boilerplate(text)
        assert around and check(sentence, scene.to_dict()).true


def test_any_true_image_counts_as_found(data: Data) -> None:
    test = data.test
    for n in (0, 7, 11):
        for i, scene in enumerate(test.scenes):
            own = int(test.captions.owner_N[n]) == i
            assert test.true_NI[n, i] == (own or check(test.captions.words[n], scene.to_dict()).true is True)
    assert test.true_NI.sum() > len(test.captions), "some caption is true of several images"


def test_cider_is_coco_captions(data: Data) -> None:
    from pycocoevalcap.cider.cider import Cider

    expected = [texts[0].split(" is ")[0] for texts in data.val.references]
    tokens = [" ".join(split_words(text)) for text in expected]
    references = {i: [" ".join(split_words(text)) for text in texts] for i, texts in enumerate(data.val.references)}
    value, _ = Cider().compute_score(references, {i: [text] for i, text in enumerate(tokens)})
    assert value > 0 and measure.cider(expected, data.val.references) == pytest.approx(100 * value)


def test_nll_is_of_every_reference_token(data: Data) -> None:
    """Compute the likelihood from the model's logits, one text at a time."""
    torch.manual_seed(0)
    model = adapter.build("tden", {}, data).eval()
    split = data.val
    total, tokens = 0.0, 0
    with torch.no_grad():
        for n in range(len(split.captions)):
            batch = adapter.batch(split.images, take(split.captions, torch.tensor([n])))
            logp = model.generation_logits(batch.image, batch.text)[0].log_softmax(-1)  # type: ignore[operator]
            ids = batch.text.ids_BT[0]
            total -= float(sum(logp[t, ids[t + 1]] for t in range(len(ids) - 1)))
            tokens += len(ids) - 1
    assert measure.nll(model, split) == pytest.approx(total / tokens, rel=1e-5)


def test_fine_tuning_learns(data: Data) -> None:
    split = data.train(1)
    torch.manual_seed(0)
    learner = Learner(adapter.build("tden", {}, data), data, split, seed=1, lr=5e-3)
    before = measure.nll(learner.model, split)
    learner.captioning(60)
    assert measure.nll(learner.model, split) < before - 1
    learner.vqa(60)
    assert learner.head is not None
    assert measure.answers(learner.model, learner.head, split, data)["vqa"] > 60


def test_every_row_comes_once_an_epoch() -> None:
    batches = list(orders(20, 8, 5, torch.Generator().manual_seed(0)))
    assert [len(rows) for rows in batches] == [8] * 5
    assert len(set(torch.cat(batches[:2]).tolist())) == 16
    shorter = list(orders(20, 8, 3, torch.Generator().manual_seed(0)))
    assert all(torch.equal(a, b) for a, b in zip(shorter, batches, strict=False)), "arms of a seed see equal batches"


@pytest.fixture
def study(tmp_path: Path) -> Study:
    plan = tmp_path / "toy.toml"
    plan.write_text(PLAN)
    return Study(
        name="toy", title="A toy", script=tmp_path / "toy.py", arms=TWO, contrasts=plan, setting=TINY, root=tmp_path
    )


@pytest.mark.slow
def test_a_study_from_nothing_to_its_document(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    main(study, [])
    expected = capsys.readouterr().out
    assert "[4/4] single, seed 2: NLL a token" in expected and "0 minutes left" in expected
    text = study.document.read_text()
    assert text.startswith("# A toy\n\n1 contrast was written down before the runs. Over 2 seeds")
    assert "| none at its best (`none`) | 2 |" in text and "best on val of 1, 3 updates" in text
    assert "the difference has the paper's direction" in text and "The paper: yes. Here: " in text
    kept = json.loads(study.figures.read_text())
    assert [(row["arm"], row["updates"]) for row in kept["costs"]] == [("none", 0), ("single", 2)]
    assert all(0 <= row["pretraining"] < row["rest"] for row in kept["costs"]), "two updates are less than measuring"
    assert len(kept["results"]) == 4 and kept["contrasts"][0]["smallest"] == 0.01
    files = sorted(study.work.rglob("seed-*.json"))
    made = {file: file.stat().st_mtime_ns for file in files}
    main(study, [])  # nothing is left to do
    main(study, ["--finished"])
    assert {file: file.stat().st_mtime_ns for file in files} == made and study.document.read_text() == text
    study.contrasts.write_text(PLAN.replace('paper = "yes"', 'paper = "not compared"'))
    main(study, ["--finished"])
    assert "has the expected direction" in study.document.read_text() and "The paper" not in study.document.read_text()
    files[0].unlink()
    main(study, ["--workers", "1"])
    assert files[0].exists() and sum(file.stat().st_mtime_ns != made[file] for file in files) == 1


def test_a_part_writes_no_document(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    main(study, ["--arms", "none", "--seeds", "1", "--share", "0.5"])
    assert "no document" in capsys.readouterr().out and not study.document.exists()
    main(study, ["--power"])
    assert "2 seeds, Holm's correction over 1 contrast(s)" in capsys.readouterr().out


def test_what_another_process_makes_is_left_to_it(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(study.work, TINY)
    with results.claimed(TWO[0], 1) as mine, results.claimed(TWO[0], 1) as twice:
        assert mine and not twice
        main(study, ["--seeds", "1", "--arms", "none"])
    assert "in another process's hands" in capsys.readouterr().out
    assert results.read(TWO[0], 1) is None


def test_a_result_of_another_setting_or_arm_is_not_taken(tmp_path: Path) -> None:
    here = Results(tmp_path, TINY)
    with here.claimed(TWO[0], 1):
        here.write(TWO[0], 1, {"arm": "none"})
    assert here.read(TWO[0], 1) is not None
    assert Results(tmp_path, Setting()).read(TWO[0], 1) is None
    assert here.read(TWO[0].scaled(0.5), 1) is None


def test_the_time_left_is_each_arms_own() -> None:
    assert time_left({"a": [10.0, 20.0], "b": [5.0]}, ["a", "b", "c"]) == 15 + 5 + 10
    assert work([], [], TINY, Results(Path(), TINY)) is None
