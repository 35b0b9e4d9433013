"""The report of `vlp forget`: the images and how each was found, the models trained on them, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.exposure import DETECTOR, TOKENIZER, Exposure
from vlp_models.contrib.forgetting.forget import ForgetReport
from vlp_models.params import Params
from vlp_models.registry.versions import PREVIOUS


def report_lines(report: ForgetReport, params: Params, workspace: Workspace) -> Iterator[str]:
    """Yield the report as lines for the terminal."""
    yield f"images      {len(report.queries)} queried, {len(report.copies)} found in the datasets"
    for copy in report.copies:
        yield f"  {copy.image.image_id}  {copy.image.split}  {copy.image.path}  ({copy.how}; of {copy.of})"
    for query in report.queries:
        if all(copy.of != query.name for copy in report.copies):
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
    yield from _retrain_lines(report, params, workspace)


def _line(exposure: Exposure) -> str:
    return f"  {exposure.state:10}  {exposure.name}: {exposure.how}"


def _champion_lines(report: ForgetReport) -> Iterator[str]:
    for champion in report.champions:
        # `unknown` is reported as a possibility, not as a fact.
        certain = champion.exposure.state in ("exposed", "inherited")
        verb = "was trained on it" if certain else "may have been trained on it"
        yield f"CHAMPION    {champion.model} version {champion.version} {verb}, and is still served"
        # Rolling back helps only if the previous champion is clean.
        previous = [v for v in report.versions if v.model == champion.model and PREVIOUS in v.aliases]
        if previous and previous[0].exposure.clean:
            number = previous[0].version
            yield f"            `vlp rollback {champion.task}`: version {number}, the previous champion, was not"
        else:
            yield "            `--withdraw-versions` removes its aliases; then retrain and promote a clean version:"
            yield f"            `vlp run`, `vlp promote {champion.task}`"


def count_updates(workspace: Workspace, run: str) -> int:
    """Return the updates of a training, by its report; 0 if it was not trained."""
    file = workspace.training(run)
    return int(read_json(file)["steps"]) if file.exists() else 0


def _retrain_lines(report: ForgetReport, params: Params, workspace: Workspace) -> Iterator[str]:
    """Yield what must be retrained, and from which checkpoint."""
    runs = {f"{kind}/{run}": f"{kind}/{run}" for kind in ("pretrain", "finetune") for run in getattr(params, kind)}
    # a part -> the run that it belongs to, which starts from the same checkpoint
    for run, entry in params.finetune.items():
        runs |= {f"finetune/{run}-part-{number}": f"finetune/{run}" for number in range(1, entry.parts + 1)}
    dirty = [exposure for exposure in report.checkpoints if not exposure.clean]
    if not dirty:
        return
    yield "to retrain once the image is out of the data (`--retrain`, or `vlp run`)"
    for exposure in dirty:
        if exposure.name in (DETECTOR, TOKENIZER):
            yield f"  {exposure.name}"
        elif exposure.name in runs:
            # The nearest checkpoint of the chain that is clean; without one, train from the start.
            starts = (start for start in params.chain(runs[exposure.name])[1:] if report.exposures.of(start).clean)
            yield f"  {exposure.name}, from {next(starts, 'the start')}"
        else:
            yield f"  {exposure.name}: not a run of params.yaml; delete checkpoints/{exposure.name}"
    updates = {name: count_updates(workspace, name) for name in runs}
    if total := sum(updates.values()):
        repeated = sum(updates.get(exposure.name, 0) for exposure in dirty)
        yield f"  {repeated:,} of {total:,} updates ({repeated / total:.0%})"


def report_json(report: ForgetReport, params: Params) -> dict[str, Any]:
    """Return the report as plain data."""

    def plain(exposure: Exposure) -> dict[str, Any]:
        first = {"epoch": exposure.first.epoch, "update": exposure.first.update} if exposure.first else None
        return {"name": exposure.name, "state": exposure.state, "how": exposure.how, "first": first}

    return {
        "asked": [{"name": query.name, "sha256": query.sha256} for query in report.queries],
        "found": [
            {
                "image_id": copy.image.image_id,
                "split": copy.image.split,
                "path": copy.image.path,
                "sha256": copy.image.sha256,
                "of": copy.of,
                "how": copy.how,
            }
            for copy in report.copies
        ],
        "checkpoints": [plain(exposure) for exposure in report.checkpoints],
        "states": [plain(exposure) for _, exposure in report.states],
        "versions": [
            {**plain(v.exposure), "model": v.model, "version": v.version, "aliases": list(v.aliases)}
            for v in report.versions
        ],
        "champions": [f"{champion.model}/{champion.version}" for champion in report.champions],
    }
