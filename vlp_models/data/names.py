"""Find files whose names differ from a listing only in Unicode form, letter case or the direction of slashes.

macOS writes decomposed names (NFD) where most tools compose them (NFC), Windows ignores case and writes `\\`.
"""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

SUGGESTED = 100  # missing files for which the nearest name is looked for: comparing all names is slow
MANY = 20_000  # names of a folder among which the nearest one is still looked for


def fold_name(name: str) -> str:
    """Return what equal names have in common: composed characters, no letter case, forward slashes."""
    # Composed once more: `casefold` may leave decomposed characters.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).replace("\\", "/")


def _fold_all(names: Iterable[str]) -> dict[str, list[str]]:
    """Return folded name -> names."""
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(fold_name(name), []).append(name)
    return folded


class Names:
    """Names among which one is looked up that may differ in letter case, Unicode form or slashes."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        self._folded = _fold_all(self._names)
        self._suggested = 0

    def match(self, name: str) -> str | None:
        """Return the name itself, or the only one that differs from it as described above; None: none or several."""
        if name in self._names:
            return name
        candidates = self._folded.get(fold_name(name), [])
        return candidates[0] if len(candidates) == 1 else None

    def nearest(self, name: str) -> str:
        """Return a remark with the nearest name, for a message; empty if none is near, or after many searches."""
        self._suggested += 1
        return _nearest(name, self._folded) if self._suggested <= SUGGESTED else ""


def _nearest(name: str, folded: Mapping[str, list[str]]) -> str:
    if len(folded) > MANY:
        return ""
    folded_name = fold_name(name)
    # the nearest that is not another number
    near = difflib.get_close_matches(folded_name, folded, n=5, cutoff=0.8)
    close = next((other for other in near if not _is_another_number(folded_name, other)), None)
    return f"; the nearest name there is {folded[close][0]}" if close is not None else ""


def _is_another_number(name: str, other: str) -> bool:
    """Return whether two names differ in their numbers only: img_010 is another image than img_003, no typo of it.

    The same digits in another order, or more zeros in front, may be a typo.
    """
    numbers, other_numbers = re.findall(r"[0-9]+", name), re.findall(r"[0-9]+", other)
    same_digits = sorted("".join(numbers)) == sorted("".join(other_numbers))  # img_012 and img_021
    same_values = [*map(int, numbers)] == [*map(int, other_numbers)]
    same_text = re.sub(r"[0-9]+", "0", name) == re.sub(r"[0-9]+", "0", other)
    return same_text and not (same_digits or same_values)


class FileNames:
    """Looks files up by folded names; each folder is listed once."""

    def __init__(self) -> None:
        self._listings: dict[Path, dict[str, list[str]]] = {}
        self._suggested = 0

    def find(self, folder: Path, relative: str) -> list[Path]:
        """Return the files below `folder` whose path differs from `relative` only as described above.

        The result is empty if `relative` leaves the folder.
        """
        parts = [part for part in relative.replace("\\", "/").split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            return []
        listing = self._list(folder)
        # also a file that an archive of Windows left with a backslash in its name
        paths = [folder / name for name in listing.get(fold_name("/".join(parts)), ())]
        files = [path for path in paths if path.is_file()]
        # every folder may differ in form, too
        if len(parts) > 1:
            for name in listing.get(fold_name(parts[0]), ()):
                files += self.find(folder / name, "/".join(parts[1:]))
        return files

    def explain(self, folder: Path, relative: str, candidates: list[Path]) -> str:
        """Return a remark on a missing file: the candidates among which none can be chosen, or the nearest name."""
        if candidates:
            listed = ", ".join(str(path.relative_to(folder)) for path in candidates[:3])
            return f"; {len(candidates)} files differ from it only in letter case or Unicode form: {listed}"
        path = folder / relative.replace("\\", "/")
        self._suggested += 1
        return _nearest(path.name, self._list(path.parent)) if self._suggested <= SUGGESTED else ""

    def _list(self, folder: Path) -> dict[str, list[str]]:
        if folder not in self._listings:
            try:
                names = sorted(os.listdir(folder))  # noqa: PTH208 (names only)
            except OSError:
                names = []
            self._listings[folder] = _fold_all(names)
        return self._listings[folder]
