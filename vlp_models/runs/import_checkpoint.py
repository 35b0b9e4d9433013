"""`vlp import-checkpoint`: weights of other programs as a checkpoint to start from. No stage of the pipeline.

The shards say what a region is (feature size, classes) and data/tokenizer what a word is, so both must be there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import CheckpointError
from vlp_models.params import Params, to_plain
from vlp_models.workspace.paths import Workspace, output_directory, write_text

if TYPE_CHECKING:
    from torch import nn

    from vlp_models.models.tden.convert import Converted
    from vlp_models.runs.fitting import Inputs

FORMATS = ("xmodaler-tden", "bert")
_OF_DATA = ("vocab_size", "feature_dim", "num_classes", "mask_id")  # no business of params.yaml


def import_checkpoint(
    form: str,
    source: Path,
    out: Path,
    params: Params,
    workspace: Workspace,
    *,
    heads: int = 0,
    answers: Path | None = None,
) -> list[str]:
    """Writes the checkpoint directory `out`, and in it preset.yaml, which makes `pretrain` start from it.

    Args:
        form: `xmodaler-tden`: `source` is a file of the public TDEN code; a task's becomes that task's checkpoint, its
            classifier included. `bert`: a folder of Hugging Face's bert-base; the architecture is params.yaml's
            `model.config`, other modules stay fresh (`pretrain.seed`).
        heads: of `xmodaler-tden`; 0: one per 64 dimensions.
        answers: of a VQA model: a JSON list of what its classifier's rows stand for.

    Returns what was done, in lines to print.

    Raises:
        CheckpointError: `source` is not of this form, does not fit the data, or `out` is there already.
        DataError: shards or tokenizer are not there yet.
    """
    import torch
    from torch import nn

    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import write_checkpoint
    from vlp_models.models.foreign import read_state_dict
    from vlp_models.models.tden.convert import convert_xmodaler
    from vlp_models.models.tden.convert_bert import convert_bert
    from vlp_models.models.tden.model import TDEN
    from vlp_models.runs.fitting import PRESET, read_inputs

    if form not in FORMATS:
        raise CheckpointError(f"unknown format {form!r}; known: {', '.join(FORMATS)}")
    if out.exists():
        raise CheckpointError(f"{out}: there already; name a new directory, or remove it")
    inputs = read_inputs(workspace)
    sizes: dict[str, Any] = {
        "vocab_size": inputs.tokenizer.vocab_size,
        "feature_dim": inputs.manifest.feature_dim,
        "num_classes": inputs.manifest.num_classes,
        "mask_id": inputs.tokenizer.mask_id,
    }
    torch.manual_seed(params.pretrain.seed)
    converted = None
    if form == "bert":
        file = _bert_weights(source)
        _check_vocabulary(source, inputs)
        model = build_model("tden", params.model.config, **sizes)
        assert isinstance(model, TDEN)
        weights, what = convert_bert(read_state_dict(file), _json(source / "config.json"), model.config), "BERT"
    else:
        file = source
        converted = convert_xmodaler(read_state_dict(file), heads=heads)
        _check_fits(converted.config, sizes, file)
        config = {k: v for k, v in converted.config.items() if k not in _OF_DATA}
        model = build_model("tden", config, **sizes)
        weights, what = converted.weights, f"TDEN's {converted.kind}"
    own = model.state_dict()
    wrong = sorted(n for n, t in weights.items() if n not in own or own[n].shape != t.shape)
    if wrong:
        raise CheckpointError(f"{file}: does not fit this TDEN: {', '.join(wrong[:8])}")
    model.load_state_dict(weights, strict=False)

    p = params.pretrain
    kind = converted.kind if converted else "pretraining"
    described: dict[str, Any] = {
        "model": "tden",
        "model_config": to_plain(model.config),
        "task": None if kind == "pretraining" else kind,
        "max_text_len": p.max_text_len,
        "max_regions": p.max_regions,
        "detector_id": inputs.manifest.detector_id,
        "feature_dim": inputs.manifest.feature_dim,
        "classes": list(inputs.manifest.classes),
        "provenance": {"imported": form, "file": file.name},
    }
    names = _answers(answers, converted)
    module: nn.Module = nn.ModuleDict({"model": model})
    if converted and described["task"]:
        module = _task_model(model, converted, described, names, inputs, file)
    with output_directory(out) as directory:
        write_checkpoint(directory, module, described, inputs.tokenizer, names)
        write_text(directory / PRESET, _preset(described["model_config"], workspace.relative(out), PRESET))
    loaded, fresh = _modules(weights), sorted(_modules(own.keys() - weights.keys()))
    return [
        f"{out}: {what} weights in {', '.join(sorted(loaded))}",
        f"fresh (seed {p.seed}): {', '.join(fresh) or 'nothing'}",
        f"to pretrain from it: vlp use {out / PRESET}",
        "to fine-tune it as it is: finetune.<run>.init: its name, where it lies in checkpoints/",
        *([f"to score it: checkpoints/RUN, then vlp stage evaluate RUN, a run of {kind}"] if described["task"] else []),
    ]


def _task_model(
    model: nn.Module, converted: Converted, described: dict[str, Any], answers: list[str], inputs: Inputs, file: Path
) -> nn.Module:
    from vlp_models.models.checkpoint import FORMAT, load_strictly
    from vlp_models.models.info import CheckpointInfo
    from vlp_models.tasks import task_class

    info = CheckpointInfo.from_json({"format": FORMAT, **described})
    task_model = task_class(converted.kind)(model, inputs.tokenizer, info, labels=answers)
    load_strictly(task_model.head, converted.head, file)
    return task_model


def _answers(file: Path | None, converted: Converted | None) -> list[str]:
    """What the rows of a VQA model's classifier stand for; of any other, nothing.

    Raises:
        CheckpointError: not given, no JSON list of strings, or more or fewer than rows.
    """
    if converted is None or converted.kind != "vqa":
        return []
    rows = len(converted.head["fused.bias"])
    if file is None:
        raise CheckpointError(
            f"a VQA model: give --answers FILE, a JSON list of its {rows:,} answers in their order (the public "
            "code has them in trainval_label2ans.pkl)"
        )
    answers: Any = _json(file, list)
    if len(answers) != rows or not all(isinstance(a, str) for a in answers) or len(set(answers)) != rows:
        raise CheckpointError(f"{file}: not {rows:,} different answers, as the classifier has")
    return list(answers)


def _preset(model_config: dict[str, Any], name: str, file: str) -> str:
    config = {k: v for k, v in model_config.items() if k not in _OF_DATA}
    overlay = {"model": {"name": "tden", "config": config}, "pretrain": {"init": name}}
    lines = [f"# vlp use {name}/{file}: pretraining starts from these weights. JSON is YAML."]
    return "\n".join([*lines, json.dumps(overlay, indent=2)]) + "\n"


def _check_fits(config: dict[str, Any], sizes: dict[str, Any], file: Path) -> None:
    ways_out = {
        "vocab_size": "set tokenizer.source: vocab with BERT's vocab.txt",
        "feature_dim": "import the features it was trained on (features.source: npz)",
        "num_classes": "import the features it was trained on, class probabilities included",
    }
    for key, way_out in ways_out.items():
        if config.get(key, sizes[key]) != sizes[key]:
            raise CheckpointError(f"{file}: {key} {config[key]:,}, but the data here has {sizes[key]:,}; {way_out}")


def _bert_weights(folder: Path) -> Path:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin")


def _check_vocabulary(folder: Path, inputs: Inputs) -> None:
    from vlp_models.data.tokenizer import Tokenizer

    lowercase = inputs.tokenizer.lowercase
    if Tokenizer.from_vocab(folder / "vocab.txt", lowercase).vocabulary != inputs.tokenizer.vocabulary:
        raise CheckpointError(
            f"{folder / 'vocab.txt'}: not the vocabulary of data/tokenizer; set tokenizer.source: vocab and "
            "tokenizer.vocab to this file, then `dvc repro shards tokenizer`"
        )


def _json(file: Path, kind: type = dict) -> Any:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: can't be read: {error}") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: not a JSON {'object' if kind is dict else 'list'}")
    return value


def _modules(names: Any) -> set[str]:
    return {name.partition(".")[0] for name in names}
