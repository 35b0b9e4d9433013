"""Convert the authors' checkpoints (researchmm/soho), and the CNN and BERT of its release, to SOHO.

The authors' checkpoint is of pretraining or VQA, and its architecture is theirs (`PublicSwitches` in soho/config.py).
It was trained with images padded to multiples of 32 pixels and with a square padding mask; `tight_canvas` and
`square_mask` do the same. On the same weights and batch the model then computes what that code computes
(test_authors_soho.py): an image's output depends on the sizes of the other images in its batch, too. That code's
batches hold images of one orientation.

Left out: `neck.vq.cluster_sum`, a counter that nothing reads, and `mask_l_fc.weight`, a copy of the word embeddings.
`dictionary.idle` restarts at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.common.state_dicts import read_state_dict
from vlp_models.contrib.public_weights.bert import (
    BertMapping,
    BertSizes,
    ConvertedBert,
    choose_heads,
    convert_layout,
    read_bert,
)
from vlp_models.contrib.public_weights.timm import convert_cnn
from vlp_models.data.bert_folder import WEIGHTS
from vlp_models.errors import CheckpointError
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.soho.config import IMAGENET, SOHOConfig
from vlp_models.vision.pretrained_weights import data_config, pretrained_model_name, read_backbone_weights

# Whether the blocks are bottlenecks -> blocks in each stage -> timm's name
_RESNETS = {
    False: {(2, 2, 2, 2): "resnet18", (3, 4, 6, 3): "resnet34"},
    True: {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101", (3, 8, 36, 3): "resnet152"},
}
CNN_FILES = ("backbone.safetensors", "backbone.pth")
_NOTES = (
    "These weights were trained with the authors' code, which pads images to multiples of 32 pixels (tight_canvas) and",
    "computes its padding mask on a square (square_mask), which hides a part of portrait images. As in that code, the",
    "output for an image depends on the sizes of the other images in its batch; with both switches false it does not.",
    "The MVM masking rate (0.015) is taken from that code; the file does not store it. Pretrain it further with",
    "view: images and captions_per_image: 2.",
)


def read_soho(file: Path, request: ImportRequest) -> ImportedModel:
    """Read a checkpoint of the authors' code."""
    return convert_soho(read_state_dict(file), heads=request.heads)


def convert_soho(state: Mapping[str, Tensor], *, heads: int = 0) -> ImportedModel:
    """Convert a checkpoint of the authors' code.

    Args:
        heads: 0 for one per 64 dimensions, as in BERT; the file does not store it.

    Raises:
        CheckpointError: another layout (lists what is missing, unexpected or misshapen), or the word embeddings differ
            from the matrix that is tied to them.
    """
    # The hidden size and the feed-forward width are set below, once they are known from the tensors.
    mapping = BertMapping(state, 0, 0)
    size, bert = mapping.size, "language.bert"
    vocab, hidden = (size(f"{bert}.embeddings.word_embeddings.weight", dim) for dim in (0, 1))
    sizes = BertSizes(
        vocab_size=vocab,
        hidden=hidden,
        heads=choose_heads(heads, hidden),
        intermediate=size(f"{bert}.encoder.layer.0.intermediate.dense.weight", 0),
        # At least 1 layer: a state dict without any then fails with the names that it lacks.
        layers=max(1, len(mapping.numbers(r"language\.bert\.encoder\.layer\.(\d+)\."))),
        max_positions=size(f"{bert}.embeddings.position_embeddings.weight", 0),
    )
    mapping.hidden, mapping.intermediate = hidden, sizes.intermediate
    mapping.text_embedding(f"{bert}.embeddings", sizes, positions=sizes.max_positions, types=2)
    mapping.stack("transformer", f"{bert}.encoder.layer", sizes.layers)
    # The CNN's tensors are taken as they are: building the model with this config checks them.
    for name, tensor in state.items():
        if name.startswith("backbone."):
            weight = mapping.take(name, *tensor.shape)
            # `take` returns float32, but this counter of batches is an integer.
            weight = weight.long() if name.endswith("num_batches_tracked") else weight
            mapping.weights[f"backbone.net.{name.removeprefix('backbone.')}"] = weight
    channels = size("neck.conv.conv.weight", 1)
    mapping.weights["neck.conv.weight"] = mapping.take("neck.conv.conv.weight", hidden, channels, 1, 1)
    mapping.batch_norm("neck.norm", "neck.conv.bn", hidden)
    mapping.norm("visual_norm", "neck.ln", hidden)
    # The switches of the authors' architecture; the same for all of its checkpoints.
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "backbone": _find_resnet(mapping),
        "hidden": hidden,
        "heads": sizes.heads,
        "intermediate": sizes.intermediate,
        "layers": sizes.layers,
        "max_positions": sizes.max_positions,
        "pool_first": True,
        "square_mask": True,
        "tight_canvas": True,
        "plain_heads": True,
        "dictionary_size": 0,
    }
    # `size` is 0 for a missing tensor: only VQA's checkpoint has this layer.
    task = "vqa" if size("head.vqa.3.weight", 0) else None
    config |= _map_vqa(mapping) if task else _map_pretraining(mapping, vocab)
    return ImportedModel(
        family="soho",
        origin=f"SOHO's {task or 'pretraining'}",
        config=config,
        head=mapping.pop_head(),
        weights=mapping.weights,
        task=task,
        notes=_NOTES,
        reads_regions=False,
    )


def _map_vqa(mapping: BertMapping) -> dict[str, Any]:
    """Map VQA's two layers, the second as `head.`; return the config keys that follow from them."""
    inner, answers = mapping.size("head.vqa.0.weight", 0), mapping.size("head.vqa.3.weight", 0)
    # The first of VQA's two layers belongs to the model, the second is the classifier.
    mapping.linear("fusion.0", "head.vqa.0", inner, mapping.hidden)
    mapping.linear("head", "head.vqa.3", answers, inner)
    mapping.check("a VQA checkpoint of the authors' SOHO code")
    return {"fusion_hidden": inner}


def _map_pretraining(mapping: BertMapping, vocab: int) -> dict[str, Any]:
    """Map the dictionary and the objectives' heads; return the config keys that follow from them."""
    take, hidden, codes = mapping.take, mapping.hidden, mapping.size("neck.vq.embed", 0)
    mapping.weights |= {
        "hidden_cell": take("neck.mask_emb.weight", 1, hidden),
        "dictionary.codes": take("neck.vq.embed", codes, hidden),
        "dictionary.counts": take("neck.vq.cluster_size", codes),
        "dictionary.sums": take("neck.vq.embed_avg", codes, hidden),
        # (2, 2D, 1, 1) -> (2, 2D): a 1x1 convolution is a linear layer.
        "gate.scores.weight": take("neck.gate_fc.conv.weight", 2, 2 * hidden, 1, 1).flatten(1),
        "match_head.weight": take("head.match_class.weight", 2, hidden),
    }
    mapping.batch_norm("gate.norm", "neck.gate_fc.bn", 2)
    mapping.linear("gate.vectors", "neck.pos_line", hidden, hidden)
    tied = take("mask_l_fc.weight", vocab, hidden)
    # `check` comes first: a missing tensor is empty and would fail the comparison with the wrong message.
    mapping.check("a pretraining checkpoint of the authors' SOHO code", ignored=("neck.vq.cluster_sum",))
    if not torch.equal(tied, mapping.weights["text_embedding.words.weight"]):
        raise CheckpointError("mask_l_fc.weight differs from the word embeddings it should be tied to")
    return {
        "dictionary_size": codes,
        "dictionary_update": "released",
        "gate": True,
        "padding_in_dictionary": True,
        "code_scores": "cosine",
        "masked_code": "of_one_place",
        "masked_pairs": "all",
        "mvm_probability": 0.015,
    }


def _find_resnet(mapping: BertMapping) -> str:
    """Return timm's name of the ResNet whose stages have this many blocks."""
    # How many blocks each of the four stages has.
    counts = (len(mapping.numbers(rf"backbone\.layer{stage}\.(\d+)\.")) for stage in (1, 2, 3, 4))
    blocks = tuple(max(1, count) for count in counts)
    # Only bottleneck blocks have a third convolution.
    names = _RESNETS["backbone.layer1.0.conv3.weight" in mapping.state]
    if blocks not in names:
        raise CheckpointError(f"unsupported ResNet: blocks per stage {blocks}; supported: {', '.join(map(str, names))}")
    return names[blocks]


# ---- The CNN and BERT that the paper starts from -----------------------------------------------------------------


def read_timm_backbone(source: Path, request: ImportRequest) -> ImportedModel:
    """Read the CNN that `backbone` of `request.config` names, with timm's mean and deviation of its pixels."""
    config = request.build_config(SOHOConfig)
    state = read_backbone_weights(str(source), config.backbone, request.root, request.where)
    weights = convert_backbone(state, config)
    # The pixels' mean and deviation are the weights' own, unless the config sets others.
    name = pretrained_model_name(str(source), config.backbone)
    pixels = {key: list(value) for key, value in data_config(name).items() if key in IMAGENET}
    notes = tuple(
        f"config.{key} is {request.config[key]}; timm's data config of {name} has {value}"
        for key, value in pixels.items()
        if list(request.config.get(key, value)) != value
    )
    return ImportedModel(
        family="soho",
        origin="a CNN's",
        config={**pixels, **request.config},
        weights=weights,
        notes=notes,
        reads_regions=False,
    )


def convert_backbone(state: Mapping[str, Tensor], config: SOHOConfig) -> dict[str, Tensor]:
    """Convert the CNN; the weights of its classifier and of the stages after `backbone_stage` are left out.

    Raises:
        CheckpointError: names are missing, misshapen, or not of this architecture.
    """
    return convert_cnn(state, config.backbone, config.backbone_stage, config.backbone_options, "backbone")


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: SOHOConfig) -> ConvertedBert:
    """Convert a BERT for a SOHO of its sizes; the paper's small models have the first three of its twelve layers.

    bert: its config.json.
    """
    return convert_layout(state, bert, BertSizes.of(config, stack="transformer", head=not config.plain_heads))


def read_parts(source: Path, request: ImportRequest) -> ImportedModel:
    """Read a CNN's weights file, or a folder with a CNN (backbone.safetensors or backbone.pth), BERT's files (Hugging
    Face's weights, config.json, vocab.txt), or both. The architecture is `request.config`'s.

    Raises:
        CheckpointError: a file is missing or damaged, or is of another architecture or vocabulary.
    """
    if request.family != "soho":
        raise CheckpointError(
            "`--name` must be a model of family soho in params.yaml: a CNN or BERT fills a part of it"
        )
    config = request.build_config(SOHOConfig)
    cnn_files = [file for name in CNN_FILES if (file := source / name).exists()] if source.is_dir() else [source]
    has_bert = source.is_dir() and any((source / name).exists() for name in WEIGHTS)
    if not cnn_files and not has_bert:
        raise CheckpointError(f"{source}: holds neither a CNN ({' or '.join(CNN_FILES)}) nor BERT's weights")
    weights: dict[str, Tensor] = {}
    if cnn_files:
        weights |= convert_backbone(read_state_dict(cnn_files[0]), config)
    if has_bert:
        weights |= read_bert(source, request).weights
    parts = " and ".join(name for name, part in (("a CNN's", cnn_files), ("BERT's", has_bert)) if part)
    return ImportedModel(family="soho", origin=parts, config=request.config, weights=weights, reads_regions=False)
