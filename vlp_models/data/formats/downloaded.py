"""Pictures that a dataset gives the addresses of, once somebody has downloaded them: where the picture of a row is.

A row goes by its number, from 0. Its picture is looked for as img2dataset names it (`00012/000123456.jpg`: nine
digits, in a folder of their first five) and as plain `123456.jpg`. Addresses die, so a row without a picture is no
fault of the download; whoever reads such a dataset leaves it out, and counts it.
"""

from __future__ import annotations

from pathlib import Path

from vlp_models.data.images import FORMATS
from vlp_models.errors import DataError


class Downloaded:
    """The pictures below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = 0
        self._listings: dict[str, dict[str, str]] = {}  # folder -> name without its ending -> name

    def find(self, row: int) -> Path | None:
        nine = f"{row:09d}"
        for folder, name in ((nine[:5], nine), ("", nine), ("", str(row))):
            file = self._listing(folder).get(name)
            if file is not None:
                self._found += 1
                return self._folder / folder / file
        return None

    def need_any(self, where: str) -> None:
        """
        Raises:
            DataError: no row had a picture.
        """
        if not self._found:
            raise DataError(
                f"{where}: no row of it has a picture in {self._folder}; they are looked for as img2dataset names them "
                "(00012/000123456.jpg, by the row's number from 0), or as 123456.jpg"
            )

    def _listing(self, folder: str) -> dict[str, str]:
        if folder not in self._listings:
            path = self._folder / folder
            files = sorted(path.iterdir()) if path.is_dir() else []
            listing = {f.stem: f.name for f in files if f.suffix.lower() in FORMATS}
            # rows come in order: a folder that is left is not asked for again
            self._listings = {name: held for name, held in self._listings.items() if not name} | {folder: listing}
        return self._listings[folder]
