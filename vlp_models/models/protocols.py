"""What a model can do, as types. A task or stage asks for one of these and for nothing else.

| protocol            | serves                                                    |
|---------------------|-----------------------------------------------------------|
| Fuses               | VQA, VCR, NLVR, NLVR2, entailment                         |
| FusesWords          | the shared objective `mlm` (contrib/shared_objectives)    |
| LocatesStates       | choosing a region or patch by a text: referring expressions |
| ReadsSeveralImages  | texts with several images in one sequence: NLVR2, frames  |
| FusesDecoder        | VQA with a second classifier, on the decoder's feature    |
| Embeds              | retrieval by one matrix product                           |
| Contrasts           | contrastive fine-tuning with the model's own temperature  |
| ContrastsBySigmoid  | fine-tuning by the sigmoid loss                           |
| ScoresPairs         | retrieval without a dual encoder                          |
| Generates           | captioning                                                |
| GeneratesByMasks    | captioning that trains on a few masked words              |
| StoresFinished      | beam search as in the authors' code                       |
| Pretrains           | the pretraining stage                                     |
| EmbedsPairs         | contrast over all micro-batches of an update              |
| PredictsMaskedWords | two-pass scheduled sampling                               |
| GroupsParameters    | learning rates, freezing and optimizers by part           |
| LoadsPartially      | starting from a checkpoint with another config            |
| StartsFromFolder    | starting from another program's model (`init`)            |
| EncodesCells        | vision warm-up                                            |

Every model also has `inputs` (`ModelInputs`, data/inputs.py).

If texts and images are passed together, text i belongs to image i, or to image `text.owner_N[i]` if that is set.

Shape suffixes: B batch, R regions or patches, T text tokens, D hidden, E embedding, V vocabulary, P pooled feature,
N texts or hypotheses, M masked words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.models.partial_load import PartialLoad
from vlp_models.objectives.contrastive import EmbeddedPairs
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masked_modeling import Corruption

# ---- Understanding --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fused:
    """image_BRD and text_BTD: states after fusion; pooled_BP: the holistic image-text feature; decoder_BP: a second
    feature for a classifier of its own (`FusesDecoder`)."""

    image_BRD: Tensor
    text_BTD: Tensor
    pooled_BP: Tensor
    decoder_BP: Tensor | None = None


@runtime_checkable
class Fuses(Protocol):
    fused_dim: int

    def fuse(self, image: Image, text: Text) -> Fused:
        """Fuse images and texts: one row per text."""
        ...


@runtime_checkable
class FusesWords(Fuses, Protocol):
    text_dim: int  # of `Fused.text_BTD`, whose places are those of the text's tokens


@dataclass(frozen=True, kw_only=True)
class Located:
    """States of parts of the image after fusion, and which part each one is of, in every family alike.

    states_NRD  one row per text
    boxes_NR4   float32; x1, y1, x2, y2 as fractions of the upright image: a detector's box, or what a patch or cell
                shows, even if the pixels were cropped, flipped or moved for training. Zero where masked
    mask_NR     bool; False in padding, and where nothing of the image is visible. A row may be all False
    place_NR    int64; which of the text's images it is in (`ReadsSeveralImages`). None: a text has one image
    """

    states_NRD: Tensor
    boxes_NR4: Tensor
    mask_NR: Tensor
    place_NR: Tensor | None = None


@runtime_checkable
class LocatesStates(Protocol):
    """Tokens of the whole image ([IMG], [CLS]) are left out."""

    located_dim: int

    def locate(self, image: Image, text: Text) -> Located:
        """Fuse images and texts, and return the states of the images' parts: one row per text."""
        ...


@runtime_checkable
class ReadsSeveralImages(Protocol):
    """Reads several images of a text in one sequence: its other methods accept what `Batch.group_images` returns."""

    images_per_text: int  # the most; 1: only one


@runtime_checkable
class FusesDecoder(Fuses, Protocol):
    decoder_dim: int  # of `Fused.decoder_BP`; 0: it is None


@runtime_checkable
class Embeds(Protocol):
    def embed_image(self, image: Image) -> Tensor: ...  # [B, E], unit length

    def embed_text(self, text: Text) -> Tensor: ...  # [B, E], unit length


@runtime_checkable
class Contrasts(Embeds, Protocol):
    def contrast_scale(self) -> Tensor: ...  # a scalar: the factor of similarities in a softmax


@runtime_checkable
class ContrastsBySigmoid(Contrasts, Protocol):
    prefers_sigmoid: bool  # whether it was trained by the sigmoid loss

    def contrast_bias(self) -> Tensor: ...  # a scalar: what the sigmoid adds to scaled similarities


@runtime_checkable
class ScoresPairs(Protocol):
    """Scores how well texts and images match if no two vectors do. Retrieval scores blocks of pairs."""

    def encode_image(self, image: Image) -> Any: ...  # all that does not depend on a text

    def score(self, state: Any, text: Text, image_of_text_N: Tensor) -> Tensor:
        """Return [N] scores, higher is better. image_of_text_N int64: the image of `state` for each text."""
        ...


# ---- Generation -----------------------------------------------------------------------------------------------------


@runtime_checkable
class Generates(Protocol):
    """One step interface for greedy, beam and sampled decoding. The state is opaque to the decoder."""

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """Return the logits of teacher forcing, [N, T, V].

        at_NT bool: return the logits of these positions only, [M, V], in row-major order.
        """
        ...

    def start(self, image: Image, *, max_len: int) -> Any: ...  # encodes each image once

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]: ...  # logits [N, V]

    def reorder(self, state: Any, index_N: Tensor) -> Any: ...  # hypothesis i continues hypothesis index[i]


@runtime_checkable
class GeneratesByMasks(Generates, Protocol):
    """Generation appends a [MASK] and replaces it by the next word, so predicting masked words trains it."""

    def masked_words(
        self, batch: Batch, *, generator: torch.Generator, mask_probability: float
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of the masked words, [M, V], and the words, int64 [M]."""
        ...


@runtime_checkable
class StoresFinished(Generates, Protocol):
    stores_finished: bool  # whether beam search sets finished captions aside (decoding/search.py)


# ---- Pretraining ----------------------------------------------------------------------------------------------------


@runtime_checkable
class Pretrains(Protocol):
    objectives: Collection[str]

    def pretraining_losses(
        self,
        batch: Batch,
        *,
        objectives: Mapping[str, Tensor | None],
        generator: torch.Generator,
        mask_probability: float,
    ) -> dict[str, Loss]:
        """Return one unweighted loss per requested objective; the recipe (sum, sample, alternate) mixes them.

        objectives: name -> bool [N], the samples that train it; None: all samples.
        """
        ...


@runtime_checkable
class EmbedsPairs(Pretrains, Protocol):
    """Contrastive pretraining whose candidates come from a whole update.

    `pretraining_losses` then also takes `others`: for each contrast, the embedded pairs of the update's other
    micro-batches.
    """

    def contrast_pairs(self, batch: Batch) -> Sequence[EmbeddedPairs]:
        """Return the embedded pairs of each contrast, as `pretraining_losses` computes them from the same random state:
        before anything else draws from torch's global generator."""
        ...


@dataclass(frozen=True, kw_only=True)
class MaskedPass:
    """One pass over a corrupted batch.

    losses       one unweighted loss per objective
    word_logits  path -> [M, V], detached: its predictions of the M masked words (of the samples that train the path's
                 first objective), in row-major order of the batch
    output       opaque: what the model reuses in a later pass over the same batch
    """

    losses: dict[str, Loss]
    word_logits: Mapping[str, Tensor]
    output: Any = None


@runtime_checkable
class PredictsMaskedWords(Pretrains, Protocol):
    """Pretraining by single passes, so that a second pass can read what the first one predicted.

    word_paths: path -> the objectives it trains. The path's predictions of masked words come from the first of them, so
    a path needs that objective. Objectives without a path are trained in the first pass only.
    """

    word_paths: Mapping[str, tuple[str, ...]]

    def corrupt(
        self,
        batch: Batch,
        *,
        objectives: Mapping[str, Tensor | None],
        generator: torch.Generator,
        mask_probability: float,
    ) -> Corruption: ...

    def encode_corrupted(self, batch: Batch, corruption: Corruption) -> Any: ...  # what all passes share

    def masked_pass(
        self,
        batch: Batch,
        corruption: Corruption,
        image: Any,
        objectives: Mapping[str, Tensor | None],
        ids: Mapping[str, Tensor] | None = None,
        after: MaskedPass | None = None,
    ) -> MaskedPass:
        """Run one pass for these objectives.

        Args:
            image: of `encode_corrupted`.
            ids: path -> the sentences it reads; default `corruption.ids_BT`.
            after: an earlier pass with this corruption and image, whose computations a model may reuse.
        """
        ...


# ---- Training and inspection ----------------------------------------------------------------------------------------


@runtime_checkable
class GroupsParameters(Protocol):
    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return each parameter once, by group. A model without this method has one group per child module."""
        ...


@runtime_checkable
class LoadsPartially(Protocol):
    """Starts from checkpoints of its family with another config, by `partial_load.load_partial`.

    A method `fit_weights(weights, config) -> dict` may first adapt weights to the model's shapes.
    """

    partial_load: ClassVar[PartialLoad]


@runtime_checkable
class StartsFromFolder(Protocol):
    """Starts from the model that `init` names: a folder, package:NAME, or hf://OWNER/NAME@COMMIT."""

    @classmethod
    def read_architecture(cls, source: str, where: str) -> dict[str, Any]: ...  # the config's keys that follow from it

    def load_folder(self, source: str, root: Path, where: str) -> dict[str, Any]: ...  # returns its provenance


@runtime_checkable
class EncodesCells(Protocol):
    @property
    def cell_side(self) -> int:
        """Width and height of a cell in input pixels."""
        ...

    def cells(self, image: Pixels) -> Tensor:
        """Return the image encoder's features of each cell before any text: [B, rows, columns, D]."""
        ...
