"""Where a checkpoint comes from: its provenance, recorded when it is trained, and the lineage of a fine-tuned model.

- `provenance_of` is recorded in a checkpoint's config.json: the params of its run and the hashes of its inputs.
  `record_provenance` writes it next to the resume state when a training starts, for `vlp forget`.
- `lineage_record` follows provenance back to the first checkpoint and adds commit, lock files, data and validation.
  `register` keeps it with the version, and `vlp lineage` prints it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlp_models.common.io import hash_path, read_json, read_json_or_none, write_json
from vlp_models.common.packages import dependency, recorded_packages, weights_dependency
from vlp_models.common.source_hash import PACKAGE, code_hash
from vlp_models.common.workspace import Workspace, run_git
from vlp_models.data.shards import AUGMENTED, STREAMING
from vlp_models.data.shards.contents import find_changed_data
from vlp_models.data.tables import count_values, open_parquet
from vlp_models.models import FAMILIES, SHARED_OBJECTIVES
from vlp_models.params import Params, StreamParams, split_start, to_plain
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, output_hashes, read_stages
from vlp_models.registry.mlflow_run import DataInput
from vlp_models.tasks import TASKS
from vlp_models.training import ADAPTERS

PROVENANCE = "provenance.json"  # in the work directory: {"provenance": ..., "detector_id": ...}
LOCKS = ("params.yaml", "dvc.lock", "requirements.lock")


def provenance_of(
    settings: Mapping[str, Any], files: Mapping[str, Path], stream: StreamParams | None
) -> dict[str, Any]:
    """Return the provenance of a training.

    Args:
        settings: the params that its result depends on.
        files: its inputs, by the names that the checkpoint gives them; recorded as hashes.
        stream: how the shards are read, which decides the order of samples.
    """
    provenance = {"params": dict(settings), "inputs": {key: hash_path(path) for key, path in files.items()}}
    if stream is not None and stream.address:
        provenance["stream"] = {"block_mb": stream.block_mb, "window": stream.window}
    return provenance


def record_provenance(work: Path, provenance: Mapping[str, Any], detector_id: str) -> None:
    """Write the provenance of a training next to its resume state.

    Args:
        detector_id: the detector whose regions the model reads; empty if it reads none.
    """
    write_json(work / PROVENANCE, {"provenance": provenance, "detector_id": detector_id})


def lineage_record(params: Params, workspace: Workspace, run: str) -> dict[str, Any]:
    """Return commit, locks, data, validation, vocabulary, parents and DVC target of a fine-tuning run's checkpoint."""
    checkpoint = f"finetune/{run}"
    config = read_json(workspace.checkpoint(checkpoint) / "config.json")
    return {
        "format": "vlp-lineage/1",
        "task": params.finetune[run].task,
        "run": run,
        "model": params.model_of(run),
        "family": params.family_at(checkpoint),
        "variant": params.variant_of(run),
        "seed": params.finetune[run].seed,
        "git_commit": git_commit(workspace.root),
        "locks": {name: hash_path(workspace.root / name) for name in LOCKS if (workspace.root / name).exists()},
        "dvc": output_hashes(read_stages(workspace.root / LOCK_FILE) or {}),
        "packages": recorded_packages(workspace.root),
        "params": to_plain(params),
        "data": _describe_data(workspace),
        "validation": validation_record(workspace, config),
        "vocabulary": read_json_or_none(workspace.reports / "tokenizer.json"),
        "parents": _parents(params, workspace, checkpoint, config),
        "target": f"finetune@{run}",
    }


def lineage_files(workspace: Workspace) -> dict[str, str]:
    """Return the files that a rebuild needs; secrets are redacted before they are kept (common/redaction.py)."""
    present = [workspace.root / name for name in LOCKS if (workspace.root / name).exists()]
    return {path.name: path.read_text(encoding="utf-8") for path in present}


def lineage_tags(root: Path, *, params: Any, data: Path, command: str) -> dict[str, str]:
    """Return the commit, one text with the hashes of params, data and lock files, and the command for a rebuild."""
    paths = {"data": data, "dvc.lock": root / "dvc.lock", "requirements.lock": root / "requirements.lock"}
    hashes = {"params": hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:16]}
    for name, path in paths.items():
        hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "absent"
    text = ", ".join(f"{name} {value}" for name, value in hashes.items())
    return {"git_commit": git_commit(root), "hashes": text, "command": command}


def git_commit(root: Path) -> str:
    """Return the commit, with `+changes` if tracked files differ from it; `unknown` outside a git checkout."""
    commit, changed = run_git(root, "rev-parse", "HEAD"), run_git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changed is None:
        return "unknown"
    return commit.decode().strip() + ("+changes" if changed.strip() else "")


def variant_hash(params: Params, workspace: Workspace, run: str) -> str:
    """Return a hash that is equal for runs that differ in their seeds only.

    It covers the variant's name, the data (texts, vocabulary, detector), the weights that the chain of runs started
    from, the params of its models and trainings except for seeds and names, and their code.
    """
    checkpoint = f"finetune/{run}"
    config = read_json(workspace.checkpoint(checkpoint) / "config.json")
    inputs = config.get("provenance", {}).get("inputs", {})
    family, code = params.family_at(checkpoint), set[str]()  # code: modules of the chain's trainings
    start_weights: dict[str, str] = {}
    # every checkpoint from this one back to the initial model
    for name in params.chain(checkpoint):
        kind, _ = split_start(name)
        if kind != "finetune":
            model = params.models[params.model_at(name)]
            # External weights by their content; the warm-up by the boxes it used
            for path in (weights_dependency(model.init or model.image_init), dependency(model.text_init)):
                if path:
                    file = workspace.root / path
                    start_weights[path] = hash_path(file) if file.exists() else ""
            initial = workspace.checkpoint(f"initial/{params.model_at(name)}") / "config.json"
            warmup = read_json(initial).get("provenance", {}).get("vision_warmup") if initial.exists() else None
            start_weights |= {"vision_warmup": warmup["boxes"]} if warmup else {}
        if kind != "initial":
            code |= {f"{PACKAGE}.pipeline.stages.{kind}", FAMILIES[family]}
            code |= set(STREAMING.values()) if params.trainer.stream.address else set()
        if kind == "pretrain":
            code |= set(SHARED_OBJECTIVES.values())
        if kind == "finetune" and params.finetune[name.partition("/")[2]].adapters:
            code |= set(ADAPTERS.values())
        if kind == "finetune" and params.finetune[name.partition("/")[2]].augment.captions:
            code |= set(AUGMENTED.values())
    modules = [TASKS[params.finetune[run].task], *code]
    # Seeds and names of runs are not in it: `settings_of` leaves them out.
    identity = {
        "variant": params.variant_of(run),
        "model": config.get("model_config"),
        "start_weights": start_weights,
        "settings": [settings for _, settings in params.settings_of(run)],
        # Without the start, whose hash differs with its seed; start weights and settings stand for it.
        "data": {name: digest for name, digest in sorted(inputs.items()) if name != "start"},
        "detector": config.get("detector_id"),
        "code": code_hash(modules),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def training_inputs(workspace: Workspace, sources: Iterable[str] | None = None) -> list[DataInput]:
    """Return the train split of a training's datasets (default: all) as MLflow inputs."""
    manifest, index = workspace.shards / "manifest.json", workspace.shards / "index-train.parquet"
    if not manifest.exists() or not index.exists():
        return []
    # dataset -> view -> number of samples
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    # Counted batch by batch, so the index need not fit into memory.
    for batch in open_parquet(index).iter_batches(columns=["source", "view"]):
        counted = pa.table(batch).group_by(["source", "view"]).aggregate([([], "count_all")])
        for row in counted.to_pylist():
            views = counts[row["source"]]
            views[row["view"]] = views.get(row["view"], 0) + row["count_all"]
    uri, digest = workspace.relative(workspace.shards), hash_path(index)
    return [
        DataInput(name=name, context="training", digest=digest, uri=uri, counts=counts[name])
        for name in sources or read_json(manifest).get("sources", [])
    ]


def validation_record(workspace: Workspace, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return whether the data of a checkpoint passed `validate`; None if nothing on disk can answer that.

    Args:
        config: the checkpoint's config.json.
    """
    report_file, manifest_file = workspace.reports / "validation.json", workspace.validated / "manifest.json"
    if not report_file.exists() or not manifest_file.exists():
        return None
    if find_changed_data(workspace, config.get("provenance", {}).get("inputs", {})):
        return None  # trained on other data than the current data
    # The report must allow the data, and describe the tables that are there.
    report, counts = read_json(report_file), read_json(manifest_file)["counts"]
    reasons = []
    # the percentages are rounded, so they are computed again
    for name, table in report["tables"].items():
        if table["rows"] and 100 * table["bad"] / table["rows"] > report["max_bad_percent"] + 1e-3:
            reasons.append(f"{name}: {table['bad']} of {table['rows']} rows are bad")
        if table["good"] != counts.get(name):
            reasons.append(f"{name}: {table['good']} good rows in the report, {counts.get(name)} in data/validated")
    if not report["tables"].get("images", {}).get("good"):
        reasons.append("images: no good row")
    return {"passed": not reasons, "reasons": reasons, "tables": report["tables"]}


def _describe_data(workspace: Workspace) -> dict[str, Any]:
    """Return counts and splits of validated tables and shards, and the number of quarantined rows by rule."""
    rules = count_values("quarantine", workspace.validated, "table", "rule")
    data: dict[str, Any] = {
        "quarantined": {f"{table}: {rule}": count for (table, rule), count in sorted(rules.items())}
    }
    for name, path in (("validated", workspace.validated), ("shards", workspace.shards)):
        if (path / "manifest.json").exists():
            manifest = read_json(path / "manifest.json")
            data[name] = {key: manifest[key] for key in ("counts", "splits") if key in manifest}
    return data


def _parents(params: Params, workspace: Workspace, name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the checkpoint `name` was made from.

    That is the checkpoints back to the initial one, external weights loaded into that, the detector if the model reads
    regions, and the tokenizer. Hashes are those recorded in training.
    """
    parents: list[dict[str, Any]] = []
    # Follow the starts back; stop where a checkpoint is missing, or is not the one that was started from.
    made_from = config
    # The chain starts with the checkpoint itself.
    _, *starts = params.chain(name)
    for start in starts:
        recorded = made_from.get("provenance", {}).get("inputs", {}).get("start")
        path = workspace.checkpoint(start)
        parent: dict[str, Any] = {"role": "starts from", "path": workspace.relative(path), "sha256": recorded}
        parents.append(parent)
        if not (path / "config.json").exists():
            break
        # A start that was trained again since is not the one that this checkpoint was made from.
        current = hash_path(path)
        parent["sha256"] = recorded or current
        if recorded not in (None, current):
            parent["note"] = "changed since: its own parents are not known"
            break
        made_from = read_json(path / "config.json")
        if provenance := made_from.get("provenance", {}):
            parent |= {"params": provenance.get("params", {}), "inputs": provenance.get("inputs", {})}
            parent |= {"vision_warmup": provenance["vision_warmup"]} if "vision_warmup" in provenance else {}
    else:  # the chain is complete: the last one is an initial model
        kind, model = split_start(starts[-1]) if starts else ("", "")
        provenance = made_from.get("provenance", {})
        if kind == "initial" and (files := provenance.get("image_init", {}).get("files")):
            parents.append({"role": "image weights", "path": params.models[model].image_init, "files": files})
        elif kind == "initial" and params.models[model].init:
            imported = params.models[model].init
            path, init = workspace.root / imported, provenance.get("init", {})
            parent = {
                "role": "imported weights",
                "path": imported,
                "sha256": hash_path(path) if path.exists() else None,
            }
            # The arguments of `vlp import-checkpoint`
            parent |= {key: init[field] for key, field in (("form", "imported"), ("file", "file")) if field in init}
            parents.append(parent)
        if kind == "initial" and (text := provenance.get("text_init")):
            parents.append({"role": "text weights", "path": text["source"], "files": text["files"]})
    # detector and vocabulary, which the whole chain shares
    if config.get("detector_id"):
        detector = {"role": "detector", "path": "data/detector", "id": config["detector_id"]}
        if workspace.detector.exists():
            detector["sha256"] = hash_path(workspace.detector)
        parents.append(detector)
    tokenizer = config.get("provenance", {}).get("inputs", {}).get("tokenizer")
    if tokenizer is None and workspace.tokenizer.exists():
        tokenizer = hash_path(workspace.tokenizer)
    return [*parents, {"role": "tokenizer", "path": "data/tokenizer", "sha256": tokenizer}]
