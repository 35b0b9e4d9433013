"""The exposure of a resume state follows from the provenance next to it, whatever params.yaml has now."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from toy_dataset import write_workspace

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.data_versions import DataVersion, DataVersions, _committed
from vlp_models.contrib.forgetting.exposure import (
    TOKENIZER,
    CheckpointExposures,
    Exposure,
    Leftover,
    leftovers,
    resume_state_exposure,
)
from vlp_models.contrib.forgetting.inputs import load_provenance
from vlp_models.contrib.forgetting.replay import TrainingRun
from vlp_models.data.shards.contents import trained_on_inputs
from vlp_models.data.shards.dataset import ShardDataset, read_manifest
from vlp_models.params import Params, StreamParams, to_plain
from vlp_models.pipeline.lineage import PROVENANCE
from vlp_models.pipeline.stages import pretrain

RUN = "pretrain/tden"


class Here:
    """The data of the workspace, in which the image has one id."""

    def __init__(self, workspace: Workspace, image: str) -> None:
        self.workspace = workspace
        self.version = DataVersion(shards=workspace.shards, images=frozenset({image}), complete=True)

    def of(self, inputs: Any) -> DataVersion:
        """Return the workspace's data if its hashes equal the recorded ones."""
        names = trained_on_inputs(inputs)
        assert names and all(inputs[name] == hash_path(self.workspace.root / name) for name in names)
        return self.version


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, Workspace]:
    root = tmp_path_factory.mktemp("trained")
    params, workspace = write_workspace(root), Workspace(root)
    pretrain.run(params, workspace, "tden")
    made = {"detector_id": read_manifest(workspace.shards).detector_id, "params": {"source": "tsv"}}
    write_json(workspace.features / "manifest.json", made)
    return params, workspace


def ask(params: Params, workspace: Workspace, image: str, folder: Path, step: int) -> Exposure:
    clean = {TOKENIZER: Exposure(name=TOKENIZER, state="clean", how="")}
    data = cast(DataVersions, Here(workspace, image))
    checkpoints = CheckpointExposures(params=params, workspace=workspace, data=data, _cache=clean)
    return resume_state_exposure(Leftover(path=folder / f"step-{step:08d}.ckpt", run=RUN, step=step), checkpoints)


def test_exposure_uses_the_settings_of_the_training(trained: tuple[Params, Workspace]) -> None:
    params, workspace = trained
    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    p = params.pretrain["tden"]
    image, others = "", replace(params, pretrain={"tden": replace(p, seed=p.seed + 1, max_steps=1)})
    for image in ShardDataset(workspace.shards, "train", "captions").image_ids():
        run = TrainingRun.from_settings(RUN, to_plain(p))
        first = run.find_first_exposure(workspace.shards, {image}, stream=StreamParams(), regions=True)
        assert first is not None
        if first.update > 1:
            break
    for asked in (params, others, replace(params, pretrain={})):
        assert ask(asked, workspace, image, folder, first.update).state == "exposed"
        before = ask(asked, workspace, image, folder, first.update - 1)
        assert (before.state, before.how) == (
            "clean",
            f"update {first.update - 1}; the run first uses it in update {first.update}",
        )


def test_missing_or_damaged_provenance_is_unknown(trained: tuple[Params, Workspace], tmp_path: Path) -> None:
    params, workspace = trained
    found = ask(params, workspace, "x", workspace.root / ".work" / "pretrain-tden" / "earlier", 3)
    assert found.state == "unknown" and PROVENANCE in found.how
    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    for damaged in ('{"provenance": {}, "detector_id": ""}', '{"provenance": 3, "detector_id": ""}', "{", "[]"):
        (tmp_path / PROVENANCE).write_text(damaged)
        assert ask(params, workspace, "x", tmp_path, 3).state == "unknown", damaged
    (folder / "step-00000003.ckpt").touch()
    assert [left.run for left in leftovers(workspace)] == [RUN]


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write the same provenance with a change into another folder."""
    record = read_json(folder / PROVENANCE)
    change(record["provenance"])
    write_json(to / PROVENANCE, record)
    return to


def test_changed_inputs_are_unknown(trained: tuple[Params, Workspace], tmp_path: Path) -> None:
    params, workspace = trained
    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    assert ask(params, workspace, "nobody's", folder, 3).state == "clean"
    for name in ("start", "tokenizer"):
        other = changed(folder, tmp_path, lambda provenance, name=name: provenance["inputs"].update({name: "0" * 64}))  # type: ignore[misc]
        assert ask(params, workspace, "nobody's", other, 3).state == "unknown", name


def test_captioner_is_found_after_its_params_are_gone(
    trained: tuple[Params, Workspace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of the generated captions names it; captions that were generated again are unknown."""
    params, workspace = trained
    captions = workspace.augmented("written")
    write_json(captions / "manifest.json", {"params": {"start": "finetune/writer"}})
    task = {"task": "retrieval", "start": "initial/tden", "optimizer": {"lr": 0.1}, "augment": {"captions": "written"}}
    own = Exposure(name=RUN, state="clean", how="")
    monkeypatch.setattr(CheckpointExposures, "own", lambda *_, **__: own)

    def refer(provenance: dict[str, Any]) -> None:
        provenance["params"] = {"finetune": {"x": task}}
        provenance["inputs"]["augment"] = hash_path(captions)

    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    changed(folder, tmp_path, refer)
    assert not params.augment
    exposed = {"finetune/writer": Exposure(name="finetune/writer", state="exposed", how="")}
    clean = {name: Exposure(name=name, state="clean", how="") for name in (TOKENIZER, "initial/tden")}
    data = cast(DataVersions, Here(workspace, "nobody's"))
    checkpoints = CheckpointExposures(params=params, workspace=workspace, data=data, _cache={**exposed, **clean})
    provenance, detector_id = cast(Any, load_provenance(tmp_path))
    verdicts = checkpoints.trained("finetune/x", provenance, detector_id)
    assert exposed["finetune/writer"] in verdicts
    write_json(captions / "manifest.json", {"params": {"start": "finetune/other"}})
    (found,) = checkpoints.trained("finetune/x", provenance, detector_id)
    assert found.state == "unknown"


def test_earlier_lock_files_are_found_in_a_folder_of_a_repository(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    for md5 in ("1" * 32, "2" * 32):
        lock = {"schema": "2.0", "stages": {"shards": {"cmd": "x", "outs": [{"path": "data/shards", "md5": md5}]}}}
        (project / "dvc.lock").write_text(yaml.safe_dump(lock))
        subprocess.run([*git, "add", "-A"], cwd=tmp_path, check=True)
        subprocess.run([*git, "commit", "-qm", md5], cwd=tmp_path, check=True)
    assert [outs["data/shards"] for outs in _committed(project)] == ["2" * 32, "1" * 32]
