"""The account that runs this process: its name and home folder, which containers often lack.

Prefect, DVC and MLflow ask for both and fail without; `vlp` sets the name (environment.py) and asks for the folder.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from vlp_models.errors import DataError

HOME_HINT = "set HOME to a writable folder, such as HOME=/tmp or a volume"


def current_user() -> str:
    """Return the user's name; `uid-NUMBER` if the system has none."""
    try:
        return getpass.getuser()
    # OSError from Python 3.13 on, KeyError before it; ImportError on systems without `pwd`.
    except (OSError, KeyError, ImportError):
        return f"uid-{os.getuid()}"


def require_home() -> None:
    """Check that the user has a home folder, where DVC and MLflow look for settings. It need not exist."""
    try:
        Path.home()
    except RuntimeError:
        raise DataError(f"{current_user()}: no home folder, which DVC and MLflow need; {HOME_HINT}") from None
