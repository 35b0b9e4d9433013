"""Convert the authors' checkpoints (LuoweiZhou/VLP), and BERT's or UniLM's weights, to Unified VLP.

The authors' checkpoints run with `compat_reference`. One layout serves pretraining and captioning; VQA's has a
classifier as well. Left out, because the paper's model uses none of it: BERT's pooler, rows 2 and 3 of the segments,
and the buffer of label smoothing.
"""

from __future__ import annotations

import dataclasses
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
    rename_bert,
)
from vlp_models.errors import CheckpointError
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig

GEOMETRY = 6  # columns before the class probabilities
SEGMENTS = 6
REGIONS = 100  # of every image
IGNORED = ("pooler.dense.", "crit_mask_lm_smoothed.")
NOTES = (
    "The authors' code reads 100 regions an image with the detector's confidence, and cased words; answer 0 of VQA",
    "stands for all rare answers: call it <unk> in --answers and it is never given.",
)


def read_unified_vlp(file: Path, request: ImportRequest) -> ImportedModel:
    """Read a checkpoint of the authors' code."""
    return convert_unified_vlp(read_state_dict(file), heads=request.heads, task=request.task)


def convert_unified_vlp(state: Mapping[str, Tensor], *, heads: int = 0, task: str = "") -> ImportedModel:
    """Convert a checkpoint of the authors' code.

    Args:
        heads: 0 for one per 64 dimensions, as in BERT; the file does not store it.
        task: `captioning` for a model that was fine-tuned for it; a VQA model is recognized by its classifier.

    Raises:
        CheckpointError: another layout (lists what is missing, unexpected or misshapen), a head that is not tied, or
            `task` is not what the weights are for.
    """
    named = rename_bert(state)
    mapping = BertMapping(named, 0, 0)
    size = mapping.size
    vocab, hidden = size("embeddings.word_embeddings.weight", 0), size("embeddings.word_embeddings.weight", 1)
    features, places = size("vis_embed.0.weight", 1), size("vis_pe_embed.0.weight", 1)
    heads = choose_heads(heads, hidden)
    # Only VQA has a classifier; captioning and pretraining share a layout, so the caller names the task.
    model_task = "vqa" if "ans_classifier.0.weight" in named else task
    if task not in ("", model_task) or model_task not in ("", "vqa", "captioning"):
        raise CheckpointError(f"the weights are not of a {task} model; give another --task, or none")

    sizes = BertSizes(
        vocab_size=vocab,
        hidden=hidden,
        heads=heads,
        intermediate=size("encoder.layer.0.intermediate.dense.weight", 0),
        layers=max(1, len(mapping.numbers(r"encoder\.layer\.(\d+)\."))),
        max_positions=size("embeddings.position_embeddings.weight", 0),
    )
    mapping.hidden, mapping.intermediate = hidden, sizes.intermediate
    mapping.text_embedding("embeddings", sizes, positions=sizes.max_positions, types=SEGMENTS)
    mapping.stack("stack", "encoder.layer", sizes.layers)
    last = mapping.word_head(vocab)
    mapping.linear("region_embedding.features.0", "vis_embed.0", features, features)
    mapping.linear("region_embedding.features.2", "vis_embed.2", hidden, features)
    mapping.linear("region_embedding.places", "vis_pe_embed.0", hidden, places)
    if model_task == "vqa":
        # D -> 2D -> answers: the first layer belongs to the model, the second is the task's classifier.
        mapping.linear("fusion", "ans_classifier.0", 2 * hidden, hidden)
        mapping.linear("head", "ans_classifier.2", size("ans_classifier.2.weight", 0), 2 * hidden)
    head = mapping.pop_head()
    mapping.check("a checkpoint of the authors' Unified VLP code", ignored=IGNORED)
    weights = mapping.weights
    # The output layer of masked words is tied: a copy that differs would be lost silently.
    if last is not None and not torch.equal(last, weights["text_embedding.words.weight"]):
        raise CheckpointError("cls.predictions.decoder.weight differs from the word embeddings it should be tied to")
    # (6, D) -> fewer rows: only the segments that the paper's model uses.
    weights["text_embedding.types.weight"] = select_segments(weights["text_embedding.types.weight"])

    config: dict[str, Any] = {
        "vocab_size": vocab,
        "feature_dim": features,
        # The remaining columns of the location embedding are the detector's class probabilities.
        "num_classes": places - GEOMETRY,
        "hidden": hidden,
        "heads": heads,
        "intermediate": sizes.intermediate,
        "layers": sizes.layers,
        "max_positions": sizes.max_positions,
        "region_slots": REGIONS,
        "layer_norm_eps": 1e-5,
        "compat_reference": True,
        "mask_question": True,
    }
    return ImportedModel(
        family="unified_vlp",
        origin=f"Unified VLP's {model_task or 'pretraining'}",
        config=config,
        weights=weights,
        task=model_task or None,
        head=head,
        notes=NOTES,
    )


# ---- BERT ------------------------------------------------------------------------------------------------------------


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: UnifiedVLPConfig) -> ConvertedBert:
    """Convert a BERT or UniLM for a Unified VLP of its sizes (tables 4 and 5 of the paper: "init from").

    It fills the text embedding, the stack and the LM head; the image's part keeps its initialization.

    bert: its config.json.
    """
    sizes = BertSizes.of(config, types=(2, 6), stack="stack", eps=("layer_norm_eps",))
    converted = convert_layout(state, bert, sizes)
    types = select_segments(converted.weights["text_embedding.types.weight"])
    return dataclasses.replace(converted, weights={**converted.weights, "text_embedding.types.weight": types})


def select_segments(types: Tensor) -> Tensor:
    """Return the four segments, [4, D]: image and sentence of the bidirectional objective, then of seq2seq.

    BERT's two types serve both. UniLM and the authors' code have six; their rows 2 and 3 are unused there as well.
    """
    return types[[0, 1, 0, 1] if len(types) == 2 else [0, 1, 4, 5]].clone()
