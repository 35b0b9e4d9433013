"""XGPT's config. The paper's values are the defaults; model.py lists the choices where it is silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vlp_models.errors import ParamsError
from vlp_models.params.schema import NonNegativeInt, PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class XGPTConfig:
    """The paper's base size is the default: 768 wide, 8 heads, 12 layers (its tiny one: 6).

    The data determines the first two and `mask_id`.
    """

    vocab_size: int
    feature_dim: int  # of one detected region; the paper's detector: 2048

    hidden: PositiveInt = 768
    heads: PositiveInt = 8
    intermediate: PositiveInt = 3072
    layers: PositiveInt = 12  # of the encoder, and of the decoder
    max_positions: PositiveInt = 60  # tokens of a sentence, [CLS] and [SEP] included
    dropout: Share = 0.1
    attention_dropout: Share = 0.1
    feature_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # the same entries of all regions of an image
    layer_norm_eps: PositiveFloat = 1e-12
    embedding_norm_eps: PositiveFloat = 1e-5  # with 1e-12 the gradient of a blank region would grow by a factor of 1e6
    images_per_text: PositiveInt = 1  # of a text, in one sequence; above 1: a learned vector for each later image
    init_std: PositiveFloat = 0.02
    mask_id: NonNegativeInt = 4  # of [MASK]: 4 in a vocabulary trained here, 103 in BERT's
    separate_region_norms: bool = False  # normalize feature and location before adding them, as UNITER and LXMERT do

    # Table 3. enc_dec_share: one stack that encodes and decodes; enc_dec: two stacks; enc: one stack over source and
    # target joined, with UniLM's masks, so a layer of the target attends to the same layer of the source.
    structure: Literal["enc_dec_share", "enc_dec", "enc"] = "enc_dec_share"
    # How a decoder layer attends to what was encoded. shared_sequential: past words, then memory, with the same
    # weights; separate: other weights for the memory; shared_merged: both in one softmax. None: shared_sequential for
    # enc_dec_share, separate for enc_dec (Vaswani et al. 2017), shared_merged for enc, which has no other.
    cross_attention: Literal["shared_sequential", "shared_merged", "separate"] | None = None
    # What distinguishes the encoder's keys and values. none: no parameter; kv: a vector added to the states that keys
    # and values are projected from; query: one added to the states that queries are projected from.
    signal: Literal["none", "kv", "query"] = "none"
    cross_norm: Literal["own", "shared"] = "own"  # the LayerNorm after attention over the memory

    refiner_layers: NonNegativeInt = 1  # 0: regions are not refined
    refiner_gate: Literal["projected", "raw"] = "projected"  # the query in the gate: paper; AoANet's code
    refiner_norm: Literal["post", "pre"] = "post"  # paper; AoANet's code

    imlm_fragment: Share = 0.5  # of the words
    imlm_reads: Literal["fragment", "caption"] = (
        "fragment"  # the decoder reads the fragment alone (MASS), or all words before it
    )
    ida_masks: Literal["single", "multi"] = "single"  # one [MASK] per span, or one per word (table 4)
    ida_share: Share = 0.3  # of the words
    ida_span: PositiveFloat = 3.0  # mean length
    ida_empty_spans: bool = False  # spans without a word, as in BART
    ida_matching: bool = True  # the attention-driven image-text matching
    ida_residual: bool = False  # words keep their embedding and add what they attend to; the paper replaces it
    tifg_target: Literal["embedding", "raw"] = "embedding"  # the model's, or the detector's features
    tifg_reduction: Literal["mean", "sum"] = "mean"  # over a region's features

    @property
    def attends(self) -> Literal["shared_sequential", "shared_merged", "separate"]:
        """`cross_attention` with its default filled in."""
        if self.cross_attention is not None:
            return self.cross_attention
        defaults: dict[str, Literal["shared_sequential", "shared_merged", "separate"]]
        defaults = {"enc_dec_share": "shared_sequential", "enc_dec": "separate", "enc": "shared_merged"}
        return defaults[self.structure]

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ParamsError(f"config: hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.mask_id >= self.vocab_size:
            raise ParamsError(f"config: mask_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
        if self.structure == "enc" and self.attends != "shared_merged":
            raise ParamsError(
                f"config: `structure: enc` has one attention over source and target; `cross_attention: {self.attends}` "
                "is for enc_dec_share and enc_dec; remove it"
            )
        if self.signal == "query" and self.attends == "shared_merged":
            raise ParamsError(
                "config: `signal: query` distinguishes two attentions; if both are merged (`structure: enc`, "
                "`cross_attention: shared_merged`), set `signal: kv`"
            )
