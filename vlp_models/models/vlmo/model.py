"""VLMo: one transformer with an expert for each modality, as a dual encoder and as a fusion encoder.

H. Bao, W. Wang, L. Dong, Q. Liu, O. K. Mohammed, K. Aggarwal, S. Som, F. Wei: "VLMo: Unified Vision-Language
Pre-Training with Mixture-of-Modality-Experts", arXiv 2111.02358. Public code: microsoft/unilm, vlmo.

    image  [CLS] patches ── vision experts ─────────────────────────────── [CLS] ── projection ──┐
    text   [CLS] words [SEP] ── language experts ───────────────────────── [CLS] ── projection ──┴── ITC
    pair   [CLS] patches [CLS] words [SEP]                                 ┌── masked words ── MLM
             └─ vision and language experts, each its own ── VL experts ───┴── [CLS] of the text ── ITM, classifiers

The paper: pre-LN blocks with shared attention and a feed-forward net chosen by modality and layer (section 3.2). In the
last layers all tokens of a pair go through a vision-language expert. Three losses are summed (3.3): image-text contrast
on the two [CLS]; matching of true pairs against negatives drawn by contrastive similarity; masked language modeling of
15% of the words as in BERT, with the whole image visible. Before that (3.4), the vision experts and attention learn
from images alone as in BEiT, then the language experts from texts alone with vision experts and attention frozen.
Fine-tuned, the model embeds images and texts separately for retrieval, or classifies from the text's [CLS] after fusion
(3.5).

Where the paper is silent or its code differs, this model does the following:
- Section 3.1 adds learned positions. Base and large in the public code have relative position biases instead, as BEiT
  does, which BEiT's weights require; so do these. `positions: absolute` is the formula.
- The last 2 (base) or 3 (large) layers have a vision-language expert (`vl_start`), randomly initialized.
- The two sub-layers' outputs are scaled by learned vectors, initially 0.1, and dropped by stochastic depth
  (`layer_scale`, `drop_path`). All experts of a layer share its scales. In the lower layers of a pair, the image's
  expert and the text's are dropped independently, as in the public code; attention and the vision-language expert are
  dropped for the whole pair.
- `stem` may put a CNN before the patch projection, for models that train on few images; neither the paper nor its code
  has one (embeddings.py).
- Text embeddings are normalized before the type is added, as in BERT.
- A linear layer with tanh lies between [CLS] and the matching classifier, as in BERT, and likewise for tasks.
- Contrast has one projection per modality and a learned temperature, initially 0.07; 1 / temperature is limited to 100
  (CLIP). Pairs of the same image are not each other's negatives. Candidates come from all processes, and the gradient
  is the whole batch's; in the public code the embeddings' gradient is divided by the number of processes.
- Matching has 3 pairs for each given one: itself, its text with another image, its image with another text. Negatives
  are drawn from all processes. A pair without negatives (a batch of one image) is used only as a true pair.
- Masked words follow BERT's 80/10/10 (`mask_scheme`); matching reads the unmasked text.
- Images alone: image_tokens.py defines the targets of hidden patches.

`PublicSwitches` in config.py lists what the public code does differently. Its sum weighs MLM by 0.25, as a recipe's
`objectives: {itc: 1.0, itm: 1.0, mlm: 0.25}`; the paper's has no weights.

MLM and matching share one pass over pairs, words are predicted only at masked positions, position biases are gathered
once per step, and only real tokens are computed (layers/packing.py). Image tokens come first, so that a shorter text's
biases are a corner of a longer one's.

Shape suffixes: B images, S image tokens ([CLS] and N patches), N texts or pairs, T text tokens, M packed tokens; D
hidden, E embedding, H heads, V vocabulary, R pairs or rows, G the pairs of all processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Pixels, PixelSets, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.blocks import init_weights
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.located import located_cells
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.layers.several_images import add_places, place_embedding
from vlp_models.models.partial_load import PartialLoad, check_same_config
from vlp_models.models.protocols import Fused, Located
from vlp_models.models.vlmo.config import HALF, VLMoConfig
from vlp_models.models.vlmo.embeddings import PatchEmbedding, WordEmbedding
from vlp_models.models.vlmo.image_tokens import ImageTokens
from vlp_models.models.vlmo.interpolation import fit_weights
from vlp_models.models.vlmo.pretraining import (
    Pairs,
    check_objectives,
    join_pairs,
    mask_words,
    matching_pairs,
    rows_of_texts,
)
from vlp_models.models.vlmo.transformer import MoMEBlock, PositionBias, Route
from vlp_models.objectives.contrastive import EmbeddedPairs, image_text_contrast
from vlp_models.objectives.distributed import sizes_over_ranks
from vlp_models.objectives.loss import Count, Learners, Loss, cross_entropy, learners_by_text
from vlp_models.objectives.masked_modeling import masked_language_modeling, select_blocks
from vlp_models.objectives.matching import different_image_mask

Biases = tuple[Tensor, ...]  # per layer [H, tokens, tokens]; empty if positions are absolute
Stream = Literal["vision", "language", "pair"]
TIMM_STEM = "image_embedding.stem.backbone."  # keeps timm's initialization; a parameter group of its own


class VLMo(nn.Module):
    """Implements `Embeds`, `Fuses`, `LocatesStates`, `ScoresPairs`, `Contrasts`, `Pretrains`, `GroupsParameters`,
    `LoadsPartially`, `EncodesCells`, for pixels."""

    config_class: ClassVar[type] = VLMoConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=("hidden", "heads", "intermediate", "patch", "stem", "positions", "feed_forward")
    )
    objectives: tuple[str, ...]
    fused_dim: int
    text_dim: int
    located_dim: int
    images_per_text: int

    def __init__(self, config: VLMoConfig) -> None:
        super().__init__()
        self.config = config
        self.objectives = ("itc", "itm", "mlm", "mim") if config.image_codes else ("itc", "itm", "mlm")
        hidden = config.hidden
        self.image_embedding = PatchEmbedding(config)
        self.text_embedding = WordEmbedding(config)
        blocks = []
        for layer in range(config.layers):
            # Every layer encodes images and texts alone, from `vl_start` on also pairs. Deep ones are dropped the most.
            experts = ["vision", "language"] + ["vision_language"] * (layer >= config.vl_start)
            blocks.append(
                MoMEBlock(
                    hidden,
                    config.heads,
                    config.intermediate,
                    experts=experts if config.feed_forward == "experts" else ["shared"],
                    layer_scale=config.layer_scale,
                    drop_path=config.drop_path * layer / max(1, config.layers - 1),
                    eps=config.layer_norm_eps,
                )
            )
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)

        # Contrast, then matching, words and visual tokens, then the tasks' classifiers.
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
        self.text_dim = self.located_dim = hidden
        mlp = (nn.Linear(hidden, 2 * hidden), nn.LayerNorm(2 * hidden), nn.GELU())
        self.before_classifier = nn.Sequential(*(mlp if config.classifier == "mlp" else ()))
        init_weights(self, config.init_std, skip=(TIMM_STEM,))

        for block in blocks:
            block.reset_scales()
        sizes = config.layers, config.heads, config.grid, config.max_positions
        self.position_bias = PositionBias(*sizes) if config.positions == "relative" else None  # zeros at first
        self.image_tokens = ImageTokens(config)
        self.images_per_text = config.images_per_text
        self.place_embedding = place_embedding(config.images_per_text, hidden)

    @property
    def inputs(self) -> ModelInputs:
        """Return the pixels and text lengths that the model reads."""
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
        """Return the input of the first layer, [B, S, D]; it does not depend on the text."""
        if not isinstance(image, Pixels):
            raise DataError("VLMo reads pixels, not region features")
        return self.image_embedding(image, hidden_BN)

    def image_states(self, patches_BSD: Tensor, biases: Biases) -> Tensor:
        """Encode images alone, with the vision experts: [B, S, D]."""
        x_MD, packing = self._packed(patches_BSD)
        return packing.pad(self.norm(self.run(x_MD, packing, "vision", biases)))

    @property
    def cell_side(self) -> int:
        return self.config.patch

    def cells(self, image: Pixels) -> Tensor:
        """Return a map of the image, [B, rows, columns, D]: of the stem if there is one, else the last layer."""
        grid = (self.config.grid, self.config.grid)
        if self.config.stem != "linear":
            return self.image_embedding.embed_patches(image.pixels_B3HW).unflatten(1, grid)
        states_BSD = self.image_states(self.encode_image(image), self.biases(0))
        return states_BSD[:, 1:].unflatten(1, grid)

    def text_states(self, ids_NT: Tensor, words: Packing, biases: Biases) -> Tensor:
        """Encode texts alone, with the language experts: [M, D]."""
        return self.norm(self.run(self.text_embedding(ids_NT, words), words, "language", biases))

    def pair_states(
        self, patches_NSD: Tensor, ids_NT: Tensor, words: Packing, biases: Biases, mask_NS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode an image and a text together: [N, S, D] and [M, D]. mask_NS bool: the real image tokens; None: all."""
        if mask_NS is None:
            image_MD, images = self._packed(patches_NSD)
        else:
            images = Packing.of(mask_NS)
            image_MD = images.pack(patches_NSD)
        # Packed rows: all image tokens first, then all words; `joint.split` is their boundary.
        joint = images.concat(words)
        x = self.norm(self.run(torch.cat([image_MD, self.text_embedding(ids_NT, words)]), joint, "pair", biases))
        return images.pad(x[: joint.split]), x[joint.split :]

    def run(
        self, x_MD: Tensor, packing: Packing, stream: Stream, biases: Biases, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Run layers `first` to `last` (excluded), without the final norm. [M, D] -> [M, D]"""
        # Without padding there is nothing to mask.
        real_keys = None if packing.full else padding_mask(packing.mask_BT)
        for layer, block in enumerate(list(self.blocks)[first:last], first):
            mask = real_keys
            if biases:
                # One mask holds both: the bias that is added to a score, and -inf for padding.
                bias = biases[layer][None].to(x_MD.dtype)
                mask = bias if real_keys is None else bias.masked_fill(~real_keys, float("-inf"))
            x_MD = block(x_MD, mask, packing, self.route(stream, layer))
        return x_MD

    def route(self, stream: Stream, layer: int) -> Route:
        """Return the expert for a layer: in a pair, each modality's own in lower layers, the shared one in the last."""
        if stream == "pair":
            return "vision_language" if layer >= self.config.vl_start else "each"
        return stream

    def biases(self, text_len: int, *, image: bool = True) -> Biases:
        """Return the position biases for a text of this many tokens, alone or after an image.

        Raises:
            ParamsError: the text is too long.
        """
        if text_len > self.config.max_positions:
            raise ParamsError(f"{text_len} tokens of text, but config.max_positions is {self.config.max_positions}")
        return () if self.position_bias is None else self.position_bias(text_len, image=image)

    def _corner(self, biases: Biases, text_len: int, *, image: bool = True) -> Biases:
        """Return the part of a pair's biases for a shorter text, the image alone (text_len 0), or the text alone."""
        # In a pair's table, the image's tokens come before the text's.
        image_tokens = 1 + self.config.grid**2
        start, end = 0 if image else image_tokens, image_tokens + text_len
        return tuple(bias[:, start:end, start:end] for bias in biases)

    def _several_images(self, biases: Biases, images: int) -> Biases:
        """Return a pair's biases for several images in a row. Offsets between images have no meaning: zero."""
        tokens, extended = 1 + self.config.grid**2, []
        for bias in biases:
            identity = torch.eye(images, device=bias.device, dtype=bias.dtype)[None]
            # [H, K * S, K * S]: each image's own biases on the diagonal; [H, K * S, T] and [H, T, K * S]: repeated.
            within = torch.kron(identity, bias[:, :tokens, :tokens])
            to_text = bias[:, :tokens, tokens:].repeat(1, images, 1)
            from_text = bias[:, tokens:, :tokens].repeat(1, 1, images)
            above = torch.cat([within, to_text], 2)
            below = torch.cat([from_text, bias[:, tokens:, tokens:]], 2)
            extended.append(torch.cat([above, below], 1))
        return tuple(extended)

    def _packed(self, patches_BSD: Tensor) -> tuple[Tensor, Packing]:
        """Pack image tokens (none is padding): [B, S, D] -> [B * S, D]."""
        rows, shape = patches_BSD.flatten(0, 1), (patches_BSD.shape[0], patches_BSD.shape[1])
        return rows, Packing(torch.arange(len(rows), device=rows.device), shape, full=True)

    # ---- The dual encoder ------------------------------------------------------------------------------------

    def embed_image(self, image: Image) -> Tensor:
        """Return image vectors of unit length, [B, E]."""
        states_BSD = self.image_states(self.encode_image(image), self.biases(0))
        return F.normalize(self.image_projection(states_BSD[:, 0]), dim=-1)

    def embed_text(self, text: Text) -> Tensor:
        """Return text vectors of unit length, [N, E]."""
        words = Packing.of(text.mask_BT)
        states_MD = self.text_states(text.ids_BT, words, self.biases(text.ids_BT.shape[1], image=False))
        return F.normalize(self.text_projection(take(states_MD, words.first_rows())), dim=-1)

    def contrast_scale(self) -> Tensor:
        """Return 1 / temperature."""
        return self._limited_scale(self.log_scale)

    def _limited_scale(self, log_scale: Tensor) -> Tensor:
        scale = log_scale.exp()
        if not self.config.max_scale:
            return scale
        # A plain clamp has no gradient beyond the limit, so a temperature could never return from there.
        return scale + (scale.clamp(max=self.config.max_scale) - scale).detach()

    # ---- The fusion encoder ----------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        """Fuse images and texts. `image_BRD` starts with [CLS]. An image with several texts is embedded once.

        Several images of a text are one sequence, each with its own [CLS].
        """
        mask, owner_N = None, text.owners(len(image))
        if isinstance(image, PixelSets):
            # All images of the batch at once, then each one's place among its text's images, then one row per text:
            # [M, S, D] -> [B, K * S, D], and bool [B, K * S], True where there is an image.
            images, tokens = image.flat(), 1 + self.config.grid**2
            patches_MSD = self.encode_image(images)
            place_MS = cast(Tensor, images.place_B)[:, None].expand(-1, tokens)
            patches_MSD = add_places(patches_MSD, place_MS, self.place_embedding)
            patches, mask = image.spread(patches_MSD).flatten(1, 2), image.there_BK.repeat_interleave(tokens, 1)
            mask = rows_of_texts(mask, owner_N)
        else:
            patches = self.encode_image(image)
        return self._fuse(rows_of_texts(patches, owner_N), text, mask_NS=mask)

    def locate(self, image: Image, text: Text) -> Located:
        """Return the patches' last states, without [CLS]'s."""
        tokens, grid = 1 + self.config.grid**2, self.config.grid
        states_NKSD = self.fuse(image, text).image_BRD.unflatten(1, (-1, tokens))
        return located_cells(
            states_NKSD[:, :, 1:].flatten(1, 2), image, (grid, grid), self.config.patch, None, text.owner_N
        )

    def score(self, state: Tensor, text: Text, image_of_text_N: Tensor) -> Tensor:
        """Return the matching head's log odds that each text matches its image, [N]."""
        # The logit of a match minus that of none.
        pooled_ND = self._fuse(state.index_select(0, image_of_text_N), text, classify=False).pooled_BP
        return self.match_head(pooled_ND) @ pooled_ND.new_tensor([-1.0, 1.0])

    def _fuse(self, patches_NSD: Tensor, text: Text, *, classify: bool = True, mask_NS: Tensor | None = None) -> Fused:
        words = Packing.of(text.mask_BT)
        biases = self.biases(text.ids_BT.shape[1])
        if mask_NS is not None:
            biases = self._several_images(biases, mask_NS.shape[1] // (1 + self.config.grid**2))
        image_NSD, text_MD = self.pair_states(patches_NSD, text.ids_BT, words, biases, mask_NS)
        pooled_ND = self.pool(text_MD, words)
        return Fused(
            image_BRD=image_NSD,
            text_BTD=words.pad(text_MD),
            pooled_BP=self.before_classifier(pooled_ND) if classify else pooled_ND,
        )

    def pool(self, text_MD: Tensor, words: Packing) -> Tensor:
        """Return each pair's feature, [N, D], from the text's [CLS]."""
        return self.pooler(take(text_MD, words.first_rows())).tanh()

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
        """Return one unweighted loss per objective: `itc`, `itm`, `mlm` for pairs; `mlm` for texts; `mim` for images.

        others: for each contrastive loss, the embeddings of the update's other micro-batches (`EmbedsPairs`).

        Raises:
            ParamsError: an objective is unknown, or the batch lacks its images or texts.
        """
        check_objectives(objectives, self.objectives, batch)
        losses: dict[str, Loss] = {}
        mim_learners = objectives.get("mim")  # images
        objectives = learners_by_text(objectives, None if batch.text is None else batch.text.owner_N)
        # Texts alone train the language experts, pairs all experts, images alone the vision experts.
        masked_NT, ids_NT = mask_words(batch.text, self.config, objectives, generator, mask_probability)
        if batch.image is None:
            words = Packing.of(batch.text.mask_BT)
            text_MD = self.text_states(ids_NT, words, self.biases(ids_NT.shape[1], image=False))
            losses["mlm"] = self.word_loss(text_MD, words, masked_NT, batch.text)
        elif {"itc", "itm", "mlm"} & set(objectives):
            losses = self.pair_losses(batch, masked_NT, ids_NT, objectives, generator, others)
        if "mim" in objectives:
            losses["mim"] = self.image_loss(batch.image, mim_learners, generator)
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
        """Return ITC, ITM and MLM of pairs. masked_NT: the words that MLM predicts; ids_NT: the masked texts."""
        losses: dict[str, Loss] = {}
        # Matching may draw longer texts from other processes, so gather the biases for the longest.
        text_len = max(size for (size,) in sizes_over_ranks((ids_NT.shape[1],))) if "itm" in objectives else 0
        biases = self.biases(max(text_len, ids_NT.shape[1]))
        patches_BSD, owner_N = self.encode_image(batch.image), batch.text.owners(len(batch.image))
        names = self._negative_names(batch, owner_N)
        pairs: list[Pairs] = []
        if "mlm" in objectives:
            pairs.append((ids_NT, batch.text.mask_BT, rows_of_texts(patches_BSD, owner_N)))
        if {"itc", "itm"} & set(objectives):
            # Matching alone needs the vectors only to draw negatives, so it needs no graph of them.
            with torch.set_grad_enabled(torch.is_grad_enabled() and "itc" in objectives):
                vectors = self.contrast_vectors(patches_BSD, batch.text, biases)
            if "itc" in objectives:
                losses["itc"] = self.contrast_loss(vectors, names, owner_N, objectives["itc"], others)
            if "itm" in objectives:
                scale = self.contrast_scale().detach()
                parts, matched_R = matching_pairs(
                    batch.text, patches_BSD, vectors[0], scale, names, objectives["itm"], generator
                )
                pairs += parts
        if not {"itm", "mlm"} & set(objectives):
            return losses
        # One pass of the fusion encoder: rows of MLM first, then those of matching.
        ids, mask, patches_RSD = join_pairs(pairs)
        words = Packing.of(mask)
        _, text_MD = self.pair_states(patches_RSD, ids, words, self._corner(biases, ids.shape[1]))
        mlm_rows = len(batch.text) if "mlm" in objectives else 0
        if "mlm" in objectives:
            # Nothing is predicted in matching's rows, nor beyond the width of the batch's texts: [N, T] -> [R, longest]
            masked_RT = F.pad(masked_NT, (0, ids.shape[1] - masked_NT.shape[1], 0, len(ids) - mlm_rows))
            losses["mlm"] = self.word_loss(text_MD, words, masked_RT, batch.text, masked_NT)
        if "itm" in objectives:
            logits = self.match_head(self.pool(text_MD, words)[mlm_rows:])
            losses["itm"] = cross_entropy(logits, matched_R, name="itm")
        return losses

    def pretraining_counts(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Count] | None:
        """Return the item counts of `pretraining_losses`, without computing it; None if they cannot be known before."""
        mim_learners = objectives.get("mim")  # images
        objectives = learners_by_text(objectives, None if batch.text is None else batch.text.owner_N)
        masked_NT, _ = mask_words(batch.text, self.config, objectives, generator, mask_probability)
        counts: dict[str, Count] = {"mlm": masked_NT.sum()} if "mlm" in objectives else {}
        if "mim" in objectives:
            counts["mim"] = self.hidden_patches(batch.image, mim_learners, generator).sum()
        if {"itc", "itm"} & set(objectives):
            names = self._negative_names(batch, batch.text.owners(len(batch.image)))
            has_negative_N = different_image_mask(names, self.norm.weight.device).any(1)
            if "itm" in objectives:
                learners_N = objectives["itm"]
                learners_N = torch.ones_like(has_negative_N) if learners_N is None else learners_N
                # A true pair for each text, and two mismatched ones for each text that has a negative.
                counts["itm"] = learners_N.sum() + 2 * (learners_N & has_negative_N).sum()
            if "itc" in objectives:
                if objectives["itc"] is not None:  # negatives are only the samples that learn it
                    return None
                counts["itc"] = has_negative_N.sum()
        return {name: counts[name] for name in objectives}

    def contrast_vectors(self, patches_BSD: Tensor, text: Text, biases: Biases) -> list[tuple[Tensor, Tensor]]:
        """Return unit vectors of images [B, E] and texts [N, E], from the unimodal encoders.

        With `contrast: both`, a second tuple comes from the vision-language experts of the last layers, run on images
        and texts separately.
        """
        words, length = Packing.of(text.mask_BT), text.ids_BT.shape[1]
        # Each side is encoded alone, so its biases are a part of the pair's.
        image_MD, images = self._packed(patches_BSD)
        text_MD = self.text_embedding(text.ids_BT, words)
        image_biases, text_biases = self._corner(biases, 0), self._corner(biases, length, image=False)
        both = self.config.contrast == "both"
        split = self.config.vl_start if both else self.config.layers

        def embed(x_MD: Tensor, packing: Packing, stream: Stream, biases: Biases, name: str) -> list[Tensor]:
            # The lower layers run once; the last ones with each of the experts.
            middle_MD = self.run(x_MD, packing, stream, biases, last=split)
            tops = [(self.run(middle_MD, packing, stream, biases, first=split), f"{name}_projection")]
            if both:
                tops.append((self.run(middle_MD, packing, "pair", biases, first=split), f"fused_{name}_projection"))
            vectors = []
            for top_MD, projection in tops:
                cls_BD = self.norm(take(top_MD, packing.first_rows()))
                vectors.append(F.normalize(getattr(self, projection)(cls_BD), dim=-1))
            return vectors

        image_vectors = embed(image_MD, images, "vision", image_biases, "image")
        text_vectors = embed(text_MD, words, "language", text_biases, "text")
        return list(zip(image_vectors, text_vectors, strict=True))

    def _negative_names(self, batch: Batch, owner_N: Tensor | None) -> tuple[str, ...]:
        """Return a name for each text; texts with equal names are not each other's negatives.

        That is the id of its image; with `same_image_negatives`, a name of its own.
        """
        if self.config.same_image_negatives:
            return tuple(f"{number} {name}" for number, name in enumerate(names_by_text(batch.sample_ids, owner_N)))
        return names_by_text(batch.image_ids, owner_N)

    @torch.no_grad()
    def contrast_pairs(self, batch: Batch) -> list[EmbeddedPairs]:
        """Return this batch's embedded pairs, for each contrastive loss."""
        if batch.image is None or batch.text is None:
            raise ParamsError(
                "`contrast_over: update` needs pairs; a view of images or texts alone has no contrastive loss"
            )
        owner_N = batch.text.owners(len(batch.image))
        # One pair for each text, with a copy of its image's vector.
        names = self._negative_names(batch, owner_N)
        biases = self.biases(batch.text.ids_BT.shape[1])
        contrasts = []
        for images_BE, texts_NE in self.contrast_vectors(self.encode_image(batch.image), batch.text, biases):
            images_NE = rows_of_texts(images_BE, owner_N)
            contrasts.append(EmbeddedPairs(texts_KE=texts_NE, images_KE=images_NE, image_ids=names))
        return contrasts

    def contrast_loss(
        self,
        vectors: list[tuple[Tensor, Tensor]],
        image_ids: tuple[str, ...],
        owner_N: Tensor | None,
        learners: Tensor | None,
        others: Sequence[EmbeddedPairs] | None = None,
    ) -> Loss:
        """Return ITC; with `contrast: both` the mean of the two losses. others: see `pretraining_losses`."""
        scales = [self.log_scale]
        if self.config.contrast == "both":
            scales.append(self.fused_log_scale)
        losses = []
        for number, ((images_BE, texts_NE), log_scale) in enumerate(zip(vectors, scales, strict=True)):
            images_NE = rows_of_texts(images_BE, owner_N)
            ids = image_ids
            if learners is not None:
                # Samples that do not learn the loss are no candidates either.
                rows_R = learners.nonzero().squeeze(1)
                texts_NE, images_NE = texts_NE.index_select(0, rows_R), images_NE.index_select(0, rows_R)
                ids = tuple(image_ids[i] for i in rows_R.tolist())
            name = "itc" if not number else "itc_fused"
            losses.append(
                image_text_contrast(
                    texts_NE,
                    images_NE,
                    ids,
                    self._limited_scale(log_scale),
                    name=name,
                    other_pairs=others[number] if others else None,
                )
            )
        if len(losses) == 1:
            return losses[0]
        # Both have the same items, so their mean is that of the sums.
        unimodal, fused = losses
        parts = {**unimodal.parts, **fused.parts}
        return Loss(sum=(unimodal.sum + fused.sum) / 2, count=unimodal.count, parts=parts)

    def word_loss(
        self, text_MD: Tensor, words: Packing, masked_RT: Tensor, text: Text, masked_NT: Tensor | None = None
    ) -> Loss:
        """Return MLM. masked_RT: the masked words among all texts of the pass; masked_NT: among the batch's own."""
        # Only the masked words' states become logits: [M, D] -> [masked words, V]
        logits_MV = self.word_head(take(text_MD, words.rows_at(masked_RT)))
        return masked_language_modeling(logits_MV, text.ids_BT[masked_RT if masked_NT is None else masked_NT])

    def image_loss(self, image: Image, learners: Tensor | None, generator: torch.Generator) -> Loss:
        """Return MIM: predict the visual tokens of hidden patches with the vision experts (BEiT, section 2.3)."""
        assert isinstance(image, Pixels) and self.image_head is not None
        hidden_BN = self.hidden_patches(image, learners, generator)
        states_BSD = self.image_states(self.encode_image(image, hidden_BN), self.biases(0))
        # The targets are the tokens of the whole image; [CLS], the first state, has none.
        tokens_BN = self.image_tokens(image.pixels_B3HW)
        return cross_entropy(self.image_head(states_BSD[:, 1:][hidden_BN]), tokens_BN[hidden_BN], name="mim")

    def hidden_patches(self, image: Image, learners: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return bool [B, N]: the patches that MIM hides."""
        grid, device = (self.config.grid, self.config.grid), self.norm.weight.device
        hidden_BN = select_blocks(len(image), grid, self.config.image_mask_share, generator, device)
        return hidden_BN if learners is None else hidden_BN & learners[:, None]

    # ---- Training and reporting ------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by part, as the stages of pretraining freeze them.

        `attention` includes its norms and the layers' scales; `cnn` is the one of `stem: timm`, which is then not in
        `image_embedding`.
        """
        groups: dict[str, list[nn.Parameter]] = {}
        parts = {"image_embedding", "text_embedding", "position_bias", "norm"}
        for name, parameter in self.named_parameters():
            # The embedding of an image's place belongs to the image side.
            path = name.replace("place_embedding.", "image_embedding.").split(".")
            if name.startswith(TIMM_STEM):
                group = "cnn"
            elif path[0] == "blocks":  # blocks.LAYER.experts.NAME. ..., or another part of the block
                group = f"{path[3]}_expert" if path[2] == "experts" else "attention"
            else:
                group = path[0] if path[0] in parts else "heads"
            groups.setdefault(group, []).append(parameter)
        return groups

    def fit_weights(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Adapt the weights of another VLMo to this one's image size and text length (interpolation.py).

        Raises:
            CheckpointError: another resolution without `interpolate_positions`, or another CNN before the patches.
        """
        if self.config.stem == "timm":
            check_same_config(config, dataclasses.asdict(self.config), ("stem_backbone", "stem_stage"))
        return fit_weights(self.config, weights, config)


def names_by_text(names: tuple[str, ...], owner_N: Tensor | None) -> tuple[str, ...]:
    """Return each text's image name. owner_N: each text's image; None: one text per image."""
    return names if owner_N is None else tuple(names[i] for i in owner_N.tolist())
