"""What the registry still holds of what was registered.

Imports neither models nor torch: an unattended run with nothing new asks this, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vlp_models.errors import BusyError, TrackingError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND")
# Of a file that is not there, in the words of a bucket and of a server: MLflow tells it as an error of its own.
_NOT_THERE = re.compile(r"An error occurred \((?:404|NoSuchKey)\)|\b404 Client Error")


def bucket_errors() -> tuple[type[Exception], ...]:
    """What a bucket's client raises, where it is installed: few of them are OSErrors."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return ()
    return BotoCoreError, ClientError


def failures(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What may be raised where a registry, or a store behind it, is read; and `others`."""
    from mlflow.exceptions import MlflowException

    return *others, OSError, MlflowException, *bucket_errors()


def is_away(error: Exception) -> bool:
    """Whether it says nothing of what a store holds: the store did not answer."""
    import requests
    from mlflow.exceptions import MlflowException

    away = isinstance(error, (ConnectionError, TimeoutError, requests.RequestException, *bucket_errors()))
    if isinstance(error, MlflowException):
        away = error.error_code not in GONE
    elif isinstance(error, OSError) and error.errno is not None:  # without, it is a reader's word on a file's contents
        away = not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError))
    return away and not _NOT_THERE.search(str(error))


def check_answered(error: Exception, what: str) -> None:
    """
    Args:
        what: was asked for.

    Raises:
        TrackingError, BusyError: `error` is one; or it tells of a store that is away.
    """
    if isinstance(error, (TrackingError, BusyError)):
        raise error
    if is_away(error):
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise TrackingError(f"{what}: the store does not answer ({line}); nothing was decided, ask again") from None


def holds(client: MlflowClient, name: str, number: int, content: str) -> bool:
    """Whether the registry has this version, with this content and its files."""
    found = [v for v in _versions_with(client, name, content) if int(v.version) == number]
    return bool(found) and _has_files(found[0])


def model_called(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model of just this name; None where there is none."""
    return next((m for m in client.search_registered_models(f"name='{name}'") if m.name == name), None)


def version_with(client: MlflowClient, name: str, content: str) -> ModelVersion | None:
    """The newest version of that content whose files are still there."""
    return next(filter(_has_files, _versions_with(client, name, content)), None)


def _versions_with(client: MlflowClient, name: str, content: str) -> list[ModelVersion]:
    found = [v for v in client.search_model_versions(f"name='{name}'") if v.tags.get("content") == content]
    return sorted(found, key=lambda version: -int(version.version))


def _has_files(version: ModelVersion) -> bool:
    """That a store answers with an error says nothing of the files: it is raised."""
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    try:
        return bool(mlflow.artifacts.list_artifacts(f"models:/{version.name}/{version.version}"))
    except MlflowException as error:
        if error.error_code not in GONE:
            raise
    except (FileNotFoundError, NotADirectoryError):
        pass
    return False
