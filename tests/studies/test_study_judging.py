"""Entailment, NLVR2 and VCR in the studies: labels follow from the scenes, and a model overfits a few questions."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import pytest
import torch
from pretraining_study import adapter, measure
from pretraining_study.data import Data, take
from pretraining_study.judging import LABELS, ROWS
from pretraining_study.learn import Learner
from pretraining_study.setting import Setting

from vlp_models.metrics.vqa import question_accuracy
from vlp_models.synthetic.scenes.language import parse

TINY = Setting(
    web=16, train=8, val=4, test=8, questions=2, hidden=32, heads=2, batch=16, feature_dim=32, tasks=(*ROWS,)
)


@pytest.fixture(scope="module")
def data() -> Data:
    torch.set_num_threads(1)
    return Data(TINY)


def test_questions_are_balanced_and_true(data: Data) -> None:
    split = data.test
    for task, judged in split.judged.items():
        assert len(judged.texts) == ROWS[task] * len(judged) > 0 and int(judged.labels_Q.max()) < LABELS[task]
    entailed = split.judged["entailment"]
    for words, image, label in zip(entailed.texts.words, entailed.texts.owner_N, entailed.labels_Q, strict=True):
        if (claims := parse(words.lower().rstrip("."))) and label < 2:
            assert all(claim.is_true_of(split.scenes[image]) for claim in claims) == (label == 0), words
    pairs = split.judged["nlvr2"]
    assert pairs.labels_Q.view(-1, 4).sum(1).tolist() == [2] * (len(pairs) // 4), "text alone gives nothing away"
    assert (pairs.texts.owner_N.view(-1, 2) % 4 // 2).tolist() == [[0, 1]] * len(pairs), "left image first"
    choices = split.judged["vcr"]
    for question in range(0, len(choices), 2):
        rows = choices.rows(torch.tensor([question, question + 1]))
        answers, rationales = torch.tensor([choices.texts.words[i].count("?") for i in rows]).view(2, 4).unbind()
        assert answers.tolist() == rationales.tolist() == [1] * 4
        right = choices.texts.words[rows[int(choices.labels_Q[question])]]
        assert all(choices.texts.words[i].startswith(right) for i in rows[4:]), "rationales follow the right answer"


@pytest.mark.parametrize("task", ROWS)
@pytest.mark.parametrize("family", ["tden", "unified_vlp"])
def test_logits_are_those_of_single_questions(data: Data, family: str, task: str) -> None:
    torch.manual_seed(0)
    model, split = adapter.build(family, {}, data).eval(), data.test
    head, judged = adapter.judging_head(model, task), split.judged[task]
    few = torch.tensor([3, 0, 1])
    with torch.no_grad():
        logits_QC = adapter.judging_logits(model, head, split.images, take(judged.texts, judged.rows(few)), task)
        for row, question in zip(logits_QC, few, strict=True):
            texts = take(judged.texts, judged.rows(question[None]))
            pooled = [
                model.fuse(adapter.image(split.images, owner[None]), adapter.text(take(texts, n[None]))).pooled_BP[0]  # type: ignore[operator]
                for n, owner in enumerate_tensor(texts.owner_N)
            ]
            expected = torch.cat([head(p) for p in pooled]) if task == "vcr" else head(torch.cat(pooled))
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)
    assert logits_QC.shape == (3, LABELS[task])


def enumerate_tensor(values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.tensor(n), value) for n, value in enumerate(values)]


@pytest.mark.parametrize(
    ("task", "updates", "above"),
    [
        ("entailment", 120, 80),
        pytest.param("nlvr2", 400, 80, marks=pytest.mark.slow),
        pytest.param("vcr", 200, 70, marks=pytest.mark.slow),
    ],
)
def test_a_model_overfits_few_questions(data: Data, task: str, updates: int, above: float) -> None:
    split = data.train(1)
    torch.manual_seed(0)
    learner = Learner(adapter.build("tden", {}, data), data, split, seed=1, lr=5e-3)
    learner.learn(task, updates)
    assert learner.head is not None
    found = measure.judgments(learner.model, learner.head, split, task)
    assert found[task] > above and found[f"{task}_nll"] < 0.6


def test_what_texts_alone_give() -> None:
    data = Data(dataclasses.replace(TINY, tasks=("vqa", *ROWS), train=16))
    found, train, test = measure.text_alone(data, 1), data.train(1), data.test
    known: dict[str, Counter[str]] = defaultdict(Counter)
    for text, answers in zip(train.questions.words, train.answers, strict=True):
        known[text.lower()].update(answers)
        known[""].update(answers)
    scores = []
    for text, answers in zip(test.questions.words, test.answers, strict=True):
        counts = known[text.lower()] if text.lower() in known else known[""]
        scores.append(question_accuracy(min(counts, key=lambda a: (-counts[a], a)), answers))
    assert found["vqa"] == pytest.approx(100 * sum(scores) / len(scores))
    assert 40 < found["entailment"] < 90, "neutral hypotheses are recognized by their words"
    assert (found["nlvr2"], found["vcr"]) == (50, 6.25)
