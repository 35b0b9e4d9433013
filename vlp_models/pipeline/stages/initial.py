"""initial MODEL: write a model before its first training step, a checkpoint like any other.

Its weights are random, or come from `init` (a checkpoint made by `vlp import-checkpoint`), `image_init`, `text_init` or
`vision_warmup` (pipeline/initial_weights.py, contrib/detector). What was loaded and what stayed random is logged, and
recorded in the checkpoint's config.json (`provenance`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vlp_models.common.io import output_directory
from vlp_models.common.log import get_logger
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace, write_manifest
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.params.schema import suggestion
from vlp_models.vision import WARMUPS

logger = get_logger(__name__)


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write checkpoints/initial/KEY. Random weights depend on the model's config and `seed` alone.

    Raises:
        ParamsError: no such model, a config that its family rejects, or `vision_warmup` for a model without pixels.
        MissingToolError: the package of `image_init` or `text_init` is not installed.
        CheckpointError: `init` is no checkpoint of this family, or was made for other features or another vocabulary;
            `image_init` or `text_init` does not fit the model.
        DataError: shards or tokenizer are missing, `text_init` is no folder of a BERT, or no box for `vision_warmup`.
        NonFiniteLossError: `vision_warmup` diverged.
    """
    import torch
    from torch import nn

    from vlp_models.common.portable import use_portable_kernels
    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import UNLIMITED, part_of, read_config, read_weights, write_checkpoint
    from vlp_models.models.protocols import StartsFromFolder
    from vlp_models.pipeline.prepared_data import PreparedData, load_start

    if key not in params.models:
        raise ParamsError(f"params.yaml: no model `{key}`{suggestion(key, params.models)}")
    p, where = params.models[key], f"models.{key}"
    use_portable_kernels()
    data = PreparedData.load(workspace)
    torch.manual_seed(p.seed)  # of all weights that stay random
    model = build_model(p.family, p.config, data.facts, where=f"{where}.config", init=p.init)
    # Parts of the weights from elsewhere; each loader returns what config.json records of it.
    provenance: dict[str, Any] = {}
    lengths = UNLIMITED  # what the data allowed; an imported checkpoint has its own
    if p.image_init:
        from vlp_models.pipeline.initial_weights import load_image_init

        provenance["image_init"] = load_image_init(model, p, data, workspace.root, f"{where}.image_init")
    elif p.init and isinstance(model, StartsFromFolder):
        provenance["init"] = model.load_folder(p.init, workspace.root, f"{where}.init")
    elif p.init:
        source = workspace.root / p.init
        start = read_config(source)
        if start.family != p.family:
            raise CheckpointError(
                f"params.yaml: `{where}.init`: {source} has the family {start.family}, not {p.family}"
            )
        data.check_compatible(start, source, "import it again")
        notes = load_start(model, start, part_of(read_weights(source), "model"), source)
        provenance["init"] = {**start.provenance, "source": p.init, "notes": notes}
        lengths = {"max_text_len": start.max_text_len, "max_regions": start.max_regions}
    if p.text_init:
        from vlp_models.pipeline.initial_weights import load_text_init

        provenance["text_init"] = load_text_init(model, p, data, workspace.root, f"{where}.text_init")
    if p.vision_warmup.steps:
        warm_up = import_target(WARMUPS["vision_warmup"])
        provenance["vision_warmup"] = warm_up(model, p, params.trainer, workspace, where)
    # a checkpoint like those of trainings, so that every run starts in the same way
    info = data.describe(model, family=p.family, name=key, **lengths)
    info = dataclasses.replace(info, provenance=provenance)
    parameters = sum(weight.numel() for weight in model.parameters())
    with output_directory(workspace.checkpoint(f"initial/{key}")) as directory:
        # the manifest first: SHA256SUMS covers it
        counts = {"parameters": parameters}
        write_manifest(directory, stage=f"initial@{key}", params=to_plain(p), counts=counts)
        write_checkpoint(directory, nn.ModuleDict({"model": model}), info, data.tokenizer)
    sources = [p.image_init or p.init, p.text_init, "vision warm-up" if p.vision_warmup.steps else ""]
    origin = " and ".join(f"from {source}" for source in sources if source) or "random weights"
    logger.info("initial %s: %s, %s parameters, %s", key, p.family, f"{parameters:,}", origin)
