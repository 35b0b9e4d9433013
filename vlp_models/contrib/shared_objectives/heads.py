"""Objectives across models: what a model can be pretrained on besides its family's own objectives.

A recipe's names decide, not the family. An objective of a model's own always comes first; `vlp_models.models` calls
`add_objectives` for the others. A shared one of this table needs no more of a model than a protocol
(models/protocols.py), so a plugin has it as soon as it implements that:

| objective | needs                        | loss                                             | source                |
|-----------|------------------------------|--------------------------------------------------|-----------------------|
| mlm       | FusesWords                   | masked words, from their states after fusion     | BERT, section 3.1     |
| itm       | Fuses or LocatesStates       | a pair or an image with another's text           | UNITER, section 3.2   |
| itc       | Embeds                       | contrast over the batch, with a temperature      | CLIP, figure 3        |
| ism       | Embeds                       | triplet ranking over the batch                   | TDEN                  |
| ic        | Generates                    | each word from the words before it and the image | XGPT, section 3.2     |
| msg       | Generates                    | likewise, but some words it reads are masked     | TDEN                  |
| moc       | LocatesStates, reads regions | the detector's classes of hidden regions         | UNITER (MRC-KL), TDEN |
| mrfr      | LocatesStates, reads regions | the features of hidden regions                   | UNITER (MRFR)         |

The heads are modules next to the model, `objective_heads.NAME` in a checkpoint: they exist only for the objectives that
a recipe names, and later trainings from the checkpoint need not have them. A model's own weights keep their names.

Each shared objective makes a pass of its own, so its cost adds to that of the others.

Shape suffixes: B images, N texts, P pairs, T text tokens, R regions, M masked words or regions, D hidden, E embedding,
G texts of all processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.data.inputs import RegionInput
from vlp_models.errors import ParamsError
from vlp_models.models import DataFacts, own_objectives
from vlp_models.models.layers.blocks import init_weights
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.protocols import Contrasts, Embeds, Fuses, FusesWords, Generates, LocatesStates
from vlp_models.objectives.contrastive import image_text_contrast
from vlp_models.objectives.distributed import number_over_ranks, take_rows
from vlp_models.objectives.generation import sentence_generation
from vlp_models.objectives.loss import (
    Learners,
    Loss,
    at_least_float32,
    cross_entropy,
    first_trainable,
    learners_by_text,
    select_learners,
    zero_loss,
)
from vlp_models.objectives.masked_modeling import (
    mask_tokens,
    masked_language_modeling,
    masked_object_classification,
    select_regions,
    select_tokens,
)
from vlp_models.objectives.matching import different_image_mask, draw_hard_negatives, match_in_batch

EPS = 1e-12  # of the heads' LayerNorm, as in BERT
TEMPERATURE = 0.07  # initial, of a model without its own
MAX_SCALE = 100.0  # of 1 / temperature, as in CLIP

# Objectives that only their own family has, and what they depend on
FAMILY_ONLY = {
    "mim": "it predicts VLMo's visual tokens of hidden patches (`image_codes` in its config)",
    "mvm": "it predicts the codes of SOHO's visual dictionary",
    "bidirectional": "it is one of the two attention masks of Unified VLP's stack; elsewhere `mlm` masks words",
    "seq2seq": "it is one of the two attention masks of Unified VLP's stack; elsewhere `msg` or `ic` generate",
    "imlm": "XGPT's decoder predicts a fragment that its encoder reads masked; elsewhere `mlm` or `msg` mask words",
    "ida": "XGPT's encoder reads words as the regions that they attend to",
    "tifg": "XGPT's decoder generates regions from a text",
}


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Image-text pairs that train an objective.

    learners   bool [N], the texts that train it; None: all
    generator  of the masks and negatives; mask_probability  of a word or region
    """

    image: Image
    text: Text
    image_ids: tuple[str, ...]
    learners: Tensor | None
    generator: torch.Generator
    mask_probability: float

    @property
    def image_names(self) -> tuple[str, ...]:
        """The id of each text's image."""
        owner_N = self.text.owners(len(self.image))
        if owner_N is None:
            return self.image_ids
        return tuple(self.image_ids[i] for i in owner_N.tolist())

    def rows_of_texts(self, rows_B: Tensor) -> Tensor:
        """Return the row of each text's image: [B, ...] -> [N, ...]."""
        owner_N = self.text.owners(len(self.image))
        return rows_B if owner_N is None else rows_B[owner_N]

    def mask_words(self, facts: DataFacts) -> tuple[Text, Tensor]:
        """Return the texts with words masked as in BERT (80% [MASK], 10% random, 10% kept), and bool [N, T], which."""
        assert facts.mask_id is not None
        words_NT = select_tokens(self.text.mask_BT, self.mask_probability, self.generator)
        ids_NT = mask_tokens(
            self.text.ids_BT,
            words_NT,
            scheme="bert",
            mask_id=facts.mask_id,
            vocab_size=facts.vocab_size,
            generator=self.generator,
        )
        return replace(self.text, ids_BT=ids_NT), words_NT


class SharedObjective(nn.Module, ABC):
    """An objective for every model that meets one of `protocols`: its head, and its loss.

    missing  why a model without these protocols cannot have it
    regions  whether it hides regions, so that the model must read them
    """

    protocols: ClassVar[tuple[type, ...]]
    missing: ClassVar[str]
    masks_words: ClassVar[bool] = False
    regions: ClassVar[bool] = False

    def __init__(self, model: Any, facts: DataFacts) -> None:
        super().__init__()
        self.facts = facts

    @classmethod
    def refusal(cls, model: nn.Module, facts: DataFacts) -> str:
        """Return why this model cannot train on it with this data; empty if it can."""
        inputs: Any = model.inputs
        if not inputs.text or inputs.image is None:
            return "it reads no pairs of images and texts"
        if not isinstance(model, cls.protocols):
            return cls.missing
        if cls.regions and not isinstance(inputs.image, RegionInput):
            return "it reads pixels, and this objective hides regions"
        if cls.masks_words and facts.mask_id is None:
            return "the tokenizer has no mask token (`tokenizer.special_tokens`)"
        return ""

    @abstractmethod
    def forward(self, model: Any, pairs: PairBatch) -> Loss:
        """Return the loss of image-text pairs."""


# ---- Fusion: masked words, matching -----------------------------------------------------------------------------


class MaskedWords(SharedObjective):
    """`mlm`: predict masked words from their states after fusion (Devlin et al. 2019, section 3.1)."""

    protocols = (FusesWords,)
    missing = "it returns no states of words after fusion (`FusesWords`)"
    masks_words = True

    def __init__(self, model: FusesWords, facts: DataFacts) -> None:
        super().__init__(model, facts)
        self.head = TokenHead(model.text_dim, facts.vocab_size, eps=EPS)

    def forward(self, model: FusesWords, pairs: PairBatch) -> Loss:
        # Words of all samples are masked, so that the draws are the same; only those of learners are predicted.
        masked, words_NT = pairs.mask_words(self.facts)
        words_NT = select_learners(words_NT, pairs.learners)
        states_MD = model.fuse(pairs.image, masked).text_BTD[words_NT]
        return masked_language_modeling(self.head(states_MD), pairs.text.ids_BT[words_NT])


class PairMatching(SharedObjective):
    """`itm`: does the text describe the image (Chen et al. 2020 (UNITER), section 3.2)?

    Each text with its image, and each image with a text of another image, drawn uniformly over all processes. A text
    without such a negative, as in a batch of one image, is used as a true pair only. Classified is the pooled feature
    of fusion; the mean of the image's states after fusion for a model that returns only those.
    """

    protocols = (Fuses, LocatesStates)
    missing = "it reads no image and text together (`Fuses`, `LocatesStates`)"

    def __init__(self, model: Any, facts: DataFacts) -> None:
        super().__init__(model, facts)
        self.head = nn.Linear(model.fused_dim if isinstance(model, Fuses) else model.located_dim, 2)  # no, yes

    def forward(self, model: Any, pairs: PairBatch) -> Loss:
        # (P,) pairs: N true ones, then up to N mismatched ones, each in the place of a true one.
        text, matched_P, origin_P = add_mismatched(pairs)
        logits_P2 = self.head(pair_features(model, pairs.image, text))
        if pairs.learners is not None:
            learns_P = pairs.learners[origin_P]
            logits_P2, matched_P = logits_P2[learns_P], matched_P[learns_P]
        return cross_entropy(logits_P2, matched_P, name="itm")


def add_mismatched(pairs: PairBatch) -> tuple[Text, Tensor, Tensor]:
    """Return P texts: those of the pairs, then texts of other images in their place.

    With int64 [P], 1 for a true pair; and int64 [P], the text that a pair has or has replaced.
    """
    text, device = pairs.text, pairs.text.ids_BT.device
    negative_NG = different_image_mask(pairs.image_names, device)
    # With equal similarities, hard negatives are uniform ones.
    uniform_NG = torch.zeros_like(negative_NG, dtype=torch.float32)
    drawn_N, has_N = draw_hard_negatives(uniform_NG, negative_NG, pairs.generator)
    rows_R = has_N.nonzero().squeeze(1)  # the texts that have a negative
    # All processes must call `take_rows`. Texts of another process may be longer.
    other_ids, other_mask = take_rows(text.ids_BT, drawn_N[rows_R]), take_rows(text.mask_BT, drawn_N[rows_R])
    wider = (0, other_ids.shape[1] - text.ids_BT.shape[1])
    origin_P = torch.cat([torch.arange(len(text), device=device), rows_R])
    # The true pairs, then the mismatched ones: their images are those of the texts that they replace.
    all_pairs = Text(
        ids_BT=torch.cat([F.pad(text.ids_BT, wider), other_ids]),
        mask_BT=torch.cat([F.pad(text.mask_BT, wider), other_mask]),
        owner_N=pairs.rows_of_texts(torch.arange(len(pairs.image), device=device))[origin_P],
    )
    matched_P = (torch.arange(len(origin_P), device=device) < len(text)).long()
    return all_pairs, matched_P, origin_P


def pair_features(model: Any, image: Image, text: Text) -> Tensor:
    """Return the feature of each text with its image: pooled by the model, or the mean of the image's states. [N, P]"""
    if isinstance(model, Fuses):
        return model.fuse(image, text).pooled_BP
    # The mean over real parts of the image: (N, R, D) -> (N, D)
    located = model.locate(image, text)
    mask_NR1 = located.mask_NR[..., None]
    return (located.states_NRD * mask_NR1).sum(1) / mask_NR1.sum(1).clamp(min=1)


# ---- Two vectors: contrast, ranking -------------------------------------------------------------------------------


class EmbeddingObjective(SharedObjective):
    """Compares the vectors of a batch's images and texts, with negatives from all processes."""

    name: ClassVar[str]
    protocols = (Embeds,)
    missing = "it has no vectors of images and texts alone (`Embeds`)"

    def forward(self, model: Any, pairs: PairBatch) -> Loss:
        names, learners = pairs.image_names, pairs.learners
        if learners is not None:
            names = tuple(name for name, learns in zip(names, learners.tolist(), strict=True) if learns)
        # One image in the whole batch has no negatives.
        if len(number_over_ranks(names)[0].unique()) <= 1:  # batch normalization of a pooler also needs two
            return zero_loss(first_trainable(model), self.name)
        texts_NE, images_NE = model.embed_text(pairs.text), pairs.rows_of_texts(model.embed_image(pairs.image))
        if learners is not None:
            texts_NE, images_NE = texts_NE[learners], images_NE[learners]
        return self.compare(model, texts_NE, images_NE, names)

    @abstractmethod
    def compare(self, model: Any, texts_NE: Tensor, images_NE: Tensor, names: tuple[str, ...]) -> Loss:
        """Return the loss of unit vectors; text i belongs to image i, whose name is `names[i]`."""


class Contrast(EmbeddingObjective):
    """`itc`: find a text's image in the batch, and an image's text (Radford et al. 2021, figure 3)."""

    name = "itc"

    def __init__(self, model: Embeds, facts: DataFacts) -> None:
        super().__init__(model, facts)
        # A model that learns a temperature keeps it; another gets one, stored as the logarithm of 1 / temperature.
        has_temperature = isinstance(model, Contrasts)
        self.log_scale = None if has_temperature else nn.Parameter(torch.tensor(-math.log(TEMPERATURE)))

    def compare(self, model: Any, texts_NE: Tensor, images_NE: Tensor, names: tuple[str, ...]) -> Loss:
        if self.log_scale is None:
            return image_text_contrast(texts_NE, images_NE, names, model.contrast_scale())
        scale = self.log_scale.exp()
        # A plain clamp would have no gradient beyond the limit, so the scale could never return from there.
        scale = scale + (scale.clamp(max=MAX_SCALE) - scale).detach()
        return image_text_contrast(texts_NE, images_NE, names, scale)


class Ranking(EmbeddingObjective):
    """`ism`: rank a text's own image, and an image's own text, above the batch's others by a margin of 0.2 (Li et al.
    2021 (TDEN), "ISM")."""

    name = "ism"

    def compare(self, model: Any, texts_NE: Tensor, images_NE: Tensor, names: tuple[str, ...]) -> Loss:
        return match_in_batch(texts_NE, images_NE, names)


# ---- Generation ---------------------------------------------------------------------------------------------------


class Captioning(SharedObjective):
    """`ic`: predict each word from the words before it and the image (Xia et al. 2020 (XGPT), section 3.2).

    It has no head: the model's own decoder predicts words.
    """

    name: ClassVar[str] = "ic"
    protocols = (Generates,)
    missing = "it has no decoder of words (`Generates`)"

    def forward(self, model: Generates, pairs: PairBatch) -> Loss:
        text = pairs.text
        # What is read may be masked; what is predicted are the words themselves, from the second on.
        read = pairs.mask_words(self.facts)[0] if self.masks_words else text
        at_NT = select_learners(text.has_next_BT, pairs.learners)
        logits_MV = model.generation_logits(pairs.image, read, at_NT)
        return sentence_generation(logits_MV, text.next_tokens(at_NT), name=self.name)


class MaskedCaptioning(Captioning):
    """`msg`: likewise, but some of the words that are read are masked; all words are predicted (TDEN, "MSG")."""

    name = "msg"
    masks_words = True


# ---- Regions ------------------------------------------------------------------------------------------------------


class RegionObjective(SharedObjective):
    """Hides regions, and predicts them from their states after fusion with the whole text.

    A hidden region has a feature and class probabilities of zero; its location is kept (UNITER, section 3.2).
    """

    protocols = (LocatesStates,)
    missing = "it returns no states of regions after fusion (`LocatesStates`)"
    regions = True

    def hide(self, model: LocatesStates, pairs: PairBatch, candidates_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of the hidden regions, [M, D], and bool [N, R], which these are.

        candidates_BR: bool, the regions that can be predicted.
        """
        # Candidates among real regions; features and class probabilities of the hidden ones become zero. [B, R]
        image = regions_of(pairs)
        hidden_BR = select_regions(image.mask_BR & candidates_BR, pairs.mask_probability, pairs.generator)
        shown_BR1 = ~hidden_BR[..., None]
        covered = replace(
            image, features_BRF=image.features_BRF * shown_BR1, class_probs_BRC=image.class_probs_BRC * shown_BR1
        )
        # Hidden for all texts of the image, predicted for those that learn: [B, R] -> [N, R]
        at_NR = select_learners(pairs.rows_of_texts(hidden_BR), pairs.learners)
        return model.locate(covered, pairs.text).states_NRD[at_NR], at_NR


class MaskedClasses(RegionObjective):
    """`moc`: predict the detector's class probabilities of hidden regions (TDEN, "MOC"; UNITER's MRC-KL)."""

    def __init__(self, model: LocatesStates, facts: DataFacts) -> None:
        super().__init__(model, facts)
        self.head = TokenHead(model.located_dim, facts.num_classes, eps=EPS)

    @classmethod
    def refusal(cls, model: nn.Module, facts: DataFacts) -> str:
        reason = super().refusal(model, facts)
        return reason or ("" if facts.num_classes else "the features have no class probabilities")

    def forward(self, model: LocatesStates, pairs: PairBatch) -> Loss:
        classes_BRC = regions_of(pairs).class_probs_BRC
        states_MD, at_NR = self.hide(model, pairs, classes_BRC.sum(-1) > 0)
        return masked_object_classification(self.head(states_MD), pairs.rows_of_texts(classes_BRC)[at_NR])


def masked_region_regression(predicted_MF: Tensor, targets_MF: Tensor) -> Loss:
    """Return MRFR's loss (UNITER, section 3.2): the squared distance of predicted and detected features of M regions.

    The mean over F features, in float32 at least; the equation's sum is F times as much.
    """
    predicted_MF = at_least_float32(predicted_MF)
    total = (predicted_MF - targets_MF.to(predicted_MF.dtype)).square().sum() / targets_MF.shape[1]
    return Loss.of(total, len(predicted_MF), mrfr=total)


class MaskedFeatures(RegionObjective):
    """`mrfr`: predict the features of hidden regions (UNITER's masked region feature regression, section 3.2)."""

    def __init__(self, model: LocatesStates, facts: DataFacts) -> None:
        super().__init__(model, facts)
        self.head = TokenHead(model.located_dim, facts.feature_dim, eps=EPS)

    def forward(self, model: LocatesStates, pairs: PairBatch) -> Loss:
        features_BRF = regions_of(pairs).features_BRF
        states_MD, at_NR = self.hide(model, pairs, features_BRF.any(-1))
        return masked_region_regression(self.head(states_MD), pairs.rows_of_texts(features_BRF)[at_NR])


def regions_of(pairs: PairBatch) -> Regions:
    assert isinstance(pairs.image, Regions)  # `RegionObjective.refusal`
    return pairs.image


SHARED: dict[str, type[SharedObjective]] = {
    "mlm": MaskedWords,
    "itm": PairMatching,
    "itc": Contrast,
    "ism": Ranking,
    "ic": Captioning,
    "msg": MaskedCaptioning,
    "moc": MaskedClasses,
    "mrfr": MaskedFeatures,
}


# ---- Which model can train on what --------------------------------------------------------------------------------


def refusal(model: nn.Module, name: str, facts: DataFacts) -> str:
    """Return why a model cannot train on an objective with this data; empty if it can, by itself or by `SHARED`."""
    if name in own_objectives(model):
        return ""
    if name in SHARED:
        return SHARED[name].refusal(model, facts)
    return FAMILY_ONLY.get(name, "no such objective")


def known_objectives(model: nn.Module, facts: DataFacts) -> list[str]:
    """Return all objectives that a model can train on, its own first."""
    names = list(own_objectives(model))
    names += [name for name in SHARED if name not in names and not refusal(model, name, facts)]
    return names


# ---- A model with shared objectives -------------------------------------------------------------------------------


class PretrainingModel(nn.Module):
    """A model and the heads of its shared objectives: `Pretrains` with both kinds of objectives.

    A checkpoint has the parts `model` and `objective_heads`.
    """

    objectives: tuple[str, ...]

    def __init__(self, model: nn.Module, objective_heads: Mapping[str, SharedObjective]) -> None:
        super().__init__()
        self.model = model
        self.objective_heads = nn.ModuleDict(objective_heads)
        self.objectives = (*own_objectives(model), *objective_heads)

    def pretraining_losses(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """Return one unweighted loss per objective: the model's own from its pass, then each shared one from a pass of
        its own.

        Raises:
            ParamsError: an unknown objective, or a shared one for a batch without images or without texts.
        """
        # A name that the model has itself is never in `objective_heads`.
        model_objectives = {name: learners for name, learners in objectives.items() if name not in self.objective_heads}
        losses: dict[str, Loss] = {}
        if model_objectives:
            losses |= self.model.pretraining_losses(  # type: ignore[operator]
                batch, objectives=model_objectives, generator=generator, mask_probability=mask_probability
            )
        for name in objectives:
            if name in model_objectives:
                continue
            if batch.image is None or batch.text is None:
                raise ParamsError(f"the objective {name} needs images with texts: set `view: captions`")
            learners = learners_by_text(objectives, batch.text.owner_N)[name]
            pairs = PairBatch(
                image=batch.image,
                text=batch.text,
                image_ids=batch.image_ids,
                learners=learners,
                generator=generator,
                mask_probability=mask_probability,
            )
            losses[name] = self.objective_heads[name](self.model, pairs)
        return {name: losses[name] for name in objectives}

    def load_heads(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Load the heads that a checkpoint has in the same shapes, and return their objectives.

        weights: of its part `objective_heads`.
        """
        loaded = []
        for name, head in self.objective_heads.items():
            head_weights = {key.removeprefix(f"{name}."): t for key, t in weights.items() if key.startswith(f"{name}.")}
            shapes = {key: tensor.shape for key, tensor in head.state_dict().items()}
            # Contrast of a model with its own temperature has no weights, so there is nothing to load.
            if shapes and shapes == {key: tensor.shape for key, tensor in head_weights.items()}:
                head.load_state_dict(head_weights)
                loaded.append(name)
        return loaded


def add_objectives(
    model: nn.Module, names: Iterable[str], facts: DataFacts, where: str, model_name: str
) -> PretrainingModel:
    """Return the model with new heads for those of these objectives that it does not compute itself.

    The heads' weights are drawn from torch's global generator, N(0, init_std of the model's config).

    Args:
        where: the objectives' place in params.yaml. model_name: of the model, in params.yaml.

    Raises:
        ParamsError: names the objective that the model cannot train on, the reason, and those that it can.
    """
    names = list(names)
    for name in names:
        reason = refusal(model, name, facts)
        if reason:
            raise ParamsError(
                f"params.yaml: `{where}.{name}`: {model_name} cannot train on it: {reason}; it can train on "
                f"{', '.join(known_objectives(model, facts))}"
            )
    # In the order of `SHARED`, so that the heads' initial weights do not depend on the order in params.yaml.
    shared = [name for name in SHARED if name in names and name not in own_objectives(model)]
    heads = {name: SHARED[name](model, facts) for name in shared}
    for head in heads.values():
        init_weights(head, getattr(model.config, "init_std", 0.02))
    return PretrainingModel(model, heads)
