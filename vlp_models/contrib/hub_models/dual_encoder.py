"""Two towers, an image and a text encoder trained by contrast: CLIP, SigLIP, SigLIP 2, and open_clip's models.

    pixels ── image tower ── pooled ──┐
                                      ├── cosine, times a scale (plus a bias, for the sigmoid loss)
    words ─── text tower ─── pooled ──┘

A. Radford et al.: "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021. X. Zhai et al.:
"Sigmoid Loss for Language Image Pre-Training", ICCV 2023. M. Tschannen et al.: "SigLIP 2", 2025. P. K. A. Vasu et al.:
"MobileCLIP: Fast Image-Text Models through Multi-Modal Reinforced Training", CVPR 2024.

The towers are those of transformers, or of open_clip where a folder has its layout (MobileCLIP). `models.NAME.init`
names the folder (folder.py). Architecture and preprocessing are read from it and recorded in the config of each
checkpoint, so serving needs nothing else. No code of a repository is run, and only safetensors are read.

Shape suffixes: B images or texts, T tokens, E embedding, P patches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.contrib.hub_models import open_clip_towers, transformers_towers
from vlp_models.contrib.hub_models.folder import (
    OPEN_CLIP,
    check_names,
    check_weights,
    find_folder,
    hash_weights,
    read_weights,
)
from vlp_models.data.batch import Image, Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import Augmentation, PixelInput
from vlp_models.errors import ParamsError

LIBRARIES = {"transformers": transformers_towers, "open_clip": open_clip_towers}
SIGMOID_BIAS = -10.0  # of a model trained by a softmax, as SigLIP's paper starts from (section 3.2)


@dataclass(frozen=True, kw_only=True)
class DualEncoderConfig:
    """`init` determines library, architecture, image and pad_id; the data determines vocab_size and sep_id.

    library       whose towers they are
    architecture  the library's own config
    image         how an image is resized and normalized: fields of `PixelInput`
    pad_id        the token that fills a text up
    augment       of the images in training
    crop_scale    smallest and largest share of an image that `random_resized_crop` keeps
    """

    vocab_size: int
    sep_id: int
    library: Literal["transformers", "open_clip"] = "transformers"
    architecture: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=dict)
    pad_id: int = 0
    augment: list[Augmentation] = field(default_factory=list)
    crop_scale: list[float] = field(default_factory=lambda: [0.5, 1.0])

    def __post_init__(self) -> None:
        if not self.architecture or not self.image:
            raise ValueError(
                "a dual_encoder gets its architecture from `init`: a folder with a CLIP or SigLIP, or hf://OWNER/NAME"
            )

    @property
    def max_positions(self) -> int:
        """The longest text in tokens, [CLS] and [SEP] included."""
        return LIBRARIES[self.library].text_length(self.architecture)


class DualEncoder(nn.Module):
    """Meets `Embeds`, `Contrasts`, `ContrastsBySigmoid`, `GroupsParameters` and `StartsFromFolder`, on pixels."""

    config_class: ClassVar[type] = DualEncoderConfig

    def __init__(self, config: DualEncoderConfig) -> None:
        super().__init__()
        self.config = config
        library = LIBRARIES[config.library]
        self.towers = library.build(config.architecture)
        self.layout = library.layout(config.architecture)
        bias = getattr(self.towers, "logit_bias", None)
        self.prefers_sigmoid = bias is not None
        if bias is None:
            self.bias = nn.Parameter(torch.tensor(SIGMOID_BIAS))
        if not torch.empty(0).is_meta:  # without weights, there is no data yet
            self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        rows, end = self.layout.vocab_size, self.layout.end_id
        way_out = "set `tokenizer: {source: vocab, vocab: SOURCE, trim: false}` to the source of `init`"
        if self.config.vocab_size > rows:
            raise ParamsError(
                f"config: the tokenizer has {self.config.vocab_size:,} tokens, the text tower {rows:,}; {way_out}"
            )
        if end is not None and self.config.sep_id != end:
            raise ParamsError(
                f"config: the tokenizer ends a text with the token {self.config.sep_id}, but the text tower is read at "
                f"the token {end}; {way_out}"
            )

    @property
    def inputs(self) -> ModelInputs:
        config = self.config
        low, high = config.crop_scale
        try:
            image = PixelInput(**config.image, augment=tuple(config.augment), crop_scale=(low, high))
        except TypeError as error:
            raise ParamsError(f"config.image: {error}") from None
        return ModelInputs(image=image)

    # ---- Embeddings ------------------------------------------------------------------------------------------------

    def embed_image(self, image: Image) -> Tensor:
        """[B, E]"""
        assert isinstance(image, Pixels)  # as `inputs` declares
        return F.normalize(LIBRARIES[self.config.library].embed_image(self.towers, image.pixels_B3HW), dim=-1)

    def embed_text(self, text: Text) -> Tensor:
        """[B, E]"""
        ids_BT, mask_BT, layout = text.ids_BT, text.mask_BT, self.layout
        if not layout.has_start:  # a text begins with its first word
            ids_BT, mask_BT = ids_BT[:, 1:], mask_BT[:, 1:]
        ids_BT = ids_BT.masked_fill(~mask_BT, self.config.pad_id)
        if layout.is_padded:  # always to the same length, and padding is read like words
            ids_BT = F.pad(ids_BT, (0, layout.length - ids_BT.shape[1]), value=self.config.pad_id)
        library = LIBRARIES[self.config.library]
        return F.normalize(library.embed_text(self.towers, ids_BT, None if layout.is_padded else mask_BT), dim=-1)

    def contrast_scale(self) -> Tensor:
        return self.towers.logit_scale.exp().squeeze()

    def contrast_bias(self) -> Tensor:
        return self.towers.logit_bias.squeeze() if self.prefers_sigmoid else self.bias

    # ---- Training --------------------------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return `image` and `text`, the towers with their projections, and `scale`, temperature and bias."""
        groups: dict[str, list[nn.Parameter]] = {"image": [], "text": [], "scale": []}
        for name, parameter in self.named_parameters():
            name = name.removeprefix("towers.")
            if name in ("logit_scale", "logit_bias", "bias"):
                groups["scale"].append(parameter)
            else:
                groups["image" if name.startswith("vis") else "text"].append(parameter)
        return groups

    # ---- Weights of others -----------------------------------------------------------------------------------------

    @classmethod
    def read_architecture(cls, source: str, where: str) -> dict[str, Any]:
        """Return library, architecture, image and pad_id of the folder that `init` names.

        Raises:
            CheckpointError: it is no such model, or its preprocessing is missing or unknown.
            DataError, ParamsError: see `find_folder`.
        """
        key = f"{where.removesuffix('config')}init"
        folder = find_folder(source, Path(), key)
        library = "open_clip" if (folder / OPEN_CLIP).is_file() else "transformers"
        architecture = {"library": library, **LIBRARIES[library].read(folder)}
        check_weights(source, folder, key)
        return architecture

    def load_folder(self, source: str, root: Path, where: str) -> dict[str, Any]:
        """Load the weights of the folder that `init` names; return what config.json records of it.

        Raises:
            CheckpointError: the weights are missing, damaged, a pickle, or of another architecture.
        """
        folder = find_folder(source, root, where, weights=True)
        weights, state = read_weights(folder), self.towers.state_dict()
        # Numbers of positions that old versions of transformers stored.
        weights = {name: tensor for name, tensor in weights.items() if not name.endswith(".position_ids")}
        check_names(weights, state, folder)
        self.towers.load_state_dict({name: tensor.to(state[name].dtype) for name, tensor in weights.items()})
        return {"source": source, "files": hash_weights(folder)}
