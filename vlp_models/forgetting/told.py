"""What `vlp forget` says: the pictures and how each was found, who saw them, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlp_models.common.workspace import Workspace
from vlp_models.forgetting.forget import Looked
from vlp_models.forgetting.saw import DETECTOR, TOKENIZER, Verdict
from vlp_models.params import Params
from vlp_models.registry.versions import PREVIOUS

WORDS = {"saw": "saw it", "through": "through", "unknown": "can't tell", "never": "never"}


def lines(looked: Looked, params: Params, workspace: Workspace) -> Iterator[str]:
    """For the terminal."""
    yield f"pictures    {len(looked.found)} in the datasets, of {len(looked.asked)} asked for"
    for one in looked.found:
        yield f"  {one.picture.image_id}  {one.picture.split}  {one.picture.path}  ({one.how}; of {one.of})"
    for asked in looked.asked:
        if all(one.of != asked.name for one in looked.found):
            yield f"  {asked.name}: in no dataset; it can't come in from now on"
    yield "checkpoints"
    for told in looked.checkpoints:
        yield _line(told)
    if looked.states:
        yield "states of trainings"
        for _, told in looked.states:
            yield _line(told)
    if looked.versions:
        yield "registered versions"
        for version in looked.versions:
            aliases = f"  [{', '.join(version.aliases)}]" if version.aliases else ""
            yield _line(version.verdict) + aliases
    yield from _champions(looked)
    yield from _again(looked, params)


def _line(told: Verdict) -> str:
    return f"  {WORDS[told.state]:10}  {told.name}: {told.how}"


def _champions(looked: Looked) -> Iterator[str]:
    for one in looked.champions:
        said = "saw it" if one.verdict.state in ("saw", "through") else "may have seen it"
        yield f"CHAMPION    {one.model} version {one.version} {said}, and is still served"
        before = next((v for v in looked.versions if v.model == one.model and PREVIOUS in v.aliases), None)
        if before is not None and before.verdict.clean:
            yield f"            `vlp rollback {one.task}`: version {before.version}, the champion before, never did"
        else:
            yield "            `--withdraw-versions` takes its aliases off; a version made again is then promoted"
        yield f"            as a first one: `vlp run`, `vlp promote {one.task}`"


def _again(looked: Looked, params: Params) -> Iterator[str]:
    """What must be made again, and from where."""
    known = {f"{kind}/{run}" for kind in ("pretrain", "finetune") for run in getattr(params, kind)}
    dirty = [told for told in looked.checkpoints if not told.clean]
    if not dirty:
        return
    yield "to be made again, once it is out of the data (`--retrain`, or `vlp run`)"
    for told in dirty:
        if told.name in (DETECTOR, TOKENIZER):
            yield f"  {told.name}"
        elif told.name in known:
            yield f"  {told.name}, from {last_clean(told.name, looked, params) or 'the beginning'}"
        else:
            yield f"  {told.name}: no run of params.yaml; delete checkpoints/{told.name}"


def last_clean(run: str, looked: Looked, params: Params) -> str:
    """The last checkpoint on the way to a run that never saw it; empty: there is none."""
    for start in params.chain(run)[1:]:
        if looked.asks.of(start).clean:
            return start
    return ""


def plain(looked: Looked, params: Params) -> dict[str, Any]:
    """The same as data."""

    def of(told: Verdict) -> dict[str, Any]:
        sight = {"epoch": told.sight.epoch, "update": told.sight.update} if told.sight else None
        return {"name": told.name, "state": told.state, "how": told.how, "sight": sight}

    return {
        "asked": [{"name": one.name, "sha256": one.sha256} for one in looked.asked],
        "found": [
            {
                "image_id": one.picture.image_id,
                "split": one.picture.split,
                "path": one.picture.path,
                "sha256": one.picture.sha256,
                "of": one.of,
                "how": one.how,
            }
            for one in looked.found
        ],
        "checkpoints": [of(told) for told in looked.checkpoints],
        "states": [of(told) for _, told in looked.states],
        "versions": [
            {**of(one.verdict), "model": one.model, "version": one.version, "aliases": list(one.aliases)}
            for one in looked.versions
        ],
        "champions": [f"{one.model}/{one.version}" for one in looked.champions],
    }
