"""Connect to MLflow, translate its errors, and look up registered models and versions.

Imports neither models nor torch, so that an unattended run with nothing new to do starts quickly.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from vlp_models.common.lock import file_lock
from vlp_models.common.packages import quick_imports
from vlp_models.common.redaction import redact
from vlp_models.common.user import require_home
from vlp_models.common.workspace import project_root
from vlp_models.errors import (
    BusyError,
    DataError,
    TrackingError,
    VLPError,
    explain_access,
    explain_system_error,
    first_line,
    is_disk_full,
    network_reason,
    plain_text,
)
from vlp_models.params import Params, TrackingParams
from vlp_models.tasks import TASKS, check_task

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    # MLflow's own values (7 retries, 120 s) would keep an unattended run waiting for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # errors are reported once, by us, with their cause
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the URL may contain the server's user name and password
    "GIT_PYTHON_REFRESH": "quiet",
}
VARIABLE = "MLFLOW_TRACKING_URI"
SQLITE = "sqlite:///"
# SQLite's words -> the way out
DATABASE_ADVICE = {
    "malformed": "the file is damaged, restore it from a backup",
    "is not a database": "restore the file from a backup",
    "is locked": "end the other program that uses it",
    "I/O error": "check that its disk is neither full nor damaged",
    "unable to open": "check that it is a file in an existing folder",
}
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
NOT_FOUND_CODES = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND")
# A missing file as a bucket or a server reports it; MLflow passes both on as internal errors.
_MISSING_FILE = re.compile(r"An error occurred \((?:404|NoSuchKey)\)|\b404 Client Error")


def named_uri(params: TrackingParams) -> str:
    """Return the tracking URI as the user has written it: MLFLOW_TRACKING_URI overrides params.yaml."""
    return os.environ.get(VARIABLE) or params.uri


def tracking_uri(params: TrackingParams, root: Path) -> str:
    """Return the tracking URI; a relative SQLite path starts at the project root.

    DVC's temporary copies of a project (`dvc exp run --temp`) use the registry of the original.
    """
    uri = named_uri(params)
    # SQLAlchemy's addresses: three slashes start a relative path, four an absolute one.
    if uri.startswith(SQLITE) and not uri.startswith(SQLITE + "/"):
        home = str(project_root(root).absolute())
        if "?" in home:  # where the options of an SQLite address begin
            raise TrackingError(f"{home}: MLflow cannot open a database in a folder with `?` in its name; rename it")
        return f"{SQLITE}{home}/{uri.removeprefix(SQLITE)}"
    return uri


def database_exists(uri: str) -> bool:
    """Return False for a local database that does not exist (connecting would create an empty one)."""
    return not uri.startswith(SQLITE) or Path(uri.removeprefix(SQLITE).partition("?")[0]).exists()


def connect(params: TrackingParams, root: Path) -> MlflowClient:
    """Return a client; also point `mlflow` at the same server and create the experiment if it does not exist.

    Raises:
        TrackingError: MLflow does not answer, or its database was moved or copied here from another folder.
        DataError: the user has no home folder, which MLflow needs.
    """
    require_home()
    # Before MLflow is imported, which reads these variables.
    for key, value in DEFAULTS.items():
        # A value that the user has set stays.
        os.environ.setdefault(key, value)
    import logging
    import warnings

    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Advice on type hints and input examples: we pass a signature, and hints would reject image arrays.
    warnings.filterwarnings("ignore", module=r"mlflow\..*")
    with quick_imports():
        import mlflow
        from mlflow import MlflowClient
        from sqlalchemy.exc import SQLAlchemyError

        if tracking_uri(params, root).startswith(SQLITE):
            import mlflow.store.tracking.sqlalchemy_store  # MLflow itself imports it later

    uri = tracking_uri(params, root)
    # MLflow also sets the variable, which would override params.yaml from here on, and be blamed for it.
    variable = os.environ.get(VARIABLE)
    mlflow.set_tracking_uri(uri)
    if variable is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = variable
    mlflow.set_registry_uri(uri)
    home = project_root(root).absolute()
    # MLflow creates its tables on first use, and two processes that do so at once get in each other's way.
    lock: AbstractContextManager[Any] = nullcontext()
    if uri.startswith(SQLITE):
        file = home / ".work" / "locks" / "mlflow.lock"
        lock = file_lock(file, "process that opens MLflow's database", wait=300, announce_after=30)
    # ValueError: an address, or a variable of MLflow's, that it cannot read.
    with tracking_errors(uri, ValueError, SQLAlchemyError), lock:
        if uri.startswith(SQLITE):
            # MLflow retries a database that cannot be opened for over three minutes; fail at once instead.
            with closing(sqlite3.connect(uri.removeprefix(SQLITE).partition("?")[0], timeout=10)) as database:
                database.execute("pragma schema_version").fetchone()
        client = MlflowClient()
        experiment = client.get_experiment_by_name(params.experiment)
        if experiment is None:
            location: str | None = params.artifacts
            if uri.startswith("http"):
                location = None  # the server's default
            elif not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", params.artifacts):  # a path, not an address like s3://...
                location = (home / params.artifacts).as_uri()
            # Without the tag, MLflow's UI opens the experiment in its view of traces, which hides the runs.
            client.create_experiment(params.experiment, artifact_location=location, tags=EXPERIMENT_TAGS)
        # Only a database in the project can have been moved along with it.
        elif uri.startswith(f"{SQLITE}{home}/"):
            _check_not_moved(experiment.artifact_location, home, params.artifacts)
        mlflow.set_experiment(params.experiment)
    return client


def _check_not_moved(location: str, home: Path, artifacts: str) -> None:
    """MLflow keeps absolute paths: a copied project would read and write the files of the original.

    Args:
        location: of the experiment's files.
        artifacts: `tracking.artifacts`, a path in the project. If it was changed, older files stay where they were.
    """
    # `file:///home/a/project/mlartifacts` and `mlartifacts`: the project was /home/a/project.
    address, relative_parts = urlsplit(location), Path(artifacts).parts
    folder = Path(unquote(address.path))
    depth = len(relative_parts)
    if address.scheme != "file" or Path(artifacts).is_absolute() or folder.parts[-depth:] != relative_parts:
        return
    original = Path(*folder.parts[:-depth])
    # `samefile`: the same folder by another path, such as a symbolic link or a mount.
    if original == home or original.is_relative_to(home) or (original.exists() and original.samefile(home)):
        return
    raise TrackingError(
        f"mlflow.db was created in {original} and holds absolute paths; to use it in {home}, move the project back, or "
        "move mlflow.db away and run `vlp run register`: champions are found again by their contents"
    )


@contextmanager
def tracking_errors(uri: str, *others: type[Exception]) -> Iterator[None]:
    """Raise every MLflow, store or file error of the block, and `others`, as a TrackingError.

    Raises:
        TrackingError: a request to MLflow failed.
    """
    try:
        yield
    # Python evaluates the types only when an exception arrives, so success imports no MLflow here.
    except store_errors(sqlite3.Error, *others) as error:
        raise TrackingError(_explain_failure(uri, error)) from error


def _explain_failure(uri: str, error: Exception) -> str:
    """Return a sentence on a failed request: the file that the system refused, or the reason that MLflow gives."""
    label, remedy = _describe_server(uri), "then run again: finished work is kept"
    # The system names the file; a full disk may also be inside an error of the database.
    is_system_error = isinstance(error, OSError) and error.errno is not None and error.filename
    if is_system_error or is_disk_full(error):
        return redact(f"{label} failed: {explain_system_error(error)}, {remedy}")
    if uri.startswith(SQLITE):
        file = Path(uri.removeprefix(SQLITE).partition("?")[0])
        denied = explain_access(file) or explain_access(file.parent)  # SQLite writes its journal next to the file
        if denied:
            return redact(f"{label} failed: {denied}, {remedy}")
    reason = _explain_reason(error)
    way_out = "check that it is running, " if network_reason(error) else "fix that, "
    if uri.startswith(SQLITE):
        way_out = next((f"{advice}, " for words, advice in DATABASE_ADVICE.items() if words in reason), way_out)
    return redact(f"{label} failed ({reason}); {way_out}{remedy}")


def _describe_server(uri: str) -> str:
    """Return the address of MLflow, and what overrides params.yaml."""
    source = f" (by {VARIABLE}, which overrides `tracking.uri` of params.yaml)"
    return f"MLflow at {uri}{source if os.environ.get(VARIABLE) else ''}"


def _explain_reason(error: Exception) -> str:
    """Return why the connection failed, or the first line of MLflow's message with an error: it is long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return network_reason(error) or plain_text(next((line for line in lines if "rror" in line), lines[0])[:300])


@contextmanager
def mlflow_errors(params: Params) -> Iterator[None]:
    """Raise errors of MLflow and its stores with the server's address; file errors of the block's own pass through.

    Raises:
        TrackingError: MLflow or a store does not answer.
        DataError: it answers that it does not have what was requested.
    """
    try:
        yield
    except VLPError:
        raise
    except Exception as error:
        import requests
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        # Errors of other types are the block's own and pass through.
        is_database_error = isinstance(error, (SQLAlchemyError, sqlite3.Error))
        store_types = (MlflowException, requests.RequestException, *bucket_errors())
        if not is_database_error and not isinstance(error, store_types):
            raise
        uri = tracking_uri(params.tracking, Path.cwd())
        if is_database_error or is_disk_full(error):
            message = _explain_failure(uri, error)
        else:
            message = redact(f"{_describe_server(uri)}: {_explain_reason(error)}")
        raise (TrackingError(message) if is_database_error or is_away(error) else DataError(message)) from error


def bucket_errors() -> tuple[type[Exception], ...]:
    """Return the error types of a bucket's client if it is installed; most of them are not OSErrors."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return ()
    return BotoCoreError, ClientError


def store_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the error types that reading a registry or its artifact store may raise, and `others`."""
    from mlflow.exceptions import MlflowException

    return *others, OSError, MlflowException, *bucket_errors()


def is_away(error: Exception) -> bool:
    """Return whether the error means that a store did not answer, so it gives no information about its contents."""
    import requests
    from mlflow.exceptions import MlflowException

    # What the network raises; MLflow's and the system's errors say more by their codes.
    away = isinstance(error, (ConnectionError, TimeoutError, requests.RequestException, *bucket_errors()))
    if isinstance(error, MlflowException):
        away = error.error_code not in NOT_FOUND_CODES
    elif isinstance(error, OSError) and error.errno is not None:  # without errno it is a parser's complaint
        away = not isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError))
    return away and not _MISSING_FILE.search(str(error))


def raise_if_away(error: Exception, subject: str) -> None:
    """Raise if `error` means that a store is away or busy; return if it is about the subject itself.

    Raises:
        TrackingError, BusyError: no decision is possible now.
    """
    if isinstance(error, (TrackingError, BusyError)):
        raise error
    if is_away(error):
        line = first_line(error)
        raise TrackingError(
            f"{subject}: the artifact store does not answer ({line}); nothing was decided, run again"
        ) from None


def model_name(params: TrackingParams, task: str) -> str:
    return f"{params.model_prefix}-{task}"


def resolve_task(params: TrackingParams, name: str) -> str:
    """Return the task of a name that messages print: `vqa` for itself and for `vlp-vqa`.

    Raises:
        ParamsError: there is no such task; names the nearest one.
    """
    task = name.removeprefix(f"{params.model_prefix}-")
    if task not in TASKS:
        check_task(name)
        return name
    return task


def find_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """Return the registered model of exactly this name, or None."""
    return next((m for m in client.search_registered_models(f"name='{name}'") if m.name == name), None)


def find_version_by_content(
    client: MlflowClient, name: str, content: str, number: int | None = None
) -> ModelVersion | None:
    """Return the newest version with this content (and number) whose files still exist, or None.

    A store that does not answer raises.
    """
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    versions = [v for v in client.search_model_versions(f"name='{name}'") if v.tags.get("content") == content]
    # Numbers only grow, so the highest one is the newest.
    for version in sorted(versions, key=lambda version: -int(version.version)):
        if number is not None and int(version.version) != number:
            continue
        try:
            # A version whose files were deleted has an empty listing, or an error of these types.
            if mlflow.artifacts.list_artifacts(f"models:/{version.name}/{version.version}"):
                return version
        except MlflowException as error:
            if error.error_code not in NOT_FOUND_CODES:
                raise
        except (FileNotFoundError, NotADirectoryError):
            pass
    return None
