"""The one file of a study that knows the project's interfaces for models, losses and optimisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining_study.arms import DrawnPretraining, Pretraining
from pretraining_study.data import Data, Images, Texts
from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.decoding.greedy import greedy
from vlp_models.models import DataFacts, build_model
from vlp_models.models.protocols import Embeds, Fuses, Generates
from vlp_models.objectives.ism import match_in_batch
from vlp_models.objectives.vqa import soft_label_answers
from vlp_models.params import ObjectiveParams, OptimizerParams, PassesParams, RecipeParams
from vlp_models.training.optim import build_optimizer, build_scheduler
from vlp_models.training.passes import make_loss

# (batch, number of the update, generator of corruption) -> a scalar to differentiate
StepLoss = Callable[[Batch, int, torch.Generator], Tensor]
MAX_CAPTION = 24  # tokens, [SEP] included


def regions(images: Images, rows: Tensor) -> Regions:
    """Some of the images, no wider than the one with most regions."""
    mask_BR = images.mask_IR[rows]
    width = int(mask_BR.sum(1).max())
    return Regions(
        features_BRF=images.features_IRF[rows, :width],
        boxes_BR4=images.boxes_IR4[rows, :width],
        class_probs_BRC=images.class_probs_IRC[rows, :width],
        mask_BR=mask_BR[:, :width],
    )


def blanked(batch: Batch) -> Batch:
    """With nothing to see."""
    return replace(batch, image=batch.image.blanked())


def text(texts: Texts) -> Text:
    return Text(ids_BT=texts.ids_NT, mask_BT=texts.mask_NT)


def batch(images: Images, texts: Texts, targets: Tensor | None = None) -> Batch:
    """The texts, each with its image."""
    owners = texts.owner_N
    names = tuple(map(str, owners.tolist()))
    return Batch(sample_ids=names, image_ids=names, image=regions(images, owners), text=text(texts), targets=targets)


def build(family: str, config: Mapping[str, Any], data: Data) -> nn.Module:
    """A fresh model; its weights depend on torch's global seed alone."""
    setting = data.setting
    sizes = {
        "hidden": setting.hidden,
        "heads": setting.heads,
        "intermediate": 4 * setting.hidden,
        "object_layers": setting.layers,
        "sentence_layers": setting.layers,
        "encoder_layers": setting.layers,
        "decoder_layers": setting.layers,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "init_std": setting.hidden**-0.5,
        "separate_region_norms": True,
    }
    if family == "unified_vlp":
        own = ("hidden", "heads", "intermediate", "dropout", "attention_dropout", "init_std")
        sizes = {name: sizes[name] for name in own} | {"layers": 4 * setting.layers, "region_slots": 0, "max_masked": 0}
    facts = DataFacts(
        vocab_size=data.tokenizer.vocab_size,
        mask_id=data.tokenizer.mask_id,
        feature_dim=setting.feature_dim,
        num_classes=data.classes,
    )
    return build_model(family, {**sizes, **config}, facts)


def pretraining_loss(model: nn.Module, wanted: Pretraining, *, family: str) -> StepLoss:
    objectives, mix = {name: ObjectiveParams() for name in wanted.objectives}, "sum"
    if isinstance(wanted, DrawnPretraining):
        shares = zip(wanted.objectives, wanted.shares, strict=True)
        objectives, mix = {name: ObjectiveParams(share=share) for name, share in shares}, "draw"
    recipe = RecipeParams(objectives=objectives, mix=mix, mask_probability=wanted.mask_probability)  # type: ignore[arg-type]
    loss = make_loss(model, recipe, PassesParams(scheme=wanted.passes), name=family)
    return lambda batch, update, generator: loss(batch, update=update, generator=generator).mean


def optimiser(module: nn.Module, *, lr: float, updates: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW, warmed up over a tenth of the updates, then falling to zero; and its schedule."""
    params = OptimizerParams(lr=lr, betas=[0.9, 0.98], warmup_fraction=0.1)
    made = build_optimizer(module, params)
    return made, build_scheduler(made, updates, params)


# ---- The tasks -------------------------------------------------------------------------------------------------


def caption_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Nats of each reference token, [SEP] included. [M]"""
    at_BT = batch.text.followed_BT
    logits_MV = model.generation_logits(batch.image, batch.text, at_BT)  # type: ignore[operator]
    return F.cross_entropy(logits_MV.float(), batch.text.following(at_BT), reduction="none")


def describe(model: nn.Module, images: Images, rows: Tensor, tokenizer: Tokenizer) -> list[str]:
    """Greedy descriptions."""
    found = greedy(
        model,  # type: ignore[arg-type]
        regions(images, rows),
        max_len=MAX_CAPTION,
        bos_id=tokenizer.cls_id,
        eos_id=tokenizer.sep_id,
    )
    return [tokenizer.decode(hypothesis.ids) for hypothesis in found]


def can(model: nn.Module, task: str) -> bool:
    """Whether the model can be fine-tuned on `task` (arms.TASKS)."""
    return isinstance(model, {"captioning": Generates, "vqa": Fuses, "retrieval": Embeds}[task])


def answer_head(model: nn.Module, answers: Sequence[str]) -> nn.Linear:
    """A classifier on the fused feature, begun as the model's own layers were; one right answer in all at first."""
    head = nn.Linear(model.fused_dim, len(answers))  # type: ignore[arg-type]
    nn.init.normal_(head.weight, std=model.config.init_std)  # type: ignore[union-attr, arg-type]
    nn.init.constant_(head.bias, -float(torch.tensor(float(len(answers))).log()))
    return head


def answer_logits(model: nn.Module, head: nn.Linear, batch: Batch) -> Tensor:
    return head(model.fuse(batch.image, batch.text).pooled_BP)  # type: ignore[operator]


def answer_loss(model: nn.Module, head: nn.Linear, batch: Batch) -> Tensor:
    assert batch.targets is not None
    return soft_label_answers(answer_logits(model, head, batch), batch.targets).mean


def matching_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The triplet loss that retrieval is fine-tuned with; captions of one image are no negatives of each other."""
    texts_BE = model.embed_text(batch.text)  # type: ignore[operator]
    return match_in_batch(texts_BE, model.embed_image(batch.image), batch.image_ids).mean  # type: ignore[operator]


def similarity(model: nn.Module, images: Images, texts: Texts) -> Tensor:
    """[N, I]: every text with every image."""
    every = torch.arange(len(images))
    return model.embed_text(text(texts)) @ model.embed_image(regions(images, every)).T  # type: ignore[operator]
