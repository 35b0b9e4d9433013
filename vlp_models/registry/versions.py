"""MLflow's registry: put a version in, find one, load one. Aliases of champions are moved by promotion/ alone.

A registered model is a task; its versions come from any run of any model. `run-RUN` is the newest version of a run,
`challenger` the version that the gate looks at first. Registering is idempotent: a bundle whose content is already
registered under the name gives its version back.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError
from vlp_models.params import TrackingParams
from vlp_models.registry.card import example, signature
from vlp_models.registry.client import model_called, version_with
from vlp_models.registry.evaluations import (
    CURRENT,
    LINEAGE_HASH,
    log_evaluation,
    log_lineage,
    read_lineage,
    run_of,
)
from vlp_models.registry.logger import DataInput, log_inputs
from vlp_models.serving.bundle import BUNDLE

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
COHORT = "cohort"  # tag of a version: the same for runs that differ in their seeds alone
PARENT = "mlflow.parentRunId"  # MLflow's own tag
# What loading and predicting import, whatever the model's family.
REQUIREMENTS = (
    *("torch", "torchvision", "timm", "transformers", "tokenizers", "safetensors"),
    *("numpy", "pillow", "pyarrow", "pydantic"),
)


@dataclass(frozen=True, kw_only=True)
class Registered:
    name: str
    version: int
    created: bool  # False: the same content was registered before


def model_name(params: TrackingParams, task: str) -> str:
    return f"{params.model_prefix}-{task}"


def run_alias(run: str) -> str:
    """The alias of a fine-tuning run's newest version. MLflow takes no dot in an alias."""
    return f"run-{run.replace('.', '_dot_')}"


def register(
    client: MlflowClient,
    *,
    name: str,
    task: str,
    run: str,
    bundle: Path,
    content: str,
    metrics: dict[str, float],
    tags: dict[str, str],
    card: str,
    evaluation: Path,
    predicted: Mapping[str, Any],
    inputs: Sequence[DataInput],
    trained_in: str,
    lineage: Mapping[str, Any],
    files: Mapping[str, str],
) -> Registered:
    """Registers the bundle as a new version of `name`, alias `run-RUN`.

    A version that is there already gets the evaluation, too, the tags that it lacks, and a lineage if it has none
    whose data passed validation.

    Args:
        bundle: serving/bundle.py.
        content: the identity of the version (`serving.bundle.content_of`).
        metrics: logged on the run, on that of its training, and on the logged model, so that the UI can compare them.
        evaluation: the folder with its scores (reports/eval/RUN).
        predicted: what it said of an image; empty where it is not served.
        inputs: the data that it learned from and was scored on.
        trained_in: the id of its training's run; empty where MLflow has none.
        lineage, files: what `vlp lineage` will tell; files: name -> text.
    """
    if trained_in:
        _log_scores(client, trained_in, metrics)
    existing = version_with(client, name, content)
    if existing is not None:
        known = read_lineage(client, existing)
        if known is None or not (known.get("validation") or {}).get("passed"):
            digest = log_lineage(client, run_of(existing), lineage, files)
            client.set_model_version_tag(name, str(existing.version), LINEAGE_HASH, digest)
        folder = log_evaluation(client, run_of(existing), evaluation)
        lacking = {key: value for key, value in tags.items() if key not in existing.tags}
        for key, value in {**lacking, CURRENT: folder}.items():
            client.set_model_version_tag(name, str(existing.version), key, value)
        client.set_registered_model_alias(name, run_alias(run), str(existing.version))
        return Registered(name=name, version=int(existing.version), created=False)
    import mlflow
    import mlflow.pyfunc

    package = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as temporary, _registering(client, name, content):
        (bundle / "README.md").write_text(card, encoding="utf-8")
        code = Path(temporary) / "code" / package.name
        shutil.copytree(package, code, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        mlflow.set_tags(tags | ({PARENT: trained_in} if trained_in else {}))
        mlflow.log_metrics(metrics)
        log_inputs(client, mlflow.active_run().info.run_id, inputs)  # type: ignore[union-attr]
        info = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(package / "tracking" / "pyfunc_model.py"),
            artifacts={BUNDLE: str(bundle)},
            code_paths=[str(code)],
            signature=signature(task, predicted),
            input_example=example(task) if predicted else None,
            pip_requirements=_pinned(REQUIREMENTS),
            metadata={"task": task, "content": content},
        )
        mlflow.log_metrics(metrics, model_id=info.model_id)
        mlflow.log_text(card, "model_card.md")
        run_id = mlflow.active_run().info.run_id  # type: ignore[union-attr]
        folder = log_evaluation(client, run_id, evaluation)
        lineage_hash = log_lineage(client, run_id, lineage, files)
        if model_called(client, name) is None:
            client.create_registered_model(name, description=f"{task}: the versions this pipeline made")
        version = client.create_model_version(
            name=name,
            source=f"models:/{info.model_id}",
            run_id=run_id,
            tags={
                **tags,
                "content": content,
                CURRENT: folder,
                LINEAGE_HASH: lineage_hash,
                **({"trained_in": trained_in} if trained_in else {}),
            },
            description=card,
            model_id=info.model_id,
        )
    client.set_registered_model_alias(name, run_alias(run), str(version.version))
    return Registered(name=name, version=int(version.version), created=True)


def set_challenger(client: MlflowClient, name: str, version: int) -> None:
    client.set_registered_model_alias(name, CHALLENGER, str(version))


def versions_of_runs(client: MlflowClient, name: str, runs: Iterable[str]) -> dict[str, ModelVersion]:
    """Run -> its newest version, in the order of `runs`; runs that have none are left out."""
    registered = model_called(client, name)
    aliases = dict(registered.aliases) if registered is not None else {}
    versions = {str(v.version): v for v in client.search_model_versions(f"name='{name}'")} if aliases else {}
    found = {run: versions.get(str(aliases.get(run_alias(run)))) for run in runs}
    return {run: version for run, version in found.items() if version is not None}


def by_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """None where the registry answers that there is none; that it does not answer is raised."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code not in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
            raise
        return None


def load_predictor(client: MlflowClient, name: str) -> Any:
    """The champion (or, before the first promotion, the challenger) as a `Predictor`."""
    from vlp_models.serving.predictor import Predictor

    version = by_alias(client, name, CHAMPION) or by_alias(client, name, CHALLENGER)
    if version is None:
        raise DataError(f"{name}: nothing registered; run `dvc repro`, then `vlp promote`")
    return Predictor(checked_bundle(version))


def checked_bundle(version: ModelVersion) -> Path:
    """`bundle_of`, if it is still what was registered.

    Raises:
        DataError: it is not, or can't be had.
    """
    from mlflow.exceptions import MlflowException

    from vlp_models.serving.bundle import check_content, content_of

    try:
        bundle = bundle_of(version)
    except (MlflowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{version.name} version {version.version}: its files can't be had ({reason})") from None
    check_content(bundle)  # names the file
    if content_of(bundle) != version.tags.get("content"):
        raise DataError(f"{version.name} version {version.version}: its files are not those that were registered")
    return bundle


def bundle_of(version: ModelVersion) -> Path:
    """The version's bundle (serving/predictor.py) on this machine."""
    import mlflow.artifacts

    local = Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}"))
    return local / "artifacts" / BUNDLE


def _registering(client: MlflowClient, name: str, content: str) -> Any:
    """The MLflow run of a registration; a killed one is gone on with."""
    import mlflow

    experiments = [e.experiment_id for e in client.search_experiments()]
    query = f"tags.`vlp.registering` = '{content}' and attributes.run_name = 'register {name}'"
    for run in client.search_runs(experiments, query, max_results=1):
        return mlflow.start_run(run_id=run.info.run_id)
    return mlflow.start_run(run_name=f"register {name}", tags={"vlp.registering": content})


def _log_scores(client: MlflowClient, run_id: str, metrics: Mapping[str, float]) -> None:
    """On the run of the training, beside its curve; the same scores once."""
    known = client.get_run(run_id).data.metrics
    for key, value in metrics.items():
        if known.get(key) != value:
            client.log_metric(run_id, key, value)


def _pinned(names: tuple[str, ...]) -> list[str]:
    from importlib.metadata import version

    return [f"{name}=={version(name).partition('+')[0]}" for name in names]
