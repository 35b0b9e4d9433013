"""The sections of params.yaml about new data: what is taken in, and how far it may differ from what was learnt."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import Field

from vlp_models.errors import ParamsError
from vlp_models.params.ranges import NonNegativeFloat, NonNegativeInt, Share


@dataclass(frozen=True, kw_only=True)
class IngestParams:
    """`vlp ingest`: from drops of image-caption pairs to batches of a versioned dataset."""

    inbox: str = "data/inbox"  # where drops arrive; empty: nothing is taken in
    dataset: str = "data/accepted"  # grows by one folder per accepted drop
    fetch: list[str] = field(default_factory=list)  # .dvc files to update or pull; their folders are drops
    settle_seconds: NonNegativeFloat = 300.0  # a drop is finished once nothing in it has changed for so long
    # bits (of 64) in which two perceptual hashes may differ and still be one picture; -1: exact only
    max_hash_distance: Annotated[int, Field(ge=-1, le=32)] = 4
    max_bad_fraction: Share = 0.05  # of a drop's pairs; above it the drop stays where it is
    processes: NonNegativeInt = 0  # 0: one per CPU
    track: bool = True  # `dvc add` each batch

    def __post_init__(self) -> None:
        path = PurePosixPath(self.dataset)
        if path == PurePosixPath():
            raise ParamsError("params.yaml: `ingest.dataset`: name a folder of its own, such as data/accepted")
        if self.track and path.is_absolute():
            raise ParamsError(
                f"params.yaml: `ingest.dataset: {self.dataset}` is absolute; write it relative to the project. "
                "A folder outside, where DVC can't version it, takes `ingest.track: false`"
            )
        if self.track and ".." in path.parts:
            raise ParamsError(
                f"params.yaml: `ingest.dataset: {self.dataset}` lies outside the project, where DVC can't "
                "version it; choose a folder inside, or set `ingest.track: false`"
            )


@dataclass(frozen=True, kw_only=True)
class DriftParams:
    """`vlp drift`: limits of what is tolerated; each measure is described in data/drift.py."""

    gate: bool = False  # true: a drift makes `vlp drift` exit with 4
    run: str = ""  # the pretraining run whose data new pairs are compared with; empty: the first one
    max_length_psi: NonNegativeFloat = 0.2
    max_vocabulary_divergence: NonNegativeFloat = 0.1
    max_unknown_words: Share = 0.05
    max_resolution_psi: NonNegativeFloat = 0.2
    max_aspect_psi: NonNegativeFloat = 0.2
    min_embedding_p: Share = 0.01
    images: NonNegativeInt = 256  # new images whose embeddings are compared; 0: none
    seed: NonNegativeInt = 1
