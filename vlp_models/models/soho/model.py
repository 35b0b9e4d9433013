"""SOHO: end-to-end pretraining from whole images.

Z. Huang, Z. Zeng, Y. Huang, B. Liu, D. Fu, J. Fu: "Seeing Out of tHe bOx: End-to-End Pre-training for Vision-Language
Representation Learning", CVPR 2021. Public code: researchmm/soho.

    pixels ── ResNet ── 1x1 conv, pool ── visual dictionary ── + position ──┐
                                             │ codes                        ├── transformer ── MLM, MVM, ITM ([CLS])
    words [CLS] w1 .. wm [SEP] ── embedding ─┼──────────────────────────────┘
                                             └── MVM's targets for hidden cells

The paper: a CNN that is trained along, a 1x1 convolution and 2x2 max pooling compute features of an image. Each feature
is replaced by its nearest code of a visual dictionary, with straight-through gradients; codes follow the features by a
moving average (equation 4). With sine positions these are the visual tokens, which one transformer reads after the
words. An image is paired with two of its own texts and two of others; its CNN runs once. MLM and MVM are learned from
matched pairs only. MVM hides all cells of one code. The three losses are summed. SGD trains the CNN, AdamW the rest;
the CNN is frozen in the first ten epochs (`optimizer.groups`). In tasks the transformer reads the dictionary's input.

Where the paper is silent, this model does the following:
- Batch normalization follows the 1x1 convolution, as in the public code: it gives features the scale of fresh codes.
- LayerNorm follows the sum of feature and position, as in the word embeddings; visual tokens have no dropout.
- gamma is the public code's, 0.4. Codes without features can be moved to features (`revive_after`; off by default). The
  share of codes that were hit recently is logged as `codes_alive`.
- A pair's image loses one code with `mvm_probability` 0.15, the rate of words, whether matched or not, so that the gap
  does not reveal the match. Each of the image's codes is equally likely. A head like the words' predicts codes.
- Texts of other images come from the same batch, over all processes: for each text, a text whose image has another id.
  Their words are masked as well. A batch of a single image has no mismatched pairs.
- Padding is not looked up, does not update the dictionary, and is not attended to. A cell is padding if its upper left
  pixel is.
- [CLS] is the last layer's output. Sizes are BERT's: post-LN, GELU, N(0, 0.02).
- Retrieval scores a pair by ITM's head: the log odds of a match. Tasks do not update the dictionary.

Where the public code differs from the paper, config.py has a switch (`PublicSwitches`; variants.py). One difference is
not implemented: the code draws for each of four texts whether to replace it; here, as in the paper, two are replaced.

Shape suffixes: B images, R cells of an image (RR: rows, columns), N texts, P pairs, T text tokens, D hidden, M packed
words, K packed cells or codes; C channels, H/W pixels, h/w cells of the CNN's map.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Pixels, PixelSets, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.backbone import Backbone
from vlp_models.models.layers.blocks import TransformerBlock, init_weights
from vlp_models.models.layers.embeddings import TextEmbedding, embedding_table, sine_positions
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.located import located_cells
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.layers.several_images import add_places, place_embedding
from vlp_models.models.partial_load import PartialLoad
from vlp_models.models.protocols import Fused, Located
from vlp_models.models.soho.config import SOHOConfig
from vlp_models.models.soho.dictionary import Dictionary, Quantized
from vlp_models.models.soho.pairs import Pairs, hide_codes, make_pairs
from vlp_models.models.soho.variants import Gate, crop_padding, hide_code_of_one_place, square_padding
from vlp_models.objectives.loss import Learners, Loss, Part, cross_entropy, learners_by_text
from vlp_models.objectives.masked_modeling import mask_tokens, masked_language_modeling, select_tokens

WORD_EPS, CELL_EPS = 1e-12, 1e-5  # of LayerNorm: BERT's for words, the public code's for visual tokens


@dataclass(frozen=True, kw_only=True)
class FeatureGrid:
    """The dictionary's input. features_BRD; mask_BRR bool [B, rows, columns], False in padding."""

    features_BRD: Tensor
    mask_BRR: Tensor

    @property
    def mask_BR(self) -> Tensor:
        return self.mask_BRR.flatten(1)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.mask_BRR.shape[1], self.mask_BRR.shape[2]


@dataclass(frozen=True, kw_only=True)
class VisualTokens:
    """The transformer's input. tokens_BRD; mask_BR bool; grid: rows and columns; hidden_BRD: each cell's token if MVM
    hides it."""

    tokens_BRD: Tensor
    mask_BR: Tensor
    grid: tuple[int, int]
    hidden_BRD: Tensor | None = None

    def for_texts(self, owner_N: Tensor | None, hidden_NR: Tensor | None = None) -> VisualTokens:
        """Return one row per text. owner_N: each text's image. hidden_NR bool: the cells to hide from each text."""
        tokens, mask, hidden = self.tokens_BRD, self.mask_BR, self.hidden_BRD
        if owner_N is not None:
            tokens, mask = tokens.index_select(0, owner_N), mask.index_select(0, owner_N)
        if hidden_NR is not None and hidden is not None:
            hidden = hidden if owner_N is None else hidden.index_select(0, owner_N)
            tokens = torch.where(hidden_NR[..., None], hidden, tokens)
        return VisualTokens(tokens_BRD=tokens, mask_BR=mask, grid=self.grid)


class Neck(nn.Module):
    """1x1 convolution, batch normalization, max pooling that keeps an odd last row or column.

    So 600 by 1000 pixels at 64 pixels a cell are the 160 tokens that section 4.5 counts. pool_first: the pooling comes
    first, and drops an odd last row or column.
    """

    def __init__(self, channels: int, hidden: int, *, pool: int, norm: str, pool_first: bool = False) -> None:
        super().__init__()
        self.pool_first = pool_first
        self.conv = nn.Conv2d(channels, hidden, 1, bias=norm == "none")
        self.norm = nn.BatchNorm2d(hidden) if norm == "batch" else nn.Identity()
        self.pool = nn.MaxPool2d(pool, ceil_mode=not pool_first)

    def forward(self, map_BChw: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, D, rows, columns]"""
        x: Tensor = map_BChw
        for layer in (self.pool, self.conv, self.norm) if self.pool_first else (self.conv, self.norm, self.pool):
            x = layer(x)
        return x


class SOHO(nn.Module):
    """Implements `Fuses`, `LocatesStates`, `ScoresPairs`, `Pretrains`, `GroupsParameters`, `LoadsPartially`,
    `EncodesCells`, for pixels."""

    config_class: ClassVar[type] = SOHOConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=("hidden", "heads", "intermediate", "gate", "pool_first", "mean", "std")
    )
    several_texts: ClassVar[bool] = True  # per image, in pretraining
    objectives: tuple[str, ...]
    fused_dim: int
    text_dim: int
    located_dim: int
    images_per_text: int

    def __init__(self, config: SOHOConfig) -> None:
        super().__init__()
        self.config = config
        self.objectives = ("mlm", "mvm", "itm") if config.dictionary_size else ("mlm", "itm")
        self.fused_dim = config.fusion_hidden or config.hidden
        self.text_dim = self.located_dim = config.hidden
        hidden = config.hidden

        # Image side: CNN, neck, dictionary (below); then the words, the transformer and the heads.
        self.backbone = Backbone(config.backbone, config.backbone_stage, config.backbone_options)
        self.stride = self.backbone.stride * config.pool  # pixels per cell side
        if min(config.height, config.width) < self.stride:
            raise ParamsError(
                f"config: images of {config.width}x{config.height} pixels, but a cell of `{config.backbone}` with pool "
                f"{config.pool} is {self.stride} wide; set larger images, or an earlier backbone_stage"
            )
        self.neck = Neck(self.backbone.channels, hidden, pool=config.pool, norm=config.neck_norm)
        self.visual_norm = nn.LayerNorm(hidden, eps=CELL_EPS)
        self.hidden_cell = nn.Parameter(torch.empty(1, hidden))  # MVM's [MASK]
        self.text_embedding = TextEmbedding(
            config.vocab_size,
            hidden,
            max_positions=config.max_positions,
            types=2,
            dropout=config.dropout,
            eps=WORD_EPS,
        )
        sizes = (hidden, config.heads, config.intermediate)
        drop: dict[str, Any] = {"dropout": config.dropout, "attention_dropout": config.attention_dropout}
        self.transformer = nn.ModuleList(TransformerBlock(*sizes, **drop, eps=WORD_EPS) for _ in range(config.layers))
        self.word_head: TokenHead | None = TokenHead(hidden, config.vocab_size, eps=WORD_EPS, tied=True)
        self.code_head = TokenHead(hidden, config.dictionary_size, eps=WORD_EPS) if config.dictionary_size else None
        self.match_head = nn.Linear(hidden, 2)
        self.fusion = (
            nn.Sequential(nn.Linear(hidden, self.fused_dim), nn.ReLU(), nn.Dropout(config.fusion_dropout))
            if config.fusion_hidden
            else nn.Identity()
        )
        for name, child in self.named_children():
            if name != "backbone":  # keeps timm's initialization
                init_weights(child, config.init_std)
        nn.init.kaiming_normal_(self.neck.conv.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.hidden_cell, std=config.init_std)
        self.dictionary = (
            Dictionary(
                config.dictionary_size,
                hidden,
                momentum=config.dictionary_momentum,
                update=config.dictionary_update,
                revive_after=config.revive_after,
            )
            if config.dictionary_size
            else None
        )

        self.images_per_text = config.images_per_text
        self.place_embedding = place_embedding(config.images_per_text, hidden)

        # What the authors' code has in place of these. Drawn last, so the other parts start alike with every switch.
        self.gate: Gate | None = None
        if config.pool_first:
            self.neck = Neck(self.backbone.channels, hidden, pool=config.pool, norm=config.neck_norm, pool_first=True)
            nn.init.kaiming_normal_(self.neck.conv.weight, mode="fan_out", nonlinearity="relu")
        if config.gate:
            self.gate = Gate(hidden)
            init_weights(self.gate, config.init_std)
        if config.plain_heads:
            self.word_head = None
            self.match_head = nn.Linear(hidden, 2, bias=False)
            init_weights(self.match_head, config.init_std)
        if config.code_scores == "cosine":
            self.code_head = None

    @property
    def inputs(self) -> ModelInputs:
        """Return the pixels and text lengths that the model reads."""
        config = self.config
        # Only `resize: pad` keeps an image's proportions, by the length of its sides.
        longer, shorter = (config.longer, config.shorter) if config.resize == "pad" else (0, 0)
        return ModelInputs(
            image=PixelInput(
                height=config.height,
                width=config.width,
                resize=config.resize,
                longer=longer,
                shorter=shorter,
                mean=(config.mean[0], config.mean[1], config.mean[2]),
                std=(config.std[0], config.std[1], config.std[2]),
                interpolation=config.interpolation,
                augment=tuple(config.augment),
                crop_scale=(config.crop_scale[0], config.crop_scale[1]),
            )
        )

    # ---- Images: pixels -> features -> codes -> visual tokens --------------------------------------------------

    def extract_features(self, image: Image) -> FeatureGrid:
        """Run the CNN and the neck: pixels [B, 3, H, W] -> features [B, R, D], the dictionary's input."""
        if not isinstance(image, Pixels):
            raise DataError("SOHO reads pixels: set `shards.pixels: true`, or choose a model that reads regions")
        if self.config.tight_canvas:
            image = crop_padding(image, least=self.stride)
        # Batch normalization fails on empty batches. Synchronized, it accepts them, and has to run on them: other
        # processes wait for this one's share of the statistics.
        norms = (module for module in self.modules() if isinstance(module, nn.SyncBatchNorm))
        if not len(image) and not any(norm.training for norm in norms):
            rows, columns = (max(1, -(-side // self.stride)) for side in image.pixels_B3HW.shape[2:])
            features_BRD = self.visual_norm.weight.new_zeros(0, rows * columns, self.config.hidden)
            mask_BRR = features_BRD.new_ones(0, rows, columns, dtype=torch.bool)
            return FeatureGrid(features_BRD=features_BRD, mask_BRR=mask_BRR)
        # While frozen in training, the CNN needs no graph. Outside training, callers may ask for gradients.
        frozen = self.training and not self.backbone.training
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            map_BChw = self.backbone(image.pixels_B3HW)
        features = self.neck(map_BChw)
        mask_BRR = self.grid_mask(image.mask_BHW, features)
        # [B, D, rows, columns] -> [B, R, D]
        return FeatureGrid(features_BRD=features.flatten(2).transpose(1, 2), mask_BRR=mask_BRR)

    @property
    def cell_side(self) -> int:
        return self.stride

    def cells(self, image: Pixels) -> Tensor:
        """Return the dictionary's input as a map, [B, rows, columns, D]."""
        grid = self.extract_features(image)
        return grid.features_BRD.unflatten(1, grid.mask_BRR.shape[1:])

    def grid_mask(self, mask_BHW: Tensor | None, features_BDRR: Tensor) -> Tensor:
        """Return bool [B, rows, columns]: True where the upper left pixel of a cell is not padding.

        mask_BHW: None if there is no padding.
        """
        rows, columns = features_BDRR.shape[2:]
        if mask_BHW is None:
            return torch.ones(len(features_BDRR), rows, columns, dtype=torch.bool, device=features_BDRR.device)
        if self.config.square_mask or self.config.pool_first:  # the authors' code resizes the mask to the grid
            mask_BHW = square_padding(mask_BHW) if self.config.square_mask else mask_BHW
            return F.interpolate(mask_BHW[:, None].float(), size=(rows, columns))[:, 0] > 0.5
        return mask_BHW[:, :: self.stride, :: self.stride][:, :rows, :columns]

    def map_to_codes(
        self, grid: FeatureGrid, weights_B: Tensor | None = None, *, learn: bool
    ) -> tuple[Tensor, Tensor, Quantized]:
        """Look the cells up in the dictionary.

        Returns the transformer's input [B, R, D], code numbers int64 [B, R] (-1 in padding), and the dictionary's
        output. The input is the codes' vectors; with a gate, these are mixed with the features.

        weights_B: how many times each image counts in the update; learn: whether the codes follow the features.
        """
        assert self.dictionary is not None
        # Only real cells are looked up: (B, R, D) -> (K, D)
        cells = Packing.of(torch.ones_like(grid.mask_BR) if self.config.padding_in_dictionary else grid.mask_BR)
        weights_K = None if weights_B is None else weights_B.index_select(0, cells.sequences_M)
        quantized = self.dictionary(cells.pack(grid.features_BRD), weights_K, learn=learn)
        # `pad` fills with zeros, which is a code's number: count from 1 meanwhile, so that padding becomes -1.
        codes_BR = (cells.pad(quantized.codes_M + 1) - 1).masked_fill(~grid.mask_BR, -1)
        vectors_BRD = cells.pad(quantized.vectors_MD)
        if self.gate is not None:
            vectors_BRD = self.gate(grid.features_BRD, vectors_BRD)
        return vectors_BRD, codes_BR, quantized

    def add_positions(self, features_BRD: Tensor, mask_BRR: Tensor) -> Tensor:
        """Return visual tokens [B, R, D]: LayerNorm(features + sine positions)."""
        positions_BRD = sine_positions(mask_BRR, self.config.hidden).flatten(1, 2)
        return self.visual_norm(features_BRD + positions_BRD.to(features_BRD.dtype))

    def encode_image(self, image: Image) -> VisualTokens:
        """Return the visual tokens that tasks read; they do not depend on the text. Several images of a text are one
        sequence."""
        if isinstance(image, PixelSets):
            images = image.flat()
            visual = self.encode_image(images)
            place_MR = images.place_B[:, None].expand_as(visual.mask_BR)  # type: ignore[index]
            tokens_MRD = add_places(visual.tokens_BRD, place_MR, self.place_embedding)
            # The images of all texts, [M, R, ...] -> one sequence per text, [B, K * R, ...]
            tokens_BRD = image.spread(tokens_MRD).flatten(1, 2)
            mask_BR = image.spread(visual.mask_BR).flatten(1, 2)
            return VisualTokens(tokens_BRD=tokens_BRD, mask_BR=mask_BR, grid=visual.grid)
        grid = self.extract_features(image)
        features = grid.features_BRD
        if self.config.task_features == "dictionary":
            features, _, _ = self.map_to_codes(grid, learn=False)
        tokens_BRD = self.add_positions(features, grid.mask_BRR)
        return VisualTokens(tokens_BRD=tokens_BRD, mask_BR=grid.mask_BR, grid=grid.shape)

    # ---- Pairs -------------------------------------------------------------------------------------------------

    def encode_pairs(self, ids_PT: Tensor, words: Packing, visual: VisualTokens) -> tuple[Tensor, Tensor, Packing]:
        """Run the transformer over [words; cells], one row per pair.

        Returns the last states of the words [M, D] and of the cells [K, D], and the packing of the cells.
        """
        length = words.shape[1]
        if length > self.config.max_positions:
            raise ParamsError(f"{length} tokens of text, but config.max_positions is {self.config.max_positions}")
        types_M = torch.zeros_like(words.places_M)
        text_MD = self.text_embedding(words.pack(ids_PT), types_M, words.positions_M)
        cells = Packing.of(visual.mask_BR)
        joint = words.concat(cells)
        mask = padding_mask(joint.mask_BT)
        # Packed rows: all pairs' words first, then all pairs' cells; `joint` maps both to their sequences.
        x = torch.cat([text_MD, cells.pack(visual.tokens_BRD).to(text_MD.dtype)])
        for block in self.transformer:
            x = block(x, mask, joint)
        return x[: joint.split], x[joint.split :], cells

    # ---- Pretraining: MLM, MVM, ITM ----------------------------------------------------------------------------

    def pretraining_losses(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """Return one unweighted loss per objective, from one pass over matched and mismatched pairs.

        Raises:
            ParamsError: unknown objective, or MVM without a dictionary.
        """
        unknown = set(objectives) - set(self.objectives)
        if unknown:
            hint = "; `mvm` needs a dictionary_size" if "mvm" in unknown else ""
            raise ParamsError(f"SOHO can't learn {sorted(unknown)}, only {list(self.objectives)}{hint}")
        objectives = learners_by_text(objectives, batch.text.owner_N)
        # P pairs: each text with its image, and for ITM each image with a text of another one.
        pairs = self.draw_pairs(batch, objectives, generator, mask_probability)
        grid = self.extract_features(batch.image)
        features = grid.features_BRD
        codes_BR = hidden_PR = quantized = None
        if self.dictionary is not None:
            # How many times each image counts in the dictionary's update: once in the paper (None), once per text in
            # the public code.
            from_paper = self.config.dictionary_update == "paper"
            weights_B = None if from_paper else torch.bincount(pairs.owner_P, minlength=len(batch.image))
            features, codes_BR, quantized = self.map_to_codes(grid, weights_B, learn=True)
        if "mvm" in objectives and codes_BR is not None:
            hidden_PR = self.select_hidden_cells(pairs, codes_BR, grid.mask_BR, generator, len(batch.text))
            hidden_PR = hidden_PR & pairs.learners(objectives["mvm"])[:, None]

        # Visual tokens of each image, as they are and as hidden cells; then one row per pair.
        tokens_BRD, hidden_BRD = self.add_positions(features, grid.mask_BRR), None
        if hidden_PR is not None:
            hidden_BRD = self.add_positions(self.hidden_cell.expand_as(features).to(features.dtype), grid.mask_BRR)
        visual = VisualTokens(tokens_BRD=tokens_BRD, mask_BR=grid.mask_BR, grid=grid.shape, hidden_BRD=hidden_BRD)
        visual = visual.for_texts(pairs.owner_P, hidden_PR)
        words = Packing.of(pairs.mask_PT)
        text_MD, cells_KD, cells = self.encode_pairs(pairs.ids_PT, words, visual)

        # Each loss gathers its positions from the packed states first, so that no logits are computed for the others.
        losses: dict[str, Loss] = {}
        # In the paper, words and cells are predicted in matched pairs only.
        predicted_P = pairs.matched_P
        if self.config.masked_pairs == "all":
            predicted_P = torch.ones_like(predicted_P)
        if "mlm" in objectives:
            masked_PT = pairs.words_PT & (predicted_P & pairs.learners(objectives["mlm"]))[:, None]
            logits = self.predict_words(take(text_MD, words.rows_at(masked_PT)))
            losses["mlm"] = masked_language_modeling(logits, pairs.original_PT[masked_PT])
        if "mvm" in objectives and codes_BR is not None and hidden_PR is not None and quantized is not None:
            predicted_PR = hidden_PR & predicted_P[:, None]
            logits = self.predict_codes(take(cells_KD, cells.rows_at(predicted_PR)), quantized.table_KD)
            loss = cross_entropy(logits, codes_BR.index_select(0, pairs.owner_P)[predicted_PR], name="mvm")
            assert self.dictionary is not None
            alive = Part(sum=self.dictionary.alive, count=len(self.dictionary.codes))
            losses["mvm"] = dataclasses.replace(loss, parts={**loss.parts, "codes_alive": alive})
        if "itm" in objectives:
            learns_P = pairs.learners(objectives["itm"])
            logits = self.match_head(take(text_MD, words.first_rows()))
            losses["itm"] = cross_entropy(logits[learns_P], pairs.matched_P[learns_P].long(), name="itm")
        return losses

    def draw_pairs(
        self, batch: Batch, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> Pairs:
        """Return matched and, for ITM, mismatched pairs, with words masked for MLM."""
        config, text = self.config, batch.text
        ids_NT, words_NT = text.ids_BT, torch.zeros_like(text.mask_BT)
        if "mlm" in objectives:
            words_NT = select_tokens(text.mask_BT, mask_probability, generator)
            ids_NT = mask_tokens(
                ids_NT,
                words_NT,
                scheme=config.mask_scheme,
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                generator=generator,
            )
        return make_pairs(batch, ids_NT, words_NT, generator, mismatched="itm" in objectives)

    def select_hidden_cells(
        self, pairs: Pairs, codes_BR: Tensor, mask_BR: Tensor, generator: torch.Generator, texts: int
    ) -> Tensor:
        """Return bool [P, R]: the cells that MVM hides."""
        hide = hide_codes if self.config.masked_code == "of_each_pair" else hide_code_of_one_place
        return hide(pairs, codes_BR, mask_BR, self.config.mvm_probability, generator, texts)

    def predict_words(self, x_MD: Tensor) -> Tensor:
        """Return vocabulary logits. Gather the positions that need them first."""
        table_VD = embedding_table(self.text_embedding.words)
        return F.linear(x_MD, table_VD) if self.word_head is None else self.word_head(x_MD, table_VD)

    def predict_codes(self, x_MD: Tensor, table_KD: Tensor) -> Tensor:
        """Return logits over the dictionary's codes, or their cosines. table_KD: the codes themselves."""
        if self.code_head is not None:
            return self.code_head(x_MD)
        with torch.autocast(x_MD.device.type, enabled=False):
            return F.normalize(x_MD.to(table_KD.dtype), dim=-1) @ F.normalize(table_KD, dim=-1).T

    # ---- Tasks -------------------------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        """Fuse images and texts; the pooled feature is [CLS]. An image with several texts is encoded once."""
        return self._fuse(self.encode_image(image).for_texts(text.owners(len(image))), text)

    def locate(self, image: Image, text: Text) -> Located:
        """Return the cells' last states."""
        visual, owner_N = self.encode_image(image), text.owners(len(image))
        states_NRD = self._fuse(visual.for_texts(owner_N), text).image_BRD
        return located_cells(states_NRD, image, visual.grid, self.stride, visual.mask_BR, owner_N)

    def _fuse(self, visual: VisualTokens, text: Text) -> Fused:
        words = Packing.of(text.mask_BT)
        text_MD, cells_KD, cells = self.encode_pairs(text.ids_BT, words, visual)
        pooled_ND = self.fusion(take(text_MD, words.first_rows()))
        return Fused(image_BRD=cells.pad(cells_KD), text_BTD=words.pad(text_MD), pooled_BP=pooled_ND)

    def score(self, state: VisualTokens, text: Text, image_of_text_N: Tensor) -> Tensor:
        """Return ITM's log odds that each text matches its image, [N]."""
        words = Packing.of(text.mask_BT)
        text_MD, _, _ = self.encode_pairs(text.ids_BT, words, state.for_texts(image_of_text_N))
        # log p(match) - log p(no match)
        logits_N2 = self.match_head(take(text_MD, words.first_rows()))
        return logits_N2[:, 1] - logits_N2[:, 0]

    # ---- Training and reporting --------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by part.

        `cnn_stem` and `cnn`: the backbone's first stage and the rest of it; `neck`: all other parts of the image side;
        `transformer`: with the word embeddings; `heads`.
        """
        groups: dict[str, list[nn.Parameter]] = {"cnn_stem": self.backbone.stem(), "cnn": self.backbone.rest()}
        group_of = {"text_embedding": "transformer", "transformer": "transformer"}
        group_of |= dict.fromkeys(("word_head", "code_head", "match_head", "fusion"), "heads")
        for name, parameter in self.named_parameters():
            part = name.partition(".")[0]
            if part != "backbone":
                groups.setdefault(group_of.get(part, "neck"), []).append(parameter)
        return {name: parameters for name, parameters in groups.items() if parameters}
