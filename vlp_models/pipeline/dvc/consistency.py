"""Make sure that dvc.lock records what a stage really used.

DVC reads params.yaml and hashes a stage's inputs when the stage has ended, not when it starts. An edit in between would
be recorded with a result that it did not produce. Two checks prevent that:

- at its end, a stage compares its params and, for `prepare`, the dataset's folder with what it started with, and fails
  if they differ (`unchanged_inputs`);
- then DVC compares the params that it is about to record with those that the stage used (`check_recorded_params`, which
  `pipeline/dvc/repro.py` adds to DVC). This catches an edit between the stage's check and DVC's read.

Not detected: files of a dataset's sub-folder that are rewritten in place, and what changes in a dataset between the
stage's check and DVC's hashing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json, stat_file, write_text
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params, parse_params, read_yaml
from vlp_models.pipeline.dvc.dvc_yaml import params_of, read_pipeline
from vlp_models.pipeline.dvc.external import files_outside_root
from vlp_models.pipeline.dvc.graph import evaluate_settings

PARAMS = "params.yaml"
FOLDER = ".work/params"  # STAGE.yaml: params.yaml as the stage used it


@contextmanager
def unchanged_inputs(workspace: Workspace, params_file: str, stage: str, key: str) -> Iterator[Params]:
    """Yield the params for a stage that DVC runs; on leaving the block, check that its inputs are still the same.

    Raises:
        ParamsError: a value that the stage depends on was edited during the block.
        DataError: a file or folder that `prepare` reads was changed during the block.
    """
    used = read_yaml(params_file)
    params = parse_params(used, params_file)
    _check_settings(params, workspace, stage, key)
    # inputs that no stage writes may change at any time
    before = _input_files(params, workspace, stage, key)
    # The stage runs here; an error in it skips the checks below.
    yield params
    after = _input_files(params, workspace, stage, key)
    name = f"{stage} {key}".strip()
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        raise DataError(
            f"{changed[0]}: changed while {name} ran, which may have read the old content; its result is not recorded. "
            "Run the same command again"
        )
    # the values that dvc.yaml declares for the stage, then and now
    content, now = Path(params_file).read_text(encoding="utf-8"), read_yaml(params_file)
    for param in params_of(read_pipeline(workspace.root), stage, key):
        if _value_at(used, param) != _value_at(now, param):
            raise ParamsError(
                f"{params_file}: `{param}` was edited while {name} ran, which used the old value; its result is not "
                "recorded. Run the same command again"
            )
    # DVC reads the file once more, when this process has ended: it compares with this record.
    # params.yaml as the stage used it, for `check_recorded_params`
    write_text(workspace.root / FOLDER / f"{stage}{'@' if key else ''}{key}.yaml", content)


def _check_settings(params: Params, workspace: Workspace, stage: str, key: str) -> None:
    """Check that an evaluation runs with the settings that DVC records, those that `plan` wrote."""
    from vlp_models.pipeline.stages.plan import planned_settings

    if stage != "evaluate" or key not in params.finetune:
        return
    task = params.finetune[key].task
    file = workspace.root / evaluate_settings(task)
    if file.exists() and read_json(file) != planned_settings(params, task):
        raise ParamsError(f"params.yaml: `evaluate` was edited after the stage `plan` ran; run `vlp run {stage}@{key}`")


def clear_records(root: Path) -> None:
    """Delete the records of stages whose DVC was killed before it read them."""
    for record in (root / FOLDER).glob("*.yaml"):
        record.unlink()


def check_recorded_params(root: Path, stage: str, values: Mapping[str, Any]) -> None:
    """Check the values of params.yaml that DVC is about to record for a stage.

    A stage without a record has not just ended: DVC computes the key of its run cache.

    Raises:
        ParamsError: the stage used other values.
    """
    from ruamel.yaml import YAML

    record = root / FOLDER / f"{stage}.yaml"
    if not record.exists():
        return
    used = YAML(typ="safe").load(record.read_bytes())  # as DVC loads them: values compare equal
    record.unlink()
    for key, value in values.items():
        if _value_at(used, key) != value:
            raise ParamsError(
                f"{PARAMS}: `{key}` was edited as {stage} ended, which used the old value; its result is not recorded. "
                "Run the same command again"
            )


def _input_files(params: Params, workspace: Workspace, stage: str, key: str) -> dict[Path, int]:
    """Return a hash per path that `prepare` reads; nothing for other stages, whose inputs only DVC's stages write.

    The paths are the list of withdrawn images, the dataset's folder (the names, times and sizes of its direct entries),
    and files outside of it that the dataset names.
    """
    if stage != "prepare" or key not in params.data:
        return {}
    hashes: dict[Path, int] = {}
    root = workspace.root / params.data[key].root
    for file in (workspace.withdrawn, *(workspace.root / path for path in files_outside_root(params.data[key]))):
        if file.exists():
            hashes[file] = _hash_status(file.stat())
    if root.is_dir():
        with os.scandir(root) as entries:  # may be a million images: sum their hashes, keep none
            visible = (entry for entry in entries if not entry.name.startswith("."))
            hashes[root] = sum(hash((e.name, _hash_status(e.stat(follow_symlinks=False)))) for e in visible)
    return hashes


def _hash_status(status: os.stat_result) -> int:
    return hash(stat_file(status))


def _value_at(params: Any, key: str) -> Any:
    """Return the value of a dotted key such as `pretrain.tden`, or None."""
    for part in key.split("."):
        params = params.get(part) if isinstance(params, dict) else None
    return params
