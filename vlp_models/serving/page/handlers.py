"""What happens behind the page: from a dropped file to texts and a drawn-on photo. Knows nothing of Gradio.

What can't be done is said in a sentence where the answer would stand; nothing here raises a `VLPError`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from vlp_models.errors import VLPError
from vlp_models.serving.page.occlusion import GRID, Remembering, Weighed, given, weigh, weigh_cells
from vlp_models.serving.page.photos import PhotoSearch, open_photo, shown, with_boxes
from vlp_models.serving.page.version_card import Origin, limits
from vlp_models.serving.predictor import Predictor

if TYPE_CHECKING:
    from vlp_models.tasks.captioning import Captioning

NO_PHOTO = "Drop a photo first."
QUESTION_LENGTH = 300  # characters; the model reads the first few dozen words
TITLES = {"captioning": "Captions", "vqa": "Answers", "retrieval": "Search"}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The photo with what the model looked at; note: what the boxes mean."""

    picture: Image.Image
    note: str


@dataclass(frozen=True, kw_only=True)
class Captioned:
    """
    caption  what the version says
    beam     the best of the beam, where that is not `caption` by itself; else empty
    """

    caption: str = ""
    beam: str = ""
    greedy: str = ""
    problem: str = ""
    seen: Seen | None = None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """answers: the likeliest ones, with their probabilities."""

    answers: Sequence[tuple[str, float]] = ()
    problem: str = ""
    seen: Seen | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """photos: with their scores, best first."""

    photos: Sequence[tuple[Image.Image, str]] = ()
    problem: str = ""


class Eye:
    """One version that looks at a photo."""

    def __init__(self, predictor: Predictor, origin: Origin) -> None:
        if predictor.extractor is not None:
            predictor.extractor = Remembering(predictor.extractor)  # type: ignore[assignment]
        self.predictor, self.origin = predictor, origin

    def say(self, photo: Image.Image, question: str = "") -> tuple[dict[str, Any], Seen]:
        """The prediction, and the photo with the regions that it rests on."""
        prediction = self.predictor.predict([photo], [question] if question else None)[0]
        return prediction, self._seen(photo, question, prediction.get("caption") or prediction.get("answer") or "")

    def _seen(self, photo: Image.Image, question: str, said: str) -> Seen:
        task_model, extractor = self.predictor.task_model, self.predictor.extractor
        if extractor is None:
            return self._seen_in_cells(photo, question, said)
        regions = given(extractor.extract([photo])[0], task_model.info.max_regions)
        if not len(regions) or not said:
            why = "no region was found in this photo" if said else "the model said nothing"
            return Seen(picture=shown(photo), note=f"No boxes: {why}.")
        weighed = weigh(task_model, regions, question, said)
        picture = with_boxes(photo, np.asarray(regions.boxes).tolist(), weighed.weightiest)
        return Seen(picture=picture, note=_regions_note(weighed, "answer" if question else "caption"))

    def _seen_in_cells(self, photo: Image.Image, question: str, said: str) -> Seen:
        """Of a model that reads pixels."""
        if not said:
            return Seen(picture=shown(photo), note="No boxes: the model said nothing.")
        weighed, cells = weigh_cells(self.predictor.task_model, photo, question, said)
        picture = with_boxes(photo, cells.tolist(), weighed.weightiest)
        return Seen(picture=picture, note=_cells_note(weighed, "answer" if question else "caption"))


@dataclass(frozen=True, kw_only=True)
class Page:
    """missing: task -> why nothing answers it, and what helps."""

    captioner: Eye | None = None
    answerer: Eye | None = None
    search: PhotoSearch | None = None
    search_origin: Origin | None = None
    missing: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_one_at_a_time", threading.Lock())

    def caption(self, path: str | None) -> Captioned:
        if not path or self.captioner is None:
            return Captioned(problem=self.missing.get("captioning", NO_PHOTO) if path else NO_PHOTO)
        try:
            with self._lock:
                prediction, seen = self.captioner.say(open_photo(path))
        except VLPError as error:
            return Captioned(problem=_sentence(error))
        said = {name: prediction[name] or "(nothing)" for name in ("caption", "beam", "greedy") if name in prediction}
        return Captioned(**said, seen=seen)

    def answer(self, path: str | None, question: str) -> Answered:
        asked = " ".join(question.split())
        if self.answerer is None:
            return Answered(problem=self.missing.get("vqa", ""))
        if not path or not asked:
            return Answered(problem="Write a question first." if path else NO_PHOTO)
        if len(asked) > QUESTION_LENGTH:
            return Answered(problem=f"The question has {len(asked)} characters; at most {QUESTION_LENGTH} are read.")
        try:
            with self._lock:
                prediction, seen = self.answerer.say(open_photo(path), asked)
        except VLPError as error:
            return Answered(problem=_sentence(error))
        return Answered(answers=[(text or "(empty)", float(p)) for text, p in prediction["top"]], seen=seen)

    def find(self, text: str) -> Found:
        wanted = " ".join(text.split())
        if self.search is None:
            return Found(problem=self.missing.get("retrieval", ""))
        if not wanted or len(wanted) > QUESTION_LENGTH:
            return Found(problem=f"Write what the photo shows, in at most {QUESTION_LENGTH} characters.")
        try:
            with self._lock:
                found = self.search.find(wanted)
        except VLPError as error:
            return Found(problem=_sentence(error))
        photos, lost = [], []
        for image_id, score in found:
            path = self.search.path(image_id)
            try:
                photo = open_photo(path) if path is not None else None
            except VLPError:
                photo = None
            if photo is None:
                lost.append(image_id)
            else:
                photos.append((shown(photo, 320), f"{score:.2f} {image_id}"))
        problem = f"Found as well, but not on this disk: {', '.join(lost)}." if lost else ""
        return Found(photos=photos, problem=problem)

    def about(self, task: str) -> str:
        """Markdown: which version answers, what it learned from, and what it can't do."""
        version = self._version(task)
        if version is None:
            return f"**{TITLES[task]}**\n\n{self.missing.get(task, '')}"
        origin, task_model = version
        lines = [f"{origin.short}, family {origin.family}, fine-tuned by the run {origin.run}."]
        if task == "retrieval" and self.search is not None:
            lines.append(f"It searches {self.search.photo_count:,} photos of the split {self.search.split}.")
        elif task_model.search:
            lines.append(f"Captions are searched for: {task_model.search}.")
        lines += [origin.data, *origin.before, *origin.figures]
        told, cant = "\n".join(f"- {_plain(line)}" for line in lines), "\n".join(f"- {x}" for x in limits(task_model))
        return f"**{TITLES[task]}**\n\n{told}\n\nWhat it can't do:\n\n{cant}"

    def caption_labels(self) -> tuple[str, str]:
        """How the caption was found; and what its beam's own is called, empty where that is the caption."""
        if self.captioner is None:
            return "Caption", ""
        caption_search = cast("Captioning", self.captioner.predictor.task_model).caption_search
        return (
            f"Caption, {caption_search.caption_label}",
            f"Caption, {caption_search.beam_label}" if caption_search.settings.consensus_samples else "",
        )

    def answers(self, task: str) -> str:
        """One line: the version that answers, or why none does."""
        version = self._version(task)
        return f"{version[0].short}" if version else self.missing.get(task, "")

    def _version(self, task: str) -> tuple[Origin, Any] | None:
        if task == "retrieval":
            found = self.search is not None and self.search_origin is not None
            return (self.search_origin, self.search.task_model) if found else None  # type: ignore[union-attr, return-value]
        eye = self.captioner if task == "captioning" else self.answerer
        return (eye.origin, eye.predictor.task_model) if eye is not None else None

    @property
    def _lock(self) -> threading.Lock:
        lock: threading.Lock = self._one_at_a_time  # type: ignore[attr-defined]
        return lock


def _regions_note(weighed: Weighed, what: str) -> str:
    """What thin and thick boxes mean, in words."""
    count = len(weighed.losses)
    boxes = "The thin box is the one region" if count == 1 else f"The thin boxes are the {count} regions"
    text = f"{boxes} that the model was given."
    if count == 1:
        return f"{text} Which part of it matters can't be said."
    return f"{text} {_thick(weighed, what, left_out='left out one by one', by='leaving out each')}"


def _cells_note(weighed: Weighed, what: str) -> str:
    """The same of a model that reads pixels."""
    cells = f"The thin boxes are the cells of a grid of {GRID} x {GRID}, not objects."
    thick = _thick(weighed, what, left_out="blanked one by one", by="blanking each")
    return f"This model reads pixels, no regions. {cells} {thick}"


def _thick(weighed: Weighed, what: str, *, left_out: str, by: str) -> str:
    if not weighed.weightiest:
        return f"No single one decides: {left_out}, the {what} stays as likely."
    likely = [
        f"without {place}, it is {_times(weighed.losses[number])} less likely"
        for place, number in enumerate(weighed.weightiest, start=1)
    ]
    return f"The thick ones matter most to this {what}, by {by} in turn: {'; '.join(likely)}."


def _times(loss: float) -> str:
    """Nats in words: 40%, 3 times."""
    if loss < math.log(2):
        return f"{100 * (1 - math.exp(-loss)):.0f}%"
    return "over 1,000 times" if loss > math.log(1000) else f"{math.exp(loss):.1f} times"


def _sentence(error: VLPError) -> str:
    text = str(error).strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:400]}."


def _plain(text: str) -> str:
    """Without what Markdown would take for its own."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|~" else c for c in text)
