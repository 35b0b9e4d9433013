"""A workspace that was moved or copied: its MLflow database follows.

MLflow keeps absolute places of files. In another folder they would point to nothing, or, worse, into the workspace that
this one is a copy of.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Where MLflow's database (3.1 and newer) holds places of files; a column that is not there holds none.
PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def follow(database: Path, home: Path, artifacts: str) -> None:
    """Rewrites what the database says of files below the folder that it was in before; does nothing where it has not
    moved, and where the files have not come with it.

    Args:
        home: the project that the database lies in now.
        artifacts: `tracking.artifacts`, a path below it.
    """
    home = home.absolute()
    if not database.exists() or not (home / artifacts).is_dir():
        return
    with closing(sqlite3.connect(database, timeout=10)) as connection:
        try:
            found = connection.execute("select artifact_location from experiments").fetchall()
        except sqlite3.OperationalError:  # no MLflow in it yet
            return
        homes = {old for (location,) in found if (old := _home_in(location or "", artifacts))}
        # What lies below this very folder has not moved: `tracking.artifacts` was another one.
        before = {old for old in homes if not _same(old, home) and not old.is_relative_to(home)}
        if not before:
            return
        with connection:
            for old in before:
                for table, column in PLACES:
                    if _has_column(connection, table, column):
                        _rewrite(connection, table, column, f"{old.as_uri()}/", f"{home.as_uri()}/")
    places = ", ".join(map(str, before))
    print(f"{database}: was made in {places}; its files are now looked for in {home}", file=sys.stderr)


def _home_in(location: str, artifacts: str) -> Path | None:
    """The project that an experiment's files were in; None where they are not kept as this program keeps them."""
    parts = urlsplit(location)
    place, below = Path(unquote(parts.path)), Path(artifacts).parts
    if parts.scheme != "file" or not below or Path(artifacts).is_absolute() or place.parts[-len(below) :] != below:
        return None
    return Path(*place.parts[: -len(below)])


def _same(one: Path, other: Path) -> bool:
    """Also by two names, such as a link's."""
    return one == other or (one.exists() and one.samefile(other))


def _has_column(connection: sqlite3.Connection, table: str, column: str) -> bool:
    return any(row[1] == column for row in connection.execute(f"pragma table_info({table})"))


def _rewrite(connection: sqlite3.Connection, table: str, column: str, old: str, new: str) -> None:
    query = f"update {table} set {column} = ? || substr({column}, ?) where substr({column}, 1, ?) = ?"
    connection.execute(query, (new, len(old) + 1, len(old), old))
