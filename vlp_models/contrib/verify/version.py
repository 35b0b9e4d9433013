"""`vlp verify VERSION`: compare a registered version with its lineage. Each check holds, differs, or is unknown here.

Its files are compared by the hash over all of them, the lineage by its own hash, the checkpoint's parents with the
lineage, the code that serves it with the commit that the lineage names, and its training data with data/shards or DVC's
cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.common.packages import own_version
from vlp_models.common.plugins import PACKAGE
from vlp_models.common.source_hash import ROOT, hash_source, hash_source_text
from vlp_models.common.workspace import Workspace, dvc_files, run_git
from vlp_models.data.shards.contents import find_changed_data, trained_on_inputs
from vlp_models.errors import VLPError, first_line
from vlp_models.registry.evaluations import (
    LINEAGE_HASH,
    RECORD,
    read_latest_evaluation,
    read_lineage_file,
    read_scores,
)
from vlp_models.registry.versions import download_bundle
from vlp_models.serving.bundle import CONTENT, check_content, code_file, read_bundle_info

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

    from vlp_models.models.checkpoint_info import CheckpointInfo

ROUNDING = 5e-5  # scores.json has four decimals
TAGS = ("run", "model", "family", "variant", "seed", "task")  # in the version's tags and in the lineage

State = Literal["holds", "differs", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison. state: `unknown` if it cannot be decided on this machine."""

    subject: str
    state: State
    text: str


def verify(client: MlflowClient, workspace: Workspace, version: ModelVersion) -> list[Check]:
    """Return all checks of a version; what cannot be read differs."""
    try:
        bundle = download_bundle(version)
        info = read_bundle_info(bundle)
        code = dict(json.loads((bundle / CONTENT).read_text(encoding="utf-8"))["code"])
    except Exception as error:  # whatever MLflow, a store or a damaged file raises
        return [Check(subject="bundle", state="differs", text=f"cannot read its files: {first_line(error)}")]
    checks = [_run_check("bundle", lambda: _check_bundle(bundle, version))]
    text = read_lineage_file(client, version, RECORD)
    if text is None:
        return [*checks, Check(subject="lineage", state="unknown", text="none was kept with it")]
    try:
        record = dict(json.loads(text))
    except ValueError as error:
        return [*checks, Check(subject="lineage", state="differs", text=f"damaged: {error}")]
    commit = str(record.get("git_commit", "unknown"))
    return [
        *checks,
        _run_check("lineage", lambda: _check_lineage(client, version, text, record)),
        _run_check("parents", lambda: _check_parents(info, record)),
        _run_check("code", lambda: check_code(workspace.root, commit, code)),
        _run_check("data", lambda: _check_data(workspace, info, record)),
        _run_check("scores", lambda: _check_scores(client, version)),
    ]


def _run_check(subject: str, check: Callable[[], tuple[State, str]]) -> Check:
    try:
        state, text = check()
    except (VLPError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        state, text = "differs", first_line(error)
    return Check(subject=subject, state=state, text=text)


def _check_bundle(bundle: Path, version: ModelVersion) -> tuple[State, str]:
    digest, registered = check_content(bundle), version.tags.get("content", "none")
    if digest != registered:
        return "differs", f"its hash is {digest[:16]}, the registry's {registered[:16]}"
    return "holds", f"every file and the code that serves it, {digest[:16]}"


def _check_lineage(
    client: MlflowClient, version: ModelVersion, text: str, record: Mapping[str, Any]
) -> tuple[State, str]:
    wrong = [name for name in TAGS if name in version.tags and str(record.get(name, "")) != version.tags[name]]
    if wrong:
        return "differs", f"its {', '.join(wrong)} differs from the version's tags"
    for name, digest in record.get("kept", {}).items():
        content = read_lineage_file(client, version, name)
        if content is None or sha256(content.encode()).hexdigest() != digest:
            return "differs", f"{name}, kept with it, is {'missing' if content is None else 'changed'}"
    if sha256(text.encode()).hexdigest() != version.tags.get(LINEAGE_HASH):
        return "differs", f"{RECORD} is not what was registered"
    return "holds", f"the record and {len(record.get('kept', {}))} files kept with it"


def _check_parents(info: CheckpointInfo, record: Mapping[str, Any]) -> tuple[State, str]:
    """Compare the parents that the checkpoint names with those in the lineage."""
    inputs = info.provenance.get("inputs", {})
    parents = {parent["role"]: parent for parent in reversed(record["parents"])}  # the nearest start wins
    pairs = [
        ("start", inputs.get("start"), parents.get("starts from", {}).get("sha256")),
        ("tokenizer", inputs.get("tokenizer"), parents.get("tokenizer", {}).get("sha256")),
        ("detector", info.detector_id or None, parents.get("detector", {}).get("id")),
    ]
    # A checkpoint without such an input has nothing to compare.
    pairs = [pair for pair in pairs if pair[1] is not None]
    if differ := [name for name, digest, recorded in pairs if digest != recorded]:
        return "differs", f"{', '.join(differ)}: the checkpoint names another one than the lineage"
    if not pairs:
        return "unknown", "the checkpoint has no provenance"
    return "holds", ", ".join(name for name, _, _ in pairs)


def check_code(root: Path, commit: str, code: Mapping[str, str]) -> tuple[State, str]:
    """Compare the code listed in the bundle with that of the commit in the lineage.

    Args:
        commit: with `+changes` if the working tree differed from it.
        code: file below the package -> sha256; empty for an entry point such as `vlp_models.tasks.vqa:VQA`.
    """
    # COMMIT+changes: the working tree had changes that no commit has.
    name, changed, _ = commit.partition("+")
    if not code or name == "unknown":
        return "unknown", "no commit on record" if code else "the bundle does not list its code"
    # Exits with an error if the commit is not there.
    if run_git(root, "cat-file", "-e", f"{name}^{{commit}}") is None:
        return "unknown", f"commit {name[:12]} is not in this checkout"
    if run_git(root, "cat-file", "-e", f"{name}:{PACKAGE}") is None:  # the project is not a clone of this repository
        release = f"vlp-flows {own_version()}, which is installed"
        # Entry points have no hash, and names with a colon are not files.
        files = {file: digest for file, digest in code.items() if digest and ":" not in file}
        differ = [file for file in files if not (ROOT / file).is_file() or hash_source(ROOT / file) != files[file]]
        if differ:
            return "unknown", f"{', '.join(differ[:3])}: not as in {release}"
        return "holds", f"{len(files)} files, as in {release}"
    differ = []
    for file, digest in code.items():
        if digest:
            source = run_git(root, "show", f"{name}:{code_file(Path(), file).as_posix()}")
            if source is None or hash_source_text(source, file) != digest:
                differ.append(file)
    if differ and changed:
        return "unknown", f"{len(differ)} files had changes that commit {name[:12]} does not have: {differ[0]}, ..."
    if differ:
        return "differs", f"{', '.join(differ[:3])}: not as in commit {name[:12]}"
    return "holds", f"{len(code)} files, as in commit {name[:12]}"


def _check_data(workspace: Workspace, info: CheckpointInfo, record: Mapping[str, Any]) -> tuple[State, str]:
    inputs = info.provenance.get("inputs", {})
    data_files = trained_on_inputs(inputs)
    if not data_files:
        return "unknown", "the checkpoint does not name its training data"
    if not find_changed_data(workspace, inputs):
        return "holds", f"data/shards is its training data ({', '.join(data_files)})"
    # The lineage names DVC's hash of the shards, by which the old data can be restored.
    md5 = str(record.get("dvc", {}).get("data/shards", ""))
    if md5 and (dvc_files(workspace.root) / md5[:2] / md5[2:]).exists():
        return "unknown", f"data/shards has changed since; DVC's cache has the training data, {md5}"
    state = "data/shards has changed since" if workspace.shards.exists() else "data/shards does not exist"
    return "unknown", f"{state}; `dvc pull` with the version's dvc.lock restores {md5 or 'it'}"


def _check_scores(client: MlflowClient, version: ModelVersion) -> tuple[State, str]:
    """Recompute every metric from its scores per item."""
    items, records = read_latest_evaluation(client, version), read_scores(client, version)
    if not items:
        return "unknown", "none are kept with it"
    # Reversed, so that the first record of a metric wins.
    registered = {
        (record["dataset"], record["split"], record["metric"]): record["value"] for record in reversed(records)
    }
    for scores in items:
        value = registered.get((scores.dataset, scores.split, scores.metric))
        # (N, K) -> (1, K): the sums over items, from which the statistic follows.
        computed = float(scores.evidence().statistic(scores.parts_NK.sum(axis=0, keepdims=True))[0])
        if value is not None and abs(value - computed) > ROUNDING + 1e-6 * abs(computed):
            where = f"{scores.metric} on {scores.dataset} {scores.split}"
            return "differs", f"{where}: {value}, from its items {computed}"
    return "holds", f"{len(items)} metrics follow from their items"
