"""MLflow's registry: put a version in, find one, load one. Aliases of champions are moved by promotion.py alone.

Registering is idempotent: a bundle whose content is already registered under the name gives its version back.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError
from vlp_models.params import TrackingParams
from vlp_models.tracking.evaluations import CURRENT, log_evaluation, log_lineage, read_lineage, run_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
REQUIREMENTS = ("torch", "torchvision", "transformers", "tokenizers", "safetensors", "numpy", "pillow", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Registered:
    name: str
    version: int
    created: bool  # False: the same content was registered before


def model_name(params: TrackingParams, task: str) -> str:
    return f"{params.model_prefix}-{task}"


def register(
    client: MlflowClient,
    *,
    name: str,
    task: str,
    checkpoint: Path,
    detector: Path,
    features: dict[str, Any],
    content: str,
    metrics: dict[str, float],
    tags: dict[str, str],
    card: str,
    evaluation: Path,
    lineage: Mapping[str, Any],
    files: Mapping[str, str],
) -> Registered:
    """Registers checkpoint and detector as a new version of `name`, alias `challenger`.

    A version that is there already gets the evaluation, too, and a lineage if it has none whose data passed validation.

    Args:
        features: params of the features stage: how the regions were made.
        content: hash of checkpoint and detector; the identity of the version.
        metrics: logged on the run and on the logged model, so that the UI can compare versions.
        evaluation: the folder with its scores (reports/eval/RUN).
        lineage, files: what `vlp lineage` will tell; files: name -> text.
    """
    existing = _version_with(client, name, content)
    if existing is not None:
        known = read_lineage(client, existing)
        if known is None or not (known.get("validation") or {}).get("passed"):
            log_lineage(client, run_of(existing), lineage, files)
        folder = log_evaluation(client, run_of(existing), evaluation)
        client.set_model_version_tag(name, str(existing.version), CURRENT, folder)
        client.set_registered_model_alias(name, CHALLENGER, str(existing.version))
        return Registered(name=name, version=int(existing.version), created=False)
    import mlflow
    import mlflow.pyfunc

    package = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as temporary, _registering(client, name, content):
        bundle = Path(temporary) / "bundle"
        shutil.copytree(checkpoint, bundle / "checkpoint")
        shutil.copytree(detector, bundle / "detector")
        (bundle / "features.json").write_text(json.dumps(features, indent=2) + "\n", encoding="utf-8")
        (bundle / "README.md").write_text(card, encoding="utf-8")
        code = Path(temporary) / "code" / package.name
        shutil.copytree(package, code, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        mlflow.set_tags(tags)
        mlflow.log_metrics(metrics)
        info = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(package / "tracking" / "pyfunc_model.py"),
            artifacts={"bundle": str(bundle)},
            code_paths=[str(code)],
            signature=_signature(task),
            pip_requirements=_pinned(REQUIREMENTS),
            metadata={"task": task, "content": content},
        )
        mlflow.log_metrics(metrics, model_id=info.model_id)
        mlflow.log_text(card, "model_card.md")
        run_id = mlflow.active_run().info.run_id  # type: ignore[union-attr]
        folder = log_evaluation(client, run_id, evaluation)
        log_lineage(client, run_id, lineage, files)
        if not _has_model(client, name):
            client.create_registered_model(name, description=f"{task}: the versions this pipeline made")
        version = client.create_model_version(
            name=name,
            source=f"models:/{info.model_id}",
            run_id=run_id,
            tags={**tags, "content": content, CURRENT: folder},
            description=card,
            model_id=info.model_id,
        )
    client.set_registered_model_alias(name, CHALLENGER, str(version.version))
    return Registered(name=name, version=int(version.version), created=True)


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
    return Predictor(bundle_of(version))


def bundle_of(version: ModelVersion) -> Path:
    """The version's bundle (serving/predictor.py) on this machine."""
    import mlflow.artifacts

    local = Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}"))
    return local / "artifacts" / "bundle"


def _version_with(client: MlflowClient, name: str, content: str) -> ModelVersion | None:
    found = [v for v in client.search_model_versions(f"name='{name}'") if v.tags.get("content") == content]
    return found[0] if found else None


def _registering(client: MlflowClient, name: str, content: str) -> Any:
    """The MLflow run of a registration; a killed one is gone on with."""
    import mlflow

    experiments = [e.experiment_id for e in client.search_experiments()]
    query = f"tags.`vlp.registering` = '{content}' and attributes.run_name = 'register {name}'"
    for run in client.search_runs(experiments, query, max_results=1):
        return mlflow.start_run(run_id=run.info.run_id)
    return mlflow.start_run(run_name=f"register {name}", tags={"vlp.registering": content})


def _has_model(client: MlflowClient, name: str) -> bool:
    return any(model.name == name for model in client.search_registered_models(f"name='{name}'"))


def _signature(task: str) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    columns: list[Any] = [ColSpec(AnyType(), "image")]
    if task != "captioning":
        columns.append(ColSpec(DataType.string, "text"))
    return ModelSignature(inputs=Schema(columns))


def _pinned(names: tuple[str, ...]) -> list[str]:
    from importlib.metadata import version

    return [f"{name}=={version(name).partition('+')[0]}" for name in names]
