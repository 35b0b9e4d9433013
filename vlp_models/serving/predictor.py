"""From an image on disk to a caption, an answer or a verdict: the model, and what makes its input, in one object.

A bundle is a directory with `checkpoint/` (docs/contracts.md) and, for a model that reads regions, `detector/` and
`features.json` (how the regions were made); it is what the registry stores. `detector/` holds a detector or a
backbone, with its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import CheckpointError
from vlp_models.serving.images import open_images

if TYPE_CHECKING:
    from vlp_models.data.inputs import ModelInputs
    from vlp_models.vision.region_source import Extractor


class Predictor:
    """A fine-tuned model with what makes its input of an image: nothing for one that reads pixels; for one that reads
    regions, the detector whose features it was trained on.

    Raises `CheckpointError` if a file of the bundle is not what was registered, if its detector is not the one the
    model saw in training, and for a task that isn't served: retrieval compares whole collections, as `evaluate` does.
    """

    def __init__(self, bundle: Path, device: str = "cpu") -> None:
        from vlp_models.common.workspace import SEARCH
        from vlp_models.data.inputs import RegionInput
        from vlp_models.models.checkpoint import describe_classes
        from vlp_models.serving.bundle import check_content
        from vlp_models.tasks.base import load_task_model

        check_content(bundle)
        self.task_model = load_task_model(bundle / "checkpoint", device=device)
        self.task: str = self.task_model.task
        if (bundle / SEARCH).is_dir():  # versions before it was kept are searched as the task does by itself
            self.task_model.load_search(bundle / SEARCH)
        request = self.task_model.request
        if request is None:
            raise CheckpointError(
                f"{bundle}: the task {self.task} is not served: it does not look at one image at a time; "
                "`dvc repro evaluate` scores it, and reports/eval holds its predictions"
            )
        self.request = request
        self.device = device
        self.inputs: ModelInputs = self.task_model.model.inputs  # type: ignore[assignment]
        self.extractor = _extractor(bundle, device) if isinstance(self.inputs.image, RegionInput) else None
        trained_on, classes = self.task_model.info.detector_id, self.task_model.info.classes
        if self.extractor is not None and classes and self.extractor.classes != tuple(classes):
            raise CheckpointError(
                f"{bundle}: the model was trained on features with {describe_classes(classes)}, but this bundle's detector has "
                f"{describe_classes(self.extractor.classes)}; it needs the one that its features were made with"
            )
        if self.extractor is not None and self.extractor.detector_id != trained_on:
            raise CheckpointError(
                f"{bundle}: the model was trained on features of detector {trained_on}, "
                f"this bundle holds detector {self.extractor.detector_id}"
            )

    def predict(
        self, images: Sequence[Any], texts: Sequence[str] | None = None, *, requested: bool = False
    ) -> list[dict[str, Any]]:
        """One prediction per image, or per list of them (docs/contracts.md, "Predictions").

        Args:
            images: what `open_image` takes; for a task that looks at several at a time, lists of that many of these.
            requested: images come from a request to a server (see `open_image`).
            texts: what is asked of each image (a question, a statement); none for a task that asks nothing.

        Raises:
            DataError: an image can't be opened, or there are more or fewer of them than the task looks at.
        """
        from vlp_models.data.inputs import prepare_images
        from vlp_models.data.sample import Sample, SampleImage
        from vlp_models.data.views import VIEWS

        if self.request.text and (texts is None or len(texts) != len(images)):
            raise ValueError(f"the task {self.task} takes one text per image, its {self.request.text}")
        together = [open_images(value, self.request.images, requested=requested) for value in images]
        seen = iter(
            prepare_images(self.inputs, [picture for pictures in together for picture in pictures], self.extractor)
        )
        nothing = VIEWS[self.task_model.prediction_view].nothing
        samples = [
            Sample(
                sample_id=str(i),
                image_id=str(i),
                source="",
                text=texts[i] if texts is not None and self.request.text else "",
                values=nothing,
                **next(seen),
                others=tuple(SampleImage(image_id=f"{i}-{n}", **next(seen)) for n in range(1, self.request.images)),
            )
            for i in range(len(images))
        ]
        batch = self.task_model.collate(samples).to(self.device)
        return self.task_model.predict(batch, samples)


def _extractor(bundle: Path, device: str) -> Extractor:
    """What turns pixels into the regions the model learned from."""
    from vlp_models.serving.bundle import read_made
    from vlp_models.vision.extractors import FROM_IMAGES, open_extractor

    made = read_made(bundle)
    if made["source"] not in FROM_IMAGES:
        raise CheckpointError(
            f"{bundle}: the model was trained on features from `{made['source']}`, which can't be made from an image"
        )
    return open_extractor(made, bundle / "detector", device)
