"""What new pairs must not repeat: the pictures that any dataset of params.yaml is tested on."""

from __future__ import annotations

from pathlib import Path

from vlp_models.common.device import cpu_count
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates.hashes import HashJob, hash_all
from vlp_models.data.formats import read_source
from vlp_models.ingest.index import HashIndex
from vlp_models.params import IngestParams, Params


def protect(index: HashIndex, params: Params, workspace: Workspace, *, evaluates: bool) -> None:
    """Brings the index up to date with every evaluation split of every dataset, read from the datasets themselves.

    Args:
        evaluates: the drop names pairs to test on, which must not be in any training split either.

    Raises:
        DataError: a dataset is not there: without it nobody can say that nothing of it leaks.
    """
    own = Path(params.ingest.dataset)
    others = {name: source for name, source in params.data.items() if Path(source.root) != own}
    index.forget_sources(others)
    job = HashJob.in_place(params.validate)
    for name, source in others.items():
        whole = evaluates or index.knows_train(name)
        rows = read_source(name, source, workspace.root)["images"]
        listed = [
            (row["image_id"], row["split"] or "", row["path"]) for row in rows if whole or row["split"] != "train"
        ]
        unreadable = index.sync_source(name, listed, lambda paths: hash_all(paths, job, processes(params.ingest)))
        if unreadable:
            print(f"data.{name}: {unreadable:,} of {len(listed):,} pictures can't be read, so nothing is told of them")


def processes(p: IngestParams) -> int:
    return p.processes or cpu_count()
