"""`vlp import-checkpoint`: weights of other programs as a checkpoint to start from. No stage of the pipeline.

The shards say what a region is (feature size, classes) and data/tokenizer what a word is, so both must be there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import output_directory, write_text
from vlp_models.common.packages import PREFIX, is_source
from vlp_models.common.workspace import Workspace
from vlp_models.data.bert_folder import find_folder
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import UNLIMITED
from vlp_models.params import Params
from vlp_models.params.schema import load, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vlp_models.models import DataFacts
    from vlp_models.models.convert.mapping import ImportedModel

# format -> module:function, called with the source and `ImportRequest`, returns `ImportedModel`
FORMATS: dict[str, str] = {
    "xmodaler-tden": "vlp_models.models.convert.tden:read_xmodaler",
    "bert": "vlp_models.models.convert.bert:read_bert",
    "unified-vlp": "vlp_models.models.convert.unified_vlp:read_unified_vlp",
    "soho": "vlp_models.models.convert.soho:read_soho",
    "soho-parts": "vlp_models.models.convert.soho:read_parts",
    "vlmo": "vlp_models.models.convert.vlmo:read_vlmo",
    "beit": "vlp_models.models.convert.vlmo_images:read_beit",
    "timm": "vlp_models.models.convert.timm:read_timm",
}
# formats that fill a part of a model, which params.yaml must describe
PARTS = {
    "bert": "BERT fills the text side",
    "beit": "BEiT fills the image side",
    "timm": "timm's weights fill the image side",
}
FOLDERS = ("bert", "soho-parts")  # formats that are a folder, which a package may bring
PRESET = "preset.yaml"  # beside imported weights: the model in params.yaml that begins with them


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
    """Writes checkpoints/imported/NAME, and in it preset.yaml, which adds a model to params.yaml that begins so.

    Args:
        form: `xmodaler-tden`, `unified-vlp`, `vlmo`, `soho`: `source` is a file of the public code; a task's becomes
            that task's checkpoint, its classifier included. The others fill a part of a model whose architecture is
            that of params.yaml's `models.NAME.config`; the rest stays fresh (`models.NAME.seed`). `bert`: a folder
            with a BERT's files, or package:NAME. `beit`: a file of BEiT's weights. `timm`: a file, `package:NAME` or
            `timm:NAME` with the weights of SOHO's CNN or of a ViT. `soho-parts`: a CNN's weights file, or a folder with
            one (backbone.safetensors) and BERT's files; or package:NAME.
        task: which task's model it is, where the file leaves it open.
        heads: attention heads; 0: as the format usually has them.
        answers: of a VQA model: a JSON list of what its classifier's rows stand for.
        max_text_len, max_regions: what a task's model was trained with; weights do not tell, scores depend on it.

    Returns what was done, in lines to print.

    Raises:
        CheckpointError: `source` is not of this form, does not fit the data, or NAME is there already.
        DataError: shards or tokenizer are not there yet.
    """
    import torch
    from torch import nn

    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import write_checkpoint
    from vlp_models.models.convert.mapping import ImportRequest
    from vlp_models.models.partial_load import summarize_names
    from vlp_models.pipeline.training_job import data_facts, describe, read_inputs

    if form not in FORMATS:
        raise CheckpointError(f"unknown format {form!r}; known: {', '.join(FORMATS)}")
    out = workspace.checkpoint(f"imported/{name}")
    if is_source(name):
        raise CheckpointError(f"--name {name}: reads like a file or a library; give another")
    if out.exists():
        raise CheckpointError(f"{out}: there already; give another --name, or remove it")
    if form in PARTS and name not in params.models:
        raise CheckpointError(
            f"params.yaml: no model `{name}`{nearest(name, params.models)}: {PARTS[form]} of a model there, so --name "
            "must be one"
        )
    inputs, own = read_inputs(workspace), params.models.get(name)
    facts = data_facts(inputs)
    asked = ImportRequest(
        facts=facts,
        config=own.config if own else {},
        family=own.family if own else "",
        task=task,
        heads=heads,
        vocabulary=inputs.tokenizer.vocabulary,
        lowercase=inputs.tokenizer.lowercase,
    )
    if form in FOLDERS and str(source).startswith(PREFIX):
        source = find_folder(str(source), workspace.root, "import-checkpoint")
    imported = _read(form, source, asked)
    _check_fits(imported.config, facts, source)
    lengths = _lengths(imported, max_text_len, max_regions)
    labels = _labels(answers, imported)

    seed = own.seed if own else 1
    torch.manual_seed(seed)
    of_data = {field.name for field in dataclasses.fields(facts)}
    config = {key: value for key, value in imported.config.items() if key not in of_data}
    model = build_model(imported.family, config, facts)
    weights, state = imported.weights, model.state_dict()
    wrong = sorted(n for n, t in weights.items() if n not in state or state[n].shape != t.shape)
    if wrong:
        raise CheckpointError(f"{source}: does not fit this {imported.family}: {', '.join(wrong[:8])}")
    model.load_state_dict(weights, strict=False)
    module = nn.ModuleDict({"model": model, "head": _head(imported.head)} if imported.head else {"model": model})
    info = describe(inputs, model, family=imported.family, name=name, task=imported.task, **lengths)
    told = {"taken": summarize_names(weights, state), "fresh": summarize_names(state.keys() - weights.keys(), state)}
    told["left_out"] = list(imported.left_out)
    info = dataclasses.replace(info, provenance={"imported": form, "file": source.name, **told})
    whole = {key: value for key, value in info.model_config.items() if key not in of_data}
    with output_directory(out) as directory:
        write_checkpoint(directory, module, info, inputs.tokenizer, labels)
        write_text(directory / PRESET, _preset(imported, name, workspace.relative(out), whole))
    loaded, fresh = _modules(weights), _modules(state.keys() - weights.keys())
    begin = f"params.yaml names it as the model `{name}`, and runs may begin at initial/{name}"
    return [
        f"{out}: {imported.what} weights in {', '.join(sorted(loaded))}",
        f"fresh (seed {seed}): {', '.join(sorted(fresh)) or 'nothing'}",
        *([f"left out: {', '.join(imported.left_out)}"] if imported.left_out else []),
        f"to begin with it: vlp use {workspace.relative(out / PRESET)}; then {begin}",
        *([f"to score it: copy it to checkpoints/finetune/RUN, RUN being a run of {info.task}"] if info.task else []),
    ]


def _read(form: str, source: Path, asked: Any) -> ImportedModel:
    imported: ImportedModel = load(FORMATS[form])(source, asked)
    return imported


def _check_fits(config: Mapping[str, Any], facts: DataFacts, source: Path) -> None:
    ways_out = {
        "vocab_size": "set tokenizer.source: vocab with BERT's vocab.txt",
        "feature_dim": "import the features it was trained on (features.source: npz)",
        "num_classes": "import the features it was trained on, class probabilities included",
    }
    for key, way_out in ways_out.items():
        here = getattr(facts, key)
        if config.get(key, here) != here:
            raise CheckpointError(f"{source}: {key} {config[key]:,}, but the data here has {here:,}; {way_out}")


def _lengths(imported: ImportedModel, max_text_len: int, max_regions: int) -> dict[str, int]:
    """
    Raises:
        CheckpointError: a task's model without its lengths: its answers change with them.
    """
    given = {"max_text_len": max_text_len, "max_regions": max_regions}
    if not imported.reads_regions:
        given["max_regions"] = max_regions or UNLIMITED["max_regions"]
    missing = [f"--{key.replace('_', '-')}" for key, value in given.items() if value < 1]
    if imported.task and missing:
        raise CheckpointError(
            f"a {imported.task} model: give {' and '.join(missing)}, the most tokens ([CLS] and [SEP] included) and "
            "regions that it was trained with; the file does not tell, and with others it answers differently"
        )
    return {key: value if value >= 1 else UNLIMITED[key] for key, value in given.items()}


def _labels(file: Path | None, imported: ImportedModel) -> list[str]:
    """What the rows of a VQA model's classifier stand for; of any other, nothing.

    Raises:
        CheckpointError: not given, no JSON list of strings, or more or fewer than rows.
    """
    from vlp_models.models.convert.mapping import read_json

    if imported.task != "vqa":
        return []
    rows = next(len(tensor) for name, tensor in imported.head.items() if name.endswith("bias"))
    if file is None:
        raise CheckpointError(
            f"a VQA model: give --answers FILE, a JSON list of its {rows:,} answers in their order (the public "
            "code has them in trainval_label2ans.pkl)"
        )
    answers: Any = read_json(file, list)
    if len(answers) != rows or not all(isinstance(a, str) for a in answers) or len(set(answers)) != rows:
        raise CheckpointError(f"{file}: not {rows:,} different answers, as the classifier has")
    return list(answers)


def _head(weights: Mapping[str, Tensor]) -> nn.Module:
    """A task's classifier, or its classifiers or layers by name."""
    from torch import nn

    def layer(prefix: str) -> nn.Module:
        shape = weights[f"{prefix}weight"].shape
        found = nn.Linear(shape[1], shape[0]) if len(shape) > 1 else nn.LayerNorm(shape[0])
        found.load_state_dict({part: weights[f"{prefix}{part}"] for part in ("weight", "bias")})
        return found

    names = sorted({name.rpartition(".")[0] for name in weights})
    return layer("") if names == [""] else nn.ModuleDict({name: layer(f"{name}.") for name in names})


def _preset(imported: ImportedModel, name: str, place: str, config: dict[str, Any]) -> str:
    overlay = {"models": {name: {"family": imported.family, "init": place, "config": config}}}
    lines = [f"# vlp use {place}/{PRESET}: the model `{name}` starts from these weights. JSON is YAML."]
    lines += [f"# {note}" for note in imported.notes]
    return "\n".join([*lines, json.dumps(overlay, indent=2)]) + "\n"


def _modules(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}
