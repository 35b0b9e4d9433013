"""A run in parts: forgetting an image gives the bytes of a run that never had it, and trains one part again."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vlp_models.cli.presets import apply_overlay, find_preset
from vlp_models.common.io import hash_path, read_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.forget import find_exposure, withdraw_images
from vlp_models.contrib.forgetting.report import report_lines
from vlp_models.contrib.parts.plan import list_parts
from vlp_models.contrib.parts.train import average_weights
from vlp_models.data.shards.contents import part_of
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import ParamsError
from vlp_models.params import Params, load_params

ROOT = Path(__file__).parents[3]
RUN, PARTS = "tden-captioning", 3
SETTINGS = (
    "tracking.uri=",
    "tokenizer.min_frequency=1",
    "trainer.reproducible=portable",
    "defaults.pretrain.cpu_processes=1",
    "detector.source=none",
    "features.source=grid",
    "features.max_regions=4",
    "pretrain.tden.recipe.objectives={mlm: 1.0, moc: null, ism: null, msg: null}",
    "generate.public={train: 12, val: 2, questions_per_image: 0, side: 96}",
    "generate.scenes={train: 24, val: 6, test: 4, questions_per_image: 0, side: 96}",
    "finetune.tden-vqa=null",
    "finetune.tden-public-vqa=null",
    f"finetune.{RUN}.parts={PARTS}",
    f"finetune.{RUN}.max_epochs=2",
    f"finetune.{RUN}.batch_size=8",
    "evaluate.splits=[test]",
    "evaluate.blind_baseline=[]",
)
DATA = ("prepare public", "prepare scenes", "validate", "detector", "features", "tokenizer", "shards")
CHAIN = ("initial tden", "pretrain tden", "finetune tden-public-captioning")


def run_stages(params: Params, workspace: Workspace, *stages: str) -> None:
    os.chdir(workspace.root)
    for stage in stages:
        name, _, key = stage.partition(" ")
        module = "vlp_models.contrib.parts.train" if name == "part" else f"vlp_models.pipeline.stages.{name}"
        importlib.import_module(module).run(params, workspace, key)


def make_project(root: Path) -> Params:
    root.mkdir()
    file = root / "params.yaml"
    file.write_text((ROOT / "params.yaml").read_text())
    apply_overlay(file, find_preset("tiny"), [])
    apply_overlay(file, find_preset("forget-cheaply"), list(SETTINGS))
    return load_params(file)


def train_parts(params: Params, workspace: Workspace) -> None:
    run_stages(params, workspace, *(f"part {name}" for name in list_parts(params)), f"finetune {RUN}")


def hashes(workspace: Workspace, folder: str, pattern: str) -> dict[str, str]:
    return {path.parent.name: hash_path(path) for path in sorted((workspace.root / folder).glob(pattern))}


def inputs(params: Params, workspace: Workspace) -> dict[str, str]:
    """The hashes that dvc.yaml declares for the samples of each part."""
    folder = workspace.contents / "regions" / "trained_on" / "captions" / "of"
    return {name: hash_path(folder / f"{next(iter(p.params.sources))}.json") for name, p in list_parts(params).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Params, Workspace]]:
    before = Path.cwd()
    workspace = Workspace(tmp_path_factory.mktemp("parts") / "project")
    params = make_project(workspace.root)
    run_stages(params, workspace, "generate public", "generate scenes", *DATA, *CHAIN)
    train_parts(params, workspace)
    yield params, workspace
    os.chdir(before)


def test_parts_divide_the_images_by_their_ids(trained: tuple[Params, Workspace]) -> None:
    params, workspace = trained
    everything = ShardDataset(workspace.shards, "train", "captions", {"scenes": 1})
    numbers: list[str] = []
    for number, (name, part) in enumerate(list_parts(params).items(), start=1):
        ids = ShardDataset(workspace.shards, "train", "captions", part.params.sources).image_ids()
        assert (
            name == f"{RUN}-part-{number}"
            and ids
            and {part_of("scenes", image, PARTS) for image in ids} == {*part.params.sources}
        )
        numbers += ids
    assert sorted(numbers) == sorted(everything.image_ids())


def test_run_is_the_average_of_its_parts(trained: tuple[Params, Workspace]) -> None:
    params, workspace = trained
    folders = [workspace.checkpoint(f"finetune/{name}") for name in list_parts(params)]
    parts = [load_file(folder / "model.safetensors") for folder in folders]
    start = load_file(workspace.checkpoint("finetune/tden-public-captioning") / "model.safetensors")
    result = load_file(workspace.checkpoint(f"finetune/{RUN}") / "model.safetensors")
    for name, tensor in result.items():
        mean = torch.stack([part[name].double() for part in parts]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
    assert read_json(workspace.training(f"finetune/{RUN}"))["steps"] == 0
    # twice the distance from the start
    for name, tensor in average_weights(parts, start, scale=2.0).items():
        expected = start[name] + 2 * (result[name] - start[name])
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_forgetting_equals_never_having_had_the_image(trained: tuple[Params, Workspace], tmp_path: Path) -> None:
    params, workspace = trained
    image = ShardDataset(workspace.shards, "train", "captions", {"scenes": 1}).image_ids()[0]
    number = int(part_of("scenes", image, PARTS).removeprefix("scenes/")[0])
    stale = f"{RUN}-part-{number}"
    pattern = f"{RUN}*/model.safetensors"
    before, inputs_before = hashes(workspace, "checkpoints/finetune", pattern), inputs(params, workspace)

    report = find_exposure(params, workspace, [image])
    states = {exposure.name: exposure for exposure in report.checkpoints}
    dirty = {f"finetune/{stale}", f"finetune/{RUN}"}
    assert {name for name, exposure in states.items() if exposure.state == "exposed"} == dirty
    assert all(exposure.clean for name, exposure in states.items() if name not in dirty)
    first = states[f"finetune/{stale}"].first
    assert states[f"finetune/{RUN}"].first == first
    assert states[f"finetune/{RUN}"].how.startswith(f"in part {number} of {PARTS}, first in epoch 1, update ")
    lines = list(report_lines(report, params, workspace))
    steps = {name: read_json(workspace.training(f"finetune/{name}"))["steps"] for name in list_parts(params)}
    total = sum(steps.values()) + sum(
        read_json(workspace.training(name))["steps"] for name in ("pretrain/tden", "finetune/tden-public-captioning")
    )
    assert lines[-1].strip() == f"{steps[stale]:,} of {total:,} updates ({steps[stale] / total:.0%})"
    assert f"  finetune/{stale}, from finetune/tden-public-captioning" in lines

    withdraw_images(params, workspace, report, keep_fingerprint=False, by="test")
    run_stages(params, workspace, *DATA)
    after = inputs(params, workspace)
    assert {name for name in after if after[name] != inputs_before[name]} == {stale}, "the others are not trained again"
    run_stages(params, workspace, f"part {stale}", f"finetune {RUN}")
    forgotten = hashes(workspace, "checkpoints/finetune", pattern)
    assert {name for name in forgotten if forgotten[name] != before[name]} == {stale, RUN}

    # another project, whose dataset never had the image
    other = Workspace(tmp_path / "never")
    params = make_project(other.root)
    run_stages(params, other, "generate public", "generate scenes")
    remove_image(other.raw("scenes"), image.partition("/")[2])
    run_stages(params, other, *DATA, *CHAIN)
    assert image not in ShardDataset(other.shards, "train", "captions", {"scenes": 1}).image_ids()
    train_parts(params, other)
    assert hashes(other, "checkpoints/finetune", pattern) == forgotten


def remove_image(folder: Path, number: str) -> None:
    """Remove an image from a dataset in COCO's format, with its captions and boxes."""
    for file in folder.rglob("*.json"):
        content = json.loads(file.read_text())
        if "images" in content:
            key = "cocoid" if "cocoid" in content["images"][0] else "id"
            content["images"] = [entry for entry in content["images"] if str(entry[key]) != number]
        if "annotations" in content:
            rows = content["annotations"]
            content["annotations"] = [row for row in rows if str(row.get("image_id")) != number]
        file.write_text(json.dumps(content))
    next((folder / "images").glob(f"*{int(number):012d}.png")).unlink()
    scenes = folder / "scenes.jsonl"
    lines = scenes.read_text().splitlines()
    scenes.write_text("".join(f"{line}\n" for line in lines if str(json.loads(line).get("image_id")) != number))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"finetune.{RUN}.sources={{scenes: 1, public: 1}}", "needs one dataset"),
        (f"finetune.{RUN}.sources={{scenes: null}}", "needs one dataset"),
        (f"finetune.{RUN}-part-2={{task: captioning, start: pretrain/tden}}", "has the name of a part"),
        (f"finetune.{RUN}.lora={{rank: 2}}", "neither `lora`"),
    ],
)
def test_runs_that_cannot_be_divided_are_refused(tmp_path: Path, setting: str, message: str) -> None:
    make_project(tmp_path / "project")
    with pytest.raises(ParamsError, match=message):
        apply_overlay(tmp_path / "project" / "params.yaml", None, [setting])
        load_params(tmp_path / "project" / "params.yaml")
