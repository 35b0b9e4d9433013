"""A registered model, by its alias, on the test split as it is now: into reports/aliases/TASK-ALIAS.

It runs in a workspace of its own below .work, which is gone afterwards; the pipeline's outputs stay as they are.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params
from vlp_models.stages.workspace import Workspace, need, output_directory, read_json


def evaluate_alias(params: Params, workspace: Workspace, task: str, alias: str) -> Path:
    """Returns the folder of scores and predictions.

    Raises:
        ParamsError: no such task.
        DataError: no version has the alias, or it was trained on another detector's features than data/shards holds.
    """
    import mlflow.artifacts

    from vlp_models.stages import evaluate
    from vlp_models.tracking.client import connect
    from vlp_models.tracking.registry import by_alias, model_name

    if task not in params.tracking.metric:
        raise ParamsError(f"{task}: no such task; known: {', '.join(params.tracking.metric)}")
    name = model_name(params.tracking, task)
    version = by_alias(connect(params.tracking, workspace.root), name, alias)
    if version is None:
        raise DataError(f"{name}: no version has the alias `{alias}`")
    run = params.finetune.get(version.tags.get("run", ""))
    if run is None or run.task != task:
        raise DataError(f"{name} version {version.version}: its run {version.tags.get('run')!r} is not in params.yaml")
    shards = read_json(need(workspace.shards / "manifest.json", "shards"))
    label = f"{task}-{alias}"
    (workspace.root / ".work").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=workspace.root / ".work", prefix="evaluate-") as temporary:
        own = Workspace(Path(temporary) / "workspace")
        source = f"models:/{name}/{version.version}"
        local = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(Path(temporary) / "model")))
        checkpoint = local / "artifacts" / "bundle" / "checkpoint"
        if read_json(checkpoint / "config.json").get("detector_id") != shards["detector_id"]:
            raise DataError(f"{name} version {version.version}: data/shards holds another detector's features")
        for path, there in (
            (own.checkpoint(label), checkpoint),
            (own.shards, workspace.shards),
            (own.validated, workspace.validated),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(there.absolute())
        evaluate.run(dataclasses.replace(params, finetune={label: run}), own, label)
        target = workspace.reports / "aliases" / label
        with output_directory(target) as directory:
            shutil.copytree(own.evaluation(label), directory, dirs_exist_ok=True)
    print(f"{name}@{alias} is version {version.version}; scores in {workspace.relative(target)}")
    return target
