"""Typed batches: what every model takes.

Shape suffixes: B batch, R regions, F feature dimension, C detector classes, T text tokens, H/W pixels, A answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize, pad

from vlp_models.data.sample import RegionArrays, Sample
from vlp_models.errors import DataError

M = TypeVar("M", bound="_Movable")


class _Movable:
    """`to(device)`, `none()` and `select(index)` for frozen dataclasses of tensors, nested ones included."""

    def to(self: M, device: torch.device | str, non_blocking: bool = False) -> M:
        def move(value: Any) -> Any:
            if isinstance(value, (Tensor, _Movable)):
                return value.to(device, non_blocking=non_blocking)
            return value

        return self._map(move)

    def none(self: M) -> M:
        """The same without a row: of everything the first dimension is 0."""

        def cut(value: Any) -> Any:
            if isinstance(value, _Movable):
                return value.none()
            return value[:0] if isinstance(value, (Tensor, tuple)) else value

        return self._map(cut)

    def select(self: M, index_N: Tensor) -> M:
        """The rows of these numbers, in their order; a row may come several times, or not at all."""

        def pick(value: Any) -> Any:
            if isinstance(value, _Movable):
                return value.select(index_N)
            if isinstance(value, tuple):
                return tuple(value[i] for i in index_N.tolist())
            return value.index_select(0, index_N) if isinstance(value, Tensor) else value

        return self._map(pick)

    def _map(self: M, change: Callable[[Any], Any]) -> M:
        changes = {f.name: change(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class Regions(_Movable):
    """Detected regions, most confident first, padded to the longest image of the batch.

    features_BRF     float32; zero where padded
    boxes_BR4        float32; x1, y1, x2, y2 as fractions of the image's width and height
    class_probs_BRC  float32; the detector's softmax, column 0 is background; zero where padded
    mask_BR          bool; True where there is a region
    """

    features_BRF: Tensor
    boxes_BR4: Tensor
    class_probs_BRC: Tensor
    mask_BR: Tensor

    def __len__(self) -> int:
        return self.features_BRF.shape[0]

    def pooled_BF(self) -> Tensor:
        """The direction of each image's mean feature, of length one; zeros where there is nothing to see."""
        return normalize((self.features_BRF * self.mask_BR[..., None]).sum(1), dim=1)

    def blanked(self) -> Regions:
        """Nothing to see: one all-zero region an image. The control that shows what text alone can do."""
        first = torch.zeros_like(self.mask_BR)
        first[:, 0] = True
        return Regions(
            features_BRF=torch.zeros_like(self.features_BRF),
            boxes_BR4=torch.zeros_like(self.boxes_BR4),
            class_probs_BRC=torch.zeros_like(self.class_probs_BRC),
            mask_BR=first,
        )


@dataclass(frozen=True, kw_only=True)
class ScoredRegions(Regions):
    """Regions of which more is known, for a model that asks for it (`RegionInput.scores`).

    scores_BR  float32; the detector's confidence; zero where padded
    """

    scores_BR: Tensor

    def blanked(self) -> ScoredRegions:
        plain = super().blanked()
        return ScoredRegions(**vars(plain), scores_BR=torch.zeros_like(self.scores_BR))


@dataclass(frozen=True, kw_only=True)
class Pixels(_Movable):
    """Images for patch or CNN models.

    pixels_B3HW  float32, normalised; zero where padded
    mask_BHW     bool; True where there is picture. None: everywhere
    place_B      int64; which of its sample's images each is, from 0. None: every sample has one
    """

    pixels_B3HW: Tensor
    mask_BHW: Tensor | None = None
    place_B: Tensor | None = None

    def __len__(self) -> int:
        return self.pixels_B3HW.shape[0]

    def blanked(self) -> Pixels:
        """Nothing to see: the mean colour everywhere."""
        mask_BHW = None if self.mask_BHW is None else torch.ones_like(self.mask_BHW)
        return dataclasses.replace(self, pixels_B3HW=torch.zeros_like(self.pixels_B3HW), mask_BHW=mask_BHW)


@dataclass(frozen=True, kw_only=True)
class Text(_Movable):
    """[CLS] w1 ... wn [SEP] [PAD]...

    ids_BT   int64
    mask_BT  bool; True where there is a token, [CLS] and [SEP] included
    last_segment_BT  bool; of texts in several segments, True in the last one, its [SEP] included
    word_BT  int64; which of the text's words a token is a piece of, -1 where of none; None unless asked for
    cut_B    bool; True where a text was too long: its [SEP] is no end that generation should learn. None: nowhere
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
        """bool: the positions after which another token comes, which generation predicts there. The [SEP] of a text
        that was cut is no such token."""
        if self.cut_B is None:
            return pad(self.mask_BT[:, 1:], (0, 1))
        ends_BT = self.mask_BT & ~pad(self.mask_BT[:, 1:], (0, 1))
        return pad((self.mask_BT & ~(ends_BT & self.cut_B[:, None]))[:, 1:], (0, 1))

    def next_tokens(self, at_BT: Tensor) -> Tensor:
        """int64 [M]: the tokens right behind these positions, in row-major order."""
        return self.ids_BT[:, 1:][at_BT[:, :-1]]

    def owners(self, images: int) -> Tensor | None:
        """`owner_N`, after a look at whether it can be.

        Raises:
            DataError: there are more or fewer texts than images, and nothing says which belong together.
        """
        if self.owner_N is None and len(self) != images:
            raise DataError(f"{len(self)} texts of {images} images: Text.owner_N must say whose they are")
        return self.owner_N


Image = Regions | Pixels


@dataclass(frozen=True, kw_only=True)
class Batch(_Movable):
    """One step's input. `targets` depends on the task: see the file of the task.

    image  None in a batch of texts alone; it may have several rows a sample (`image_owner_M`), or one for several
           samples, each of them with one text: `Text.owner_N` says whose
    text   None in a batch of images alone; it may have several rows a sample (`Text.owner_N`)
    image_ids      one a row of `image`
    image_owner_M  int64, never falling; the sample that each image belongs to. None: image i belongs to sample i

    Both are typed `| Any` instead of `| None`: nearly every reader needs both, and says so by reading them.
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
        """Whether each sample is one text, whose `owner_N` says which image is its: several may have one in common."""
        text = cast(Text | None, self.text)
        owned = self.image_owner_M is None and text is not None and text.owner_N is not None
        return owned and len(self.text) == len(self.sample_ids)

    def samples_showing(self, images_K: Tensor) -> list[str]:
        """The ids of the samples that have one of these rows of `image`."""
        if self.shares_images:
            images_K = torch.isin(cast(Tensor, self.text.owner_N), images_K).nonzero().flatten()
        elif self.image_owner_M is not None:
            images_K = self.image_owner_M[images_K].unique()
        return [self.sample_ids[i] for i in images_K.tolist()]

    def select(self, index_N: Tensor) -> Batch:
        """The samples of these numbers, in their order, each with all its images."""
        if self.shares_images:
            rest = dataclasses.replace(self, image=None, image_ids=self.sample_ids)
            return dataclasses.replace(_Movable.select(rest, index_N), image=self.image, image_ids=self.image_ids)
        if self.image_owner_M is None:
            return super().select(index_N)
        new_K, images_K = (index_N[:, None] == self.image_owner_M).nonzero().unbind(1)
        rest = dataclasses.replace(self, image=None, image_ids=self.sample_ids, image_owner_M=None)
        return dataclasses.replace(
            rest.select(index_N),
            image=None if self.image is None else self.image.select(images_K),
            image_ids=tuple(self.image_ids[i] for i in images_K.tolist()),
            image_owner_M=new_K,
        )


def collate_regions(images: Sequence[RegionArrays], max_regions: int, *, scores: bool = False) -> Regions:
    """Pads to the longest image, at most `max_regions` rows, the most confident ones. scores: as `ScoredRegions`.

    An image without a region gets one all-zero row whose mask is True: attention needs something to look at.
    """
    if not images:
        raise ValueError("a batch needs at least one image")
    if max_regions < 1:
        raise ValueError(f"max_regions must be at least 1: {max_regions}")
    counts = [min(len(image), max_regions) for image in images]
    rows = max(1, *counts)
    shape = (len(images), rows)
    features = np.zeros((*shape, images[0].features.shape[1]), dtype=np.float32)
    boxes = np.zeros((*shape, 4), dtype=np.float32)
    class_probs = np.zeros((*shape, images[0].class_probs.shape[1]), dtype=np.float32)
    mask = np.zeros(shape, dtype=bool)
    for i, (image, n) in enumerate(zip(images, counts, strict=True)):
        features[i, :n] = image.features[:n]
        boxes[i, :n] = image.boxes[:n]
        class_probs[i, :n] = image.class_probs[:n]
        mask[i, : max(1, n)] = True
    regions = Regions(
        features_BRF=torch.from_numpy(features),
        boxes_BR4=torch.from_numpy(boxes),
        class_probs_BRC=torch.from_numpy(class_probs),
        mask_BR=torch.from_numpy(mask),
    )
    if not scores:
        return regions
    confidence = np.zeros(shape, dtype=np.float32)
    for i, (image, n) in enumerate(zip(images, counts, strict=True)):
        confidence[i, :n] = image.scores[:n]
    return ScoredRegions(**vars(regions), scores_BR=torch.from_numpy(confidence))


def prepend_objects(regions: RegionArrays, boxes: Sequence[Sequence[float]], min_overlap: float = 0.5) -> RegionArrays:
    """The regions with known objects in front, which `collate_regions` then keeps first.

    An object has its own box, and feature and class probabilities of the detected region that overlaps it most; zeros
    where none does by `min_overlap` (intersection over union). Its score is 1.

    Args:
        boxes: the objects', x1, y1, x2, y2 as fractions.
    """
    if not boxes:
        return regions
    objects_K4 = np.asarray(boxes, dtype=np.float32)
    features = np.zeros((len(boxes), regions.features.shape[1]), dtype=np.float16)
    class_probs = np.zeros((len(boxes), regions.class_probs.shape[1]), dtype=np.float16)
    if len(regions):
        overlap_KN = _overlap(objects_K4, regions.boxes)
        best_K = overlap_KN.argmax(1)
        seen_K = overlap_KN[np.arange(len(boxes)), best_K] >= min_overlap
        features[seen_K], class_probs[seen_K] = regions.features[best_K[seen_K]], regions.class_probs[best_K[seen_K]]
    return RegionArrays(
        features=np.concatenate([features, regions.features]),
        boxes=np.concatenate([objects_K4, regions.boxes]),
        class_probs=np.concatenate([class_probs, regions.class_probs]),
        scores=np.concatenate([np.ones(len(boxes), dtype=np.float32), regions.scores]),
    )


def _overlap(a_K4: NDArray[np.float32], b_N4: NDArray[np.float32]) -> NDArray[np.float32]:
    """[K, N]: intersection over union."""
    sides_KN2 = np.minimum(a_K4[:, None, 2:], b_N4[:, 2:]) - np.maximum(a_K4[:, None, :2], b_N4[:, :2])
    common_KN = sides_KN2.clip(min=0).prod(-1)
    area_K, area_N = (a_K4[:, 2:] - a_K4[:, :2]).prod(-1), (b_N4[:, 2:] - b_N4[:, :2]).prod(-1)
    union_KN = area_K[:, None] + area_N - common_KN
    return (common_KN / np.maximum(union_KN, np.finfo(np.float32).tiny)).astype(np.float32)


def image_owners(samples: Sequence[Sample]) -> Tensor | None:
    """int64 [M]: which sample each image belongs to; None where each sample has one."""
    counts = torch.tensor([len(sample.image_ids) for sample in samples], dtype=torch.int64)
    return None if bool((counts == 1).all()) else torch.arange(len(samples)).repeat_interleave(counts)


def merge_adjacent_images(samples: Sequence[Sample]) -> tuple[list[Sample], Tensor]:
    """The first of each run of samples that show one image, with one draw; and int64 [N], the run of each sample.

    Samples whose image has no name share none.
    """
    firsts: list[Sample] = []
    owners = []
    for sample in samples:
        shown = (firsts[-1].image_id, firsts[-1].draw) if firsts else None
        if not sample.image_id or (sample.image_id, sample.draw) != shown:
            firsts.append(sample)
        owners.append(len(firsts) - 1)
    return firsts, torch.tensor(owners, dtype=torch.int64)


def get_regions(samples: Sequence[Sample]) -> list[RegionArrays]:
    """Of every image of the samples, one sample's behind each other.

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
