"""register: the best run of each task becomes a version in MLflow's registry, alias `challenger`.

Which run is best, evaluation/ranking.py says. Running it again on the same weights makes no second version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlp_models.evaluation.ranking import best_runs
from vlp_models.params import Params, to_plain
from vlp_models.workspace.paths import Workspace, hash_path, measured, need, read_json, write_json


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes reports/registered.json.

    Raises:
        TrackingError: MLflow does not answer.
        DataError: a run has not been evaluated.
    """
    from rich.console import Console

    from vlp_models.runs.provenance import lineage_files, lineage_record
    from vlp_models.tracking.card import model_card
    from vlp_models.tracking.client import answering, connect, tracking_uri
    from vlp_models.tracking.lineage import lineage
    from vlp_models.tracking.registry import model_name, register
    from vlp_models.tracking.spool import replay

    console = Console(stderr=True)
    with measured(workspace, "register"):
        client = connect(params.tracking, workspace.root)
        replay(params.tracking, workspace.root)
        receipts: dict[str, Any] = {}
        for task, (name, scores) in sorted(best_runs(params, workspace).items()):
            checkpoint = need(workspace.checkpoint(name), f"finetune@{name}")
            detector = need(workspace.detector, "detector")
            config = read_json(checkpoint / "config.json")
            content = content_of(checkpoint, detector)
            facts = lineage(
                workspace.root,
                params=to_plain(params),
                data=workspace.shards / "manifest.json",
                command=f"dvc repro finetune@{name}",
            )
            registered_name = model_name(params.tracking, task)
            with answering(tracking_uri(params.tracking, workspace.root)):
                registered = register(
                    client,
                    name=registered_name,
                    task=task,
                    checkpoint=checkpoint,
                    detector=detector,
                    features=to_plain(params.features),
                    content=content,
                    metrics={_slug(s): float(s["value"]) for s in scores if s["value"] is not None},
                    tags={**facts, "run": name, "task": task},
                    card=model_card(name=registered_name, config=config, scores=scores, lineage=facts),
                    evaluation=workspace.evaluation(name),
                    lineage=lineage_record(params, workspace, name),
                    files=lineage_files(workspace),
                )
            receipts[task] = {"name": registered.name, "version": registered.version, "run": name, "content": content}
            state = "registered" if registered.created else "already registered"
            console.print(f"{registered.name} version {registered.version}: {state} (from {name}), alias challenger")
        write_json(workspace.reports / "registered.json", receipts)


def content_of(checkpoint: Path, detector: Path) -> str:
    """The identity of a version: what its bundle holds."""
    return hash_path(checkpoint) + hash_path(detector)[:16]


def _slug(score: dict[str, Any]) -> str:
    """A metric name MLflow accepts: letters, digits, and `_-. ` (a `/` would make a group of its own)."""
    text = f"{score['dataset']}.{score['split']}.{score['metric']}"
    return "".join(c if c.isalnum() or c in "_-. " else "_" for c in text)
