"""The sections of params.yaml that judge, keep and hand over what was trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from vlp_models.params.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Split, Word


@dataclass(frozen=True, kw_only=True)
class EvaluateParams:
    batch_size: PositiveInt = 100
    beam_size: PositiveInt = 3
    length_penalty: NonNegativeFloat = 0.0  # a beam's score is divided by length ** this; 0: as in the papers
    # Captions drawn beside the beam's, of which the one most like the others is said (metrics/alike.py); 0: the beam's
    consensus_samples: NonNegativeInt = 0
    consensus_temperature: Annotated[float, Field(ge=0.01, le=100)] = 0.6  # at which they are drawn
    # Above 0: the one most like the captions of so many photos of the run's that look alike (tasks/caption_memory.py)
    consensus_neighbors: NonNegativeInt = 0
    max_caption_len: PositiveInt = 24
    splits: list[Split] = field(default_factory=lambda: ["val", "test"])
    blind_baseline: list[str] = field(default_factory=list)  # tasks scored once more with every image blanked
    bootstrap: PositiveInt = 1000  # resamples behind each 95% interval
    gallery: NonNegativeInt = 24

    def __post_init__(self) -> None:
        if self.consensus_neighbors and not self.consensus_samples:
            raise ValueError(
                "`consensus_neighbors` selects among sampled captions: set `consensus_samples` as well, to 20 for a start"
            )


@dataclass(frozen=True, kw_only=True)
class TrackingParams:
    uri: str  # sqlite:///..., or http(s)://...; empty: trainings are not logged there
    artifacts: str
    experiment: Annotated[str, Field(min_length=1)]
    model_prefix: Word
    metric: dict[str, str]  # task -> the metric that says which version is better
    dataset: dict[str, str] = field(default_factory=dict)  # task -> where it is measured; else all that its runs share
