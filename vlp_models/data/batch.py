"""Typed batches: what every model takes.

Shape suffixes: B batch, R regions, F feature dimension, C detector classes, T text tokens, H/W pixels, A answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

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
    def followed_BT(self) -> Tensor:
        """bool: the positions after which another token comes, which generation predicts there. The [SEP] of a text
        that was cut is no such token."""
        if self.cut_B is None:
            return pad(self.mask_BT[:, 1:], (0, 1))
        ends_BT = self.mask_BT & ~pad(self.mask_BT[:, 1:], (0, 1))
        return pad((self.mask_BT & ~(ends_BT & self.cut_B[:, None]))[:, 1:], (0, 1))

    def following(self, at_BT: Tensor) -> Tensor:
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

    def looking_at(self, images_K: Tensor) -> list[str]:
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
