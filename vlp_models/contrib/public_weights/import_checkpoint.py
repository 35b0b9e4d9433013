"""`vlp import-checkpoint`: turn weights of other programs into a checkpoint to start from. Not a pipeline stage.

Region sizes (features, classes) come from the shards and the vocabulary from data/tokenizer, so both must exist.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import output_directory, write_text
from vlp_models.common.packages import PREFIX, is_source
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.workspace import Workspace
from vlp_models.data.bert_folder import find_folder
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import UNLIMITED
from vlp_models.params import Params
from vlp_models.params.runs import NAME
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vlp_models.models import DataFacts
    from vlp_models.models.convert import ImportedModel

# format -> module:function, called with the source and an `ImportRequest`, returns an `ImportedModel`
FORMATS = Table(
    "checkpoint_formats",
    {
        "xmodaler-tden": "vlp_models.contrib.public_weights.tden:read_xmodaler",
        "bert": "vlp_models.contrib.public_weights.bert:read_bert",
        "unified-vlp": "vlp_models.contrib.public_weights.unified_vlp:read_unified_vlp",
        "soho": "vlp_models.contrib.public_weights.soho:read_soho",
        "soho-parts": "vlp_models.contrib.public_weights.soho:read_parts",
        "vlmo": "vlp_models.contrib.public_weights.vlmo:read_vlmo",
        "beit": "vlp_models.contrib.public_weights.vlmo_images:read_beit",
        "timm": "vlp_models.contrib.public_weights.timm:read_timm",
    },
)
# Formats that fill a part of a model, whose architecture params.yaml must describe
PARTS = {
    "bert": "BERT fills the text side",
    "beit": "BEiT fills the image side",
    "timm": "timm's weights fill the image side",
}
FOLDERS = ("bert", "soho-parts")  # formats that are a folder, which may be part of an installed package
PRESET = "preset.yaml"  # next to imported weights: adds the model that starts from them to params.yaml


def import_checkpoint(
    form: str,
    source: Path,
    name: str,
    params: Params,
    workspace: Workspace,
    *,
    task: str = "",
    heads: int = 0,
    answers: Path | None = None,
    max_text_len: int = 0,
    max_regions: int = 0,
) -> list[str]:
    """Write checkpoints/imported/NAME with a preset.yaml, which adds a model to params.yaml that starts from it.

    Args:
        form: `xmodaler-tden`, `unified-vlp`, `vlmo`, `soho`: `source` is a file of the public code; a task's model
            becomes a checkpoint of that task, including its classifier. The other formats fill a part of a model with
            the architecture of `models.NAME.config`; the rest is randomly initialized (`models.NAME.seed`). `bert`: a
            folder with the files of a BERT, or package:NAME. `beit`: a file with BEiT's weights. `timm`: a file,
            `package:NAME` or `timm:NAME` with weights of SOHO's CNN or of a ViT. `soho-parts`: a CNN's weights file, or
            a folder with one (backbone.safetensors) and BERT's files; or package:NAME.
        task: the model's task, where the file does not determine it.
        heads: attention heads; 0: the usual number of the format.
        answers: for a VQA model: a JSON list of the answers of its classifier's rows.
        max_text_len, max_regions: limits that a task's model was trained with. They are not part of the weights, and
            scores depend on them.

    Returns:
        Lines to print.

    Raises:
        CheckpointError: `source` does not have this format or does not fit the data, or NAME exists already.
        DataError: shards or tokenizer are missing.
    """
    import torch
    from torch import nn

    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import write_checkpoint
    from vlp_models.models.convert import ImportRequest
    from vlp_models.models.partial_load import summarize_names
    from vlp_models.pipeline.prepared_data import PreparedData

    out = workspace.checkpoint(f"imported/{name}")
    _check_arguments(form, name, params, out)
    data, model_params = PreparedData.load(workspace), params.models.get(name)
    request = ImportRequest(
        facts=data.facts,
        config=model_params.config if model_params else {},
        family=model_params.family if model_params else "",
        task=task,
        heads=heads,
        vocabulary=data.tokenizer.vocabulary,
        lowercase=data.tokenizer.lowercase,
    )
    if form in FOLDERS and str(source).startswith(PREFIX):
        source = find_folder(str(source), workspace.root, "import-checkpoint")
    # `FORMATS` names functions as text, so that reading one format does not import the others.
    imported: ImportedModel = import_target(FORMATS[form])(source, request)
    _check_fits(imported.config, data.facts, source)
    lengths = _lengths(imported, max_text_len, max_regions)
    labels = _labels(answers, imported)

    # Build the whole model at random, then load the weights: what they lack stays random.
    seed = model_params.seed if model_params else 1
    torch.manual_seed(seed)
    from_data = {field.name for field in dataclasses.fields(data.facts)}  # set by the data, not by the config
    config = {key: value for key, value in imported.config.items() if key not in from_data}
    model = build_model(imported.family, config, data.facts)
    # `strict=False` would ignore unknown names and raise RuntimeError for shapes, so both are checked first.
    weights, state = imported.weights, model.state_dict()
    wrong = sorted(n for n, t in weights.items() if n not in state or state[n].shape != t.shape)
    if wrong:
        raise CheckpointError(f"{source}: does not fit this {imported.family}: {', '.join(wrong[:8])}")
    model.load_state_dict(weights, strict=False)
    # A task's checkpoint holds `model.` and `head.`, as fine-tuning writes it; otherwise only `model.`.
    module = nn.ModuleDict({"model": model, "head": _head(imported.head)} if imported.head else {"model": model})
    missing = state.keys() - weights.keys()
    provenance = {
        "imported": form,
        "file": source.name,
        "loaded": summarize_names(weights, state),
        "missing": summarize_names(missing, state),
        "left_out": list(imported.left_out),
    }
    info = data.describe(model, family=imported.family, name=name, task=imported.task, **lengths)
    info = dataclasses.replace(info, provenance=provenance)
    # The preset leaves out what the data determines: another project's data may have other sizes.
    preset_config = {key: value for key, value in info.model_config.items() if key not in from_data}
    path = workspace.relative(out)
    # The folder appears as a whole or not at all.
    with output_directory(out) as directory:
        write_checkpoint(directory, module, info, data.tokenizer, labels)
        overlay = {"models": {name: {"family": imported.family, "init": path, "config": preset_config}}}
        lines = [f"# vlp use {path}/{PRESET}: the model `{name}` starts from these weights. JSON is YAML."]
        lines += [f"# {note}" for note in imported.notes]
        write_text(directory / PRESET, "\n".join([*lines, json.dumps(overlay, indent=2)]) + "\n")
    return [
        f"{out}: {imported.origin} weights in {', '.join(sorted(_modules(weights)))}",
        f"randomly initialized (seed {seed}): {', '.join(sorted(_modules(missing))) or 'nothing'}",
        *([f"left out: {', '.join(imported.left_out)}"] if imported.left_out else []),
        f"to start from it: vlp use {path}/{PRESET}; params.yaml then has the model `{name}`, and runs may start at "
        f"initial/{name}",
        *(
            [f"to score it: copy it to checkpoints/finetune/RUN, where RUN is a run of {info.task}"]
            if info.task
            else []
        ),
    ]


def _check_arguments(form: str, name: str, params: Params, out: Path) -> None:
    if form not in FORMATS:
        raise CheckpointError(f"unknown format {form!r}; known: {', '.join(FORMATS)}")
    if is_source(name):
        raise CheckpointError(f"--name {name}: looks like a file or a library; choose another")
    if not NAME.fullmatch(name):
        raise CheckpointError(
            f"--name {name}: a model's name has letters, digits, `_` and `-`, and starts with a letter or digit; "
            "choose another"
        )
    if out.exists():
        raise CheckpointError(f"{out}: exists already; choose another --name, or remove it")
    if form in PARTS and name not in params.models:
        raise CheckpointError(
            f"params.yaml: no model `{name}`{suggestion(name, params.models)}; {PARTS[form]} of a model "
            "there, so --name must be one of them"
        )


def _check_fits(config: Mapping[str, Any], facts: DataFacts, source: Path) -> None:
    ways_out = {
        "vocab_size": "set tokenizer.source: vocab with BERT's vocab.txt",
        "feature_dim": "import the features it was trained on (features.source: npz)",
        "num_classes": "import the features it was trained on, class probabilities included",
    }
    # A key that the format does not set is taken from the data and therefore fits.
    for key, way_out in ways_out.items():
        current = getattr(facts, key)
        if config.get(key, current) != current:
            raise CheckpointError(f"{source}: {key} {config[key]:,}, but the data here has {current:,}; {way_out}")


def _lengths(imported: ImportedModel, max_text_len: int, max_regions: int) -> dict[str, int]:
    """Return the limits that the checkpoint records; the answers of a task's model depend on them."""
    lengths = {"max_text_len": max_text_len, "max_regions": max_regions}
    if not imported.reads_regions:
        lengths["max_regions"] = max_regions or UNLIMITED["max_regions"]
    # Limits below 1 were not passed; only a task's model needs them, since its scores depend on them.
    missing = [f"--{key.replace('_', '-')}" for key, value in lengths.items() if value < 1]
    if imported.task and missing:
        raise CheckpointError(
            f"a {imported.task} model: pass {' and '.join(missing)}, the most tokens ([CLS] and [SEP] included) and "
            "regions that it was trained with; they are not part of the file, and its answers depend on them"
        )
    return {key: value if value >= 1 else UNLIMITED[key] for key, value in lengths.items()}


def _labels(file: Path | None, imported: ImportedModel) -> list[str]:
    """Return the answers of a VQA model's classifier; for other models, nothing."""
    from vlp_models.contrib.public_weights.bert import read_json

    if imported.task != "vqa":
        return []
    # The classifier's bias has one entry per answer.
    rows = next(len(tensor) for name, tensor in imported.head.items() if name.endswith("bias"))
    if file is None:
        raise CheckpointError(
            f"a VQA model: pass --answers FILE, a JSON list of its {rows:,} answers in their order (the public "
            "code has them in trainval_label2ans.pkl)"
        )
    answers: Any = read_json(file, list)
    if len(answers) != rows or not all(isinstance(a, str) for a in answers) or len(set(answers)) != rows:
        raise CheckpointError(f"{file}: not a list of {rows:,} different answers, as the classifier has")
    # Answers must differ: a row is looked up by its text.
    return list(answers)


def _head(weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a task's classifier, or several layers by name."""
    from torch import nn

    def layer(prefix: str) -> nn.Module:
        shape = weights[f"{prefix}weight"].shape
        # (outputs, inputs) is a linear layer, (size,) a layer norm.
        module = nn.Linear(shape[1], shape[0]) if len(shape) > 1 else nn.LayerNorm(shape[0])
        module.load_state_dict({part: weights[f"{prefix}{part}"] for part in ("weight", "bias")})
        return module

    # Names without their last part: {""} for a single layer, otherwise one entry per layer such as `0` and `3`.
    names = sorted({name.rpartition(".")[0] for name in weights})
    return layer("") if names == [""] else nn.ModuleDict({name: layer(f"{name}.") for name in names})


def _modules(names: Iterable[str]) -> set[str]:
    # First part of the names: `text_embedding.words.weight` belongs to `text_embedding`.
    return {name.partition(".")[0] for name in names}
