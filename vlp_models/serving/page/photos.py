"""A photo that somebody dropped: checked by its header before anything is decoded, upright, and drawn on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vlp_models.common.workspace import Workspace
from vlp_models.data.images import ImageError
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table
from vlp_models.errors import CheckpointError, DataError
from vlp_models.metrics.retrieval import top_columns
from vlp_models.models.protocols import Embeds, ScoresPairs
from vlp_models.serving.images import MAX_BYTES, checked
from vlp_models.tasks.base import load_task_model
from vlp_models.tasks.retrieval import EncodedImage, Retrieval, score_pairs

SHOWN = 720  # pixels of a photo's longer side on the page
GIVEN, WEIGHED = (60, 60, 60), (255, 120, 0)
Box = Sequence[float]  # x1, y1, x2, y2 as fractions of width and height


def open_photo(path: str | Path) -> Image.Image:
    """The photo as RGB, turned as its EXIF says (data/images.py), by the predictor's own rule (serving/images.py).

    Raises:
        DataError: what `checked` refuses, or larger than `MAX_BYTES`. It names the file without its folder, which is
            the server's business.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path.name}: larger than {MAX_BYTES >> 20} MB")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path.name}: can't be read ({error.strerror})") from None
    try:
        return checked(content, path.suffix)
    except ImageError as error:
        raise DataError(f"{path.name}: {error}") from None


def shown(photo: Image.Image, longest: int = SHOWN) -> Image.Image:
    """A copy with a longer side of at most `longest` pixels; small ones are enlarged by whole factors."""
    if max(photo.size) <= longest:
        factor = longest // max(photo.size)
        return photo.resize((photo.width * factor, photo.height * factor), Image.Resampling.BICUBIC)
    copy = photo.copy()
    copy.thumbnail((longest, longest))
    return copy


def with_boxes(photo: Image.Image, boxes: Sequence[Box], weighed: Collection[int] = ()) -> Image.Image:
    """The photo as the page shows it: every box thin, those whose numbers are in `weighed` thick and numbered from 1 in
    its order."""
    drawn = shown(photo)
    draw = ImageDraw.Draw(drawn)
    thick, font = max(3, max(drawn.size) // 200), ImageFont.load_default(max(14, max(drawn.size) // 36))
    corners = [tuple(round(v * s) for v, s in zip(box, (*drawn.size, *drawn.size), strict=True)) for box in boxes]
    for box in corners:
        draw.rectangle(_within(box, drawn.size), outline=GIVEN, width=1)
    for place, number in reversed(list(enumerate(weighed, start=1))):  # the weightiest on top
        left, top, right, bottom = _within(corners[number], drawn.size)
        draw.rectangle((left, top, right, bottom), outline=WEIGHED, width=thick)
        label = draw.textbbox((left + thick, top + thick), str(place), font=font)
        draw.rectangle((label[0] - 2, label[1] - 2, label[2] + 2, label[3] + 2), fill=WEIGHED)
        draw.text((left + thick, top + thick), str(place), fill=(0, 0, 0), font=font)
    return drawn


def _within(box: Sequence[int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """At least a pixel wide and high, inside the picture: Pillow refuses corners that are crossed."""
    left, top = min(max(box[0], 0), size[0] - 1), min(max(box[1], 0), size[1] - 1)
    return left, top, max(left, min(box[2], size[0]) - 1), max(top, min(box[3], size[1]) - 1)


AT_ONCE = 32
MOST_PAIRS = 1000  # photos that a model without embeddings compares with a text, each in a pass of its own
TOP = 6


class PhotoSearch:
    """Photos are embedded at the first search, and kept.

    Raises `DataError` if there are no shards of the split; `CheckpointError` if its regions are not those of the
    detector that the model was trained on, or the checkpoint is of another task.
    """

    def __init__(self, bundle: Path, workspace: Workspace, split: str, device: str = "cpu") -> None:
        found = load_task_model(bundle / "checkpoint", device=device)
        if not isinstance(found, Retrieval):
            raise CheckpointError(f"{bundle}: a model of the task {found.task}, not of retrieval")
        self.task_model = found
        self.split = split
        self.photos = ShardDataset(workspace.shards, split, found.prediction_view, **found.reader.flags)
        if not len(self.photos):
            raise DataError(f"{workspace.shards}: no photo in the split {split}")
        held, wanted = self.photos.manifest.detector_id, found.info.detector_id
        if wanted and held != wanted:
            raise CheckpointError(
                f"{workspace.shards}: the regions there are of {held or 'no detector'}, the retrieval model was "
                f"trained on those of {wanted}; `dvc repro` makes both anew"
            )
        images = read_table("images", workspace.validated)
        self._paths = dict(zip(images["image_id"].to_pylist(), images["path"].to_pylist(), strict=True))
        self._root = workspace.root
        self._device = device
        self._embedded_ID: NDArray[np.float32] | None = None
        by_all_pairs = not found.by_embeddings
        self.photo_count = min(len(self.photos), MOST_PAIRS) if by_all_pairs else len(self.photos)

    def find(self, text: str, count: int = TOP) -> list[tuple[str, float]]:
        """The ids of the `count` photos that fit the text best, best first, with their scores; the higher the better,
        and comparable within one search alone."""
        similarity_I = (
            self._similarity(text) if self.task_model.by_embeddings else np.zeros(self.photo_count, np.float32)
        )
        places: list[int] = np.arange(self.photo_count).tolist()
        if self.task_model.by_pairs:
            shortlist = int(self.task_model.options.shortlist)
            if shortlist:
                places = top_columns(similarity_I[None], shortlist)[0].tolist()
            score_I = self._pair_scores(text, places)
        else:
            score_I = similarity_I
        best = top_columns(score_I[None], count)[0].tolist()
        ids = self.photos.image_ids()
        return [(ids[places[i]], float(score_I[i])) for i in best]

    def path(self, image_id: str) -> Path | None:
        path = self._paths.get(image_id)
        return None if path is None else self._root / path

    @torch.no_grad()
    def _similarity(self, text: str) -> NDArray[np.float32]:
        model = cast(Embeds, self.task_model.model)
        if self._embedded_ID is None:
            blocks = self._batches(range(len(self.photos)))
            self._embedded_ID = np.concatenate(
                [
                    model.embed_image(self.task_model.collate(b).to(self._device).image).float().cpu().numpy()
                    for b in blocks
                ]
            )
        tokens = self.task_model.tokenizer.encode_batch([text], self.task_model.info.max_text_len).to(self._device)
        similarity_I: NDArray[np.float32] = self._embedded_ID @ model.embed_text(tokens).float().cpu().numpy()[0]
        return similarity_I

    @torch.no_grad()
    def _pair_scores(self, text: str, places: Sequence[int]) -> NDArray[np.float32]:
        model, scores = cast(ScoresPairs, self.task_model.model), []
        for samples in self._batches(places):
            state = model.encode_image(self.task_model.collate(samples).to(self._device).image)
            encoded = [EncodedImage(state=state, row=row) for row in range(len(samples))]
            length = self.task_model.info.max_text_len
            scores.append(score_pairs(model, self.task_model.tokenizer, encoded, [text], max_text_len=length)[0])
        return np.concatenate(scores)

    def _batches(self, places: Sequence[int]) -> Iterator[list[Sample]]:
        for start in range(0, len(places), AT_ONCE):
            yield self.photos.__getitems__(places[start : start + AT_ONCE])
