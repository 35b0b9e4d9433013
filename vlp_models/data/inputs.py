"""What a model reads, said by the model, and the reader that makes it of samples.

`InputReader` is the one place that knows regions from pixels: what a dataset reads, how a batch is made, what a picture
from outside becomes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, cast

import torch
from PIL.Image import Image as Picture
from torch import Tensor

from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.data.collate import collate_regions, image_owners, objects_first, one_for_neighbours, regions_of
from vlp_models.data.content_hashes import Kind
from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import View
from vlp_models.errors import DataError

Augmentation = Literal["random_resized_crop", "flip", "rand_augment"]


@dataclass(frozen=True, kw_only=True)
class RegionInput:
    """Region features that a detector (or another source) made beforehand.

    scores: with the detector's confidence in each (`ScoredRegions`)
    """

    scores: bool = False


@dataclass(frozen=True, kw_only=True)
class PixelInput:
    """Images as pixels, decoded when a batch is made.

    height, width  in pixels, after resizing
    resize         squash: both sides to their length. crop: the shorter side to its length, then the centre.
                   pad: the longer side fits, the rest is masked
    longer, shorter  of `pad`: the most pixels that the longer and the shorter side get; 0: as many as fit
    interpolation  of the resizing
    mean, std      of each channel, for values from 0 to 1
    augment        while training, as a function of (seed, epoch, sample): any of `Augmentation`. A mirrored picture
                   makes a liar of a caption that says left or right, so flip is the user's to ask for
    crop_scale     of random_resized_crop: which share of the area is kept, from and to
    patch          the side of the model's patches, in pixels; 0: it has none. A picture with a shorter side would be
                   enlarged beyond what it shows, so that `validate.min_image_side` must be at least this
    """

    height: int
    width: int
    resize: Literal["squash", "crop", "pad"] = "squash"
    longer: int = 0
    shorter: int = 0
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    augment: tuple[Augmentation, ...] = ()
    crop_scale: tuple[float, float] = (0.5, 1.0)
    patch: int = 0

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1 or not all(math.isfinite(s) and s > 0 for s in self.std):
            raise ValueError(f"an image input of {self.width}x{self.height} pixels, std {self.std}")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale {self.crop_scale}: two shares of the area, the smaller one first")


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """image: None for a model of texts alone. text: False for a model of images alone.

    whole_words: texts come with `Text.word_BT`, which of the sentence's words a token is a piece of.
    """

    image: RegionInput | PixelInput | None
    text: bool = True
    whole_words: bool = False

    @property
    def kind(self) -> Kind:
        """What of an image is read, in a word."""
        if self.image is None:
            return "texts"
        return "regions" if isinstance(self.image, RegionInput) else "pixels"

    def of_view(self, view: View) -> ModelInputs:
        """What of these inputs there is in a view: of texts alone no image, of images alone no text."""
        return dataclasses.replace(self, image=self.image if view.has_image else None, text=self.text and view.has_text)


class ReadFlags(TypedDict):
    """What of an image a `ShardDataset` reads."""

    regions: bool
    pixels: bool


class Extractor(Protocol):
    """What makes regions of pictures (vision/extract.py, vision/grid.py)."""

    def extract(self, images: Sequence[Picture]) -> list[RegionArrays]: ...


class InputReader:
    """What is between a dataset and a model.

    Args:
        inputs: what the model reads.
        tokenizer: its; None for a model without texts.
        max_text_len: tokens, [CLS] and [SEP] included.
        max_regions: of an image; for a model that reads none it says nothing.
    """

    def __init__(
        self, inputs: ModelInputs, tokenizer: Tokenizer | None, *, max_text_len: int, max_regions: int
    ) -> None:
        if inputs.text and tokenizer is None:
            raise ValueError("a model that reads texts needs a tokenizer")
        self.inputs = inputs
        self.tokenizer = tokenizer
        self.max_text_len = max_text_len
        self.max_regions = max_regions

    @property
    def flags(self) -> ReadFlags:
        """What of an image a `ShardDataset` has to read: its arguments `regions` and `pixels`."""
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
        """Images and texts side by side, without targets. Images of samples with a draw are augmented.

        Args:
            text: takes the place of the samples' own texts.
            known_objects: regions at the samples' `boxes` come first (`objects_first`), in a sample's first image.
            share_images: samples beside each other that speak of one image, with one draw, have it once.

        Raises:
            DataError: a sample was read without its image, or its image file is damaged.
        """
        if text is None and self.inputs.text:
            text = self.text([sample.text for sample in samples])
        shown = samples
        if share_images and text is not None and not any(sample.others for sample in samples):
            shown, owner_N = one_for_neighbours(samples)
            text = text if len(shown) == len(samples) else dataclasses.replace(text, owner_N=owner_N)
        return Batch(
            sample_ids=tuple(sample.sample_id for sample in samples),
            image_ids=tuple(image_id for sample in shown for image_id in sample.image_ids),
            image=self.image(shown, known_objects=known_objects),  # type: ignore[arg-type]
            text=text,  # type: ignore[arg-type]
            image_owner_M=image_owners(shown),
        )

    def image(self, samples: Sequence[Sample], *, known_objects: bool = False) -> Image | None:
        """The images of these samples, one sample's behind each other; None for a model of texts alone."""
        wanted = self.inputs.image
        if wanted is None:
            return None
        if isinstance(wanted, PixelInput):
            return _pixels(samples, wanted)
        regions = regions_of(samples)
        if known_objects:
            known = [boxes for s in samples for boxes in (s["boxes"], *(() for _ in s.others))]
            regions = [objects_first(r, boxes) for r, boxes in zip(regions, known, strict=True)]
        return collate_regions(regions, self.max_regions, scores=wanted.scores)

    def text(self, texts: Sequence[str]) -> Text:
        """[CLS] ... [SEP] of each, with `word_BT` where the model asks for whole words."""
        tokenizer = cast(Tokenizer, self.tokenizer)
        return tokenizer.encode_batch(texts, self.max_text_len, whole_words=self.inputs.whole_words)


def see(inputs: ModelInputs, pictures: Sequence[Picture], extractor: Extractor | None) -> list[dict[str, Any]]:
    """What a `Sample` needs of each picture from outside: its fields `regions` or `pixels`.

    Args:
        extractor: makes the regions; a model that reads none needs none.
    """
    if isinstance(inputs.image, PixelInput):
        from vlp_models.data.pixels import encode

        return [{"pixels": encode(picture)} for picture in pictures]
    if inputs.image is None:
        return [{} for _ in pictures]
    if extractor is None:
        raise ValueError("a model that reads regions needs an extractor")
    return [{"regions": regions} for regions in extractor.extract(pictures)]


def blanked(batch: Batch) -> Batch:
    """The batch with nothing to see in it: the control that shows what text alone can do."""
    image = cast(Image | None, batch.image)
    return batch if image is None else dataclasses.replace(batch, image=image.blanked())


def not_finite(batch: Batch) -> list[str]:
    """The ids of the samples whose image holds a value that is infinite or no number."""
    image = cast(Image | None, batch.image)
    if image is None or not len(image):
        return []
    tensors = [value for value in vars(image).values() if isinstance(value, Tensor) and value.is_floating_point()]
    good_B = torch.stack([tensor.flatten(1).isfinite().all(1) for tensor in tensors]).all(0)
    return batch.looking_at((~good_B).nonzero().flatten())


def _pixels(samples: Sequence[Sample], wanted: PixelInput) -> Pixels:
    from vlp_models.data.pixels import collate_pixels, decode

    pictures, draws = [], []
    for sample in samples:
        for image in sample.images:
            if image.pixels is None:
                raise DataError(f"{sample.sample_id}: image {image.image_id} was read without its pixels")
            pictures.append(decode(image.pixels, image.image_id))
            draws.append(image.draw)
    found = collate_pixels(pictures, wanted, draws)
    if all(len(sample.images) == 1 for sample in samples):
        return found
    return dataclasses.replace(found, place_B=torch.tensor([i for s in samples for i in range(len(s.images))]))
