"""One .npz per image, as TDEN's public code (xmodaler) stores regions: features, boxes, image_h, image_w, cls_prob."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vlp_models.errors import DataError
from vlp_models.vision.imported import ImportedSource, Order, Record, RecordError, import_id

MAX_BYTES = 64 * 2**20  # of one image's arrays when unpacked
_NEEDED = ("features", "boxes", "image_h", "image_w")


class NpzDirectory:
    """`<image id>.npz` for each image."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = {path.stem: path for path in paths}

    def keys(self) -> Iterable[str]:
        return self._paths

    def where(self, key: str) -> str:
        return self._paths[key].name

    def read(self, key: str) -> Record:
        path = self._paths[key]
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > MAX_BYTES:
                raise RecordError(f"unpacks to {size >> 20} MiB; the limit is {MAX_BYTES >> 20}")
            with np.load(path, allow_pickle=False) as file:
                missing = [name for name in _NEEDED if name not in file]
                if missing:
                    raise RecordError(f"lacks {', '.join(missing)}")
                class_probs = _floats(file["cls_prob"]) if "cls_prob" in file else None
                return Record(
                    features=_floats(file["features"]),
                    boxes=_floats(file["boxes"]),
                    width=float(file["image_w"].reshape(-1)[0]),
                    height=float(file["image_h"].reshape(-1)[0]),
                    class_probs=class_probs,
                    scores=None if class_probs is None else class_probs[:, 1:].max(axis=1, initial=0),
                )
        except (OSError, ValueError, IndexError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
            raise RecordError(f"{path.name}: {error}") from None


def open_npz(path: Path, max_regions: int, order: Order = "file") -> ImportedSource:
    """The .npz files of a directory.

    Raises:
        DataError: no such directory, or no readable record.
    """
    paths = sorted(path.glob("*.npz"))
    if not paths:
        raise DataError(f"{path}: no .npz files; set features.path to the directory that holds them")
    return ImportedSource(NpzDirectory(paths), path, import_id("npz", paths), max_regions, order)


def _floats(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "fiu":
        raise RecordError(f"holds {array.dtype}, not numbers")
    return array.astype(np.float32)
