"""Weights of other programs: only tensors are read, and nothing in a file is executed or fills the memory."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vlp_models.common.state_dicts import read_state_dict
from vlp_models.errors import CheckpointError

WAY_OUT = r"(download it again, or )?name a file with the model's state_dict\(\)"


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def bomb(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", bytes(2**22))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "absent.pth": (lambda file: None, "no such file"),
    "code.pth": (lambda file: torch.save({"model": {"a": Hostile()}}, file), "holds more than tensors and plain val"),
    "list.pth": (lambda file: torch.save([torch.zeros(1)], file), rf"not a state dict .*; {WAY_OUT}"),
    "number.pth": (lambda file: torch.save({"a": 1}, file), "not a state dict"),
    "nothing.pth": (lambda file: torch.save({}, file), "not a state dict"),
    "sparse.pth": (lambda file: torch.save({"a": torch.eye(2).to_sparse()}, file), "not a state dict .*dense tensors"),
    "view.pth": (lambda file: torch.save({"a": torch.zeros(1).expand(2**40)}, file), "declares .* bytes of tensors"),
    "bomb.pth": (bomb, "file is .* GiB; the limit is"),
    "large.pth": (lambda file: file.write_bytes(bytes(2**21 + 1)), "file is .* GiB; the limit is"),
    "empty.pth": (lambda file: file.touch(), rf"the file is empty; {WAY_OUT}"),
    "dot.pt": (lambda file: file.write_bytes(b"."), rf"damaged, .*\(starts with b'\.'; .*; {WAY_OUT}"),
    "text.bin": (lambda file: file.write_bytes(b"hello"), rf"damaged, .*\(starts with b'hello'; .*; {WAY_OUT}"),
    "text.safetensors": (lambda file: file.write_bytes(b"hello"), "damaged, or not a weights file"),
    "plain.pth": (lambda file: file.write_bytes(pickle.dumps({"a": 1})), "damaged, or not a weights file"),
}


@pytest.mark.parametrize("name", FILES)
def test_anything_but_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vlp_models.common.state_dicts.MAX_BYTES", 2**21)
    write, message = FILES[name]
    write(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}: {message}") as error:
        read_state_dict(tmp_path / name)
    assert "weights_only" not in str(error.value) and not Path("executed").exists()


def test_wrapped_weights_lose_their_wrappers(tmp_path: Path) -> None:
    weights = {"a.weight": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)}
    save_file(weights, tmp_path / "plain.safetensors")
    wrapped = {"model": {f"module.{name}": tensor for name, tensor in weights.items()}, "iteration": 7, "optimizer": {}}
    torch.save(wrapped, tmp_path / "wrapped.pth")
    torch.save({"state_dict": weights}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("plain.safetensors", "wrapped.pth", "old.pth"):
        found = read_state_dict(tmp_path / name)
        assert found.keys() == weights.keys() and all(torch.equal(found[key], weights[key]) for key in weights)
