"""A line of a model card: what differs between a version and the champion of its task when it is registered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vlp_models.common.packages import recorded_packages
from vlp_models.contrib.bisect.differences import Difference, Origin, find_cached, find_differences, read_origin
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.params.load import read_yaml
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, read_stages

NAMED = 3  # params, and code files, that are named; of more, the number is stated


def card_fact(params: Params, root: Path, run: str) -> dict[str, str]:
    """Return a line of a model card: how the run differs from the task's champion; none without a champion."""
    from vlp_models.registry.client import connect, model_name
    from vlp_models.registry.versions import CHAMPION, find_version_by_alias

    client = connect(params.tracking, root)
    champion = find_version_by_alias(client, model_name(params.tracking, params.finetune[run].task), CHAMPION)
    if champion is None:
        return {}
    now = Origin(
        target=f"evaluate@{run}",
        stages=read_stages(root / LOCK_FILE) or {},
        params=read_yaml(root / "params.yaml"),
        packages=recorded_packages(root),
    )
    try:
        text = summarize(find_differences(read_origin(client, champion), now, find_cached(root)))
    except DataError as error:  # an old champion's data may have left the cache
        text = f"unknown: {error}"
    return {f"since the champion (version {champion.version})": text}


def summarize(differences: Sequence[Difference]) -> str:
    """Return what may have changed the scores in a sentence: rows, params, code files, packages."""
    read = [difference for difference in differences if difference.stages]
    return "; ".join(_parts(read)) or "nothing that the run reads"


def _parts(differences: Sequence[Difference]) -> Iterator[str]:
    of_kind = {kind: [d for d in differences if d.kind == kind] for kind in ("data", "params", "code", "packages")}
    yield from (f"{d.name}: {d.before} -> {d.after}" for d in of_kind["data"])
    for kind, noun in (("params", "params"), ("code", "code files"), ("packages", "packages")):
        changed = of_kind[kind]
        if 0 < len(changed) <= NAMED:
            yield from (f"{d.name}: {d.before} -> {d.after}" for d in changed)
        elif changed:
            yield f"{len(changed)} {noun}"
