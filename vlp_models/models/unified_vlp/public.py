"""The public code's checkpoints (LuoweiZhou/VLP) as Unified VLP's, with `compat_reference`.

One layout serves pretraining and captioning; VQA's has a classifier besides. What is left out, all of it unused by the
paper's model: BERT's pooler, rows 2 and 3 of the segments, and label smoothing's buffer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.bert import BertSizes, Converter, plain_names, take_head, take_text
from vlp_models.models.foreign import Asked, Imported, Taker, read_state_dict
from vlp_models.models.unified_vlp.convert_bert import four_segments

GEOMETRY = 6  # columns before the class probabilities
SEGMENTS = 6
REGIONS = 100  # of every image
IGNORED = ("pooler.dense.", "crit_mask_lm_smoothed.")
_NOTES = (
    "The public code reads 100 regions an image with the detector's confidence, and cased words; VQA's answer 0 stands",
    "for all that are rare; call it <unk> in --answers and it is never given.",
)


def read_unified_vlp(file: Path, asked: Asked) -> Imported:
    """A file of the public code.

    Raises:
        CheckpointError: see `convert_public`, `read_state_dict`.
    """
    return convert_public(read_state_dict(file), heads=asked.heads, task=asked.task)


def convert_public(state: Mapping[str, Tensor], *, heads: int = 0, task: str = "") -> Imported:
    """A checkpoint of the public code.

    Args:
        heads: 0 for one per 64 dimensions, as in BERT; weights do not tell.
        task: captioning, of a model that was trained for it; a VQA model shows itself.

    Raises:
        CheckpointError: of another layout (lists what is missing, unexpected or misshapen), a head that is not tied, or
            `task` is not what the weights are.
    """
    named = plain_names(state)

    def size(name: str, dim: int) -> int:
        tensor = named.get(name)
        return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else 0

    vocab, hidden = size("embeddings.word_embeddings.weight", 0), size("embeddings.word_embeddings.weight", 1)
    features, places = size("vis_embed.0.weight", 1), size("vis_pe_embed.0.weight", 1)
    numbers = {match[1] for name in named if (match := re.match(r"encoder\.layer\.(\d+)\.", name))}
    heads = heads or max(1, hidden // 64)
    if hidden % heads:
        raise CheckpointError(f"{heads} attention heads do not divide the hidden size {hidden}; give the right number")
    answers = size("ans_classifier.2.weight", 0)
    found = "vqa" if "ans_classifier.0.weight" in named else task
    if task not in ("", found) or found not in ("", "vqa", "captioning"):
        raise CheckpointError(f"the weights are not a {task} model's, as --task says")

    sizes = BertSizes(
        vocab_size=vocab,
        hidden=hidden,
        heads=heads,
        intermediate=size("encoder.layer.0.intermediate.dense.weight", 0),
        layers=max(1, len(numbers)),
        max_positions=size("embeddings.position_embeddings.weight", 0),
        types=(SEGMENTS,),
        stack="stack",
        layers_key="layers",
    )
    taker = Taker(named)
    c = Converter(taker, hidden, sizes.intermediate)
    take_text(c, sizes, SEGMENTS)
    last = take_head(c, vocab)
    c.linear("region_embedding.features.0", "vis_embed.0", features, features)
    c.linear("region_embedding.features.2", "vis_embed.2", hidden, features)
    c.linear("region_embedding.places", "vis_pe_embed.0", hidden, places)
    head: dict[str, Tensor] = {}
    if found == "vqa":
        c.linear("fusion", "ans_classifier.0", 2 * hidden, hidden)
        c.linear("head", "ans_classifier.2", answers, 2 * hidden)
        head = {part: c.weights.pop(f"head.{part}") for part in ("weight", "bias")}
    taker.check("a checkpoint of the public Unified VLP code", ignored=IGNORED)
    if last is not None and not torch.equal(last, c.weights["text_embedding.words.weight"]):
        raise CheckpointError("cls.predictions.decoder.weight is not the word embeddings; in this layout they are one")
    c.weights["text_embedding.types.weight"] = four_segments(c.weights["text_embedding.types.weight"])
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "feature_dim": features,
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
    return Imported(
        family="unified_vlp",
        what=f"Unified VLP's {found or 'pretraining'}",
        config=config,
        weights=c.weights,
        task=found or None,
        head=head,
        notes=_NOTES,
    )
