"""The model families by the name that params.yaml gives them (`models.<name>.family`), and what they train on.

Imports neither torch nor a family: commands read the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlp_models.common.plugins import Table, import_target
from vlp_models.errors import ParamsError
from vlp_models.params.schema import build

if TYPE_CHECKING:
    from torch import nn

    from vlp_models.data.shards.dataset import ShardsManifest
    from vlp_models.data.tokenizer import Tokenizer
    from vlp_models.params import Params

# family -> module:class, imported when it is used. The class has `config_class`, a frozen dataclass, and is called with
# an instance of it; if it has a `from_config`, that is called instead.
FAMILIES = Table(
    "families",
    {
        "tden": "vlp_models.models.tden.variants:TDENFamily",
        "unified_vlp": "vlp_models.models.unified_vlp.model:UnifiedVLP",
        "xgpt": "vlp_models.models.xgpt.model:XGPT",
        "vlmo": "vlp_models.models.vlmo.model:VLMo",
        "soho": "vlp_models.models.soho.model:SOHO",
    },
)
# Objectives that a model's family does not have itself: add, known -> `module:function`, of contrib/shared_objectives
SHARED_OBJECTIVES = Table("shared_objectives", {})
# family -> module:function of (a pretrained model, batches of val images) that returns figures for the report
FIGURES = Table("figures", {})
# family -> module:function that scores its model as it was loaded: a baseline of retrieval (contrib/hub_models)
BASELINES = Table("baselines", {})


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The part of a model's config that the data determines. A family gets those that its config has a field for.

    vocab_size, mask_id, cls_id, sep_id  of the tokenizer; the defaults are those of a vocabulary trained here;
                                         mask_id None: it has no [MASK]
    feature_dim, num_classes  of the regions (data/features/manifest.json); 0 for a model that reads none
    """

    vocab_size: int
    mask_id: int | None
    feature_dim: int = 0
    num_classes: int = 0
    cls_id: int = 2
    sep_id: int = 3

    @classmethod
    def of(cls, tokenizer: Tokenizer, manifest: ShardsManifest) -> DataFacts:
        return cls(
            vocab_size=tokenizer.vocab_size,
            mask_id=tokenizer.mask_id,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            feature_dim=manifest.feature_dim,
            num_classes=manifest.num_classes,
        )

    def for_config(self, config_class: type) -> dict[str, Any]:
        """Return the facts that a family's config has a field for."""
        names = {field.name for field in dataclasses.fields(config_class)}
        return {name: value for name, value in dataclasses.asdict(self).items() if name in names}


def baseline_models(params: Params, run: str) -> dict[str, str]:
    """Return name -> family of the models whose scores without training are a baseline of a run."""
    p, models = params.finetune[run], {}
    # A run without training is such a score itself.
    if p.task == "retrieval" and not p.max_epochs == p.max_steps == 0:
        for name, model in params.models.items():
            if model.family in BASELINES and model.init:
                models[name] = model.family
    return models


def family_class(family: str) -> Any:
    """Import the class of a family.

    Raises:
        ParamsError: unknown family.
    """
    if family not in FAMILIES:
        raise ParamsError(f"unknown model family `{family}`; known: {', '.join(FAMILIES)}")
    return import_target(FAMILIES[family])


def build_model(
    family: str, config: Mapping[str, Any], facts: DataFacts, where: str = "config", init: str = ""
) -> nn.Module:
    """Build a freshly initialized model; its weights depend on torch's global seed only.

    Args:
        config: `models.<name>.config` of params.yaml, or `model_config` of a checkpoint.
        where: the config's place, for messages.
        init: `models.<name>.init`, from which some families read their architecture (`StartsFromFolder`).

    Raises:
        ParamsError: an unknown family or key, a value out of range, or a config for other data.
    """
    from vlp_models.vision.batch_norm import fix_batch_norm_gradients

    model_class = family_class(family)
    if init and hasattr(model_class, "read_architecture"):
        config = {**model_class.read_architecture(init, where), **config}
    facts_of_family = facts.for_config(model_class.config_class)
    if "mask_id" in facts_of_family and facts.mask_id is None:
        raise ParamsError(
            f"{family} is trained on masked words, but the tokenizer has no mask token; name one in params.yaml, such "
            "as `tokenizer.special_tokens: {mask: <mask>}`: if the vocabulary lacks it, it is appended"
        )
    # A checkpoint's config has these keys already, and params.yaml may: both must agree with the data.
    for key, value in facts_of_family.items():
        if config.get(key, value) != value:
            raise ParamsError(f"`{where}.{key}` is {config[key]!r}, but the data has {value}")
    built = build(model_class.config_class, {**config, **facts_of_family}, where=where)
    # A family with several architectures chooses one by its config.
    model: nn.Module = getattr(model_class, "from_config", model_class)(built)
    return fix_batch_norm_gradients(model)


def own_objectives(model: nn.Module) -> tuple[str, ...]:
    """Return the objectives that a model computes itself (`Pretrains.objectives`)."""
    return tuple(getattr(model, "objectives", ()))


def known_objectives(model: nn.Module, facts: DataFacts) -> list[str]:
    """Return all objectives that a model can train on with this data, its own first."""
    return import_target(SHARED_OBJECTIVES["known"])(model, facts) if SHARED_OBJECTIVES else list(own_objectives(model))


def add_objectives(model: nn.Module, names: Iterable[str], facts: DataFacts, where: str, model_name: str) -> nn.Module:
    """Return the model itself if all these objectives are its own, else a model with heads for the others.

    Args:
        where: the objectives' place in params.yaml. model_name: of the model, in params.yaml.

    Raises:
        ParamsError: the model cannot train on an objective.
    """
    names, declared = list(names), own_objectives(model)
    others = [name for name in names if name not in declared]
    if not others:
        return model
    if not SHARED_OBJECTIVES:
        raise ParamsError(
            f"params.yaml: `{where}.{others[0]}`: {model_name} can train on {', '.join(declared)}; objectives of other "
            "families need vlp_models/contrib/shared_objectives, which is not installed"
        )
    extended: nn.Module = import_target(SHARED_OBJECTIVES["add"])(model, names, facts, where, model_name)
    return extended
