"""Which data a run read, as MLflow's dataset inputs: name, a hash of its state, where it lies, how much of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlflow import MlflowClient

LONGEST_DIGEST = 36  # MLflow's limit


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """One dataset of one split.

    digest: of what tells one state of the data from another. uri: where it lies, from the project's root. counts: rows.
    """

    name: str
    context: Literal["training", "evaluation"]
    digest: str
    uri: str
    counts: dict[str, int]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def log_inputs(client: MlflowClient, run_id: str, inputs: Sequence[DataInput]) -> None:
    """MLflow knows a dataset by name and digest: logging it again adds none."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if inputs:
        made = [
            DatasetInput(
                Dataset(
                    name=one.name,
                    digest=one.digest[:LONGEST_DIGEST],
                    source_type="local",
                    source=json.dumps({"uri": one.uri}),
                    profile=json.dumps(one.counts),
                ),
                [InputTag(key="mlflow.data.context", value=one.context)],
            )
            for one in inputs
        ]
        client.log_inputs(run_id, made)
