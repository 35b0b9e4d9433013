"""Pictures that must not come in: `vlp forget` lists them, every door asks.

`data/withdrawn.jsonl` goes into git: a line a picture, by its hashes alone, so that the list does not keep what was to
be forgotten. By hashes the same picture is known again, also saved anew, scaled, framed, mirrored or turned by a
quarter; a copy that is cropped, tilted or written on only where its print was kept as well, which shows it at 32 x 32.
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
from vlp_models.curation.duplicates.hashes import ImageHashes
from vlp_models.curation.duplicates.perceptual import grey_of, hash_of_grey
from vlp_models.curation.duplicates.prints import TURNS, Print
from vlp_models.curation.duplicates.search import NearPictures, NearRules
from vlp_models.errors import DataError

BLIND = 6  # of 64 perceptual bits that may differ where there is no print to lay on the other: docs/forgetting.md


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A withdrawn picture.

    sha256, pixels: of the file, and of what it shows (`ImageHashes`), in hexadecimal.
    perceptual: of the picture in each of the 8 ways to lay it down; none of a picture without structure.
    images: the ids it had.
    print: None unless it was asked for.
    """

    sha256: str
    pixels: str
    perceptual: tuple[int, ...]
    images: tuple[str, ...]
    print: Print | None = None

    @staticmethod
    def of(sha256: str, pixels: str, print_: Print, images: Iterable[str], *, keep_print: bool) -> Entry:
        turned = [hash_of_grey(grey_of(print_.turned(turn))) for turn in range(TURNS)]
        return Entry(
            sha256=sha256,
            pixels=pixels,
            perceptual=tuple(value for value in turned if value is not None),
            images=tuple(images),
            print=print_ if keep_print else None,
        )

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {"sha256": self.sha256, "pixels": self.pixels}
        found |= {"perceptual": [f"{value:016x}" for value in self.perceptual], "images": list(self.images)}
        return found | ({"print": base64.b64encode(self.print.to_bytes()).decode()} if self.print else {})

    @staticmethod
    def read(line: str) -> Entry:
        """
        Raises:
            ValueError, KeyError, TypeError: not an entry.
        """
        value = json.loads(line)
        sha256, pixels = (bytes.fromhex(value[name]).hex() for name in ("sha256", "pixels"))
        perceptual = [int(text, 16) for text in value["perceptual"]]
        if len(sha256) != 64 or len(pixels) != 64 or not all(0 <= number < 1 << 64 for number in perceptual):
            raise ValueError("a hash of another length")
        kept = value.get("print")
        return Entry(
            sha256=sha256,
            pixels=pixels,
            perceptual=tuple(perceptual),
            images=tuple(str(name) for name in value.get("images", [])),
            print=Print.from_bytes(base64.b64decode(kept)) if kept else None,
        )


class Withdrawn:
    """What a door asks.

    Args:
        rules: those of near-duplicates; with `bits` -1, equal bytes and pixels only.
    """

    def __init__(self, entries: Sequence[Entry], rules: NearRules) -> None:
        self.entries = entries
        self._bytes = {entry.sha256 for entry in entries}
        self._pixels = {entry.pixels for entry in entries}
        self._ids = {name for entry in entries for name in entry.images}
        self._radius = min(rules.bits, BLIND)
        self._perceptual = np.array(sorted({value for entry in entries for value in entry.perceptual}), np.uint64)
        prints = [entry.print for entry in entries if entry.print is not None]
        self._near = NearPictures(prints, rules) if prints else None

    def __bool__(self) -> bool:
        return bool(self.entries)

    def why(self, found: ImageHashes) -> str:
        """How a picture is known to be one of them; empty: it is none."""
        return self.why_by(found.sha256.hex(), found.pixels.hex(), found.print)

    def why_by(self, sha256: str, pixels: str, print_: Print | None) -> str:
        if sha256 in self._bytes:
            return "byte for byte"
        if pixels in self._pixels:
            return "pixel for pixel"
        if print_ is None:
            return ""
        value = print_.perceptual
        if value is not None and self._radius >= 0 and len(self._perceptual):
            apart = int(np.bitwise_count(self._perceptual ^ np.uint64(value)).min())
            if apart <= self._radius:
                return f"{apart} of 64 perceptual bits apart"
        matches = self._near.matches([print_]) if self._near else []
        return matches[0].how if matches else ""

    def had(self, image_id: str) -> bool:
        """Whether one of them had this id: all there is to ask where the file is gone."""
        return image_id in self._ids


def read_withdrawn(path: Path, rules: NearRules) -> Withdrawn:
    """No file: nothing is withdrawn.

    Raises:
        DataError: a line is no entry. What can't be read must not let a picture in.
    """
    return Withdrawn(list(_read(path)), rules)


def withdraw(path: Path, entries: Iterable[Entry]) -> int:
    """Adds what is not listed yet, in one step; returns how many that were. A print is added to a picture that is
    listed without.

    Raises:
        DataError: a line is no entry.
    """
    listed = {entry.sha256: entry for entry in _read(path)}
    new = {
        entry.sha256: _joined(listed.get(entry.sha256), entry)
        for entry in entries
        if entry.sha256 not in listed or (entry.print is not None and listed[entry.sha256].print is None)
    }
    if new:
        lines = (json.dumps(entry.plain(), ensure_ascii=False, sort_keys=True) for entry in (listed | new).values())
        write_text(path, "".join(f"{line}\n" for line in lines))
    return len(new.keys() - listed.keys())


def _joined(before: Entry | None, entry: Entry) -> Entry:
    """With the names it had before: its file may be gone since."""
    if before is None:
        return entry
    return dataclasses.replace(entry, images=tuple(dict.fromkeys((*before.images, *entry.images))))


def _read(path: Path) -> Iterator[Entry]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                yield Entry.read(line)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: no entry of a withdrawn picture ({error!r}); take the line from git's history, "
                    "or delete it and `vlp forget` the picture again"
                ) from None
