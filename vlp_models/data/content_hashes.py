"""data/contents: what the shards hold, as hashes, and which of them a run goes by.

Shards are packed anew whenever a dataset or a kind of model is added. What a run reads of them mostly stays, so a run
depends on the hashes of that: of its view, in the datasets that it learns from, with regions, pixels or neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace

Kind = Literal["regions", "pixels", "texts"]  # what of an image is read; texts: nothing
CONTENTS = "data/contents"  # below it: a folder of each kind that a model is of


def facts_file(kind: Kind) -> str:
    """What such a model must know before its first step."""
    return f"{kind}/facts.json"


def learnt_file(kind: Kind, view: str, sources: Collection[str]) -> str:
    """What a run learns from and is validated on.

    Args:
        sources: datasets; empty: all. Of one dataset there is a file of its own; several go by that of all.
    """
    name = f"of/{next(iter(sources))}" if len(sources) == 1 else "all"
    return f"{kind}/learnt/{view}/{name}.json"


def held_out_file(kind: Kind, view: str) -> str:
    """The test split."""
    return f"{kind}/held_out/{view}.json"


def no_longer_here(workspace: Workspace, inputs: Mapping[str, str]) -> list[str]:
    """Of the data that a checkpoint says it learned from, what is not here, or is other data now.

    Args:
        inputs: `provenance.inputs` of its config.json. Checkpoints of earlier versions name the shards' indexes.
    """
    here = {
        name: workspace.shards / name if name.startswith("index-") else workspace.root / name
        for name in learned_from(inputs)
    }
    return [name for name, path in here.items() if not path.exists() or hash_file(path) != inputs[name]]


def learned_from(inputs: Mapping[str, str]) -> list[str]:
    """The names among a checkpoint's inputs that stand for data of the shards."""
    return [name for name in inputs if name.startswith((f"{CONTENTS}/", "index-"))]
