"""TDEN: the two-stream decoupled encoder-decoder.

Y. Li, Y. Pan, T. Yao, J. Chen, T. Mei: "Scheduled Sampling in Vision-Language Pretraining with Decoupled
Encoder-Decoder Network", AAAI 2021. Public code: YehLi/xmodaler (its release, YehLi/TDEN, holds no model).

    regions  [IMG] r1 .. rn ── object encoder (K_I) ──┬─────────────── cross-modal encoder (K_E) ── MLM, MOC
                                                      ├── ISM ──┐        │
    words [CLS] w1 .. wm [SEP] ── sentence encoder (K_S) ───────┴────────┘
                    the same, run causally ───────────────────── cross-modal decoder (K_D) ── MSG
                                                                   └ attends to the object encoder's output

What the paper says: four stacks of transformer blocks. [IMG], the mean of all regions, begins the visual tokens.
The cross-modal encoder runs over the two encoded sequences joined; each decoder layer attends to the past words,
then to all visual tokens. MLM: 15% of the words become [MASK], classified by cross-entropy. MOC: 15% of the regions
become a mask token, classified by KL divergence to the detector's distribution. ISM: attention-pooled outputs of the
object and the sentence encoder (not of the cross-modal encoder), triplet ranking loss, Multibatch negatives. MSG: the
sentence word by word from the past words and the image. All four are summed, in one pass or two.

Where the paper is silent, what is done here (and the switch in `TDENConfig`, if the public code differs):
- Sizes are "as in ViLBERT"; the defaults are the public code's, 768 wide throughout. Post-LN, GELU, N(0, 0.02).
- The sentence encoder serves both paths, so for generation it must be causal, too: each sentence is encoded twice,
  with type 0 and all words visible, with type 1 and only the past visible.
- The decoder attends to the object encoder's output, which is what "conditioned on the input image" asks for. In the
  public code's pretraining it is the cross-modal encoder's, which has seen the caption through MLM's path
  (`decoder_visual_source`).
- Cross-modal encoder blocks are plain. The public code has a feed-forward net per modality (`separate_ffn`).
- MSG reads the sentence that MLM masked and predicts every token, [SEP] included.
- [MASK] always replaces a masked word; BERT replaces 80% (`mask_scheme`). The mask token of a region is a zero
  feature with its location kept, left out of [IMG]'s mean; the public code hides overlapping regions as well
  (`zero_overlapping_regions`).
- ISM sees the masked input, as there is one pass. It pools the last object layer, margin 0.2, all violating
  negatives (`ism_pooling`, `ism_margin`, `ism_negatives`, `similarity_dim`, `pooler_batch_norm`).
- MLM and MSG share one head, tied to the word embeddings as in BERT (`tie_lm_head`).
- The holistic feature for VQA is "based on the outputs of encoder and decoder via attention" after MCAN: pooled image,
  pooled text and pooled decoder output are added and normalised. The decoder stays causal as in pretraining; the
  public code runs it bidirectionally (`understanding_decoder_mask`), multiplies image and text (`fusion`), pools the
  image after every cross-modal layer (`fusion_pooling`) and classifies the decoder's part by itself
  (`fusion_decoder`). Its VCR has token types for the segments of a text (`segment_types`).

Two-pass scheduled sampling calls `masked_pass` twice with one `VisualStates` (training/passes.py); the
second pass generates a sentence from its first sampled word on only (layers/reading.py). The four modules and pooling
are in modules.py, the objectives in pretraining.py, the paper's single-stream and two-stream variants (`structure`) in
shared.py; `ism_source` is ISM's variant of table 2.

Shape suffixes: B batch, S visual tokens ([IMG] and R regions), T text tokens, D hidden, P similarity dimension,
V vocabulary, N hypotheses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from vlp_models.data.batch import Image, Text
from vlp_models.errors import ParamsError
from vlp_models.models.layers.attention import KeyValues
from vlp_models.models.layers.blocks import TransformerBlock
from vlp_models.models.layers.masks import causal_mask, padding_mask
from vlp_models.models.protocols import Fused
from vlp_models.models.tden import shared
from vlp_models.models.tden.modules import GENERATION, UNDERSTANDING
from vlp_models.models.tden.pretraining import TDENPretraining
from vlp_models.models.tden.state import DecodingState


class TDEN(TDENPretraining):
    """Meets every protocol of models/protocols.py, on regions."""

    # ---- Understanding ---------------------------------------------------------------------------------------

    def embed_image(self, image: Image) -> Tensor:
        return self.pool_image(self.encode_image(image))

    def embed_text(self, text: Text) -> Tensor:
        return self.pool_text(self.encode_text({UNDERSTANDING: text.ids_BT}, text.mask_BT)[UNDERSTANDING], text.mask_BT)

    def score_pairs(self, image: Image, text: Text) -> Tensor:
        """How well each image and its own sentence match, as in ISM: a cosine, or a logit if cross-modal. [B]"""
        if self.config.ism_source == "cross_modal":
            encoded = self.encode_text({UNDERSTANDING: text.ids_BT}, text.mask_BT)[UNDERSTANDING]
            return self.match(encoded, text.mask_BT, self.encode_image(image))
        return (self.embed_image(image) * self.embed_text(text)).sum(-1)

    def fuse(self, image: Image, text: Text) -> Fused:
        """The holistic feature of VQA, VCR and NLVR. `image_BRD` has [IMG] at 0, so R + 1 tokens. Images are encoded
        once, also where several texts share one."""
        config, pool = self.config, self.fusion_poolers
        causal = self.fuses_decoder and config.understanding_decoder_mask == "causal"
        visual = self.encode_image(image).repeated(len(text) // max(1, len(image)))
        streams = [UNDERSTANDING, GENERATION] if causal else [UNDERSTANDING]
        encoded = self.encode_text(dict.fromkeys(streams, text.ids_BT), text.mask_BT, text.last_segment_BT)
        text_BTD, image_layers = self.cross_encode(encoded[UNDERSTANDING], text.mask_BT, visual)
        image_BSD = image_layers[-1]
        pooled_text, pooled_image = pool["text"](text_BTD, text.mask_BT), pool["image"](image_BSD, visual.mask_BS)
        if config.fusion_pooling == "all_layers":
            for layer, x_BSD in enumerate(image_layers[:-1]):
                pooled_image = pooled_image + pool[f"image_{layer}"](x_BSD, visual.mask_BS)
        pooled_BP = pooled_text * pooled_image if config.fusion == "product" else pooled_text + pooled_image
        decoder_BP = None
        if self.fuses_decoder:
            memory_BSD = image_BSD if config.decoder_visual_source == "cross_encoder" else visual.last_BSD
            stream, mask = (GENERATION, causal_mask) if causal else (UNDERSTANDING, padding_mask)
            decoded_BTD = self.decode(encoded[stream], mask(text.mask_BT), memory_BSD, visual.mask_BS)
            pooled_decoder_BP = pool["decoder"](decoded_BTD, text.mask_BT)
            if self.decoder_dim:
                decoder_BP = self.fusion_decoder_norm(pooled_decoder_BP)
            else:
                pooled_BP = pooled_BP + pooled_decoder_BP
        return Fused(
            image_BRD=image_BSD, text_BTD=text_BTD, pooled_BP=self.fusion_norm(pooled_BP), decoder_BP=decoder_BP
        )

    # ---- Generation ------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """[N, T, V], or [M, V] at the True positions of `at_NT`; position t predicts token t + 1. Images are encoded
        once, also where several texts share one."""
        visual = self.encode_image(image)
        text_BTD = self.encode_text({GENERATION: text.ids_BT}, text.mask_BT)[GENERATION]
        decoded_BTD = self.decode(text_BTD, causal_mask(text.mask_BT), visual.last_BSD, visual.mask_BS)
        return self.predict_words(decoded_BTD if at_NT is None else decoded_BTD[at_NT])

    def start(self, image: Image, *, max_len: int) -> DecodingState:
        """Encodes each image once; up to `max_len` steps may follow, the first with [CLS]."""
        if max_len > self.config.max_positions:
            raise ParamsError(f"max_len is {max_len}, but model.config.max_positions is {self.config.max_positions}")
        visual = self.encode_image(image)
        if self.config.shared:
            memory = shared.project_regions(self._shared_blocks(), visual.last_BSD, visual.mask_BS)
        else:
            memory = tuple(block.cross.project(visual.last_BSD) for block in self._decoder_blocks())
        return DecodingState(
            length=0,
            max_len=max_len,
            past=(),
            memory=memory,
            memory_mask=padding_mask(visual.mask_BS),
            owner_N=torch.arange(len(image), device=visual.mask_BS.device),
        )

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Reads one more token of each hypothesis. Returns the next token's logits, [N, V]."""
        x_N1D = self.text_embedding(token_N[:, None], torch.full_like(token_N[:, None], GENERATION), start=state.length)
        past: list[KeyValues] = []
        before = iter(state.past or [None] * (len(self.sentence_encoder) + len(state.memory)))
        for block in cast("list[TransformerBlock]", self.sentence_encoder):
            x_N1D, cache = block.step(x_N1D, next(before))
            past.append(cache)
        if self.config.shared:
            mask_NS = state.memory_mask[state.owner_N].flatten(1)
            for block, memory in zip(self._shared_blocks(), state.memory, strict=True):
                x_N1D, cache = shared.step(block, x_N1D, next(before), memory.select(state.owner_N), mask_NS)
                past.append(cache)
        else:
            for layer, memory in zip(self._decoder_blocks(), state.memory, strict=True):
                x_N1D, cache = layer.step(x_N1D, next(before), memory, state.memory_mask)
                past.append(cache)
        return self.predict_words(x_N1D[:, 0]), replace(state, length=state.length + 1, past=tuple(past))

    def reorder(self, state: DecodingState, index_N: Tensor) -> DecodingState:
        """Hypothesis i continues hypothesis index[i]; their number may change."""
        return state.reorder(index_N)
