"""initial MODEL: a model before its first step, a checkpoint like any other. Fresh weights, or imported ones.

`init` is a checkpoint made by `vlp import-checkpoint`; `image_init` are timm weights for the image side; `text_init` is
a BERT; `vision_warmup` trains the vision encoder on the boxes. What each filled and what stayed freshly initialized is
printed, and recorded in the checkpoint's config.json (`provenance`).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from vlp_models.common.io import output_directory
from vlp_models.common.workspace import Workspace, record_timing, write_manifest
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.params import ModelParams, Params, to_plain
from vlp_models.params.schema import nearest


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write checkpoints/initial/KEY. Fresh weights depend on the model's config and `seed` alone; a vision warm-up also
    on the boxes.

    Raises:
        ParamsError: no such model, a config that its family rejects, or `vision_warmup` for a model that reads no
            pixels.
        MissingToolError: the package of `image_init` or `text_init` is not installed.
        CheckpointError: `init` is of another family or architecture, or was made for other features or another
            vocabulary; `text_init` is not a BERT of the model's size and vocabulary.
        DataError: shards or tokenizer do not exist yet; `text_init` is not a folder with BERT files; the train split
            has no boxes for `vision_warmup`.
        NonFiniteLossError: the vision warm-up diverged.
    """
    import torch
    from torch import nn

    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import UNLIMITED, part_of, read_config, read_weights, write_checkpoint
    from vlp_models.pipeline.initial_weights import begin_with_words
    from vlp_models.pipeline.training_job import check_same_data, data_facts, describe, read_inputs, start_from

    if key not in params.models:
        raise ParamsError(f"params.yaml: no model `{key}`{nearest(key, params.models)}")
    p = params.models[key]
    with record_timing(workspace, f"initial@{key}"):
        inputs = read_inputs(workspace)
        torch.manual_seed(p.seed)
        model = build_model(p.family, p.config, data_facts(inputs), where=f"models.{key}.config")
        provenance: dict[str, Any] = {}
        lengths = UNLIMITED
        if p.image_init:
            from vlp_models.pipeline.initial_weights import begin_with_image_weights

            weights, lines = begin_with_image_weights(model, p, inputs, workspace.root, f"models.{key}.image_init")
            provenance["image_init"] = weights
            for line in lines:
                print(line)
        elif p.init:
            source = workspace.root / p.init
            before = read_config(source)
            if before.family != p.family:
                raise CheckpointError(
                    f"params.yaml: `models.{key}.init`: {source} is of the family {before.family}, not {p.family}"
                )
            check_same_data(before, source, inputs, "import it anew")
            lines = start_from(model, before, part_of(read_weights(source), "model"), source)
            provenance["init"] = {**before.provenance, "source": p.init, "told": lines}
            for line in lines:
                print(line, file=sys.stderr)
            lengths = {"max_text_len": before.max_text_len, "max_regions": before.max_regions}
        if p.text_init:
            words, lines = begin_with_words(model, p, inputs, workspace.root, f"models.{key}.text_init")
            provenance["text_init"] = words
            for line in lines:
                print(line)
        if p.vision_warmup.steps:
            from vlp_models.pipeline.initial_weights import begin_with_eyes

            provenance["vision_warmup"], line = begin_with_eyes(model, p, params.trainer, workspace, f"models.{key}")
            print(line)
        info = describe(inputs, model, family=p.family, name=key, **lengths)
        info = dataclasses.replace(info, provenance=provenance)
        parameters = sum(weight.numel() for weight in model.parameters())
        with output_directory(workspace.checkpoint(f"initial/{key}")) as directory:
            write_checkpoint(directory, nn.ModuleDict({"model": model}), info, inputs.tokenizer)
            counts = {"parameters": parameters}
            write_manifest(directory, stage=f"initial@{key}", params=to_plain(p), counts=counts)
    print(f"initial {key}: {p.family}, {parameters:,} parameters, {_origin(p)}")


def _origin(p: ModelParams) -> str:
    warmup = "a vision warm-up" if p.vision_warmup.steps else ""
    sources = (p.init, p.image_init, p.text_init, warmup)
    return " and ".join(f"from {source}" for source in sources if source) or "freshly initialized"
