"""The last part of the unattended flow."""

from __future__ import annotations

from vlp_models.flows.parts import REFUSED, Part
from vlp_models.params import Params


def commit_parts(params: Params) -> list[Part]:
    if not params.flow.commit:
        return []
    return [Part(name="commit", kind="commit", command=("commit",), refusal=REFUSED)]
