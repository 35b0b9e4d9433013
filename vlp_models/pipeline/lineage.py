"""Where a fine-tuned model came from, as one JSON record: what `vlp lineage` prints from the registered version."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.common.packages import dependency, weights_dependency
from vlp_models.common.source_hash import PACKAGE, code_hash
from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.contents import no_longer_here
from vlp_models.data.tables import open_parquet, read_table
from vlp_models.models import FAMILIES
from vlp_models.params import ModelParams, Params, StreamParams, split_start, to_plain
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, output_hashes, read_stages
from vlp_models.registry.logger import DataInput
from vlp_models.tasks import TASKS

LOCKS = ("params.yaml", "dvc.lock", "requirements.lock")


def lineage_record(params: Params, workspace: Workspace, run: str) -> dict[str, Any]:
    """Commit, lock files, data, validation, parents and the command for a fine-tuning run's checkpoint."""
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
        "params": to_plain(params),
        "data": _data(workspace),
        "validation": validation_record(workspace, config),
        "parents": _parents(params, workspace, checkpoint, config),
        "target": f"finetune@{run}",
    }


def variant_hash(params: Params, workspace: Workspace, run: str) -> str:
    """The same for runs that differ in their seeds alone: one hash over their design, the data that they learned from
    (texts, words, who made the regions), the weights that they began with, the settings of the models and trainings
    that they come from but for seeds and names, and the code of these."""
    checkpoint = f"finetune/{run}"
    config = read_json(workspace.checkpoint(checkpoint) / "config.json")
    inputs = config.get("provenance", {}).get("inputs", {})
    family, settings, code = params.family_at(checkpoint), [], set[str]()
    begun: dict[str, str] = {}
    for name in params.chain(checkpoint):
        kind, key = split_start(name)
        if kind != "finetune":
            model = params.models[params.model_at(name)]
            begun |= _begun_with(model, workspace)
            begun |= _warmup_boxes(workspace.checkpoint(f"initial/{params.model_at(name)}"))
            dropped = {"seed"} if model.vision_warmup.steps else {"seed", "vision_warmup"}
            settings.append({k: v for k, v in to_plain(model).items() if k not in dropped})
        if kind != "initial":
            own = to_plain(getattr(params, kind)[key])
            settings.append({k: v for k, v in own.items() if k not in ("seed", "start", "variant", "model")})
            code |= {f"{PACKAGE}.pipeline.stages.{kind}", FAMILIES[family]}
    places = [TASKS[params.finetune[run].task], *code]
    about = {
        "variant": params.variant_of(run),
        "model": config.get("model_config"),
        "begun": begun,
        "settings": settings,
        "data": {name: digest for name, digest in sorted(inputs.items()) if name != "start"},
        "detector": config.get("detector_id"),
        "code": code_hash(sorted(place for place in places if place.startswith(f"{PACKAGE}."))),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _begun_with(model: ModelParams, workspace: Workspace) -> dict[str, str]:
    """Where the weights come from that the model began with, each with what is known of its content."""
    places = [weights_dependency(model.init or model.image_init), dependency(model.text_init)]
    files = {place: workspace.root / place for place in places if place}
    return {place: hash_path(file) if file.exists() else "" for place, file in files.items()}


def _warmup_boxes(initial: Path) -> dict[str, str]:
    """Return the hash of the boxes that its vision warm-up used, if it had one."""
    config = initial / "config.json"
    warmup = read_json(config).get("provenance", {}).get("vision_warmup") if config.exists() else None
    return {"vision_warmup": warmup["boxes"]} if warmup else {}


def training_inputs(workspace: Workspace, sources: Iterable[str] | None = None) -> list[DataInput]:
    """What a training reads: the train split of its datasets (default: all), and val for its losses."""
    manifest, index = workspace.shards / "manifest.json", workspace.shards / "index-train.parquet"
    if not manifest.exists() or not index.exists():
        return []
    uri, digest, counts = workspace.relative(workspace.shards), hash_path(index), _samples(index)
    return [
        DataInput(name=name, context="training", digest=digest, uri=uri, counts=counts[name])
        for name in sources or read_json(manifest).get("sources", [])
    ]


def _samples(index: Path) -> dict[str, dict[str, int]]:
    """Of each dataset, how many samples each view has of it."""
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for batch in open_parquet(index).iter_batches(columns=["source", "view"]):
        counted = pa.table(batch).group_by(["source", "view"]).aggregate([([], "count_all")])
        for row in counted.to_pylist():
            of_source = counts[row["source"]]
            of_source[row["view"]] = of_source.get(row["view"], 0) + row["count_all"]
    return counts


def lineage_files(workspace: Workspace) -> dict[str, str]:
    """The files that a rebuild needs; secrets are taken out of them when they are kept (redaction.py)."""
    present = [workspace.root / name for name in LOCKS if (workspace.root / name).exists()]
    return {path.name: path.read_text(encoding="utf-8") for path in present}


def validation_record(workspace: Workspace, config: dict[str, Any]) -> dict[str, Any] | None:
    """Whether the data a checkpoint learned from passed `validate`; None where nothing on disk can say so."""
    report_file, manifest_file = workspace.reports / "validation.json", workspace.validated / "manifest.json"
    if not report_file.exists() or not manifest_file.exists():
        return None
    if no_longer_here(workspace, config.get("provenance", {}).get("inputs", {})):
        return None  # trained on other data than what lies here
    report, counts = read_json(report_file), read_json(manifest_file)["counts"]
    reasons = []
    for name, table in report["tables"].items():
        if table["rows"] and 100 * table["bad"] / table["rows"] > report["max_bad_percent"] + 1e-3:
            reasons.append(f"{name}: {table['bad']} of {table['rows']} rows are bad")
        if table["good"] != counts.get(name):
            reasons.append(f"{name}: {table['good']} good rows in the report, {counts.get(name)} in data/validated")
    if not report["tables"].get("images", {}).get("good"):
        reasons.append("images: no good one")
    return {"passed": not reasons, "reasons": reasons, "tables": report["tables"]}


def _data(workspace: Workspace) -> dict[str, Any]:
    quarantine = read_table("quarantine", workspace.validated)
    rules = Counter(zip(quarantine["table"].to_pylist(), quarantine["rule"].to_pylist(), strict=True))
    data: dict[str, Any] = {
        "quarantined": {f"{table}: {rule}": count for (table, rule), count in sorted(rules.items())}
    }
    for name, path in (("validated", workspace.validated), ("shards", workspace.shards)):
        if (path / "manifest.json").exists():
            manifest = read_json(path / "manifest.json")
            data[name] = {key: manifest[key] for key in ("counts", "splits") if key in manifest}
    return data


def _parents(params: Params, workspace: Workspace, name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """What the checkpoint `name` was made of: the checkpoints before it back to the first one and the weights imported
    into that, the detector where the model reads regions, and the tokenizer. Hashes are those that training found.
    """
    parents: list[dict[str, Any]] = []
    made_from = config
    _, *starts = params.chain(name)
    for start in starts:
        recorded = made_from.get("provenance", {}).get("inputs", {}).get("start")
        path = workspace.checkpoint(start)
        parent: dict[str, Any] = {"role": "starts from", "path": workspace.relative(path), "sha256": recorded}
        parents.append(parent)
        if not (path / "config.json").exists():
            break
        now = hash_path(path)
        parent["sha256"] = recorded or now
        if recorded not in (None, now):
            parent["note"] = "changed since: its own parents are not known"
            break
        made_from = read_json(path / "config.json")
        if provenance := made_from.get("provenance", {}):
            parent |= {"params": provenance.get("params", {}), "inputs": provenance.get("inputs", {})}
            parent |= {"vision_warmup": provenance["vision_warmup"]} if "vision_warmup" in provenance else {}
    else:
        kind, model = split_start(starts[-1]) if starts else ("", "")
        if kind == "initial" and (files := made_from.get("provenance", {}).get("image_init", {}).get("files")):
            parents.append({"role": "image weights", "path": params.models[model].image_init, "files": files})
        elif kind == "initial" and params.models[model].init:
            there = workspace.root / params.models[model].init
            imported = {"path": params.models[model].init, "sha256": hash_path(there) if there.exists() else None}
            told = made_from.get("provenance", {}).get("init", {})  # as `vlp import-checkpoint` was called
            imported |= {key: told[name] for key, name in (("form", "imported"), ("file", "file")) if name in told}
            parents.append({"role": "imported weights", **imported})
        if kind == "initial" and (words := made_from.get("provenance", {}).get("text_init")):
            parents.append({"role": "a BERT's words", "path": words["source"], "files": words["files"]})
    if config.get("detector_id"):
        detector = {"role": "detector", "path": "data/detector", "id": config["detector_id"]}
        if workspace.detector.exists():
            detector["sha256"] = hash_path(workspace.detector)
        parents.append(detector)
    tokenizer = config.get("provenance", {}).get("inputs", {}).get("tokenizer")
    if tokenizer is None and workspace.tokenizer.exists():
        tokenizer = hash_path(workspace.tokenizer)
    return [*parents, {"role": "tokenizer", "path": "data/tokenizer", "sha256": tokenizer}]


def git_commit(root: Path) -> str:
    """The commit, with `+changes` when tracked files differ from it; `unknown` outside a git checkout."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def lineage_tags(root: Path, *, params: Any, data: Path, command: str) -> dict[str, str]:
    """Commit, hashes of the data manifest, params and lock files, and the command that rebuilds the result."""
    return {
        "git_commit": git_commit(root),
        "data_manifest": _hash(data),
        "dvc_lock": _hash(root / "dvc.lock"),
        "requirements_lock": _hash(root / "requirements.lock"),
        "params": hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:16],
        "command": command,
    }


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "absent"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


NOTE = "made-of.json"  # in the work directory: {"provenance": ..., "detector_id": ...}


def provenance_of(
    settings: Mapping[str, Any], files: Mapping[str, Path], stream: StreamParams | None
) -> dict[str, Any]:
    """
    Args:
        files: what it reads, by the names that its checkpoint gives them.
        stream: how the shards are read, which decides the order of samples.
    """
    found = {"params": dict(settings), "inputs": {key: hash_path(path) for key, path in files.items()}}
    if stream is not None and stream.address:
        found["stream"] = {"block_mb": stream.block_mb, "window": stream.window}
    return found


def note(work: Path, provenance: Mapping[str, Any], detector_id: str) -> None:
    """detector_id: who made the regions that the model reads; empty: it reads none."""
    write_json(work / NOTE, {"provenance": provenance, "detector_id": detector_id})


def noted(work: Path) -> tuple[Mapping[str, Any], str] | None:
    """Provenance and detector; None: nothing is noted, as beside states of earlier versions."""
    if not (work / NOTE).exists():
        return None
    found = read_json(work / NOTE)
    return found["provenance"], found["detector_id"]
