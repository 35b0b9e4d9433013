"""The report of `vlp forget`: the images and how each was found, the models trained on them, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.exposure import DETECTOR, TOKENIZER, Exposure
from vlp_models.contrib.forgetting.forget import ForgetReport
from vlp_models.params import Params
from vlp_models.registry.versions import PREVIOUS


def report_lines(report: ForgetReport, params: Params, workspace: Workspace) -> Iterator[str]:
    """Yield the report as lines for the terminal."""
    yield f"images      {len(report.queries)} queried, {len(report.found)} found in the datasets"
    for one in report.found:
        yield f"  {one.image.image_id}  {one.image.split}  {one.image.path}  ({one.how}; of {one.of})"
    for query in report.queries:
        if all(one.of != query.name for one in report.found):
            yield f"  {query.name}: in no dataset; it will be refused from now on"
    yield "checkpoints"
    for exposure in report.checkpoints:
        yield _line(exposure)
    if report.states:
        yield "resume states"
        for _, exposure in report.states:
            yield _line(exposure)
    if report.versions:
        yield "registered versions"
        for version in report.versions:
            aliases = f"  [{', '.join(version.aliases)}]" if version.aliases else ""
            yield _line(version.exposure) + aliases
    yield from _champion_lines(report)
    yield from _retrain_lines(report, params)


def _line(exposure: Exposure) -> str:
    return f"  {exposure.state:10}  {exposure.name}: {exposure.how}"


def _champion_lines(report: ForgetReport) -> Iterator[str]:
    for one in report.champions:
        verb = "was trained on it" if one.exposure.state in ("exposed", "inherited") else "may have been trained on it"
        yield f"CHAMPION    {one.model} version {one.version} {verb}, and is still served"
        before = next((v for v in report.versions if v.model == one.model and PREVIOUS in v.aliases), None)
        if before is not None and before.exposure.clean:
            yield f"            `vlp rollback {one.task}`: version {before.version}, the previous champion, was not"
        else:
            yield "            `--withdraw-versions` removes its aliases; then retrain and promote a clean version:"
            yield f"            `vlp run`, `vlp promote {one.task}`"


def _retrain_lines(report: ForgetReport, params: Params) -> Iterator[str]:
    """Yield what must be retrained, and from which checkpoint."""
    known = {f"{kind}/{run}" for kind in ("pretrain", "finetune") for run in getattr(params, kind)}
    dirty = [exposure for exposure in report.checkpoints if not exposure.clean]
    if not dirty:
        return
    yield "to retrain once the image is out of the data (`--retrain`, or `vlp run`)"
    for exposure in dirty:
        if exposure.name in (DETECTOR, TOKENIZER):
            yield f"  {exposure.name}"
        elif exposure.name in known:
            starts = (start for start in params.chain(exposure.name)[1:] if report.exposures.of(start).clean)
            yield f"  {exposure.name}, from {next(starts, 'the start')}"
        else:
            yield f"  {exposure.name}: not a run of params.yaml; delete checkpoints/{exposure.name}"


def report_json(report: ForgetReport, params: Params) -> dict[str, Any]:
    """Return the report as plain data."""

    def of(exposure: Exposure) -> dict[str, Any]:
        first = {"epoch": exposure.first.epoch, "update": exposure.first.update} if exposure.first else None
        return {"name": exposure.name, "state": exposure.state, "how": exposure.how, "first": first}

    return {
        "asked": [{"name": one.name, "sha256": one.sha256} for one in report.queries],
        "found": [
            {
                "image_id": one.image.image_id,
                "split": one.image.split,
                "path": one.image.path,
                "sha256": one.image.sha256,
                "of": one.of,
                "how": one.how,
            }
            for one in report.found
        ],
        "checkpoints": [of(exposure) for exposure in report.checkpoints],
        "states": [of(exposure) for _, exposure in report.states],
        "versions": [
            {**of(one.exposure), "model": one.model, "version": one.version, "aliases": list(one.aliases)}
            for one in report.versions
        ],
        "champions": [f"{one.model}/{one.version}" for one in report.champions],
    }
