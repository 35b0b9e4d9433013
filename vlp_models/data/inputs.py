"""What a model reads, which the model declares, and the reader that makes it from samples.

`InputReader` is the only code that distinguishes regions from pixels: it decides what a dataset reads, how a batch is
made, and how an image from outside is prepared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast

import numpy as np
import torch
from PIL.Image import Image as Picture
from torch import Tensor

from vlp_models.data.batch import (
    Batch,
    Image,
    Pixels,
    Text,
    collate_regions,
    get_regions,
    image_owners,
    merge_adjacent_images,
    prepend_objects,
)
from vlp_models.data.images import MAX_IMAGE_PIXELS
from vlp_models.data.pixels import PixelInput, collate_pixels, decode, encode
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import View
from vlp_models.errors import DataError, ParamsError

if TYPE_CHECKING:
    from vlp_models.data.shards.contents import Kind


@dataclass(frozen=True, kw_only=True)
class RegionInput:
    """Region features made beforehand by a detector or another source.

    scores: include the detector's confidence (`ScoredRegions`)
    """

    scores: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The inputs of a model.

    image        None for a text-only model
    text         False for an image-only model
    whole_words  texts come with `Text.word_BT`, the index of the word that each token is a piece of
    """

    image: RegionInput | PixelInput | None
    text: bool = True
    whole_words: bool = False

    @property
    def kind(self) -> Kind:
        """Return what is read of an image, in one word."""
        if self.image is None:
            return "texts"
        return "regions" if isinstance(self.image, RegionInput) else "pixels"

    def for_view(self, view: View) -> ModelInputs:
        """Return the part of these inputs that a view has: no image for texts, no text for images."""
        return dataclasses.replace(self, image=self.image if view.has_image else None, text=self.text and view.has_text)


class ReadFlags(TypedDict):
    """What a `ShardDataset` reads of an image."""

    regions: bool
    pixels: bool


class ExtractsRegions(Protocol):
    """Extracts regions from images (vision/)."""

    def extract(self, images: Sequence[Picture]) -> list[RegionArrays]: ...


class InputReader:
    """Makes a model's inputs from samples.

    Args:
        inputs: what the model reads.
        tokenizer: of the model; None for a model without text.
        max_text_len: in tokens, including [CLS] and [SEP].
        max_regions: per image; ignored by a model that reads none.
    """

    def __init__(
        self, inputs: ModelInputs, tokenizer: Tokenizer | None, *, max_text_len: int, max_regions: int
    ) -> None:
        self.inputs = inputs
        self.tokenizer = tokenizer
        self.max_text_len = max_text_len
        self.max_regions = max_regions

    @property
    def flags(self) -> ReadFlags:
        """Return the arguments `regions` and `pixels` for a `ShardDataset`."""
        image = self.inputs.image
        return {"regions": isinstance(image, RegionInput), "pixels": isinstance(image, PixelInput)}

    def collate(
        self,
        samples: Sequence[Sample],
        *,
        text: Text | None = None,
        known_objects: bool = False,
        share_images: bool = False,
    ) -> Batch:
        """Collate images and texts without targets. Images of samples with a seed are augmented.

        Args:
            text: used in place of the samples' own texts.
            known_objects: regions at the samples' `boxes` come first (`prepend_objects`), in a sample's first image.
            share_images: adjacent samples with the same image and seed have it once.

        Raises:
            DataError: a sample was read without its image, or its image file is damaged.
        """
        if text is None and self.inputs.text:
            text = self.text([sample.text for sample in samples])
        with_images = samples
        # one image for several texts: `with_images` has the first sample of each run, `owner_N` the run of each text
        if share_images and text is not None and not any(sample.others for sample in samples):
            with_images, owner_N = merge_adjacent_images(samples)
            # All texts have an image of their own: no owners are needed.
            text = text if len(with_images) == len(samples) else dataclasses.replace(text, owner_N=owner_N)
        return Batch(
            sample_ids=tuple(sample.sample_id for sample in samples),
            image_ids=tuple(image_id for sample in with_images for image_id in sample.image_ids),
            image=self.image(with_images, known_objects=known_objects),  # type: ignore[arg-type]
            text=text,  # type: ignore[arg-type]
            image_owner_M=image_owners(with_images),
        )

    def image(self, samples: Sequence[Sample], *, known_objects: bool = False) -> Image | None:
        """Return the images of these samples in order; None for a text-only model."""
        config = self.inputs.image
        if config is None:
            return None
        if isinstance(config, PixelInput):
            return _collate_pixels(samples, config)
        regions = get_regions(samples)
        if known_objects:
            # one list of boxes per image: the sample's boxes are in its first image
            boxes: list[Sequence[Sequence[float]]] = []
            for sample in samples:
                boxes += [sample["boxes"], *[()] * len(sample.others)]
            regions = [prepend_objects(r, objects) for r, objects in zip(regions, boxes, strict=True)]
        return collate_regions(regions, self.max_regions, scores=config.scores)

    def text(self, texts: Sequence[str]) -> Text:
        """Return [CLS] ... [SEP] of each text, with `word_BT` if the model reads whole words."""
        tokenizer = cast(Tokenizer, self.tokenizer)
        return tokenizer.encode_batch(texts, self.max_text_len, whole_words=self.inputs.whole_words)


def prepare_images(
    inputs: ModelInputs, pictures: Sequence[Picture], extractor: ExtractsRegions | None
) -> list[dict[str, Any]]:
    """Return the image fields of a `Sample`, `regions` or `pixels`, for images from outside.

    Args:
        extractor: makes the regions; None for a model that reads none.
    """
    if isinstance(inputs.image, PixelInput):
        return [{"pixels": encode(picture)} for picture in pictures]
    if inputs.image is None:
        return [{} for _ in pictures]
    return [{"regions": regions} for regions in cast(ExtractsRegions, extractor).extract(pictures)]


def blanked(batch: Batch) -> Batch:
    """Return the batch with blank images: the input of the blind baseline, which shows what text alone can do."""
    image = cast(Image | None, batch.image)
    return batch if image is None else dataclasses.replace(batch, image=image.blanked())


def find_non_finite(batch: Batch) -> list[str]:
    """Return the ids of the samples whose image has a value that is not finite."""
    image = cast(Image | None, batch.image)
    if image is None or not len(image):
        return []
    # bool [B]: whether all values of an image's tensors are finite
    tensors = [value for value in vars(image).values() if isinstance(value, Tensor) and value.is_floating_point()]
    # (B, ...) per tensor -> (B,): all of an image's values in all tensors.
    good_B = torch.stack([tensor.flatten(1).isfinite().all(1) for tensor in tensors]).all(0)
    return batch.samples_showing((~good_B).nonzero().flatten())


def _collate_pixels(samples: Sequence[Sample], config: PixelInput) -> Pixels:
    pictures, seeds = [], []
    for sample in samples:
        for image in sample.images:
            if image.pixels is None:
                raise DataError(f"{sample.sample_id}: image {image.image_id} was read without its pixels")
            pictures.append(decode(image.pixels, image.image_id))
            seeds.append(image.seed)
    pixels = collate_pixels(pictures, config, seeds)
    if all(len(sample.images) == 1 for sample in samples):
        return pixels
    # int64 [B]: the index of each image among its sample's images
    index_B = torch.tensor([index for sample in samples for index in range(len(sample.images))])
    return dataclasses.replace(pixels, place_B=index_B)


@dataclass(frozen=True, kw_only=True)
class MultiCaptionCollator:
    """Collates samples of the view `images`, each with `count` of its captions; `Text.owner_N` assigns them.

    With a seed they are drawn again in each epoch, none twice before all were used; without, the first ones are taken.
    """

    reader: InputReader
    count: int

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        captions: list[str] = []  # `count` per sample
        for sample in samples:
            captions += choose_captions(sample["captions"], self.count, sample.seed)
        text = self.reader.text(captions)
        # (B * count,): 0, 0, 1, 1, ... for two captions per image.
        owner_N = torch.arange(len(samples)).repeat_interleave(self.count)
        return self.reader.collate(samples, text=dataclasses.replace(text, owner_N=owner_N))


def choose_captions(captions: Sequence[str], count: int, seed: int | None) -> list[str]:
    """Return `count` of these captions, at least one; with fewer than `count`, some are repeated."""
    order = list(range(len(captions)))
    if seed is not None:
        # A permutation, so that no caption is repeated before all were used.
        order = np.random.default_rng([seed, 1]).permutation(len(captions)).tolist()  # the image has the first stream
    return [captions[order[i % len(order)]] for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class RequiredContent:
    """What the shards must store of an image; whether a model reads texts alone."""

    regions: bool
    pixels: bool
    texts: bool = False

    @property
    def kinds(self) -> list[Kind]:
        required: dict[Kind, bool] = {"regions": self.regions, "pixels": self.pixels, "texts": self.texts}
        return [kind for kind, is_required in required.items() if is_required]


def required_content(
    inputs: Iterable[ModelInputs],
    pixels: Literal["auto", True, False] = "auto",
    min_side: int | None = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> RequiredContent:
    """Return what the shards must store for these models.

    Args:
        inputs: of every model in params.yaml.
        pixels: `shards.pixels`.
        min_side: `validate.min_image_side`; None: no check.
        max_pixels: `validate.max_image_pixels`.

    Raises:
        ParamsError: pixels are off, but a model reads them; images may be smaller than a model's patch, or larger than
            shards support.
    """
    inputs = list(inputs)
    images = [model_inputs.image for model_inputs in inputs]
    # The largest patch of any model decides.
    patch = max((image.patch for image in images if isinstance(image, PixelInput)), default=0)
    # a smaller image would be enlarged beyond its content
    if min_side is not None and min_side < patch:
        raise ParamsError(
            f"params.yaml: a model of `models` has patches of {patch} pixels, and `validate.min_image_side: {min_side}`"
            f" accepts smaller images; with {patch} they go to quarantine"
        )
    kinds = {model_inputs.kind for model_inputs in inputs}
    if "pixels" in kinds and pixels is False:
        raise ParamsError(
            "params.yaml: `shards.pixels: false`, but a model of `models` reads pixels; `auto` packs them"
        )
    if max_pixels > MAX_IMAGE_PIXELS and ("pixels" in kinds or pixels is True):
        raise ParamsError(
            f"params.yaml: `validate.max_image_pixels: {max_pixels}` accepts larger images than shards "
            f"support, {MAX_IMAGE_PIXELS}, and a model of `models` or `shards.pixels` requires their pixels"
        )
    return RequiredContent(
        regions="regions" in kinds, pixels="pixels" in kinds or pixels is True, texts="texts" in kinds
    )
