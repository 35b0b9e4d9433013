"""Weights of other programs that a model starts from, and who reads them: contrib/public_weights, and plugins.

A reader gets a source and an `ImportRequest`, and returns an `ImportedModel`.
Imports no torch: commands read the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vlp_models.common.plugins import Table
from vlp_models.models import DataFacts
from vlp_models.params.schema import build

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# text_init: a BERT's folder, image_init: timm's weights -> module:function(source, ImportRequest) -> ImportedModel
INIT_READERS = Table("init_readers", {})

# family -> module:function(state, config.json of the BERT, the family's config) -> public_weights.bert.ConvertedBert
TEXT_READERS = Table("text_readers", {})

# family -> module:function(source, ImportRequest) -> ImportedModel, for timm's weights
IMAGE_READERS = Table("image_readers", {})


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """What an importer gets besides the file.

    facts    of the data
    config, family  of the model in params.yaml, for a format whose files do not name the architecture
    task     the task that a fine-tuned model is for, if the file leaves it open
    heads    attention heads; 0: the format's usual number
    vocabulary, lowercase  of the tokenizer
    root     the folder that relative paths start from
    where    the params key or argument that names the weights, for messages
    """

    facts: DataFacts
    config: Mapping[str, Any]
    family: str = ""
    task: str = ""
    heads: int = 0
    vocabulary: tuple[str, ...] = ()
    lowercase: bool = True
    root: Path = Path()
    where: str = "SOURCE"

    def build_config(self, config_class: type[T], **more: Any) -> T:
        """Return `config`, with the data's facts and `more`, as the family's config.

        Raises:
            ParamsError: an unknown key, or a value out of range.
        """
        return build(config_class, {**self.config, **self.facts.for_config(config_class), **more}, where="config")


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """What an importer returns.

    family   one of `models.FAMILIES`
    origin   whose weights these are, for messages: "BEiT", "VLMo's vqa"
    config   the family's config as far as the file determines it; facts of the data in it are checked
    weights  by the family's names; the rest of the model keeps its initialization
    task     the task that the model was fine-tuned for; None: pretrained
    head     the task's classifier, by the names of its head
    notes    lines for preset.yaml: settings that the file does not determine
    left_out names in the file without a place in the model
    reads_regions  whether the model reads region features
    """

    family: str
    origin: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    task: str | None = None
    head: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    reads_regions: bool = True
