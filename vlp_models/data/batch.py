"""Typed batches, which every model takes, and the collation of samples into padded tensors.

Shape suffixes: B batch, R regions, F feature dimension, C detector classes, T text tokens, H/W pixels, A answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.errors import DataError

M = TypeVar("M", bound="_TensorRecord")


class _TensorRecord:
    """Adds `to(device)`, `empty()` and `select(index)` to frozen dataclasses of tensors, including nested ones."""

    def to(self: M, device: torch.device | str, non_blocking: bool = False) -> M:
        """Return a copy on `device`."""
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def empty(self: M) -> M:
        """Return a copy without rows: the first dimension of everything is 0."""
        return self._map(lambda value: value[:0])

    def select(self: M, index_N: Tensor) -> M:
        """Return these rows in this order; a row may occur several times, or not at all."""

        def pick(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.index_select(0, index_N)
            return tuple(value[i] for i in index_N.tolist())

        return self._map(pick)

    def map_tensors(self: M, change: Callable[[Tensor], Tensor]) -> M:
        """Apply a function to all tensors, including those of nested records."""
        return self._map(lambda value: change(value) if isinstance(value, Tensor) else value)

    def _map(self: M, change: Callable[[Any], Any]) -> M:
        # tensors and tuples, also of nested records; other fields stay
        changes = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, _TensorRecord):
                changes[field.name] = value._map(change)
            elif isinstance(value, Tensor | tuple):
                changes[field.name] = change(value)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class Regions(_TensorRecord):
    """Detected regions, most confident first, padded to the longest image of the batch.

    features_BRF     float32; zero where padded
    boxes_BR4        float32; x1, y1, x2, y2 as fractions of the image's width and height
    class_probs_BRC  float32; the detector's softmax, column 0 is background; zero where padded
    mask_BR          bool; True where there is a region
    place_BR         int64; index of each region's image among the images of its row (`Batch.group_images`). None: a row
                     has one image
    """

    features_BRF: Tensor
    boxes_BR4: Tensor
    class_probs_BRC: Tensor
    mask_BR: Tensor
    place_BR: Tensor | None = None

    def __len__(self) -> int:
        return self.features_BRF.shape[0]

    def pooled_BF(self) -> Tensor:
        """Return each image's mean feature, normalized to length one; zeros if it has no regions."""
        # The sum has the direction of the mean, and its length is normalized: no division by the count is needed.
        return normalize((self.features_BRF * self.mask_BR[..., None]).sum(1), dim=1)

    def blanked(self) -> Regions:
        """Return one all-zero region per image: the input of the blind baseline."""
        blank = self.map_tensors(torch.zeros_like)
        blank.mask_BR[:, 0] = True  # attention needs a key
        return dataclasses.replace(blank, place_BR=self.place_BR)


@dataclass(frozen=True, kw_only=True)
class ScoredRegions(Regions):
    """Regions with detector confidence, for models that read it (`RegionInput.scores`).

    scores_BR  float32; the detector's confidence; zero where padded
    """

    scores_BR: Tensor


@dataclass(frozen=True, kw_only=True)
class Placement(_TensorRecord):
    """Where images are in a model's input after they were cropped, resized, padded or augmented.

    to_image_B23  float32; maps a point of the input, (x, y, 1) in pixels, to fractions of the upright image's width and
                  height
    window_B4     float32; x1, y1, x2, y2 of the part that was not cropped, as fractions of the upright image
    """

    to_image_B23: Tensor
    window_B4: Tensor


@dataclass(frozen=True, kw_only=True)
class Pixels(_TensorRecord):
    """Images for patch or CNN models.

    pixels_B3HW  float32, normalized; zero where padded
    mask_BHW     bool; True where there is image content. None: everywhere
    place_B      int64; index of each image among its sample's images. None: every sample has one
    placement    where each image is in its input (data/boxes.py). None: it fills it
    """

    pixels_B3HW: Tensor
    mask_BHW: Tensor | None = None
    place_B: Tensor | None = None
    placement: Placement | None = None

    def __len__(self) -> int:
        return self.pixels_B3HW.shape[0]

    def blanked(self) -> Pixels:
        """Return the mean color everywhere: the input of the blind baseline."""
        mask_BHW = None if self.mask_BHW is None else torch.ones_like(self.mask_BHW)
        return dataclasses.replace(self, pixels_B3HW=torch.zeros_like(self.pixels_B3HW), mask_BHW=mask_BHW)


@dataclass(frozen=True, kw_only=True)
class PixelSets(_TensorRecord):
    """Up to K images per row, for a model that reads them in one sequence (`Batch.group_images`).

    images    every tensor has [B, K] in place of [B]
    there_BK  bool; False where a row has fewer than K images
    """

    images: Pixels
    there_BK: Tensor

    def __len__(self) -> int:
        return self.there_BK.shape[0]

    def blanked(self) -> PixelSets:
        return dataclasses.replace(self, images=self.images.blanked())

    def flat(self) -> Pixels:
        """Return the M images that there are, row by row, each with its place in `place_B`."""
        index_M = self.there_BK.flatten().nonzero().squeeze(1)
        # [B, K, ...] -> [B * K, ...] -> the M images that exist
        images = self.images.map_tensors(lambda x: x.flatten(0, 1)).select(index_M)
        return dataclasses.replace(images, place_B=index_M % self.there_BK.shape[1])

    def spread(self, x_M: Tensor) -> Tensor:
        """Put what was computed of each of the M images into its row: [M, ...] -> [B, K, ...], zero elsewhere."""
        return _spread(x_M, self.there_BK.flatten().nonzero().squeeze(1), (len(self), self.there_BK.shape[1]))


def _spread(x_M: Tensor, slots_M: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return [*shape, ...] with the rows of `x_M` at these places of B * K, and zeros."""
    # [B * K, ...] -> [B, K, ...]
    zeros = x_M.new_zeros(shape[0] * shape[1], *x_M.shape[1:])
    return zeros.index_copy(0, slots_M, x_M).unflatten(0, shape)


@dataclass(frozen=True, kw_only=True)
class Text(_TensorRecord):
    """[CLS] w1 ... wn [SEP] [PAD]...

    ids_BT   int64
    mask_BT  bool; True where there is a token, including [CLS] and [SEP]
    last_segment_BT  bool; for texts in several segments, True in the last one, including its [SEP]
    word_BT  int64; index of the word that a token is a piece of, -1 for none; None unless requested
    cut_B    bool; True if a text was truncated: generation must not learn its [SEP] as an end. None: none was
    owner_N  int64; the row of the image that each text belongs to. None: text i belongs to image i
    """

    ids_BT: Tensor
    mask_BT: Tensor
    last_segment_BT: Tensor | None = None
    word_BT: Tensor | None = None
    cut_B: Tensor | None = None
    owner_N: Tensor | None = None

    def __len__(self) -> int:
        return self.ids_BT.shape[0]

    @property
    def has_next_BT(self) -> Tensor:
        """Return bool: the positions that are followed by a token, which generation predicts there.

        The [SEP] of a truncated text does not count.
        """
        if self.cut_B is None:
            # (B, T): position t has a next token if position t + 1 holds one; the last position never does.
            return pad(self.mask_BT[:, 1:], (0, 1))
        # the last token of each text
        ends_BT = self.mask_BT & ~pad(self.mask_BT[:, 1:], (0, 1))
        return pad((self.mask_BT & ~(ends_BT & self.cut_B[:, None]))[:, 1:], (0, 1))

    def next_tokens(self, at_BT: Tensor) -> Tensor:
        """Return int64 [M]: the tokens right after these positions, in row-major order."""
        # (B, T) -> (M,): shifted by one; the last column has no next token.
        return self.ids_BT[:, 1:][at_BT[:, :-1]]

    def owners(self, images: int) -> Tensor | None:
        """Return `owner_N`, checked.

        Raises:
            DataError: the numbers of texts and images differ, and `owner_N` is not set.
        """
        if self.owner_N is None and len(self) != images:
            raise DataError(f"{len(self)} texts for {images} images: Text.owner_N must assign them")
        return self.owner_N


Image = Regions | Pixels | PixelSets


@dataclass(frozen=True, kw_only=True)
class Batch(_TensorRecord):
    """One step's input. `targets` depends on the task: see the task's file.

    image  None in a text-only batch; may have several rows per sample (`image_owner_M`), or one row
           for several samples with one text each (`Text.owner_N`)
    text   None in an image-only batch; may have several rows per sample (`Text.owner_N`)
    image_ids      one per row of `image`
    image_owner_M  int64, non-decreasing; the sample that each image belongs to. None: image i belongs to sample i

    Both are typed `| Any` instead of `| None`, because nearly every reader needs both.
    """

    sample_ids: tuple[str, ...]
    image_ids: tuple[str, ...]
    image: Image | Any = None
    text: Text | Any = None
    targets: Tensor | None = None
    image_owner_M: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def shares_images(self) -> bool:
        """Return whether each sample is one text and several texts may have the same image (`Text.owner_N`)."""
        text = cast(Text | None, self.text)
        owned = self.image_owner_M is None and text is not None and text.owner_N is not None
        return owned and len(self.text) == len(self.sample_ids)

    def samples_showing(self, images_K: Tensor) -> list[str]:
        """Return the ids of the samples that have one of these rows of `image`."""
        if self.shares_images:
            # sample i is text i
            images_K = torch.isin(cast(Tensor, self.text.owner_N), images_K).nonzero().flatten()
        elif self.image_owner_M is not None:
            images_K = self.image_owner_M[images_K].unique()
        return [self.sample_ids[i] for i in images_K.tolist()]

    def group_images(self) -> Image:
        """Return the image with one row per sample: all images of a sample in one row, in order.

        A model whose `images_per_text` allows it reads a row in one sequence. Regions of several images become one
        longer row (`Regions.place_BR`), pixels become `PixelSets`.
        """
        image, owner_M = cast(Image, self.image), self.image_owner_M
        if owner_M is None or isinstance(image, PixelSets):
            return image
        # each image's index in its row: owner_M does not decrease, so a row's images start where it occurs first
        place_M = torch.arange(len(owner_M), device=owner_M.device) - torch.searchsorted(owner_M, owner_M)
        shape = (len(self), int(place_M.max()) + 1 if len(place_M) else 1)  # B, K
        # (M,) positions in the flattened (B, K).
        slots_M = owner_M * shape[1] + place_M
        rows = image.map_tensors(lambda x_M: _spread(x_M, slots_M, shape))
        if isinstance(rows, Pixels):
            there_BK = _spread(torch.ones_like(owner_M, dtype=torch.bool), slots_M, shape)
            return PixelSets(images=rows, there_BK=there_BK)
        # [B, K, R, ...] -> [B, K * R, ...]
        regions = rows.mask_BR.shape[2]
        place_R = torch.arange(shape[1], device=owner_M.device).repeat_interleave(regions)
        joined = rows.map_tensors(lambda x_BKR: x_BKR.flatten(1, 2))
        # (B, K * R): the same for every row, so the memory is shared.
        return dataclasses.replace(joined, place_BR=place_R.expand(shape[0], -1))

    def select(self, index_N: Tensor) -> Batch:
        """Return these samples in this order, each with all its images."""
        if self.shares_images:  # `Text.owner_N` is selected with the texts, images stay
            rest = dataclasses.replace(self, image=None, image_ids=self.sample_ids)
            return dataclasses.replace(_TensorRecord.select(rest, index_N), image=self.image, image_ids=self.image_ids)
        if self.image_owner_M is None:
            return super().select(index_N)
        # [N, M] -> the selected sample and the image of each of the K pairs, in the order of the samples
        new_K, images_K = (index_N[:, None] == self.image_owner_M).nonzero().unbind(1)
        rest = dataclasses.replace(self, image=None, image_ids=self.sample_ids, image_owner_M=None)
        return dataclasses.replace(
            rest.select(index_N),
            image=None if self.image is None else self.image.select(images_K),
            image_ids=tuple(self.image_ids[i] for i in images_K.tolist()),
            image_owner_M=new_K,
        )


def collate_regions(images: Sequence[RegionArrays], max_regions: int, *, scores: bool = False) -> Regions:
    """Pad to the longest image, with at most `max_regions` rows, the most confident ones.

    An image without regions gets one all-zero row whose mask is True, because attention needs at least one key.

    Args:
        scores: return `ScoredRegions`.
    """
    # regions are sorted by confidence, so the first ones are the most confident
    counts = [min(len(image), max_regions) for image in images]
    # At least one row, for a batch in which no image has a region.
    rows = max(1, *counts)
    shape = (len(images), rows)
    # float16 on disk becomes float32 here; padding stays zero
    features = np.zeros((*shape, images[0].features.shape[1]), dtype=np.float32)
    boxes = np.zeros((*shape, 4), dtype=np.float32)
    class_probs = np.zeros((*shape, images[0].class_probs.shape[1]), dtype=np.float32)
    confidence, mask = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)
    for i, (image, n) in enumerate(zip(images, counts, strict=True)):
        features[i, :n] = image.features[:n]
        boxes[i, :n] = image.boxes[:n]
        class_probs[i, :n] = image.class_probs[:n]
        confidence[i, :n] = image.scores[:n]
        mask[i, : max(1, n)] = True
    regions = Regions(
        features_BRF=torch.from_numpy(features),
        boxes_BR4=torch.from_numpy(boxes),
        class_probs_BRC=torch.from_numpy(class_probs),
        mask_BR=torch.from_numpy(mask),
    )
    return ScoredRegions(**vars(regions), scores_BR=torch.from_numpy(confidence)) if scores else regions


MIN_OVERLAP = 0.5  # of a box with a region whose features it takes


def prepend_objects(regions: RegionArrays, boxes: Sequence[Sequence[float]]) -> RegionArrays:
    """Return the regions with known objects first, which `collate_regions` then keeps.

    An object has its own box, and the feature and class probabilities of the detected region with the largest overlap;
    zeros if none reaches `MIN_OVERLAP` (intersection over union). Its score is 1.

    Args:
        boxes: of the objects, x1, y1, x2, y2 as fractions.
    """
    if not boxes:
        return regions
    objects_K4 = np.asarray(boxes, dtype=np.float32)
    features = np.zeros((len(boxes), regions.features.shape[1]), dtype=np.float16)
    class_probs = np.zeros((len(boxes), regions.class_probs.shape[1]), dtype=np.float16)
    if len(regions):
        # each object takes the features of the region that overlaps it most, if enough
        # intersection over union: from the larger left (upper) edge to the smaller right (lower) one
        a_K4, b_N4 = objects_K4, regions.boxes
        sides_KN2 = np.minimum(a_K4[:, None, 2:], b_N4[:, 2:]) - np.maximum(a_K4[:, None, :2], b_N4[:, :2])
        common_KN = sides_KN2.clip(min=0).prod(-1)
        area_K, area_N = (a_K4[:, 2:] - a_K4[:, :2]).prod(-1), (b_N4[:, 2:] - b_N4[:, :2]).prod(-1)
        union_KN = area_K[:, None] + area_N - common_KN
        overlap_KN = (common_KN / np.maximum(union_KN, np.finfo(np.float32).tiny)).astype(np.float32)
        best_K = overlap_KN.argmax(1)
        match_K = overlap_KN[np.arange(len(boxes)), best_K] >= MIN_OVERLAP
        features[match_K], class_probs[match_K] = (
            regions.features[best_K[match_K]],
            regions.class_probs[best_K[match_K]],
        )
    return RegionArrays(
        features=np.concatenate([features, regions.features]),
        boxes=np.concatenate([objects_K4, regions.boxes]),
        class_probs=np.concatenate([class_probs, regions.class_probs]),
        scores=np.concatenate([np.ones(len(boxes), dtype=np.float32), regions.scores]),
    )


def image_owners(samples: Sequence[Sample]) -> Tensor | None:
    """Return int64 [M]: the sample of each image; None if each sample has one."""
    # (M,): 0, 0, 1, ... for samples of two images, one image, ...
    counts = torch.tensor([len(sample.image_ids) for sample in samples], dtype=torch.int64)
    return None if bool((counts == 1).all()) else torch.arange(len(samples)).repeat_interleave(counts)


def merge_adjacent_images(samples: Sequence[Sample]) -> tuple[list[Sample], Tensor]:
    """Return the first of each run of samples with the same image and seed; and int64 [N], the run of each sample.

    Samples whose image has no id are never merged.
    """
    firsts: list[Sample] = []
    owners = []
    for sample in samples:
        last = (firsts[-1].image_id, firsts[-1].seed) if firsts else None
        # another seed augments the image differently
        if not sample.image_id or (sample.image_id, sample.seed) != last:
            firsts.append(sample)
        owners.append(len(firsts) - 1)
    return firsts, torch.tensor(owners, dtype=torch.int64)


def get_regions(samples: Sequence[Sample]) -> list[RegionArrays]:
    """Return the regions of every image of the samples, in order.

    Raises:
        DataError: a sample was read without its image's regions.
    """
    regions = []
    for sample in samples:
        for image in sample.images:
            if image.regions is None:
                raise DataError(f"{sample.sample_id}: image {image.image_id} was read without its region features")
            regions.append(image.regions)
    return regions
