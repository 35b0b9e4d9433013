"""Checkpoints: reading returns what was written, or an error that names the difference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checks import load_model
from safetensors.torch import load_file, save_file
from torch import nn
from toy_dataset import CLASSES, FEATURE_DIM, Toy, make_toy, same_weights

from vlp_models.common.checksums import write_sums
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import (
    CheckpointInfo,
    load_checkpoint_weights,
    read_config,
    write_checkpoint,
)
from vlp_models.params import to_plain


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


def make_info(**more: Any) -> CheckpointInfo:
    facts: dict[str, Any] = {"detector_id": "toy", "feature_dim": FEATURE_DIM, "classes": tuple(CLASSES)}
    facts |= {"family": "tden", "name": "mine", "model_config": {}, "max_text_len": 12, "max_regions": 4}
    return CheckpointInfo(**{**facts, **more})


def write(toy: Toy, directory: Path, **config: Any) -> nn.Module:
    model = toy.model(**config)
    directory.mkdir(exist_ok=True)
    info = make_info(model_config=to_plain(model.config))
    write_checkpoint(directory, nn.ModuleDict({"model": model}), info, toy.tokenizer)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_written_checkpoint_is_read(toy: Toy, tmp_path: Path, tied: bool) -> None:
    model = write(toy, tmp_path, tie_lm_head=tied)
    torch.manual_seed(77)
    loaded, tokenizer, info = load_model(tmp_path)
    assert same_weights(model, loaded)
    assert tokenizer.vocabulary == toy.tokenizer.vocabulary
    assert info == make_info(model_config=to_plain(model.config))
    assert json.loads((tmp_path / "config.json").read_text())["format"] == "vlp-checkpoint/2"


def test_equal_models_give_equal_bytes(toy: Toy, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(toy, tmp_path / name)
    for file in ("model.safetensors", "config.json", "vocab.txt"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path, toy: Toy) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

    module = Tied()
    write_checkpoint(tmp_path, module, make_info(), toy.tokenizer)
    weights = load_file(tmp_path / "model.safetensors")
    assert list(weights) == ["first.weight"]
    other = Tied()
    load_checkpoint_weights(other, weights, tmp_path)
    assert other.second.weight is other.first.weight
    assert torch.equal(other.second.weight, module.first.weight)


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    write_sums(directory)


def test_differences_of_architecture_are_listed(toy: Toy, tmp_path: Path) -> None:
    model = write(toy, tmp_path)
    edit_config(tmp_path, model_config={**to_plain(model.config), "decoder_layers": 2, "tie_lm_head": False})
    with pytest.raises(CheckpointError, match=r"missing: .*cross_decoder\.1\.") as caught:
        load_model(tmp_path)
    assert "word_head.weight" in str(caught.value) or "more" in str(caught.value)
    edit_config(tmp_path, model_config={**to_plain(model.config), "intermediate": 8})
    with pytest.raises(CheckpointError, match=r"\[32, 16\] instead of \[8, 16\]"):
        load_model(tmp_path)
    edit_config(tmp_path, model_config={**to_plain(model.config), "separate_ffn": True})
    with pytest.raises(CheckpointError, match="unexpected"):
        load_model(tmp_path)


def test_damaged_files_are_named(toy: Toy, tmp_path: Path) -> None:
    write(toy, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        load_model(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        load_model(tmp_path)
    save_file({"model.spare": torch.zeros(1)}, weights)
    with pytest.raises(CheckpointError, match="1 unexpected: spare"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        load_model(tmp_path / "nowhere")


def test_sums_of_files_that_may_only_be_read(toy: Toy, tmp_path: Path) -> None:
    """Such as those that DVC has linked to its cache, and copies of them."""
    write(toy, tmp_path)
    for path in tmp_path.iterdir():
        path.chmod(0o444)
    (tmp_path / "SHA256SUMS").unlink()
    code = "import sys; from pathlib import Path; from vlp_models.common.checksums import write_sums as w"
    command = [sys.executable, "-c", f"{code}; w(Path(sys.argv[1]))", str(tmp_path)]
    if os.geteuid() == 0:  # who may write to any file
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv, which takes this right from root, is not installed")
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    subprocess.run(command, check=True)
    assert read_config(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.txt", "tokenizer.json", "SHA256SUMS"])
def test_flipped_bit_is_detected_in_any_file(toy: Toy, tmp_path: Path, name: str) -> None:
    """In the middle of the weights it would otherwise load silently."""
    write(toy, tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged.*rm -r .*dvc checkout"):
        load_model(tmp_path)
