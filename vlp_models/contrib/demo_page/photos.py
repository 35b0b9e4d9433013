"""Photos of the demo page: open an uploaded one safely, draw boxes on it, and search the indexed ones by text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageDraw, ImageFont

from vlp_models.common.workspace import Workspace
from vlp_models.data.images import FORMATS, ImageError
from vlp_models.data.mapped import ImagePaths
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_rows
from vlp_models.errors import CheckpointError, DataError
from vlp_models.serving.images import MAX_BYTES, decode_checked
from vlp_models.serving.search import ImageSearch
from vlp_models.tasks.base import load_task_model
from vlp_models.tasks.retrieval import Retrieval

SHOWN = 720  # pixels of a photo's longer side on the page
BOX_COLOR, IMPORTANT_COLOR = (60, 60, 60), (255, 120, 0)
MAX_PAIRS = 1000  # photos that a model without embeddings compares with a text, one forward pass each
TOP = 6
EXAMPLES = 8
Box = Sequence[float]  # x1, y1, x2, y2 as fractions of width and height


def open_photo(path: str | Path) -> Image.Image:
    """Open a photo as upright RGB, within the predictor's limits (serving/images.py).

    Raises:
        DataError: `decode_checked` rejects it, or it is larger than `MAX_BYTES`. The message names the file without its
            folder, which is private to the server.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path.name}: larger than {MAX_BYTES >> 20} MB")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path.name}: cannot be read ({error.strerror})") from None
    try:
        return decode_checked(content)
    except ImageError as error:
        raise DataError(f"{path.name}: {error}") from None


def scale_for_page(photo: Image.Image, longest: int = SHOWN) -> Image.Image:
    """Return a copy whose longer side is at most `longest` pixels; small photos are enlarged by whole factors."""
    if max(photo.size) <= longest:
        # Whole factors only, so that all pixels of a small scene are enlarged alike.
        factor = longest // max(photo.size)
        return photo.resize((photo.width * factor, photo.height * factor), Image.Resampling.BICUBIC)
    copy = photo.copy()
    copy.thumbnail((longest, longest))
    return copy


def draw_boxes(photo: Image.Image, boxes: Sequence[Box], important: Collection[int] = ()) -> Image.Image:
    """Return the scaled photo with thin boxes; those whose index is in `important` are thick and numbered from 1."""
    picture = scale_for_page(photo)
    draw = ImageDraw.Draw(picture)
    thick, font = max(3, max(picture.size) // 200), ImageFont.load_default(max(14, max(picture.size) // 36))
    sides = (*picture.size, *picture.size)
    # Fractions of width and height -> pixels of the scaled picture.
    corners = [_clip([round(v * s) for v, s in zip(box, sides, strict=True)], picture.size) for box in boxes]
    for box in corners:
        draw.rectangle(box, outline=BOX_COLOR, width=1)  # plain-ok
    for rank, number in reversed(list(enumerate(important, start=1))):  # the most important one on top
        draw.rectangle(corners[number], outline=IMPORTANT_COLOR, width=thick)  # plain-ok
        position = (corners[number][0] + thick, corners[number][1] + thick)
        label = draw.textbbox(position, str(rank), font=font)
        draw.rectangle((label[0] - 2, label[1] - 2, label[2] + 2, label[3] + 2), fill=IMPORTANT_COLOR)
        draw.text(position, str(rank), fill=(0, 0, 0), font=font)
    return picture


def _clip(box: Sequence[int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Clip a box to the image, at least a pixel wide and high: Pillow rejects crossed corners."""
    left, top = min(max(box[0], 0), size[0] - 1), min(max(box[1], 0), size[1] - 1)
    return left, top, max(left, min(box[2], size[0]) - 1), max(top, min(box[3], size[1]) - 1)


def find_examples(workspace: Workspace, split: str, count: int = EXAMPLES) -> list[Path]:
    """Return files of evenly spaced photos of a split, as examples to click; unreadable ones are left out."""
    splits = pa.array([split])
    images = read_rows(
        "images", workspace.validated, lambda rows: pc.is_in(rows["split"], value_set=splits), ["path", "split"]
    )
    paths = [workspace.root / path for path in images["path"].to_pylist()]
    number, examples = min(count, len(paths)), []
    # Evenly spaced over the split, so that the examples differ.
    for path in (paths[i * len(paths) // number] for i in range(number)):
        if path.suffix.lower() in FORMATS:
            with suppress(DataError):
                open_photo(path)
                examples.append(path)
    return examples


def photo_finder(workspace: Workspace) -> Callable[[str], Path | None]:
    """Return a function: id of an image -> its file, if the validated tables have it."""
    paths = ImagePaths(workspace.validated)

    def find(image_id: str) -> Path | None:
        path = paths.find(image_id)
        return None if path is None else workspace.root / path

    return find


class PhotoSearch:
    """Searches the photos of one split of the shards by text; photos are embedded at the first search.

    Raises:
        DataError: the shards do not have the split.
        CheckpointError: the shards' regions are of another detector than the model was trained with, or the checkpoint
            is of another task.
    """

    def __init__(self, bundle: Path, workspace: Workspace, split: str, device: str = "cpu") -> None:
        task_model = load_task_model(bundle / "checkpoint", device=device)
        if not isinstance(task_model, Retrieval):
            raise CheckpointError(f"{bundle}: a model of the task {task_model.task}, not of retrieval")
        self.task_model = task_model
        self.split = split
        self.photos = ShardDataset(workspace.shards, split, task_model.prediction_view, **task_model.reader.flags)
        if not len(self.photos):
            raise DataError(f"{workspace.shards}: no photo in the split {split}")
        shards_detector, model_detector = self.photos.manifest.detector_id, task_model.info.detector_id
        if model_detector and shards_detector != model_detector:
            raise CheckpointError(
                f"{workspace.shards}: its regions are of {shards_detector or 'no detector'}, but the retrieval model "
                f"was trained on those of {model_detector}; `dvc repro` makes both again"
            )
        self.path = photo_finder(workspace)
        # Embeddings are compared at once; without them each photo costs a forward pass per search.
        self.photo_count = len(self.photos) if task_model.by_embeddings else min(len(self.photos), MAX_PAIRS)
        self._search = ImageSearch(task_model, self.photo_count, self.photos.__getitems__, device)

    def find(self, text: str, count: int = TOP) -> list[tuple[str, float]]:
        """Return the ids of the `count` best photos with their scores, best first.

        Scores are comparable within one search only.
        """
        ids = self.photos.image_ids()
        return [(ids[row], score) for row, score in self._search.find(text, count)]
