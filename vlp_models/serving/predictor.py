"""Run a bundle (model and region extractor) on images: captions, answers, labels.

A bundle (serving/bundle.py) is the form in which the registry stores a version, and in which `vlp export` writes one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.workspace import SEARCH
from vlp_models.errors import CheckpointError, DataError, VLPError
from vlp_models.serving.images import MAX_REQUEST_PIXELS, CheckedImage, check_images
from vlp_models.vision.extractors import FROM_IMAGES

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from vlp_models.data.inputs import ModelInputs
    from vlp_models.data.sample import Sample
    from vlp_models.tasks.base import RequestFormat
    from vlp_models.vision.region_source import Extractor

ROWS_AT_ONCE, PIXELS_AT_ONCE = 16, 25_000_000  # of a batch: about two photos of a camera


class ImageModel:
    """A fine-tuned model of any task and, if it reads regions, the detector it was trained with.

    Raises:
        CheckpointError: a file of the bundle has changed, or its detector is not the one the model was trained with.
    """

    def __init__(self, bundle: Path, device: str = "cpu") -> None:
        from vlp_models.data.inputs import RegionInput
        from vlp_models.serving.bundle import check_content, checkpoint_folder, use_bundled_plugins
        from vlp_models.tasks.base import load_task_model

        # Before anything of the bundle is loaded: its files are the recorded ones.
        check_content(bundle)
        use_bundled_plugins(bundle)
        self.task_model = load_task_model(checkpoint_folder(bundle), device=device)
        self.task: str = self.task_model.task
        if (bundle / SEARCH).is_dir():
            self.task_model.load_search(bundle / SEARCH)
        self.check_task(bundle)
        self.device = device
        self.inputs: ModelInputs = self.task_model.model.inputs  # type: ignore[assignment]
        self.extractor = self._open_extractor(bundle) if isinstance(self.inputs.image, RegionInput) else None

    def check_task(self, bundle: Path) -> None:
        """Refuse a task that the class does not support, before the detector is loaded."""

    def _open_extractor(self, bundle: Path) -> Extractor:
        """Open the extractor of the bundle's regions, and check that the model was trained with it."""
        from vlp_models.models.checkpoint_info import describe_classes
        from vlp_models.serving.bundle import DETECTOR, read_features_config
        from vlp_models.vision.extractors import open_extractor

        config = read_features_config(bundle)
        if config["source"] not in FROM_IMAGES:
            raise CheckpointError(
                f"{bundle}: the model was trained on features from `{config['source']}`, which cannot be computed from "
                "an image"
            )
        extractor = open_extractor(config, bundle / DETECTOR, self.device)
        info = self.task_model.info
        # A model may store its detector's class names; their order is that of the class probabilities.
        if info.classes and extractor.classes != tuple(info.classes):
            raise CheckpointError(
                f"{bundle}: the model was trained on features with {describe_classes(info.classes)}, but this bundle's "
                f"detector has {describe_classes(extractor.classes)}; register the run with the detector it used"
            )
        # The id is a hash of the detector's weights and settings, so equal class names are not enough.
        if extractor.detector_id != info.detector_id:
            raise CheckpointError(
                f"{bundle}: the model was trained on features of detector {info.detector_id}, but this bundle has "
                f"detector {extractor.detector_id}"
            )
        return extractor

    def make_samples(
        self, groups: Sequence[Sequence[Picture]], texts: Sequence[str] | None = None, first: int = 0
    ) -> list[Sample]:
        """Return a sample per group of opened images; its other values are hidden.

        Args:
            texts: one per group.
            first: number of the first sample, which is its id.
        """
        from vlp_models.data.inputs import prepare_images
        from vlp_models.data.sample import Sample, SampleImage
        from vlp_models.data.views import VIEWS

        # All images at once, in the order of the groups; each sample takes its own from the iterator.
        opened = itertools.chain.from_iterable(groups)
        prepared = iter(prepare_images(self.inputs, list(opened), self.extractor))
        # Values that the model would be trained on, such as the answer, in the form of "not given".
        hidden_values = VIEWS[self.task_model.prediction_view].hidden_values
        samples = []
        for index, group in enumerate(groups):
            sample_id = str(first + index)
            first_image = next(prepared)
            # `next` for each further image: the iterator is at this group's images.
            other_images = [SampleImage(image_id=f"{sample_id}-{n}", **next(prepared)) for n in range(1, len(group))]
            samples.append(
                Sample(
                    sample_id=sample_id,
                    image_id=sample_id,
                    source="",
                    text="" if texts is None else texts[index],
                    values=hidden_values,
                    **first_image,
                    others=tuple(other_images),
                )
            )
        return samples


class Predictor(ImageModel):
    """A model of a task that is served: one prediction per image, or per list of images.

    Raises:
        CheckpointError: a file of the bundle has changed, its detector is another one, or the task is not served
            (retrieval ranks whole collections, as `evaluate` does).
    """

    request: RequestFormat

    def check_task(self, bundle: Path) -> None:
        request = self.task_model.request
        if request is None:
            raise CheckpointError(
                f"{bundle}: the task {self.task} cannot be served for single images; `dvc repro evaluate` scores it, "
                "and reports/eval has its predictions"
            )
        self.request = request

    def predict(self, images: Sequence[Any], texts: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return one prediction per image, or per list of images (docs/reference/checkpoints.md, "Predictions").

        However many they are, only a few images are decoded at a time.

        Args:
            images: anything `check_image` takes; for a task with several images, lists of that many.
            texts: one per image (a question, a statement); None if the task takes no text.

        Raises:
            DataError: an image cannot be opened, the number of images is wrong, or `check_text` rejects a text.
        """
        self._check_texts(images, texts)
        # Decoded images and their pixels, since the last batch.
        predictions: list[dict[str, Any]] = []
        groups: list[list[Picture]] = []
        pixels = 0
        for number, value in enumerate(images, start=1):
            groups.append([image.open() for image in check_images(value, self.request.images)])
            pixels += sum(image.width * image.height for image in groups[-1])
            # A batch is complete: `number` images have been read, the last `len(groups)` of them are in it.
            if number == len(images) or len(groups) == ROWS_AT_ONCE or pixels > PIXELS_AT_ONCE:
                first = number - len(groups)
                batch_texts = None if texts is None else texts[first:number]
                predictions += self.predict_opened(groups, batch_texts, first)
                groups, pixels = [], 0
        return predictions

    def check(
        self, images: Sequence[Any], texts: Sequence[str] | None = None, *, untrusted: bool = False
    ) -> list[list[CheckedImage]]:
        """Check the texts and images of a request, without decoding the images.

        Args:
            images, texts: as in `predict`.
            untrusted: the images come from a request to a server (see `check_image`).

        Raises:
            DataError: as in `predict`; or the images are `untrusted`, and too large together.
        """
        self._check_texts(images, texts)
        groups: list[list[CheckedImage]] = []
        pixels = 0
        for value in images:
            groups.append(check_images(value, self.request.images, untrusted=untrusted))
            pixels += sum(image.pixels for image in groups[-1])
            # The user's own images may be as many as the machine can hold; a client's may not.
            if untrusted and pixels > MAX_REQUEST_PIXELS:
                raise DataError(
                    f"the images have more than {MAX_REQUEST_PIXELS:,} pixels together; send fewer at a time"
                )
        return groups

    def open(self, images: Sequence[Any], texts: Sequence[str] | None = None) -> list[list[Picture]]:
        """Check texts and images, and decode the images, for `predict_opened`. Arguments as in `predict`."""
        opened = []
        for group in self.check(images, texts):
            opened.append([image.open() for image in group])
        return opened

    def predict_opened(
        self, groups: Sequence[Sequence[Picture]], texts: Sequence[str] | None = None, first: int = 0
    ) -> list[dict[str, Any]]:
        """Return one prediction per group of opened images, computed at once. first: number of the first one."""
        samples = self.make_samples(groups, texts if self.request.text else None, first)
        batch = self.task_model.collate(samples).to(self.device)
        return self.task_model.predict(batch, samples)

    def _check_texts(self, images: Sequence[Any], texts: Sequence[str] | None) -> None:
        if not self.request.text:
            return
        if texts is None or len(texts) != len(images):
            raise ValueError(f"the task {self.task} takes one {self.request.text} per image")
        for text in texts:
            check_text(text, self.request.text)


def check_text(text: Any, kind: str) -> None:
    """Check a text that a model is to read. kind: what it is (`question`), for the message.

    Raises:
        DataError: not a string, blank, or with code points that no text has, as in a command line of another encoding.
    """
    if not isinstance(text, str):
        raise DataError(f"the {kind} must be a string; found {type(text).__name__}")
    if not text.strip():
        raise DataError(f"the {kind} is blank")
    try:
        # A lone surrogate, as Python reads bytes of another encoding, cannot be encoded, and tokenizers fail on it.
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"the {kind} is not valid Unicode") from None


@dataclass(frozen=True, kw_only=True)
class SmokeTest:
    """problem: why the bundle cannot be served; empty if it can. prediction: its prediction for a test image."""

    problem: str = ""
    prediction: dict[str, Any] = field(default_factory=dict)


def smoke_test(bundle: Path, images: Sequence[Path]) -> SmokeTest:
    """Predict for one request through the bundle, as a server would.

    Args:
        images: candidates; the first one on disk is used, also for tasks with several images.
    """
    image = next((path for path in images if path.is_file()), None)
    if image is None:
        return SmokeTest(problem="no image of the val or test split is on disk")
    try:
        predictor = Predictor(bundle)
        request = predictor.request
        texts = ["is there a picture?"] if request.text else None
        predictions = predictor.predict([image] if request.images == 1 else [[image] * request.images], texts)
    except VLPError as error:
        return SmokeTest(problem=str(error))
    except Exception as error:  # anything that breaks here would break in a server
        return SmokeTest(problem=f"{type(error).__name__}: {error}")
    if len(predictions) != 1 or not predictions[0]:
        return SmokeTest(problem="it returned no prediction")
    return SmokeTest(prediction=predictions[0])
