"""A model of pixels beginning with timm's weights: `models.NAME.image_init`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vlp_models.common.io import hash_file
from vlp_models.common.packages import find_weights_file, library_of
from vlp_models.common.state_dicts import shorten_list
from vlp_models.errors import CheckpointError
from vlp_models.models.convert.mapping import Asked
from vlp_models.models.convert.timm import read_timm
from vlp_models.models.partial_load import adopt_weights, in_short, refuse_other
from vlp_models.params import ModelParams
from vlp_models.pipeline.training_job import Inputs, data_facts


def begin_with_image_weights(
    model: nn.Module, p: ModelParams, inputs: Inputs, root: Path, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Fills what timm's weights have of `model`: SOHO's CNN; VLMo's patches and vision experts, or the CNN
    before them.

    Returns what to keep with the checkpoint (source, the file's sha256, what was taken and what stayed fresh), and the
    same in lines to print.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: the family reads no pixels, weights of another architecture or size than the model's, no such
            file.
    """
    asked = Asked(facts=data_facts(inputs), config=p.config, family=p.family, root=root, where=where)
    try:
        imported = read_timm(Path(p.image_init), asked)
        refuse_other(_plain(imported.config), _plain(dataclasses.asdict(model.config)), imported.config)  # type: ignore[call-overload]
        adopted = adopt_weights(model, imported.weights)
        if adopted.left_out:
            raise CheckpointError(f"the model has no place for {shorten_list(adopted.left_out)}")
    except CheckpointError as error:
        raise CheckpointError(f"params.yaml: `{where}: {p.image_init}`: {error}") from None
    own = model.state_dict()
    told = {"taken": in_short(adopted.taken, own), "fresh": in_short(adopted.fresh, own), "notes": list(imported.notes)}
    file = None if library_of(p.image_init) else find_weights_file(p.image_init, root, where)
    kept = {"source": p.image_init, **({"files": {file.name: hash_file(file)}} if file else {}), **told}
    parameters = sum(own[name].numel() for name in adopted.taken)
    modules = sorted({name.partition(".")[0] for name in adopted.taken})
    lines = [f"{p.image_init}: {parameters:,} of {imported.what} weights in {', '.join(modules)}"]
    return kept, [*lines, *(f"  {note}" for note in imported.notes)]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """As params.yaml would have it: lists, not tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(config)))
    return plain
