"""The section of params.yaml that says who makes features and shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlp_models.params.ranges import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class ClusterParams:
    """Without an address, processes of this machine; with one, a running Dask or Ray cluster (flows/cluster.py).

    The cluster's machines see the project's folder under the same path, and have this package installed.
    """

    kind: Literal["dask", "ray"] = "dask"
    address: str = ""  # e.g. tcp://scheduler:8786 (dask) or ray://head:10001 (ray)
    # Without an address, processes of this machine; 0: for features one a CPU, for shards, which wait for the disk, 1.
    # With an address, how many parts are under way at once.
    workers: NonNegativeInt = 0
