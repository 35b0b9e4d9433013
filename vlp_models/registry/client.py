"""The way to MLflow: where it is, and how long to wait for it."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.lock import file_lock
from vlp_models.common.redaction import redact
from vlp_models.common.workspace import home_of
from vlp_models.errors import BusyError, TrackingError
from vlp_models.params import TrackingParams
from vlp_models.registry.moved import follow

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what goes wrong is told once, in our words and with its reason
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # of a run that ends: with the name and password of the server
    "GIT_PYTHON_REFRESH": "quiet",
}
SQLITE = "sqlite:///"


def tracking_uri(params: TrackingParams, root: Path) -> str:
    """The tracking URI; MLFLOW_TRACKING_URI wins, a relative SQLite path is taken from the project's root.

    DVC's temporary copies of a project (`dvc exp run --temp`) have its registry.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or params.uri
    if uri.startswith(SQLITE) and not uri.startswith(SQLITE + "/"):
        return f"{SQLITE}{(home_of(root) / uri.removeprefix(SQLITE)).absolute()}"
    return uri


def is_there(uri: str) -> bool:
    """False for a local database that does not exist; asking MLflow would make an empty one."""
    return not uri.startswith(SQLITE) or Path(uri.removeprefix(SQLITE).partition("?")[0]).exists()


def connect(params: TrackingParams, root: Path) -> MlflowClient:
    """A client, with `mlflow` itself pointed at the same place and the experiment there.

    Raises:
        TrackingError: MLflow does not answer.
    """
    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)
    import logging
    import warnings

    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Advice on type hints and input examples: we give a signature, and hints would refuse image arrays.
    warnings.filterwarnings("ignore", module=r"mlflow\..*")
    import mlflow
    from mlflow import MlflowClient

    uri = tracking_uri(params, root)
    named = os.environ.get("MLFLOW_TRACKING_URI") or params.uri  # read now: MLflow sets it
    ours = uri != named and not _elsewhere(params.artifacts)  # a database and files below the root
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    with answering(uri), _alone(uri, home_of(root)):
        _open_at_all(uri)
        if ours:
            follow(Path(uri.removeprefix(SQLITE)), home_of(root), params.artifacts)
        client = MlflowClient()
        _set_experiment(client, params, root, uri)
    return client


@contextmanager
def answering(uri: str) -> Iterator[None]:
    """
    Raises:
        TrackingError: what the block asks of MLflow fails.
    """
    try:
        yield
    except failures(sqlite3.Error) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "rror" in line), lines[0])[:200]
        raise TrackingError(
            f"MLflow at {redact(uri)} does not answer as it should ({redact(reason)}); see that it runs (tracking.uri "
            "in params.yaml) and has room on its disk, then run again: nothing finished is lost"
        ) from error


def _open_at_all(uri: str) -> None:
    """MLflow tries a database that can't be opened again for more than three minutes; training would wait for it."""
    if uri.startswith(SQLITE):
        with closing(sqlite3.connect(uri.removeprefix(SQLITE).partition("?")[0], timeout=10)) as database:
            database.execute("pragma schema_version").fetchone()


@contextmanager
def _alone(uri: str, home: Path) -> Iterator[None]:
    """MLflow makes a new database's tables when it is first asked, and of two that ask at once one fails."""
    if not uri.startswith(SQLITE):
        yield
        return
    with file_lock(home / ".work" / "locks" / "mlflow.lock", "process that opens MLflow's database", wait=300):
        yield


def _set_experiment(client: MlflowClient, params: TrackingParams, root: Path, uri: str) -> None:
    import mlflow

    if client.get_experiment_by_name(params.experiment) is None:
        location: str | None = params.artifacts
        if uri.startswith("http"):
            location = None  # the server's own
        elif not _elsewhere(params.artifacts):
            location = (home_of(root) / params.artifacts).absolute().as_uri()
        client.create_experiment(params.experiment, artifact_location=location)
    mlflow.set_experiment(params.experiment)


def _elsewhere(artifacts: str) -> bool:
    """Whether `tracking.artifacts` is an address (s3://bucket/folder, mlflow-artifacts:/), not a path from the root."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", artifacts) is not None


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
