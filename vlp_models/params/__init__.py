"""params.yaml as typed, frozen dataclasses: one section per stage. Nothing else in the project reads YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vlp_models.errors import ParamsError
from vlp_models.params.cluster import ClusterParams
from vlp_models.params.data import (
    DetectorParams,
    FeaturesParams,
    ShardsParams,
    SourceParams,
    TokenizerParams,
    ValidateParams,
    WorldParams,
)
from vlp_models.params.flow import FlowParams
from vlp_models.params.incoming import DriftParams, IncomingParams
from vlp_models.params.operations import EvaluateParams, TrackingParams
from vlp_models.params.optimizer import OptimizerParams
from vlp_models.params.promotion import GateParams, PromotionParams
from vlp_models.params.recipe import ObjectiveParams, PassesParams, RampParams, RecipeParams
from vlp_models.params.schema import build, to_plain
from vlp_models.params.training import (
    FinetuneParams,
    ModelParams,
    PairsParams,
    PretrainParams,
    ScheduledSamplingParams,
    TrainerParams,
)

__all__ = [
    "ClusterParams",
    "DetectorParams",
    "DriftParams",
    "EvaluateParams",
    "FeaturesParams",
    "FinetuneParams",
    "FlowParams",
    "GateParams",
    "IncomingParams",
    "ModelParams",
    "ObjectiveParams",
    "OptimizerParams",
    "PairsParams",
    "Params",
    "PassesParams",
    "PretrainParams",
    "PromotionParams",
    "RampParams",
    "RecipeParams",
    "ScheduledSamplingParams",
    "ShardsParams",
    "SourceParams",
    "TokenizerParams",
    "TrackingParams",
    "TrainerParams",
    "ValidateParams",
    "WorldParams",
    "build",
    "load_params",
    "to_plain",
]


@dataclass(frozen=True, kw_only=True)
class Params:
    generate: dict[str, WorldParams]
    data: dict[str, SourceParams]
    validate: ValidateParams
    detector: DetectorParams
    features: FeaturesParams
    tokenizer: TokenizerParams
    shards: ShardsParams
    model: ModelParams
    trainer: TrainerParams
    pretrain: PretrainParams
    scheduled_sampling: ScheduledSamplingParams
    finetune: dict[str, FinetuneParams]
    evaluate: EvaluateParams
    tracking: TrackingParams
    promotion: PromotionParams = field(default_factory=PromotionParams)
    cluster: ClusterParams = field(default_factory=ClusterParams)
    incoming: IncomingParams = field(default_factory=IncomingParams)
    drift: DriftParams = field(default_factory=DriftParams)
    flow: FlowParams = field(default_factory=FlowParams)


def load_params(path: Path | str = "params.yaml") -> Params:
    """Reads and checks params.yaml.

    Raises:
        ParamsError: the file is missing, is no YAML mapping, or breaks the schema.
    """
    import yaml

    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(f"{path}: no such file; run from the project's root, or pass --params") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected one section per stage, found {type(raw).__name__}")
    return build(Params, raw, where="", file=str(path))
