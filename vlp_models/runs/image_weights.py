"""A model of pixels beginning with timm's weights: `models.MODEL.weights` where it names their source itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from vlp_models.models.adopt import adopt_weights, in_short
from vlp_models.models.foreign import Asked
from vlp_models.models.pretrained_timm import read_timm
from vlp_models.params import ModelParams
from vlp_models.runs.fitting import Inputs, data_facts
from vlp_models.weight_files import file_of, library_of
from vlp_models.workspace.paths import hash_file


def begin_with_image_weights(
    model: nn.Module, p: ModelParams, inputs: Inputs, root: Path, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Fills what timm's weights have of `model`: SOHO's CNN, or VLMo's patches and vision experts.

    Returns what to keep with the checkpoint (source, the file's sha256, and what was taken and left out), and the same
    in lines to print.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: the family reads no pixels, weights of another architecture or size, no such file.
    """
    asked = Asked(facts=data_facts(inputs), config=p.config, family=p.family, root=root, where=where)
    imported = read_timm(Path(p.weights), asked)
    adopted = adopt_weights(model, imported.weights)
    own = model.state_dict()
    told = {"taken": in_short(adopted.taken, own), "fresh": in_short(adopted.fresh, own), "notes": list(imported.notes)}
    file = None if library_of(p.weights) else file_of(p.weights, root, where)
    kept = {"source": p.weights, **({"files": {file.name: hash_file(file)}} if file else {}), **told}
    parameters = sum(own[name].numel() for name in adopted.taken)
    modules = sorted({name.partition(".")[0] for name in adopted.taken})
    lines = [f"{p.weights}: {parameters:,} of {imported.what} weights in {', '.join(modules)}"]
    return kept, [*lines, *(f"  {note}" for note in imported.notes)]
