"""What the paper begins with, as SOHO's: a CNN trained on ImageNet (timm's or torchvision's names), and BERT."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from vlp_models.data.inputs import PixelInput
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError
from vlp_models.models.foreign import Asked, Imported, Taker, read_json, read_state_dict
from vlp_models.models.soho.backbone import Backbone
from vlp_models.models.soho.config import SOHOConfig
from vlp_models.models.soho.text import TextConverter
from vlp_models.params.schema import build
from vlp_models.vision.weights import read_backbone_weights

BERT_FILES = ("model.safetensors", "pytorch_model.bin")
CNN_FILES = ("backbone.safetensors", "backbone.pth")


def read_parts(source: Path, asked: Asked) -> Imported:
    """A CNN's weights file; or a folder with one called backbone.safetensors or backbone.pth, with BERT's files (of
    Hugging Face's bert-base: weights, config.json, vocab.txt), or with both. The architecture is `asked.config`'s.

    Raises:
        CheckpointError: a file is missing or damaged, is another architecture's, or of another vocabulary.
    """
    if not asked.config:
        raise CheckpointError(
            "a CNN or BERT fills a part of a model of params.yaml: --name must be one of them, of the family soho"
        )
    config = build(SOHOConfig, {**asked.config, **_facts(asked)}, where="config")
    found = {
        "cnn": [source] if not source.is_dir() else _first(source, CNN_FILES),
        "bert": _first(source, BERT_FILES) if source.is_dir() else [],
    }
    if not any(found.values()):
        raise CheckpointError(f"{source}: holds neither a CNN ({' or '.join(CNN_FILES)}) nor BERT's weights")
    weights: dict[str, Tensor] = {}
    for file in found["cnn"]:
        weights |= convert_backbone(read_state_dict(file), config)
    for file in found["bert"]:
        if Tokenizer.from_vocab(source / "vocab.txt", asked.lowercase).vocabulary != asked.vocabulary:
            raise CheckpointError(
                f"{source / 'vocab.txt'}: not the vocabulary of data/tokenizer; set tokenizer.source: vocab and "
                "tokenizer.vocab to this file, then `dvc repro shards tokenizer`"
            )
        weights |= convert_bert(read_state_dict(file), read_json(source / "config.json"), config)
    what = " and ".join(name for name, part in (("a CNN's", found["cnn"]), ("BERT's", found["bert"])) if part)
    return Imported(family="soho", what=what, config=asked.config, weights=weights, regions=False)


def read_timm_backbone(source: Path, asked: Asked) -> Imported:
    """The CNN, of the architecture that `asked.config` names, from wherever vlp_models/weight_files.py can name.

    Raises:
        MissingToolError, CheckpointError: see `read_backbone_weights` and `convert_backbone`.
    """
    config = build(SOHOConfig, {**asked.config, **_facts(asked)}, where="config")
    state = read_backbone_weights(str(source), config.backbone, Path(), "SOURCE")
    weights = convert_backbone(state, config)
    own, told = PixelInput(height=1, width=1), _data_config(config.backbone)
    notes = tuple(
        f"SOHO reads pixels with {what} {getattr(own, what)}; timm's data config of {config.backbone} has {told[what]}"
        for what in ("mean", "std")
        if tuple(told[what]) != getattr(own, what)
    )
    return Imported(family="soho", what="a CNN's", config=asked.config, weights=weights, notes=notes, regions=False)


def _data_config(backbone: str) -> dict[str, Any]:
    found: Any = timm.get_pretrained_cfg(backbone, allow_unregistered=True)
    data: dict[str, Any] = timm.data.resolve_data_config(
        {}, pretrained_cfg=found.to_dict() if found else {"mean": None}
    )
    return data


def convert_backbone(state: Mapping[str, Tensor], config: SOHOConfig) -> dict[str, Tensor]:
    """The CNN. What its classifier and the stages behind `backbone_stage` have is left out.

    Raises:
        CheckpointError: names are missing, misshapen, or none of this architecture's.
    """
    with torch.device("meta"):
        own = Backbone(config.backbone, config.backbone_stage, config.backbone_options).net.state_dict()
        whole = timm.create_model(config.backbone, pretrained=False, **config.backbone_options).state_dict()
    # torchvision began to count batches later than it began to publish weights.
    counters = {name: torch.zeros((), dtype=torch.int64) for name in own if name.endswith("num_batches_tracked")}
    taker = Taker({**counters, **state})
    weights = {name: taker.take(name, *tensor.shape) for name, tensor in own.items()}
    taker.check(f"a {config.backbone}", ignored=tuple(sorted(set(whole) - set(own))))
    return {f"backbone.net.{name}": tensor.to(own[name].dtype) for name, tensor in weights.items()}


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: SOHOConfig) -> dict[str, Tensor]:
    """Words and transformer, and the LM head where the file has it. Of more layers than the model has, the first ones:
    the paper's small models have three of twelve.

    bert: its config.json.

    Raises:
        CheckpointError: sizes that differ, or names that are missing or misshapen.
    """
    sizes = {
        "vocab_size": ("vocab_size", config.vocab_size),
        "hidden_size": ("hidden", config.hidden),
        "num_attention_heads": ("heads", config.heads),
        "intermediate_size": ("intermediate", config.intermediate),
        "max_position_embeddings": ("max_positions", config.max_positions),
    }
    wrong = [
        f"{ours} {value}, BERT's {bert.get(key)}" for key, (ours, value) in sizes.items() if bert.get(key) != value
    ]
    layers = bert.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < config.layers:
        wrong.append(f"layers {config.layers}, BERT's {layers}")
    if wrong:
        raise CheckpointError(f"BERT's sizes are not the model's: {'; '.join(wrong)}; set its config to BERT's")
    renamed = {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in state.items()
    }
    text = TextConverter(Taker(renamed), config.hidden, config.intermediate)
    text.embedding("embeddings", config.vocab_size, config.max_positions)
    text.layers("encoder.layer", config.layers)
    head = any(name.startswith("cls.predictions.") for name in renamed) and not config.plain_heads
    if head:
        text.linear("word_head.dense", "cls.predictions.transform.dense", config.hidden, config.hidden)
        text.norm("word_head.norm", "cls.predictions.transform.LayerNorm")
        text.weights["word_head.bias"] = text.taker.take("cls.predictions.bias", config.vocab_size)
    above = tuple(f"encoder.layer.{i}." for i in range(config.layers, layers or 0))
    ignored = ("pooler.", "cls.seq_relationship.", "embeddings.position_ids", "cls.predictions.decoder.")
    text.taker.check("a BERT of these sizes", ignored=(*ignored, *above, *(() if head else ("cls.",))))
    return text.weights


def _first(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [folder / name for name in names if (folder / name).exists()][:1]


def _facts(asked: Asked) -> dict[str, int]:
    known = {field.name for field in dataclasses.fields(SOHOConfig)}
    return {name: value for name, value in dataclasses.asdict(asked.facts).items() if name in known}
