"""The keys of research formats in params.yaml, and the way to a dataset whose folder is missing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import params_class, source_params
from vlp_models.errors import ParamsError
from vlp_models.params import DatasetParams, SourceParams, load_params
from vlp_models.pipeline.dvc.external import explain_roots

PARAMS = Path(__file__).parents[3] / "params.yaml"


def test_formats_of_one_reader_share_their_keys() -> None:
    assert params_class("sbu") is SourceParams and params_class("nlvr") is params_class("nlvr2")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "nlvr", "val_fraction": 0.1}, "`data.x.val_fraction`: the format nlvr takes its splits from its"),
        ({"format": "nlvr2", "val_fraction": 0.1}, "remove the key (name directories of train for val in data.x.valid"),
        ({"format": "vcr", "group_near_duplicates": True}, "`data.x.group_near_duplicates`: the format vcr takes its"),
    ],
    ids=["nlvr", "nlvr2", "vcr"],
)
def test_a_reader_that_divides_no_split_names_where_val_comes_from(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(message)):
        source_params("x", DatasetParams.of(root=".", **keys))


def test_missing_nlvr_names_where_to_get_it(tmp_path: Path) -> None:
    nlvr = DatasetParams.of(format="nlvr", root="data/raw/nlvr")
    (sentence,) = explain_roots(dataclasses.replace(load_params(PARAMS), data={"mine": nlvr}), tmp_path)
    assert sentence.startswith("params.yaml: `data.mine.root: data/raw/nlvr`: no such folder; ")
    assert sentence.endswith(
        "clone https://github.com/lil-lab/nlvr and name its `nlvr` folder with `vlp use --set data.mine.root=FOLDER`"
    )
