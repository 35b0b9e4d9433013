"""The part of the unattended flow that deletes what is not kept."""

from __future__ import annotations

from vlp_models.contrib.retention.params import RetentionParams
from vlp_models.flows.parts import Part
from vlp_models.params import Params


def prune_parts(params: Params) -> list[Part]:
    if not params.section(RetentionParams).is_on:
        return []
    return [Part(name="prune", kind="prune", command=("prune",))]
