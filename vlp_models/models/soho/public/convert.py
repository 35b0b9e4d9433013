"""The public code's checkpoints (researchmm/soho) as SOHO's.

Such a checkpoint is one of pretraining or of VQA; its architecture is that code's (`PublicSwitches`). It was trained
with images padded to multiples of 32 pixels and with the square padding mask; `tight_canvas` and `square_mask` do so.
On the same weights and batch the model then computes what that code computes (tests/models/test_authors_soho.py): what
it says of an image depends on the sizes of the others in its batch, too. That code's batches are of one orientation.

What is left out, and why: `neck.vq.cluster_sum`, a counter that nothing reads; `mask_l_fc.weight`, the word embeddings
once more. `dictionary.idle` counts anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.foreign import Asked, Imported, Taker, read_state_dict
from vlp_models.models.soho.text import TextConverter

# Blocks in each stage -> timm's name, of plain blocks and of bottlenecks
_RESNETS = {
    False: {(2, 2, 2, 2): "resnet18", (3, 4, 6, 3): "resnet34"},
    True: {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101", (3, 8, 36, 3): "resnet152"},
}
_NOTES = (
    "The public code, with which these weights were trained, pads images to multiples of 32 pixels (tight_canvas) and",
    "lays its padding mask on a square (square_mask), which hides a part of standing images. As there, what it says of",
    "an image then depends on the sizes of the others in its batch; with both switches false it does not.",
    "The rate of hidden codes (0.015) is that code's, no weight. Pretrain it further with view: images and",
    "captions_per_image: 2.",
)


def read_soho(file: Path, asked: Asked) -> Imported:
    """A file of the public code.

    Raises:
        CheckpointError: see `convert_soho`, `read_state_dict`.
    """
    return convert_soho(read_state_dict(file), heads=asked.heads)


def convert_soho(state: Mapping[str, Tensor], *, heads: int = 0) -> Imported:
    """A checkpoint of the public code.

    Args:
        heads: 0 for one per 64 dimensions, as in BERT; weights do not tell.

    Raises:
        CheckpointError: of another layout (lists what is missing, unexpected or misshapen), or the word embeddings
            differ from the matrix that is tied to them.
    """
    if next(iter(state), "").startswith("module."):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    taker = Taker(state)

    def size(name: str, dim: int) -> int:
        tensor = state.get(name)
        return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else 0

    bert = "language.bert"
    vocab, hidden = (size(f"{bert}.embeddings.word_embeddings.weight", dim) for dim in (0, 1))
    channels = size("neck.conv.conv.weight", 1)
    heads = heads or max(1, hidden // 64)
    if hidden % heads:
        raise CheckpointError(f"{heads} attention heads do not divide the hidden size {hidden}; give the right number")
    text = TextConverter(taker, hidden, size(f"{bert}.encoder.layer.0.intermediate.dense.weight", 0))
    positions, layers = (
        size(f"{bert}.embeddings.position_embeddings.weight", 0),
        _count(state, f"{bert}.encoder.layer."),
    )
    text.embedding(f"{bert}.embeddings", vocab, positions)
    text.layers(f"{bert}.encoder.layer", layers)

    weights = text.weights
    weights |= {f"backbone.net.{name}": t for name, t in _below(taker, "backbone.").items()}
    weights["neck.conv.weight"] = taker.take("neck.conv.conv.weight", hidden, channels, 1, 1)
    weights |= {f"neck.norm.{part}": tensor for part, tensor in _batch_norm(taker, "neck.conv.bn", hidden).items()}
    text.norm("visual_norm", "neck.ln")

    config: dict[str, Any] = {
        "vocab_size": vocab,
        "backbone": _resnet(state),
        "hidden": hidden,
        "heads": heads,
        "intermediate": text.intermediate,
        "layers": layers,
        "max_positions": positions,
        "pool_first": True,
        "square_mask": True,
        "tight_canvas": True,
        "plain_heads": True,
        "dictionary_size": 0,
    }
    answers = size("head.vqa.3.weight", 0)
    if answers:
        inner = config["fusion_hidden"] = size("head.vqa.0.weight", 0)
        text.linear("fusion.0", "head.vqa.0", inner, hidden)
        head = {
            "weight": taker.take("head.vqa.3.weight", answers, inner),
            "bias": taker.take("head.vqa.3.bias", answers),
        }
        taker.check("a VQA checkpoint of the public SOHO code")
        return Imported(
            family="soho",
            what="SOHO's vqa",
            config=config,
            weights=weights,
            task="vqa",
            head=head,
            notes=_NOTES,
            regions=False,
        )
    codes = size("neck.vq.embed", 0)
    config |= {
        "dictionary_size": codes,
        "dictionary_update": "released",
        "gate": True,
        "padding_in_dictionary": True,
        "code_scores": "cosine",
        "masked_code": "of_one_place",
        "masked_pairs": "all",
        "mvm_probability": 0.015,
    }
    weights |= {
        "hidden_cell": taker.take("neck.mask_emb.weight", 1, hidden),
        "dictionary.codes": taker.take("neck.vq.embed", codes, hidden),
        "dictionary.counts": taker.take("neck.vq.cluster_size", codes),
        "dictionary.sums": taker.take("neck.vq.embed_avg", codes, hidden),
        "gate.scores.weight": taker.take("neck.gate_fc.conv.weight", 2, 2 * hidden, 1, 1).flatten(1),
        "match_head.weight": taker.take("head.match_class.weight", 2, hidden),
    }
    weights |= {f"gate.norm.{part}": tensor for part, tensor in _batch_norm(taker, "neck.gate_fc.bn", 2).items()}
    text.linear("gate.vectors", "neck.pos_line", hidden, hidden)
    tied = taker.take("mask_l_fc.weight", vocab, hidden)
    words = weights["text_embedding.words.weight"]
    taker.check("a pretraining checkpoint of the public SOHO code", ignored=("neck.vq.cluster_sum",))
    if not torch.equal(tied, words):
        raise CheckpointError("mask_l_fc.weight is not the word embeddings, to which this layout ties it")
    return Imported(
        family="soho",
        what="SOHO's pretraining",
        config=config,
        weights=weights,
        notes=_NOTES,
        regions=False,
    )


def _batch_norm(taker: Taker, theirs: str, size: int) -> dict[str, Tensor]:
    found = {part: taker.take(f"{theirs}.{part}", size) for part in ("weight", "bias", "running_mean", "running_var")}
    return {**found, "num_batches_tracked": taker.take(f"{theirs}.num_batches_tracked").long()}


def _below(taker: Taker, prefix: str) -> dict[str, Tensor]:
    """All tensors of these names; the model they are for says whether they are the right ones."""
    found = {}
    for name, tensor in taker.state.items():
        if name.startswith(prefix):
            taken = taker.take(name, *tensor.shape)
            found[name.removeprefix(prefix)] = taken.long() if name.endswith("num_batches_tracked") else taken
    return found


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    return max(1, len({name[len(prefix) :].partition(".")[0] for name in state if name.startswith(prefix)}))


def _resnet(state: Mapping[str, Tensor]) -> str:
    """
    Raises:
        CheckpointError: a ResNet of other stages than any of the usual ones.
    """
    blocks = tuple(_count(state, f"backbone.layer{stage}.") for stage in (1, 2, 3, 4))
    names = _RESNETS["backbone.layer1.0.conv3.weight" in state]
    if blocks not in names:
        raise CheckpointError(f"backbone: stages of {blocks} blocks; known: {', '.join(map(str, names))}")
    return names[blocks]
