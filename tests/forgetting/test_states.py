"""A resume state tells what it saw by what its training noted beside it, whatever params.yaml says since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from toy_dataset import write_workspace

from vlp_models.common.io import hash_path, read_json, write_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.contents import learned_from
from vlp_models.data.shards.dataset import ShardDataset, read_manifest
from vlp_models.forgetting.data_versions import DataVersion, DataVersions
from vlp_models.forgetting.learning import Learning
from vlp_models.forgetting.saw import TOKENIZER, Checkpoints, Leftover, Verdict, at_step, leftovers
from vlp_models.params import Params, StreamParams, to_plain
from vlp_models.pipeline.lineage import NOTE, noted
from vlp_models.pipeline.stages import pretrain

RUN = "pretrain/tden"


class Here:
    """The data that lies here, in which the picture has one id."""

    def __init__(self, workspace: Workspace, image: str) -> None:
        self.workspace = workspace
        self.found = DataVersion(shards=workspace.shards, images=frozenset({image}), complete=True)

    def of(self, inputs: Any) -> DataVersion:
        """As what lies here, if its hashes are what was noted."""
        names = learned_from(inputs)
        assert names and all(inputs[name] == hash_path(self.workspace.root / name) for name in names)
        return self.found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, Workspace]:
    root = tmp_path_factory.mktemp("trained")
    params, workspace = write_workspace(root), Workspace(root)
    pretrain.run(params, workspace, "tden")
    made = {"detector_id": read_manifest(workspace.shards).detector_id, "params": {"source": "tsv"}}
    write_json(workspace.features / "manifest.json", made)
    return params, workspace


def ask(params: Params, workspace: Workspace, image: str, folder: Path, step: int) -> Verdict:
    never = {TOKENIZER: Verdict(name=TOKENIZER, state="never", how="")}
    data = cast(DataVersions, Here(workspace, image))
    checkpoints = Checkpoints(params=params, workspace=workspace, data=data, _told=never)
    return at_step(Leftover(path=folder / f"step-{step:08d}.ckpt", run=RUN, step=step), checkpoints)


def test_it_is_judged_by_the_settings_it_was_trained_with(trained: tuple[Params, Workspace]) -> None:
    params, workspace = trained
    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    p = params.pretrain["tden"]
    image, others = "", replace(params, pretrain={"tden": replace(p, seed=p.seed + 1, max_steps=1)})
    for image in ShardDataset(workspace.shards, "train", "captions").image_ids():
        sight = Learning.of(RUN, to_plain(p)).sight(workspace.shards, {image}, stream=StreamParams(), regions=True)
        assert sight is not None
        if sight.update > 1:
            break
    for asked in (params, others, replace(params, pretrain={})):
        assert ask(asked, workspace, image, folder, sight.update).state == "saw"
        before = ask(asked, workspace, image, folder, sight.update - 1)
        assert (before.state, before.how) == (
            "never",
            f"update {sight.update - 1}; the run would see it in {sight.update}",
        )


def test_what_is_noted_nowhere_can_not_be_told(trained: tuple[Params, Workspace], tmp_path: Path) -> None:
    params, workspace = trained
    told = ask(params, workspace, "x", workspace.root / ".work" / "pretrain-tden" / "earlier", 3)
    assert told.state == "unknown" and NOTE in told.how
    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    for damaged in ('{"provenance": {}, "detector_id": ""}', '{"provenance": 3, "detector_id": ""}', "{", "[]"):
        (tmp_path / NOTE).write_text(damaged)
        assert ask(params, workspace, "x", tmp_path, 3).state == "unknown", damaged
    (folder / "step-00000003.ckpt").touch()
    assert [left.run for left in leftovers(workspace)] == [RUN]


def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A folder with the same note, but for a change of it."""
    note = read_json(folder / NOTE)
    change(note["provenance"])
    write_json(to / NOTE, note)
    return to


def test_what_it_was_made_of_must_be_what_lies_here(trained: tuple[Params, Workspace], tmp_path: Path) -> None:
    params, workspace = trained
    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    assert ask(params, workspace, "nobody's", folder, 3).state == "never"
    for name in ("start", "tokenizer"):
        other = changed(folder, tmp_path, lambda told, name=name: told["inputs"].update({name: "0" * 64}))  # type: ignore[misc]
        assert ask(params, workspace, "nobody's", other, 3).state == "unknown", name


def test_a_captioner_is_asked_that_params_no_longer_know(
    trained: tuple[Params, Workspace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name stands in the manifest of what it wrote; captions that were written anew can't be told of."""
    params, workspace = trained
    captions = workspace.augmented("written")
    write_json(captions / "manifest.json", {"params": {"start": "finetune/writer"}})
    task = {"task": "retrieval", "start": "initial/tden", "optimizer": {"lr": 0.1}, "augment": {"captions": "written"}}
    monkeypatch.setattr(Checkpoints, "own", lambda self, learning, *_, **__: Verdict(name=RUN, state="never", how=""))

    def refer(told: dict[str, Any]) -> None:
        told["params"] = {"finetune": {"x": task}}
        told["inputs"]["augment"] = hash_path(captions)

    (folder,) = (workspace.root / ".work" / "pretrain-tden").iterdir()
    changed(folder, tmp_path, refer)
    assert not params.augment
    saw = {"finetune/writer": Verdict(name="finetune/writer", state="saw", how="")}
    never = {name: Verdict(name=name, state="never", how="") for name in (TOKENIZER, "initial/tden")}
    data = cast(DataVersions, Here(workspace, "nobody's"))
    checkpoints = Checkpoints(params=params, workspace=workspace, data=data, _told={**saw, **never})
    provenance, detector_id = cast(Any, noted(tmp_path))
    verdicts = checkpoints.trained("finetune/x", provenance, detector_id)
    assert saw["finetune/writer"] in verdicts
    write_json(captions / "manifest.json", {"params": {"start": "finetune/other"}})
    (told,) = checkpoints.trained("finetune/x", provenance, detector_id)
    assert told.state == "unknown"
