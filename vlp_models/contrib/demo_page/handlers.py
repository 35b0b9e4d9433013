"""What the demo page does: from an uploaded file to texts and a photo with boxes, independent of Gradio.

Errors are returned as a sentence in place of the result; nothing here raises a `VLPError`.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from vlp_models.contrib.demo_page.occlusion import (
    GRID,
    CachingExtractor,
    Occlusion,
    occlude_cells,
    occlude_regions,
    truncate_regions,
)
from vlp_models.contrib.demo_page.photos import PhotoSearch, draw_boxes, open_photo, scale_for_page
from vlp_models.contrib.demo_page.version_card import MEANINGLESS, VersionCard, describe_limits
from vlp_models.errors import VLPError
from vlp_models.serving.predictor import Predictor

if TYPE_CHECKING:
    from vlp_models.contrib.demo_page.corrections import Corrections
    from vlp_models.serving.neighbors import NeighborCaptioner
    from vlp_models.tasks.captioning import Captioning

NO_PHOTO = "Upload a photo first."
MAX_TEXT = 300  # characters; the model reads the first few dozen words
SIMILAR = 6  # training photos that are shown next to a caption of theirs
THUMBNAIL = 320  # pixels of a found photo's longer side
TITLES = {"captioning": "Captions", "vqa": "Answers", "retrieval": "Search"}


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """The photo with the boxes the model read; note: what the boxes mean."""

    picture: Image.Image
    note: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an event of the page shows.

    caption  the caption the version returns
    beam     the best of the beam, if the caption is a consensus; else empty
    answers  the most likely ones, with their probabilities
    photos   photos that were searched for with their scores, best first; or similar training photos with a caption
    problem  a sentence in place of the result, or next to it
    """

    caption: str = ""
    beam: str = ""
    greedy: str = ""
    answers: Sequence[tuple[str, float]] = ()
    photos: Sequence[tuple[Image.Image, str]] = ()
    problem: str = ""
    overlay: Overlay | None = None


class PhotoModel:
    """A version that reads a photo: a captioner or a question answerer."""

    def __init__(self, predictor: Predictor, card: VersionCard) -> None:
        if predictor.extractor is not None:
            predictor.extractor = CachingExtractor(predictor.extractor)  # type: ignore[assignment]
        self.predictor, self.card = predictor, card

    def predict(self, photo: Image.Image, question: str = "") -> tuple[dict[str, Any], Overlay]:
        """Return the prediction, and the photo with the regions it depends on."""
        prediction = self.predictor.predict([photo], [question] if question else None)[0]
        answer = prediction.get("caption") or prediction.get("answer") or ""
        return prediction, self._overlay(photo, question, answer)

    def _overlay(self, photo: Image.Image, question: str, answer: str) -> Overlay:
        kind = "answer" if question else "caption"
        task_model, extractor = self.predictor.task_model, self.predictor.extractor
        if not answer:
            return Overlay(picture=scale_for_page(photo), note=f"No boxes: the model returned an empty {kind}.")
        # Without regions the boxes are cells of a grid, blanked one at a time.
        if extractor is None:  # the model reads pixels
            occlusion, cells = occlude_cells(task_model, photo, question, answer)
            boxes = cells.tolist()
            meaning = f"This model reads pixels, not regions: the thin boxes are the cells of a {GRID} x {GRID} grid."
            note = f"{meaning} {_describe_effect(occlusion, kind, 'blanking each cell')}"
        else:
            regions = truncate_regions(extractor.extract([photo])[0], task_model.info.max_regions)
            if not len(regions):
                return Overlay(picture=scale_for_page(photo), note="No boxes: no region was found in this photo.")
            occlusion = occlude_regions(task_model, regions, question, answer)
            boxes = np.asarray(regions.boxes).tolist()
            if len(boxes) == 1:
                note = "The thin box is the only region that the model read, so parts of it cannot be compared"
                note += f" for the {kind}."
            else:
                effect = _describe_effect(occlusion, kind, "leaving out each region")
                note = f"The thin boxes are the {len(boxes)} regions that the model read. {effect}"
        return Overlay(picture=draw_boxes(photo, boxes, occlusion.most_important), note=note)


@dataclass(frozen=True, kw_only=True)
class Page:
    """The models of the page.

    neighbors captions photos in place of a captioner; `missing` has the reason
    training_photo  returns the file of one of its photos, or None
    missing   task -> why it has no model, and what to do
    examples  files of photos to click
    corrections  where corrected captions go; None: the page accepts none
    lock      one prediction at a time
    """

    captioner: PhotoModel | None = None
    neighbors: NeighborCaptioner | None = None
    training_photo: Callable[[str], Path | None] | None = None
    answerer: PhotoModel | None = None
    search: PhotoSearch | None = None
    search_card: VersionCard | None = None
    missing: Mapping[str, str]
    examples: Sequence[Path] = ()
    corrections: Corrections | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def tasks(self) -> list[str]:
        """Return the tasks that the page has a model for, or captions of similar photos."""
        return [
            task
            for task in TITLES
            if self._version(task) is not None or (task == "captioning" and self.neighbors is not None)
        ]

    @property
    def captions(self) -> bool:
        """Return whether the page captions photos."""
        return self.captioner is not None or self.neighbors is not None

    @property
    def title(self) -> str:
        """Return what a visitor can do here."""
        parts = ["caption a photo"] if self.captions else []
        if self.answerer:
            parts.append("ask about it" if self.captions else "ask about a photo")
        if self.search:
            parts.append("search photos by text")
        text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
        return f"{text[:1].upper()}{text[1:]}"

    @property
    def subtitle(self) -> str:
        """Return whose the results are."""
        if self.neighbors is None:
            return "The results are a model's guesses."
        return "No trained model is good enough to caption photos yet, so this page shows captions of similar photos."

    @property
    def warning(self) -> str:
        """Return a caveat if a model was trained on synthetic scenes only; else nothing."""
        versions = [version for task in self.tasks if (version := self._version(task)) is not None]
        if not any(MEANINGLESS in card.data for card, _ in versions):
            return ""
        return "Trained on drawn scenes: use the examples. Results for photographs are meaningless."

    def show(self, path: str | None) -> Result:
        """Return an uploaded photo without boxes, for a page without a captioner."""
        try:
            return Result(overlay=Overlay(picture=scale_for_page(open_photo(path)), note="") if path else None)
        except VLPError as error:
            return Result(problem=_as_sentence(error))

    def caption(self, path: str | None) -> Result:
        """Caption an uploaded photo."""
        if not path or not self.captions:
            return Result(problem=self.missing.get("captioning", NO_PHOTO) if path else NO_PHOTO)
        similar: list[tuple[str, str]] = []
        try:
            photo = open_photo(path)
            with self.lock:
                if self.captioner is not None:
                    prediction, overlay = self.captioner.predict(photo)
                else:
                    assert self.neighbors is not None
                    prediction = {"caption": self.neighbors.caption([photo])[0]}
                    similar = self.neighbors.similar(photo, SIMILAR)
                    overlay = Overlay(picture=scale_for_page(photo), note="")
        except VLPError as error:
            return Result(problem=_as_sentence(error))
        # Only a consensus comes with `beam`; a caption of another photo has neither `beam` nor `greedy`.
        names = ("caption", "beam", "greedy")
        caption, beam, greedy = (prediction[name] or "(nothing)" if name in prediction else "" for name in names)
        return Result(caption=caption, beam=beam, greedy=greedy, overlay=overlay, photos=self._training_photos(similar))

    def _training_photos(self, similar: Sequence[tuple[str, str]]) -> list[tuple[Image.Image, str]]:
        """Open those that are on this disk."""
        photos = []
        for image_id, caption in similar:
            path = self.training_photo(image_id) if self.training_photo is not None else None
            if path is not None:
                with suppress(VLPError):
                    photos.append((scale_for_page(open_photo(path), THUMBNAIL), caption))
        return photos

    def correct(self, path: str | None, shown: str, caption: str, by: str) -> Result:
        """Put a corrected caption of a photo into the inbox. shown: the caption that the page shows."""
        if self.corrections is None or not path or not shown:
            return Result(problem=NO_PHOTO)
        version = self.version_title("captioning") if self.captioner else "the captions of similar photos"
        try:
            name = self.corrections.save(Path(path), caption=caption, by=by, version=version, draft=shown)
        except (VLPError, OSError) as error:
            return Result(problem=_as_sentence(error))
        return Result(caption=f"Thank you. It is in the inbox as {name}; `vlp ingest` checks it.")

    def answer(self, path: str | None, question: str) -> Result:
        """Answer a question about an uploaded photo."""
        # Line ends and repeated spaces become one space.
        text = " ".join(question.split())
        if self.answerer is None:
            return Result(problem=self.missing.get("vqa", ""))
        if not path or not text:
            return Result(problem="Enter a question first." if path else NO_PHOTO)
        if len(text) > MAX_TEXT:
            return Result(problem=f"The question has {len(text)} characters; the limit is {MAX_TEXT}.")
        try:
            with self.lock:
                prediction, overlay = self.answerer.predict(open_photo(path), text)
        except VLPError as error:
            return Result(problem=_as_sentence(error))
        answers = [(answer or "(empty)", float(p)) for answer, p in prediction["top"]]
        return Result(answers=answers, overlay=overlay)

    def find(self, text: str) -> Result:
        """Search the indexed photos by text."""
        query = " ".join(text.split())
        if self.search is None:
            return Result(problem=self.missing.get("retrieval", ""))
        if not query or len(query) > MAX_TEXT:
            return Result(problem=f"Describe the photo to find in at most {MAX_TEXT} characters.")
        try:
            with self.lock:
                # The lock covers the prediction only, not the opening of the photos below.
                matches = self.search.find(query)
        except VLPError as error:
            return Result(problem=_as_sentence(error))
        photos, not_on_disk = [], []
        for image_id, score in matches:
            path = self.search.path(image_id)
            try:
                photo = open_photo(path) if path is not None else None
            except VLPError:
                # A file that is damaged by now counts as missing.
                photo = None
            if photo is None:
                not_on_disk.append(image_id)
            else:
                photos.append((scale_for_page(photo, THUMBNAIL), f"{score:.2f} {image_id.rpartition('/')[2]}"))
        problem = f"Also found, but not on this disk: {', '.join(not_on_disk)}." if not_on_disk else ""
        return Result(photos=photos, problem=problem)

    def about(self, task: str) -> str:
        """Return Markdown: the task's version, what it was trained on, its scores and its limits."""
        version = self._version(task)
        if version is None:
            return f"**{TITLES[task]}**\n\n{self.missing.get(task, '')}"
        card, task_model = version
        lines = [f"{card.title}, family {card.family}, of the run {card.run}."]
        if task == "retrieval" and self.search is not None:
            lines.append(f"It searches {self.search.photo_count:,} photos of the split {self.search.split}.")
        elif task_model.search:
            lines.append(f"Caption search: {task_model.search}.")
        lines += [card.data, *card.history, *card.figures]
        # Names may have characters that Markdown reads as markup.
        facts = "\n".join("- " + re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", line) for line in lines)
        limits = "\n".join(f"- {line}" for line in describe_limits(task_model))
        return f"**{TITLES[task]}**\n\n{facts}\n\nLimits:\n\n{limits}"

    def caption_labels(self) -> tuple[str, str]:
        """Return the labels of the caption and of the beam's, which is empty if the two are the same."""
        if self.captioner is None:
            return "A caption of similar photos", ""
        settings = cast("Captioning", self.captioner.predictor.task_model).caption_search.settings
        if not settings.consensus_samples:
            return "Caption", ""
        # The beam's caption is one of the candidates.
        return f"Caption, best of {settings.consensus_samples + 1}", "Most likely caption"

    def version_title(self, task: str) -> str:
        """Return the title of the task's version, or why it has none."""
        version = self._version(task)
        return version[0].title if version else self.missing.get(task, "")

    def _version(self, task: str) -> tuple[VersionCard, Any] | None:
        if task == "retrieval":
            if self.search is None or self.search_card is None:
                return None
            # Retrieval has no `PhotoModel`: it searches indexed photos.
            return self.search_card, self.search.task_model
        model = self.captioner if task == "captioning" else self.answerer
        return (model.card, model.predictor.task_model) if model is not None else None


def _describe_effect(occlusion: Occlusion, kind: str, method: str) -> str:
    """Describe how much less likely the caption or answer is without each of the most important boxes."""
    if not occlusion.most_important:
        return f"No single one is decisive: {method} in turn hardly changes the probability of the {kind}."
    effects = []
    for rank, number in enumerate(occlusion.most_important, start=1):
        loss = occlusion.losses[number]  # nats
        # exp(loss) is the factor between the two probabilities: small factors are shown as a percentage.
        if loss < math.log(2):
            factor = f"{100 * (1 - math.exp(-loss)):.0f}%"
        else:
            factor = "over 1,000 times" if loss > math.log(1000) else f"{math.exp(loss):.1f} times"
        effects.append(f"without {rank}, it is {factor} less likely")
    return f"The thick ones matter most to this {kind} ({method} in turn): {'; '.join(effects)}."


def _as_sentence(error: VLPError | OSError) -> str:
    # The first 400 characters: a library's message may be long.
    text = str(error).strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:400]}."
