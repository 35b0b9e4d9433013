"""The sections of params.yaml that judge, keep and hand over what was trained."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EvaluateParams:
    batch_size: int
    beam_size: int
    max_caption_len: int
    splits: list[str]
    blank_control: list[str]  # tasks scored once more with every image blanked
    bootstrap: int  # resamples behind each 95% interval
    gallery: int


@dataclass(frozen=True, kw_only=True)
class TrackingParams:
    uri: str  # sqlite:///..., or http(s)://...; empty: trainings are not logged there
    artifacts: str
    experiment: str
    model_prefix: str
    metric: dict[str, str]  # task -> the metric that says which version is better
    dataset: dict[str, str] = field(default_factory=dict)  # task -> where it is measured; else all that its runs share
