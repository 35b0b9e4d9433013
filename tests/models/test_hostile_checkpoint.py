"""Malicious checkpoints and bundles are refused before anything of their size is allocated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checks import load_model
from toy_dataset import make_toy

from vlp_models.common.checksums import SUMS
from vlp_models.errors import CheckpointError, VLPError
from vlp_models.models.checkpoint import CheckpointInfo, build_from_config, read_config, write_checkpoint
from vlp_models.params import to_plain
from vlp_models.serving.bundle import read_features_config

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toy")
    toy = make_toy(root)
    model = toy.model()
    directory = root / "checkpoint"
    directory.mkdir()
    info = CheckpointInfo(
        family="tden",
        name="tden",
        model_config=to_plain(model.config),
        max_text_len=12,
        max_regions=8,
        detector_id="toy",
        feature_dim=6,
        classes=("background", "circle", "square", "star"),
    )
    module = torch.nn.ModuleDict({"model": model})
    write_checkpoint(directory, module, info, toy.tokenizer)
    return directory


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["model_config"].update(hidden=10**9), "`model_config.hidden` is 1000000000; at most"),
        (lambda c: c["model_config"].update(sentence_layers=10**6), "`model_config.sentence_layers`"),
        (lambda c: c["model_config"].update(hidden=20_000, heads=1), "describes .* weights, but model.safetensors has"),
        (lambda c: c["model_config"].update(heads=0), r"`config\.heads: 0` should be greater than 0"),
        (
            lambda c: c["model_config"].update(hidden=-16),
            r"`config\.hidden: -16` should be greater than 0",
        ),
        (lambda c: c["model_config"].update(dropout=float("nan")), "`model_config.dropout` is nan"),
        (lambda c: c.update(model_config=[]), "`model_config` is"),
        (lambda c: c.update(max_text_len="12"), "`max_text_len` is '12'"),
        (lambda c: c.update(feature_dim=-1), "`feature_dim` is negative"),
        (lambda c: c.update(classes=[[]]), "`classes` are names"),
        (lambda c: c.update(family=None), "`family` is None"),
        (lambda c: c.pop("max_text_len"), "`max_text_len` is missing"),
        (lambda c: c.update(format="other/9"), ".*reads vlp-checkpoint/2"),
        (lambda c: c.update(family="gpt"), ".*unknown model family `gpt`"),
        (lambda c: c.update(feature_dim=7), ".*feature_dim"),
        (lambda c: c["model_config"].update(hiden=3), ".*did you mean `hidden`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_config_is_refused(change: Change, words: str, sound: Path, tmp_path: Path) -> None:
    directory = tmp_path / "forged"
    shutil.copytree(sound, directory)
    (directory / SUMS).unlink()  # a forged file comes with a forged sum
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config.json: {words}"):
        load_model(directory)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "9" * 5000 + "}", '{"format": ', "\xff", "[]"])
def test_config_that_is_not_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json: "):
        read_config(tmp_path)


def test_checking_the_size_first_changes_no_weight(sound: Path) -> None:
    """Building the meta model draws nothing from the generator of the weights."""
    from vlp_models.data.tokenizer import Tokenizer
    from vlp_models.models import DataFacts, build_model

    info, tokenizer = read_config(sound), Tokenizer.load(sound)
    torch.manual_seed(4)
    made = build_from_config(info, tokenizer, sound)
    torch.manual_seed(4)
    facts = DataFacts(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, feature_dim=6, num_classes=4)
    plain = build_model(info.family, info.model_config, facts)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    "made",
    [
        {"source": "detector"},
        {"source": ["detector"], "min_score": 0.2, "max_regions": 16},
        {"source": "detector", "min_score": "0.2", "max_regions": 16},
        {"source": "detector", "min_score": 0.2, "max_regions": 10**9},
        {"source": "detector", "min_score": 0.2, "max_regions": 0},
        {"source": "detector", "min_score": 0.2, "max_regions": 16, "content": "../x"},
        [],
    ],
    ids=str,
)
def test_bundle_with_invalid_feature_settings_is_refused(made: Any, tmp_path: Path) -> None:
    (tmp_path / "features.json").write_text(json.dumps(made))
    with pytest.raises(VLPError, match=r"features.json"):
        read_features_config(tmp_path)
