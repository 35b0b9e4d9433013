"""initial MODEL: a model before its first step, a checkpoint like any other. Fresh weights, or imported ones.

`weights` is a checkpoint that `vlp import-checkpoint` made, or where timm's weights are; `words` a BERT's files, `eyes`
what a model of pixels learns to see before all else. What they filled and what stayed fresh is printed, and kept in
the checkpoint's config.json (`provenance`).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from vlp_models.common.io import output_directory
from vlp_models.common.workspace import Workspace, measured, write_manifest
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.params import ModelParams, Params, to_plain
from vlp_models.params.schema import nearest


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes checkpoints/initial/KEY. Fresh weights depend on the model's config and `seed` alone; eyes on boxes, too.

    Raises:
        ParamsError: no such model, a config that its family refuses, or `eyes` for a model that reads no pixels.
        MissingToolError: the package of `weights` or `words` is not installed.
        CheckpointError: `weights` is no checkpoint of this family, was made for other features or words, or is of
            another architecture; `words` is no BERT of the model's sizes and words.
        DataError: shards or tokenizer are not there yet, or `words` is no folder with a BERT's files; `eyes`, and no
            box in the train split.
        NonFiniteLossError: `eyes` diverged.
    """
    import torch
    from torch import nn

    from vlp_models.common.weight_files import is_source
    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import part_of, read_config, read_weights, write_checkpoint
    from vlp_models.models.info import UNLIMITED
    from vlp_models.pipeline.bert_init import begin_with_words
    from vlp_models.pipeline.training_job import check_same_data, data_facts, describe, read_inputs, start_from

    if key not in params.models:
        raise ParamsError(f"params.yaml: no model `{key}`{nearest(key, params.models)}")
    p = params.models[key]
    with measured(workspace, f"initial@{key}"):
        inputs = read_inputs(workspace)
        torch.manual_seed(p.seed)
        model = build_model(p.family, p.config, data_facts(inputs), where=f"models.{key}.config")
        provenance: dict[str, Any] = {}
        lengths = UNLIMITED
        if is_source(p.weights):
            from vlp_models.pipeline.timm_init import begin_with_image_weights

            weights, lines = begin_with_image_weights(model, p, inputs, workspace.root, f"models.{key}.weights")
            provenance["weights"] = weights
            for line in lines:
                print(line)
        elif p.weights:
            source = workspace.root / p.weights
            before = read_config(source)
            if before.family != p.family:
                raise CheckpointError(
                    f"params.yaml: `models.{key}.weights`: {source} is of the family {before.family}, not {p.family}"
                )
            check_same_data(before, source, inputs, "import it anew")
            lines = start_from(model, before, part_of(read_weights(source), "model"), source)
            provenance["weights"] = {**before.provenance, "source": p.weights, "told": lines}
            for line in lines:
                print(line, file=sys.stderr)
            lengths = {"max_text_len": before.max_text_len, "max_regions": before.max_regions}
        if p.words:
            words, lines = begin_with_words(model, p, inputs, workspace.root, f"models.{key}.words")
            provenance["words"] = words
            for line in lines:
                print(line)
        if p.eyes.steps:
            from vlp_models.pipeline.vision_warmup import begin_with_eyes

            provenance["eyes"], line = begin_with_eyes(model, p, params.trainer, workspace, f"models.{key}")
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
    eyes = "eyes" if p.eyes.steps else ""
    return " and ".join(f"from {source}" for source in (p.weights, p.words, eyes) if source) or "fresh"
