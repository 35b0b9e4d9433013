"""`vlp pack`: write the bundle of an evaluated run, if its scores are of the present weights, params and data."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from vlp_models.common.environment import command_environment
from vlp_models.common.io import atomic_write, hash_file, to_json
from vlp_models.common.log import get_logger
from vlp_models.common.redaction import redact_yaml, redacted
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.contrib.bundles.replay import predict_alone, score
from vlp_models.contrib.bundles.run_bundle import (
    FORMAT,
    ITEMS,
    LINEAGE,
    MANIFEST,
    MAX_RESAMPLES,
    PARAMS,
    SCORES,
    RunBundle,
    archive_bytes,
    check_manifest,
    environment,
)
from vlp_models.errors import DataError
from vlp_models.params import Params, parse_params
from vlp_models.pipeline.lineage import lineage_files, lineage_record

logger = get_logger(__name__)


def pack(
    params: Params,
    workspace: Workspace,
    run: str,
    path: Path,
    *,
    predictions: bool = True,
    standalone: bool = False,
) -> RunBundle:
    """Write the bundle of an evaluated fine-tuning run.

    Args:
        predictions: include them; those of some tasks contain the test set's texts.
        standalone: include weights and test data, so that a replay predicts without the project.

    Raises:
        DataError: the run is not evaluated, or not with the present weights and params; weights are missing; a score
            does not follow from its items; the evaluation has more than `MAX_RESAMPLES`; or rounded weights change a
            prediction.
        ParamsError: params.yaml is invalid without its secrets.
    """
    if params.evaluate.bootstrap > MAX_RESAMPLES:
        raise DataError(f"params.yaml: `evaluate.bootstrap`: a run bundle may have {MAX_RESAMPLES:,} at most")
    evaluated = require_output(workspace.evaluation(run) / SCORES, f"evaluate@{run}").parent
    _check_recorded(params, workspace, run)
    names = [SCORES, ITEMS, *sorted(file.name for file in evaluated.glob("predictions-*.jsonl") if predictions)]
    files = {name: (evaluated / name).read_bytes() for name in names}
    # Secrets of params.yaml (webhooks, passwords) never leave the project.
    for file, text in lineage_files(workspace).items():
        if file != "requirements.lock":  # long; its hash is in the lineage, and the commit has it
            files[file] = redact_yaml(text).encode()
    lineage = redacted(lineage_record(params, workspace, run))
    files[LINEAGE] = to_json(lineage).encode()
    manifest = {
        "format": FORMAT,
        "run": run,
        "task": lineage["task"],
        "model": lineage["model"],
        "seed": lineage["seed"],
        "git_commit": lineage["git_commit"],
        "environment": environment(params),
        "bootstrap": params.evaluate.bootstrap,
        "weights": hash_weights(params, workspace, run),
    }
    bundle = RunBundle(path=path, manifest=manifest, files=files)
    if standalone:
        files |= _standalone_files(bundle, params, workspace)
    manifest["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    files[MANIFEST] = to_json(manifest).encode()
    # What `vlp replay` would refuse, or find different, is not written.
    try:
        check_manifest(manifest, files)
    except ValueError as error:
        raise DataError(f"{path}: not written: {error}") from None
    # params.yaml must be valid without its secrets as well, since a replay parses it.
    parse_params(bundle.params(), f"{PARAMS} without its secrets", workspace.root)
    if wrong := [finding.text for finding in score(bundle) if finding.equal is False]:
        raise DataError(f"{path}: not written: {wrong[0]}; run `vlp run evaluate@{run}`")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written under a temporary name first: no half-written bundle ever has the final name.
    with atomic_write(path) as temporary:
        temporary.write_bytes(archive_bytes(files))
    return bundle


def _standalone_files(bundle: RunBundle, params: Params, workspace: Workspace) -> dict[str, bytes]:
    """Return the members that make a bundle standalone, with weights of the fewest levels that change no prediction."""
    from vlp_models.contrib.bundles.standalone import LEVELS, ROUNDED, pack_inputs, pack_weights

    splits = [split for split in params.evaluate.splits if f"predictions-{split}.jsonl" in bundle.files]
    inputs = pack_inputs(workspace, bundle.run, splits[-1])  # figures are of the last one
    checkpoint = workspace.checkpoint(f"finetune/{bundle.run}")
    wrong = []
    for levels in LEVELS:
        weights = {workspace.relative(checkpoint / ROUNDED): pack_weights(checkpoint, levels)}
        candidate = replace(bundle, files={**bundle.files, **inputs, **weights})
        findings = predict_alone(candidate, params, workspace)
        wrong = [f"{finding.subject}: {finding.text}" for finding in findings if finding.equal is False]
        logger.info("weights of %d levels: %s", levels, wrong[0] if wrong else "every prediction is equal")
        if not wrong:
            return inputs | weights
    raise DataError(f"{bundle.path}: not written: with weights of {LEVELS[-1]} levels {wrong[0]}")


def _check_recorded(params: Params, workspace: Workspace, run: str) -> None:
    """Check that evaluation and weights are those that dvc.lock records, for the present params and data."""
    # `finetune/NAME` -> `finetune@NAME`: the stage of each checkpoint that the run starts from.
    stages = [f"evaluate@{run}", *(name.replace("/", "@", 1) for name in params.chain(f"finetune/{run}"))]
    command = [sys.executable, "-m", "dvc", "status", "--json", *stages, "plan"]
    done = subprocess.run(command, cwd=workspace.root, env=command_environment(), capture_output=True, text=True)
    try:
        changed = json.loads(done.stdout)
    except ValueError:
        raise DataError(f"`dvc status evaluate@{run}` failed: {done.stderr.strip()[-500:]}") from None
    # Evaluations read the settings that `plan` writes; the other inputs of `plan`, such as code, do not count.
    plan = [entry.get("changed deps", {}) for entry in changed.pop("plan", []) if isinstance(entry, dict)]
    wrong = sorted(changed)
    if any("evaluate" in entry.get(PARAMS, {}) for entry in plan):
        wrong.insert(0, f"`{PARAMS}: evaluate`")
    if wrong:
        raise DataError(
            f"{', '.join(wrong)}: changed since {run} was evaluated, so its scores may be of other weights, data or "
            f"params; `dvc status` has details, `vlp run evaluate@{run}` brings it up to date"
        )


def hash_weights(params: Params, workspace: Workspace, run: str) -> dict[str, str]:
    """Return file -> SHA-256 of the run's weights and of all that they start from, its detector included.

    Raises:
        DataError: a checkpoint has no weights.
    """
    folders = [workspace.checkpoint(name) for name in params.chain(f"finetune/{run}")]
    # The detector's folder may be without weights; a checkpoint's may not.
    weights = {folder: sorted(folder.glob("*.safetensors")) for folder in (workspace.detector, *folders)}
    if missing := [folder for folder in folders if not weights[folder]]:
        raise DataError(f"{workspace.relative(missing[0])}: has no weights; run `vlp run evaluate@{run}` or `dvc pull`")
    return {workspace.relative(file): hash_file(file) for files in weights.values() for file in files}
