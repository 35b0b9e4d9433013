"""MLflow's model registry: register a version, find one, load one. Only promotion/ moves `champion` and `previous`.

A registered model is a task; its versions come from any run of any model. `run-RUN` is the newest version of a run,
`challenger` the version that the gate looks at first. Registering is idempotent: a bundle whose content is already
registered under the name returns that version.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vlp_models.common.source_hash import plugin_packages
from vlp_models.errors import DataError, first_line
from vlp_models.params import TrackingParams
from vlp_models.registry.client import find_model, find_version_by_content, model_name
from vlp_models.registry.evaluations import (
    CURRENT_EVALUATION,
    LINEAGE_HASH,
    get_run_id,
    log_evaluation,
    log_lineage,
    read_lineage,
)
from vlp_models.registry.mlflow_run import DataInput, log_inputs
from vlp_models.serving.bundle import BUNDLE, check_content
from vlp_models.tasks import TASKS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
VARIANT_HASH = "variant_hash"  # tag of a version: equal for runs that differ in their seeds only
REGISTERING = "vlp.registering"  # tag of the run of a registration: the content hash of its version
PARENT, DESCRIPTION = "mlflow.parentRunId", "mlflow.note.content"  # MLflow's own tags of a run
# A shared view of MLflow's table of runs, kept as a tag of the experiment, and its columns
SCORES_VIEW = "mlflow.sharedViewState.scores"
COLUMNS = ["metrics.`score`", "metrics.`baseline`", "attributes.`Description`"]
GATE = "Gate: "  # begins the line of a version's description that has the gate's last decision
MAX_DESCRIPTION = 5000  # characters: PostgreSQL refuses more, SQLite does not
# Imported for loading and predicting, whatever the model family.
REQUIREMENTS = (
    *("torch", "torchvision", "timm", "transformers", "tokenizers", "safetensors"),
    *("numpy", "pillow", "pyarrow", "pydantic"),
)


@dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """Everything that is registered with one version.

    name: the registered model. run: the fine-tuning run.
    bundle: the folder to serve (serving/bundle.py). content: its hash (`serving.bundle.hash_bundle`), the version's
        identity.
    headline: its main score in words: the description of both runs.
    metrics: logged on the registration's run, on the training's run and on the logged model, so that MLflow's UI can
        compare versions by them.
    card: Markdown. evaluation: the folder with its scores (reports/eval/RUN).
    prediction: what the bundle returned for one image; empty if the model is not served.
    inputs: the datasets that it was trained and scored on.
    training_run_id: MLflow run of its training; empty if MLflow has none.
    lineage: the record that `vlp lineage` prints. lineage_files: name -> text, kept with it.
    """

    name: str
    task: str
    run: str
    bundle: Path
    content: str
    evaluation: Path
    headline: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    card: str = ""
    prediction: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[DataInput] = ()
    training_run_id: str = ""
    lineage: Mapping[str, Any] = field(default_factory=dict)
    lineage_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RegisteredVersion:
    name: str
    version: int
    created: bool  # False: the same content was registered before


def run_alias(run: str) -> str:
    """Return the alias of a fine-tuning run's newest version."""
    return f"run-{run}"


def register(client: MlflowClient, record: VersionRecord) -> RegisteredVersion:
    """Register the record's bundle as a new version, or complete the version with the same content.

    The version gets the alias `run-RUN`. An existing version also gets the new evaluation, the tags that it lacks, and
    the lineage if the one it has does not say that its data passed validation.
    """
    if record.training_run_id:  # the scores, next to the training's curve
        client.set_tag(record.training_run_id, DESCRIPTION, record.headline)
        logged = client.get_run(record.training_run_id).data.metrics
        for key, value in record.metrics.items():
            # MLflow appends a value each time, so an equal one would be a second point of the curve.
            if logged.get(key) != value:
                client.log_metric(record.training_run_id, key, value)
    version = find_version_by_content(client, record.name, record.content)
    created = version is None
    if version is None:
        version = _create_version(client, record)
    else:
        # What this content lacks: new scores, tags of newer programs, a lineage whose data passed validation.
        run_id = get_run_id(version)
        tags = {key: value for key, value in record.tags.items() if key not in version.tags}
        tags[CURRENT_EVALUATION] = log_evaluation(client, run_id, record.evaluation)
        lineage = read_lineage(client, version)
        if lineage is None or not (lineage.get("validation") or {}).get("passed"):
            tags[LINEAGE_HASH] = log_lineage(client, run_id, record.lineage, record.lineage_files)
        for key, text in tags.items():
            client.set_model_version_tag(record.name, str(version.version), key, text)
    client.set_registered_model_alias(record.name, run_alias(record.run), str(version.version))
    return RegisteredVersion(name=record.name, version=int(version.version), created=created)


def _create_version(client: MlflowClient, record: VersionRecord) -> ModelVersion:
    import mlflow
    import mlflow.pyfunc

    from vlp_models.registry.card import make_example, make_signature

    package = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as temporary, _start_registration(client, record) as run:
        run_id = run.info.run_id
        (record.bundle / "README.md").write_text(record.card, encoding="utf-8")
        # The package itself travels with the model, and so do the packages and single modules of plugins.
        code = Path(temporary) / "code"
        code.mkdir()
        for name, source in ({package.name: package} | plugin_packages()).items():
            if source.is_dir():
                shutil.copytree(source, code / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(source, code / source.name)
        # The parent tag lists this run below its training in MLflow's UI.
        mlflow.set_tags(
            {
                **record.tags,
                DESCRIPTION: record.headline,
                **({PARENT: record.training_run_id} if record.training_run_id else {}),
            }
        )
        # The link that `vlp run` prints opens the runs with these columns; MLflow's own view has no scores.
        view = json.dumps({"selectedColumns": COLUMNS, "columnOrder": COLUMNS})
        client.set_experiment_tag(run.info.experiment_id, SCORES_VIEW, view)
        mlflow.log_metrics(dict(record.metrics))
        log_inputs(client, run_id, record.inputs)
        logged = mlflow.pyfunc.log_model(
            name=record.name,
            python_model=str(package / "registry" / "pyfunc_model.py"),
            artifacts={BUNDLE: str(record.bundle)},
            code_paths=sorted(map(str, code.iterdir())),
            signature=make_signature(record.task, record.prediction),
            input_example=make_example(record.task) if record.prediction else None,
            # `2.11.0+cpu` -> `2.11.0`: package indexes do not have the local builds.
            pip_requirements=[f"{name}=={package_version(name).partition('+')[0]}" for name in REQUIREMENTS],
            metadata={"task": record.task, "content": record.content},
        )
        mlflow.log_metrics(dict(record.metrics), model_id=logged.model_id)
        mlflow.log_text(record.card, "model_card.md")
        tags = {
            **record.tags,
            "content": record.content,
            CURRENT_EVALUATION: log_evaluation(client, run_id, record.evaluation),
            LINEAGE_HASH: log_lineage(client, run_id, record.lineage, record.lineage_files),
        }
        if record.training_run_id:
            tags["trained_in"] = record.training_run_id
        description = record.card
        if len(description) > MAX_DESCRIPTION:  # in whole lines
            rest = "\n\nThe rest is in model_card.md, a file of this version's run.\n"
            description = description[: MAX_DESCRIPTION - len(rest)].rpartition("\n")[0] + rest
        # The version comes last: what a kill leaves before is one unfinished run, which the next try continues.
        if find_model(client, record.name) is None:
            client.create_registered_model(record.name, description=f"{record.task}: versions made by this pipeline")
        return client.create_model_version(
            # The version refers to the logged model, so its files are stored once.
            name=record.name,
            source=f"models:/{logged.model_id}",
            run_id=run_id,
            tags=tags,
            description=description,
            model_id=logged.model_id,
        )


def _start_registration(client: MlflowClient, record: VersionRecord) -> Any:
    """Start the MLflow run of a registration; resume that of a killed one."""
    import mlflow

    name = f"register {record.name}"
    experiments = [e.experiment_id for e in client.search_experiments()]
    query = f"tags.`{REGISTERING}` = '{record.content}' and attributes.run_name = '{name}'"
    for run in client.search_runs(experiments, query, max_results=1):
        return mlflow.start_run(run_id=run.info.run_id)
    return mlflow.start_run(run_name=name, tags={REGISTERING: record.content})


def describe_gate(client: MlflowClient, name: str, number: int, word: str, text: str) -> None:
    """Put the gate's decision into a version's description, below its title and score, in place of an earlier one.

    Its tag `gate` is the decision in a word (`receipts.decision_word`).
    """
    version = find_version_by_number(client, name, number)
    if version is not None:
        lines = [line for line in (version.description or "").split("\n\n") if not line.startswith(GATE)]
        description = "\n\n".join([*lines[:2], f"{GATE}{text}", *lines[2:]])
        client.update_model_version(name, str(number), description=description[:MAX_DESCRIPTION])
        client.set_model_version_tag(name, str(number), "gate", word)


def find_run_versions(client: MlflowClient, name: str, runs: Iterable[str]) -> dict[str, ModelVersion]:
    """Return run -> its newest version, in the order of `runs`; runs without a version are left out."""
    registered = find_model(client, name)
    aliases = dict(registered.aliases) if registered is not None else {}
    versions = {str(v.version): v for v in client.search_model_versions(f"name='{name}'")} if aliases else {}
    # The registry lists aliases with numbers, which `versions` resolves without a request per run.
    newest = {run: versions.get(str(aliases.get(run_alias(run)))) for run in runs}
    return {run: version for run, version in newest.items() if version is not None}


def find_version_by_number(client: MlflowClient, name: str, number: int) -> ModelVersion | None:
    """Return the version with this number; None if the registry answers that it does not exist."""
    versions = client.search_model_versions(f"name='{name}'")
    return next((version for version in versions if int(version.version) == number), None)


def find_version_by_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    """Return the version with this alias; None if the registry answers that none has it."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code not in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
            raise
        return None


def resolve_version(client: MlflowClient, params: TrackingParams, model: str) -> ModelVersion:
    """Return the version that `vqa`, `vlp-vqa`, `vlp-vqa@champion` or `vlp-vqa/3` names.

    Without alias or number: the champion, else the challenger.

    Raises:
        DataError: there is no such version.
    """
    name, at, alias = model.partition("@")
    name, slash, number = name.partition("/")
    if name in TASKS:
        name = model_name(params, name)
    if slash:
        is_valid = number.isdecimal() and "'" not in name  # the name becomes part of a query
        version = find_version_by_number(client, name, int(number)) if is_valid else None
    elif at:
        version = find_version_by_alias(client, name, alias)
    else:
        version = find_version_by_alias(client, name, CHAMPION) or find_version_by_alias(client, name, CHALLENGER)
        if version is None:
            raise DataError(f"{name}: nothing registered; run `vlp run`, then `vlp promote`")
    if version is None:
        raise DataError(f"{model}: no such version; `vlp status --mlflow` lists what is registered")
    return version


def is_on_this_machine(version: ModelVersion) -> bool:
    """Return whether the version's files are in a folder, and not in a bucket or on a server."""
    from mlflow import MlflowClient

    stored = MlflowClient().get_model_version_download_uri(version.name, str(version.version))
    return urlsplit(stored).scheme in ("", "file")


def download_bundle(version: ModelVersion) -> Path:
    """Return the version's bundle (serving/bundle.py) on this machine.

    Files from a bucket or a server are removed when this process ends.
    """
    import mlflow.artifacts

    address = f"models:/{version.name}/{version.version}"
    if is_on_this_machine(version):
        files = Path(mlflow.artifacts.download_artifacts(address))
    else:
        # One folder per call, within a folder that lives as long as the process.
        folder = tempfile.mkdtemp(dir=_downloads_folder().name)
        files = Path(mlflow.artifacts.download_artifacts(address, dst_path=folder))
    return files / "artifacts" / BUNDLE


@cache
def _downloads_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vlp-versions-")


def download_verified_bundle(version: ModelVersion) -> Path:
    """Return the version's bundle after comparing its hash with the registered one.

    Raises:
        DataError: the files are missing, damaged or not those that were registered.
    """
    from mlflow.exceptions import MlflowException

    name = f"{version.name} version {version.version}"
    try:
        bundle = download_bundle(version)
    except (MlflowException, OSError) as error:
        reason = "deleted by `vlp prune`" if "pruned" in version.tags else first_line(error)
        raise DataError(f"{name}: cannot read its files ({reason})") from None
    check_bundle(bundle, name, version.tags.get("content"))
    return bundle


def check_bundle(bundle: Path, name: str, content: str | None) -> None:
    """Compare a bundle with its own list of files, and its hash with the registered one.

    Args:
        name: of the version, for messages.

    Raises:
        DataError: the files are missing, damaged or not those that were registered.
    """
    if check_content(bundle) != content:
        raise DataError(f"{name}: its files are not those that were registered")
