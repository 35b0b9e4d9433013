"""`vlp verify VERSION`: is a registered version what its lineage says? Each check answers yes, no, or not from here.

Its files by the hash over all of them, the lineage by its own, what the checkpoint says of its parents by the lineage,
the code that serves it by the commit it names, the data it learned from by what lies here or in DVC's cache.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.common.source_hash import PACKAGE, hash_source_text
from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.contents import learned_from, no_longer_here
from vlp_models.errors import VLPError
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.registry.evaluations import LINEAGE_HASH, RECORD, latest_evaluation, read_file, read_scores
from vlp_models.registry.versions import bundle_of
from vlp_models.serving.bundle import CONTENT, bundle_info, check_content, content_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

ROUNDED = 5e-5  # scores.json has four decimals
TOLD = ("run", "model", "family", "variant", "seed", "task")  # by tags and lineage alike


@dataclass(frozen=True, kw_only=True)
class Check:
    """state: holds, differs, or can't be told from here."""

    subject: str
    state: Literal["holds", "differs", "unknown"]
    text: str


def verify(client: MlflowClient, workspace: Workspace, version: ModelVersion) -> list[Check]:
    """All checks of a version; what can't be read differs."""
    try:
        bundle = bundle_of(version)
        info = bundle_info(bundle)
        code = _code_of(bundle)
    except Exception as error:  # whatever MLflow, a store or a damaged file raises
        return [Check(subject="bundle", state="differs", text=f"its files can't be had: {_line(error)}")]
    checks = [_checked("bundle", lambda: _bundle(bundle, version))]
    text = read_file(client, version, RECORD)
    if text is None:
        return [*checks, Check(subject="lineage", state="unknown", text="none was kept with it")]
    try:
        record = dict(json.loads(text))
    except ValueError as error:
        return [*checks, Check(subject="lineage", state="differs", text=f"damaged: {error}")]
    return [
        *checks,
        _checked("lineage", lambda: _lineage(client, version, text, record)),
        _checked("parents", lambda: _parents(info, record)),
        _checked("code", lambda: _code(workspace.root, str(record.get("git_commit", "unknown")), code)),
        _checked("data", lambda: _data(workspace, info, record)),
        _checked("scores", lambda: _scores(client, version)),
    ]


def _checked(subject: str, check: Callable[[], tuple[str, str]]) -> Check:
    try:
        state, text = check()
    except (VLPError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        state, text = "differs", _line(error)
    return Check(subject=subject, state=state, text=text)  # type: ignore[arg-type]


def _bundle(bundle: Path, version: ModelVersion) -> tuple[str, str]:
    check_content(bundle)
    found = content_of(bundle)
    if found != version.tags.get("content"):
        return "differs", f"its hash is {found[:16]}, the registry's {version.tags.get('content', 'none')[:16]}"
    about = "every file and the code that serves it" if (bundle / CONTENT).exists() else "checkpoint and detector"
    return "holds", f"{about}, {found[:16]}"


def _lineage(client: MlflowClient, version: ModelVersion, text: str, record: Mapping[str, Any]) -> tuple[str, str]:
    told = [name for name in TOLD if name in version.tags and str(record.get(name, "")) != version.tags[name]]
    if told:
        return "differs", f"its {', '.join(told)} is not what the version's tags say"
    for name, digest in record.get("kept", {}).items():
        kept = read_file(client, version, name)
        if kept is None or sha256(kept.encode()).hexdigest() != digest:
            return "differs", f"{name}, kept with it, is {'missing' if kept is None else 'not what it was'}"
    wanted = version.tags.get(LINEAGE_HASH)
    if wanted is None:
        return "unknown", "registered before a hash of it was kept"
    if sha256(text.encode()).hexdigest() != wanted:
        return "differs", f"{RECORD} is not what was registered"
    return "holds", f"the record and {len(record.get('kept', {}))} files kept with it"


def _parents(info: CheckpointInfo, record: Mapping[str, Any]) -> tuple[str, str]:
    """What the checkpoint says it was made of, against what the lineage says."""
    inputs = info.provenance.get("inputs", {})
    parents = {parent["role"]: parent for parent in reversed(record["parents"])}  # the nearest start stays
    pairs = [
        ("start", inputs.get("start"), parents.get("starts from", {}).get("sha256")),
        ("tokenizer", inputs.get("tokenizer"), parents.get("tokenizer", {}).get("sha256")),
        ("detector", info.detector_id or None, parents.get("detector", {}).get("id")),
    ]
    differ = [name for name, own, told in pairs if own is not None and own != told]
    if differ:
        return "differs", f"{', '.join(differ)}: the checkpoint names another than the lineage"
    said = [name for name, own, _ in pairs if own is not None]
    return ("holds", ", ".join(said)) if said else ("unknown", "the checkpoint does not say what it was made of")


def _code(root: Path, commit: str, code: Mapping[str, str]) -> tuple[str, str]:
    """The code in the bundle, against that of the commit that the lineage names."""
    name, changed, _ = commit.partition("+")
    if not code or name == "unknown":
        return "unknown", "no commit is on record" if code else "the bundle does not list its code"
    if _git(root, "cat-file", "-e", f"{name}^{{commit}}") is None:
        return "unknown", f"commit {name[:12]} is not in this checkout"
    differ = []
    for file, digest in code.items():
        if digest:  # a place such as `vlp_models.tasks.vqa:VQA` has none
            source = _git(root, "show", f"{name}:{PACKAGE}/{file}")
            if source is None or hash_source_text(source, file) != digest:
                differ.append(file)
    if differ and changed:
        return "unknown", f"{len(differ)} files had changes that commit {name[:12]} does not have: {differ[0]}, ..."
    if differ:
        return "differs", f"{', '.join(differ[:3])}: not as in commit {name[:12]}"
    return "holds", f"{len(code)} files, as in commit {name[:12]}"


def _data(workspace: Workspace, info: CheckpointInfo, record: Mapping[str, Any]) -> tuple[str, str]:
    inputs = info.provenance.get("inputs", {})
    learned = learned_from(inputs)
    if not learned:
        return "unknown", "the checkpoint does not say what it learned from"
    if not no_longer_here(workspace, inputs):
        return "holds", f"data/shards is what it learned from ({', '.join(learned)})"
    md5 = str(record.get("dvc", {}).get("data/shards", ""))
    cached = workspace.root / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]
    if md5 and cached.exists():
        return "unknown", f"data/shards has moved on; DVC's cache has what it learned from, {md5}"
    lies = "data/shards has moved on" if workspace.shards.exists() else "data/shards is not here"
    return "unknown", f"{lies}; `dvc pull` with the version's dvc.lock brings {md5 or 'it'}"


def _scores(client: MlflowClient, version: ModelVersion) -> tuple[str, str]:
    items, records = latest_evaluation(client, version), read_scores(client, version)
    if not items:
        return "unknown", "none are kept with it"
    for scores in items:
        told = [r["value"] for r in records if all(r[k] == getattr(scores, k) for k in ("dataset", "split", "metric"))]
        own = float(scores.evidence().statistic(scores.parts_NK.sum(axis=0, keepdims=True))[0])
        if told and told[0] is not None and abs(told[0] - own) > ROUNDED + 1e-6 * abs(own):
            return "differs", f"{scores.metric} on {scores.dataset} {scores.split}: {told[0]}, by its items {own}"
    return "holds", f"{len(items)} metrics follow from their items"


def _code_of(bundle: Path) -> dict[str, str]:
    file = bundle / CONTENT
    return dict(json.loads(file.read_text(encoding="utf-8"))["code"]) if file.exists() else {}


def _git(root: Path, *arguments: str) -> bytes | None:
    """What git prints; None where it answers no, or is not here."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
