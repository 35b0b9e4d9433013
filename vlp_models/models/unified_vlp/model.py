"""Unified VLP: one stack of transformer blocks that encodes and decodes.

L. Zhou, H. Palangi, L. Zhang, H. Hu, J. J. Corso, J. Gao: "Unified Vision-Language Pre-Training for Image Captioning
and VQA", AAAI 2020. Authors' code: LuoweiZhou/VLP.

    [CLS] r1 .. rN [SEP] w1 .. wT [STOP] ── 12 blocks ── the words at the [MASK]s
      bidirectional   every token attends to every token
      seq2seq         image and [SEP] attend to each other; a word to them, to earlier words and to itself

The paper: a region is embedded by its appearance, its detected class and its location (eq. 1, regions.py). 15% of a
sentence's tokens are masked as in BERT and predicted with cross-entropy; the two objectives differ in the attention
mask only, and a share lambda of the samples trains seq2seq (`recipe: {mix: sample}`, whose shares are lambda and
1 - lambda). A segment embedding encodes the objective, and which tokens are the image's. There is no image-text
matching and no masked region; table 6's masked region classification is `region_classes: pretext`. Captioning
fine-tunes seq2seq; VQA uses the product of [CLS]'s and [SEP]'s last states, with two layers on top. Generation appends
a [MASK] to the words so far and replaces it by the predicted word.

Choices where the paper is silent or its code differs:
- [STOP] is a second [SEP], as in the code. It may be masked like a word; otherwise the model would not learn to stop.
- The number of masked tokens: 15% of the words, rounded, at least one and at most three (`max_masked`), as in the code.
- A region has no learned position embedding; its location takes that role. [SEP] has position 1 + `region_slots` and
  the words follow it, however many regions an image has; the code always has 100.
- Four segments, two per objective: [CLS], regions and [SEP]; the sentence. (The code has six and uses four.)
- Each sample's objective is drawn, as in the code; the paper has "alternate". The token means of the two objectives
  are summed with weights lambda and 1 - lambda; the code takes one mean over both, which is the same on average.
- Captioning trains on every word of a sentence at once, each predicted at a [MASK] of its own that attends to the words
  before it: exactly what generation does (`generation_logits`). The paper and its code mask at most three words, as in
  pretraining (captioning's option `targets: masked`).
- The code masks a word of each question while it trains VQA: `mask_question`.
- In beam search a finished caption keeps its place in the beam; the code sets it aside, as does `compat_reference`.
- Norms add 1e-5, as in the code; BERT adds 1e-12. The parts that BERT lacks (the region embedding, VQA's first layer)
  have torch's default initialization, as in the code (`image_init`), which also copies the detector's last layer.

In seq2seq an image attends to itself only. So its keys and values are computed once for all its descriptions if
captioning trains on every word, and all beams share them in decoding (prefix.py); pretraining computes them with each
text. Only real tokens are computed (layers/packing.py), and vocabulary logits of masked words only. Masks are built on
the device from each sentence's objective and length.

Shape suffixes: B images, R regions, P prefix places; N texts, rows or hypotheses, T text tokens, L all places of a
sequence, M packed tokens or masked words, D hidden, V vocabulary, Q new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import padding_mask, prefix_mask
from vlp_models.models.layers.blocks import init_weights
from vlp_models.models.layers.cache import DecodingState
from vlp_models.models.layers.embeddings import TextEmbedding, embedding_table
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.located import located_regions
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.layers.several_images import add_places, place_embedding
from vlp_models.models.partial_load import PartialLoad
from vlp_models.models.protocols import Fused, Located, MaskedPass
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig
from vlp_models.models.unified_vlp.masking import (
    BIDIRECTIONAL,
    SEQ2SEQ,
    mask_one_word,
    maskable,
    rows_at_end,
    rows_of_texts,
    texts_by_path,
)
from vlp_models.models.unified_vlp.prefix import Prefix, PrefixBlock
from vlp_models.models.unified_vlp.regions import RegionEmbedding
from vlp_models.objectives.loss import (
    Count,
    Learners,
    Loss,
    any_learner,
    cross_entropy,
    learners_by_text,
    select_learners,
)
from vlp_models.objectives.masked_modeling import (
    Corruption,
    mask_tokens,
    masked_object_classification,
    select_number,
    select_regions,
    word_positions,
)

IMAGE_SEGMENT = {BIDIRECTIONAL: 0, SEQ2SEQ: 2}  # the sentence has the next one


class UnifiedVLP(nn.Module):
    """Implements `Fuses`, `LocatesStates`, `Generates`, `GeneratesByMasks`, `Pretrains` and `PredictsMaskedWords`, on
    regions.

    The first token of a text stands for [SEP], which precedes the words; [CLS] belongs to the image.
    """

    config_class: ClassVar[type] = UnifiedVLPConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=("hidden", "heads", "intermediate", "feature_dim", "region_slots", "region_classes", "compat_reference")
    )
    inputs: ModelInputs
    word_paths: ClassVar[Mapping[str, tuple[str, ...]]] = {BIDIRECTIONAL: (BIDIRECTIONAL,), SEQ2SEQ: (SEQ2SEQ,)}
    objectives: tuple[str, ...]
    fused_dim: int
    text_dim: int
    located_dim: int
    images_per_text: int
    stores_finished: bool

    def __init__(self, config: UnifiedVLPConfig) -> None:
        super().__init__()
        self.config = config
        self.inputs = ModelInputs(image=RegionInput(scores=config.compat_reference))
        pretext = config.region_classes == "pretext" and config.num_classes > 0
        self.objectives = (SEQ2SEQ, BIDIRECTIONAL, "moc") if pretext else (SEQ2SEQ, BIDIRECTIONAL)
        self.fused_dim = 2 * config.hidden
        self.text_dim = self.located_dim = config.hidden
        self.stores_finished = config.compat_reference
        hidden, eps, dropout = config.hidden, config.layer_norm_eps, config.dropout

        self.region_embedding = RegionEmbedding(
            config.feature_dim,
            config.num_classes if config.region_classes == "input" else 0,
            hidden,
            dropout=dropout,
            eps=eps,
            compat=config.compat_reference,
            feature_dropout=config.feature_dropout,
        )
        self.text_embedding = TextEmbedding(
            config.vocab_size, hidden, max_positions=config.max_positions, types=4, dropout=dropout, eps=eps
        )
        self.stack: Any = nn.ModuleList(
            PrefixBlock(
                hidden,
                config.heads,
                config.intermediate,
                dropout=dropout,
                attention_dropout=config.attention_dropout,
                eps=eps,
            )
            for _ in range(config.layers)
        )
        self.word_head = TokenHead(hidden, config.vocab_size, eps=eps, tied=True)
        self.object_head = TokenHead(hidden, config.num_classes, eps=eps) if pretext else None
        self.fusion = nn.Linear(hidden, self.fused_dim)
        init_weights(self, config.init_std)
        # torch's own initialization, whose deviation depends on the layer's width.
        if config.image_init == "torch":
            for module in (*self.region_embedding.modules(), self.fusion):
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        self.images_per_text = config.images_per_text
        self.place_embedding = place_embedding(config.images_per_text, hidden)

    # ---- Embeddings ------------------------------------------------------------------------------------------

    def embed_regions(self, image: Image, hidden_BR: Tensor | None = None) -> Tensor:
        """Embed the regions by equation 1, [B, R, D]. hidden_BR bool: regions that `moc` hides."""
        if not isinstance(image, Regions):
            raise DataError(
                "Unified VLP reads region features: run the features stage, or choose a model that reads pixels"
            )
        return add_places(self.region_embedding(image, hidden_BR), image.place_BR, self.place_embedding)

    def embed_visual(self, regions_BRD: Tensor, objective: str) -> Tensor:
        """Return the embeddings of [CLS] and the regions, [B, 1 + R, D]."""
        words, positions = self.text_embedding.words, self.text_embedding.positions
        # [CLS] at position 0; `finish` adds segment, norm and dropout.
        cls_D = embedding_table(words)[self.config.cls_id] + embedding_table(positions)[0]
        x_BRD = torch.cat([cls_D.expand(len(regions_BRD), 1, -1), regions_BRD], 1)
        return self.finish(x_BRD, IMAGE_SEGMENT[objective])

    def embed_words(self, ids_NT: Tensor, first: int, objective: str) -> Tensor:
        """Embed the tokens of texts from position `first` on, [N, T, D]. Token 0 always becomes [SEP]."""
        length = ids_NT.shape[1]
        if first + length > self.config.max_text:
            raise ParamsError(
                f"{first + length} tokens of text, but config.max_positions and config.region_slots leave "
                f"{self.config.max_text}"
            )
        index_T = torch.arange(first, first + length, device=ids_NT.device)
        ids_NT = torch.where(index_T == 0, self.config.sep_id, ids_NT)
        # Position 0 is [CLS]'s, the next ones are reserved for the regions.
        positions_TD = self.text_embedding.positions(self.config.region_slots + 1 + index_T)
        x_NTD = self.text_embedding.words(ids_NT) + positions_TD
        # [SEP] is in the image's segment, the words are in the next one.
        segment = IMAGE_SEGMENT[objective]
        return self.finish(x_NTD, torch.where(index_T == 0, segment, segment + 1))

    def finish(self, x: Tensor, segments: Tensor | int) -> Tensor:
        """Add the segment, normalize and apply dropout: the end of every token's embedding."""
        types = self.text_embedding.types
        x = x + (embedding_table(types)[segments] if isinstance(segments, int) else types(segments))
        return cast(Tensor, self.text_embedding.dropout(self.text_embedding.norm(x)))

    # ---- The stack -------------------------------------------------------------------------------------------

    def encode(self, x_NLD: Tensor, mask_NL: Tensor, prefix: int, causal_N: Tensor | None) -> tuple[Tensor, Packing]:
        """Run the stack over images and texts; returns the last states of the real tokens, [M, D], and their packing.

        prefix: the number of places to which all tokens attend. causal_N bool: the seq2seq rows; None: none.
        """
        # (N, L, D) -> (M, D): padding is between the regions and the text, and after the text.
        packing = Packing.of(mask_NL)
        mask, x_MD = prefix_mask(mask_NL, prefix, causal_N), packing.pack(x_NLD)
        for block in self.stack:
            x_MD = block(x_MD, mask, packing)
        return x_MD, packing

    def encode_prefix(self, image: Image) -> Prefix:
        """Run the stack over [CLS], regions and [SEP] of each image, to which all its descriptions attend."""
        regions_BRD = self.embed_regions(image)
        sep_B1 = torch.full_like(image.mask_BR[:, :1], self.config.sep_id, dtype=torch.int64)  # type: ignore[union-attr]
        x_BPD = torch.cat([self.embed_visual(regions_BRD, SEQ2SEQ), self.embed_words(sep_B1, 0, SEQ2SEQ)], 1)
        mask_BP = F.pad(cast(Regions, image).mask_BR, (1, 1), value=True)
        packing, mask, layers = Packing.of(mask_BP), padding_mask(mask_BP), []
        x_MD = packing.pack(x_BPD)
        for block in self.stack:
            x_MD, keys_values = block.encode_prefix(x_MD, mask, packing)
            layers.append(keys_values)
        return Prefix(layers=tuple(layers), mask_BP=mask_BP)

    def predict_words(self, x_D: Tensor) -> Tensor:
        """Return vocabulary logits, [..., D] -> [..., V]. Gather the positions that need them first."""
        return cast(Tensor, self.word_head(x_D, embedding_table(self.text_embedding.words)))

    # ---- The two objectives ----------------------------------------------------------------------------------

    def pretraining_losses(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """Return one unweighted loss per objective, all from one corruption of the batch and one pass.

        Raises:
            ParamsError: an unknown objective, or `moc` without `region_classes: pretext`.
        """
        objectives = learners_by_text(objectives, batch.text.owner_N)
        corruption = self.corrupt(batch, objectives=objectives, generator=generator, mask_probability=mask_probability)
        return self.masked_pass(batch, corruption, self.encode_corrupted(batch, corruption), objectives).losses

    def pretraining_counts(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Count]:
        """Return the number of items of each loss that the same arguments give."""
        objectives = learners_by_text(objectives, batch.text.owner_N)
        corruption = self.corrupt(batch, objectives=objectives, generator=generator, mask_probability=mask_probability)
        counts: dict[str, Count] = {}
        for name, learners in objectives.items():
            masked = corruption.words_BT
            if name == "moc":
                assert corruption.regions_BR is not None
                masked = rows_of_texts(corruption.regions_BR, batch.text)
            counts[name] = select_learners(masked, learners).sum()
        return counts

    def corrupt(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> Corruption:
        """Draw what the objectives hide: words, among them the closing [SEP] unless the text was cut, and regions.

        Raises:
            ParamsError: an unknown objective, or `moc` without `region_classes: pretext`.
        """
        unknown = set(objectives) - set(self.objectives)
        if unknown:
            why = ""
            if "moc" in unknown:
                why = "; `moc` needs `region_classes: pretext` and features with class probabilities"
            raise ParamsError(f"Unified VLP has no objective {sorted(unknown)}, only {list(self.objectives)}{why}")
        config, text, image = self.config, batch.text, batch.image
        ids_NT = text.ids_BT
        # A share of the words is masked, and the closing [SEP] may be among them, so that the model learns to stop.
        words_NT = select_number(
            maskable(text), word_positions(text.mask_BT).sum(1), mask_probability, generator, at_most=config.max_masked
        )
        if {BIDIRECTIONAL, SEQ2SEQ} & set(objectives):
            ids_NT = mask_tokens(
                ids_NT,
                words_NT & any_learner(objectives, (BIDIRECTIONAL, SEQ2SEQ), words_NT),
                scheme=config.mask_scheme,
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                generator=generator,
            )
        regions_BR = None
        if "moc" in objectives and isinstance(image, Regions):
            regions_BR = select_regions(image.mask_BR, mask_probability, generator)
            # A region without class probabilities has no target.
            regions_BR = regions_BR & (image.class_probs_BRC.sum(-1) > 0)
            if objectives["moc"] is not None and text.owner_N is None:
                regions_BR = regions_BR & objectives["moc"][:, None]
        return Corruption(ids_BT=ids_NT, words_BT=words_NT, regions_BR=regions_BR, hidden_BR=regions_BR)

    def encode_corrupted(self, batch: Batch, corruption: Corruption) -> Tensor:
        """Embed the regions without what is hidden, once for all passes. [B, R, D]"""
        return self.embed_regions(batch.image, corruption.hidden_BR)

    def masked_pass(
        self,
        batch: Batch,
        corruption: Corruption,
        image: Tensor,
        objectives: Learners,
        ids: Mapping[str, Tensor] | None = None,
        after: MaskedPass | None = None,
    ) -> MaskedPass:
        """Run one pass for these objectives: each text once per attention mask that it is trained with.

        Args:
            ids: what the `bidirectional` and the `seq2seq` path read; default: the masked sentences.
            after: unused, because masked words change every state of the stack.
        """
        text, regions = batch.text, cast(Regions, batch.image)
        # One run of the stack over the rows of all paths. [sum of the paths' texts, L]
        rows = texts_by_path(objectives, text)
        x_MD, packing = self.encode_rows(batch, corruption, image, rows, ids or {})
        losses: dict[str, Loss] = {}
        word_logits: dict[str, Tensor] = {}
        masked = {path: select_learners(corruption.words_BT, objectives[path]) for path in rows if path in objectives}
        if masked:
            # The bidirectional path may be there for `moc` alone, which masks no words.
            none_NT = torch.zeros_like(text.mask_BT)
            at_NT = torch.cat([masked.get(path, none_NT)[text_N] for path, text_N in rows.items()])
            # The masked words of both paths in one product: [M, V]
            logits_MV = self.predict_words(take(x_MD, rows_at_end(packing, at_NT)))
            sizes = torch.stack([at_NT.sum() for at_NT in masked.values()]).tolist()
            for (path, at_NT), path_logits_MV in zip(masked.items(), logits_MV.split(sizes), strict=True):
                losses[path] = cross_entropy(path_logits_MV, text.ids_BT[at_NT], name=path)
                word_logits[path] = path_logits_MV.detach()
        if "moc" in objectives and corruption.regions_BR is not None:
            text_N = rows[BIDIRECTIONAL]
            at_NR = select_learners(rows_of_texts(corruption.regions_BR, text), objectives["moc"])[text_N]
            class_probs_NRC = rows_of_texts(regions.class_probs_BRC, text)[text_N]
            # The bidirectional rows come first, and regions follow [CLS]. [N, R] -> [rows, L]: one place before the
            # regions, the text's after them; then the rows of the other path.
            rows_of_pass, length = packing.shape
            at_NL = F.pad(at_NR, (1, length - 1 - at_NR.shape[1], 0, rows_of_pass - len(at_NR)))
            logits_MC = cast(TokenHead, self.object_head)(take(x_MD, packing.rows_at(at_NL)))
            losses["moc"] = masked_object_classification(logits_MC, class_probs_NRC[at_NR])
        return MaskedPass(losses=losses, word_logits=word_logits)

    def encode_rows(
        self, batch: Batch, corruption: Corruption, image: Tensor, rows: Mapping[str, Tensor], ids: Mapping[str, Tensor]
    ) -> tuple[Tensor, Packing]:
        """Run `encode` over the texts of each path, one path after the other, with their images."""
        # A path's rows have their own segments and, in seq2seq, a causal mask after the prefix.
        text, regions = batch.text, cast(Regions, batch.image)
        owner_N = text.owners(len(regions))
        image_rows, embedded, causal = [], [], []
        for path, text_N in rows.items():
            image_N = text_N if owner_N is None else owner_N[text_N]
            visual_NPD = self.embed_visual(image[image_N], path)
            words_NTD = self.embed_words(ids.get(path, corruption.ids_BT)[text_N], 0, path)
            image_rows.append(image_N)
            embedded.append(torch.cat([visual_NPD, words_NTD], 1))
            causal.append(torch.full_like(text_N, path == SEQ2SEQ).bool())
        visual_NP = F.pad(regions.mask_BR[torch.cat(image_rows)], (1, 0), value=True)  # [CLS] is always there
        mask_NL = torch.cat([visual_NP, text.mask_BT[torch.cat(list(rows.values()))]], 1)
        causal_N = torch.cat(causal) if SEQ2SEQ in rows else None
        # The prefix is the image and [SEP], the first token of the text.
        return self.encode(torch.cat(embedded), mask_NL, visual_NP.shape[1] + 1, causal_N)

    # ---- Understanding ---------------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        """Return VQA's feature: [CLS] times [SEP], then the first layer of the classifier.

        `image_BRD` has R + 1 tokens, [CLS] first; `text_BTD` has [SEP] first. Regions are embedded once even if several
        texts share an image. A text without any token, not even [SEP], has a zero state: its feature is the same for
        every image.
        """
        ids_NT = mask_one_word(text, self.config) if self.training and self.config.mask_question else text.ids_BT
        states_NLD, prefix = self.encode_both(image, text, ids_NT)
        pooled_NP = F.relu(self.fusion(states_NLD[:, 0] * states_NLD[:, prefix]))
        return Fused(image_BRD=states_NLD[:, :prefix], text_BTD=states_NLD[:, prefix:], pooled_BP=pooled_NP)

    def locate(self, image: Image, text: Text) -> Located:
        """Return the regions' last states, without [CLS]'s."""
        states_NLD, prefix = self.encode_both(image, text, text.ids_BT)
        return located_regions(states_NLD[:, 1:prefix], image, text.owner_N)

    def encode_both(self, image: Image, text: Text, ids_NT: Tensor) -> tuple[Tensor, int]:
        """Run the stack bidirectionally; returns the states, [N, L, D], and the number of the image's places.

        ids_NT: the tokens to read.
        """
        regions_BRD, owner_N = self.embed_regions(image), text.owners(len(image))
        # Embedded once per image, copied for its texts: every state of the stack depends on the text.
        visual_BPD = self.embed_visual(regions_BRD, BIDIRECTIONAL)
        mask_BP = F.pad(image.mask_BR, (1, 0), value=True)  # type: ignore[union-attr]
        if owner_N is not None:
            visual_BPD, mask_BP = visual_BPD[owner_N], mask_BP[owner_N]
        x_NLD = torch.cat([visual_BPD, self.embed_words(ids_NT, 0, BIDIRECTIONAL)], 1)
        prefix = mask_BP.shape[1]
        x_MD, packing = self.encode(x_NLD, torch.cat([mask_BP, text.mask_BT], 1), prefix + 1, None)
        return packing.pad(x_MD), prefix

    # ---- Generation ------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """Return logits, [N, T, V], or [M, V] at the True positions of `at_NT`; position t predicts token t + 1.

        An image is encoded once even if several texts share it. The words follow it, and as many [MASK]s: one at the
        position of each requested word. A [MASK] attends to the words before its position and to itself; no word
        attends to a [MASK]. So every word is predicted as in generation.

        Raises:
            DataError: `at_NT` requests what follows the last position. Without `at_NT` a text may have at most
                `max_text` - 1 tokens.
        """
        if at_NT is not None and at_NT[:, -1].any():
            raise DataError("at_NT requests what follows the last token, which is unknown")
        prefix, owner_N = self.encode_prefix(image), text.owners(len(image))
        # No position follows the last one, and words after the last requested one are not read.
        if at_NT is None:
            requested_NT, read_NT = torch.ones_like(text.mask_BT), text.mask_BT
        else:
            requested_NT, read_NT = at_NT[:, :-1], at_NT.flip(1).cumsum(1).flip(1) > 0
        words, masks = read_NT.shape[1] - 1, requested_NT.shape[1]

        masks_NT = torch.full_like(text.ids_BT[:, :masks], self.config.mask_id)
        x_NLD = torch.cat([self.embed_words(text.ids_BT[:, 1:], 1, SEQ2SEQ), self.embed_words(masks_NT, 1, SEQ2SEQ)], 1)
        packing = Packing.of(torch.cat([read_NT[:, 1:], requested_NT], 1))
        position_L = torch.cat([torch.arange(1, words + 1), torch.arange(1, masks + 1)]).to(x_NLD.device)
        is_word_L = torch.arange(words + masks, device=x_NLD.device) < words
        # One row per query: a word attends to the words up to itself, a [MASK] to those before it and to itself.
        before_LL = is_word_L & (position_L < position_L[:, None])
        before_LL = before_LL | torch.eye(words + masks, dtype=torch.bool, device=x_NLD.device)

        mask_NP, layers = prefix.mask_BP, prefix.layers
        if owner_N is not None:
            mask_NP, layers = mask_NP[owner_N], tuple(layer.select(owner_N) for layer in layers)
        # [N, 1, L, P + L]: every query attends to the whole prefix.
        to_prefix = mask_NP[:, None, None].expand(-1, 1, words + masks, -1)
        mask = torch.cat([to_prefix, before_LL.expand(len(mask_NP), 1, -1, -1)], -1)
        x_MD = packing.pack(x_NLD)
        for block, memory in zip(self.stack, layers, strict=True):
            x_MD = block.after_prefix(x_MD, mask, packing, memory)
        logits_MV = self.predict_words(take(x_MD, rows_at_end(packing, requested_NT)))
        return logits_MV.unflatten(0, (-1, masks)) if at_NT is None else logits_MV

    def masked_words(
        self, batch: Batch, *, generator: torch.Generator, mask_probability: float
    ) -> tuple[Tensor, Tensor]:
        """Return logits of masked words with seq2seq's mask, [M, V], and the words, [M]: the paper's captioning."""
        learn: Learners = {SEQ2SEQ: None}
        corruption = self.corrupt(batch, objectives=learn, generator=generator, mask_probability=mask_probability)
        image = self.encode_corrupted(batch, corruption)
        x_MD, packing = self.encode_rows(batch, corruption, image, texts_by_path(learn, batch.text), {})
        logits_MV = self.predict_words(take(x_MD, rows_at_end(packing, corruption.words_BT)))
        return logits_MV, batch.text.ids_BT[corruption.words_BT]

    def start(self, image: Image, *, max_len: int) -> DecodingState:
        """Encode each image once. Up to `max_len` steps may follow; the first reads [CLS]."""
        if max_len >= self.config.max_text:
            raise ParamsError(
                f"max_len is {max_len}, but config.max_positions and config.region_slots leave "
                f"{self.config.max_text - 1}"
            )
        prefix = self.encode_prefix(image)
        return DecodingState.begin(prefix, prefix.mask_BP, max_len=max_len)

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read one more token of each hypothesis, followed by a [MASK]. Returns the next token's logits, [N, V].

        Decoding starts with [CLS], which is part of the prefix already: the first step reads a [MASK] alone.
        """
        length, mask_N = state.length, torch.full_like(token_N, self.config.mask_id)
        ids_NQ = torch.stack([token_N, mask_N], 1) if length else mask_N[:, None]
        x_NQD = self.embed_words(ids_NQ, length or 1, SEQ2SEQ)
        # (N, 2, D): the last word and a [MASK] at the next position, whose state predicts the next word.
        prefix_mask_BP, past = padding_mask(state.memory.mask_BP), []
        before = iter(state.past or [None] * len(self.stack))
        for block, memory in zip(self.stack, state.memory.layers, strict=True):
            x_NQD, present = block.step_after_prefix(x_NQD, next(before), memory, prefix_mask_BP, state.by_image)
            past.append(present.drop_last())  # the next word replaces the [MASK]
        logits_NV = self.predict_words(x_NQD[:, -1])
        return logits_NV, replace(state, length=length + 1, past=tuple(past) if length else ())

    def reorder(self, state: DecodingState, index_N: Tensor) -> DecodingState:
        """Let hypothesis i continue hypothesis index[i]; their number may change."""
        return state.reorder(index_N)

    # ---- Training ----------------------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Group parameters: `regions` (their embedding), `stack` (blocks and word embedding), `heads` (all that only
        objectives and tasks use)."""
        group_of = {
            "region_embedding": "regions",
            "place_embedding": "regions",
            "text_embedding": "stack",
            "stack": "stack",
        }
        groups: dict[str, list[nn.Parameter]] = {}
        for name, child in self.named_children():
            groups.setdefault(group_of.get(name, "heads"), []).extend(child.parameters())
        return groups
