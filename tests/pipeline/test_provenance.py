"""Which runs count as one design over seeds, and what a run is said to have learned from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from toy_dataset import write_workspace

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace
from vlp_models.params import Params
from vlp_models.pipeline.lineage import training_inputs, variant_hash

INPUTS = {"manifest": "1", "index-train.parquet": "2", "tokenizer": "3", "start": "4"}


def cohort(workspace: Workspace, params: Params, *, model: dict[str, Any] | None = None, **inputs: str) -> str:
    """Of the run `vqa`, with these changes to its model and to what it was trained on."""
    config = {"model_config": {"hidden": 8}, "provenance": {"inputs": INPUTS | inputs}}
    write_json(workspace.checkpoint("finetune/vqa") / "config.json", config)
    made = {"tden": replace(params.models["tden"], **(model or {}))}
    return variant_hash(replace(params, models=made), workspace, "vqa")


def test_a_cohort_is_runs_that_differ_in_their_seeds_alone(tmp_path: Path) -> None:
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    own = cohort(workspace, params)
    other_seed = replace(params.finetune["vqa"], seed=77)
    assert cohort(workspace, replace(params, finetune={"vqa": other_seed}), start="5", model={"seed": 9}) == own
    differing = [
        cohort(workspace, params, **{name: "other"}) for name in ("manifest", "index-train.parquet", "tokenizer")
    ]
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"one")
    differing.append(cohort(workspace, params, model={"text_init": "bert"}))
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"two")
    differing.append(cohort(workspace, params, model={"text_init": "bert"}))
    differing.append(cohort(workspace, params, model={"init": "checkpoints/imported/tden"}))
    (tmp_path / "packages").mkdir()
    for version in ("1.0", "2.0"):
        (tmp_path / "packages" / "eyes.json").write_text(version)
        differing.append(cohort(workspace, params, model={"image_init": "package:eyes"}))
    assert len({own, *differing}) == 1 + len(differing), "other regions, texts or words; other weights to begin with"


def test_each_dataset_counts_its_own_samples(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_json(workspace.shards / "manifest.json", {"sources": ["coco", "scenes"]})
    rows = {"source": ["coco", "coco", "scenes"], "view": ["captions", "questions", "captions"]}
    pq.write_table(pa.table(rows), workspace.shards / "index-train.parquet")
    both = {one.name: one.counts for one in training_inputs(workspace)}
    assert both == {"coco": {"captions": 1, "questions": 1}, "scenes": {"captions": 1}}
    assert [one.counts for one in training_inputs(workspace, {"scenes": 2})] == [{"captions": 1}]
