"""What a fine-tuned model is worth on held-out target images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining_study import adapter
from pretraining_study.data import Data, Split, take
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.classification import HypothesisOnly
from vlp_models.metrics.vqa import AnsweredQuestion, prior_predictions, question_accuracy
from vlp_models.synthetic.scenes.language import check, split_words

AT_ONCE = 250

CANDIDATES = 10  # images for a caption, of a model that fuses each pair

# metric -> (what it is called, whether less is better, digits)
METRICS: dict[str, tuple[str, bool, int]] = {
    "nll": ("NLL a token, nats", True, 3),
    "cider": ("CIDEr", False, 1),
    "true": ("faithful captions, %", False, 1),
    "answer_nll": ("NLL of a question's answers, nats", True, 3),
    "vqa": ("VQA accuracy, %", False, 1),
    "match_nll": ("NLL of a caption's image, nats", True, 3),
    "r1": ("R@1, %", False, 1),
    "entailment_nll": ("NLL of an entailment label, nats", True, 3),
    "entailment": ("entailment accuracy, %", False, 1),
    "nlvr2_nll": ("NLL of an NLVR2 label, nats", True, 3),
    "nlvr2": ("NLVR2 accuracy, %", False, 1),
    "vcr_nll": ("NLL of a VCR choice, nats", True, 3),
    "vcr": ("VCR, Q->AR, %", False, 1),
}


def _pieces(count: int) -> Iterator[Tensor]:
    return iter(torch.arange(count).split(AT_ONCE))


@torch.no_grad()
def nll(model: nn.Module, split: Split) -> float:
    """Nats a token of the references, each token given the image and the tokens before it."""
    total, tokens = 0.0, 0
    for rows in _pieces(len(split.captions)):
        losses_M = adapter.caption_losses(model, adapter.batch(split.images, take(split.captions, rows)))
        total, tokens = total + float(losses_M.double().sum()), tokens + len(losses_M)
    return total / tokens


@torch.no_grad()
def captions(model: nn.Module, split: Split, data: Data) -> dict[str, float]:
    """`cider` of greedy descriptions, and of scenes `true`: the share of them all of whose claims hold."""
    generated = [
        text
        for rows in _pieces(len(split.images))
        for text in adapter.describe(model, split.images, rows, data.tokenizer)
    ]
    score = {"cider": cider(generated, split.references)}
    if not split.scenes:
        return score
    true = [
        check(text, dataclasses.asdict(scene)).true is True for text, scene in zip(generated, split.scenes, strict=True)
    ]
    return score | {"true": 100 * float(np.mean(true))}


def cider(generated: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Of one description an image, document frequencies from its references; 1.2 reads 120, as tables print it."""
    words = [[split_words(text) for text in texts] for texts in references]
    scorer = CiderD(DocumentFrequencies.count(words), lambda number: words[int(number)])
    return 100 * float(np.mean([scorer.score(str(i), [split_words(text)])[0] for i, text in enumerate(generated)]))


@torch.no_grad()
def answers(model: nn.Module, head: nn.Module, split: Split, data: Data) -> dict[str, float]:
    """`answer_nll`: of the soft scores of all answers, a question. `vqa`: the official accuracy, in percent."""
    total, scores = 0.0, []
    for rows in _pieces(len(split.questions)):
        chosen = adapter.batch(split.images, take(split.questions, rows), split.scores_QA[rows])
        logits_QA = adapter.answer_logits(model, head, chosen).double()
        total += float(F.binary_cross_entropy_with_logits(logits_QA, split.scores_QA[rows].double(), reduction="sum"))
        scores += [
            question_accuracy(data.answers[a], split.answers[q])
            for a, q in zip(logits_QA.argmax(-1).tolist(), rows.tolist(), strict=True)
        ]
    return {"answer_nll": total / len(scores), "vqa": 100 * float(np.mean(scores))}


@torch.no_grad()
def judgments(model: nn.Module, head: nn.Module, split: Split, task: str) -> dict[str, float]:
    """Of entailment, NLVR2 or VCR (judging.py): `TASK_nll`, of the right label; `TASK`, the accuracy in percent, for
    VCR of answer and rationale together (Q->AR)."""
    judged, total, right = split.judged[task], 0.0, []
    for questions in torch.arange(len(judged)).split(AT_ONCE):
        texts, labels_Q = take(judged.texts, judged.rows(questions)), judged.labels_Q[questions]
        logits_QC = adapter.judging_logits(model, head, split.images, texts, task).double()
        total += float(F.cross_entropy(logits_QC, labels_Q, reduction="sum"))
        right.append(logits_QC.argmax(1) == labels_Q)
    right_Q = torch.cat(right)
    if task == "vcr":
        right_Q = right_Q.view(-1, 2).all(1)
    return {f"{task}_nll": total / len(judged), task: 100 * float(right_Q.double().mean())}


@torch.no_grad()
def retrieval(model: nn.Module, split: Split, *, among_few: bool = False) -> dict[str, float]:
    """Of captions searching images: `r1`, in percent; an image counts as found if the caption is true for it.
    `match_nll`, where scores are logits: of those images together.

    A model that fuses each pair searches `CANDIDATES` images for one caption of each image: its own, and others of
    which the caption is not true. With `among_few` every model does.
    """
    if adapter.embeds(model) and not among_few:
        scores_NI = adapter.similarity(model, split.images, split.captions).double()
        true_NI = torch.from_numpy(split.true_NI)
    else:
        scores_NI, true_NI = _among_few(model, split)
    best_N = scores_NI.argmax(1, keepdim=True)
    found = {"r1": 100 * float(true_NI.gather(1, best_N).double().mean())}
    if adapter.has_temperature(model):
        right_N = scores_NI.masked_fill(~true_NI, float("-inf")).logsumexp(1)
        found["match_nll"] = float((scores_NI.logsumexp(1) - right_N).mean())
    return found


def text_alone(data: Data, seed: int) -> dict[str, float]:
    """Return what a seed's training texts give without any image, on test, in percent.

    `vqa`: the majority answer to the same question text. `entailment`: naive Bayes on the hypothesis' words. `nlvr2`,
    `vcr`: chance, since their texts reveal nothing.
    """
    train, test, found = data.train(seed), data.test, {}
    if "vqa" in data.tasks:
        known, asked = _questions(train), _questions(test)
        answers = prior_predictions(known, asked)["per question text"]
        scores = [question_accuracy(answers[q.question_id], q.answers) for q in asked]
        found["vqa"] = 100 * float(np.mean(scores))
    if "entailment" in test.judged:
        known_texts, judged = train.judged["entailment"], test.judged["entailment"]
        labels = map(str, known_texts.labels_Q.tolist())
        bayes = HypothesisOnly(zip(known_texts.texts.words, labels, strict=True))
        right = [
            bayes.predict(text) == str(label)
            for text, label in zip(judged.texts.words, judged.labels_Q.tolist(), strict=True)
        ]
        found["entailment"] = 100 * float(np.mean(right))
    return found | {task: chance for task, chance in (("nlvr2", 50.0), ("vcr", 6.25)) if task in test.judged}


def _questions(split: Split) -> list[AnsweredQuestion]:
    rows = zip(split.questions.words, split.answers, split.questions.owner_N.tolist(), strict=True)
    return [
        AnsweredQuestion(
            question_id=str(n), image_id=str(image), text=text, question_type="", answer_type="", answers=answers
        )
        for n, (text, answers, image) in enumerate(rows)
    ]


def _among_few(model: nn.Module, split: Split) -> tuple[Tensor, Tensor]:
    """[I, CANDIDATES] scores, and which of them are of the caption's own image: the first column."""
    owners = split.captions.owner_N
    first_I = torch.tensor([int((owners == i).nonzero()[0]) for i in range(len(split.images))])
    wrong_II = torch.from_numpy(~split.true_NI)[first_I].double()
    count = min(CANDIDATES - 1, int(wrong_II.sum(1).min()))
    drawn_IK = torch.multinomial(wrong_II, count, generator=torch.Generator().manual_seed(0))  # for every arm the same
    images_IK = torch.cat([torch.arange(len(first_I))[:, None], drawn_IK], 1)
    every = adapter.image(split.images, torch.arange(len(split.images)))
    texts = take(split.captions, first_I)
    if adapter.embeds(model):
        scores_IK = adapter.similarity(model, split.images, texts).gather(1, images_IK)
    else:
        scores_IK = torch.cat(
            [
                adapter.pair_scores(model, every, adapter.text(take(texts, rows)), images_IK[rows])
                for rows in torch.arange(len(first_I)).split(AT_ONCE // CANDIDATES)
            ]
        )
    own_IK = torch.zeros_like(images_IK, dtype=torch.bool)
    own_IK[:, 0] = True
    return scores_IK.double(), own_IK
