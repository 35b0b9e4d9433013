"""A BERT of another width than the model is named by `vlp use`, before features are extracted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bert_folders import write_bert

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.public_weights.widths import explain_widths
from vlp_models.params import load_params

ROOT = Path(__file__).parents[3]


def test_another_width_is_named_with_the_setting(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert", hidden_size=64, num_attention_heads=4)
    params = load_params(ROOT / "params.yaml")  # a TDEN of width 128
    tden = dataclasses.replace(params.models["tden"], text_init="bert")
    (sentence,) = explain_widths(dataclasses.replace(params, models={"tden": tden}), Workspace(tmp_path))
    assert "`models.tden.text_init: bert` has states of 64 numbers" in sentence
    assert "`vlp use --set models.tden.config.hidden=64`" in sentence
    fitting = dataclasses.replace(tden, config={**tden.config, "hidden": 64})
    missing = dataclasses.replace(tden, text_init="none")
    others = dataclasses.replace(params, models={"a": fitting, "b": missing, "c": params.models["tden"]})
    assert explain_widths(others, Workspace(tmp_path)) == []
