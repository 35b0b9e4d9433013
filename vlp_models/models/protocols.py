"""What a model can do, said in types. A task asks for one of these and for nothing else.

| protocol            | serves                                          |
|---------------------|-------------------------------------------------|
| Fuses               | VQA, VCR, NLVR, NLVR2, entailment               |
| FusesApart          | VQA with a second classifier                    |
| Embeds              | retrieval by one matrix product                 |
| Contrasts           | contrast with a temperature of its own          |
| ScoresPairs         | retrieval without a dual encoder                |
| Generates           | captioning                                      |
| GeneratesByMasks    | captioning that learns from a few hidden words  |
| Pretrains           | the pretraining stage                           |
| PredictsMaskedWords | two-pass scheduled sampling                     |
| EmbedsPairs         | contrast over all micro-batches of an update    |
| GroupsParameters    | learning rates, freezing, optimisers by part    |
| Adopts              | starting from another stage, or another config  |
| ShowsItself         | figures of its own in the report                |

Every model has `inputs` besides (`ModelInputs`, data/inputs.py). abilities.py prints which family meets what.

Where texts and images are given together, text i is about image i, or about `text.owner_N[i]` where that is given.

Shape suffixes: B batch, R regions or patches, T text tokens, D hidden, E embedding, V vocabulary, N texts or
hypotheses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.models.partial_load import PartialLoad
from vlp_models.objectives.contrastive import EmbeddedPairs
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masked_modeling import Corruption


@dataclass(frozen=True, kw_only=True)
class Fused:
    """image_BRD and text_BTD: states after fusion; pooled_BP: the holistic image-text feature; decoder_BP: a second
    one, for a classifier of its own (`FusesApart`)."""

    image_BRD: Tensor
    text_BTD: Tensor
    pooled_BP: Tensor
    decoder_BP: Tensor | None = None


@runtime_checkable
class Fuses(Protocol):
    fused_dim: int

    def fuse(self, image: Image, text: Text) -> Fused:
        """One row a text."""
        ...


@runtime_checkable
class FusesApart(Fuses, Protocol):
    decoder_dim: int  # of `Fused.decoder_BP`; 0: there is none


@runtime_checkable
class Embeds(Protocol):
    def embed_image(self, image: Image) -> Tensor: ...  # [B, E], unit length

    def embed_text(self, text: Text) -> Tensor: ...  # [B, E], unit length


@runtime_checkable
class Contrasts(Embeds, Protocol):
    def contrast_scale(self) -> Tensor: ...  # a number: what similarities are multiplied with in a softmax


@runtime_checkable
class ScoresPairs(Protocol):
    """How well texts and images match, where no two vectors say it. Retrieval asks in blocks of pairs."""

    def encode_image(self, image: Image) -> Any: ...  # what can be known of images before any text

    def score(self, state: Any, text: Text, image_of_text_N: Tensor) -> Tensor:
        """[N], the higher the better. image_of_text_N int64: which image of `state` each text is to be scored with."""
        ...


@runtime_checkable
class Generates(Protocol):
    """One step interface for greedy, beam and sampled decoding. A state is opaque to the decoder."""

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """Teacher forcing: [N, T, V].

        at_NT bool: the only positions whose logits are wanted; they come as [M, V], in row-major order.
        """
        ...

    def start(self, image: Image, *, max_len: int) -> Any: ...  # encodes each image once

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]: ...  # logits [N, V]

    def reorder(self, state: Any, index_N: Tensor) -> Any: ...  # hypothesis i continues hypothesis index[i]


@runtime_checkable
class GeneratesByMasks(Generates, Protocol):
    """A [MASK] is put behind what has been said, and becomes the next word. So hidden words teach it to speak."""

    def masked_words(
        self, batch: Batch, *, generator: torch.Generator, mask_probability: float
    ) -> tuple[Tensor, Tensor]:
        """Logits of the M words that were hidden, [M, V], and what they were, int64 [M]."""
        ...


@runtime_checkable
class SetsAside(Generates, Protocol):
    """Says how its captions are searched for."""

    sets_aside: bool  # whether its beam search sets finished descriptions aside (decoding/beam.py)


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
        """One unweighted loss per asked objective; the recipe (sum, sample, alternate) weighs and mixes them.

        objectives: name -> bool [N], which samples learn it; None: all of them.
        """
        ...


@runtime_checkable
class EmbedsPairs(Pretrains, Protocol):
    """Pretraining by contrast whose candidates are those of a whole update. `pretraining_losses` then takes `others`
    besides: of each contrast, the embedded pairs of the update's other micro-batches."""

    def contrast_pairs(self, batch: Batch) -> Sequence[EmbeddedPairs]:
        """Of each contrast the pairs' embeddings, as `pretraining_losses` computes them from the same state of chance:
        before anything else that draws from torch's global generator."""
        ...


@dataclass(frozen=True, kw_only=True)
class MaskedPass:
    """One pass over a corrupted batch.

    losses       one unweighted loss per objective
    word_logits  path -> [M, V], detached: its predictions of the M masked words (of the samples that learn the path's
                 first objective), in row-major order of the batch
    output       opaque: what the model wants back in a later pass over the same batch
    """

    losses: dict[str, Loss]
    word_logits: Mapping[str, Tensor]
    output: Any = None


@runtime_checkable
class PredictsMaskedWords(Pretrains, Protocol):
    """Pretraining by the pass, so that a second one can read what the first predicted.

    word_paths: path -> the objectives that it learns. From the first of them come the path's predictions of masked
    words, so it is needed wherever the path is. An objective of no path is learnt in the first pass alone.
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
        """A pass for these objectives. ids: path -> the sentences it reads; else `corruption.ids_BT`.

        after: an earlier pass with this corruption and image, for a model that need not compute everything twice.
        """
        ...


@runtime_checkable
class GroupsParameters(Protocol):
    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """By name, each parameter once. A model without has one group for each of its children."""
        ...


@runtime_checkable
class LoadsPartially(Protocol):
    """Starts from checkpoints of its family with another config: `load_partial(model, weights, config)`.

    A method `fit_weights(weights, config) -> dict` may adapt their shapes first.
    """

    partial_load: ClassVar[PartialLoad]


@runtime_checkable
class SeesCells(Protocol):
    @property
    def cell_side(self) -> int:
        """Pixels of the input that a cell is wide and high."""
        ...

    def cells(self, image: Pixels) -> Tensor:
        """[B, rows, columns, D]: what the image's side makes of each part of a picture, before any text."""
        ...


@runtime_checkable
class ShowsItself(Protocol):
    def figures(self, batches: Iterable[Batch]) -> list[Figure]:
        """What the report shows of a pretrained model, from some images of the val split."""
        ...


MAX_IMAGES = 256  # of the val split, that a model is shown for its figures


@dataclass(frozen=True, kw_only=True)
class Patch:
    """box: x1, y1, x2, y2 as fractions of the image's width and height."""

    image_id: str
    box: tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str
    note: str
    patches: tuple[Patch, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """about: what is shown, in a sentence or two."""

    title: str
    about: str
    groups: tuple[Group, ...]

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Figure:
        groups = tuple(
            Group(
                name=group["name"],
                note=group["note"],
                patches=tuple(Patch(image_id=p["image_id"], box=tuple(p["box"])) for p in group["patches"]),
            )
            for group in value["groups"]
        )
        return cls(title=value["title"], about=value["about"], groups=groups)
