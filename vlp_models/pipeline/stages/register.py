"""register: every run of each task becomes a version in MLflow's registry; the best of a task gets alias `challenger`.

Which run is best, evaluation/ranking.py says; text-only controls are not registered. Each bundle predicts one image
before MLflow is touched. Running it again makes no second version, unless what predicts has changed: weights, features,
tokenizer, or the code that serves them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_json
from vlp_models.common.workspace import SEARCH, Workspace, record_timing, require_output
from vlp_models.data.tables import read_table
from vlp_models.errors import CheckpointError
from vlp_models.evaluation.ranking import Candidate, candidates
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.lineage_tags import training_inputs
from vlp_models.registry.evaluations import ITEMS
from vlp_models.registry.logger import DataInput
from vlp_models.serving.bundle import (
    BUNDLE,
    Trial,
    checkpoint_info,
    content_of,
    not_served,
    try_out,
    weights_of,
    write_bundle,
)
from vlp_models.tasks.caption_search import CAPTIONS
from vlp_models.tasks.scoring import read_item_scores

IMAGES_TRIED = 50  # of which the first that is on this disk


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A run whose bundle is made.

    challenger: it is the best of its task. not_served: why nobody expects it to predict from an image; empty: it does.
    predicted: what it said of an image.
    """

    task: str
    candidate: Candidate
    challenger: bool
    bundle: Path
    info: CheckpointInfo
    not_served: str
    predicted: dict[str, Any]


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes reports/registered.json: task -> its versions, the best run's first.

    Raises:
        CheckpointError: a run's model should predict from an image, and does not; nothing is registered then.
        DataError: a run has not been evaluated.
        TrackingError: MLflow does not answer.
    """
    from rich.console import Console

    from vlp_models.registry.client import connect, tracking_errors, tracking_uri
    from vlp_models.registry.logger import replay
    from vlp_models.registry.versions import model_name, set_challenger

    console = Console(stderr=True)
    with record_timing(workspace, "register"), _bundles(params, workspace) as tried:
        client = connect(params.tracking, workspace.root)
        replay(params.tracking, workspace.root)
        receipts: dict[str, list[dict[str, Any]]] = {}
        with tracking_errors(tracking_uri(params.tracking, workspace.root)):
            for one in tried:
                receipt, created = _register(client, params, workspace, one)
                receipts.setdefault(one.task, []).append(receipt)
                state = "registered" if created else "already registered"
                console.print(f"{receipt['name']} version {receipt['version']}: {state} (from {receipt['run']})")
            for task, several in receipts.items():
                for receipt in several:
                    if receipt["challenger"]:
                        name = model_name(params.tracking, task)
                        set_challenger(client, name, receipt["version"])
                        console.print(f"{name}: challenger is version {receipt['version']}")
        write_json(workspace.reports / "registered.json", receipts)


@contextmanager
def _bundles(params: Params, workspace: Workspace) -> Iterator[list[Tried]]:
    """A bundle for every run that is to be registered, best of a task first; each tried out if it can be served."""
    ranked = sorted(candidates(params, workspace).items())
    images = _test_images(workspace)
    work = workspace.root / ".work"
    work.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work, prefix="bundles-") as temporary:
        tried = []
        for task, several in ranked:
            for place, candidate in enumerate(several):
                bundle = Path(temporary) / candidate.run / BUNDLE
                bundle.mkdir(parents=True)
                checkpoint = require_output(
                    workspace.checkpoint(f"finetune/{candidate.run}"), f"finetune@{candidate.run}"
                )
                if checkpoint_info(checkpoint).detector_id:
                    require_output(workspace.detector, "detector")
                info = write_bundle(
                    bundle,
                    checkpoint=checkpoint,
                    detector=workspace.detector,
                    features=to_plain(params.features),
                    search=workspace.evaluation(candidate.run) / SEARCH,
                )
                why_not = not_served(bundle)
                trial = Trial() if why_not else try_out(bundle, images)
                if trial.problem:
                    raise CheckpointError(
                        f"register: run `{candidate.run}` (model `{candidate.model}`, task {task}) can't be served: "
                        f"{trial.problem}. Nothing was registered"
                    )
                best = place == 0 and candidate.value is not None
                tried.append(
                    Tried(
                        task=task,
                        candidate=candidate,
                        challenger=best,
                        bundle=bundle,
                        info=info,
                        not_served=why_not,
                        predicted=trial.predicted,
                    )
                )
        yield tried


def _register(client: Any, params: Params, workspace: Workspace, one: Tried) -> tuple[dict[str, Any], bool]:
    """The version's receipt, and whether it is new."""
    from vlp_models.pipeline.lineage_tags import lineage_files, lineage_record, lineage_tags, variant_hash
    from vlp_models.registry.card import model_card
    from vlp_models.registry.logger import find_training_run
    from vlp_models.registry.versions import VARIANT_HASH, model_name, register

    candidate, name = one.candidate, model_name(params.tracking, one.task)
    facts = lineage_tags(
        workspace.root,
        params=to_plain(params),
        data=workspace.shards / "manifest.json",
        command=f"dvc repro finetune@{candidate.run}",
    )
    about = {"run": candidate.run, "model": candidate.model, "family": candidate.family, "variant": candidate.variant}
    content = content_of(one.bundle)
    registered = register(
        client,
        name=name,
        task=one.task,
        run=candidate.run,
        bundle=one.bundle,
        content=content,
        metrics={_slug(s): float(s["value"]) for s in candidate.scores if s["value"] is not None},
        tags={
            **facts,
            **about,
            "task": one.task,
            "weights": weights_of(one.bundle),
            "seed": str(candidate.seed),
            VARIANT_HASH: variant_hash(params, workspace, candidate.run),
            "served": f"no: {one.not_served}" if one.not_served else "yes",
        },
        card=model_card(
            name=name,
            info=one.info,
            scores=candidate.scores,
            lineage_tags=facts | about,
            not_served=one.not_served,
            looks_up=(one.bundle / SEARCH / CAPTIONS).exists(),
        ),
        evaluation=workspace.evaluation(candidate.run),
        predicted=one.predicted,
        inputs=_inputs(params, workspace, one),
        find_training_run=find_training_run(client, workspace.training(f"finetune/{candidate.run}")),
        lineage_tags=lineage_record(params, workspace, candidate.run),
        files=lineage_files(workspace),
    )
    receipt = {"name": name, "version": registered.version, **about, "content": content, "challenger": one.challenger}
    return receipt, registered.created


def _inputs(params: Params, workspace: Workspace, one: Tried) -> list[DataInput]:
    """The data that the version learned from, and that it was scored on."""
    run = params.finetune[one.candidate.run]
    items = read_item_scores(workspace.evaluation(one.candidate.run) / ITEMS)
    scored = {(s.dataset, s.split, s.test): len(s.items) for s in items}
    uri = workspace.relative(workspace.shards)
    return training_inputs(workspace, run.sources) + [
        DataInput(name=f"{dataset} {split}", context="evaluation", digest=test, uri=uri, counts={"items": count})
        for (dataset, split, test), count in sorted(scored.items())
    ]


def _test_images(workspace: Workspace) -> list[Path]:
    """Images of the test split, else of val, to try a bundle with."""
    images = read_table("images", require_output(workspace.validated, "validate"))
    rows = zip(images["split"].to_pylist(), images["path"].to_pylist(), strict=True)
    by_split: dict[str, list[Path]] = {"test": [], "val": []}
    for split, path in rows:
        if len(by_split.get(split, [None] * IMAGES_TRIED)) < IMAGES_TRIED:
            by_split[split].append(workspace.root / path)
    return [*by_split["test"], *by_split["val"]]


def _slug(score: dict[str, Any]) -> str:
    """A metric name MLflow accepts: letters, digits, and `_-. ` (a `/` would make a group of its own)."""
    text = f"{score['dataset']}.{score['split']}.{score['metric']}"
    return "".join(c if c.isalnum() or c in "_-. " else "_" for c in text)
