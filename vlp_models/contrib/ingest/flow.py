"""The part of the unattended flow that ingests new data."""

from __future__ import annotations

from pathlib import Path

from vlp_models.flows.parts import NO_INBOX, Part
from vlp_models.params import Params


def ingest_part(params: Params) -> Part:
    inbox, fetch = params.ingest.inbox, params.ingest.fetch

    def evidence(root: Path) -> str | None:
        # Only the inbox itself can be absent; data to fetch may come at any time.
        return None if inbox and not fetch and not (root / inbox).exists() else ""

    return Part(name="ingest", kind="ingest", command=("ingest",), evidence=evidence, nothing=NO_INBOX)
