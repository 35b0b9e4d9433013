"""Flickr8k as the data of a study: captions, and the cells of a pretrained CNN as regions.

Features are extracted once into a folder (float16, mapped into memory), 500 photos at a time, so that a killed
extraction continues. The official dev photos are `test`; val is a twelfth of train. There are no questions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pretraining_study.data import Data, Images, Split, Texts
from pretraining_study.setting import Setting
from vlp_models.data.formats import read_source
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.params import DatasetParams, TimmParams

AT_ONCE = 500  # photos of a file of features
SPLITS = {
    "images": "Images",
    "split_files": {"train": ["Flickr_8k.trainImages.txt"], "test": ["Flickr_8k.devImages.txt"]},
    "val_fraction": 0.0833,
}


@dataclass(frozen=True, kw_only=True)
class Photo:
    path: Path
    captions: tuple[str, ...]


def read_photos(root: Path, limit: int | None = None) -> dict[str, list[Photo]]:
    """Return split -> photos, in the order of their names; at most `limit` of train and of test.

    Raises:
        DataError: a file of Flickr8k is missing.
    """
    tables = read_source("flickr8k", DatasetParams.of(format="flickr8k", root=str(root.resolve()), **SPLITS), root)
    captions: dict[str, list[str]] = {}
    for row in tables["captions"]:
        captions.setdefault(row["image_id"], []).append(row["text"])
    found: dict[str, list[Photo]] = {"train": [], "val": [], "test": []}
    for row in sorted(tables["images"], key=lambda row: str(row["image_id"])):
        photo = Photo(path=Path(row["path"]), captions=tuple(captions[row["image_id"]]))
        found[row["split"]].append(photo)
    return found if limit is None else {split: photos[:limit] for split, photos in found.items()}


def extract(photos: Sequence[Photo], cells: int, folder: Path, backbone: TimmParams) -> dict[str, np.ndarray]:
    """Return `features` [I, R, F], `boxes` [I, R, 4] and `class_probs` [I, R, C] of the photos, from `folder` where
    they are there."""
    from PIL import Image

    from vlp_models.vision.timm_backbone import CellExtractor, make_backbone

    extractor = None
    parts: dict[str, list[np.ndarray]] = {"features": [], "boxes": [], "class_probs": []}
    for start in range(0, len(photos), AT_ONCE):
        chunk = photos[start : start + AT_ONCE]
        contents = [(photo.path.name, photo.path.stat().st_size) for photo in chunk]
        made_of = json.dumps([contents, cells, backbone.model, backbone.weights])
        place = folder / hashlib.sha256(made_of.encode()).hexdigest()[:16]
        if not place.exists():
            extractor = extractor or CellExtractor(make_backbone(backbone, Path.cwd()), max_regions=cells)
            print(f"features of photos {start + 1} to {start + len(chunk)} of {len(photos)}", flush=True)
            found = [extractor.extract([Image.open(photo.path).convert("RGB")])[0] for photo in chunk]
            partial = place.with_name(f".{place.name}.{os.getpid()}")
            partial.mkdir(parents=True)
            for name in parts:
                np.save(partial / f"{name}.npy", np.stack([getattr(one, name) for one in found]))
            if not place.exists():  # another process may have been faster
                partial.rename(place)
        for name, of_name in parts.items():
            of_name.append(np.load(place / f"{name}.npy", mmap_mode="r"))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


class Photos(Data):
    """The interface of `Data`, for models that read regions and tasks without questions."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("captioning", "retrieval")

    def __init__(
        self, setting: Setting, photos: dict[str, list[Photo]], arrays: dict[str, dict[str, np.ndarray]]
    ) -> None:
        """setting: its `feature_dim` is replaced by that of the features. arrays: split -> features (`extract`)."""
        dim = int(arrays["train"]["features"].shape[2])
        self.setting = dataclasses.replace(setting, feature_dim=dim)
        self.photos, self._arrays = photos, arrays
        self._drawn, self.answers = False, []
        texts = [text for photo in photos["train"] for text in photo.captions]
        self.tokenizer = Tokenizer.train(texts, size=4000, min_frequency=2, lowercase=True)

    @classmethod
    def read(cls, root: Path, setting: Setting, *, cells: int, work: Path, limit: int | None = None) -> Photos:
        photos = read_photos(root, limit)
        arrays = {
            split: extract(of_split, cells, work / "features", TimmParams()) for split, of_split in photos.items()
        }
        return cls(setting, photos, arrays)

    @property
    def classes(self) -> int:
        return int(self._arrays["train"]["class_probs"].shape[2])

    @cached_property
    def web(self) -> tuple[Images, Texts]:
        """All training photos with all their captions."""
        every = self.photos["train"]
        return self._select("train", range(len(every))), self._texts_of(every)

    @cached_property
    def val(self) -> Split:
        return self._of("val", range(min(self.setting.val, len(self.photos["val"]))))

    @cached_property
    def test(self) -> Split:
        return self._of("test", range(min(self.setting.test, len(self.photos["test"]))))

    def train(self, seed: int) -> Split:
        """`setting.train` training photos, drawn by the seed."""
        return self.drawn(seed, min(self.setting.train, len(self.photos["train"])))

    def drawn(self, seed: int, count: int) -> Split:
        """So many training photos; a larger draw of a seed contains its smaller ones."""
        order = np.random.default_rng([seed, 41]).permutation(len(self.photos["train"]))
        return self._of("train", sorted(order[:count].tolist()))

    def small(self) -> Photos:
        few = {split: photos[:32] for split, photos in self.photos.items()}
        arrays = {split: {name: a[:32].copy() for name, a in own.items()} for split, own in self._arrays.items()}
        return Photos(self.setting, few, arrays)

    def _of(self, split: str, rows: Sequence[int]) -> Split:
        photos = [self.photos[split][row] for row in rows]
        none = Texts(
            words=(),
            ids_NT=torch.zeros(0, 1, dtype=torch.int64),
            mask_NT=torch.zeros(0, 1, dtype=torch.bool),
            owner_N=torch.zeros(0, dtype=torch.int64),
        )
        return Split(
            scenes=(),
            images=self._select(split, rows),
            captions=self._texts_of(photos),
            questions=none,
            answers=(),
            scores_QA=torch.zeros(0, 0),
        )

    def _texts_of(self, photos: Sequence[Photo]) -> Texts:
        texts = [text for photo in photos for text in photo.captions]
        return self.texts(texts, [owner for owner, photo in enumerate(photos) for _ in photo.captions])

    def _select(self, split: str, rows: Sequence[int]) -> Images:
        chosen: dict[str, Tensor] = {n: torch.from_numpy(a[list(rows)]) for n, a in self._arrays[split].items()}
        count, regions = chosen["features"].shape[:2]
        return Images(
            features_IRF=chosen["features"],
            boxes_IR4=chosen["boxes"],
            class_probs_IRC=chosen["class_probs"],
            mask_IR=torch.ones(count, regions, dtype=torch.bool),
        )
