"""TDEN: the two-stream decoupled encoder-decoder.

Y. Li, Y. Pan, T. Yao, J. Chen, T. Mei: "Scheduled Sampling in Vision-Language Pretraining with Decoupled
Encoder-Decoder Network", AAAI 2021. Authors' code: YehLi/xmodaler (its release, YehLi/TDEN, contains no model).

    regions  [IMG] r1 .. rn ── object encoder (K_I) ──┬─────────────── cross-modal encoder (K_E) ── MLM, MOC
                                                      ├── ISM ──┐        │
    words [CLS] w1 .. wm [SEP] ── sentence encoder (K_S) ───────┴────────┘
                    the same, run causally ───────────────────── cross-modal decoder (K_D) ── MSG
                                                                   └ attends to the object encoder's output

The paper: four stacks of transformer blocks. The visual tokens start with [IMG], the mean of all regions. The
cross-modal encoder runs over the two encoded sequences joined; each decoder layer attends to the past words, then to
all visual tokens. MLM: 15% of the words become [MASK], classified by cross-entropy. MOC: 15% of the regions become a
mask token, classified by KL divergence to the detector's distribution. ISM: attention-pooled outputs of the object and
the sentence encoder (not of the cross-modal encoder), triplet ranking loss, Multibatch negatives. MSG: the sentence
word by word from the past words and the image. All four losses are summed, in one pass or two.

Choices where the paper is silent:
- Sizes are "as in ViLBERT"; the defaults are the authors' code's, 768 wide throughout. Post-LN, GELU, N(0, 0.02).
- The sentence encoder serves both paths, so for generation it must be causal as well: each sentence is encoded twice,
  with type 0 and full attention, and with type 1 and causal attention.
- The decoder attends to the object encoder's output, which matches "conditioned on the input image".
- MSG reads the sentence that MLM masked and predicts every token, [SEP] included.
- [MASK] always replaces a masked word; BERT replaces 80% (`mask_scheme`). A region's mask token is a zero feature with
  its location kept, and is left out of [IMG]'s mean; the authors' code also hides overlapping regions
  (`zero_overlapping_regions`). A region without class probabilities has no target, so MOC skips it.
- ISM reads the masked input, because there is one pass. It pools the last object layer, with margin 0.2 and all
  violating negatives.
- MLM and MSG share one head, tied to the word embeddings as in BERT (`tie_lm_head`).
- The holistic feature for VQA is "based on the outputs of encoder and decoder via attention" after MCAN: pooled image,
  pooled text and pooled decoder output are added and normalized. The decoder stays causal as in pretraining.

variants.py has the paper's ablations and the deviations of the authors' code. Two-pass scheduled sampling calls
`masked_pass` twice with one `VisualStates` (training/scheduled_sampling.py); in the decoder's path the second pass
computes each sentence only from its first sampled word on. Only real tokens are computed (layers/packing.py).

Shape suffixes: B images, R regions, S visual tokens ([IMG] and R regions), K packed visual tokens; N texts (or
hypotheses), T text tokens, M packed ones; D hidden, P pooled dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import causal_mask, padding_mask
from vlp_models.models.layers.blocks import DecoderBlock, TransformerBlock, init_weights
from vlp_models.models.layers.cache import DecodingState, KeyValues
from vlp_models.models.layers.embeddings import RegionEmbedding, TextEmbedding, embedding_table
from vlp_models.models.layers.heads import AttentionPooler, TokenHead
from vlp_models.models.layers.located import located_regions
from vlp_models.models.layers.packing import Packing, changed_from, take
from vlp_models.models.layers.several_images import add_places, place_embedding
from vlp_models.models.partial_load import PartialLoad
from vlp_models.models.protocols import Fused, Located, MaskedPass
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.state import GenerationPass, Memory, VisualStates
from vlp_models.objectives.distributed import number_over_ranks
from vlp_models.objectives.generation import sentence_generation
from vlp_models.objectives.loss import (
    Learners,
    Loss,
    any_learner,
    first_trainable,
    learners_by_text,
    select_learners,
    zero_loss,
)
from vlp_models.objectives.masked_modeling import (
    Corruption,
    mask_tokens,
    masked_language_modeling,
    masked_object_classification,
    overlapping,
    select_regions,
    select_tokens,
)
from vlp_models.objectives.matching import match_in_batch

UNDERSTANDING, GENERATION = 0, 1  # the sentence encoder's streams, and their token types


class TDEN(nn.Module):
    """Implements the protocols of understanding, generation and pretraining (models/protocols.py), on regions."""

    config_class: ClassVar[type] = TDENConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=("hidden", "heads", "intermediate", "feature_dim", "separate_region_norms", "separate_ffn")
    )
    inputs: ClassVar[ModelInputs] = ModelInputs(image=RegionInput())
    word_paths: ClassVar[Mapping[str, tuple[str, ...]]] = {"encoder": ("mlm", "moc"), "decoder": ("msg",)}
    objectives: tuple[str, ...]
    fused_dim: int
    text_dim: int
    located_dim: int
    images_per_text: int
    decoder_dim: int = 0  # of a second holistic feature, which only the authors' code has

    def __init__(self, config: TDENConfig) -> None:
        super().__init__()
        self.config = config
        self.objectives = ("mlm", "moc", "ism", "msg") if config.num_classes else ("mlm", "ism", "msg")
        self.fused_dim = config.fusion_dim or config.hidden
        self.text_dim = self.located_dim = config.hidden
        hidden, dropout, eps = config.hidden, config.dropout, config.embedding_norm_eps

        self.region_embedding = RegionEmbedding(
            config.feature_dim,
            hidden,
            dropout=dropout,
            eps=eps,
            separate_norms=config.separate_region_norms,
            feature_dropout=config.feature_dropout,
        )
        self.text_embedding = TextEmbedding(
            config.vocab_size, hidden, max_positions=config.max_positions, types=2, dropout=dropout, eps=eps
        )
        # The four stacks: K_I, K_S, K_E and K_D layers
        self.object_encoder: Any = self.stack(TransformerBlock, config.object_layers)
        self.sentence_encoder: Any = self.stack(TransformerBlock, config.sentence_layers)
        self.cross_encoder: Any = self.stack(TransformerBlock, config.encoder_layers)
        self.cross_decoder: Any = self.stack(DecoderBlock, config.decoder_layers)

        # Heads of MLM and MSG, of MOC, of ISM, and of the tasks' holistic feature
        self.word_head = TokenHead(hidden, config.vocab_size, eps=config.layer_norm_eps, tied=config.tie_lm_head)
        classes = config.num_classes
        self.object_head = TokenHead(hidden, classes, eps=config.layer_norm_eps) if classes else None
        self.text_pooler = self.pooler(config.similarity_dim or hidden)
        self.image_poolers = nn.ModuleList([self.pooler(config.similarity_dim or hidden)])
        self.fusion_poolers = nn.ModuleDict({s: self.pooler(self.fused_dim) for s in ("image", "text", "decoder")})
        self.fusion_norm = nn.LayerNorm(self.fused_dim, eps=config.fusion_norm_eps)
        self.residual = self.residual_mlp() if config.ism_residual else None
        init_weights(self, config.init_std)
        self.images_per_text = config.images_per_text
        self.place_embedding = place_embedding(config.images_per_text, hidden)

    def stack(self, block: type[nn.Module], layers: int) -> nn.ModuleList:
        """Build a stack of blocks of the config's sizes."""
        config = self.config
        sizes = (config.hidden, config.heads, config.intermediate)
        drop = {"dropout": config.dropout, "attention_dropout": config.attention_dropout}
        return nn.ModuleList(block(*sizes, **drop, eps=config.layer_norm_eps) for _ in range(layers))

    def pooler(self, outputs: int, **more: Any) -> AttentionPooler:
        return AttentionPooler(self.config.hidden, outputs, dropout=self.config.dropout, **more)

    def residual_mlp(self) -> nn.Sequential:
        """Build ISM's path from the mean region past the object encoder; it drops units as features are dropped."""
        config = self.config
        wide, outputs = 2 * config.hidden, config.similarity_dim or config.hidden
        dropout = nn.Dropout(config.feature_dropout)
        return nn.Sequential(nn.Linear(config.feature_dim, wide), nn.GELU(), dropout, nn.Linear(wide, outputs))

    # ---- The four modules ------------------------------------------------------------------------------------

    def encode_image(self, image: Image, hidden_BR: Tensor | None = None) -> VisualStates:
        """Run the object encoder. hidden_BR bool: regions that MOC hides."""
        if not isinstance(image, Regions):
            raise DataError("TDEN reads region features: run the features stage, or choose a model that reads pixels")
        x_KD, packing = self.region_embedding(image, hidden_BR)
        if image.place_BR is not None:
            place_K = packing.pack(F.pad(image.place_BR, (1, 0)))  # [IMG] has the place of the first image
            x_KD = add_places(x_KD, place_K, self.place_embedding)
        # Every layer's states are kept: ISM may pool all of them.
        mask, layers = padding_mask(packing.mask_BT), []
        for block in self.object_encoder:
            x_KD = block(x_KD, mask, packing)
            layers.append(x_KD)
        residual_BP = None
        if self.residual is not None:
            residual_BP = self.residual(self.region_embedding.mean_region(image, hidden_BR))
        return VisualStates(layers=tuple(layers) or (x_KD,), packing=packing, residual_BP=residual_BP)

    def encode_text(
        self, ids_NT: Tensor, words: Packing, stream: int = UNDERSTANDING, types_NT: Tensor | None = None
    ) -> Tensor:
        """Run the sentence encoder over the packed `words` of the sentences. [M, D]

        Words attend to all words (UNDERSTANDING) or to past ones (GENERATION). types_NT int64: token types, if not the
        stream's own.
        """
        length = words.shape[1]
        if length > self.config.max_positions:
            raise ParamsError(f"{length} tokens of text, but config.max_positions is {self.config.max_positions}")
        # The same weights serve both streams; only the mask and the token type differ.
        mask = causal_mask(length, ids_NT.device) if stream == GENERATION else padding_mask(words.mask_BT)
        types = torch.full_like(words.places_M, stream) if types_NT is None else words.pack(types_NT)
        x_MD = self.text_embedding(words.pack(ids_NT), types, words.positions_M)
        for block in self.sentence_encoder:
            x_MD = block(x_MD, mask, words)
        return x_MD

    def cross_encode(self, text_MD: Tensor, words: Packing, visual: VisualStates) -> tuple[Tensor, list[Tensor]]:
        """Run the cross-modal encoder over [words; regions], one image per text.

        Returns the words' last states, [M, D], and the regions' states after each layer, [K, D] each.
        """
        # Packed rows: all words first, then all regions; `joint` maps both to [N, T + S].
        joint = words.concat(visual.packing)
        mask = padding_mask(joint.mask_BT)
        x = torch.cat([text_MD, visual.last_KD])
        image_layers = []
        for block in self.cross_encoder:
            x = block(x, mask, joint)
            image_layers.append(x[joint.split :])
        return x[: joint.split], image_layers

    def project_memory(self, image_KD: Tensor, regions: Packing, owner_N: Tensor | None) -> Any:
        """Project images' states to what the decoder attends to. owner_N: the image of each text."""
        layers = tuple(block.cross.project(image_KD, regions) for block in self.cross_decoder)
        return Memory(layers=layers, mask=padding_mask(regions.mask_BT), owner_N=owner_N, source=image_KD)

    def decode(self, text_MD: Tensor, words: Packing, memory: Any, mask: Tensor | None = None) -> Tensor:
        """Run the cross-modal decoder; returns the words' last states, [M, D].

        mask: of self-attention; default: causal.
        """
        # All texts of an image are side by side for cross-attention, so that its memory is not copied.
        mask = causal_mask(words.shape[1], text_MD.device) if mask is None else mask
        by_image = words.by_owner(memory.owner_N, memory.images)
        for block, projected in zip(self.cross_decoder, memory.layers, strict=True):
            text_MD = block(text_MD, mask, projected, memory.mask, words, by_image)
        return text_MD

    def predict_words(self, x_D: Tensor) -> Tensor:
        """Return vocabulary logits, [..., D] -> [..., V]. Gather the positions that need them first."""
        return self.word_head(x_D, embedding_table(self.text_embedding.words) if self.config.tie_lm_head else None)

    # ---- The four objectives ---------------------------------------------------------------------------------

    def pretraining_losses(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """Return one unweighted loss per objective, all from one corruption of the batch and one pass.

        Raises:
            ParamsError: an unknown objective, or MOC without class probabilities.
        """
        objectives = learners_by_text(objectives, batch.text.owner_N)
        corruption = self.corrupt(batch, objectives=objectives, generator=generator, mask_probability=mask_probability)
        return self.masked_pass(batch, corruption, self.encode_corrupted(batch, corruption), objectives).losses

    def corrupt(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> Corruption:
        """Draw what the objectives hide of the batch: words for MLM and MSG, regions for MOC.

        Raises:
            ParamsError: an unknown objective, or MOC without class probabilities.
        """
        unknown = set(objectives) - set(self.objectives)
        if unknown:
            why = "; `moc` needs features with class probabilities" if "moc" in unknown else ""
            raise ParamsError(f"TDEN has no objective {sorted(unknown)}, only {list(self.objectives)}{why}")
        config, text, image = self.config, batch.text, batch.image
        # Words for MLM and MSG; they are drawn even if neither is trained, so that MOC's regions do not depend on it.
        words_NT = select_tokens(text.mask_BT, mask_probability, generator)
        if not {"mlm", "msg"} & set(objectives):
            ids_NT = text.ids_BT
        else:
            ids_NT = mask_tokens(
                text.ids_BT,
                words_NT & any_learner(objectives, ("mlm", "msg"), words_NT),
                scheme=config.mask_scheme,
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                generator=generator,
            )
        regions_BR = hidden_BR = None
        if "moc" in objectives and isinstance(image, Regions):
            regions_BR = select_regions(image.mask_BR, mask_probability, generator)
            # A region without class probabilities has no target.
            regions_BR = regions_BR & (image.class_probs_BRC.sum(-1) > 0)
            if objectives["moc"] is not None and text.owner_N is None:
                regions_BR = regions_BR & objectives["moc"][:, None]
            hidden_BR = regions_BR
            if config.zero_overlapping_regions:
                # A region that overlaps a hidden one would reveal it.
                hidden_BR = overlapping(regions_BR, image.boxes_BR4) & image.mask_BR
        return Corruption(ids_BT=ids_NT, words_BT=words_NT, regions_BR=regions_BR, hidden_BR=hidden_BR)

    def encode_corrupted(self, batch: Batch, corruption: Corruption) -> VisualStates:
        """Encode the images without their hidden regions, once for all passes."""
        return self.encode_image(batch.image, corruption.hidden_BR)

    def masked_pass(
        self,
        batch: Batch,
        corruption: Corruption,
        image: VisualStates,
        objectives: Learners,
        ids: Mapping[str, Tensor] | None = None,
        after: MaskedPass | None = None,
    ) -> MaskedPass:
        """Run one pass for these objectives, and only the paths that they need.

        Args:
            ids: what the `encoder` and the `decoder` path read (S_E and S_D in the paper); default: the masked
                sentences.
            after: an earlier pass over the same batch and image. The decoder recomputes each sentence only from its
                first changed word on.
        """
        ids, text, words = ids or {}, batch.text, Packing.of(batch.text.mask_BT)
        owner_N = text.owners(len(batch.image))
        losses: dict[str, Loss] = {}
        word_logits: dict[str, Tensor] = {}
        generated: GenerationPass | None = None
        crossed: tuple[Tensor, Packing] | None = None
        if {"mlm", "moc", "ism"} & set(objectives):
            # The understanding stream; ISM reads its output before fusion.
            understood_MD = self.encode_text(ids.get("encoder", corruption.ids_BT), words, UNDERSTANDING)
            if self.needs_cross_encoder(objectives):
                visual = image.last().select(owner_N)
                text_MD, (*_, image_KD) = self.cross_encode(understood_MD, words, visual)
                crossed = image_KD, visual.packing
                if "mlm" in objectives:
                    masked_NT = select_learners(corruption.words_BT, objectives["mlm"])
                    logits = self.predict_words(take(text_MD, words.rows_at(masked_NT)))
                    losses["mlm"] = masked_language_modeling(logits, text.ids_BT[masked_NT])
                    word_logits["encoder"] = logits.detach()
                if "moc" in objectives and corruption.regions_BR is not None:
                    losses["moc"] = self.object_loss(image_KD, visual.packing, batch, corruption, objectives["moc"])
            if "ism" in objectives:
                losses["ism"] = self.matching_loss(understood_MD, words, batch, image, objectives["ism"])
        if "msg" in objectives:
            generated = self.generation_pass(
                ids.get("decoder", corruption.ids_BT),
                select_learners(text.has_next_BT, objectives["msg"]),
                self.decoder_input(image, owner_N, crossed),
                after.output if after is not None else None,
            )
            losses["msg"] = sentence_generation(generated.logits_MV, text.next_tokens(generated.at_BT))
            masked_NT = select_learners(corruption.words_BT, objectives["msg"])
            # A masked word is predicted at the position before it.
            before_masked_NT = F.pad(masked_NT[:, 1:], (0, 1))
            word_logits["decoder"] = generated.logits_MV.detach()[before_masked_NT[generated.at_BT]]
        return MaskedPass(losses=losses, word_logits=word_logits, output=generated)

    def needs_cross_encoder(self, objectives: Learners) -> bool:
        """Return whether a pass for these objectives runs the cross-modal encoder."""
        return bool({"mlm", "moc"} & set(objectives))

    def decoder_input(
        self, image: VisualStates, owner_N: Tensor | None, crossed: tuple[Tensor, Packing] | None
    ) -> tuple[Tensor, Packing, Tensor | None]:
        """Return the arguments of `project_memory`: the object encoder's output.

        crossed: the cross-modal encoder's output, if the pass has it.
        """
        return image.last_KD, image.packing, owner_N

    def generation_pass(
        self,
        ids_NT: Tensor,
        at_NT: Tensor,
        image: tuple[Tensor, Packing, Tensor | None],
        before: GenerationPass | None,
    ) -> GenerationPass:
        """Run MSG's part of a pass: the generation stream and the decoder.

        Args:
            at_NT bool: the positions whose next word is predicted.
            image: of `decoder_input`.
            before: the same part of an earlier pass. If it used the same image states, each sentence is computed only
                from its first changed word on.
        """
        if before is not None and (before.memory.source is not image[0] or not torch.equal(before.at_BT, at_NT)):
            before = None
        # Each word up to the last one predicted; in a second pass, only those from the first changed word on.
        if before is None:
            memory, words = self.project_memory(*image), Packing.of(at_NT).caching()
        else:
            memory = before.memory
            words = Packing.of(at_NT & changed_from(ids_NT, before.ids_BT)).continuing(before.packing)
        generated_MD = self.decode(self.encode_text(ids_NT, words, GENERATION), words, memory)
        logits = self.predict_words(generated_MD)
        if before is not None:
            # Only the rows after a change are new: put them into the earlier pass's logits.
            rows_M = words.mask_BT[at_NT].nonzero().squeeze(1)
            logits = before.logits_MV.index_copy(0, rows_M, logits)
        return GenerationPass(logits_MV=logits, at_BT=at_NT, ids_BT=ids_NT, memory=memory, packing=words)

    def object_loss(
        self, image_KD: Tensor, regions: Packing, batch: Batch, corruption: Corruption, learners: Tensor | None
    ) -> Loss:
        """Return MOC's loss, on the regions' states of the cross-modal encoder."""
        assert corruption.regions_BR is not None and self.object_head is not None and isinstance(batch.image, Regions)
        # The states have one row per text, the regions one per image: [B, R] -> [N, R]
        masked, class_probs, owner_N = corruption.regions_BR, batch.image.class_probs_BRC, batch.text.owner_N
        if owner_N is not None:
            masked, class_probs = masked[owner_N], class_probs[owner_N]
        masked = select_learners(masked, learners)
        logits = self.object_head(take(image_KD, regions.rows_at(F.pad(masked, (1, 0)))))  # [IMG] is at 0
        return masked_object_classification(logits, class_probs[masked])

    def empty_matching_loss(self, understood_MD: Tensor) -> Loss:
        """Return a zero loss over no pair, connected to trainable parameters."""
        return zero_loss(understood_MD if understood_MD.requires_grad else first_trainable(self), "ism")

    def matching_loss(
        self, understood_MD: Tensor, words: Packing, batch: Batch, image: VisualStates, learners: Tensor | None
    ) -> Loss:
        """Return ISM's loss on the outputs of the sentence encoder (understanding stream) and the object encoder.

        It is zero for a batch of a single image, which has no negatives.
        """
        image_ids, owner_N, rows_N = batch.image_ids, batch.text.owner_N, None
        if owner_N is not None:  # the image of each text
            image_ids = tuple(image_ids[i] for i in owner_N.tolist())
        if learners is not None:
            rows_N = learners.nonzero().squeeze(1)
            image_ids = tuple(image_ids[i] for i in rows_N.tolist())
        numbers_G, _ = number_over_ranks(image_ids)
        if len(numbers_G.unique()) <= 1:  # batch normalization could not process a batch of one either
            return self.empty_matching_loss(understood_MD)
        texts_NP, images_NP = self.pool_text(understood_MD, words), self.pool_image(image)
        if owner_N is not None:
            images_NP = images_NP.index_select(0, owner_N)
        if rows_N is not None:
            texts_NP, images_NP = texts_NP.index_select(0, rows_N), images_NP.index_select(0, rows_N)
        return match_in_batch(
            texts_NP, images_NP, image_ids, margin=self.config.ism_margin, negatives=self.config.ism_negatives
        )

    def pool_image(self, visual: VisualStates) -> Tensor:
        """Return image vectors of unit length, [B, P]: the sum of the pooled layers, and of the mean region's MLP."""
        layers = visual.layers[-len(self.image_poolers) :]
        pooled = [pool(x_KD, visual.packing) for pool, x_KD in zip(self.image_poolers, layers, strict=True)]
        if visual.residual_BP is not None:
            pooled.append(visual.residual_BP)
        return F.normalize(torch.stack(pooled).sum(0), dim=-1)

    def pool_text(self, text_MD: Tensor, words: Packing) -> Tensor:
        """Return text vectors of unit length, [N, P]."""
        return F.normalize(self.text_pooler(text_MD, words), dim=-1)

    # ---- Understanding ---------------------------------------------------------------------------------------

    def embed_image(self, image: Image) -> Tensor:
        """Return image vectors of unit length, [B, P]."""
        return self.pool_image(self.encode_image(image))

    def embed_text(self, text: Text) -> Tensor:
        """Return text vectors of unit length, [N, P]."""
        words = Packing.of(text.mask_BT)
        return self.pool_text(self.encode_text(text.ids_BT, words), words)

    def score(self, state: VisualStates, text: Text, image_of_text_N: Tensor) -> Tensor:
        """Return how well each text and its image match, [N]: the cosine of ISM."""
        images_NP = self.pool_image(state).index_select(0, image_of_text_N)
        return (images_NP * self.embed_text(text)).sum(-1)

    def fuse(self, image: Image, text: Text) -> Fused:
        """Return the holistic feature of VQA, VCR and NLVR for each text.

        `image_BRD` has R + 1 tokens, [IMG] first. An image is encoded once even if several texts share it.
        """
        # Each image is encoded once, and copied for the cross-modal encoder, whose rows are texts.
        visual, words, owner_N = self.encode_image(image), Packing.of(text.mask_BT), text.owners(len(image))
        each, pool = visual.last().select(owner_N), self.fusion_poolers
        text_MD, (*_, image_KD) = self.cross_encode(self.encode_text(text.ids_BT, words), words, each)
        memory = self.project_memory(visual.last_KD, visual.packing, owner_N)
        decoded_MD = self.decode(self.encode_text(text.ids_BT, words, GENERATION), words, memory)
        # The sum of pooled text, image and decoder output, normalized: [N, P]
        pooled_NP = pool["text"](text_MD, words) + pool["image"](image_KD, each.packing)
        pooled_NP = pooled_NP + pool["decoder"](decoded_MD, words)
        return Fused(
            image_BRD=each.packing.pad(image_KD), text_BTD=words.pad(text_MD), pooled_BP=self.fusion_norm(pooled_NP)
        )

    def locate(self, image: Image, text: Text) -> Located:
        """Return the regions' states of the cross-modal encoder, without [IMG]'s."""
        words, owner_N = Packing.of(text.mask_BT), text.owners(len(image))
        visual = self.encode_image(image).last().select(owner_N)
        _, (*_, image_KD) = self.cross_encode(self.understand(text, words), words, visual)
        return located_regions(visual.packing.pad(image_KD)[:, 1:], image, owner_N)

    def understand(self, text: Text, words: Packing) -> Tensor:
        """Run the sentence encoder over the packed words of texts to understand. [M, D]"""
        return self.encode_text(text.ids_BT, words)

    # ---- Generation ------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """Return logits, [N, T, V], or [M, V] at the True positions of `at_NT`; position t predicts token t + 1.

        An image is encoded once even if several texts share it.
        """
        visual, owner_N = self.encode_image(image), text.owners(len(image))
        # Tokens after the last requested position are not computed.
        needed_NT = text.mask_BT if at_NT is None else at_NT.flip(1).cumsum(1).flip(1) > 0
        words = Packing.of(needed_NT)
        memory = self.project_memory(visual.last_KD, visual.packing, owner_N)
        decoded_MD = self.decode(self.encode_text(text.ids_BT, words, GENERATION), words, memory)
        if at_NT is None:
            return words.pad(self.predict_words(decoded_MD))
        return self.predict_words(take(decoded_MD, words.rows_at(at_NT)))

    def start(self, image: Image, *, max_len: int) -> DecodingState:
        """Encode each image once. Up to `max_len` steps may follow; the first reads [CLS]."""
        if max_len > self.config.max_positions:
            raise ParamsError(f"max_len is {max_len}, but config.max_positions is {self.config.max_positions}")
        visual = self.encode_image(image)
        memory = self.project_memory(visual.last_KD, visual.packing, None)
        return DecodingState.begin(memory, visual.packing.mask_BT, max_len=max_len)

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read one more token of each hypothesis. Returns the next token's logits, [N, V]."""
        position = torch.full_like(token_N, state.length)
        x_ND = self.text_embedding(token_N, torch.full_like(token_N, GENERATION), position)
        past: list[KeyValues] = []
        # One entry per layer that attends to earlier words: the sentence encoder's, then the decoder's.
        before = iter(state.past or [None] * (len(self.sentence_encoder) + len(state.memory.layers)))
        for block in self.sentence_encoder:
            x_ND, cache = block.step(x_ND, next(before))
            past.append(cache)
        for layer, memory in zip(self.cross_decoder, state.memory.layers, strict=True):
            x_ND, cache = layer.step(x_ND, next(before), memory, state.memory.mask, state.by_image)
            past.append(cache)
        return self.predict_words(x_ND), replace(state, length=state.length + 1, past=tuple(past))

    def reorder(self, state: DecodingState, index_N: Tensor) -> DecodingState:
        """Let hypothesis i continue hypothesis index[i]; their number may change."""
        return state.reorder(index_N)

    # ---- Training ----------------------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Group parameters by module, each with its embedding; `heads` has all that only objectives and tasks use."""
        groups: dict[str, list[nn.Parameter]] = {}
        embedding_of = {
            "region_embedding": "object_encoder",
            "place_embedding": "object_encoder",
            "text_embedding": "sentence_encoder",
        }
        modules = ("object_encoder", "sentence_encoder", "cross_encoder", "cross_decoder")
        for name, child in self.named_children():
            group = embedding_of.get(name, name if name in modules else "heads")
            groups.setdefault(group, []).extend(child.parameters())
        return {name: parameters for name, parameters in groups.items() if parameters}

    def fit_weights(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Adapt the weights of another TDEN: if only its LM head is tied, this one's starts as the word embeddings."""
        fitted, words = dict(weights), "text_embedding.words.weight"
        if not self.config.tie_lm_head and words in fitted:
            fitted.setdefault("word_head.weight", fitted[words])
        return fitted
