"""What params.yaml names is looked up before anything is computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.errors import ParamsError
from vlp_models.models.meta_model import meta_model
from vlp_models.params import Params, parse_params
from vlp_models.pipeline.check_params import check_runs
from vlp_models.training.optim import named_groups

ROOT = Path(__file__).parents[2]


def sections(**timm: str) -> Params:
    """params.yaml with features of timm."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["features"] |= {"source": "timm", "timm": timm}
    return parse_params(raw)


def test_unknown_timm_model_is_refused() -> None:
    check_runs(sections(model="tf_efficientnet_lite0", weights="timm:tf_efficientnet_lite0.in1k"))
    with pytest.raises(ParamsError, match=r"`features.timm.model: tf_efficientnet_light0`: .* `tf_efficientnet_lite0`"):
        check_runs(sections(model="tf_efficientnet_light0"))
    with pytest.raises(ParamsError, match=r"`features.timm.weights: timm:resnet1800`: timm has no model"):
        check_runs(sections(model="resnet18", weights="timm:resnet1800"))


def test_an_objective_that_an_encoder_has_no_classes_for_is_refused_before_features_are_made() -> None:
    for model in ("vit_base_patch16_siglip_224", "vit_small_patch14_dinov2", "vit_base_patch32_clip_224.openai"):
        params = sections(model=model, weights="timm")
        with pytest.raises(ParamsError, match=r"objectives\.moc` needs class probabilities.*`--set pretrain\.tden\."):
            check_runs(params)
        del params.pretrain["tden"].recipe.objectives["moc"]
        check_runs(params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain": {"tden": {"max_text_len": 80}}}, r"`pretrain\.tden\.max_text_len: 80`: this tden .* 60 tokens"),
        ({"finetune": {"tden-vqa": {"max_text_len": 61}}}, r"`finetune\.tden-vqa\.max_text_len: 61`: .* 60 tokens"),
        ({"finetune": {"tden-vqa": {"config": {"max_positions": 20}}}}, r"tden-vqa\.max_text_len: 24`: .* 20 tokens"),
        ({"evaluate": {"max_caption_len": 64}}, r"`evaluate\.max_caption_len: 64`: this tden .* 60 tokens"),
        (
            {"finetune": {"tden-vqa": {"config": {"max_position": 20}}}},
            r"`finetune\.tden-vqa\.config\.max_position`; did you mean `max_positions`",
        ),
        (
            {
                "finetune": {
                    "tden-vqa": {"config": {"max_positions": 30}},
                    "again": {"task": "vqa", "start": "finetune/tden-vqa", "max_text_len": 31},
                }
            },
            r"`finetune\.again\.max_text_len: 31`: .* 30 tokens; raise `max_positions` in `finetune\.tden-vqa\.config`",
        ),
        (
            {"augment": {"own": {"start": "finetune/tden-captioning", "max_caption_len": 61}}},
            r"`augment\.own\.max_caption_len: 61`: this tden .* 60 tokens",
        ),
    ],
)
def test_texts_longer_than_the_positions_are_refused(changes: dict[str, Any], message: str) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["models"]["tden"]["config"]["max_positions"] = 60
    check_runs(parse_params(raw))
    for section, sections in changes.items():
        for name, value in sections.items():
            before = raw.setdefault(section, {}).get(name, {})
            raw[section][name] = {**before, **value} if isinstance(value, dict) else value
    with pytest.raises(ParamsError, match=message):
        check_runs(parse_params(raw))


OPTIMIZER = {"lr": 1e-3}
EMA_AND_SNAPSHOTS = {"snapshots": {"keep": 2}, "optimizer": {**OPTIMIZER, "ema_decay": 0.9}}
WRITER = "finetune.tden-captioning"
FSDP = {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("changes", "message"),  # section or run of params.yaml -> what is changed in it
    [
        (
            {"pretrain.tden": {"optimizer": {**OPTIMIZER, "groups": {"imageencoder": {"frozen": True}}}}},
            "`pretrain.tden.optimizer.groups.imageencoder`: the model has no such part",
        ),
        (
            {"finetune.tden-vqa": {"optimizer": {**OPTIMIZER, "groups": {"haed": {"lr": 0.1}}}}},
            "`finetune.tden-vqa.optimizer.groups.haed`: the model has no such part; did you mean `head`",
        ),
        (
            {WRITER: {"optimizer": {**OPTIMIZER, "groups": {"head": {"lr": 0.1}}}}},
            f"`{WRITER}.optimizer.groups.head`: the model has no such part",
        ),
        (
            {"pretrain.tden": {"recipe": {"mix": "sum", "objectives": {"mlm": {"share": 2}}}}},
            "`pretrain.tden.recipe.objectives.mlm.share: 2.0` has no meaning for `mix: sum`",
        ),
        (
            {"pretrain.tden": {"recipe": {"mix": "sum", "reuse_batch": True, "objectives": {"mlm": 1.0, "msg": 1.0}}}},
            "`pretrain.tden.recipe.reuse_batch` requires `mix: alternate`, not sum",
        ),
        (
            {"pretrain.tden": {"recipe": {"objectives": {"msg": 1.0}}, "scheduled_sampling": {"scheme": "b"}}},
            "`pretrain.tden.scheduled_sampling.scheme: b`",
        ),
        (
            {
                "models.xgpt": {"family": "xgpt"},
                "pretrain.xgpt": {"model": "xgpt", "recipe": {"objectives": {"ic": 1.0}, "mask_probability": 0.3}},
            },
            "`pretrain.xgpt.recipe.mask_probability` has no effect on xgpt: `imlm_fragment` and `ida_share`",
        ),
        (
            {"pretrain.tden": {"view": "images", "captions_per_image": 2}},
            "`pretrain.tden.captions_per_image: 2`: `tden` trains on one text per image",
        ),
        (
            {"finetune.search": {"task": "retrieval", "start": "pretrain/tden", "options": {"temperature": 0.1}}},
            "`finetune.search`: `options.temperature` does not apply to the model `tden`, which trains with a margin",
        ),
        (
            {WRITER: {"options": {"targets": "masked"}}},
            f"`{WRITER}`: `options.targets: masked`: the model `tden` does not generate by masked",
        ),
        (
            {WRITER: {"options": {"label_smoothing": 1.5}}},
            f"`{WRITER}.options`: `label_smoothing: 1.5` must be 0 to below 1",
        ),
        *(
            ({run: EMA_AND_SNAPSHOTS}, f"`{run}`: `snapshots.keep` and `optimizer.ema_decay` would each replace the")
            for run in ("finetune.tden-vqa", "pretrain.tden")
        ),
        ({"trainer": FSDP, WRITER: {"lora": {"rank": 8, "targets": ["qkv"]}}}, f"`{WRITER}.lora` does not work with"),
        (
            {"trainer": FSDP, WRITER: {"options": {"self_critical": {}}}},
            f"`{WRITER}.options.self_critical` does not work with `trainer.strategy: fsdp`",
        ),
        ({WRITER: {"lora": {"targets": ["qkv"]}}}, "`lora` has no `rank`, so it would train all weights"),
        (
            {
                "tokenizer": {"source": "vocab", "vocab": "data/raw/gpt2", "special_tokens": {"mask": "<m>"}},
                "models.tden": {"text_init": "data/raw/gpt2"},
            },
            "`models.tden.text_init` does not work with `tokenizer.special",
        ),
        (
            {"evaluate": {"tasks": {"vqa": {"beam_size": 5}}}},
            "`evaluate.tasks.vqa.beam_size`: vqa has no such option; it does not search",
        ),
        (
            {"evaluate": {"tasks": {"vqa": {"beam_sise": 5}}}},
            "unknown key `evaluate.tasks.vqa.beam_sise`; did you mean `beam_size`?",
        ),
        ({"evaluate": {"tasks": {"vqqa": {}}}}, "`evaluate.tasks: vqqa` is unknown; did you mean `vqa`?"),
        (
            {"evaluate": {"tasks": {"captioning": {"consensus_neighbors": 3}}}},
            "`evaluate.tasks.captioning`: `consensus_neighbors` selects",
        ),
        ({"evaluate": {"metrics": ["length"]}}, "`evaluate.metrics: length` is unknown"),
        ({"evaluate": {"blind_baseline": ["vqqa"]}}, "`evaluate.blind_baseline: vqqa` is unknown; did you mean `vqa`?"),
        ({"tracking": {"metric": {"vqqa": "accuracy"}}}, "`tracking.metric: vqqa` is unknown; did you mean `vqa`?"),
        ({"tracking": {"dataset": {"vqqa": "scenes"}}}, "`tracking.dataset: vqqa` is unknown; did you mean `vqa`?"),
        ({"trainer": {"accelerator": "gup"}}, "`trainer.accelerator"),
        (
            {"evaluate": {"tasks": {"captioning": {"max_caption_len": 999}}}},
            "`evaluate.tasks.captioning.max_caption_len",
        ),
    ],
)
def test_what_a_stage_would_refuse_is_refused_with_its_key(changes: dict[str, Any], message: str) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    for key, values in changes.items():
        section, _, name = key.partition(".")
        entries = raw.setdefault(section, {})
        if name:
            entries[name] = {**entries.get(name, {}), **values}
        else:
            entries.update(values)
    with pytest.raises(ParamsError, match=re.escape(message)):
        check_runs(parse_params(raw))


def test_a_run_that_freezes_every_part_is_refused() -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    parts = named_groups(meta_model(parse_params(raw).models["tden"]))
    optimizer = {"lr": 1e-3, "groups": {part: {"frozen": True} for part in parts}}
    raw["finetune"]["tden-vqa"]["optimizer"] = optimizer  # its head is trained
    check_runs(parse_params(raw))
    raw["finetune"]["tden-captioning"]["optimizer"] = optimizer
    with pytest.raises(ParamsError, match=r"`finetune\.tden-captioning\.optimizer\.groups` freezes every part"):
        check_runs(parse_params(raw))
