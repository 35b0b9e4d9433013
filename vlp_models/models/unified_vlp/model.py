"""Unified VLP: one stack of transformer blocks that encodes and decodes.

L. Zhou, H. Palangi, L. Zhang, H. Hu, J. J. Corso, J. Gao: "Unified Vision-Language Pre-Training for Image Captioning
and VQA", AAAI 2020. Public code: LuoweiZhou/VLP.

    [CLS] r1 .. rN [SEP] w1 .. wT [STOP] ── 12 blocks ── the words behind the [MASK]s
      bidirectional   every token sees every token
      seq2seq         image and [SEP] see each other; a word sees them, the words before it and itself

What the paper says: a region is what it looks like, what the detector calls it and where it is (eq. 1, regions.py).
15% of a sentence's tokens are hidden as in BERT and told by cross-entropy; the two objectives differ in the attention
mask alone, and a share lambda of the samples learns seq2seq (`recipe: {mix: sample}`, whose shares are lambda and
1 - lambda). A segment embedding says which objective it is, and what is image. There is no matching of images and
texts, and no masked region; table 6's masked region classification is `region_classes: pretext`. Captioning fine-tunes
seq2seq, VQA the product of [CLS]'s and [SEP]'s last states, two layers on top. Generation: a [MASK] is put behind what
has been said, and becomes the next word.

Where the paper is silent, or its code does otherwise, what is done here:
- [STOP] is a second [SEP], as in the code. It may be hidden like any word, or the model would not learn to stop.
- How many are hidden: 15% of the words, rounded, one at least and three at most (`max_masked`), as in the code.
- A region has no learned position, its place stands for one. [SEP] has position 1 + `region_slots` and the words those
  behind it, however many regions an image has; the code always has 100.
- Four segments, two for each objective: [CLS], regions and [SEP]; the sentence. (The code has six and uses four.)
- The sample's objective is drawn, as in the code; "alternate" in the paper. The means over the tokens of the two are
  added up with lambda and 1 - lambda; the code takes one mean over both, which on average is the same.
- Captioning learns every word of a sentence at once, each told by a [MASK] of its own that sees the words before it:
  exactly what generation will ask (`generation_logits`). The paper and its code hide three words at most, as in
  pretraining (captioning's option `targets: masked`).
- The code hides a word of each question while it learns VQA: `mask_question`.
- In beam search a finished description keeps its place; the code sets it aside, and `compat_reference` does so, too.
- Norms add 1e-5, as in the code; BERT adds 1e-12. What BERT does not have (the region embedding, VQA's first
  layer) begins as torch makes it, as in the code (`image_init`), which takes over the detector's last layer besides.

An image sees nothing but itself in seq2seq. So its keys and values are computed once for all descriptions of it where
captioning learns every word, and in decoding all beams share them (layers/prefix.py); pretraining computes them with
each text. Only real tokens are computed (layers/packing.py), vocabulary logits only of hidden words. Masks are made on
the device from each sentence's objective and length.

Shape suffixes: B images, R regions, P prefix places; N texts, rows or hypotheses, T text tokens, L all places of a
sequence, M packed tokens or hidden words, D hidden, V vocabulary, Q new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import padding_mask, prefix_mask
from vlp_models.models.layers.blocks import init_weights
from vlp_models.models.layers.cache import DecodingState
from vlp_models.models.layers.embeddings import TextEmbedding
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.partial_load import PartialLoad
from vlp_models.models.protocols import Fused, MaskedPass
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig
from vlp_models.models.unified_vlp.learning import (
    BIDIRECTIONAL,
    SEQ2SEQ,
    Learners,
    any_learner,
    hide_a_word,
    hideable,
    learnt,
    of_texts,
    rows_behind,
    rows_of,
)
from vlp_models.models.unified_vlp.prefix import Prefix, PrefixBlock
from vlp_models.models.unified_vlp.regions import RegionEmbedding
from vlp_models.objectives.loss import Count, Loss, cross_entropy
from vlp_models.objectives.masked_modeling import (
    Corruption,
    mask_tokens,
    masked_object_classification,
    select_number,
    select_regions,
    word_positions,
)

IMAGE_SEGMENT = {BIDIRECTIONAL: 0, SEQ2SEQ: 2}  # the sentence's is the next one


class UnifiedVLP(nn.Module):
    """Meets `Fuses`, `Generates`, `SetsFinishedAside`, `Pretrains` and `PredictsMaskedWords` (models/protocols.py), on regions.

    In a text the first token stands for [SEP], which the words follow; [CLS] begins the image.
    """

    config_class: ClassVar[type] = UnifiedVLPConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=("hidden", "heads", "intermediate", "feature_dim", "region_slots", "region_classes", "compat_reference")
    )
    inputs: ModelInputs
    word_paths: ClassVar[Mapping[str, tuple[str, ...]]] = {BIDIRECTIONAL: (BIDIRECTIONAL,), SEQ2SEQ: (SEQ2SEQ,)}
    objectives: tuple[str, ...]
    fused_dim: int
    sets_aside: bool

    def __init__(self, config: UnifiedVLPConfig) -> None:
        super().__init__()
        self.config = config
        self.inputs = ModelInputs(image=RegionInput(scores=config.compat_reference))
        pretext = config.region_classes == "pretext" and config.num_classes > 0
        self.objectives = (BIDIRECTIONAL, SEQ2SEQ, "moc") if pretext else (BIDIRECTIONAL, SEQ2SEQ)
        self.fused_dim = 2 * config.hidden
        self.sets_aside = config.compat_reference
        hidden, eps, dropout = config.hidden, config.layer_norm_eps, config.dropout

        self.region_embedding = RegionEmbedding(
            config.feature_dim,
            config.class_inputs,
            hidden,
            dropout=dropout,
            eps=eps,
            compat=config.compat_reference,
            feature_dropout=config.feature_dropout,
        )
        self.text_embedding = TextEmbedding(
            config.vocab_size, hidden, max_positions=config.max_positions, types=4, dropout=dropout, eps=eps
        )
        self.stack = nn.ModuleList(
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
        if config.image_init == "torch":
            for module in (*self.region_embedding.modules(), self.fusion):
                if isinstance(module, nn.Linear):
                    module.reset_parameters()

    # ---- Embeddings ------------------------------------------------------------------------------------------

    def embed_regions(self, image: Image, hidden_BR: Tensor | None = None) -> Tensor:
        """Equation 1, [B, R, D]. hidden_BR bool: regions that `moc` hides."""
        if not isinstance(image, Regions):
            raise DataError(
                "Unified VLP reads region features: run the features stage, or choose a model that reads pixels"
            )
        return cast(Tensor, self.region_embedding(image, hidden_BR))

    def embed_visual(self, regions_BRD: Tensor, objective: str) -> Tensor:
        """[CLS] and the regions, [B, 1 + R, D]."""
        words, positions = self.text_embedding.words, self.text_embedding.positions
        cls_D = words.weight[self.config.cls_id] + positions.weight[0]
        x_BRD = torch.cat([cls_D.expand(len(regions_BRD), 1, -1), regions_BRD], 1)
        return self.finish(x_BRD, IMAGE_SEGMENT[objective])

    def embed_words(self, ids_NT: Tensor, first: int, objective: str) -> Tensor:
        """Tokens `first` and following of the texts, [N, T, D]. Token 0 becomes [SEP], whatever it is."""
        length = ids_NT.shape[1]
        if first + length > self.config.max_text:
            raise ParamsError(
                f"{first + length} tokens of text, but config.max_positions and config.region_slots leave "
                f"{self.config.max_text}"
            )
        places_T = torch.arange(first, first + length, device=ids_NT.device)
        ids_NT = torch.where(places_T == 0, self.config.sep_id, ids_NT)
        positions_TD = self.text_embedding.positions(self.config.region_slots + 1 + places_T)
        x_NTD = self.text_embedding.words(ids_NT) + positions_TD
        segment = IMAGE_SEGMENT[objective]
        return self.finish(x_NTD, torch.where(places_T == 0, segment, segment + 1))

    def finish(self, x: Tensor, segments: Tensor | int) -> Tensor:
        """Adds the segment, normalises, drops: the end of every token's embedding."""
        types = self.text_embedding.types
        x = x + (types.weight[segments] if isinstance(segments, int) else types(segments))
        return cast(Tensor, self.text_embedding.dropout(self.text_embedding.norm(x)))

    # ---- The stack -------------------------------------------------------------------------------------------

    def encode(self, x_NLD: Tensor, mask_NL: Tensor, prefix: int, causal_N: Tensor | None) -> tuple[Tensor, Packing]:
        """Images and texts together: the last states of the real tokens, [M, D], and where they stand in [N, L].

        causal_N bool: which rows are seq2seq; None: none.
        """
        packing = Packing.of(mask_NL)
        mask, x_MD = prefix_mask(mask_NL, prefix, causal_N), packing.pack(x_NLD)
        for block in self.stack:
            x_MD = block(x_MD, mask, packing)
        return x_MD, packing

    def encode_prefix(self, image: Image) -> Prefix:
        """[CLS], regions and [SEP] of each image, as every description of it sees them."""
        regions_BRD = self.embed_regions(image)
        sep_B1 = torch.full_like(image.mask_BR[:, :1], self.config.sep_id, dtype=torch.int64)  # type: ignore[union-attr]
        x_BPD = torch.cat([self.embed_visual(regions_BRD, SEQ2SEQ), self.embed_words(sep_B1, 0, SEQ2SEQ)], 1)
        mask_BP = F.pad(cast(Regions, image).mask_BR, (1, 1), value=True)
        packing, mask, layers = Packing.of(mask_BP), padding_mask(mask_BP), []
        x_MD = packing.pack(x_BPD)
        for block in self._blocks():
            x_MD, own = block.keep(x_MD, mask, packing)
            layers.append(own)
        return Prefix(layers=tuple(layers), mask_BP=mask_BP)

    def predict_words(self, x_D: Tensor) -> Tensor:
        """Vocabulary logits; any leading dimensions. Gather the positions that need them first."""
        return cast(Tensor, self.word_head(x_D, self.text_embedding.words.weight))

    def _blocks(self) -> list[PrefixBlock]:
        return cast("list[PrefixBlock]", self.stack)

    # ---- The two objectives ----------------------------------------------------------------------------------

    def pretraining_losses(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """One unweighted loss per objective; one corruption of the batch and one pass serve them all.

        Raises:
            ParamsError: an objective is unknown, or `moc` is asked for where classes are no pretext.
        """
        corruption = self.corrupt(batch, objectives=objectives, generator=generator, mask_probability=mask_probability)
        return self.masked_pass(batch, corruption, self.encode_corrupted(batch, corruption), objectives).losses

    def pretraining_counts(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Count]:
        """How many items each loss of the same arguments is over."""
        corruption = self.corrupt(batch, objectives=objectives, generator=generator, mask_probability=mask_probability)
        counts: dict[str, Count] = {}
        for name, learners in objectives.items():
            hidden = corruption.words_BT
            if name == "moc":
                assert corruption.regions_BR is not None
                hidden = of_texts(corruption.regions_BR, batch.text)
            counts[name] = learnt(hidden, learners).sum()
        return counts

    def corrupt(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> Corruption:
        """What the objectives hide: words, the closing [SEP] among them unless the text was cut, and regions.

        Raises:
            ParamsError: an objective is unknown, or `moc` is asked for where classes are no pretext.
        """
        unknown = set(objectives) - set(self.objectives)
        if unknown:
            why = "; `moc` needs `region_classes: pretext` and features with class probabilities"
            why = why if "moc" in unknown else ""
            raise ParamsError(f"Unified VLP can't learn {sorted(unknown)}, only {list(self.objectives)}{why}")
        config, text, image = self.config, batch.text, batch.image
        ids_NT = text.ids_BT
        words_NT = select_number(
            hideable(text), word_positions(text.mask_BT).sum(1), mask_probability, generator, at_most=config.max_masked
        )
        if {BIDIRECTIONAL, SEQ2SEQ} & set(objectives):
            ids_NT = mask_tokens(
                ids_NT,
                words_NT & any_learner(objectives, words_NT),
                scheme=config.mask_scheme,
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                generator=generator,
            )
        regions_BR = None
        if "moc" in objectives and isinstance(image, Regions):
            regions_BR = select_regions(image.mask_BR, mask_probability, generator)
            regions_BR = regions_BR & (image.class_probs_BRC.sum(-1) > 0)
            if objectives["moc"] is not None and text.owner_N is None:
                regions_BR = regions_BR & objectives["moc"][:, None]
        return Corruption(ids_BT=ids_NT, words_BT=words_NT, regions_BR=regions_BR, hidden_BR=regions_BR)

    def encode_corrupted(self, batch: Batch, corruption: Corruption) -> Tensor:
        """The regions' embeddings without what is hidden, once for all passes. [B, R, D]"""
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
        """A pass for these objectives: the stack sees a text once with each of the two masks that it is learnt with.

        ids: what the `bidirectional` and the `seq2seq` path read; the masked sentences where it says nothing.
        after: is of no use to a stack in which the hidden words change every state.
        """
        text, regions = batch.text, cast(Regions, batch.image)
        rows = rows_of(objectives, text)
        x_MD, packing = self.encode_rows(batch, corruption, image, rows, ids or {})
        losses: dict[str, Loss] = {}
        word_logits: dict[str, Tensor] = {}
        told = {path: learnt(corruption.words_BT, objectives[path]) for path in rows if path in objectives}
        if told:
            none_NT = torch.zeros_like(text.mask_BT)
            at_NT = torch.cat([told.get(path, none_NT)[text_N] for path, text_N in rows.items()])
            logits_MV = self.predict_words(take(x_MD, rows_behind(packing, at_NT)))  # of both paths in one product
            sizes = torch.stack([at_NT.sum() for at_NT in told.values()]).tolist()
            for (path, at_NT), own_MV in zip(told.items(), logits_MV.split(sizes), strict=True):
                losses[path] = cross_entropy(own_MV, text.ids_BT[at_NT], name=path)
                word_logits[path] = own_MV.detach()
        if "moc" in objectives and corruption.regions_BR is not None:
            text_N = rows[BIDIRECTIONAL]
            at_NR = learnt(of_texts(corruption.regions_BR, text), objectives["moc"])[text_N]
            class_probs_NRC = of_texts(regions.class_probs_BRC, text)[text_N]
            losses["moc"] = self.region_loss(x_MD, packing, at_NR, class_probs_NRC)
        return MaskedPass(losses=losses, word_logits=word_logits)

    def encode_rows(
        self, batch: Batch, corruption: Corruption, image: Tensor, rows: Mapping[str, Tensor], ids: Mapping[str, Tensor]
    ) -> tuple[Tensor, Packing]:
        """`encode` of the texts of each path, with their images."""
        text, regions = batch.text, cast(Regions, batch.image)
        owner_N = text.owners(len(regions))
        images = {path: text_N if owner_N is None else owner_N[text_N] for path, text_N in rows.items()}
        x_NLD = torch.cat(
            [
                torch.cat(
                    [
                        self.embed_visual(image[images[path]], path),
                        self.embed_words(ids.get(path, corruption.ids_BT)[text_N], 0, path),
                    ],
                    1,
                )
                for path, text_N in rows.items()
            ]
        )
        visual_NP = F.pad(regions.mask_BR[torch.cat(list(images.values()))], (1, 0), value=True)
        mask_NL = torch.cat([visual_NP, text.mask_BT[torch.cat(list(rows.values()))]], 1)
        causal_N = torch.cat([torch.full_like(text_N, path == SEQ2SEQ).bool() for path, text_N in rows.items()])
        return self.encode(x_NLD, mask_NL, visual_NP.shape[1] + 1, causal_N if SEQ2SEQ in rows else None)

    def region_loss(self, x_MD: Tensor, packing: Packing, at_NR: Tensor, class_probs_NRC: Tensor) -> Loss:
        """What the detector saw in hidden regions of the first rows, [CLS] standing before them (table 6)."""
        assert self.object_head is not None
        rows, length = packing.shape
        at_NL = F.pad(at_NR, (1, length - 1 - at_NR.shape[1], 0, rows - len(at_NR)))
        return masked_object_classification(
            self.object_head(take(x_MD, packing.rows_at(at_NL))), class_probs_NRC[at_NR]
        )

    # ---- Understanding ---------------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        """The feature of VQA: [CLS] times [SEP], and the first layer of the classifier. `image_BRD` has [CLS] at 0, so
        R + 1 tokens; `text_BTD` has [SEP] at 0. Regions are embedded once, also where several texts share an image."""
        regions_BRD, owner_N = self.embed_regions(image), text.owners(len(image))
        ids_NT = hide_a_word(text, self.config) if self.training and self.config.mask_question else text.ids_BT
        visual_BLD, mask_BP = self.embed_visual(regions_BRD, BIDIRECTIONAL), F.pad(image.mask_BR, (1, 0), value=True)  # type: ignore[union-attr]
        if owner_N is not None:
            visual_BLD, mask_BP = visual_BLD[owner_N], mask_BP[owner_N]
        x_NLD = torch.cat([visual_BLD, self.embed_words(ids_NT, 0, BIDIRECTIONAL)], 1)
        prefix = mask_BP.shape[1]
        x_MD, packing = self.encode(x_NLD, torch.cat([mask_BP, text.mask_BT], 1), prefix + 1, None)
        states_NLD = packing.pad(x_MD)
        pooled_NP = F.relu(self.fusion(states_NLD[:, 0] * states_NLD[:, prefix]))
        return Fused(image_BRD=states_NLD[:, :prefix], text_BTD=states_NLD[:, prefix:], pooled_BP=pooled_NP)

    # ---- Generation ------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """[N, T, V], or [M, V] at the True positions of `at_NT`; position t predicts token t + 1. Images are encoded
        once, also where several texts share one.

        Behind the image stand the words, and as many [MASK]s: one for each word that is asked for, at its place. It
        sees the words before that place and itself; no word sees a [MASK]. So all are told as generation tells them.

        Raises:
            DataError: `at_NT` asks what follows the last place. Without it a text may have `max_text` - 1 tokens.
        """
        if at_NT is not None and at_NT[:, -1].any():
            raise DataError("at_NT asks what follows the last token, which no text tells")
        prefix, owner_N = self.encode_prefix(image), text.owners(len(image))
        asked_NT = torch.ones_like(text.mask_BT) if at_NT is None else at_NT[:, :-1]  # the last has no place behind it
        read_NT = text.mask_BT if at_NT is None else at_NT.flip(1).cumsum(1).flip(1) > 0  # nothing behind the last
        words, masks = read_NT.shape[1] - 1, asked_NT.shape[1]

        masks_NT = torch.full_like(text.ids_BT[:, :masks], self.config.mask_id)
        x_NLD = torch.cat([self.embed_words(text.ids_BT[:, 1:], 1, SEQ2SEQ), self.embed_words(masks_NT, 1, SEQ2SEQ)], 1)
        packing = Packing.of(torch.cat([read_NT[:, 1:], asked_NT], 1))
        places_L = torch.cat([torch.arange(1, words + 1), torch.arange(1, masks + 1)]).to(x_NLD.device)
        is_word_L = torch.arange(words + masks, device=x_NLD.device) < words
        # One row a query: a word sees the words up to itself, a [MASK] those before it and itself.
        before_LL = is_word_L & (places_L < places_L[:, None])
        before_LL = before_LL | torch.eye(words + masks, dtype=torch.bool, device=x_NLD.device)

        mask_NP, layers = prefix.mask_BP, prefix.layers
        if owner_N is not None:
            mask_NP, layers = mask_NP[owner_N], tuple(layer.select(owner_N) for layer in layers)
        mask = torch.cat(
            [
                mask_NP[:, None, None].expand(-1, 1, words + masks, -1),
                before_LL.expand(len(mask_NP), 1, -1, -1),
            ],
            -1,
        )
        x_MD = packing.pack(x_NLD)
        for block, memory in zip(self._blocks(), layers, strict=True):
            x_MD = block.behind(x_MD, mask, packing, memory)
        logits_MV = self.predict_words(take(x_MD, rows_behind(packing, asked_NT)))
        return logits_MV.unflatten(0, (-1, masks)) if at_NT is None else logits_MV

    def masked_words(
        self, batch: Batch, *, generator: torch.Generator, mask_probability: float
    ) -> tuple[Tensor, Tensor]:
        """Captioning as the paper learns it: hidden words told with seq2seq's mask, [M, V], and what they were, [M]."""
        learn: Learners = {SEQ2SEQ: None}
        corruption = self.corrupt(batch, objectives=learn, generator=generator, mask_probability=mask_probability)
        image = self.encode_corrupted(batch, corruption)
        x_MD, packing = self.encode_rows(batch, corruption, image, rows_of(learn, batch.text), {})
        logits_MV = self.predict_words(take(x_MD, rows_behind(packing, corruption.words_BT)))
        return logits_MV, batch.text.ids_BT[corruption.words_BT]

    def start(self, image: Image, *, max_len: int) -> DecodingState:
        """Encodes each image once; up to `max_len` steps may follow, the first with [CLS]."""
        if max_len >= self.config.max_text:
            raise ParamsError(
                f"max_len is {max_len}, but config.max_positions and config.region_slots leave "
                f"{self.config.max_text - 1}"
            )
        prefix = self.encode_prefix(image)
        return DecodingState.begin(prefix, prefix.mask_BP, max_len=max_len)

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Reads one more token of each hypothesis, with a [MASK] behind it. Returns the next token's logits, [N, V].

        [CLS], with which decoding begins, is in the prefix already: there the [MASK] stands alone.
        """
        place, mask_N = state.length, torch.full_like(token_N, self.config.mask_id)
        ids_NQ = torch.stack([token_N, mask_N], 1) if place else mask_N[:, None]
        x_NQD = self.embed_words(ids_NQ, place or 1, SEQ2SEQ)
        prefix_mask_BP, past = padding_mask(state.memory.mask_BP), []
        before = iter(state.past or [None] * len(self.stack))
        for block, memory in zip(self._blocks(), state.memory.layers, strict=True):
            x_NQD, present = block.step_behind(x_NQD, next(before), memory, prefix_mask_BP, state.by_image)
            past.append(present.drop_last())
        logits_NV = self.predict_words(x_NQD[:, -1])
        return logits_NV, replace(state, length=place + 1, past=tuple(past) if place else ())

    def reorder(self, state: DecodingState, index_N: Tensor) -> DecodingState:
        """Hypothesis i continues hypothesis index[i]; their number may change."""
        return state.reorder(index_N)

    # ---- What training asks ----------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """`regions`: their embedding. `stack`: the blocks, with the words' embedding. `heads`: all that only an
        objective or a task has."""
        group_of = {"region_embedding": "regions", "text_embedding": "stack", "stack": "stack"}
        groups: dict[str, list[nn.Parameter]] = {}
        for name, child in self.named_children():
            groups.setdefault(group_of.get(name, "heads"), []).extend(child.parameters())
        return groups
