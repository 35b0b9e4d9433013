"""The only file of the studies that uses the project's interfaces of models, losses and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining_study.arms import Pretraining
from pretraining_study.data import Data, Images, Texts
from pretraining_study.judging import LABELS, ROWS
from pretraining_study.pictures import Pictures
from pretraining_study.sizes import sizes
from vlp_models.data.batch import Batch, Image, Pixels, Regions, Text
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models import DataFacts, build_model
from vlp_models.models.decoding.sampling import sample
from vlp_models.models.decoding.search import greedy
from vlp_models.models.protocols import Contrasts, Embeds, Fuses, Generates, ScoresPairs
from vlp_models.models.shared_objectives import add_objectives
from vlp_models.objectives.contrastive import image_text_contrast
from vlp_models.objectives.loss import cross_entropy, soft_label_answers
from vlp_models.objectives.matching import match_in_batch
from vlp_models.objectives.moving_average import update_moving_averages
from vlp_models.params import GroupParams, ObjectiveParams, OptimizerParams, RecipeParams, ScheduledSamplingParams
from vlp_models.training.optim import Freezing, build_optimizer, build_scheduler
from vlp_models.training.scheduled_sampling import make_loss

IMAGE_SIDE = {  # family -> prefix of the names of the modules that encode an image's cells
    "soho": ("backbone.", "neck.", "visual_norm."),
    "vlmo": ("image_embedding.stem.", "image_embedding.patches."),
}
MAX_CAPTION = 24  # tokens, [SEP] included
NEEDS: dict[str, tuple[type, ...]] = {  # task -> what a model must be, one of these
    "captioning": (Generates,),
    "vqa": (Fuses,),
    "retrieval": (Embeds, ScoresPairs),
    "entailment": (Fuses,),
    "nlvr2": (Fuses,),
    "vcr": (Fuses,),
}


def image(images: Images | Pictures, rows: Tensor) -> Image:
    """Some of the images; regions are no more than the image with most of them has."""
    if isinstance(images, Pictures):
        return Pixels(pixels_B3HW=images.normalized(rows))
    mask_BR = images.mask_IR[rows]
    width = int(mask_BR.sum(1).max())
    return Regions(
        features_BRF=images.features_IRF[rows, :width].float(),
        boxes_BR4=images.boxes_IR4[rows, :width],
        class_probs_BRC=images.class_probs_IRC[rows, :width].float(),
        mask_BR=mask_BR[:, :width],
    )


def text(texts: Texts) -> Text:
    return Text(ids_BT=texts.ids_NT, mask_BT=texts.mask_NT)


def batch(images: Images | Pictures, texts: Texts, targets: Tensor | None = None, *, reads: str = "pairs") -> Batch:
    """The texts, each with its image, or what `Pretraining.reads` leaves of the two."""
    owners = texts.owner_N
    names = tuple(map(str, owners.tolist()))
    whole = Batch(sample_ids=names, image_ids=names, text=text(texts), targets=targets)
    if reads == "texts":
        return whole
    seen = image(images, owners)
    if reads == "blanked":
        seen = seen.blanked()
    return replace(whole, image=seen, text=None if reads == "images" else whole.text)


def build(family: str, config: Mapping[str, Any], data: Data) -> nn.Module:
    """A fresh model; its weights depend on torch's global seed alone."""
    return build_model(family, {**sizes(family, data.setting), **config}, facts(data))


def facts(data: Data) -> DataFacts:
    return DataFacts(
        vocab_size=data.tokenizer.vocab_size,
        mask_id=data.tokenizer.mask_id,
        feature_dim=data.setting.feature_dim,
        num_classes=data.classes,
    )


def with_heads(model: nn.Module, wanted: Pretraining, data: Data, *, family: str) -> nn.Module:
    """The model, with heads for the objectives that are not its own. Where all are, nothing is drawn."""
    return add_objectives(model, wanted.objectives, facts(data), "objectives", family)


def cells_seen(model: nn.Module, images: Image) -> Tensor:
    """What the image's side makes of the cells of pictures, before any text and any transformer. [B, R, D]"""
    cells_BRCD: Tensor = model.cells(images)  # type: ignore[operator]
    return cells_BRCD.flatten(1, 2)


def image_side(family: str, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of the modules that compute `cells_seen`."""
    return {name: value for name, value in model.state_dict().items() if name.startswith(IMAGE_SIDE[family])}


def begin_with(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """
    Raises:
        KeyError: the model has no such weights.
    """
    if unknown := model.load_state_dict(weights, strict=False).unexpected_keys:
        raise KeyError(f"no {', '.join(unknown)} in this model")


class StepLoss:
    """The loss of one pretraining update. updates_per_batch: consecutive updates on the same batch."""

    def __init__(self, model: nn.Module, wanted: Pretraining, *, family: str) -> None:
        count = len(wanted.objectives)
        shares, weights = wanted.shares or (1.0,) * count, wanted.weights or (1.0,) * count
        rows = zip(wanted.objectives, weights, shares, strict=True)
        recipe = RecipeParams(
            objectives={name: ObjectiveParams(weight=weight, share=share) for name, weight, share in rows},
            mix=wanted.mix,
            mask_probability=wanted.mask_probability,
            reuse_batch=wanted.mix == "alternate",
        )
        self._loss = make_loss(model, recipe, ScheduledSamplingParams(scheme=wanted.scheduled_sampling), name=family)
        self.updates_per_batch = getattr(self._loss, "updates_per_batch", 1)

    def __call__(self, batch: Batch, update: int, generator: torch.Generator) -> Tensor:
        return self._loss(batch, update=update, generator=generator).mean


def make_optimizer(module: nn.Module, *, lr: float, updates: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW, warmed up over a tenth of the updates, then falling to zero; and its schedule."""
    params = OptimizerParams(lr=lr, betas=[0.9, 0.98], warmup_fraction=0.1)
    made = build_optimizer(module, params)
    return made, build_scheduler(made, updates, params)


def begin_training(module: nn.Module, frozen: Sequence[str]) -> None:
    """Training mode, and everything learns but these parts."""
    module.requires_grad_(True)
    Freezing(module, {name: GroupParams(frozen=True) for name in frozen}).train(0)


def after_update(module: nn.Module) -> None:
    """What is no parameter but follows the batches, such as the codes of a dictionary."""
    update_moving_averages(module)


# ---- The tasks -------------------------------------------------------------------------------------------------


def can(model: nn.Module, task: str) -> bool:
    """Whether the model can be fine-tuned on `task` (arms.TASKS)."""
    return isinstance(model, NEEDS[task])


def caption_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Nats of each reference token, [SEP] included. [M]"""
    at_BT = batch.text.has_next_BT
    logits_MV = model.generation_logits(batch.image, batch.text, at_BT)  # type: ignore[operator]
    return F.cross_entropy(logits_MV.float(), batch.text.next_tokens(at_BT), reduction="none")


def describe(model: nn.Module, images: Images | Pictures, rows: Tensor, tokenizer: Tokenizer) -> list[str]:
    """Greedy descriptions."""
    found = greedy(
        model,  # type: ignore[arg-type]
        image(images, rows),
        max_len=MAX_CAPTION,
        bos_id=tokenizer.cls_id,
        eos_id=tokenizer.sep_id,
    )
    return [tokenizer.decode(hypothesis.ids) for hypothesis in found]


def write(
    model: nn.Module, images: Images | Pictures, tokenizer: Tokenizer, draws: int, generator: torch.Generator
) -> list[list[str]]:
    """Of each image `draws` descriptions from the model's own distribution, the likeliest by token first. One that did
    not end is left out."""
    drawn = sample(
        model,  # type: ignore[arg-type]
        image(images, torch.arange(len(images))),
        max_len=MAX_CAPTION,
        bos_id=tokenizer.cls_id,
        eos_id=tokenizer.sep_id,
        num_samples=draws,
        generator=generator,
    )
    ended = [[h for h in of_image if len(h.ids) < MAX_CAPTION] for of_image in drawn]
    ranked = [sorted(of_image, key=lambda h: -h.score / (len(h.ids) + 1)) for of_image in ended]
    return [[tokenizer.decode(h.ids) for h in of_image] for of_image in ranked]


def answer_head(model: nn.Module, answers: Sequence[str]) -> nn.Linear:
    """Return a classifier on the fused feature, initialized like the model's own layers."""
    head = nn.Linear(model.fused_dim, len(answers))  # type: ignore[arg-type]
    nn.init.normal_(head.weight, std=model.config.init_std)  # type: ignore[union-attr, arg-type]
    nn.init.constant_(head.bias, -float(torch.tensor(float(len(answers))).log()))
    return head


def answer_logits(model: nn.Module, head: nn.Module, batch: Batch) -> Tensor:
    return head(model.fuse(batch.image, batch.text).pooled_BP)  # type: ignore[operator]


def answer_loss(model: nn.Module, head: nn.Module, batch: Batch) -> Tensor:
    """Nats a question: whether each answer is right, in the light of the soft scores."""
    assert batch.targets is not None
    return soft_label_answers(answer_logits(model, head, batch), batch.targets).mean


def judging_head(model: nn.Module, task: str) -> nn.Module:
    """Return the classifier of entailment, NLVR2 or VCR (judging.py) on the fused features of a question's rows, as the
    task of the same name has it: two layers on both images' features for NLVR2, else one."""
    images = ROWS[task] if task == "nlvr2" else 1
    width = images * int(model.fused_dim)  # type: ignore[arg-type]
    last = nn.Linear(width, 1 if task == "vcr" else LABELS[task])
    layers = [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), last] if task == "nlvr2" else [last]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=model.config.init_std)  # type: ignore[union-attr, arg-type]
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def judging_logits(model: nn.Module, head: nn.Module, images: Images | Pictures, texts: Texts, task: str) -> Tensor:
    """[Q, labels]. texts: the rows of the questions; an image is encoded once for texts that follow each other."""
    shown_K, owner_N = texts.owner_N.unique_consecutive(return_inverse=True)
    fused = model.fuse(image(images, shown_K), replace(text(texts), owner_N=owner_N))  # type: ignore[operator]
    pooled_QNP = fused.pooled_BP.unflatten(0, (-1, ROWS[task]))
    return head(pooled_QNP).flatten(1) if task == "vcr" else head(pooled_QNP.flatten(1))  # type: ignore[no-any-return]


def embeds(model: nn.Module) -> bool:
    """Whether it retrieves by two vectors, not by fusing each pair."""
    return isinstance(model, Embeds)


def matching_loss(model: nn.Module, batch: Batch, others: int, generator: torch.Generator) -> Tensor:
    """Return the loss of retrieval: contrastive if the model has a temperature, else with a margin.

    Captions of one image are not negatives of each other. A model without embeddings ranks a caption's own image
    against `others`.
    """
    if not isinstance(model, Embeds):
        ids = torch.tensor([int(name) for name in batch.image_ids])
        other_BB = (ids[:, None] != ids).float()
        drawn_BK = torch.multinomial(other_BB, min(others, int(other_BB.sum(1).min())), generator=generator)
        images_BK = torch.cat([torch.arange(len(ids))[:, None], drawn_BK], 1)
        scores_BK = pair_scores(model, batch.image, batch.text, images_BK)
        return cross_entropy(scores_BK, torch.zeros(len(ids), dtype=torch.int64), name="match").mean
    texts_BE, images_BE = model.embed_text(batch.text), model.embed_image(batch.image)
    if isinstance(model, Contrasts):
        return image_text_contrast(texts_BE, images_BE, batch.image_ids, model.contrast_scale()).mean
    return match_in_batch(texts_BE, images_BE, batch.image_ids).mean


def pair_scores(model: nn.Module, images: Image, texts: Text, images_NK: Tensor) -> Tensor:
    """Of each text with these of the images, which are encoded once. [N, K]"""
    count, width = images_NK.shape
    repeated = texts.select(torch.arange(count).repeat_interleave(width))
    state = model.encode_image(images)  # type: ignore[operator]
    return model.score(state, repeated, images_NK.flatten()).view(count, width)  # type: ignore[operator]


def similarity(model: nn.Module, images: Images | Pictures, texts: Texts) -> Tensor:
    """[N, I]: every text with every image; times the temperature's inverse, where there is one."""
    every = torch.arange(len(images))
    found = model.embed_text(text(texts)) @ model.embed_image(image(images, every)).T  # type: ignore[operator]
    return found * model.contrast_scale() if isinstance(model, Contrasts) else found


def has_temperature(model: nn.Module) -> bool:
    """Whether similarities are logits, so that they have a likelihood."""
    return isinstance(model, Contrasts) or not isinstance(model, Embeds)
