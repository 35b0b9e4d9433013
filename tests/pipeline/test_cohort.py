"""Which runs are one design from several seeds: those that nothing but a seed or a name tells apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace
from vlp_models.params import Params, load_params
from vlp_models.pipeline.lineage import cohort_of

ROOT = Path(__file__).parents[2]
SHIPPED = load_params(ROOT / "params.yaml")
RUN = next(name for name, run in SHIPPED.finetune.items() if run.start.startswith("pretrain/"))
PRETRAINED = SHIPPED.finetune[RUN].start.removeprefix("pretrain/")
MODEL = SHIPPED.model_of(RUN)


def cohort(directory: Path, params: Params = SHIPPED, **config: Any) -> str:
    workspace = Workspace(directory)
    inputs = {"index-train.parquet": "rows", "tokenizer": "pieces", "start": "weights"} | config.pop("inputs", {})
    about = {"model_config": {"hidden": 8}, "detector_id": "d1", "provenance": {"inputs": inputs}, **config}
    workspace.checkpoint(f"finetune/{RUN}").mkdir(parents=True, exist_ok=True)
    write_json(workspace.checkpoint(f"finetune/{RUN}") / "config.json", about)
    return cohort_of(params, workspace, RUN)


def changed(kind: str, name: str, **values: Any) -> Params:
    runs = dict(getattr(SHIPPED, kind))
    runs[name] = dataclasses.replace(runs[name], **values)
    return dataclasses.replace(SHIPPED, **{kind: runs})


def test_seeds_and_the_weights_that_they_led_to_make_no_other_design(tmp_path: Path) -> None:
    first = cohort(tmp_path)
    for kind, name in (("finetune", RUN), ("pretrain", PRETRAINED), ("models", MODEL)):
        assert cohort(tmp_path, changed(kind, name, seed=1234)) == first, kind
    assert cohort(tmp_path, inputs={"start": "weights from another seed"}) == first
    models = {**SHIPPED.models, "again": dataclasses.replace(SHIPPED.models[MODEL], seed=2)}
    pretrain = {**SHIPPED.pretrain, "again": dataclasses.replace(SHIPPED.pretrain[PRETRAINED], model="again")}
    finetune = {**SHIPPED.finetune, RUN: dataclasses.replace(SHIPPED.finetune[RUN], start="pretrain/again")}
    named = dataclasses.replace(SHIPPED, models=models, pretrain=pretrain, finetune=finetune)
    assert cohort(tmp_path, named) == first, "names of what it starts from"


def test_what_changes_a_model_makes_another_design(tmp_path: Path) -> None:
    """Else the gate would say of a champion's successor that it differs in its seed alone."""
    found = {
        "as it is": cohort(tmp_path),
        "words": cohort(tmp_path, changed("models", MODEL, text_init="package:bert")),
        "weights": cohort(tmp_path, changed("models", MODEL, init="checkpoints/imported/x")),
        "model": cohort(tmp_path, changed("models", MODEL, config={"hidden": 16})),
        "pretraining": cohort(tmp_path, changed("pretrain", PRETRAINED, max_epochs=77)),
        "training": cohort(tmp_path, changed("finetune", RUN, max_epochs=77)),
        "detector": cohort(tmp_path, detector_id="d2"),
        "tokenizer": cohort(tmp_path, inputs={"tokenizer": "other pieces"}),
        "data": cohort(tmp_path, inputs={"index-train.parquet": "other rows"}),
    }
    assert len(set(found.values())) == len(found)
