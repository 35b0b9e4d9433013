"""TDEN on weights, sentences and regions that are formulas, so the numbers do not depend on a random stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.models.decoding.search import beam_search
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masked_modeling import Corruption

SIZES = {"vocab_size": 23, "feature_dim": 5, "num_classes": 4}
TINY = {"hidden": 12, "heads": 3, "intermediate": 20, "object_layers": 2, "sentence_layers": 2, "encoder_layers": 2}
TINY |= {"decoder_layers": 2, "max_positions": 10, "dropout": 0.0, "attention_dropout": 0.0}
PUBLIC = {"tie_lm_head": False, "separate_ffn": True, "decoder_visual_source": "cross_encoder"}
PUBLIC |= {"ism_pooling": "all_layers", "pooler_batch_norm": True, "similarity_dim": 8, "fusion": "product"}
PUBLIC |= {"fusion_pooling": "all_layers", "understanding_decoder_mask": "bidirectional", "fusion_norm_eps": 1e-5}
PUBLIC |= {"fusion_decoder": "apart"}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "region norms": {"separate_region_norms": True, "tie_lm_head": False, "similarity_dim": 8, "fusion_dim": 16},
    "public pretraining, captioning, retrieval": PUBLIC,
    "public VQA": {**PUBLIC, "fusion_dim": 16},
    "public VCR": {**PUBLIC, "fusion_dim": 16, "use_decoder_in_fusion": False, "segment_types": True},
    "two-stream": {"structure": "two_stream"},
    "single-stream": {"structure": "single_stream"},
    "cross-modal matching": {"ism_source": "cross_modal"},
}


def wave(shape: Iterable[int], seed: int, scale: float = 1.0) -> Tensor:
    count = torch.Size(shape).numel()
    phase = torch.arange(1, count + 1, dtype=torch.float64)
    return (scale * torch.sin(phase * (1.7 + 0.31 * seed) + 0.01 * phase.square() % 7)).reshape(tuple(shape))


def fill(model: nn.Module) -> nn.Module:
    """Every tensor by its place in the alphabet, so that the order of modules is no part of it."""
    model = model.double().eval()
    with torch.no_grad():
        for seed, (name, tensor) in enumerate(sorted(model.state_dict().items())):
            if name.endswith("running_var") or (name.endswith("weight") and tensor.dim() == 1):
                tensor.copy_(1 + wave(tensor.shape, seed, 0.2))
            elif tensor.is_floating_point():
                tensor.copy_(wave(tensor.shape, seed, 0.35))
    return model


def batch() -> Batch:
    text, regions = torch.tensor([7, 4, 6]), torch.tensor([2, 4, 3])
    words_BT, mask_BR = torch.arange(7) < text[:, None], torch.arange(4) < regions[:, None]
    ids = (torch.arange(21).reshape(3, 7) * 5) % 18 + 5
    ids[:, 0] = 2
    ids[torch.arange(3), text - 1] = 3
    corners = (wave((3, 4, 2, 2), 3) / 2 + 0.5).sort(dim=2).values.flatten(2)
    last = words_BT.clone()
    last[:, :3] = False
    return Batch(
        sample_ids=("a", "b", "c"),
        image_ids=("x", "y", "z"),
        image=Regions(
            features_BRF=wave((3, 4, 5), 1) * mask_BR[..., None],
            boxes_BR4=corners * mask_BR[..., None],
            class_probs_BRC=wave((3, 4, 4), 2, 2.0).softmax(-1) * mask_BR[..., None],
            mask_BR=mask_BR,
        ),
        text=Text(ids_BT=ids * words_BT, mask_BT=words_BT, last_segment_BT=last),
    )


def descend(model: nn.Module, losses: Mapping[str, Loss]) -> dict[str, float]:
    """An update of plain gradient descent on the sum of the losses; the losses."""
    model.zero_grad()
    torch.stack([loss.mean for loss in losses.values()]).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.02)
    return {name: loss.mean.item() for name, loss in losses.items()}


def numbers(model: Any, objectives: Any, mean: Any) -> dict[str, Any]:
    """Losses of two passes, the size of their gradient, what tasks read, and the result of beam search.

    objectives: of the model, as a pass takes them; mean: Loss -> Tensor.
    """
    fill(model)
    data = batch()
    words, regions = torch.zeros_like(data.text.mask_BT), torch.zeros_like(data.image.mask_BR)
    words[0, 2], words[0, 4], words[2, 3], regions[0, 1], regions[1, 2] = (True,) * 5
    masked = data.text.ids_BT.masked_fill(words, 4)
    seen = Corruption(ids_BT=masked, words_BT=words, regions_BR=regions, hidden_BR=regions)
    image = model.encode_corrupted(data, seen)
    first = model.masked_pass(data, seen, image, objectives)
    read = {}
    for path, logits in first.word_logits.items():
        read[path] = masked.clone()
        read[path][words] = logits.argmax(-1)
    second = model.masked_pass(data, seen, image, objectives, read, after=first)
    sum(mean(loss) for done in (first, second) for loss in done.losses.values()).backward()
    found = {f"{name}, first pass": mean(loss).item() for name, loss in first.losses.items()}
    found |= {f"{name}, second pass": mean(loss).item() for name, loss in second.losses.items()}
    gradients = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    found["norm of the gradient"] = torch.stack(gradients).sum().sqrt().item()
    with torch.no_grad():
        fused = model.fuse(data.image, data.text)
        found["fused"] = fused.pooled_BP.flatten()[:8].tolist()
        if fused.decoder_BP is not None:
            found["fused by the decoder"] = fused.decoder_BP.flatten()[:8].tolist()
        found["image"] = model.embed_image(data.image).flatten()[:8].tolist()
        found["text"] = model.embed_text(data.text).flatten()[:8].tolist()
        found["caption"] = (
            model.generation_logits(data.image, data.text, data.text.has_next_BT)[::3, :4].flatten().tolist()
        )
        best = beam_search(model, data.image, max_len=6, bos_id=2, eos_id=3, beam_size=3)
        found["beams"] = [h.ids for h in best]
        found["scores of the beams"] = [h.score for h in best]
    return found
