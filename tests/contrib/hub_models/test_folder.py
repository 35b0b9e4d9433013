"""Folders of other models: local ones, and those of the Hub through the real client and a stand-in on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import COMMIT, REPOSITORY, HubServer, hub_server
from safetensors.torch import save, save_file

from vlp_models.contrib.hub_models.folder import find_folder, pin, read_config, read_settings, read_weights
from vlp_models.errors import CheckpointError, DataError, ParamsError

ROOT = Path(__file__).parents[3]
WHERE = "models.toy.init"
FIND = """
import sys
from pathlib import Path
from vlp_models.contrib.hub_models.folder import find_folder, pin
from vlp_models.errors import VLPError
try:
    source = pin(sys.argv[1], "models.toy.init") if sys.argv[3:] else sys.argv[1]
    print(source)
    print(find_folder(source, Path(), "models.toy.init", weights=sys.argv[2] == "weights"))
except VLPError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        shards = {"model-00001-of-00002.safetensors": {"a": torch.ones(2)}, "model-00002-of-00002.safetensors": {}}
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        server.files = {name: save(weights) for name, weights in shards.items()}
        server.files |= {
            "config.json": b'{"model_type": "toy"}',
            "model.safetensors.index.json": json.dumps(index).encode(),
        }
        server.files |= {"modeling_toy.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "README.md": b"# Toy"}
        yield server


def find(hub: HubServer, cache: Path, source: str, *arguments: str, **variables: str) -> list[str]:
    """Return source and folder, or the error, of a process of its own: the client reads its environment once."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FIND, source, *arguments]
    done = subprocess.run(command, env=inherited | settings | variables, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_without_code_and_pickles(hub: HubServer, tmp_path: Path) -> None:
    """Its settings first; the weights when they are needed; afterwards without a network."""
    pinned = f"hf://{REPOSITORY}@{COMMIT}"
    source, _ = find(hub, tmp_path, f"hf://{REPOSITORY}", "settings", "pin")
    assert source == pinned
    assert set(hub.downloaded) == {"config.json"}
    folder = Path(find(hub, tmp_path, pinned, "weights")[-1])
    assert set(hub.downloaded) == set(hub.files) - {"modeling_toy.py", "pytorch_model.bin", "README.md"}
    assert read_config(folder, ["toy"], "a toy") == {"model_type": "toy"}
    assert read_weights(folder)["a"].tolist() == [1, 1]
    hub.downloaded.clear()
    assert find(hub, tmp_path, pinned, "weights", HF_HUB_OFFLINE="1")[-1] == str(folder)
    assert not hub.downloaded


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_sentence(hub: HubServer, tmp_path: Path) -> None:
    pinned = f"hf://{REPOSITORY}@{COMMIT}"
    hub.damaged["config.json"] = hub.files["config.json"].replace(b"toy", b"boy")
    assert "does not have the hash" in find(hub, tmp_path / "one", pinned, "settings")[-1]
    hub.damaged.clear()
    for source, variables, words in (
        ("hf://owner/other@" + COMMIT, {}, "no such model"),
        (f"hf://{REPOSITORY}@{'b' * 40}", {}, "no such revision"),
        (pinned, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ):
        message = find(hub, tmp_path / "two", source, "settings", **variables)[-1]
        assert message.startswith(f"DataError: params.yaml: `{WHERE}: {source}`: ")
        assert words in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf://name", "write it as hf://OWNER/NAME@COMMIT"),
        ("hf://owner/name@main/../x", "write it as hf://OWNER/NAME@COMMIT"),
        ("hf://owner/name", "it names no commit"),
        ("hf://owner/name@main", "`main` is not a commit and may move"),
        ("hf://owner/name@" + "a" * 39, "is not a commit and may move"),
    ],
)
def test_a_name_without_a_commit_is_refused(source: str, words: str) -> None:
    with pytest.raises(ParamsError, match=words):
        find_folder(source, Path(), WHERE)


def test_a_folder_that_is_no_such_model_is_refused(tmp_path: Path) -> None:
    assert pin("models/toy", WHERE) == "models/toy"
    with pytest.raises(DataError, match=r"models\.toy\.init: toy`: no such folder"):
        find_folder("toy", tmp_path, WHERE)
    folder = tmp_path / "toy"
    folder.mkdir()
    assert find_folder("toy", tmp_path, WHERE) == folder
    with pytest.raises(CheckpointError, match="no such file; copy the whole folder"):
        read_config(folder, ["toy"], "a toy")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="`model_type` is 'bert'; expected a toy"):
        read_config(folder, ["toy"], "a toy")
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_settings(folder)
    with pytest.raises(CheckpointError, match=r"contains no model\.safetensors"):
        read_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle"):
        read_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"names \.\./secret\.safetensors"):
        read_weights(folder)
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    damaged = (folder / "model.safetensors").read_bytes()[:-4]
    (folder / "model.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="damaged"):
        read_weights(folder)
