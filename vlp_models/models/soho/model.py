"""SOHO: end-to-end pretraining from whole images.

Z. Huang, Z. Zeng, Y. Huang, B. Liu, D. Fu, J. Fu: "Seeing Out of tHe bOx: End-to-End Pre-training for Vision-Language
Representation Learning", CVPR 2021. Public code: researchmm/soho.

    pixels ── ResNet ── 1x1 conv, pool ── visual dictionary ── + position ──┐
                                             │ codes                        ├── transformer ── MLM, MVM, ITM ([CLS])
    words [CLS] w1 .. wm [SEP] ── embedding ─┼──────────────────────────────┘
                                             └── what MVM tells of hidden cells

What the paper says: a CNN that is trained along, a 1x1 convolution and 2x2 max pooling make features of an image. Each
is replaced by its nearest code of a visual dictionary, gradients passing straight through; codes follow the features by
a moving average (equation 4). With sine positions these are the visual tokens, which one transformer reads behind the
words. An image is paired with two texts of its own and two of others; its CNN runs once. MLM and MVM are learnt from
matched pairs alone. MVM hides all cells of one code. All three losses are summed. SGD for the CNN, AdamW for the rest;
the CNN is frozen in the first ten epochs (`optimizer.groups`). In tasks the transformer reads the dictionary's input.

Where the paper is silent, what is done here:
- Batch normalisation follows the 1x1 convolution, as in the public code: features then are of the scale of fresh codes.
- LayerNorm follows the sum of feature and position, as the words' embeddings have one; no dropout on visual tokens.
- gamma is the public code's, 0.4. Codes that nothing is mapped to can be put on features (`revive_after`; off). The
  share that was hit of late is logged as `codes_alive`.
- A pair's image loses one code with `mvm_probability` 0.15, the rate of words; matched or not, lest the gap gives the
  pair away. Which of the image's codes, each is as likely. A head like that of words tells codes.
- The texts of other images come from the same batch, over all processes: for each text one whose image has another id.
  Their words are masked as well. A batch of a single image has no mismatched pairs.
- Padding is neither looked up, nor learnt by the dictionary, nor attended to. A cell is padding where its upper left
  pixel is.
- [CLS] is read as the last layer leaves it. Sizes are BERT's: post-LN, GELU, N(0, 0.02).
- Retrieval scores a pair by ITM's head: the log odds that it matches. Tasks learn nothing of the dictionary.

Where the public code does otherwise: public/. It also draws for each of four texts whether to replace it, where the
paper has two and two; here it is the paper's.

Shape suffixes: B images, R cells of an image, N texts, P pairs, T text tokens, D hidden, M packed words, K packed cells
or codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.backbone import Backbone
from vlp_models.models.layers.blocks import TransformerBlock, init_weights
from vlp_models.models.layers.embeddings import TextEmbedding, sine_positions
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.partial_load import PartialLoad
from vlp_models.models.protocols import Figure, Fused
from vlp_models.models.soho.config import IMAGENET, SOHOConfig
from vlp_models.models.soho.dictionary import Dictionary, Mapped
from vlp_models.models.soho.pairs import Pairs, hide_codes, make_pairs
from vlp_models.models.soho.visual import Grid, Neck, Visual, grid_mask
from vlp_models.objectives.classification import classification
from vlp_models.objectives.loss import Loss, Part, cross_entropy
from vlp_models.objectives.masked_modeling import mask_tokens, masked_language_modelling, select_tokens

WORD_EPS, CELL_EPS = 1e-12, 1e-5  # of LayerNorm: BERT's, and the visual tokens' as in the public code
Learners = Mapping[str, Tensor | None]  # objective -> bool [B], which samples learn it; None: all


class SOHO(nn.Module):
    """Meets `Fuses`, `ScoresPairs`, `Pretrains`, `GroupsParameters`, `LoadsPartially`, `SeesCells`, `ShowsItself`, with
    pixels."""

    config_class: ClassVar[type] = SOHOConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=("hidden", "heads", "intermediate", "gate", "pool_first", "mean", "std")
    )
    several_texts: ClassVar[bool] = True  # of an image, in pretraining
    objectives: tuple[str, ...]
    fused_dim: int

    def __init__(self, config: SOHOConfig) -> None:
        """
        Raises:
            ParamsError: timm has no such backbone, or images are smaller than a cell.
        """
        super().__init__()
        self.config = config
        self.objectives = ("mlm", "mvm", "itm") if config.dictionary_size else ("mlm", "itm")
        self.fused_dim = config.fusion_hidden or config.hidden
        hidden = config.hidden

        self.backbone = Backbone(config.backbone, config.backbone_stage, config.backbone_options)
        self.stride = self.backbone.stride * config.pool  # pixels to a cell
        if min(config.height, config.width) < self.stride:
            raise ParamsError(
                f"config: images of {config.width}x{config.height} pixels, but a cell of `{config.backbone}` with pool "
                f"{config.pool} is {self.stride} wide; give larger images, or an earlier backbone_stage"
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
        self.word_head = TokenHead(hidden, config.vocab_size, eps=WORD_EPS, tied=True)
        self.code_head = TokenHead(hidden, config.dictionary_size, eps=WORD_EPS) if config.dictionary_size else None
        self.match_head = nn.Linear(hidden, 2)
        self.fusion = (
            nn.Sequential(nn.Linear(hidden, self.fused_dim), nn.ReLU(), nn.Dropout(config.fusion_dropout))
            if config.fusion_hidden
            else nn.Identity()
        )
        for name, child in self.named_children():
            if name != "backbone":  # as timm begins it
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

    @property
    def inputs(self) -> ModelInputs:
        c = self.config
        return ModelInputs(
            image=PixelInput(
                height=c.height,
                width=c.width,
                resize=c.resize,
                longer=c.longer if c.resize == "pad" else 0,
                shorter=c.shorter if c.resize == "pad" else 0,
                mean=(c.mean[0], c.mean[1], c.mean[2]),
                std=(c.std[0], c.std[1], c.std[2]),
                interpolation=c.interpolation,
                augment=tuple(c.augment),
                crop_scale=(c.crop_scale[0], c.crop_scale[1]),
            )
        )

    # ---- Images ------------------------------------------------------------------------------------------------

    def look(self, image: Image) -> Grid:
        """The CNN and what follows it, up to the dictionary."""
        if not isinstance(image, Pixels):
            raise DataError("SOHO reads pixels: set `shards.pixels: true`, or choose a model that reads regions")
        if not len(image) and not self._normalises_with_others():  # batch normalisation has no statistics of nothing
            return self._no_images(image)
        # Frozen for now, it needs no gradient; without training, whoever asks for one gets it.
        frozen = self.training and not self.backbone.training
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            map_BChw = self.backbone(image.pixels_B3HW)
        features = self.neck(map_BChw)
        mask_BRR = self.grid_mask(image.mask_BHW, features)
        return Grid(features_BRD=features.flatten(2).transpose(1, 2), mask_BRR=mask_BRR)

    @property
    def cell_side(self) -> int:
        return self.stride

    def cells(self, image: Pixels) -> Tensor:
        """[B, rows, columns, D]: the dictionary's input."""
        grid = self.look(image)
        return grid.features_BRD.unflatten(1, grid.mask_BRR.shape[1:])

    def _normalises_with_others(self) -> bool:
        """Whether other processes wait for this one's share of batch statistics, though it has no image: they would
        wait for ever (`nn.SyncBatchNorm` takes empty batches for this reason)."""
        return any(isinstance(module, nn.SyncBatchNorm) and module.training for module in self.modules())

    def _no_images(self, image: Pixels) -> Grid:
        rows, columns = (max(1, -(-side // self.stride)) for side in image.pixels_B3HW.shape[2:])
        features_BRD = self.visual_norm.weight.new_zeros(0, rows * columns, self.config.hidden)
        return Grid(features_BRD=features_BRD, mask_BRR=features_BRD.new_ones(0, rows, columns, dtype=torch.bool))

    def grid_mask(self, mask_BHW: Tensor | None, features_BDRR: Tensor) -> Tensor:
        """bool [B, rows, columns]: where there is picture."""
        rows, columns = features_BDRR.shape[2:]
        return grid_mask(mask_BHW, rows, columns, self.stride, features_BDRR)

    def map_to_codes(
        self, grid: Grid, weights_B: Tensor | None = None, *, learn: bool
    ) -> tuple[Tensor, Tensor, Mapped]:
        """The dictionary on the cells of pictures: [B, R, D], int64 [B, R] (-1 in padding), and what it gave.

        weights_B: how often each image counts; learn: whether the codes follow.
        """
        assert self.dictionary is not None
        cells = Packing.of(self.looked_up(grid))
        weights_K = None if weights_B is None else weights_B.index_select(0, cells.sequences_M)
        mapped = self.dictionary(cells.pack(grid.features_BRD), weights_K, learn=learn)
        codes_BR = (cells.pad(mapped.codes_M + 1) - 1).masked_fill(~grid.mask_BR, -1)
        return cells.pad(mapped.vectors_MD), codes_BR, mapped

    def looked_up(self, grid: Grid) -> Tensor:
        """bool [B, R]: the cells that the dictionary gets."""
        return grid.mask_BR

    def place(self, features_BRD: Tensor, mask_BRR: Tensor) -> Tensor:
        """Visual tokens: features with their positions."""
        positions_BRD = sine_positions(mask_BRR, self.config.hidden).flatten(1, 2)
        return self.visual_norm(features_BRD + positions_BRD.to(features_BRD.dtype))

    def encode_image(self, image: Image) -> Visual:
        """As tasks read it, known before any text."""
        grid = self.look(image)
        features = grid.features_BRD
        if self.config.task_features == "dictionary":
            vectors_BRD, _, _ = self.map_to_codes(grid, learn=False)
            features = self.visual_features(features, vectors_BRD)
        return Visual(tokens_BRD=self.place(features, grid.mask_BRR), mask_BR=grid.mask_BR)

    def visual_features(self, features_BRD: Tensor, vectors_BRD: Tensor) -> Tensor:
        """What the transformer reads in pretraining, of the dictionary's input and output: the latter."""
        return vectors_BRD

    # ---- Pairs -------------------------------------------------------------------------------------------------

    def read_together(self, ids_PT: Tensor, words: Packing, visual: Visual) -> tuple[Tensor, Tensor, Packing]:
        """The transformer over [words; cells], a row a pair. Returns the words' and the cells' last states, [M, D] and
        [K, D], and where the latter stand."""
        length = words.shape[1]
        if length > self.config.max_positions:
            raise ParamsError(f"{length} tokens of text, but config.max_positions is {self.config.max_positions}")
        types_M = torch.zeros_like(words.places_M)
        text_MD = self.text_embedding(words.pack(ids_PT), types_M, words.positions_M)
        cells = Packing.of(visual.mask_BR)
        joint = words.beside(cells)
        mask = padding_mask(joint.mask_BT)
        x = torch.cat([text_MD, cells.pack(visual.tokens_BRD).to(text_MD.dtype)])
        for block in self.transformer:
            x = block(x, mask, joint)
        return x[: joint.split], x[joint.split :], cells

    def first_word(self, text_MD: Tensor, words: Packing) -> Tensor:
        """[CLS] of each text, [P, D]."""
        return take(text_MD, (words.positions_M == 0).nonzero().squeeze(1))

    # ---- The three objectives ----------------------------------------------------------------------------------

    def pretraining_losses(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """One unweighted loss per objective; one pass over matched and mismatched pairs serves all.

        Raises:
            ParamsError: an objective is unknown, or MVM is asked for without a dictionary.
        """
        unknown = set(objectives) - set(self.objectives)
        if unknown:
            why = "; `mvm` needs a dictionary_size" if "mvm" in unknown else ""
            raise ParamsError(f"SOHO can't learn {sorted(unknown)}, only {list(self.objectives)}{why}")
        pairs = self.pair(batch, objectives, generator, mask_probability)
        grid, features = self.look(batch.image), None
        codes_BR = hidden_PR = mapped = None
        if self.dictionary is not None:
            vectors_BRD, codes_BR, mapped = self.map_to_codes(grid, self.weights(pairs, len(batch.image)), learn=True)
            features = self.visual_features(grid.features_BRD, vectors_BRD)
        if "mvm" in objectives and codes_BR is not None:
            hidden_PR = self.hide(pairs, codes_BR, grid.mask_BR, generator, len(batch.text))
            hidden_PR = hidden_PR & pairs.learners(objectives["mvm"])[:, None]

        features = grid.features_BRD if features is None else features
        instead = self.hidden_cell.expand_as(features) if hidden_PR is not None else None
        visual = Visual(
            tokens_BRD=self.place(features, grid.mask_BRR),
            mask_BR=grid.mask_BR,
            hidden_BRD=None if instead is None else self.place(instead.to(features.dtype), grid.mask_BRR),
        ).for_texts(pairs.owner_P, hidden_PR)
        words = Packing.of(pairs.mask_PT)
        text_MD, cells_KD, cells = self.read_together(pairs.ids_PT, words, visual)

        losses: dict[str, Loss] = {}
        told_P = self.told_pairs(pairs.matched_P)
        if "mlm" in objectives:
            masked_PT = pairs.words_PT & (told_P & pairs.learners(objectives["mlm"]))[:, None]
            logits = self.predict_words(take(text_MD, words.rows_at(masked_PT)))
            losses["mlm"] = masked_language_modelling(logits, pairs.original_PT[masked_PT])
        if "mvm" in objectives and codes_BR is not None and hidden_PR is not None and mapped is not None:
            told_PR = hidden_PR & told_P[:, None]
            logits = self.predict_codes(take(cells_KD, cells.rows_at(told_PR)), mapped.table_KD)
            loss = cross_entropy(logits, codes_BR.index_select(0, pairs.owner_P)[told_PR], name="mvm")
            losses["mvm"] = dataclasses.replace(loss, parts={**loss.parts, "codes_alive": self._alive()})
        if "itm" in objectives:
            learns_P = pairs.learners(objectives["itm"])
            logits = self.match_head(self.first_word(text_MD, words))
            losses["itm"] = classification(logits[learns_P], pairs.matched_P[learns_P].long(), name="itm")
        return losses

    def pair(self, batch: Batch, objectives: Learners, generator: torch.Generator, mask_probability: float) -> Pairs:
        """Matched and, for ITM, mismatched pairs, with words masked for MLM."""
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

    def weights(self, pairs: Pairs, images: int) -> Tensor | None:
        """How often each image counts in the dictionary's update: once. The released one counts it with every text."""
        if self.config.dictionary_update == "paper":
            return None
        return torch.bincount(pairs.owner_P, minlength=images)

    def hide(self, pairs: Pairs, codes_BR: Tensor, mask_BR: Tensor, generator: torch.Generator, texts: int) -> Tensor:
        """bool [P, R]: the cells that MVM hides."""
        return hide_codes(pairs, codes_BR, mask_BR, self.config.mvm_probability, generator, texts)

    def told_pairs(self, matched_P: Tensor) -> Tensor:
        """bool [P]: the pairs whose words and cells are to be told."""
        return matched_P

    def predict_words(self, x_MD: Tensor) -> Tensor:
        """Vocabulary logits. Gather the positions that need them first."""
        return self.word_head(x_MD, self.text_embedding.words.weight)

    def predict_codes(self, x_MD: Tensor, table_KD: Tensor) -> Tensor:
        """Logits of the dictionary's codes. table_KD: the codes themselves."""
        assert self.code_head is not None
        return self.code_head(x_MD)

    def _alive(self) -> Part:
        assert self.dictionary is not None
        return Part(sum=self.dictionary.alive, count=len(self.dictionary.codes))

    # ---- Tasks -------------------------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        """[CLS] after fusion is the pooled feature. Images are encoded once, also where several texts share one."""
        visual = self.encode_image(image).for_texts(text.owners(len(image)))
        words = Packing.of(text.mask_BT)
        text_MD, cells_KD, cells = self.read_together(text.ids_BT, words, visual)
        pooled_ND = self.fusion(self.first_word(text_MD, words))
        return Fused(image_BRD=cells.pad(cells_KD), text_BTD=words.pad(text_MD), pooled_BP=pooled_ND)

    def score(self, state: Visual, text: Text, image_of_text_N: Tensor) -> Tensor:
        """The log odds, by ITM's head, that a text and its image match. [N]"""
        words = Packing.of(text.mask_BT)
        text_MD, _, _ = self.read_together(text.ids_BT, words, state.for_texts(image_of_text_N))
        logits_N2 = self.match_head(self.first_word(text_MD, words))
        return logits_N2[:, 1] - logits_N2[:, 0]

    # ---- What training asks ------------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """`cnn_stem` and `cnn`: the backbone's first stage and the rest of it; `neck`: all other parts of the image's
        side; `transformer`: with the words' embedding; `heads`."""
        groups: dict[str, list[nn.Parameter]] = {"cnn_stem": self.backbone.stem(), "cnn": self.backbone.rest()}
        transformer = ("text_embedding", "transformer")
        heads = ("word_head", "code_head", "match_head", "fusion")
        for name, parameter in self.named_parameters():
            part = name.partition(".")[0]
            if part != "backbone":
                group = "transformer" if part in transformer else "heads" if part in heads else "neck"
                groups.setdefault(group, []).append(parameter)
        return {name: parameters for name, parameters in groups.items() if parameters}

    def figures(self, batches: Iterable[Batch]) -> list[Figure]:
        """What each code gathers of these images (gathered.py)."""
        from vlp_models.models.soho.dictionary import gathered_patches

        return gathered_patches(self, batches)

