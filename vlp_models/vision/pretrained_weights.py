"""A backbone's or a detector's weights, from wherever params.yaml says, by the names of timm or torchvision."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vlp_models.common.packages import find_weights_file, library_of
from vlp_models.common.state_dicts import read_state_dict
from vlp_models.errors import CheckpointError, ParamsError


def read_backbone_weights(weights: str, model: str, root: Path, where: str) -> dict[str, Tensor]:
    """A state dict by timm's names.

    Args:
        weights: as vlp_models/common/packages.py has it; `timm` alone is timm's own of `model`.
        model: timm's name of the architecture.
        where: the place in params.yaml that says `weights`, for messages.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: no such file, no state dict, or timm's own can't be downloaded.
        ParamsError: torchvision's, which are no backbone's here.
    """
    library = library_of(weights)
    if library == "torchvision":
        raise ParamsError(f"{where}: torchvision's own weights are detectors'; `timm` has its backbones'")
    if library == "timm":
        return fetch_timm(pretrained_model_name(weights, model), where)
    state = read_state_dict(find_weights_file(weights, root, where))
    if not is_original_efficientnet(state):
        return state
    try:
        return efficientnet_to_timm(state, _stage_lengths(model, where))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {weights}: {error}") from None


def pretrained_model_name(weights: str, model: str) -> str:
    """timm's name of what the weights were trained as, whose data config is then that of the pictures: NAME of
    `timm:NAME`, else `model`."""
    return (weights.partition(":")[2] if library_of(weights) == "timm" else "") or model


def fetch_timm(name: str, where: str) -> dict[str, Tensor]:
    """timm's own weights of a model, from its cache or the network. timm reads them without running what they hold.

    Raises:
        CheckpointError: it knows none, or they can't be had.
    """
    import timm

    check_model(name, where)
    try:
        net: Any = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever a download can raise, of several libraries
        raise CheckpointError(
            f"{where}: timm's weights of `{name}` can't be had ({_first_line(error)}); without a network, name a file "
            "or an installed package"
        ) from None
    return {key: tensor.detach() for key, tensor in net.state_dict().items()}


def data_config(name: str) -> dict[str, Any]:
    """What pictures must be like for a timm model, known from its name: side, mean, deviation, interpolation. timm's
    own defaults where it knows nothing of the name."""
    import timm
    from timm.data import resolve_data_config

    known: Any = timm.get_pretrained_cfg(name)
    told = known.to_dict() if known else {"mean": None}
    if not known and timm.is_model(name):  # an older name of another model, which timm tells when it makes it
        net: Any = timm.create_model(name, pretrained=False)
        told = net.pretrained_cfg
    found: dict[str, Any] = resolve_data_config({}, pretrained_cfg=told)
    return found


def fetch_torchvision(builder: str, where: str) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """torchvision's own weights of a detector, from its cache or the network, and what is said of them.

    Args:
        builder: the function's name, `fasterrcnn_resnet50_fpn`.

    Raises:
        CheckpointError: they can't be had.
    """
    from torchvision.models import get_model_weights

    entry = get_model_weights(builder)["DEFAULT"]
    try:
        state = entry.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # whatever a download can raise
        raise CheckpointError(
            f"{where}: torchvision's weights can't be had from {entry.url} ({_first_line(error)}); without a network, "
            "name the file"
        ) from None
    return dict(state), entry.meta


def check_model(name: str, where: str) -> None:
    """
    Raises:
        ParamsError: a place instead of a name, or a name that timm has no model of.
    """
    import difflib

    import timm

    base = name.partition(".")[0]  # behind the point: whose weights
    if ":" in name or "/" in name or not timm.is_model(base):
        asked, known = base, timm.list_models()
    else:
        try:
            timm.get_pretrained_cfg(name)
            return
        except RuntimeError:  # it has the model, and no such weights of it
            asked, known = name, timm.list_pretrained(f"{base}.*")
    near = difflib.get_close_matches(asked, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else "`timm.list_models()` has the names"
    raise ParamsError(f"{where}: timm has no model `{name}`; {hint}")


def _stage_lengths(model: str, where: str) -> list[int]:
    """Blocks in each stage, of an EfficientNet; of another model or none, what matches no EfficientNet."""
    import timm

    if not model:
        return []
    check_model(model, where)
    net: Any = timm.create_model(model, pretrained=False)
    stages = getattr(net, "blocks", [])
    return [len(stage) for stage in stages if hasattr(stage, "__len__")]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


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


def is_original_efficientnet(state: Mapping[str, Tensor]) -> bool:
    return "_conv_stem.weight" in state


def efficientnet_to_timm(state: Mapping[str, Tensor], stages: Sequence[int]) -> dict[str, Tensor]:
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
