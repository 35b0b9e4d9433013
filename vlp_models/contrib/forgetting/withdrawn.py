"""The list of withdrawn images (`vlp forget`): every entry point of data checks new images against it.

`data/withdrawn.jsonl` is tracked by git, one line an image. It stores hashes only, so the list does not keep what was
to be erased. Hashes recognize the image re-encoded, scaled, framed, mirrored or rotated by quarter turns. A copy that
is cropped, tilted or overlaid with text is recognized only if the fingerprint was kept, which shows the image at
32 x 32.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.common.io import write_text
from vlp_models.curation.duplicates.fingerprints import (
    ORIENTATIONS,
    Fingerprint,
    perceptual_hash_of_gray,
    to_gray,
)
from vlp_models.curation.duplicates.hashes import ImageHashes
from vlp_models.curation.duplicates.search import NearDuplicateIndex, NearRules
from vlp_models.errors import DataError, first_line

HASH_ONLY_DISTANCE = (
    6  # of 64 perceptual bits that may differ without a fingerprint to verify: docs/guides/forgetting.md
)


@dataclass(frozen=True, kw_only=True)
class WithdrawnImage:
    """One withdrawn image.

    sha256, pixels  of the file and of its decoded pixels (`ImageHashes`), hexadecimal
    perceptual      hash in each of the 8 orientations; empty for an image without structure
    images          the ids it had
    fingerprint     None unless it was kept on request
    """

    sha256: str
    pixels: str
    perceptual: tuple[int, ...]
    images: tuple[str, ...]
    fingerprint: Fingerprint | None = None

    @staticmethod
    def create(
        sha256: str, pixels: str, fingerprint: Fingerprint, images: Iterable[str], *, keep_fingerprint: bool
    ) -> WithdrawnImage:
        hashes = [perceptual_hash_of_gray(to_gray(fingerprint.oriented(number))) for number in range(ORIENTATIONS)]
        return WithdrawnImage(
            sha256=sha256,
            pixels=pixels,
            perceptual=tuple(value for value in hashes if value is not None),
            images=tuple(images),
            fingerprint=fingerprint if keep_fingerprint else None,
        )

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"sha256": self.sha256, "pixels": self.pixels}
        # 64 bits as 16 hexadecimal digits
        plain |= {"perceptual": [f"{value:016x}" for value in self.perceptual], "images": list(self.images)}
        if self.fingerprint:
            plain["fingerprint"] = base64.b64encode(self.fingerprint.to_bytes()).decode()
        return plain

    @staticmethod
    def from_line(line: str) -> WithdrawnImage:
        """Parse a line of the list.

        Raises:
            ValueError, KeyError, TypeError: the line is not a withdrawn image.
        """
        value = json.loads(line)
        unknown = value.keys() - {"sha256", "pixels", "perceptual", "images", "fingerprint"}
        if unknown:
            raise ValueError(f"unknown key {min(unknown)}")
        # the round trip refuses what is not hexadecimal
        sha256, pixels = (bytes.fromhex(value[name]).hex() for name in ("sha256", "pixels"))
        perceptual = [int(text, 16) for text in value["perceptual"]]
        if len(sha256) != 64 or len(pixels) != 64 or not all(0 <= number < 1 << 64 for number in perceptual):
            raise ValueError("a hash has the wrong length")
        fingerprint = value.get("fingerprint")
        return WithdrawnImage(
            sha256=sha256,
            pixels=pixels,
            perceptual=tuple(perceptual),
            images=tuple(str(name) for name in value.get("images", [])),
            fingerprint=Fingerprint.from_bytes(base64.b64decode(fingerprint)) if fingerprint else None,
        )


class WithdrawnList:
    """Recognize withdrawn images.

    Args:
        rules: those of near-duplicates; with `max_hash_distance` -1, only equal bytes and pixels are recognized.
    """

    def __init__(self, images: Sequence[WithdrawnImage], rules: NearRules) -> None:
        self.images = images
        self._bytes = {image.sha256 for image in images}
        self._pixels = {image.pixels for image in images}
        self._ids = {name for image in images for name in image.images}
        # Without a fingerprint nothing verifies a near hash, so the distance is stricter.
        self._radius = min(rules.max_hash_distance, HASH_ONLY_DISTANCE)
        self._perceptual = np.array(sorted({value for image in images for value in image.perceptual}), np.uint64)
        fingerprints = [image.fingerprint for image in images if image.fingerprint is not None]
        self._index = NearDuplicateIndex(fingerprints, rules) if fingerprints else None

    def __bool__(self) -> bool:
        return bool(self.images)

    def match(self, hashes: ImageHashes) -> str:
        """Describe why an image counts as withdrawn; empty if it does not."""
        return self.match_hashes(hashes.sha256.hex(), hashes.pixels.hex(), hashes.fingerprint)

    def match_hashes(self, sha256: str, pixels: str, fingerprint: Fingerprint | None) -> str:
        """Like `match`, for stored hashes."""
        # from the surest to the least sure
        if sha256 in self._bytes:
            return "byte for byte"
        if pixels in self._pixels:
            return "pixel for pixel"
        if fingerprint is None:
            return ""
        # without the fingerprint, the hash alone must be close
        value = fingerprint.perceptual
        if value is not None and self._radius >= 0 and len(self._perceptual):
            distance = int(np.bitwise_count(self._perceptual ^ np.uint64(value)).min())
            if distance <= self._radius:
                return f"{distance} of 64 perceptual bits apart"
        matches = self._index.search([fingerprint]) if self._index else []
        return matches[0].change if matches else ""

    def has_id(self, image_id: str) -> bool:
        """Return whether a withdrawn image had this id: the only check left once its file is gone."""
        return image_id in self._ids


def read_withdrawn(path: Path, rules: NearRules) -> WithdrawnList:
    """Read the list; a missing file is an empty list.

    Raises:
        DataError: a line cannot be parsed; a damaged line must not let an image in.
    """
    return WithdrawnList(list(_read(path)), rules)


def withdraw(path: Path, images: Iterable[WithdrawnImage]) -> int:
    """Add images to the list atomically; return how many are new. Adds a missing fingerprint to a listed image.

    Raises:
        DataError: a line of the list cannot be parsed.
    """
    listed = {image.sha256: image for image in _read(path)}
    new: dict[str, WithdrawnImage] = {}
    for image in images:
        before = listed.get(image.sha256)
        if before is None:
            new[image.sha256] = image
        elif image.fingerprint is not None and before.fingerprint is None:
            # Keep the ids the image had before: its file may be gone since.
            ids = tuple(dict.fromkeys((*before.images, *image.images)))
            new[image.sha256] = dataclasses.replace(image, images=ids)
    if new:
        # sorted keys, so that git shows only new lines
        lines = (json.dumps(image.to_plain(), ensure_ascii=False, sort_keys=True) for image in (listed | new).values())
        write_text(path, "".join(f"{line}\n" for line in lines))
    return len(new.keys() - listed.keys())


def _read(path: Path) -> Iterator[WithdrawnImage]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                yield WithdrawnImage.from_line(line)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: not a withdrawn image ({first_line(error)}); restore the line from git, or "
                    "delete it and run `vlp forget` for the image again"
                ) from None
