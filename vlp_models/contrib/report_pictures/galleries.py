"""Galleries of the report: test images with what a model predicted and what is right, one gallery per task and model.

Examples are taken at even distances from the predictions, so they are not picked. `choose_highlights` takes the
pictures at the top of the page from them: right and wrong ones. `GALLERIES` maps a task to the function that turns its
predictions into cards; a task that is not in it, such as a plugin's, shows the fields of its predictions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.report_pictures.pictures import Picture, Pictures
from vlp_models.data.answers import most_frequent
from vlp_models.data.inputs import RegionInput
from vlp_models.data.tables import SPLITS, read_rows_of
from vlp_models.data.views import VIEWS
from vlp_models.errors import ParamsError
from vlp_models.evaluation.report import ReportContext
from vlp_models.metrics.caption import score_faithfulness
from vlp_models.metrics.vqa import question_accuracy
from vlp_models.models.meta_model import model_inputs
from vlp_models.registry.promotion.ranking import order_runs
from vlp_models.tasks import TASKS, task_class
from vlp_models.tasks.scoring import BLIND, Prediction, read_scenes

SAMPLE = 60  # predictions of each gallery that the highlights are chosen from
HIGHLIGHTS = 6  # cards at the top of the page, after the large one
WIDE = 400  # pixels of a wide picture's longer side
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of text. right: a tick or a cross in front; None: neither. after: small print behind the text."""

    text: str
    right: bool | None = None
    strong: bool = False
    soft: bool = False
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One example.

    picture, second_picture   the image, or both images of a pair
    lines, bars, below        text above, answers with their probabilities, text below
    summary, more, more_picture  what unfolds on a click: its label, lines, another picture
    right     whether the prediction is right; None if that is not known
    blind_right  the blind baseline gives the same answer, so the image was not needed
    """

    picture: Picture
    second_picture: Picture | None = None
    lines: Sequence[Line]
    bars: Sequence[tuple[str, float]] = ()
    below: Sequence[Line] = ()
    summary: str = ""
    more: Sequence[Line] = ()
    more_picture: Picture | None = None
    right: bool | None = None
    blind_right: bool = False


CardMaker = Callable[[Workspace, Pictures, Sequence[Prediction]], list[Card]]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """How a task's examples are shown.

    about   caption, after "Run ..., split ...: "
    cards   predictions -> cards
    wide    wide pictures
    short   cards are short, so all of `evaluate.gallery` are shown instead of half
    """

    title: str
    about: str
    cards: CardMaker
    wide: bool = False
    short: bool = False


@dataclass(frozen=True, kw_only=True)
class Examples:
    """One gallery of the page: the cards of a run on a split.

    sample  the predictions that the highlights are chosen from; total: number of predictions
    """

    gallery: Gallery
    model: str
    run: str
    split: str
    cards: Sequence[Card]
    sample: Sequence[Card]
    total: int


@dataclass(frozen=True, kw_only=True)
class Highlights:
    """The pictures at the top of the page, as (examples, card), and the rule that chose them."""

    cards: Sequence[tuple[Examples, Card]]
    rule: str


def read_galleries(context: ReportContext) -> list[Examples]:
    """Return one gallery per task and model, of its best run; the models of a task in the order of their best runs."""
    params, workspace = context.params, context.workspace
    pictures = Pictures(workspace, params.validate.max_image_pixels)
    with_boxes = Pictures(workspace, params.validate.max_image_pixels, regions=True)
    # `model_inputs` returns the inputs in the order of the models.
    inputs = dict(zip(params.models, model_inputs(params.models), strict=True))
    # The split of the promotion test first, then test before val before train.
    splits = sorted(params.evaluate.splits, key=lambda split: (split != params.promotion.split, -SPLITS.index(split)))
    result: list[Examples] = []
    used = {run.task for run in params.finetune.values()}
    for task in (name for name in TASKS if name in used):
        best_runs: dict[str, str] = {}
        for run in _best_first(context, task):
            best_runs.setdefault(params.model_of(run), run)
        for model, run in best_runs.items():
            thumbnails = with_boxes if isinstance(inputs[model].image, RegionInput) else pictures
            examples = read_examples(task, workspace, thumbnails, run, splits, params.evaluate.gallery, model=model)
            if examples is None:
                context.missing.append(f"reports/eval/{run}: no predictions")
            else:
                result.append(examples)
    return result


def _best_first(context: ReportContext, task: str) -> list[str]:
    """Return the task's runs as `register` ranks them, then those that do not compete: text-only, or not evaluated."""
    scores: dict[str, list[Row]] = {}
    for record in context.records:
        if record["task"] == task and not record["control"]:
            scores.setdefault(record["run"], []).append(dict(record))
    ranked: list[str] = []
    # Runs without a common dataset cannot be ranked; they stay in the order of params.yaml.
    with suppress(ParamsError):
        ranked += order_runs(context.params, task, scores)
    runs = [name for name, run in context.params.finetune.items() if run.task == task]
    runs.sort(key=lambda name: context.params.finetune[name].blank_images)
    return list(dict.fromkeys([*ranked, *runs]))


def choose_highlights(galleries: Sequence[Examples]) -> Highlights:
    """Choose a card for the large picture and HIGHLIGHTS others: right, wrong and unjudged ones, in turn by gallery.

    Right answers that the blind baseline gives as well come after the others, since they may owe nothing to the image.
    """
    if not galleries:
        return Highlights(cards=(), rule="")

    # By `right`, one queue per gallery, of the cards whose picture can be shown.
    queues: dict[bool | None, list[list[tuple[Examples, Card]]]] = {True: [], False: [], None: []}
    for gallery in galleries:
        for right, cards_of in queues.items():
            cards = [(gallery, c) for c in gallery.sample if c.right is right and c.picture.data]
            cards_of.append(sorted(cards, key=lambda item: item[1].blind_right))
    right_count, wrong_count = (sum(map(len, queues[right])) for right in (True, False))

    taken: list[tuple[Examples, Card]] = []
    # The large picture is of the first task: a right prediction, else one that cannot be judged.
    by_gallery = zip(queues[True], queues[None], queues[False], strict=True)
    first = next((queue for several in by_gallery for queue in several if queue), None)
    if first is not None:
        taken.append(first.pop(0))
    right_left, wrong_left, unknown_left = (sum(map(len, queues[right])) for right in (True, False, None))
    # Up to two of the others cannot be judged, more if there are too few that can. Half of the rest are wrong
    # predictions, more if there are too few right ones, fewer if there are too few wrong ones.
    unknown_cards = min(unknown_left, max(2, HIGHLIGHTS - right_left - wrong_left))
    judged_cards = HIGHLIGHTS - unknown_cards
    wrong_cards = min(wrong_left, max(judged_cards // 2, judged_cards - right_left))
    right_cards = min(right_left, judged_cards - wrong_cards)
    # Right cards first, then wrong ones, then those that cannot be judged.
    for right, number in ((True, right_cards), (False, wrong_cards), (None, unknown_cards)):
        taken += _take_in_turn(queues[right], number, {card.picture.image_id for _, card in taken})
    rule = f"Not picked by hand: an evenly spaced sample of the {galleries[0].split} split"
    if right_count or wrong_count:
        rule += (
            f", its first right and its first wrong predictions of each task in turn. {right_count} of the "
            f"{right_count + wrong_count} predictions in the sample are right; the galleries below have some of them"
        )
    if any(c.blind_right for gallery in galleries for c in gallery.sample):
        rule += ". Right answers that the blind baseline gives as well come last"
    return Highlights(cards=taken, rule=f"{rule}.")


def _take_in_turn(
    queues: Sequence[list[tuple[Examples, Card]]], number: int, used_images: set[str]
) -> list[tuple[Examples, Card]]:
    """Take `number` cards from the queues in turn, of images that are not shown yet unless none is left."""
    taken: list[tuple[Examples, Card]] = []
    while len(taken) < number and any(queues):
        for queue in queues:
            if queue and len(taken) < number:
                # The first card of an image that is not shown yet, else the first card of the queue.
                new = (i for i, (_, card) in enumerate(queue) if card.picture.image_id not in used_images)
                taken.append(queue.pop(next(new, 0)))
                used_images.add(taken[-1][1].picture.image_id)
    return taken


def read_examples(
    task: str, workspace: Workspace, pictures: Pictures, run: str, splits: Sequence[str], count: int, *, model: str
) -> Examples | None:
    """Read `count` examples of a run (half of them if the cards are long) from the first split with predictions.

    None if the run has no predictions.
    """
    gallery = GALLERIES.get(task) or make_plain_gallery(task)
    for split in splits:
        path = workspace.evaluation(run) / f"predictions-{split}.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            shown_rows = _evenly_spaced(rows, count if gallery.short else (count + 1) // 2)
            return Examples(
                gallery=gallery,
                model=model,
                run=run,
                split=split,
                cards=gallery.cards(workspace, pictures, shown_rows),
                sample=gallery.cards(workspace, pictures, _evenly_spaced(rows, SAMPLE)),
                total=len(rows),
            )
    return None


def _evenly_spaced(rows: Sequence[Row], count: int) -> list[Row]:
    """Return `count` rows at even distances; rows are sorted by image, so they are of different images if possible."""
    number = min(count, len(rows))
    # Position i is at i / number of the rows, rounded down, so the positions are distinct.
    return [rows[i * len(rows) // number] for i in range(number)]


def _captioning_cards(workspace: Workspace, pictures: Pictures, predictions: Sequence[Prediction]) -> list[Card]:
    """Captions with their references and, for synthetic scenes, whether they are true."""
    references = _rows_by_image("captions", workspace, predictions)
    captions = {row["image_id"]: row["caption"] for row in predictions}
    scenes = read_scenes(workspace.validated / "truth.jsonl", captions.keys())
    # `[1]`: image id -> whether its caption is true.
    faithful = score_faithfulness(captions, scenes)[1] if scenes else {}
    cards = []
    for row in predictions:
        right = faithful.get(row["image_id"])  # None: no scene to compare with
        after = {None: "", True: "true of the scene", False: "not true of the scene"}[right]
        caption = Line(text=row["caption"] or "(empty)", right=right, strong=True, after=after)
        # The greedy caption is shown only if the search found another one.
        greedy = [Line(text=f"greedy: {row['greedy']}", soft=True)] if row["greedy"] != row["caption"] else []
        reference_lines = [Line(text=reference["text"], soft=True) for reference in references.get(row["image_id"], ())]
        count = len(reference_lines)
        summary = f"{count} reference{'s' if count > 1 else ''}" if count else ""
        cards.append(
            Card(
                picture=pictures.get(row["image_id"]),
                lines=[caption, *greedy],
                summary=summary,
                more=reference_lines,
                right=right,
            )
        )
    return cards


def _vqa_cards(workspace: Workspace, pictures: Pictures, predictions: Sequence[Prediction]) -> list[Card]:
    """Questions with the five most likely answers and the annotators' most frequent one."""
    questions = _rows_by_id("questions", "question_id", workspace, predictions)
    cards = []
    for row in predictions:
        question = questions.get(row["question_id"], {"text": "", "answers": []})
        answers = question["answers"] or []
        below: list[Line] = []
        right = None
        if answers:
            accuracy = question_accuracy(row["answer"], answers)
            right = accuracy >= 0.5
            answer_text = row["answer"] or "(empty)"
            below.append(
                Line(text=f"answered {answer_text}", right=right, after=f"annotators: {most_frequent(answers)}")
            )
        if row.get("answer_blind"):
            below.append(Line(text=f"{BLIND}: {row['answer_blind']}", soft=True))
        cards.append(
            Card(
                picture=pictures.get(row["image_id"]),
                lines=[Line(text=question["text"], strong=True)],
                bars=[(text or "(empty)", float(probability)) for text, probability in row["top"]],
                below=below,
                right=right,
                blind_right=bool(right) and row.get("answer_blind") == row["answer"],
            )
        )
    return cards


def _statement_cards(workspace: Workspace, pictures: Pictures, predictions: Sequence[Prediction]) -> list[Card]:
    """Statements about one wide image (NLVR), or about two, the left one first (NLVR2), with prediction and label."""
    of_pairs = bool(predictions) and "pair_id" in predictions[0]
    table, key = ("image_pairs", "pair_id") if of_pairs else ("statements", "statement_id")
    if of_pairs:  # the table's rows are found by their first image
        predictions = [{**row, "image_id": row["image_ids"][0]} for row in predictions]
    statements = _rows_by_id(table, key, workspace, predictions)
    cards = []
    for row in predictions:
        # Public test sets have no labels.
        label = row["label"]
        after = "" if label is None else f", label {str(label).lower()}"
        prediction = Line(
            text=f"predicted {str(row['prediction']).lower()}",
            right=None if label is None else label == row["prediction"],
            after=f"(p of true {row['p_true']:.2f}{after})",
        )
        cards.append(
            Card(
                picture=pictures.get(row["image_id"]) if of_pairs else pictures.get(row["image_id"], WIDE),
                second_picture=pictures.get(row["image_ids"][1]) if of_pairs else None,
                lines=[Line(text=statements.get(row[key], {}).get("text", ""), strong=True)],
                below=[prediction],
                right=prediction.right,
            )
        )
    return cards


def _entailment_cards(workspace: Workspace, pictures: Pictures, predictions: Sequence[Prediction]) -> list[Card]:
    hypotheses = _rows_by_id("hypotheses", "hypothesis_id", workspace, predictions)
    cards = []
    for row in predictions:
        label = row["label"]
        prediction = Line(
            text=f"predicted {row['prediction']}",
            right=None if label is None else row["prediction"] == label,
            after=f"label {label}" if label else "",
        )
        cards.append(
            Card(
                picture=pictures.get(row["image_id"]),
                lines=[Line(text=hypotheses.get(row["hypothesis_id"], {"text": ""})["text"], strong=True)],
                bars=[(name, float(p)) for name, p in row["probabilities"].items()],
                below=[prediction],
                right=prediction.right,
            )
        )
    return cards


def _retrieval_cards(workspace: Workspace, pictures: Pictures, predictions: Sequence[Prediction]) -> list[Card]:
    """The first caption of an image, the rank of its image, and the image ranked first."""
    cards = []
    for row in predictions:
        if not row["captions"]:
            continue
        query = row["captions"][0]
        missed = query["rank"] > 1
        cards.append(
            Card(
                picture=pictures.get(row["image_id"]),
                lines=[
                    Line(text=query["caption"], strong=True),
                    Line(text=f"rank {query['rank']:,}", right=not missed),
                ],
                summary="ranked first" if missed else "",
                # `top` has (image id, score) pairs, best first.
                more_picture=pictures.get(query["top"][0][0]) if missed else None,
                right=not missed,
            )
        )
    return cards


def _vcr_cards(workspace: Workspace, pictures: Pictures, predictions: Sequence[Prediction]) -> list[Card]:
    """Questions with their answers and rationales: the chosen ones in bold, the right ones ticked."""
    questions = _rows_by_id("choices", "choice_id", workspace, predictions)
    cards = []
    for row in predictions:
        question = questions.get(row["choice_id"], {"text": "", "answers": [], "rationales": []})
        lines = [Line(text=question["text"], strong=True)]
        for kind, column in (("answer", "answers"), ("rationale", "rationales")):
            label, prediction = row[f"{kind}_label"], row[kind]
            for i, text in enumerate(question[column]):
                # A tick at the right choice, a cross at a wrong one that the model took, nothing at the others.
                right = None
                if i == label:
                    right = True
                elif i == prediction and label is not None:
                    right = False
                lines.append(Line(text=text, right=right, strong=i == prediction, soft=True))
        # A run of one subtask of VCR has no answers, only rationales.
        hidden = row["answer_label"] is None or row["answer"] is None
        answered_right = None if hidden else row["answer"] == row["answer_label"]
        cards.append(Card(picture=pictures.get(row["image_id"]), lines=lines, right=answered_right))
    return cards


def make_plain_gallery(task: str) -> Gallery:
    """Return the gallery of a task without one of its own: the text of the sample, and the fields of its prediction."""
    definition = task_class(task)
    view, id_key = VIEWS[definition.prediction_view], definition.id_key

    def cards(workspace: Workspace, pictures: Pictures, predictions: Sequence[Prediction]) -> list[Card]:
        # A prediction names its first image in `image_id`, or all of them in `image_ids`.
        shown = [{**row, "image_id": row.get("image_id") or (row.get("image_ids") or [""])[0]} for row in predictions]
        samples = _rows_by_id(view.name, view.id_column, workspace, shown) if view.table else {}
        return [_plain_card(row, samples.get(str(row.get(id_key)), {}), id_key, pictures) for row in shown]

    return Gallery(title=definition.title, about="evenly spaced predictions.", cards=cards)


def _plain_card(row: Prediction, sample: Row, id_key: str, pictures: Pictures) -> Card:
    below: list[Line] = []
    right: bool | None = None
    blind_right = False
    for name, value in row.items():
        if name in (id_key, "image_id") or name.endswith("_blind") or not isinstance(value, (str, int, float)):
            continue
        # What is right has the same name in the data, or is the most frequent answer to a question.
        answers = sample.get("answers") or []
        target = sample[name] if name in sample else most_frequent(answers) if answers else None
        if target is not None:
            right = str(value) == str(target)
            blind_right = bool(right and row.get(f"{name}_blind") == value)
        text = (
            f"{name.replace('_', ' ')}: {value:.3g}"
            if isinstance(value, float)
            else f"{name.replace('_', ' ')}: {value}"
        )
        below.append(Line(text=text, right=right, after="" if target is None else f"right: {target}"))
        if f"{name}_blind" in row:
            below.append(Line(text=f"{BLIND}: {row[f'{name}_blind']}", soft=True))
    text = str(sample.get("text") or "")
    lines = [Line(text=text, strong=True)] if text else []
    return Card(picture=pictures.get(row["image_id"]), lines=lines, below=below, right=right, blind_right=blind_right)


def _rows_by_image(table: str, workspace: Workspace, predictions: Sequence[Prediction]) -> dict[str, list[Row]]:
    """Read the table's rows of the predictions' images, by image id."""
    image_ids = pa.array(sorted({row["image_id"] for row in predictions}), pa.string())
    result: dict[str, list[Row]] = {}
    for row in read_rows_of(image_ids, table, workspace.validated).to_pylist():
        result.setdefault(row["image_id"], []).append(row)
    return result


def _rows_by_id(table: str, key: str, workspace: Workspace, predictions: Sequence[Prediction]) -> dict[str, Row]:
    return {row[key]: row for rows in _rows_by_image(table, workspace, predictions).values() for row in rows}


GALLERIES: dict[str, Gallery] = {
    "captioning": Gallery(
        title="Captions",
        about="evenly spaced images, not picked.",
        cards=_captioning_cards,
        short=True,
    ),
    "vqa": Gallery(
        title="Questions and answers",
        about="evenly spaced questions. Each percentage is the probability of that answer alone. A question may have "
        "several right answers, so its percentages need not sum to 100.",
        cards=_vqa_cards,
    ),
    "nlvr": Gallery(title="True or false", about="evenly spaced statements.", cards=_statement_cards, wide=True),
    "nlvr2": Gallery(
        title="True or false of two images", about="evenly spaced statements.", cards=_statement_cards, wide=True
    ),
    "entailment": Gallery(
        title="Entailment, neutral or contradiction", about="evenly spaced hypotheses.", cards=_entailment_cards
    ),
    "retrieval": Gallery(
        title="Images found by caption",
        about="the first caption of evenly spaced images; the picture is the image it describes.",
        cards=_retrieval_cards,
    ),
    "vcr": Gallery(
        title="Answers and rationales",
        about="evenly spaced questions. The model's choices are bold; it chooses the rationale given the right answer.",
        cards=_vcr_cards,
    ),
}
