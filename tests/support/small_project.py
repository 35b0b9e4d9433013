"""A project of a few scenes, made by the real stages, and untrained models for its tasks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import RegionInput
from vlp_models.data.shards.contents import CONTENTS, trained_on_file
from vlp_models.data.tables import read_table, write_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint import CheckpointInfo, write_checkpoint
from vlp_models.params import ModelParams, Params, to_plain
from vlp_models.pipeline.stages import features, generate, prepare, shards
from vlp_models.tasks import task_class

ANSWERS = ["yes", "no", "1", "2", "red", "blue"]
SIZES: dict[str, Any] = {"hidden": 16, "heads": 2, "intermediate": 32}
SIZES |= dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 1)
TINY = ModelParams(family="tden", config=SIZES)


def make_data(params: Params, workspace: Workspace) -> None:
    """Run the stages up to shards; validation passes everything."""
    generate.run(params, workspace, "scenes")
    prepare.run(params, workspace, "scenes")
    shutil.rmtree(workspace.validated, ignore_errors=True)
    shutil.copytree(workspace.interim("scenes"), workspace.validated)
    bad = {"table": "captions", "row_id": "scenes/9", "rule": "empty text", "reason": "no words", "provenance": "x:1"}
    write_table([bad], "quarantine", workspace.validated)
    names = ("images", "captions", "questions")
    counts = {name: len(read_table(name, workspace.validated)) for name in names}
    write_json(workspace.validated / "manifest.json", {"counts": counts, "splits": {}})
    tables = {name: {"rows": n + 1, "good": n, "bad": 1} for name, n in counts.items()}
    write_json(workspace.reports / "validation.json", {"tables": tables, "max_bad_percent": 50.0})
    features.run(params, workspace)
    shards.run(params, workspace)


def make_model(
    workspace: Workspace,
    seed: int,
    run: str = "vqa",
    *,
    made: ModelParams = TINY,
    name: str = "tden",
    task: str = "vqa",
) -> Path:
    """Write an untrained model of the family and config of `made`, with the provenance a training would write."""
    manifest = read_json(workspace.shards / "manifest.json")
    texts = read_table("captions", workspace.validated)["text"].to_pylist()
    tokenizer = Tokenizer.train(texts, 300, 1, True)
    torch.manual_seed(seed)
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        feature_dim=manifest["feature_dim"],
        num_classes=len(manifest["classes"]),
    )
    model: Any = build_model(made.family, made.config, facts)
    regions: dict[str, Any] = {}
    if isinstance(model.inputs.image, RegionInput):
        regions = {"max_regions": 16, "classes": tuple(manifest["classes"])}
        regions |= {key: manifest[key] for key in ("detector_id", "feature_dim")}
    view = task_class(task).view
    content = f"{CONTENTS}/{trained_on_file(model.inputs.kind, view, ())}"
    inputs = {content: hash_path(workspace.root / content), "start": "1" * 64, "tokenizer": "2" * 64}
    info = CheckpointInfo(
        family=made.family,
        name=name,
        model_config=to_plain(model.config),
        task=task,
        max_text_len=16,
        provenance={"inputs": inputs, "params": {}},
        **regions,
    )
    directory = workspace.checkpoint(f"finetune/{run}")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    labels = ANSWERS if task_class(task).has_labels else []
    write_checkpoint(directory, task_class(task)(model, tokenizer, info, labels=labels), info, tokenizer, labels)
    return directory
