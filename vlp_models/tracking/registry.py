"""MLflow's registry: put a version in, find the champion, move the aliases.

Registering is idempotent: a bundle whose content is already registered under the name gives its version back.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError
from vlp_models.params import TrackingParams

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER = "champion", "challenger"
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
) -> Registered:
    """Registers checkpoint and detector as a new version of `name`, alias `challenger`.

    Args:
        features: params of the features stage: how the regions were made.
        content: hash of checkpoint and detector; the identity of the version.
        metrics: logged on the run and on the logged model, so that the UI can compare versions.
    """
    existing = _version_with(client, name, content)
    if existing is not None:
        client.set_registered_model_alias(name, CHALLENGER, str(existing.version))
        return Registered(name=name, version=int(existing.version), created=False)
    import mlflow
    import mlflow.pyfunc

    package = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as temporary, mlflow.start_run(run_name=f"register {name}"):
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
        if not _has_model(client, name):
            client.create_registered_model(name, description=f"{task}: the versions this pipeline made")
        version = client.create_model_version(
            name=name,
            source=f"models:/{info.model_id}",
            run_id=mlflow.active_run().info.run_id,  # type: ignore[union-attr]
            tags={**tags, "content": content},
            description=card,
            model_id=info.model_id,
        )
    client.set_registered_model_alias(name, CHALLENGER, str(version.version))
    return Registered(name=name, version=int(version.version), created=True)


def promote(client: MlflowClient, name: str, version: int | None = None) -> tuple[int | None, int]:
    """Moves `champion` to `version`, by default to the challenger. Returns (version before, version now)."""
    before = by_alias(client, name, CHAMPION)
    if version is None:
        challenger = by_alias(client, name, CHALLENGER)
        if challenger is None:
            raise DataError(f"{name}: no challenger to promote; `dvc repro register` makes one")
        version = int(challenger.version)
    elif not any(int(v.version) == version for v in client.search_model_versions(f"name='{name}'")):
        raise DataError(f"{name}: no version {version}")
    client.set_registered_model_alias(name, CHAMPION, str(version))
    return (int(before.version) if before else None), version


def by_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException:
        return None


def load_predictor(client: MlflowClient, name: str) -> Any:
    """The champion (or, before the first promotion, the challenger) as a `Predictor`."""
    import mlflow.artifacts

    from vlp_models.serving.predictor import Predictor

    version = by_alias(client, name, CHAMPION) or by_alias(client, name, CHALLENGER)
    if version is None:
        raise DataError(f"{name}: nothing registered; run `dvc repro`, then `vlp promote`")
    local = Path(mlflow.artifacts.download_artifacts(f"models:/{name}/{version.version}"))
    return Predictor(local / "artifacts" / "bundle")


def _version_with(client: MlflowClient, name: str, content: str) -> ModelVersion | None:
    found = [v for v in client.search_model_versions(f"name='{name}'") if v.tags.get("content") == content]
    return found[0] if found else None


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
