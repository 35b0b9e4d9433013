"""VLMo: one transformer with an expert for each modality, as a dual encoder and as a fusion encoder.

H. Bao, W. Wang, L. Dong, Q. Liu, O. K. Mohammed, K. Aggarwal, S. Som, F. Wei: "VLMo: Unified Vision-Language
Pre-Training with Mixture-of-Modality-Experts", arXiv 2111.02358. Public code: microsoft/unilm, vlmo.

    image  [CLS] patches ── vision experts ─────────────────────────────── [CLS] ── projection ──┐
    text   [CLS] words [SEP] ── language experts ───────────────────────── [CLS] ── projection ──┴── ITC
    pair   [CLS] patches [CLS] words [SEP]                                 ┌── masked words ── MLM
             └─ vision and language experts, each its own ── VL experts ───┴── [CLS] of the text ── ITM, classifiers

What the paper says: pre-LN blocks in which attention is shared, and a feed-forward net is chosen by modality and layer
(section 3.2); in the last layers a pair's tokens all go through a vision-language expert. Three losses are summed
(3.3): image-text contrast on the two [CLS]; matching of true pairs against negatives drawn by contrastive similarity;
masked language modelling, 15% as BERT, the image in full sight. Beforehand (3.4) the vision experts and attention learn
from images alone as in BEiT, then the language experts from texts alone while vision experts and attention are frozen.
Fine-tuned, it embeds apart for retrieval, or reads [CLS] of the text after fusion for classification (3.5).

Where the paper is silent, or its code does otherwise, what is done here:
- Section 3.1 adds learnt positions. Base and large of the public code have relative position biases instead, as BEiT
  has, without which BEiT's weights could not be taken over; so have we. `positions: absolute` is the formula.
- The last 2 (base) or 3 (large) layers have a vision-language expert (`vl_start`); it starts fresh.
- The two sub-layers' outputs are scaled by learnt vectors, 0.1 at first, and dropped by stochastic depth
  (`layer_scale`, `drop_path`). All experts of a layer share its scales.
- `stem` may put a CNN before the patches' projection, a small one or one of timm's, for models that learn to see from
  little; it is neither the paper's nor its code's (`embeddings.py`, `cnn_stem.py`).
- Text embeddings are normalised before the type is added, as BERT's are. A text's norm is the embedding's.
- A linear layer with tanh stands between [CLS] and the matching classifier, as in BERT; so it does for tasks.
- Contrast has one projection of each modality and a learnt temperature, starting at 0.07; one divided by it is limited
  to 100 (CLIP). Pairs of one image are no negatives of each other. The candidates are those of all processes, and the
  gradient is the whole batch's; in the public code that of the embeddings is divided by the number of processes.
- Matching has 3 pairs for each given one: itself, its text with another image, its image with another text. Negatives
  are drawn from all processes. A pair without any (a batch of one image) is told right alone.
- Masked words follow BERT's 80/10/10 (`mask_scheme`); matching reads the unmasked text.
- Images alone: `image_tokens.py` says what is told of a hidden patch.

Where the public code does otherwise: public/. Its sum weighs MLM by 0.25; the paper's has no weights.

MLM and matching run as one pass over pairs, words are told apart at masked places only, position biases are gathered
once a step, and only real tokens are computed (layers/packing.py). An image's tokens come first, so that a shorter
text's biases are a corner of a longer one's.

Shape suffixes: B images, S image tokens ([CLS] and N patches), N texts or pairs, T text tokens, M packed tokens; D
hidden, E embedding, H heads, V vocabulary, G the pairs of all processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.blocks import init_weights
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.partial_load import PartialLoad, check_same_config
from vlp_models.models.protocols import Figure, Fused
from vlp_models.models.vlmo.config import HALF, VLMoConfig
from vlp_models.models.vlmo.embeddings import PatchEmbedding, WordEmbedding
from vlp_models.models.vlmo.image_tokens import ImageTokens
from vlp_models.models.vlmo.interpolation import fit_weights
from vlp_models.models.vlmo.pretraining import (
    FusionPairs,
    Learners,
    check_objectives,
    draw_pairs,
    hidden_patches,
    masked_words,
)
from vlp_models.models.vlmo.transformer import MoMEBlock, PositionBias, Route
from vlp_models.objectives.contrastive import EmbeddedPairs, image_text_contrast
from vlp_models.objectives.loss import Count, Loss, cross_entropy
from vlp_models.objectives.masked_modeling import masked_language_modeling
from vlp_models.objectives.matching import different_image_mask
from vlp_models.objectives.ranks import sizes_over_ranks

Biases = tuple[Tensor, ...]  # of each layer [H, tokens, tokens]; empty: positions are absolute
Way = Literal["vision", "language", "pair"]
TIMMS = "image_embedding.stem.backbone."  # with `stem: timm`: begins as timm has it, and is a group of its own


class VLMo(nn.Module):
    """Meets `Embeds`, `Fuses`, `ScoresPairs`, `Contrasts`, `Pretrains`, `GroupsParameters`, `LoadsPartially`,
    `EncodesCells`, `HasFigures`, on pixels."""

    config_class: ClassVar[type] = VLMoConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=("hidden", "heads", "intermediate", "patch", "stem", "positions", "feed_forward")
    )
    objectives: tuple[str, ...]
    fused_dim: int

    def __init__(self, config: VLMoConfig) -> None:
        super().__init__()
        self.config = config
        self.objectives = ("itc", "itm", "mlm", "mim") if config.image_codes else ("itc", "itm", "mlm")
        hidden = config.hidden
        self.image_embedding = PatchEmbedding(config)
        self.text_embedding = WordEmbedding(config)
        self.blocks = nn.ModuleList(self._block(layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)

        self.image_projection = nn.Linear(hidden, hidden, bias=False)
        self.text_projection = nn.Linear(hidden, hidden, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))
        if config.contrast == "both":
            self.fused_image_projection = nn.Linear(hidden, hidden, bias=False)
            self.fused_text_projection = nn.Linear(hidden, hidden, bias=False)
            self.fused_log_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))
        self.pooler = nn.Linear(hidden, hidden)
        self.match_head = nn.Linear(hidden, 2)  # no, yes
        self.word_head = TokenHead(hidden, config.vocab_size, eps=config.embedding_norm_eps)
        self.image_head = nn.Linear(hidden, config.image_codes) if config.image_codes else None
        self.fused_dim = 2 * hidden if config.classifier == "mlp" else hidden
        mlp = (nn.Linear(hidden, 2 * hidden), nn.LayerNorm(2 * hidden), nn.GELU())
        self.before_classifier = nn.Sequential(*(mlp if config.classifier == "mlp" else ()))
        init_weights(self, config.init_std, but=(TIMMS,))

        for block in self._blocks():
            block.reset_scales()
        sizes = config.layers, config.heads, config.grid, config.max_positions
        self.position_bias = PositionBias(*sizes) if config.positions == "relative" else None  # zeros at first
        self.image_tokens = ImageTokens(config)

    def _block(self, layer: int) -> MoMEBlock:
        config = self.config
        experts = ["vision", "language"] + ["vision_language"] * (layer >= config.vl_start)
        return MoMEBlock(
            config.hidden,
            config.heads,
            config.intermediate,
            experts=experts if config.feed_forward == "experts" else ["shared"],
            layer_scale=config.layer_scale,
            drop_path=config.drop_path * layer / max(1, config.layers - 1),
            eps=config.layer_norm_eps,
        )

    @property
    def inputs(self) -> ModelInputs:
        config, half = self.config, (HALF, HALF, HALF)
        low, high = config.crop_scale
        image = PixelInput(
            height=config.side,
            width=config.side,
            mean=half,
            std=half,
            augment=tuple(config.augment),
            crop_scale=(low, high),
            patch=config.patch,
        )
        return ModelInputs(image=image, whole_words=config.whole_words)

    # ---- The transformer: an image, a text, or a pair --------------------------------------------------------

    def encode_image(self, image: Image, hidden_BN: Tensor | None = None) -> Tensor:
        """All that can be known of images before any text: [B, S, D], before the first layer."""
        if not isinstance(image, Pixels):
            raise DataError("VLMo reads pixels, not region features")
        return self.image_embedding(image, hidden_BN)

    def image_states(self, patches_BSD: Tensor, biases: Biases) -> Tensor:
        """[B, S, D]: images alone, through the vision experts."""
        x_MD, packing = self._packed(patches_BSD)
        return packing.pad(self.norm(self.run(x_MD, packing, "vision", biases)))

    @property
    def cell_side(self) -> int:
        return self.config.patch

    def cells(self, image: Pixels) -> Tensor:
        """[B, rows, columns, D]: the patches, as they leave the stem or, without, the vision experts."""
        grid = (self.config.grid, self.config.grid)
        if self.config.stem != "linear":
            return self.image_embedding.look(image.pixels_B3HW).unflatten(1, grid)
        states_BSD = self.image_states(self.encode_image(image), self.biases(0))
        return states_BSD[:, 1:].unflatten(1, grid)

    def text_states(self, ids_NT: Tensor, words: Packing, biases: Biases) -> Tensor:
        """[M, D]: texts alone, through the language experts."""
        return self.norm(self.run(self.text_embedding(ids_NT, words), words, "language", biases))

    def pair_states(self, patches_NSD: Tensor, ids_NT: Tensor, words: Packing, biases: Biases) -> tuple[Tensor, Tensor]:
        """An image and a text together: [N, S, D] and [M, D]."""
        image_MD, images = self._packed(patches_NSD)
        joint = images.beside(words)
        x = self.norm(self.run(torch.cat([image_MD, self.text_embedding(ids_NT, words)]), joint, "pair", biases))
        return images.pad(x[: joint.split]), x[joint.split :]

    def run(
        self, x_MD: Tensor, packing: Packing, way: Way, biases: Biases, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Layers `first` to `last` (excluded), without the norm behind them."""
        keys = None if packing.full else padding_mask(packing.mask_BT)
        for layer, block in enumerate(self._blocks()[first:last], first):
            mask = keys
            if biases:
                bias = biases[layer][None].to(x_MD.dtype)
                mask = bias if keys is None else bias.masked_fill(~keys, float("-inf"))
            x_MD = block(x_MD, mask, packing, self.route(way, layer))
        return x_MD

    def route(self, way: Way, layer: int) -> Route:
        if way == "pair":
            return "vision_language" if layer >= self.config.vl_start else "each"
        return way

    def biases(self, text_len: int, *, image: bool = True) -> Biases:
        """What attention adds for a text of this many tokens, alone or behind an image.

        Raises:
            ParamsError: a text is too long.
        """
        if text_len > self.config.max_positions:
            raise ParamsError(f"{text_len} tokens of text, but config.max_positions is {self.config.max_positions}")
        return () if self.position_bias is None else self.position_bias(text_len, image=image)

    def _corner(self, biases: Biases, text_len: int, *, image: bool = True) -> Biases:
        """Of a pair's biases those of a shorter text, of the image alone (0), or of the text alone."""
        start, image_tokens = 0 if image else 1 + self.config.grid**2, 1 + self.config.grid**2
        end = image_tokens + text_len
        return tuple(bias[:, start:end, start:end] for bias in biases)

    def _packed(self, patches_BSD: Tensor) -> tuple[Tensor, Packing]:
        """Every patch is a real token."""
        rows, shape = patches_BSD.flatten(0, 1), (patches_BSD.shape[0], patches_BSD.shape[1])
        return rows, Packing(torch.arange(len(rows), device=rows.device), shape, full=True)

    def _blocks(self) -> list[MoMEBlock]:
        return cast("list[MoMEBlock]", list(self.blocks))

    # ---- The dual encoder ------------------------------------------------------------------------------------

    def embed_image(self, image: Image) -> Tensor:
        states_BSD = self.image_states(self.encode_image(image), self.biases(0))
        return F.normalize(self.image_projection(states_BSD[:, 0]), dim=-1)

    def embed_text(self, text: Text) -> Tensor:
        words = Packing.of(text.mask_BT)
        states_MD = self.text_states(text.ids_BT, words, self.biases(text.ids_BT.shape[1], image=False))
        return F.normalize(self.text_projection(take(states_MD, first_rows(words))), dim=-1)

    def contrast_scale(self) -> Tensor:
        """One divided by the temperature."""
        return self._scale(self.log_scale)

    def _scale(self, log_scale: Tensor) -> Tensor:
        scale = log_scale.exp()
        if not self.config.max_scale:
            return scale
        # Clamping alone would have no gradient: once beyond its limit, a temperature could never come back.
        return scale + (scale.clamp(max=self.config.max_scale) - scale).detach()

    # ---- The fusion encoder ----------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        """`image_BRD` has [CLS] of the image at 0. Images are embedded once, also where several texts share one."""
        patches, owner_N = self.encode_image(image), text.owners(len(image))
        return self._fuse(patches if owner_N is None else patches.index_select(0, owner_N), text)

    def score(self, state: Tensor, text: Text, image_of_text_N: Tensor) -> Tensor:
        """How much likelier each text and its image match than not, as the matching head has it: [N]."""
        pooled_ND = self._fuse(state.index_select(0, image_of_text_N), text, classify=False).pooled_BP
        return self.match_head(pooled_ND) @ pooled_ND.new_tensor([-1.0, 1.0])

    def _fuse(self, patches_NSD: Tensor, text: Text, *, classify: bool = True) -> Fused:
        words = Packing.of(text.mask_BT)
        biases = self.biases(text.ids_BT.shape[1])
        image_NSD, text_MD = self.pair_states(patches_NSD, text.ids_BT, words, biases)
        pooled_ND = self.pool(text_MD, words)
        return Fused(
            image_BRD=image_NSD,
            text_BTD=words.pad(text_MD),
            pooled_BP=self.before_classifier(pooled_ND) if classify else pooled_ND,
        )

    def pool(self, text_MD: Tensor, words: Packing) -> Tensor:
        """[N, D]: of a pair, from [CLS] of the text."""
        return self.pooler(take(text_MD, first_rows(words))).tanh()

    # ---- Pretraining -----------------------------------------------------------------------------------------

    def pretraining_losses(
        self,
        batch: Batch,
        *,
        objectives: Learners,
        generator: torch.Generator,
        mask_probability: float,
        others: Sequence[EmbeddedPairs] | None = None,
    ) -> dict[str, Loss]:
        """One unweighted loss per objective: `itc`, `itm` and `mlm` of pairs; `mlm` of texts alone; `mim` of images.

        others: of each contrast the embeddings of the update's other micro-batches (`EmbedsPairs`).

        Raises:
            ParamsError: an objective is unknown, or the batch lacks what it is about.
        """
        check_objectives(objectives, self.objectives, batch)
        losses: dict[str, Loss] = {}
        masked_NT, ids_NT = masked_words(batch.text, self.config, objectives, generator, mask_probability)
        if batch.image is None:
            words = Packing.of(batch.text.mask_BT)
            text_MD = self.text_states(ids_NT, words, self.biases(ids_NT.shape[1], image=False))
            losses["mlm"] = self.word_loss(text_MD, words, masked_NT, batch.text)
        elif {"itc", "itm", "mlm"} & set(objectives):
            losses = self.pair_losses(batch, masked_NT, ids_NT, objectives, generator, others)
        if "mim" in objectives:
            losses["mim"] = self.image_loss(batch.image, objectives["mim"], generator)
        return losses

    def pair_losses(
        self,
        batch: Batch,
        masked_NT: Tensor,
        ids_NT: Tensor,
        objectives: Learners,
        generator: torch.Generator,
        others: Sequence[EmbeddedPairs] | None,
    ) -> dict[str, Loss]:
        """ITC, ITM and MLM of pairs. masked_NT, ids_NT: the words that MLM tells, and the texts without them."""
        losses: dict[str, Loss] = {}
        # Texts of other processes, which matching may draw, may be longer.
        text_len = max(size for (size,) in sizes_over_ranks((ids_NT.shape[1],))) if "itm" in objectives else 0
        biases = self.biases(max(text_len, ids_NT.shape[1]))
        patches_BSD, owner_N = self.encode_image(batch.image), batch.text.owners(len(batch.image))
        names = self._names(batch, owner_N)
        pairs = FusionPairs(patches_BSD=patches_BSD, owner_N=owner_N)
        if "mlm" in objectives:
            pairs.add_own(ids_NT, batch.text.mask_BT)
        if {"itc", "itm"} & set(objectives):
            with torch.set_grad_enabled(torch.is_grad_enabled() and "itc" in objectives):
                vectors = self.contrast_vectors(patches_BSD, batch.text, biases)
            if "itc" in objectives:
                losses["itc"] = self.contrast_loss(vectors, names, owner_N, objectives["itc"], others)
            if "itm" in objectives:
                images_NE, texts_NE = vectors[0]
                images_NE = images_NE if owner_N is None else images_NE.index_select(0, owner_N)
                scale = self.contrast_scale().detach()
                matched_R = draw_pairs(
                    pairs, batch.text, images_NE, texts_NE, scale, names, objectives["itm"], generator
                )
        if not {"itm", "mlm"} & set(objectives):
            return losses
        ids, mask, patches_RSD = pairs.joined()
        words = Packing.of(mask)
        _, text_MD = self.pair_states(patches_RSD, ids, words, self._corner(biases, ids.shape[1]))
        own = len(batch.text) if "mlm" in objectives else 0
        if "mlm" in objectives:
            rest_NT = F.pad(masked_NT, (0, ids.shape[1] - masked_NT.shape[1], 0, len(ids) - own))
            losses["mlm"] = self.word_loss(text_MD, words, rest_NT, batch.text, masked_NT)
        if "itm" in objectives:
            logits = self.match_head(self.pool(text_MD, words)[own:])
            losses["itm"] = cross_entropy(logits, matched_R, name="itm")
        return losses

    def pretraining_counts(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Count] | None:
        """The counts of `pretraining_losses`: places, patches and pairs decide them, no weight does."""
        masked_NT, _ = masked_words(batch.text, self.config, objectives, generator, mask_probability)
        counts: dict[str, Count] = {"mlm": masked_NT.sum()} if "mlm" in objectives else {}
        if "mim" in objectives:
            counts["mim"] = self.hidden_patches(batch.image, objectives["mim"], generator).sum()
        if {"itc", "itm"} & set(objectives):
            names = self._names(batch, batch.text.owners(len(batch.image)))
            contested_N = different_image_mask(names, self.norm.weight.device).any(1)
            if "itm" in objectives:
                learners_N = objectives["itm"]
                learners_N = torch.ones_like(contested_N) if learners_N is None else learners_N
                counts["itm"] = learners_N.sum() + 2 * (learners_N & contested_N).sum()
            if "itc" in objectives:
                if objectives["itc"] is not None:  # whose negatives are those that learn it, too
                    return None
                counts["itc"] = contested_N.sum()
        return {name: counts[name] for name in objectives}

    def contrast_vectors(self, patches_BSD: Tensor, text: Text, biases: Biases) -> list[tuple[Tensor, Tensor]]:
        """Unit vectors of images [B, E] and of texts [N, E]: of the unimodal encoders; with `contrast: both` besides of
        the last layers' vision-language experts, on either alone."""
        words, length = Packing.of(text.mask_BT), text.ids_BT.shape[1]
        image_MD, images = self._packed(patches_BSD)
        sides = (
            (image_MD, images, "vision", self._corner(biases, 0), "image"),
            (
                self.text_embedding(text.ids_BT, words),
                words,
                "language",
                self._corner(biases, length, image=False),
                "text",
            ),
        )
        both = self.config.contrast == "both"
        found: list[list[Tensor]] = [[], []]
        for x_MD, packing, way, own, name in sides:
            first = self.config.vl_start if both else self.config.layers
            middle_MD = self.run(x_MD, packing, cast(Way, way), own, last=first)
            tops = [(self.run(middle_MD, packing, cast(Way, way), own, first=first), f"{name}_projection")]
            if both:
                tops.append((self.run(middle_MD, packing, "pair", own, first=first), f"fused_{name}_projection"))
            for vectors, (top_MD, projection) in zip(found, tops, strict=False):
                cls_BD = self.norm(take(top_MD, first_rows(packing)))
                vectors.append(F.normalize(getattr(self, projection)(cls_BD), dim=-1))
        return [(vectors[0], vectors[1]) for vectors in found if vectors]

    def _names(self, batch: Batch, owner_N: Tensor | None) -> tuple[str, ...]:
        """Of each text; two that are equal are no negatives of each other: the image that it is about, or with
        `same_image_negatives` one that no other text has."""
        if self.config.same_image_negatives:
            return tuple(f"{number} {name}" for number, name in enumerate(owned(batch.sample_ids, owner_N)))
        return owned(batch.image_ids, owner_N)

    @torch.no_grad()
    def contrast_pairs(self, batch: Batch) -> list[EmbeddedPairs]:
        """Of each branch of contrast, what this batch's pairs are embedded to."""
        if batch.image is None or batch.text is None:
            raise ParamsError("`contrast_over: update` is for pairs; a view of images or texts alone has no contrast")
        owner_N = batch.text.owners(len(batch.image))
        names = self._names(batch, owner_N)
        biases = self.biases(batch.text.ids_BT.shape[1])
        found = self.contrast_vectors(self.encode_image(batch.image), batch.text, biases)
        return [
            EmbeddedPairs(
                texts_KE=t_NE, images_KE=i_BE if owner_N is None else i_BE.index_select(0, owner_N), image_ids=names
            )
            for i_BE, t_NE in found
        ]

    def contrast_loss(
        self,
        vectors: list[tuple[Tensor, Tensor]],
        image_ids: tuple[str, ...],
        owner_N: Tensor | None,
        learners: Tensor | None,
        others: Sequence[EmbeddedPairs] | None = None,
    ) -> Loss:
        """ITC; of two branches the mean. others: of each branch, the embeddings of the update's other micro-batches."""
        scales = [self.log_scale, *([self.fused_log_scale] if self.config.contrast == "both" else [])]
        losses = []
        for number, ((images_BE, texts_NE), log_scale) in enumerate(zip(vectors, scales, strict=True)):
            images_NE = images_BE if owner_N is None else images_BE.index_select(0, owner_N)
            ids = image_ids
            if learners is not None:
                rows_R = learners.nonzero().squeeze(1)
                texts_NE, images_NE = texts_NE.index_select(0, rows_R), images_NE.index_select(0, rows_R)
                ids = tuple(image_ids[i] for i in rows_R.tolist())
            name = "itc" if not number else "itc_fused"
            beside = others[number] if others else None
            losses.append(
                image_text_contrast(texts_NE, images_NE, ids, self._scale(log_scale), name=name, others=beside)
            )
        if len(losses) == 1:
            return losses[0]
        one, two = losses
        return Loss(sum=(one.sum + two.sum) / 2, count=one.count, parts={**one.parts, **two.parts})

    def word_loss(
        self, text_MD: Tensor, words: Packing, places_RT: Tensor, text: Text, masked_NT: Tensor | None = None
    ) -> Loss:
        """MLM. places_RT: the masked words among all texts of the pass; masked_NT: among the batch's own."""
        logits_MV = self.word_head(take(text_MD, words.rows_at(places_RT)))
        return masked_language_modeling(logits_MV, text.ids_BT[places_RT if masked_NT is None else masked_NT])

    def image_loss(self, image: Image, learners: Tensor | None, generator: torch.Generator) -> Loss:
        """MIM: the visual tokens of hidden patches, by the vision experts (BEiT, section 2.3)."""
        assert isinstance(image, Pixels) and self.image_head is not None
        hidden_BN = self.hidden_patches(image, learners, generator)
        states_BSD = self.image_states(self.encode_image(image, hidden_BN), self.biases(0))
        tokens_BN = self.image_tokens(image.pixels_B3HW)
        return cross_entropy(self.image_head(states_BSD[:, 1:][hidden_BN]), tokens_BN[hidden_BN], name="mim")

    def hidden_patches(self, image: Image, learners: Tensor | None, generator: torch.Generator) -> Tensor:
        return hidden_patches(len(image), self.config, learners, generator, self.norm.weight.device)

    # ---- What training asks ----------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """By what the stages of pretraining freeze: `attention` has its norms and the layers' scales; `cnn` is that of
        `stem: timm`, which is then no part of `image_embedding`."""
        groups: dict[str, list[nn.Parameter]] = {}
        parts = {"image_embedding", "text_embedding", "position_bias", "norm"}
        for name, parameter in self.named_parameters():
            path = name.split(".")
            if name.startswith(TIMMS):
                group = "cnn"
            elif path[0] == "blocks":
                group = f"{path[3]}_expert" if path[2] == "experts" else "attention"
            else:
                group = path[0] if path[0] in parts else "heads"
            groups.setdefault(group, []).append(parameter)
        return groups

    def figures(self, batches: Iterable[Batch]) -> list[Figure]:
        """Which expert saw what of these images and texts (seen.py)."""
        from vlp_models.models.vlmo.expert_usage import expert_usage_figures

        return expert_usage_figures(self, batches)

    def fit_weights(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Adapt the weights of another VLMo to this one's image size and text length (interpolation.py).

        Raises:
            CheckpointError: another resolution without `interpolate_positions`, or another CNN before the patches.
        """
        if self.config.stem == "timm":
            check_same_config(config, dataclasses.asdict(self.config), ("stem_backbone", "stem_stage"))
        return fit_weights(self.config, weights, config)


def first_rows(packing: Packing) -> Tensor:
    """int64 [B]: the row of each sequence's first token."""
    counts_B = packing.mask_BT.sum(1)
    return counts_B.cumsum(0) - counts_B


def owned(names: tuple[str, ...], owner_N: Tensor | None) -> tuple[str, ...]:
    """Each text's, of a batch's images. owner_N: their rows; None: one text an image."""
    return names if owner_N is None else tuple(names[i] for i in owner_N.tolist())
