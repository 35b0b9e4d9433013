"""The stage `augment` in dvc.yaml."""

from __future__ import annotations

from vlp_models.pipeline.dvc.dvc_yaml import Stage
from vlp_models.pipeline.dvc.graph import Context, code, foreach, trained_on


def augment(c: Context) -> Stage:
    entries = {
        name: {
            "start": run.start,
            "family": c.params.family_at(run.start),
            "trained_on": trained_on(c.kind_at(run.start), "images", run.sources),
        }
        for name, run in c.params.augment.items()
    }
    return foreach(
        entries,
        desc="captions that a model generates for training images",
        cmd="vlp stage augment ${key}",
        params=["augment.${key}"],
        deps=[
            "checkpoints/${item.start}",
            "${item.trained_on}",
            "data/tokenizer",
            "data/validated/images.parquet",
            code("stages", "augment"),
            code("models", "${item.family}"),
            code("tasks", "captioning"),
            code("views", "images"),
        ],
        outs=["data/augmented/${key}"],
    )
