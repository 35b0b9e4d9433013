"""The last part of the unattended flow."""

from __future__ import annotations

from vlp_models.contrib.commit.commit import REFUSED
from vlp_models.flows.parts import Part
from vlp_models.params import Params


def commit_parts(params: Params) -> list[Part]:
    if not params.flow.commit:
        return []
    return [Part(name="commit", kind="commit", command=("commit",), refusal=REFUSED)]
