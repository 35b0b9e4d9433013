"""A real MLflow on SQLite with versions whose scores are made up item by item; promotions as processes of their own.

`python toy_registry.py ROOT MODEL VERSION KILL [LEDGER]` promotes; KILL is `` or where the process dies by SIGKILL.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.errors import DataError
from vlp_models.metrics.score import ItemScores, item_scores, mean_score, write_items
from vlp_models.params import GateParams, PromotionParams, TrackingParams
from vlp_models.registry.client import connect
from vlp_models.registry.evaluations import CURRENT, log_evaluation, log_lineage
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.promotion.promote import Bench, Decision, promote, rollback
from vlp_models.registry.versions import CHALLENGER, COHORT, run_alias

TRACKING = TrackingParams(
    uri="sqlite:///mlflow.db", artifacts="artifacts", experiment="toy", model_prefix="toy", metric={"vqa": "accuracy"}
)
PASSED = {"passed": True, "reasons": []}
IMAGES, QUESTIONS = 60, 5


def answers(share: float, seed: int = 0) -> list[float]:
    """Right or wrong for each question of each image; a higher share answers what a lower one does, and more."""
    return [float(u < share) for u in np.random.default_rng(seed).random(IMAGES * QUESTIONS)]


def toy_items(
    values: Sequence[float],
    *,
    test: str = "t1",
    metric: str = "accuracy",
    note: str = "",
    split: str = "test",
    dataset: str = "toy",
) -> ItemScores:
    """Five questions an image; the last of each asks "how many"."""
    names = [f"toy/{i // QUESTIONS}/q{i % QUESTIONS}" for i in range(len(values))]
    score = mean_score(metric, values, [name.rpartition("/")[0] for name in names], note, items=names)
    kinds = {n: [f"question_type={'how many' if n.endswith(f'q{QUESTIONS - 1}') else 'what'}"] for n in names}
    found = item_scores(score, dataset=dataset, split=split, test=test, slices=kinds)
    assert found is not None
    return found


class ToyRegistry:
    """One model under a ledger. `reevaluated`: what the bench would measure of the champion on today's test data."""

    def __init__(self, root: Path, model: str, tracking: TrackingParams = TRACKING, **gate: Any) -> None:
        self.root, self.model, self.tracking = root, model, tracking
        self.client = connect(tracking, root)
        self.ledger = Ledger(root / f"{model}.jsonl", f"{model}-ledger")
        self.gate = GateParams(**gate)
        self.reevaluated: ItemScores | None = None
        self.reevaluations = 0
        self.unvalidated = False

    def add(
        self,
        values: Sequence[float],
        *,
        validation: dict[str, Any] | None = PASSED,
        items: Sequence[ItemScores] | None = None,
        made_by: tuple[str, str] | None = None,
        cohort: str = "",
        weights: str = "",
        **scores: Any,
    ) -> int:
        """Registers a version with these scores as the challenger. made_by: its run and that run's model. weights: what
        its bundle holds; default: what no other does."""
        experiment = self.client.get_experiment_by_name(self.tracking.experiment)
        assert experiment is not None
        run = self.client.create_run(experiment.experiment_id)
        with tempfile.TemporaryDirectory() as temporary:
            bundle = Path(temporary) / "artifacts" / "bundle"
            bundle.mkdir(parents=True)
            (bundle / "weights").write_text(weights or run.info.run_id)
            self.client.log_artifacts(run.info.run_id, temporary, "model")
        log_lineage(self.client, run.info.run_id, {"validation": validation}, {})
        if not any(m.name == self.model for m in self.client.search_registered_models()):
            self.client.create_registered_model(self.model)
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_evaluation(Path(temporary), [toy_items(values, **scores)] if items is None else items)
            current = log_evaluation(self.client, run.info.run_id, folder)
        version = self.client.create_model_version(
            self.model,
            source=f"{run.info.artifact_uri}/model",
            run_id=run.info.run_id,
            tags={
                "content": hashlib.sha256((weights or run.info.run_id).encode()).hexdigest(),
                CURRENT: current,
                **(dict(zip(("run", "model"), made_by, strict=True)) if made_by else {}),
                **({COHORT: cohort, "weights": run.info.run_id} if cohort else {}),
            },
        )
        if made_by:
            self.client.set_registered_model_alias(self.model, run_alias(made_by[0]), str(version.version))
        self.client.set_registered_model_alias(self.model, CHALLENGER, str(version.version))
        return int(version.version)

    def promote(self, version: int | None = None, **options: Any) -> Decision:
        return promote(
            self.client,
            self.ledger,
            PromotionParams(tasks={"vqa": self.gate}, allow_unvalidated=self.unvalidated),
            task="vqa",
            model=self.model,
            metric="accuracy",
            bench=Bench(content_of=content_of, reevaluate=self._reevaluate),
            by="test",
            version=version,
            **options,
        )

    def rollback(self) -> Decision:
        return rollback(self.client, self.ledger, task="vqa", model=self.model, content_of=content_of, by="test")

    def aliases(self) -> dict[str, int]:
        return {k: int(v) for k, v in self.client.get_registered_model(self.model).aliases.items()}

    def kinds(self) -> list[str]:
        return [entry["kind"] for entry in self.ledger.entries()]

    @contextmanager
    def _reevaluate(self, bundle: Path, lineage: dict[str, Any]) -> Iterator[Path]:
        self.reevaluations += 1
        if self.reevaluated is None:
            raise DataError("no test data here")
        with tempfile.TemporaryDirectory() as temporary:
            yield write_evaluation(Path(temporary), [self.reevaluated])


def content_of(bundle: Path) -> str:
    return hashlib.sha256((bundle / "weights").read_bytes()).hexdigest()


def write_evaluation(folder: Path, items: Sequence[ItemScores]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_items(folder / "items.parquet", items)
    (folder / "scores.json").write_text(json.dumps([]))
    return folder


def main(root: str, model: str, version: str, kill: str, ledger: str = "") -> None:
    from mlflow import MlflowClient

    from vlp_models.registry.promotion.log import RegistryLog

    registry = ToyRegistry(Path(root), model)
    if ledger:  # as in another checkout
        registry.ledger = Ledger(Path(ledger), registry.ledger.name)
    move = MlflowClient.set_registered_model_alias

    def dying(self: Any, name: str, alias: str, number: str) -> None:
        if alias == "champion" and kill == "before the alias":
            os.kill(os.getpid(), signal.SIGKILL)
        move(self, name, alias, number)
        if alias == "champion" and kill == "after the alias":
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_untagged(self: Any, name: str, version: str, key: str, value: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_early(self: Any, line: bytes) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    MlflowClient.set_registered_model_alias = dying  # type: ignore[method-assign]
    if kill == "before the line":
        RegistryLog.add = dying_early  # type: ignore[method-assign]
    if kill == "before the tags":
        MlflowClient.set_model_version_tag = dying_untagged  # type: ignore[method-assign, assignment]
    print("ready", flush=True)
    sys.stdin.readline()
    print(registry.promote(int(version)).outcome, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
