"""What holds in each family: protocols, groups, seeds, refused configs, and images without regions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import soho_toys
import tiny_tden
import tiny_unified_vlp
import tiny_vlmo
import tiny_xgpt
import torch
from model_checks import PROTOCOLS, protocols_of

from vlp_models.errors import ParamsError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.xgpt.model import XGPT

BUILD: dict[str, Callable[..., Any]] = {
    "tden": tiny_tden.build_tiny,
    "unified_vlp": tiny_unified_vlp.tiny_unified_vlp,
    "xgpt": tiny_xgpt.tiny_xgpt,
    "vlmo": tiny_vlmo.build_tiny,
    "soho": soho_toys.build,
}
SIZES: dict[str, tuple[dict[str, Any], DataFacts]] = {
    "tden": (tiny_tden.TINY, tiny_tden.FACTS),
    "unified_vlp": (tiny_unified_vlp.SIZES, tiny_unified_vlp.FACTS),
    "xgpt": (tiny_xgpt.SIZES, tiny_xgpt.FACTS),
    "vlmo": (tiny_vlmo.TINY, tiny_vlmo.FACTS),
    "soho": (soho_toys.TINY, soho_toys.FACTS),
}
ABILITIES = {"LoadsPartially", "LocatesStates", "Pretrains", "ReadsSeveralImages"}  # of every family
PAIRS = {"Fuses", "FusesWords", "GroupsParameters", "ScoresPairs"}


@pytest.mark.parametrize(
    ("family", "own"),
    [
        (
            "tden",
            set(PROTOCOLS)
            - {"GeneratesByMasks", "StoresFinished", "Contrasts", "EmbedsPairs", "EncodesCells"}
            - {"ContrastsBySigmoid", "StartsFromFolder"},
        ),
        (
            "unified_vlp",
            (PAIRS - {"ScoresPairs"}) | {"Generates", "GeneratesByMasks", "PredictsMaskedWords", "StoresFinished"},
        ),
        ("xgpt", {"Generates", "PredictsMaskedWords"}),
        ("vlmo", PAIRS | {"Contrasts", "Embeds", "EmbedsPairs", "EncodesCells"}),
        ("soho", PAIRS | {"EncodesCells"}),
    ],
)
def test_protocols(family: str, own: set[str]) -> None:
    assert protocols_of(BUILD[family]()) == ABILITIES | own


@pytest.mark.parametrize(
    ("family", "names", "configs"),
    [
        ("tden", "heads", [{}, {"separate_ffn": True, "fusion": "product"}, {"structure": "single_stream"}]),
        ("unified_vlp", "regions stack heads", [{}]),
        (
            "vlmo",
            "image_embedding text_embedding attention vision_expert language_expert vision_language_expert heads norm "
            "position_bias",
            [{}],
        ),
        ("soho", "cnn_stem cnn neck transformer heads", [{}, soho_toys.PUBLIC, {"fusion_hidden": 8}]),
    ],
)
def test_each_parameter_is_in_one_group(family: str, names: str, configs: list[dict[str, Any]]) -> None:
    for config in configs:
        model = BUILD[family](**config)
        groups = model.parameter_groups()
        assert set(groups) >= set(names.split()) and (family == "tden" or len(groups) == len(names.split()))
        grouped = [id(p) for parameters in groups.values() for p in parameters]
        assert sorted(grouped) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("family", BUILD)
def test_one_seed_one_model(family: str) -> None:
    first, again, other = (BUILD[family](seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    words = "text_embedding.words.weight"
    assert not torch.equal(first[words], other[words])


def test_signals_of_xgpt_start_at_zero() -> None:
    model = build_model("xgpt", {**tiny_xgpt.SIZES, "signal": "query"}, tiny_xgpt.FACTS)
    assert isinstance(model, XGPT)
    assert all(block.signal is not None and not block.signal.any() for block in model.decoder_layers())


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("tden", {"hiden": 64}, "did you mean `hidden`"),
        ("tden", {"hidden": 130, "heads": 4}, "multiple of heads"),
        ("tden", {"decoder_visual_source": "object_encoders"}, "did you mean `object_encoder`"),
        ("tden", {"vocab_size": 31}, "the data has 30"),
        ("tden", {"mask_id": 30}, "outside the vocabulary"),
        ("tden", {"structure": "two_stream", "separate_ffn": True}, "cannot be combined with `structure: two_stream`"),
        ("tden", {"ism_source": "cross_modal", "fusion": "product"}, "`fusion: product` is for the authors' code"),
        ("tden", {"feature_dropout": 1.0}, "feature_dropout"),
        ("unified_vlp", {"heads": 3}, "multiple of heads"),
        ("unified_vlp", {"max_positions": 10}, "must hold region_slots"),
        ("unified_vlp", {"max_masked": -1}, "max_masked"),
        ("unified_vlp", {"compat_reference": True, "region_classes": "none"}, "region_classes: input"),
        ("unified_vlp", {"feature_dropout": 1.0}, "feature_dropout"),
        ("xgpt", {"hidden": 130, "heads": 4}, "multiple of heads"),
        ("xgpt", {"structure": "enc", "cross_attention": "separate"}, "one attention over source and target"),
        ("xgpt", {"structure": "enc", "signal": "query"}, "set `signal: kv`"),
        ("xgpt", {"cross_attention": "shared_merged", "signal": "query"}, "set `signal: kv`"),
        ("xgpt", {"mask_id": 30}, "mask_id 30 is outside the vocabulary of 30"),
        ("vlmo", {"side": 18}, "side"),
        ("vlmo", {"heads": 3}, "heads"),
        ("vlmo", {"vl_start": 9}, "vl_start"),
        ("vlmo", {"mask_id": 31}, "mask_id"),
        ("vlmo", {"stem": "convolutions"}, r"patch \(4\) must be a multiple of 8"),
        ("vlmo", {"stem_channels": [4, 6]}, "three widths"),
        ("vlmo", {"contrast": "both", "vl_start": 3}, "vision-language experts"),
        ("soho", {"height": 8}, "a cell of `resnet18`"),
        ("soho", {"backbone": "resnet17"}, "list_models"),
        ("soho", {"backbone_stage": 7}, "feature maps 0 to 4"),
        ("soho", {"backbone_options": {"pretrained": True}}, "import-checkpoint"),
        *(
            (family, {"crop_scale": shares}, "crop_scale")
            for family in ("vlmo", "soho")
            for shares in ([0.5], [0.0, 1.0], [0.9, 0.5], [0.5, 1.5])
        ),
    ],
)
def test_wrong_configs_are_explained(family: str, config: dict[str, Any], message: str) -> None:
    sizes, facts = SIZES[family]
    if "mask_id" in config:
        facts = dataclasses.replace(facts, mask_id=config["mask_id"])
    with pytest.raises(ParamsError, match=message):
        build_model(family, {**sizes, **config}, facts)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *(("tden", {"structure": structure}) for structure in ("decoupled", "two_stream", "single_stream")),
        *(("unified_vlp", config) for config in tiny_unified_vlp.VARIANTS.values()),
        *(("xgpt", tiny_xgpt.VARIANTS[name]) for name in ("paper", "one stack")),
    ],
)
def test_image_without_regions_is_finite(family: str, config: dict[str, Any]) -> None:
    model, batch = BUILD[family](**config), tiny_tden.random_batch()
    batch = tiny_unified_vlp.scored(batch) if family == "unified_vlp" else batch
    empty = dataclasses.replace(batch, image=dataclasses.replace(batch.image, mask_BR=batch.image.mask_BR & False))
    generator, asked = torch.Generator().manual_seed(0), dict.fromkeys(model.objectives)
    losses = model.pretraining_losses(empty, objectives=asked, generator=generator, mask_probability=0.15)
    values = [loss.mean for loss in losses.values()]
    values.append(model.generation_logits(empty.image, empty.text)[empty.text.mask_BT].mean())
    if family != "xgpt":
        values.append(model.fuse(empty.image, empty.text).pooled_BP.mean())
    if family == "tden":
        values.append(model.score(model.encode_image(empty.image), empty.text, torch.arange(4)).mean())
    torch.stack(values).sum().backward()
    assert all(value.isfinite() for value in values)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
