"""Recreates the weights and inputs on which SOHO's public code (researchmm/soho) was run, and this model's outputs.

tests/golden/authors_soho.json has the names and shapes of that code's checkpoints, these sizes, and what it computed.
A weight is drawn from a generator of its name's checksum, an image from one of its case's: NumPy's `RandomState`, whose
streams stay as they are.

Shape suffixes: B images, P pairs, T text tokens, R cells of an image.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.convert import ImportedModel
from vlp_models.models.soho import variants as public
from vlp_models.models.soho.pairs import Pairs
from vlp_models.objectives.loss import soft_label_answers

SIZES = {"vocab": 37, "hidden": 24, "heads": 3, "intermediate": 40, "layers": 2, "positions": 20, "codes": 20}
SIZES |= {"channels": 4, "answers": 11, "tokens": 16}
MASK_ID = 4
FACTS = DataFacts(vocab_size=SIZES["vocab"], mask_id=MASK_ID)
SIDE = 448  # of this model's canvas, which is cropped to the batch's images
OWN = {
    "backbone_options": {"channels": [SIZES["channels"] << i for i in range(4)]},
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "fusion_dropout": 0.0,
    "height": SIDE,
    "width": SIDE,
}

# Heights and widths of a batch's images. The public code pads each to multiples of 32, then to the largest.
CASES = {
    "lying": [(280, 410), (288, 300), (200, 330)],
    "standing": [(410, 280), (300, 288), (330, 200)],
    "square": [(288, 288), (250, 288), (270, 190)],
}
# The random choices of hidden cells: the cell position whose code is hidden, and the pairs in which it is.
PLACE = {"lying": 20, "standing": 5, "square": 6}
HIDDEN_P = torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1], dtype=torch.bool)
OWNER_P = torch.tensor([0, 0, 1, 1, 2, 2] * 2)
# The public code's row of each pair: image by image, matched and mismatched texts in turn.
ROW_P = torch.tensor([0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11])
LENGTHS = torch.tensor([11, 5, 8, 4, 9, 7])


def drawn(name: str, *shape: int) -> Tensor:
    """N(0, 1), float64."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape))


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return one tensor of a checkpoint, scaled so that every path matters."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    if name == "mask_l_fc.weight":  # tied
        name = "language.bert.embeddings.word_embeddings.weight"
    values = drawn(name, *shape)
    last = name.rpartition(".")[2]
    if last == "running_var":
        values = (0.2 * values).exp()
    elif last in ("running_mean", "bias"):
        values = 0.1 * values
    elif last in ("cluster_size", "cluster_sum"):
        values = 0.5 + values.abs()
    elif last == "weight" and len(shape) == 1:
        values = 1 + 0.1 * values
    elif "embeddings" in name:
        values = 0.3 * values
    elif name.startswith("backbone"):
        if shape[-1] > 1:  # zero mean, or all cells of an image would look alike
            values = values - values.mean((2, 3), keepdim=True)
        values = values * (2 / np.prod(shape[1:])) ** 0.5
    elif name == "neck.conv.conv.weight":  # likewise; and features of the codes' size, so that positions count
        values = 0.06 * (values - values.mean(1, keepdim=True))
    elif last == "weight" and "mask_emb" not in name:
        values = values * np.prod(shape[1:]) ** -0.5
    return values.float()


def checkpoint(shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return a checkpoint as the public code saves it."""
    return {"meta": {"epoch": 1}, "state_dict": {name: weight(name, tuple(s)) for name, s in shapes.items()}}


def canvas(case: str) -> tuple[int, int]:
    """Return height and width of a batch as the public code pads it."""
    heights, widths = zip(*CASES[case], strict=True)
    return -(-max(heights) // 32) * 32, -(-max(widths) // 32) * 32


def pixels(case: str) -> tuple[Tensor, Tensor]:
    """float32 [B, 3, H, W], zero in padding, and bool [B, H, W]: patches of 32 pixels, a color and some noise each."""
    height, width = canvas(case)
    images, masks = torch.zeros(3, 3, SIDE, SIDE), torch.zeros(3, SIDE, SIDE)
    for i, (h, w) in enumerate(CASES[case]):
        coarse = drawn(f"colours of {case} {i}", 3, height // 32, width // 32)  # plain-ok
        fine = drawn(f"noise of {case} {i}", 3, height, width)
        both = coarse.repeat_interleave(32, 1).repeat_interleave(32, 2) + 0.3 * fine
        images[i, :, :h, :w] = both[:, :h, :w].float()
        masks[i, :h, :w] = 1
    return images, masks.bool()


def texts() -> tuple[Tensor, Tensor]:
    """int64 and bool [6, T]: ragged, two of each image."""
    places = torch.arange(int(LENGTHS.max()))
    mask = places < LENGTHS[:, None]
    ids = (places + 1) * (3 + 2 * torch.arange(6)[:, None]) % 30 + 5
    ids[:, 0] = 2
    ids[torch.arange(6), LENGTHS - 1] = 3
    return ids * mask, mask


def pairs() -> Pairs:
    """Each text with its image, each image with the next one's texts. Masked words are [MASK], others, or kept."""
    ids, mask = texts()
    origin = torch.arange(6)
    shown = torch.cat([origin, (origin + 2) % 6])
    original, mask = ids[shown], mask[shown]
    place = torch.arange(ids.shape[1])
    inner = mask & (place > 0) & (place < LENGTHS[shown, None] - 1)
    words = inner & ((place * 7 + 3 * torch.arange(12)[:, None]) % 5 == 1)
    kind = (place + torch.arange(12)[:, None]) % 4
    seen = torch.where(kind == 0, (original + 9) % 30 + 5, torch.where(kind == 1, original, MASK_ID))
    return Pairs(
        ids_PT=torch.where(words, seen, original),
        original_PT=original,
        words_PT=words,
        mask_PT=mask,
        owner_P=OWNER_P,
        matched_P=torch.arange(12) < 6,
        origin_P=torch.cat([origin, origin]),
    )


def batch(case: str, dtype: torch.dtype = torch.float32) -> Batch:
    images, mask = pixels(case)
    ids, words = texts()
    return Batch(
        sample_ids=("a", "b", "c"),
        image_ids=("a", "b", "c"),
        image=Pixels(pixels_B3HW=images.to(dtype), mask_BHW=mask),
        text=Text(ids_BT=ids, mask_BT=words, owner_N=OWNER_P[:6]),
    )


def questions(case: str, dtype: torch.dtype = torch.float32) -> tuple[Batch, Tensor]:
    """Return one question per image, and the soft scores of the answers, [B, A]."""
    whole = batch(case, dtype)
    text = Text(ids_BT=whole.text.ids_BT[::2], mask_BT=whole.text.mask_BT[::2])
    scores = torch.zeros(3, SIZES["answers"])
    scores[0, 3], scores[0, 7], scores[1, 1], scores[2, 10] = 1.0, 0.3, 0.6, 0.9
    return Batch(sample_ids=whole.sample_ids, image_ids=whole.image_ids, image=whole.image, text=text), scores


def built(imported: ImportedModel, **config: Any) -> Any:
    """Return this SOHO with the imported weights and config."""
    own = {k: v for k, v in imported.config.items() if k != "vocab_size"}
    model = build_model("soho", {**own, **OWN, **config}, FACTS)
    left = model.load_state_dict(dict(imported.weights), strict=False)
    unused = {"dictionary.idle"} if imported.task is None else {"hidden_cell", "match_head.weight"}
    assert not left.unexpected_keys and set(left.missing_keys) == unused
    return model.eval()


@contextmanager
def chance(case: str, cells: int) -> Iterator[None]:
    """Replace random choices by `PLACE` and `HIDDEN_P`. cells: number of an image's cells."""
    answers = iter([torch.tensor((PLACE[case] + 0.5) / cells), *(~HIDDEN_P).float().chunk(2)])
    before = public.draw_uniform
    public.draw_uniform = lambda *_: next(answers)  # type: ignore[assignment]
    try:
        yield
    finally:
        public.draw_uniform = before


def pretraining(model: Any, case: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the output of each step of the pretraining forward pass; `total` has the graph."""
    seen: dict[str, Any] = {}

    def spy(name: str) -> None:
        inner = getattr(model, name)

        def outer(*given: Any, **named: Any) -> Any:
            found = inner(*given, **named)
            seen[name] = (given, found)
            return found

        setattr(model, name, outer)

    names = (
        "extract_features",
        "map_to_codes",
        "encode_pairs",
        "predict_words",
        "predict_codes",
        "select_hidden_cells",
    )
    for name in names:
        spy(name)
    handles = [
        model.backbone.register_forward_hook(lambda _, given, found: seen.update(map=found)),
        model.match_head.register_forward_hook(lambda _, given, found: seen.update(match=found)),
        model.gate.register_forward_hook(lambda _, given, found: seen.update(vectors=given[1])),
    ]
    model.draw_pairs = lambda *_: pairs()
    rows, columns = (side // 64 for side in canvas(case))
    with chance(case, rows * columns):
        losses = model.pretraining_losses(
            batch(case, dtype),
            objectives=dict.fromkeys(model.objectives),
            generator=torch.Generator(),
            mask_probability=0.15,
        )
    for name in (*names, "draw_pairs"):
        delattr(model, name)
    for handle in handles:
        handle.remove()
    grid = seen["extract_features"][1]
    mixed, codes, _ = seen["map_to_codes"][1]
    visual = seen["encode_pairs"][0][2]
    return {
        "map": seen["map"],
        "features": grid.features_BRD,
        "mask": grid.mask_BR,
        "codes": codes,
        "vectors": seen["vectors"],
        "mixed": mixed,
        "hidden": seen["select_hidden_cells"][1],
        "tokens": visual.tokens_BRD,
        "words": seen["predict_words"][1],
        "cells": seen["predict_codes"][1],
        "match": seen["match"],
        "loss of words": losses["mlm"].mean,
        "loss of cells": losses["mvm"].mean,
        "loss of match": losses["itm"].mean,
        "total": torch.stack([loss.mean for loss in losses.values()]).sum(),
    }


def digest(tensor: Tensor, most: int = 24) -> list[float]:
    """Return at most this many evenly spaced values and, for longer tensors, the root mean square."""
    flat = tensor.detach().double().flatten()
    if len(flat) <= most:
        return flat.tolist()
    places = torch.linspace(0, len(flat) - 1, most).long()
    return [*flat[places].tolist(), flat.square().mean().sqrt().item()]


def answering(
    model: Any, head: Mapping[str, Tensor], case: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the outputs of a VQA model."""
    asked, scores = questions(case, dtype)
    visual = model.encode_image(asked.image)
    pooled = model.fuse(asked.image, asked.text).pooled_BP
    logits = F.linear(pooled, head["weight"].to(dtype), head["bias"].to(dtype))
    loss = soft_label_answers(logits, scores.to(dtype)).mean
    return {"tokens": visual.tokens_BRD, "mask": visual.mask_BR, "logits": logits, "loss": loss}


# ---- The dictionary and the optimisers by themselves -------------------------------------------------------------

STEPS = 8  # of a dictionary from scratch
TIMES_M = torch.where(torch.arange(48) < 24, 4, 2)  # how many times each feature counts


def features(step: int) -> Tensor:
    """float32 [48, D]: around six centers, further from them step by step; codes come alive and die."""
    noise = drawn(f"features {step}", 48, SIZES["hidden"])
    return ((0.4 + 0.3 * step) * noise + drawn("centres", 6, SIZES["hidden"])[torch.arange(48) % 6]).float()  # plain-ok


def gradient(step: int, theirs: str, shape: tuple[int, ...]) -> Tensor:
    """Return a gradient for a parameter of the public code."""
    return drawn(f"gradient {step} of {theirs}", *shape).float()
