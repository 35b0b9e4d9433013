"""A model's text side beginning with a BERT's weights: `models.NAME.text_init`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from vlp_models.common.io import hash_file
from vlp_models.data.bert_folder import CONFIG, find_folder, weights_file
from vlp_models.models.convert.bert import read_bert
from vlp_models.models.convert.mapping import Asked
from vlp_models.models.partial_load import adopt_weights, in_short
from vlp_models.params import ModelParams
from vlp_models.pipeline.training_job import Inputs, data_facts

TABLES = ("text_embedding.positions.weight", "text_embedding.types.weight")  # whose first rows mean the same


def begin_with_words(
    model: nn.Module, p: ModelParams, inputs: Inputs, root: Path, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Fills what a BERT has of `model`.

    Returns what to keep with the checkpoint (source, the files' sha256, and what was taken, left out and is fresh), and
    the same in lines to print.

    Raises:
        MissingToolError: the package is not installed. DataError: no such folder, or no BERT's tokenizer.
        CheckpointError: another architecture, other sizes, or other words than data/tokenizer's.
    """
    folder = find_folder(p.text_init, root, where)
    tokenizer = inputs.tokenizer
    asked = Asked(
        facts=data_facts(inputs),
        config=p.config,
        family=p.family,
        vocabulary=tokenizer.vocabulary,
        lowercase=tokenizer.lowercase,
    )
    imported = read_bert(folder, asked)
    adopted = adopt_weights(model, imported.weights, tables=TABLES)
    own = model.state_dict()
    told = {
        "taken": in_short(adopted.taken, own),
        "fresh": in_short(adopted.fresh, own),
        "left_out": [*in_short(adopted.left_out, imported.weights), *imported.left_out],
        "notes": list(imported.notes),
    }
    files = [folder / CONFIG, weights_file(folder)]
    kept = {"source": p.text_init, "files": {file.name: hash_file(file) for file in files}, **told}
    parameters = sum(own[name].numel() for name in adopted.taken)
    lines = [f"{p.text_init}: {parameters:,} of BERT's weights in {', '.join(told['taken'])}"]
    lines += [f"  fresh: {', '.join(told['fresh'])}"] if told["fresh"] else []
    lines += [f"  left out: {', '.join(told['left_out'])}"] if told["left_out"] else []
    return kept, [*lines, *(f"  {note}" for note in told["notes"])]
