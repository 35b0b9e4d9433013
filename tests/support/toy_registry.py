"""A real MLflow on SQLite with versions whose scores are made up item by item; promotions in processes of their own.

`python toy_registry.py ROOT MODEL VERSION KILL` promotes; KILL is empty or the point where the process dies by SIGKILL.
"""

from __future__ import annotations

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
import pytest

from vlp_models.errors import DataError
from vlp_models.metrics.score import ItemScores, item_scores, mean_score, write_items
from vlp_models.params import GateParams, PromotionParams, TrackingParams
from vlp_models.registry.client import connect
from vlp_models.registry.evaluations import CURRENT_EVALUATION, log_evaluation, log_lineage
from vlp_models.registry.promotion.gate_rule import MetricSpec
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.promotion.promote import Decision, GateRequest, promote, rollback
from vlp_models.registry.promotion.reconcile import PromotionContext
from vlp_models.registry.versions import CHALLENGER, VARIANT_HASH, run_alias
from vlp_models.serving.bundle import hash_bundle, write_content

TRACKING = TrackingParams(
    uri="sqlite:///mlflow.db", artifacts="artifacts", experiment="toy", model_prefix="toy", metric={"vqa": "accuracy"}
)
PASSED = {"passed": True, "reasons": []}
IMAGES, QUESTIONS = 60, 5
KILLS = ("before the line", "before the alias", "after the alias", "before the tag")


def answers(share: float, seed: int = 0) -> list[float]:
    """Return right (1) or wrong (0) for each question; a higher share answers what a lower one does, and more."""
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
    """Return scores of five questions per image; the last one of each asks "how many"."""
    names = [f"toy/{i // QUESTIONS}/q{i % QUESTIONS}" for i in range(len(values))]
    score = mean_score(metric, values, [name.rpartition("/")[0] for name in names], note, items=names)
    kinds = {n: [f"question_type={'how many' if n.endswith(f'q{QUESTIONS - 1}') else 'what'}"] for n in names}
    found = item_scores(score, dataset=dataset, split=split, test=test, slices=kinds)
    assert found is not None
    return found


class ToyRegistry:
    """One model under a ledger. `reevaluated`: the champion's scores if it is evaluated again."""

    def __init__(self, root: Path, model: str, tracking: TrackingParams = TRACKING, **gate: Any) -> None:
        self.root, self.model, self.tracking = root, model, tracking
        self.client = connect(tracking, root)
        self.ledger = Ledger(root / f"{model}.jsonl")
        self.gate = GateParams(**gate)
        self.reevaluated: ItemScores | None = None
        self.reevaluations = 0
        self.allow_unvalidated = False

    @property
    def context(self) -> PromotionContext:
        return PromotionContext(client=self.client, ledger=self.ledger, task="vqa", model=self.model, user="test")

    def add(
        self,
        values: Sequence[float],
        *,
        validation: dict[str, Any] | None = PASSED,
        items: Sequence[ItemScores] | None = None,
        made_by: tuple[str, str] | None = None,
        variant: str = "",
        weights: str = "",
        baselines: dict[str, float] | None = None,
        leakage: dict[str, Any] | None = None,
        **scores: Any,
    ) -> int:
        """Register a version with these scores as the challenger.

        Args:
            made_by: its run and that run's model. variant: its variant hash.
            weights: its bundle's content; default: different from all others.
            baselines, leakage: of its accuracy, in scores.json.
        """
        experiment = self.client.get_experiment_by_name(self.tracking.experiment)
        assert experiment is not None
        run = self.client.create_run(experiment.experiment_id)
        with tempfile.TemporaryDirectory() as temporary:
            bundle = Path(temporary) / "artifacts" / "bundle"
            bundle.mkdir(parents=True)
            (bundle / "weights").write_text(weights or run.info.run_id)
            write_content(bundle, [])
            content = hash_bundle(bundle)
            self.client.log_artifacts(run.info.run_id, temporary, "model")
        log_lineage(self.client, run.info.run_id, {"validation": validation}, {})
        if not any(m.name == self.model for m in self.client.search_registered_models()):
            self.client.create_registered_model(self.model)
        with tempfile.TemporaryDirectory() as temporary:
            folder = write_evaluation(Path(temporary), [toy_items(values, **scores)] if items is None else items)
            place = {"dataset": "toy", "split": "test", "metric": "accuracy"}
            record = {**place, "value": 100 * float(np.mean(values)), "n": len(values), "baselines": baselines or {}}
            record["leakage"] = leakage
            (folder / "scores.json").write_text(json.dumps([record]))
            current = log_evaluation(self.client, run.info.run_id, folder)
        version = self.client.create_model_version(
            self.model,
            source=f"{run.info.artifact_uri}/model",
            run_id=run.info.run_id,
            tags={
                "content": content,
                CURRENT_EVALUATION: current,
                **(dict(zip(("run", "model"), made_by, strict=True)) if made_by else {}),
                **({VARIANT_HASH: variant, "weights": run.info.run_id} if variant else {}),
            },
        )
        if made_by:
            self.client.set_registered_model_alias(self.model, run_alias(made_by[0]), str(version.version))
        self.client.set_registered_model_alias(self.model, CHALLENGER, str(version.version))
        return int(version.version)

    def promote(self, version: int | None = None, *, ledger: Ledger | None = None, **options: Any) -> Decision:
        """Let the gate decide. ledger: that of another checkout."""
        context = self.context
        if ledger is not None:
            context = PromotionContext(client=self.client, ledger=ledger, task="vqa", model=self.model, user="test")
        request = GateRequest(
            params=PromotionParams(allow_unvalidated=self.allow_unvalidated),
            rule=self.gate,
            spec=MetricSpec(metric="accuracy", split="test"),
            reevaluate=self._reevaluate,
            version=version,
            **options,
        )
        return promote(context, request)

    def rollback(self, champion_now: int | None = None) -> Decision:
        return rollback(self.context, champion_now=champion_now)

    def withdraw(self, *versions: int) -> int | None:
        forget = pytest.importorskip("vlp_models.contrib.forgetting.forget")
        champion: int | None = forget.withdraw_versions(self.context, set(versions), "forget")
        return champion

    def aliases(self) -> dict[str, int]:
        return {k: int(v) for k, v in self.client.get_registered_model(self.model).aliases.items()}

    def actions(self) -> list[str]:
        return [entry["action"] for entry in self.ledger.entries()]

    def delete_all(self) -> None:
        """Lose the registry; the ledger stays."""
        self.client.delete_registered_model(self.model)

    @contextmanager
    def _reevaluate(self, bundle: Path, lineage: dict[str, Any]) -> Iterator[Path]:
        self.reevaluations += 1
        if self.reevaluated is None:
            raise DataError("no test data here")
        with tempfile.TemporaryDirectory() as temporary:
            yield write_evaluation(Path(temporary), [self.reevaluated])


def write_evaluation(folder: Path, items: Sequence[ItemScores]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_items(folder / "items.parquet", items)
    (folder / "scores.json").write_text(json.dumps([]))
    return folder


def main(root: str, model: str, version: str, kill: str) -> None:
    from mlflow import MlflowClient

    registry = ToyRegistry(Path(root), model)
    move = MlflowClient.set_registered_model_alias

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def move_or_die(self: Any, name: str, alias: str, number: str) -> None:
        if alias == "champion" and kill == "before the alias":
            die()
        move(self, name, alias, number)
        if alias == "champion" and kill == "after the alias":
            die()

    MlflowClient.set_registered_model_alias = move_or_die  # type: ignore[method-assign]
    if kill == "before the line":
        Ledger.append = die  # type: ignore[method-assign, assignment]
    if kill == "before the tag":
        MlflowClient.set_registered_model_tag = die  # type: ignore[method-assign, assignment]
    print("ready", flush=True)
    sys.stdin.readline()
    print(registry.promote(int(version)).action, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
