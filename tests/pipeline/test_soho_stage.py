"""SOHO through the real training loop and stage: killed and resumed, its CNN frozen at first, two texts an image."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from drawn_workspace import make_workspace, write_objects
from pixel_toys import colored_square
from safetensors.torch import load_file
from shard_files import hash_shards
from soho_toys import TINY as SIZES
from toy_dataset import TINY, TRAINER, KilledAt, same_weights, untimed, write_tokenizer

from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import InputReader, MultiCaptionCollator
from vlp_models.data.shards.write import ShardWriter
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.models import FIGURES, DataFacts, build_model
from vlp_models.params import (
    ObjectiveParams,
    OptimizerParams,
    RecipeParams,
    ScheduledSamplingParams,
    load_params,
    to_plain,
)
from vlp_models.params.runs import SnapshotParams
from vlp_models.params.schema import build
from vlp_models.pipeline.check_params import check_runs
from vlp_models.pipeline.stages import initial, pretrain
from vlp_models.training.data import LoaderFactory
from vlp_models.training.run import Plan, fit
from vlp_models.training.scheduled_sampling import make_loss

CAPTIONS = {"0": "a {} square", "1": "the square is {}", "2": "the {} square ?"}
CONFIG: dict[str, Any] = {**SIZES, "height": 32, "width": 32, "dropout": 0.1, "augment": ["random_resized_crop"]}
CONFIG |= {"mvm_probability": 0.5, "resize": "squash", "revive_after": 2}
SGD = {"kind": "sgd", "lr": 1e-2, "frozen_epochs": 1}
OPTIMIZER = {"lr": 1e-3, "groups": {"cnn": SGD, "cnn_stem": SGD}}


def write_pixels(directory: Path) -> Path:
    """Write images of one colored square with three captions each."""
    directory.mkdir(parents=True)
    rng, counts = np.random.default_rng(3), {}
    for split, images in (("train", 24), ("val", 4), ("test", 4)):
        writer = ShardWriter(directory, split, images_per_shard=16)
        for number in range(images):
            writer.add(colored_square(rng, f"toy/{split}{number:03d}", CAPTIONS))
        counts[split] = writer.close()
    manifest = {"feature_dim": 0, "classes": [], "detector_id": "", "sources": ["toy"], "counts": counts}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    hash_shards(directory, "pixels")
    return directory


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("toys")
    write_pixels(root / "shards")
    write_tokenizer(root / "tokenizer")
    return root


def train(root: Path, work: Path, *, accumulate: int = 1, tracker: Any = None) -> tuple[torch.nn.Module, Any]:
    tokenizer = Tokenizer.load(root / "tokenizer")
    torch.manual_seed(1)
    model: Any = build_model("soho", CONFIG, DataFacts(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id))
    recipe = RecipeParams(objectives={name: ObjectiveParams() for name in model.objectives}, mask_probability=0.3)
    reader = InputReader(model.inputs, tokenizer, max_text_len=12, max_regions=1)
    loaders = LoaderFactory(
        root / "shards",
        "images",
        sources={},
        collate=MultiCaptionCollator(reader=reader, count=2),
        batch_size=8 // accumulate,
        num_workers=0,
        seed=3,
        captioned=True,
        **reader.flags,
    )
    plan = Plan(
        seed=1,
        max_epochs=2,
        max_steps=0,
        accumulate=accumulate,
        optimizer=build(OptimizerParams, OPTIMIZER, where="optimizer"),
        snapshots=SnapshotParams(),
    )
    work.mkdir(parents=True, exist_ok=True)
    loss = make_loss(model, recipe, ScheduledSamplingParams(), name="soho")
    result = fit(model, loss, loaders, plan=plan, trainer=TRAINER, work=work, title="toy", tracker=tracker)
    return model, result


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_after_kill_is_bitwise_equal(toys: Path, tmp_path: Path, accumulate: int) -> None:
    """Crops, captions, masks, other images' texts, hidden codes, dropout, dictionary: drawn or moved the same."""
    whole, result = train(toys, tmp_path / "whole", accumulate=accumulate)
    assert result.steps == 6
    for step in (2, 4):  # in the epoch in which the CNN is frozen, and after it
        work = tmp_path / f"killed-{step}"
        with pytest.raises(InterruptedError):
            train(toys, work, accumulate=accumulate, tracker=KilledAt(work, step))
        resumed, after = train(toys, work, accumulate=accumulate)
        assert after.resumed_from == step
        assert same_weights(whole, resumed), f"killed after {step}"
        assert untimed(after.rows) == untimed(result.rows)


@pytest.mark.slow
def test_stage_keeps_a_frozen_cnn_and_writes_code_figures(tmp_path: Path) -> None:
    write_pixels(tmp_path / "data" / "shards")
    write_tokenizer(tmp_path / "data" / "tokenizer")
    raw = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    raw["models"] = {"soho": {"family": "soho", "config": CONFIG}, "tden": {"family": "tden", "config": TINY}}
    raw["trainer"], raw["tracking"]["uri"], raw["finetune"] = to_plain(TRAINER), "", {}
    raw["defaults"] = {"pretrain": {"batch_size": 8, "max_text_len": 12, "optimizer": OPTIMIZER}, "finetune": {}}
    objectives = {"mlm": 1.0, "mvm": 1.0, "itm": 1.0}
    run = {"model": "soho", "view": "images", "captions_per_image": 2, "recipe": {"objectives": objectives}}
    raw["pretrain"] = {"frozen": run, "learning": {**run, "max_epochs": 2}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(raw)), sort_keys=False))
    params, workspace = load_params(tmp_path / "params.yaml"), Workspace(tmp_path)
    initial.run(params, workspace, "soho")
    weights = {"fresh": load_file(workspace.checkpoint("initial/soho") / "model.safetensors")}
    for name in ("frozen", "learning"):
        pretrain.run(params, workspace, name)
        weights[name] = load_file(workspace.checkpoint(f"pretrain/{name}") / "model.safetensors")
    cnn = {name for name in weights["fresh"] if name.startswith("model.backbone.")}
    assert any("running_mean" in name for name in cnn)
    assert all(torch.equal(weights["fresh"][name], weights["frozen"][name]) for name in cnn)
    assert not torch.equal(weights["fresh"]["model.dictionary.codes"], weights["frozen"]["model.dictionary.codes"])
    assert not torch.equal(weights["fresh"]["model.neck.conv.weight"], weights["frozen"]["model.neck.conv.weight"])
    for name in ("net.conv1.weight", "net.bn1.running_mean"):
        assert not torch.equal(
            weights["fresh"][f"model.backbone.{name}"], weights["learning"][f"model.backbone.{name}"]
        )
    figures = json.loads(workspace.figures("pretrain/frozen").read_text())
    assert len(figures) == ("soho" in FIGURES)  # none without contrib/report_pictures
    assert all("of 4 val images" in figure["about"] and figure["groups"] for figure in figures)
    header = workspace.curve("pretrain/learning").read_text().partition("\n")[0].split(",")
    assert {"mlm", "mvm", "itm", "codes_alive", "val_loss"} <= set(header)


def with_boxes(root: Path, model: dict[str, Any]) -> tuple[Any, Workspace]:
    raw = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    raw["models"] |= {"soho": {"family": "soho", "config": CONFIG, **model}}
    raw["trainer"] = to_plain(TRAINER)
    (root / "params.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(raw)), sort_keys=False))
    return load_params(root / "params.yaml"), Workspace(root)


def test_vision_warmup_runs_first_and_records_its_images(tmp_path: Path) -> None:
    """Six pictures to learn from, four a step; the same again gives the same files."""
    first_warmup_step = pytest.importorskip("vlp_models.contrib.detector.initial_stage").first_warmup_step
    exposure = pytest.importorskip("vlp_models.contrib.forgetting.exposure")
    make_workspace(tmp_path)
    write_pixels(tmp_path / "data" / "shards")
    write_tokenizer(tmp_path / "data" / "tokenizer")
    small = {"backbone": "small", "backbone_options": {"channels": [4, 8, 8]}, "backbone_stage": 0, "pool": 2}
    starts = {}
    for name, steps, flip in (("blind", 0, True), ("warmup", 1, True), ("again", 1, True), ("upright", 1, False)):
        warmup = {"steps": steps, "batch_size": 4, "flip": flip}
        params, workspace = with_boxes(tmp_path, {"config": CONFIG | small, "vision_warmup": warmup})
        initial.run(params, workspace, "soho")
        place = workspace.checkpoint("initial/soho")
        starts[name] = load_file(place / "model.safetensors"), (place / "config.json").read_bytes()
    (blind, _), (warmed_up, config), (same, record), (upright, _) = starts.values()
    assert any(not torch.equal(warmed_up[name], upright[name]) for name in upright), "nothing was mirrored"
    moved = {name for name in blind if not torch.equal(blind[name], warmed_up[name])}
    assert moved and all(name.startswith(("model.backbone.", "model.neck.")) for name in moved)
    assert config == record and all(torch.equal(warmed_up[name], same[name]) for name in same)
    kept = json.loads(config)["provenance"]["vision_warmup"]
    assert kept["words"] == ["blue", "red", "square"] and kept["images"] == 6

    seen = [first_warmup_step(kept, workspace, {f"drawn/{n}"}) for n in range(7)]
    assert sorted(map(str, seen)) == ["1"] * 4 + ["None"] * 3  # four of six, and none of val
    data = SimpleNamespace(here=lambda: SimpleNamespace(images=frozenset({f"drawn/{seen.index(1)}"})))
    asked = exposure.CheckpointExposures(params=params, workspace=workspace, data=data)
    verdict = asked.of("initial/soho")
    assert (verdict.state, verdict.how) == ("exposed", "in its vision warm-up, first in step 1")
    write_objects([], workspace)
    asked = exposure.CheckpointExposures(params=params, workspace=workspace, data=data)
    assert asked.of("initial/soho").state == "unknown"
    with pytest.raises(DataError, match=r"no object of the train split has a box"):
        initial.run(params, workspace, "soho")


def test_vision_warmup_needs_random_weights_and_pixels(tmp_path: Path) -> None:
    params, _ = with_boxes(tmp_path, {"vision_warmup": {"steps": 1}, "init": "somewhere"})
    with pytest.raises(ParamsError, match=r"`models.soho.vision_warmup` is for a randomly"):
        check_runs(params)
    params, _ = with_boxes(tmp_path, {"vision_warmup": {"steps": 1}, "family": "tden", "config": TINY})
    with pytest.raises(ParamsError, match=r"`models.soho.vision_warmup`: a tden reads no pixels"):
        check_runs(params)
    with pytest.raises(ParamsError, match=r"option `channels: \[24, 48, 96\]`"):
        build_model("soho", CONFIG | {"backbone": "small", "backbone_stage": 0}, DataFacts(vocab_size=9, mask_id=4))


def test_captions_per_image_needs_the_image_view_and_a_supporting_model() -> None:
    raw = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    raw["pretrain"]["tden"]["captions_per_image"] = 2
    from vlp_models.params import parse_params

    with pytest.raises(ParamsError, match="view: images"):
        parse_params(raw)
