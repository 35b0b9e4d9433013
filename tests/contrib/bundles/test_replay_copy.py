"""`vlp replay --level train`: what the copy of the project has, what is refused at once, and where the copy is."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.common import io
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bundles import replay
from vlp_models.contrib.bundles.run_bundle import RunBundle, open_bundle
from vlp_models.errors import DataError

BUNDLE = Path(__file__).parents[3] / "docs" / "results" / "runs" / "scenes-tden-vqa.run.zip"
PLUGIN = "from vlp_models.metrics.score import mean_score\n\n\ndef measure(examples):\n    return []\n"
INPUTS = {
    "plugins/shade.py": PLUGIN,
    "plugins/names.txt": "",
    "vocab/words.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\ncat\n",
    "checkpoints/imported/bert/model.safetensors": "",
    "data/raw/pairs/pairs.csv": "image,caption\n",
    "data/withdrawn.jsonl": "",
    "data/regions/part.tsv": "",
}
Started = list[tuple[Path, tuple[str, ...]]]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for name, content in INPUTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / ".work").mkdir()
    return Workspace(tmp_path)


def make_bundle(changes: Callable[[dict[str, Any]], None] = lambda raw: None) -> RunBundle:
    """Return the demo's bundle with a plugin and local inputs in its params.yaml."""
    bundle = open_bundle(BUNDLE)
    raw = yaml.safe_load(bundle.files["params.yaml"])
    raw["plugins"] = {"metrics": {"shade": "plugins.shade:measure"}}
    raw["tokenizer"] |= {"source": "vocab", "vocab": "vocab/words.txt"}
    raw["models"]["tden"]["text_init"] = "checkpoints/imported/bert"
    raw["data"]["pairs"] = {"format": "pairs", "root": "data/raw/pairs", "pairs": "pairs.csv"}
    raw["features"] |= {"source": "tsv", "path": "data/regions"}
    changes(raw)
    return dataclasses.replace(bundle, files={**bundle.files, "params.yaml": yaml.safe_dump(raw).encode()})


class Ended(BaseException):
    """Raised in place of the training."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return the commands that a replay starts in its copy, without their work; the training ends it."""
    started: Started = []

    def vlp(folder: Path, *words: str) -> None:
        started.append((folder, words))
        if words[0] == "init":
            for name in ("packages/vlp-flows.json", "data/README.md", "params.yaml"):
                (Path(words[1]) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(words[1]) / name).write_text("")
        if words[0] == "run":
            found = [name for name in INPUTS if (folder / name).read_text() == INPUTS[name]]
            raise Ended(found, (folder / "plugins").is_symlink())

    monkeypatch.setattr(replay, "_vlp", vlp)
    return started


def test_copy_has_plugins_and_all_that_params_name(workspace: Workspace, commands: Started) -> None:
    with pytest.raises(Ended) as ended:
        replay.replay(make_bundle(), "train", workspace)
    assert ended.value.args == (list(INPUTS), False)
    assert [words[0] for _, words in commands] == ["init", "use", "run"]
    assert {name: (workspace.root / name).read_text() for name in INPUTS} == INPUTS


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("vocab", "tokenizer.vocab: vocab/words.txt"),
        ("checkpoints", "models.tden.text_init: checkpoints/imported/bert"),
        ("data/raw", "data.pairs.root: data/raw/pairs"),
        ("data/regions", "features.path: data/regions"),
    ],
)
def test_missing_input_is_refused_before_the_run(
    removed: str, message: str, workspace: Workspace, commands: Started
) -> None:
    (workspace.root / removed).rename(workspace.root / "elsewhere")
    with pytest.raises(DataError, match=message) as caught:
        replay.replay(make_bundle(), "train", workspace)
    assert "in a project that has what the run reads" in str(caught.value)
    assert [words[0] for _, words in commands] == ["init"]


@pytest.mark.parametrize(("root", "message"), [("../pairs", "outside of the project"), (".", "every project has it")])
def test_data_that_a_copy_cannot_have_is_refused(
    root: str, message: str, workspace: Workspace, commands: Started
) -> None:
    def change(raw: Mapping[str, Any]) -> None:
        raw["data"]["pairs"]["root"] = root

    with pytest.raises(DataError, match=message):
        replay.replay(make_bundle(change), "train", workspace)


def test_dataset_within_the_folder_of_another_is_linked_with_it(workspace: Workspace, commands: Started) -> None:
    def change(raw: Mapping[str, Any]) -> None:
        raw["data"]["more"] = {**raw["data"]["pairs"], "root": "data/raw"}
        raw["data"]["own"] = {**raw["data"]["pairs"], "root": "plugins"}

    with pytest.raises(Ended) as ended:
        replay.replay(make_bundle(change), "train", workspace)
    assert ended.value.args[0] == list(INPUTS)


def test_copies_are_in_the_workspace_and_those_of_killed_replays_are_removed(
    workspace: Workspace, commands: Started
) -> None:
    partial = workspace.root / ".work" / ".replay.partial"
    killed = partial / f"{io._machine()}-99999999-00000000" / "project"  # of a process that is not running any more
    killed.mkdir(parents=True)
    with pytest.raises(Ended):
        replay.replay(make_bundle(), "train", workspace)
    assert commands[0][0].parent == partial and not partial.exists()


def test_copies_of_a_folder_without_a_workspace_are_in_a_temporary_folder_of_this_user(
    workspace: Workspace, commands: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace.root / ".work").rmdir()
    monkeypatch.setattr(tempfile, "tempdir", str(workspace.root / "tmp"))
    (workspace.root / "tmp").mkdir()
    with pytest.raises(Ended):
        replay.replay(make_bundle(), "train", workspace)
    own = workspace.root / "tmp" / f"vlp-replay-{os.getuid()}"
    assert commands[0][0].parent.parent == own and own.stat().st_mode & 0o777 == 0o700 and not list(own.iterdir())
    own.rename(workspace.root / "other")
    own.symlink_to(workspace.root / "other")
    with pytest.raises(DataError, match="not a folder of yours"):
        replay.replay(make_bundle(), "train", workspace)
