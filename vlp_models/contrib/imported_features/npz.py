"""`features.source: npz`: one file per image, as TDEN's public code (xmodaler) stores regions.

A file has features, boxes, image_h, image_w and maybe cls_prob.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vlp_models.common.io import hash_file, stat_file
from vlp_models.common.progress import progress_bar
from vlp_models.contrib.imported_features.source import ImportedSource, Record, RecordError, features_path
from vlp_models.errors import DataError
from vlp_models.vision.region_source import SourceRequest

MAX_NPZ_BYTES = 64 * 2**20  # of one image's arrays when unpacked
_NEEDED = ("features", "boxes", "image_h", "image_w")


def open_npz(request: SourceRequest) -> ImportedSource:
    """Open the .npz files of a directory.

    Raises:
        ParamsError: no `features.path`.
        DataError: no such directory, no readable record, or other files than those of `request.origin`.
    """
    path = features_path(request)
    paths = sorted(path.glob("*.npz"))
    if not paths:
        raise DataError(f"{path}: no .npz files; set features.path to the directory that holds them")
    return ImportedSource(NpzDirectory(paths), request)


class NpzDirectory:
    """`<image id>.npz` for each image."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = {path.stem: path for path in paths}
        self.stamps = {path: stat_file(path.stat()) for path in self.paths.values()}

    def hash_contents(self) -> str:
        # Names and contents, so that neither a renamed nor an edited file keeps the id.
        digest = hashlib.sha256(b"npz")
        with progress_bar("hashing features", len(self.paths), "files") as bar:
            for path in self.paths.values():
                digest.update(f"{path.name}\0{hash_file(path)}\n".encode("utf-8", "surrogateescape"))
                bar.advance()
        return digest.hexdigest()

    def where(self, key: str) -> str:
        return self.paths[key].name

    def read(self, key: str) -> Record:
        path = self.paths[key]
        try:
            # The sizes are in the archive's directory: they are known before anything is unpacked.
            with zipfile.ZipFile(path) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > MAX_NPZ_BYTES:
                raise RecordError(f"unpacks to {size >> 20} MiB; the limit is {MAX_NPZ_BYTES >> 20}")
            # Without pickle, which would run code from the file.
            with np.load(path, allow_pickle=False) as file:
                # `cls_prob` may be missing: then regions have no classes.
                missing = [name for name in _NEEDED if name not in file]
                if missing:
                    raise RecordError(f"lacks {', '.join(missing)}")
                class_probs = _to_float32(file["cls_prob"]) if "cls_prob" in file else None
                return Record(
                    features=_to_float32(file["features"]),
                    boxes=_to_float32(file["boxes"]),
                    # A scalar in some files, an array of one element in others.
                    width=float(file["image_w"].reshape(-1)[0]),
                    height=float(file["image_h"].reshape(-1)[0]),
                    class_probs=class_probs,
                    scores=None if class_probs is None else class_probs[:, 1:].max(axis=1, initial=0),
                )
        except (OSError, ValueError, IndexError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
            raise RecordError(f"{path.name}: {error}") from None


def _to_float32(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "fiu":
        raise RecordError(f"holds {array.dtype}, not numbers")
    return array.astype(np.float32)
