"""From predictions to scores, baselines and official result files, one dataset and split at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_table
from vlp_models.metrics.bootstrap import paired
from vlp_models.metrics.caption import CaptionSet, constant_caption, human_agreement, score_caption_sets
from vlp_models.metrics.nlvr import Judgement, majority_label, official_csv, score_nlvr
from vlp_models.metrics.retrieval import IMAGE_TO_TEXT, TEXT_TO_IMAGE, chance, score_ranks
from vlp_models.metrics.score import Score
from vlp_models.metrics.truth import score_truth
from vlp_models.metrics.vcr import CHANCE, Judged, score_vcr
from vlp_models.metrics.vcr import official_csv as vcr_csv
from vlp_models.metrics.vqa import AnsweredQuestion, prior_predictions, score_vqa
from vlp_models.workspace.paths import write_json, write_text

Prediction = Mapping[str, Any]
Report = Callable[[str], None]
BLANKED = "image blanked"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """baselines: metric -> baseline name -> value in percent."""

    scores: list[Score]
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)


def score_captioning(
    predictions: Sequence[Prediction], samples: Sequence[Sample], source: str, validated: Path, progress: Report
) -> Scored:
    """The beam's captions under the plain metric names, the greedy ones beside them.

    Baselines: one constant caption learnt from train, and people (each image's last reference against the others).
    """
    references = {sample.image_id: list(sample.captions) for sample in samples}
    captions = {p["image_id"]: p["caption"] for p in predictions}
    constant = constant_caption(_train_texts("captions", source, validated))
    sets = {
        "": CaptionSet(candidates=captions, references=references),
        "greedy": CaptionSet(candidates={p["image_id"]: p["greedy"] for p in predictions}, references=references),
    }
    if constant:
        sets["constant caption"] = CaptionSet(candidates=dict.fromkeys(references, constant), references=references)
    if predictions and "caption_blank" in predictions[0]:
        blank = {p["image_id"]: p["caption_blank"] for p in predictions}
        sets[BLANKED] = CaptionSet(candidates=blank, references=references)
    human = human_agreement(references)
    if human is not None:
        sets["human"] = human
    scored = score_caption_sets(sets, progress)
    scenes = read_truth(validated / "truth.jsonl", references.keys())
    if scenes:
        for name, caption_set in sets.items():
            scored[name] += score_truth(caption_set.candidates, scenes)[0]
    scores = scored.pop("")
    for suffix in ("greedy", BLANKED):
        scores += [_renamed(score, f"{score.metric} ({suffix})") for score in scored.get(suffix, ())]
    scored.pop("greedy")
    return Scored(scores=scores, baselines=_by_metric(scored))


def score_answers(
    predictions: Sequence[Prediction], samples: Sequence[Sample], source: str, validated: Path, progress: Report
) -> Scored:
    """Official accuracy overall, per answer type, per question type.

    Baselines, learnt from train: the commonest answer overall, per question type and per question text.
    """
    progress("VQA accuracy")
    questions = [
        AnsweredQuestion(
            question_id=sample.sample_id,
            image_id=sample.image_id,
            text=sample.text,
            question_type=sample.question_type,
            answer_type=sample.answer_type,
            answers=sample.answers,
        )
        for sample in samples
    ]
    scores = score_vqa({p["question_id"]: p["answer"] for p in predictions}, questions)
    baselines = {
        name: score_vqa(answers, questions)
        for name, answers in prior_predictions(_train_questions(source, validated), questions).items()
    }
    if predictions and "answer_blank" in predictions[0]:
        blank = score_vqa({p["question_id"]: p["answer_blank"] for p in predictions}, questions)
        baselines[BLANKED] = blank
        scores += _blank_control(scores[0], blank[0])
    return Scored(scores=scores, baselines=_by_metric(baselines))


def score_statements(
    predictions: Sequence[Prediction], samples: Sequence[Sample], source: str, validated: Path, progress: Report
) -> Scored:
    """Accuracy and consistency over the statements whose label is known. Baseline: the split's own majority label."""
    progress("NLVR accuracy and consistency")
    labels = {sample.sample_id: sample.label for sample in samples}

    def judgements(key: str) -> list[Judgement]:
        rows = ((p, labels[p["statement_id"]]) for p in predictions)
        return [
            Judgement(group=p["group"], label=label, prediction=bool(p[key]), item=p["statement_id"])
            for p, label in rows
            if label is not None
        ]

    scores = score_nlvr(judgements("prediction"))
    baselines = {}
    labelled = [(sample.group, sample.label) for sample in samples if sample.label is not None]
    if labelled:
        commoner = majority_label(label for _, label in labelled)
        constant = [Judgement(group=group, label=label, prediction=commoner) for group, label in labelled]
        baselines["majority label"] = score_nlvr(constant)
    if predictions and "prediction_blank" in predictions[0]:
        blank = score_nlvr(judgements("prediction_blank"))
        baselines[BLANKED] = blank
        scores += _blank_control(scores[0], blank[0])
    return Scored(scores=scores, baselines=_by_metric(baselines))


def score_retrieval(
    predictions: Sequence[Prediction], samples: Sequence[Sample], source: str, validated: Path, progress: Report
) -> Scored:
    """Text to image, as the paper has it, and image to text. Baseline: chance, with this many images and captions."""
    progress("recall and median rank")
    owners = [p["image_id"] for p in predictions for _ in p["captions"]]
    text_ranks = np.array([caption["rank"] for p in predictions for caption in p["captions"]], dtype=np.int64)
    image_ranks = np.array([p["rank"] for p in predictions], dtype=np.int64)
    own_counts = [len(p["captions"]) for p in predictions]
    texts = [f"{p['image_id']}#{number}" for p in predictions for number in range(len(p["captions"]))]
    scores = score_ranks(text_ranks, owners, len(predictions), TEXT_TO_IMAGE, items=texts)
    scores += score_ranks(image_ranks, [p["image_id"] for p in predictions], len(owners), IMAGE_TO_TEXT)
    guessed = chance([1], len(predictions), TEXT_TO_IMAGE) | chance(own_counts, len(owners), IMAGE_TO_TEXT)
    return Scored(scores=scores, baselines={metric: {"chance": round(value, 4)} for metric, value in guessed.items()})


def score_choices(
    predictions: Sequence[Prediction], samples: Sequence[Sample], source: str, validated: Path, progress: Report
) -> Scored:
    """VCR's three accuracies. Baselines: chance, and the same model with the images blanked."""
    progress("VCR accuracies")

    def right(chosen: int | None, label: int | None) -> bool | None:
        return None if chosen is None or label is None else chosen == label

    def judged(suffix: str) -> list[Judged]:
        return [
            Judged(
                group=p["image_id"],
                item=p["choice_id"],
                answer_right=right(p[f"answer{suffix}"], p["answer_label"]),
                rationale_right=right(p[f"rationale{suffix}"], p["rationale_label"]),
            )
            for p in predictions
        ]

    scores = score_vcr(judged(""))
    baselines = {metric: {"chance": value} for metric, value in CHANCE.items()}
    if predictions and "answer_blank" in predictions[0]:
        blank = score_vcr(judged("_blank"))
        for metric, values in _by_metric({BLANKED: blank}).items():
            baselines[metric] |= values
        known = [(score, other) for score, other in zip(scores, blank, strict=True) if score.value is not None]
        if known:
            scores = scores + _blank_control(*known[-1])  # Q->AR, or what the run did learn
    return Scored(scores=scores, baselines=baselines)


def write_official(
    task: str, predictions: Sequence[Prediction], source: str, split: str, directory: Path, validated: Path
) -> Path | None:
    """The file the dataset's own evaluation takes: COCO and VQA result JSON, NLVR's CSV of images and verdicts, VCR's
    CSV of probabilities.

    None for retrieval, which has no official file, and for VCR where labels are known: the leaderboard's file gives
    the rationales of all four answers, which are worked out only where the right one is hidden.
    """
    if task == "retrieval":
        return None
    if task == "vcr":
        rows = [(p["choice_id"], p["answer_probabilities"], p["rationale_probabilities"]) for p in predictions]
        if not all(answers and len(rationales) == len(answers) for _, answers, rationales in rows):
            return None
        path = directory / f"vcr_{source}_{split}_predictions.csv"
        write_text(path, vcr_csv([(str(_own_id(name)), answers, rationales) for name, answers, rationales in rows]))
        return path
    if task == "captioning":
        path = directory / f"captions_{source}_{split}_results.json"
        write_json(path, [{"image_id": _own_id(p["image_id"]), "caption": p["caption"]} for p in predictions])
    elif task == "vqa":
        path = directory / f"vqa_{source}_{split}_results.json"
        write_json(path, [{"question_id": _own_id(p["question_id"]), "answer": p["answer"]} for p in predictions])
    else:
        path = directory / f"nlvr_{source}_{split}_predictions.csv"
        images = read_table("images", validated)
        images = images.filter(pc.equal(images["source"], source))
        names = dict(zip(images["image_id"].to_pylist(), images["path"].to_pylist(), strict=True))
        write_text(path, official_csv((Path(names[p["image_id"]]).name, p["prediction"]) for p in predictions))
    return path


def _own_id(identifier: str) -> int | str:
    """The id within its source; a number where it is one, as COCO and VQA have it."""
    own = identifier.partition("/")[2]
    return int(own) if own.isascii() and own.isdigit() and len(own) < 19 else own


def _blank_control(score: Score, blank: Score) -> list[Score]:
    """What text alone can do, and how much the image adds to it."""
    scores = [_renamed(blank, f"{score.metric} ({BLANKED})")]
    if score.value is not None and blank.value is not None and score.evidence and blank.evidence:
        gain = paired(score.evidence, blank.evidence)
        value = score.value - blank.value
        scores.append(Score(metric=f"gain over {BLANKED}", value=value, n=score.n, evidence=gain))
    return scores


def _by_metric(scores: Mapping[str, Sequence[Score]]) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for name, several in scores.items():
        for score in several:
            if score.value is not None:
                result.setdefault(score.metric, {})[name] = round(score.value, 4)
    return result


def _renamed(score: Score, metric: str) -> Score:
    return Score(metric=metric, value=score.value, n=score.n, note=score.note, evidence=score.evidence)


def _train_rows(table: str, source: str, validated: Path) -> pa.Table:
    images = read_table("images", validated)
    chosen = pc.and_(pc.equal(images["source"], source), pc.equal(images["split"], "train"))
    rows = read_table(table, validated)
    return rows.filter(pc.is_in(rows["image_id"], value_set=images.filter(chosen)["image_id"].combine_chunks()))


def _train_texts(table: str, source: str, validated: Path) -> list[str]:
    return _train_rows(table, source, validated)["text"].to_pylist()


def _train_questions(source: str, validated: Path) -> list[AnsweredQuestion]:
    rows = _train_rows("questions", source, validated).to_pylist()
    return [
        AnsweredQuestion(
            question_id=row["question_id"],
            image_id=row["image_id"],
            text=row["text"],
            question_type=row["question_type"] or "",
            answer_type=row["answer_type"] or "",
            answers=row["answers"] or (),
        )
        for row in rows
    ]


def read_truth(path: Path, image_ids: Any) -> dict[str, dict[str, Any]]:
    """Image id -> scene graph, for those of `image_ids` whose scene is known."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as lines:
        scenes = (json.loads(line) for line in lines)
        return {scene["image_id"]: scene for scene in scenes if scene["image_id"] in image_ids and "objects" in scene}
