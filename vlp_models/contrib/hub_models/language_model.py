"""Decoder-only language models of transformers: their architecture, and their weights for a model that contains one.

An architecture is config.json without what does not change a computation: a plain dictionary that a checkpoint records,
so that a model is built again without the folder that it came from. Only the classes of `ARCHITECTURES` are built, and
only keys that they declare are passed on: a config from outside cannot name code, kernels or quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.common.packages import PIP
from vlp_models.contrib.hub_models.folder import CONFIG, HUB, find_folder, read_config, read_weights, weights_files
from vlp_models.errors import CheckpointError, MissingToolError, ParamsError, first_line

# `model_type` of config.json; a SmolLM and a TinyLlama are Llamas
ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3", "smollm3")
EXPECTED = f"a decoder-only language model ({', '.join(ARCHITECTURES)})"
# A language model without pretrained weights, if params.yaml does not describe another
DEFAULT = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")  # those of data/tokenizer count
_OLD_KEYS = ("rope_theta", "rope_scaling")  # which transformers puts into `rope_parameters`
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # in files of older versions
_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # GPT-2's matrices


def read_architecture(source: str, where: str) -> dict[str, Any]:
    """Return the architecture of the language model in a folder. Of a model on the Hub only the settings are read.

    Args:
        source, where: as in `find_folder`.

    Raises:
        ParamsError: `source` is malformed.
        DataError: no such folder.
        CheckpointError: another architecture, code of its own, quantized weights, or a pickle instead of safetensors.
    """
    folder = find_folder(source, Path(), where)
    config = read_config(folder, ARCHITECTURES, EXPECTED)
    if "auto_map" in config:
        raise CheckpointError(
            f"{folder / CONFIG}: `auto_map` names code in the folder, which is never run; take a model that "
            "transformers itself contains"
        )
    if "quantization_config" in config:
        raise CheckpointError(f"{folder / CONFIG}: quantized weights; take the model in its original precision")
    if not source.startswith(HUB):
        weights_files(folder)
    kind, (config_class, keys) = config["model_type"], _config_class(config["model_type"])
    try:
        built = config_class(**{key: config[key] for key in (*keys, *_OLD_KEYS) if key in config})
    except Exception as error:  # the file comes from outside: whatever fails, it is the cause
        raise CheckpointError(f"{folder / CONFIG}: describes no valid {kind}: {first_line(error)}") from None
    return {"model_type": kind, **{key: getattr(built, key) for key in keys}}


def build_language_model(architecture: Mapping[str, Any]) -> Any:
    """Return a freshly initialized language model of transformers, in float32; weights depend on torch's global seed.

    GPT-2's Conv1D become linear layers, for adapters and 8-bit weights. An output layer that is tied to the word
    embeddings is left out, so that each weight has one name.

    Raises:
        ParamsError: another architecture, a key that it does not have, or an invalid value.
    """
    kind = architecture.get("model_type")
    if kind not in ARCHITECTURES:
        raise ParamsError(f"config.language_model: `model_type` is {kind!r}; expected {EXPECTED}")
    config_class, keys = _config_class(kind)
    values = {key: value for key, value in architecture.items() if key != "model_type"}
    if unknown := sorted(values.keys() - set(keys)):
        raise ParamsError(f"config.language_model: a {kind} has no key {unknown[0]!r}")
    transformers = _import_transformers()
    try:
        config = config_class(**values, **dict.fromkeys(_TOKENS))
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:  # transformers raises errors of many kinds for sizes that do not fit
        raise ParamsError(f"config.language_model: not a valid {kind}: {first_line(error)}") from None
    if config.tie_word_embeddings:
        del model.lm_head
    for name, layer in list(model.named_modules()):
        if isinstance(layer, transformers.pytorch_utils.Conv1D):
            parent, _, last = name.rpartition(".")
            linear = nn.Linear(layer.nx, layer.nf)
            linear.weight, linear.bias = nn.Parameter(layer.weight.T.contiguous()), layer.bias
            setattr(model.get_submodule(parent), last, linear)
    return model


def read_renamed(folder: Path, architecture: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights in a folder, under the names of `build_language_model`.

    Raises:
        CheckpointError: they are missing, damaged, or a pickle.
    """
    base = "transformer." if architecture["model_type"] == "gpt2" else "model."
    renamed: dict[str, Tensor] = {}
    for name, weight in read_weights(folder).items():
        is_head = name.startswith("lm_head.")
        if name.endswith(_BUFFERS) or (is_head and architecture["tie_word_embeddings"]):
            continue
        # A file of the model without its head lacks the prefix.
        if not (is_head or name.startswith(base)):
            name = f"{base}{name}"
        renamed[name] = weight.T if architecture["model_type"] == "gpt2" and name.endswith(_CONV1D) else weight
    return renamed


def _config_class(kind: str) -> tuple[Any, list[str]]:
    """Return the class of an architecture's config, and the keys that it declares itself."""
    config_class = _import_transformers().models.auto.configuration_auto.CONFIG_MAPPING[kind]
    return config_class, [key for key in config_class.__annotations__ if key not in _TOKENS]


def _import_transformers() -> Any:
    try:
        import transformers
        import transformers.pytorch_utils
    except ModuleNotFoundError:
        raise MissingToolError(
            f"a language model as decoder needs transformers, which is not installed: `{PIP} install transformers`"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers
