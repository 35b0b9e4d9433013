"""A model on disk: `model.safetensors`, `config.json` and the tokenizer, as docs/contracts.md describes them.

The weights' keys begin with `model.`, and with `head.` where a task has added a head. Loading is strict: a checkpoint
of another architecture is an error that lists what differs, never a half-initialised model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vlp_models.common.limits import check_numbers
from vlp_models.common.state_dicts import shorten_list
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.models import DataFacts, build_model

WEIGHTS, CONFIG, LABELS = "model.safetensors", "config.json", "labels.json"
ANSWERS = "answers.json"  # where VQA's labels stood before other tasks had any
SMALL = 1024  # widths that are no danger to memory, whatever they are of
SUMS = "SHA256SUMS"  # of the files above and the tokenizer's, as `sha256sum --check` reads it


def write_checkpoint(
    directory: Path, module: nn.Module, info: CheckpointInfo, tokenizer: Tokenizer, labels: Sequence[str] = ()
) -> None:
    """Writes the weights of `module` (whose children are `model` and perhaps `head`) into an existing directory.

    Args:
        info: becomes config.json.
        labels: what the rows of a classifier stand for (VQA's answers, entailment's labels).

    Raises:
        CheckpointError: the weights can't be written.
    """
    state = module.state_dict()
    tied = tied_names(state)
    # safetensors stores each tensor once: of tied ones, the first name
    weights = {name: t.detach().cpu().contiguous() for name, t in state.items() if name not in tied}
    try:
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory / WEIGHTS}: can't be written: {error}; make room on the disk") from error
    text = json.dumps(info.to_json(), indent=2, sort_keys=True, ensure_ascii=False)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
    tokenizer.save(directory)
    if labels:
        listed = json.dumps(list(labels), indent=0, ensure_ascii=False)
        (directory / LABELS).write_text(listed + "\n", encoding="utf-8")
    write_sums(directory)


def write_sums(directory: Path) -> None:
    """Notes the content of every file there, and sees it to the disk."""
    lines = []
    for path in sorted(p for p in directory.iterdir() if p.is_file() and p.name != SUMS):
        with path.open("rb+") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
            os.fsync(file.fileno())
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def verify(directory: Path) -> None:
    """Checks a checkpoint against its sums; one without (written before there were any) is taken as it is.

    Raises:
        CheckpointError: names the file that is not what was written.
    """
    try:
        lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    except UnicodeDecodeError:
        lines = [""]
    # removed first: DVC takes a file whose size and time are as they were for the one that it knows
    way_out = f"`rm -r {directory}` and `dvc checkout {directory}` may bring it back; else copy or make it anew"
    for line in lines:
        written, _, name = line.partition("  ")
        path = directory / name
        if len(written) != 64 or path.name != name:
            raise CheckpointError(f"{directory / SUMS}: damaged; {way_out}")
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: damaged: can't be read: {error.strerror}; {way_out}") from None
        if found != written:
            raise CheckpointError(f"{path}: damaged: its sha256 is not the one in {SUMS}; {way_out}")


def read_config(directory: Path) -> CheckpointInfo:
    """config.json, after a look at the sums of all files.

    Raises:
        CheckpointError: config.json is missing or of another format, or a file of the checkpoint is damaged.
    """
    verify(directory)
    file = directory / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file}: no such file; is {directory} a checkpoint of this project?") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}; copy or make the checkpoint anew") from None
    try:
        return CheckpointInfo.from_json(config if isinstance(config, dict) else {})
    except KeyError as error:
        raise CheckpointError(f"{file}: lacks {error.args[0]}; make the checkpoint anew") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def read_labels(directory: Path) -> list[str]:
    """What the rows of a classifier stand for; in older checkpoints of VQA the file is answers.json.

    Raises:
        CheckpointError: there is no such file, or it is no list of strings.
    """
    file = directory / LABELS if (directory / LABELS).exists() else directory / ANSWERS
    try:
        labels = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{directory / LABELS}: no such file: what the classifier chooses from is lost") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the labels of the classifier can't be read: {error}") from None
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{file}: not a list of strings")
    return labels


def read_weights(directory: Path) -> dict[str, Tensor]:
    """
    Raises:
        CheckpointError: model.safetensors is missing or damaged.
    """
    file = directory / WEIGHTS
    try:
        return load_file(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or no safetensors file: {error}") from None


def build_from_config(info: CheckpointInfo, tokenizer: Tokenizer, where: Path) -> nn.Module:
    """The freshly initialised model that `info` describes.

    Raises:
        CheckpointError: the family is unknown here, or its config does not fit it.
    """
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        feature_dim=info.feature_dim,
        num_classes=len(info.classes),
    )
    try:
        if _looks_too_large(info.model_config, where / WEIGHTS):
            with torch.device("meta"):  # costs no memory, whatever the config asks for
                _check_size(build_model(info.family, info.model_config, facts), where)
        return build_model(info.family, info.model_config, facts)
    except (ParamsError, CheckpointError) as error:
        raise CheckpointError(f"{where / CONFIG}: {error}") from None
    except Exception as error:  # the config is from outside: whatever a model makes of it, the file is at fault
        raise CheckpointError(f"{where / CONFIG}: no {info.family} can be made of `model_config`: {error}") from None


def _looks_too_large(config: Mapping[str, Any], weights: Path) -> bool:
    """Whether the config has a width that no tensor of the file has, or more layers than the file has tensors.

    Sound ones mostly don't, and are spared the outline, whose first use loads modules for two seconds.
    """
    try:
        with safe_open(weights, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError):
        read_weights(weights.parent)  # says what is the matter with it
        return True
    sides, text = {side for shape in shapes for side in shape}, json.dumps(config, default=str)
    layers = [value for name, value in config.items() if "layers" in name and isinstance(value, int)]
    numbers = {int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", text)}
    return any(number > SMALL and number not in sides for number in numbers) or max(layers, default=0) > len(shapes)


def _check_size(model: nn.Module, where: Path) -> None:
    """Refuses to make a model that the weights can't fill."""
    with contextlib.suppress(OSError):
        stored, needed = (where / WEIGHTS).stat().st_size, sum(p.numel() for p in model.parameters())
        if needed > stored:  # not even a byte a number
            raise CheckpointError(f"describes {needed:,} weights, but {WEIGHTS} has {stored:,} bytes")


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], where: Path) -> None:
    """Fills every parameter and buffer of `module`.

    Raises:
        CheckpointError: names are missing or unexpected, or shapes differ; lists them.
    """
    state = module.state_dict()
    tied = tied_names(state)
    missing = sorted(set(state) - set(weights) - set(tied))
    unexpected = sorted(set(weights) - set(state))
    other_shape = [
        f"{name} {list(weights[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in sorted(state.items())
        if name in weights and weights[name].shape != tensor.shape
    ]
    if missing or unexpected or other_shape:
        parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", other_shape))
        differences = "; ".join(f"{len(names)} {what}: {shorten_list(names, 8)}" for what, names in parts if names)
        raise CheckpointError(f"{where / WEIGHTS}: of another architecture: {differences}")
    module.load_state_dict({name: t for name, t in weights.items() if name not in tied}, strict=False)


def load_model(directory: Path) -> tuple[nn.Module, Tokenizer, CheckpointInfo]:
    """The model (without a task's head), its tokenizer and what config.json says.

    Raises:
        CheckpointError: damaged, or of another architecture.
    """
    info = read_config(directory)
    tokenizer = Tokenizer.load(directory)
    model = build_from_config(info, tokenizer, directory)
    load_strictly(model, part_of(read_weights(directory), "model"), directory)
    return model, tokenizer, info


def part_of(weights: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights below `part.` (`model` or `head`), without that prefix."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}


def tied_names(state: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of tensors that are the same memory as a tensor of an earlier name."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if tensor.numel():
            first.setdefault(_memory(tensor), name)
    return frozenset(name for name, t in state.items() if t.numel() and first[_memory(t)] != name)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))


_TYPES: dict[str, tuple[type, ...]] = {
    "family": (str,),
    "name": (str,),
    "model_config": (dict,),
    "task": (str, type(None)),
    "max_text_len": (int,),
    "max_regions": (int,),
    "detector_id": (str,),
    "feature_dim": (int,),
    "classes": (list, tuple),
    "blank_images": (bool,),
    "options": (dict,),
    "provenance": (dict,),
}
FORMAT, FORMAT_1 = "vlp-checkpoint/2", "vlp-checkpoint/1"
UNLIMITED = {"max_text_len": 512, "max_regions": 100}  # of a checkpoint that no task was trained from


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """
    family        which class it is of (`models.FAMILIES`)
    name          of the model in params.yaml (`models.<name>`)
    model_config  the config that the class was built with, data facts included
    task          None: without a task's head
    max_text_len, max_regions  what it was trained with; max_regions is 0 for a model that reads no regions
    detector_id, feature_dim, classes  of the regions it reads; "", 0 and () for a model that reads none
    blank_images  trained as a text-only control
    options       the task's, as plain data
    provenance    params and hashes of the inputs it was made of
    """

    family: str
    name: str
    model_config: Mapping[str, Any]
    task: str | None = None
    max_text_len: int
    max_regions: int = 0
    detector_id: str = ""
    feature_dim: int = 0
    classes: tuple[str, ...] = ()
    blank_images: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckpointInfo:
        """
        Raises:
            KeyError: a field that has no default is missing. ValueError: of another format, or a value that can't be.
        """
        found = value.get("format")
        if found not in (FORMAT, FORMAT_1):
            raise ValueError(f"format {found!r}; this program reads {FORMAT} and {FORMAT_1}")
        known = dict(value)
        if found == FORMAT_1:
            known["family"] = known["name"] = known["model"]
            if "label_smoothing" in known and known.get("task") == "captioning":
                known["options"] = {"label_smoothing": known["label_smoothing"], **known.get("options", {})}
        fields = {f.name for f in dataclasses.fields(cls)}
        kept = {name: item for name, item in known.items() if name in fields}
        for name in ("family", "name", "model_config", "max_text_len"):
            kept[name] = known[name]
        _check_types(kept)
        check_numbers({**kept, "provenance": None})
        return cls(**{**kept, "classes": tuple(kept.get("classes", ()))})

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            "format": FORMAT,
            **plain,
            "model_config": dict(self.model_config),
            "options": dict(self.options),
            "provenance": dict(self.provenance),
            "classes": list(self.classes),
        }


def _check_types(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name]):
            raise ValueError(f"`{name}` is {value!r:.60}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"`{name}` is negative")
    if not all(isinstance(word, str) for word in values.get("classes", ())):
        raise ValueError("`classes` are names")


def in_words(classes: Sequence[str]) -> str:
    """How many classes of regions there are, and the first ones; the background is none."""
    return f"{len(classes) - 1} classes ({', '.join(classes[1:3])}, ...)" if classes else "no classes"
