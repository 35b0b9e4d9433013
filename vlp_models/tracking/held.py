"""What the registry still holds of what was registered.

Imports neither models nor torch: an unattended run with nothing new asks this, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlp_models.errors import TrackingError, VLPError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND")


def failures() -> tuple[type[Exception], ...]:
    """What may be raised where a registry, or a store behind it, is read. A bucket's client, where it is installed, has
    errors of its own."""
    from mlflow.exceptions import MlflowException

    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return VLPError, OSError, MlflowException
    return VLPError, OSError, MlflowException, BotoCoreError, ClientError


def check_answered(error: Exception, what: str) -> None:
    """
    Args:
        what: was asked for.

    Raises:
        TrackingError: `error` says nothing of what a store holds: it did not answer.
    """
    import requests
    from mlflow.exceptions import MlflowException

    away = isinstance(error, (ConnectionError, TimeoutError, requests.RequestException))
    if away or (isinstance(error, MlflowException) and error.error_code not in GONE):
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
