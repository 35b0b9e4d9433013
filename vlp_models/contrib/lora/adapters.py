"""LoRA: train small matrices that are added to a model's weights, instead of the weights (Hu et al. 2021).

`add_lora` puts peft's adapters on a model and freezes everything else but the task's head. After training,
`publish_adapters` writes a small folder that refers to the checkpoint it starts from, and adds the adapters to the
weights: an ordinary model is left. `merge_adapter` makes an ordinary checkpoint of such a folder, without peft.

An adapter folder:

    adapter.safetensors   per adapted layer `NAME.lora_A.weight` and `NAME.lora_B.weight` (an embedding:
                          `NAME.lora_embedding_A` and `_B`), in peft's shapes; the head; and whatever else differs from
                          the base, such as running statistics, under its own name
    adapter.json          rank, alpha, and the base: its path from this folder, and the sha256 of its weights
    config.json, labels.json, tokenizer, SHA256SUMS   as in a checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vlp_models.common.checksums import write_sums
from vlp_models.common.io import hash_file, read_json, write_json
from vlp_models.common.packages import PIP
from vlp_models.contrib.lora.params import LoraParams
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, MissingToolError, ParamsError, shorten_list
from vlp_models.models.checkpoint import (
    LABELS,
    WEIGHTS,
    CheckpointInfo,
    read_config,
    read_labels,
    read_weights,
    tied_names,
    write_config,
)

FORMAT = "vlp-adapter/1"
ADAPTER, SETTINGS = "adapter.safetensors", "adapter.json"
NAME = "default"  # peft's name of the only adapter
_BASE = ".base_layer"  # what peft puts into the names of a wrapped layer's weights
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def add_lora(module: nn.Module, params: LoraParams, where: str) -> None:
    """Put adapters on the linear layers of `module.model`, and freeze its other weights. Draws from torch's generator.

    The parts in `modules_to_save` get no adapters and are trained as a whole.

    Args:
        module: a task, whose children are `model` and `head`; the head is trained as a whole.
        where: the key of `params`, for messages.

    Raises:
        MissingToolError: peft is not installed.
        ParamsError: a target is not a linear layer or embedding of the model, a part in `modules_to_save` is not one of
            the model, or it reads several images of a text.
    """
    try:
        import peft
    except ImportError:
        raise MissingToolError(
            f"`{where}` needs peft, which is not installed: `{PIP} install peft`, or the extra `lora`"
        ) from None
    model = module.get_submodule("model")
    if getattr(model, "images_per_text", 1) > 1:
        raise ParamsError(
            f"params.yaml: `{where}`: not for a model with `images_per_text` above 1, whose vectors for the images' "
            "places would stay at zero"
        )
    parts = {name for name, _ in model.named_modules() if name}
    if unknown := [name for name in params.modules_to_save if name not in parts]:
        children = ", ".join(name for name, _ in model.named_children())
        raise ParamsError(
            f"params.yaml: `{where}.modules_to_save`: {unknown[0]} is not a part of the model; it has {children}"
        )
    saved = tuple(f"{name}." for name in params.modules_to_save)
    targets = [name for name in _targets(model, params.targets, where) if not f"{name}.".startswith(saved)]
    # Only rank and ratio of alpha and rank matter; the layers are named in full, so none is adapted by chance.
    config = peft.LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,  # type: ignore[arg-type]  # a number; only rank and ratio matter
        lora_dropout=params.dropout,
        target_modules=targets,
    )
    peft.inject_adapter_in_model(config, model)
    # Of the rest of the model, only the adapters are trained; the head is outside of it.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name) or name.startswith(saved))


def _targets(model: nn.Module, targets: Sequence[str], where: str) -> list[str]:
    """Return the full names of the layers; without targets, all linear layers."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    if not targets:
        # Not the last layer of torch's own attention, which reads its weight without calling it.
        bypassed = nn.modules.linear.NonDynamicallyQuantizableLinear
        return [n for n, module in layers.items() if isinstance(module, nn.Linear) and not isinstance(module, bypassed)]
    selected: set[str] = set()
    for target in targets:
        # `attention.out` means every layer whose name ends with it; a full name means one layer.
        matches = {name for name in layers if name == target or name.endswith(f".{target}")}
        if not matches:
            last_names = {name.rpartition(".")[2] for name in layers}
            short_names = sorted(name for name in last_names if not name.isdigit())
            raise ParamsError(
                f"params.yaml: `{where}.targets`: {target} is not a linear layer or embedding of the model; it has "
                f"{', '.join(short_names)}, and full names such as {next(iter(layers), '')}"
            )
        selected |= matches
    return [name for name in layers if name in selected]


def _is_adapter(name: str) -> bool:
    # The added dot lets `lora_A` match at the start of the name or of a later part.
    return any(f".{part}" in f".{name}" for part in _PARTS)


# ---- On disk --------------------------------------------------------------------------------------------------------


def publish_adapters(
    directory: Path,
    module: nn.Module,
    params: LoraParams,
    base: Path,
    info: CheckpointInfo,
    tokenizer: Tokenizer,
    labels: Sequence[str] = (),
    *,
    location: Path | None = None,
) -> None:
    """Write an adapter folder, and add the adapters to the weights of `module`, in place of its adapted layers.

    Args:
        module: with adapters, by `add_lora`.
        location: where the folder will be, from which it names its base; None: where it is written.
        base: the checkpoint whose weights `module` had before.
    """
    directory.mkdir(exist_ok=True)
    weights, base_weights = _plain_names(module.state_dict()), read_weights(base)
    # The head, the adapters, and the model's weights that differ from the base.
    changed = {}
    for name, weight in weights.items():
        current = weight.detach().cpu()
        # The head is always kept, even if the base has one: it may be of another task.
        before = base_weights.get(name) if name.startswith("model.") else None
        if before is None or before.shape != current.shape or not torch.equal(before, current):
            changed[name] = current.contiguous()
    save_file(changed, directory / ADAPTER, metadata={"format": "pt"})
    write_json(
        directory / SETTINGS,
        {
            "format": FORMAT,
            "rank": params.rank,
            "alpha": params.alpha,
            # A relative path, so that a project can move as a whole.
            "base": os.path.relpath(base.resolve(), (location or directory).resolve()),
            "base_sha256": hash_file(base / WEIGHTS),
            # of another architecture that the run's config has changed
            "left_out": sorted(name for name in base_weights if name.startswith("model.") and name not in weights),
        },
    )
    write_config(directory, info, tokenizer, labels)
    write_sums(directory)
    # A list, since the loop replaces modules of the tree that it walks.
    for name, layer in list(module.named_modules()):
        if hasattr(layer, "get_delta_weight"):  # a layer of peft
            adapted: Any = layer
            adapted.merge()
            parent, _, last = name.rpartition(".")
            plain: nn.Module = adapted.get_base_layer()
            module.get_submodule(parent)._modules[last] = plain


def _plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a model with adapters under the names of a checkpoint, each tensor once."""
    tied = tied_names(state)
    weights = {}
    for name, weight in state.items():
        if name not in tied:
            # peft's names: LAYER.lora_A.default.weight for an adapter, LAYER.base_layer.weight for the wrapped layer.
            plain = name.replace(f".{NAME}", "") if _is_adapter(name) else name.replace(f"{_BASE}.", ".")
            weights[plain] = weight
    return weights


def read_adapter(directory: Path, base: Path | None = None) -> dict[str, Tensor]:
    """Return the weights of the whole model: those of the base with the adapters added, and the head.

    Args:
        base: where the base is now; None: where it was.

    Raises:
        CheckpointError: a file is missing or damaged, or the base has other weights than the adapters were trained on.
    """
    read_config(directory)  # verifies the sums
    try:
        settings = read_json(directory / SETTINGS)
        adapter = load_file(directory / ADAPTER)
        scale, base_path = float(settings["alpha"]) / int(settings["rank"]), str(settings["base"])
        sha256, left_out = settings["base_sha256"], set(settings["left_out"])
    except (DataError, OSError, SafetensorError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{directory}: not an adapter folder of {FORMAT}: {error}") from None
    base = base or directory / base_path
    if not (base / WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory / SETTINGS}: its base {base} does not exist; `dvc pull` it, or name the folder where it is now"
        )
    if hash_file(base / WEIGHTS) != sha256:
        raise CheckpointError(
            f"{base / WEIGHTS}: not the weights that {directory} was trained on (sha256 {sha256[:12]}...); "
            "restore them with `dvc checkout`, or train the adapters again"
        )
    weights = {
        name: weight
        for name, weight in read_weights(base).items()
        if name.startswith("model.") and name not in left_out
    }
    # The head and other changed weights replace those of the base.
    weights |= {name: weight for name, weight in adapter.items() if not _is_adapter(name)}
    # Of each adapted layer W + alpha / rank * B @ A: (H, rank) @ (rank, W); transposed for an embedding.
    for name in [name for name in adapter if name.endswith((".lora_A.weight", ".lora_embedding_A"))]:
        up = adapter[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        delta = scale * (up.float() @ adapter[name].float())
        layer = name.partition(".lora_")[0] + ".weight"
        if layer not in weights:
            raise CheckpointError(f"{directory / ADAPTER}: {layer} is not in {shorten_list([str(base)], 1)}")
        delta = delta.T if name.endswith(".lora_embedding_A") else delta
        weights[layer] = (weights[layer].float() + delta).to(weights[layer].dtype)
    return weights


def merge_adapter(directory: Path, out: Path, base: Path | None = None) -> None:
    """Write an ordinary checkpoint into the existing directory `out`, for evaluation, registration and serving."""
    save_file(read_adapter(directory, base), out / WEIGHTS, metadata={"format": "pt"})
    labels = read_labels(directory) if (directory / LABELS).exists() else []
    write_config(out, read_config(directory), Tokenizer.load(directory), labels)
    write_sums(out)
