"""A registered model, by its alias, on the test split as it is now: into reports/aliases/TASK-ALIAS.

The pipeline's outputs stay as they are: promotion/reevaluate.py works in a workspace of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from vlp_models.common.io import output_directory
from vlp_models.common.workspace import SEARCH, Workspace
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import Params
from vlp_models.params.schema import nearest
from vlp_models.tasks import TASKS


def evaluate_alias(params: Params, workspace: Workspace, task: str, alias: str) -> Path:
    """Returns the folder of scores and predictions.

    Raises:
        ParamsError: no such task.
        DataError: no version has the alias, or it can't be evaluated on the data that is here.
    """
    from vlp_models.pipeline.reevaluate import reevaluated
    from vlp_models.registry.client import connect
    from vlp_models.registry.evaluations import read_lineage
    from vlp_models.registry.versions import by_alias, checked_bundle, model_name

    if task not in TASKS:
        raise ParamsError(f"{task}: no such task{nearest(task, TASKS)}")
    client = connect(params.tracking, workspace.root)
    name = model_name(params.tracking, task)
    version = by_alias(client, name, alias)
    if version is None:
        raise DataError(f"{name}: no version has the alias `{alias}`")
    lineage = read_lineage(client, version) or {}
    target = workspace.reports / "aliases" / f"{task}-{alias}"
    with (
        reevaluated(params, workspace, checked_bundle(version), lineage, as_served=True) as scored,
        output_directory(target) as directory,
    ):
        # what is looked up stays in the bundle: `vlp forget` knows it there
        shutil.copytree(scored, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SEARCH))
    print(f"{name}@{alias} is version {version.version}; scores in {workspace.relative(target)}")
    return target
