"""The parts of a run: their names, their params, and the stage `part` in dvc.yaml."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlp_models.contrib.parts.params import PartsParams
from vlp_models.params import FinetuneParams, Params, TrainerParams
from vlp_models.pipeline.dvc.dvc_yaml import Stage
from vlp_models.pipeline.dvc.graph import Context, code, foreach, trained_on


@dataclass(frozen=True)
class Part:
    """A part of a run: the name of the run, and the params of a fine-tuning on this part of the images."""

    run: str
    params: FinetuneParams


def list_parts(params: Params) -> dict[str, Part]:
    """Return the parts of all runs by name: RUN-part-1, ..."""
    parts: dict[str, Part] = {}
    for name, run in params.finetune.items():
        for number in range(1, run.parts + 1) if run.parts > 1 else ():
            # one dataset (`check_parts`)
            ((source, repeats),) = (run.sources or dict.fromkeys(params.data, 1)).items()
            sources = {f"{source}/{number}-of-{run.parts}": repeats}
            sections = {**run.sections, "parts": PartsParams()}
            parts[f"{name}-part-{number}"] = Part(name, replace(run, sources=sources, sections=sections))
    return parts


def part_checkpoints(params: Params) -> dict[str, list[str]]:
    """Return run -> the checkpoints of its parts, below the project's folder; empty for a run without parts."""
    checkpoints: dict[str, list[str]] = {name: [] for name in params.finetune}
    for key, part in list_parts(params).items():
        checkpoints[part.run].append(f"checkpoints/finetune/{key}")
    return checkpoints


def part(c: Context) -> Stage:
    entries = {
        key: {
            "run": p.run,
            "start": p.params.start,
            "task": p.params.task,
            "family": c.params.family_at(p.params.start),
            "trained_on": trained_on(c.kind_at(p.params.start), c.used.trained[p.run], p.params.sources),
            "view": c.used.trained[p.run],
        }
        for key, p in list_parts(c.params).items()
    }
    return foreach(
        entries,
        desc="a fine-tuning on a part of the images, for a run with `parts`",
        cmd="vlp stage part ${key}",
        params=["finetune.${item.run}", *c.keys("defaults.finetune"), *c.options("trainer", TrainerParams)],
        deps=[
            "checkpoints/${item.start}",
            *c.training_inputs,
            code("stages", "part"),
            code("models", "${item.family}"),
            code("tasks", "${item.task}"),
            code("views", "${item.view}"),
        ],
        outs=["checkpoints/finetune/${key}"],
        metrics=["reports/training/finetune/${key}.json"],
        plots=[{"reports/curves/finetune/${key}.csv": {"x": "step", "y": "loss"}}],
    )
