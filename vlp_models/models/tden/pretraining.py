"""TDEN's pretraining: one corruption of a batch, a pass over it, and the four objectives on what it predicts.

Shape suffixes: B batch, R regions, T text tokens, M masked words, K masked regions, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch, Regions
from vlp_models.errors import ParamsError
from vlp_models.models.layers.masks import causal_mask
from vlp_models.models.layers.reading import Reading, Rereading, changed_from
from vlp_models.models.protocols import MaskedPass
from vlp_models.models.tden.modules import GENERATION, UNDERSTANDING, TDENModules
from vlp_models.models.tden.state import Generated, PassOutput, VisualStates
from vlp_models.objectives.ism import match_in_batch, matched_or_not
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masking import Corruption, mask_tokens, overlapping, select_regions, select_tokens
from vlp_models.objectives.mlm import masked_language_modelling
from vlp_models.objectives.moc import masked_object_classification
from vlp_models.objectives.msg import sentence_generation
from vlp_models.objectives.ranks import number_over_ranks
from vlp_models.objectives.token_loss import empty


class TDENPretraining(TDENModules):
    """Pretrains and PredictsMaskedWords (models/protocols.py)."""

    word_paths = {"encoder": ("mlm", "moc"), "decoder": ("msg",)}  # noqa: RUF012

    def pretraining_losses(
        self, batch: Batch, *, objectives: Collection[str], generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """One unweighted loss per objective; one corruption of the batch and one pass serve them all.

        Raises:
            ParamsError: an objective is unknown, or MOC is asked for without class probabilities.
        """
        corruption = self.corrupt(batch, objectives=objectives, generator=generator, mask_probability=mask_probability)
        return self.masked_pass(batch, corruption, self.encode_corrupted(batch, corruption), objectives).losses

    def corrupt(
        self, batch: Batch, *, objectives: Collection[str], generator: torch.Generator, mask_probability: float
    ) -> Corruption:
        """What the objectives hide of the batch: words for MLM and MSG, regions for MOC.

        Raises:
            ParamsError: an objective is unknown, or MOC is asked for without class probabilities.
        """
        unknown = set(objectives) - set(self.objectives)
        if unknown:
            why = "; `moc` needs features with class probabilities" if "moc" in unknown else ""
            raise ParamsError(f"TDEN can't learn {sorted(unknown)}, only {list(self.objectives)}{why}")
        config, text, image = self.config, batch.text, batch.image
        words_BT = select_tokens(text.mask_BT, mask_probability, generator)
        ids_BT = text.ids_BT
        if {"mlm", "msg"} & set(objectives):
            ids_BT = mask_tokens(
                ids_BT,
                words_BT,
                scheme=config.mask_scheme,
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                generator=generator,
            )
        regions_BR = hidden_BR = None
        if "moc" in objectives and isinstance(image, Regions):
            regions_BR = hidden_BR = select_regions(image.mask_BR, mask_probability, generator)
            if config.zero_overlapping_regions:
                hidden_BR = overlapping(regions_BR, image.boxes_BR4) & image.mask_BR
        return Corruption(ids_BT=ids_BT, words_BT=words_BT, regions_BR=regions_BR, hidden_BR=hidden_BR)

    def encode_corrupted(self, batch: Batch, corruption: Corruption) -> VisualStates:
        """The image without its hidden regions, once for all passes."""
        return self.encode_image(batch.image, corruption.hidden_BR)

    def masked_pass(
        self,
        batch: Batch,
        corruption: Corruption,
        image: VisualStates,
        objectives: Collection[str],
        ids: Mapping[str, Tensor] | None = None,
        after: MaskedPass | None = None,
    ) -> MaskedPass:
        """One pass for these objectives; only the paths that they need run.

        ids: what the `encoder` and the `decoder` path read; the masked sentences where it says nothing.
        after: an earlier pass over the same batch and image. The decoder recomputes each sentence only from its first
            changed word on.
        """
        ids, wanted, mask_BT = ids or {}, set(objectives), batch.text.mask_BT
        words_BT, regions_BR = corruption.words_BT, corruption.regions_BR if "moc" in wanted else None
        output = self.run_pass(
            image,
            mask_BT,
            encoder_ids_BT=ids.get("encoder", corruption.ids_BT) if wanted & {"mlm", "moc", "ism"} else None,
            decoder_ids_BT=ids.get("decoder", corruption.ids_BT) if "msg" in wanted else None,
            words_BT=words_BT if "mlm" in wanted else None,
            regions_BR=regions_BR,
            after=after.output if after is not None else None,
        )
        losses = self.pass_losses(output, batch, words_BT=words_BT, regions_BR=regions_BR)
        if "ism" in wanted and output.text_BTD is not None:
            losses["ism"] = self.matching_loss(output.text_BTD, batch, image)
        word_logits = {}
        if output.mlm_logits_MV is not None:
            word_logits["encoder"] = output.mlm_logits_MV.detach()
        if output.msg_logits_NV is not None:
            word_logits["decoder"] = output.msg_logits_at(words_BT, mask_BT).detach()
        return MaskedPass(losses=losses, word_logits=word_logits, output=output)

    def run_pass(
        self,
        visual: VisualStates,
        mask_BT: Tensor,
        *,
        encoder_ids_BT: Tensor | None = None,
        decoder_ids_BT: Tensor | None = None,
        words_BT: Tensor | None = None,
        regions_BR: Tensor | None = None,
        after: PassOutput | None = None,
    ) -> PassOutput:
        """One pass, given encoded images and corrupted sentences.

        encoder_ids_BT: what the cross-modal encoder reads (S_E in the paper), None to leave MLM, MOC and ISM out.
        decoder_ids_BT: what the cross-modal decoder reads (S_D), None to leave MSG out.
        words_BT, regions_BR bool: the masked positions that MLM and MOC predict, None to leave the objective out.
        after: of an earlier pass with the same `visual` and `mask_BT`, whose work on unchanged words is taken over.
        """
        output, memory_BSD = PassOutput(), visual.last_BSD
        both = encoder_ids_BT is not None and decoder_ids_BT is not None
        decoder_reads_encoder = both and self.config.decoder_visual_source == "cross_encoder"
        if encoder_ids_BT is not None:
            text_BTD = self.encode_text({UNDERSTANDING: encoder_ids_BT}, mask_BT)[UNDERSTANDING]
            output = replace(output, text_BTD=text_BTD)
            if words_BT is not None or regions_BR is not None or decoder_reads_encoder:
                text_BTD, (*_, image_BSD) = self.cross_encode(text_BTD, mask_BT, visual)
                if words_BT is not None:
                    output = replace(output, mlm_logits_MV=self.predict_words(text_BTD[words_BT]))
                if regions_BR is not None and self.object_head is not None:
                    output = replace(output, moc_logits_KC=self.object_head(image_BSD[:, 1:][regions_BR]))
                if decoder_reads_encoder:
                    memory_BSD = image_BSD
        if decoder_ids_BT is not None:
            before = after.generated if after is not None else None
            output = replace(output, generated=self._generate(decoder_ids_BT, mask_BT, memory_BSD, visual, before))
        return output

    def _generate(
        self, ids_BT: Tensor, mask_BT: Tensor, memory_BSD: Tensor, visual: VisualStates, before: Generated | None
    ) -> Generated:
        """MSG's part of a pass: the generation stream, the decoder and its predictions.

        before: an earlier pass's. From the same memory, each sentence is computed from its first changed word on only.
        """
        if self.config.shared or (before is not None and before.memory_BSD is not memory_BSD):
            before = None
        predicts_BT = F.pad(mask_BT[:, 1:], (0, 1))  # a token that another one follows
        again_BT = predicts_BT if before is None else predicts_BT & changed_from(ids_BT, before.ids_BT)
        reading = Reading() if before is None else Rereading(before.reading, again_BT)
        text = self.encode_text({GENERATION: ids_BT}, mask_BT, reading=reading)[GENERATION]
        decoded = self.decode(text, causal_mask(mask_BT), memory_BSD, visual.mask_BS, reading)
        if before is None:
            logits_NV = self.predict_words(decoded[predicts_BT])
        else:
            rows_M = again_BT[predicts_BT].nonzero().squeeze(1)
            logits_NV = before.logits_NV.index_copy(0, rows_M, self.predict_words(decoded))
        return Generated(logits_NV=logits_NV, ids_BT=ids_BT, memory_BSD=memory_BSD, reading=reading)

    def pass_losses(
        self, output: PassOutput, batch: Batch, *, words_BT: Tensor, regions_BR: Tensor | None
    ) -> dict[str, Loss]:
        """MLM, MOC and MSG of what a pass predicted; the targets are the batch's own words and regions."""
        losses = {}
        ids_BT, mask_BT = batch.text.ids_BT, batch.text.mask_BT
        if output.mlm_logits_MV is not None:
            losses["mlm"] = masked_language_modelling(output.mlm_logits_MV, ids_BT[words_BT])
        if output.moc_logits_KC is not None and isinstance(batch.image, Regions):
            targets_KC = batch.image.class_probs_BRC[regions_BR]
            losses["moc"] = masked_object_classification(output.moc_logits_KC, targets_KC)
        if output.msg_logits_NV is not None:
            losses["msg"] = sentence_generation(output.msg_logits_NV, ids_BT[:, 1:][mask_BT[:, 1:]])
        return losses

    def matching_loss(self, text_BTD: Tensor, batch: Batch, image: VisualStates) -> Loss:
        """ISM on the outputs of the sentence encoder (understanding stream) and of the object encoder; or, as in
        ViLBERT, of the cross-modal encoder, where each sentence meets its own image and its neighbour's. A batch of
        one image has nothing to tell apart: zero."""
        mask_BT = batch.text.mask_BT
        numbers_G, own = number_over_ranks(batch.image_ids)
        if len(numbers_G.unique()) == 1:  # no negative; and batch normalisation could not take a batch of one
            return empty(text_BTD, "ism")
        if self.config.ism_source == "cross_modal":
            matched_B, mismatched_B = (self.match(text_BTD, mask_BT, v) for v in (image, image.rolled()))
            differs_B = (numbers_G != numbers_G.roll(1))[own].to(text_BTD.device)
            return matched_or_not(matched_B, mismatched_B[differs_B])
        return match_in_batch(
            self.pool_text(text_BTD, mask_BT),
            self.pool_image(image),
            batch.image_ids,
            margin=self.config.ism_margin,
            negatives=self.config.ism_negatives,
        )
