"""The note on runs that are named as seeds of one variant and have other settings."""

from __future__ import annotations

import dataclasses

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.data_notes.variants import explain_variants
from vlp_models.params import load_params


def test_seeds_of_one_variant_must_have_equal_settings() -> None:
    params = load_params()
    first = params.finetune["tden-captioning"]
    second = dataclasses.replace(first, variant="tden-captioning", seed=2)
    runs = {**params.finetune, "second": second}
    assert explain_variants(dataclasses.replace(params, finetune=runs), Workspace()) == []
    runs["second"] = dataclasses.replace(second, max_epochs=9)
    (sentence,) = explain_variants(dataclasses.replace(params, finetune=runs), Workspace())
    assert "tden-captioning (4 epochs), tden-captioning (9 epochs)" in sentence
