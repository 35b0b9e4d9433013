"""Which runs share a variant hash, and the recorded training inputs of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace
from vlp_models.models import FAMILIES
from vlp_models.params import Params, load_params
from vlp_models.pipeline.lineage import training_inputs, variant_hash


def test_each_dataset_counts_its_own_samples(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_json(workspace.shards / "manifest.json", {"sources": ["coco", "scenes"]})
    rows = {"source": ["coco", "coco", "scenes"], "view": ["captions", "questions", "captions"]}
    pq.write_table(pa.table(rows), workspace.shards / "index-train.parquet")
    both = {one.name: one.counts for one in training_inputs(workspace)}
    assert both == {"coco": {"captions": 1, "questions": 1}, "scenes": {"captions": 1}}
    assert [one.counts for one in training_inputs(workspace, {"scenes": 2})] == [{"captions": 1}]


ROOT = Path(__file__).parents[2]
SHIPPED = load_params(ROOT / "params.yaml")
RUN = next(name for name, run in SHIPPED.finetune.items() if run.start.startswith("pretrain/"))
PRETRAINED = SHIPPED.finetune[RUN].start.removeprefix("pretrain/")
MODEL = SHIPPED.model_of(RUN)


def run_hash(directory: Path, params: Params = SHIPPED, **config: Any) -> str:
    workspace = Workspace(directory)
    inputs = {"index-train.parquet": "rows", "tokenizer": "pieces", "start": "weights"} | config.pop("inputs", {})
    about = {"model_config": {"hidden": 8}, "detector_id": "d1", "provenance": {"inputs": inputs}, **config}
    workspace.checkpoint(f"finetune/{RUN}").mkdir(parents=True, exist_ok=True)
    write_json(workspace.checkpoint(f"finetune/{RUN}") / "config.json", about)
    return variant_hash(params, workspace, RUN)


def changed(kind: str, name: str, **values: Any) -> Params:
    runs = dict(getattr(SHIPPED, kind))
    runs[name] = dataclasses.replace(runs[name], **values)
    return dataclasses.replace(SHIPPED, **{kind: runs})


def test_seeds_do_not_change_the_variant_hash(tmp_path: Path) -> None:
    first = run_hash(tmp_path)
    for kind, name in (("finetune", RUN), ("pretrain", PRETRAINED), ("models", MODEL)):
        assert run_hash(tmp_path, changed(kind, name, seed=1234)) == first, kind
    assert run_hash(tmp_path, inputs={"start": "weights from another seed"}) == first
    models = {**SHIPPED.models, "again": dataclasses.replace(SHIPPED.models[MODEL], seed=2)}
    pretrain = {**SHIPPED.pretrain, "again": dataclasses.replace(SHIPPED.pretrain[PRETRAINED], model="again")}
    finetune = {**SHIPPED.finetune, RUN: dataclasses.replace(SHIPPED.finetune[RUN], start="pretrain/again")}
    named = dataclasses.replace(SHIPPED, models=models, pretrain=pretrain, finetune=finetune)
    assert run_hash(tmp_path, named) == first, "the names of its inputs do not count"


def test_other_code_of_a_plugin_is_another_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the gate would refuse a better model of a plugin as the champion with another seed."""
    plugin = tmp_path / "own_family.py"
    plugin.write_text("class Model:\n    layers = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FAMILIES, SHIPPED.family_at(f"finetune/{RUN}"), "own_family:Model")
    first = run_hash(tmp_path)
    plugin.write_text("class Model:\n    layers = 12\n")
    assert run_hash(tmp_path) != first


def test_anything_that_changes_the_model_changes_the_variant_hash(tmp_path: Path) -> None:
    """Else the gate would say of a champion's successor that it differs in its seed alone."""
    (tmp_path / "bert").mkdir()
    (tmp_path / "packages").mkdir()
    found = {}
    for content in ("one", "another"):  # of equal names
        (tmp_path / "bert" / "model.safetensors").write_text(content)
        (tmp_path / "packages" / "timm.json").write_text(content)
        found[f"BERT, {content}"] = run_hash(tmp_path, changed("models", MODEL, text_init="bert"))
        found[f"timm, {content}"] = run_hash(tmp_path, changed("models", MODEL, image_init="package:timm"))
    found |= {
        "as it is": run_hash(tmp_path),
        "words": run_hash(tmp_path, changed("models", MODEL, text_init="package:bert")),
        "weights": run_hash(tmp_path, changed("models", MODEL, init="checkpoints/imported/x")),
        "model": run_hash(tmp_path, changed("models", MODEL, config={"hidden": 16})),
        "pretraining": run_hash(tmp_path, changed("pretrain", PRETRAINED, max_epochs=77)),
        "training": run_hash(tmp_path, changed("finetune", RUN, max_epochs=77)),
        "detector": run_hash(tmp_path, detector_id="d2"),
        "tokenizer": run_hash(tmp_path, inputs={"tokenizer": "other pieces"}),
        "manifest": run_hash(tmp_path, inputs={"manifest": "another"}),
        "data": run_hash(tmp_path, inputs={"index-train.parquet": "other rows"}),
    }
    assert len(set(found.values())) == len(found)
