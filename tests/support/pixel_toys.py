"""A tiny dataset of colored squares as shards of pixels, captions and sentences: VLMo's stages in seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from model_checks import load_model
from PIL import Image
from shard_files import hash_shards
from toy_dataset import TRAINER, write_tokenizer

from vlp_models.cli.presets import find_preset
from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import InputReader
from vlp_models.data.pixels import encode
from vlp_models.data.shards.write import ImageRecord, ShardWriter
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models import DataFacts, build_model
from vlp_models.params import (
    ModelParams,
    ObjectiveParams,
    OptimizerParams,
    Params,
    RecipeParams,
    ScheduledSamplingParams,
    load_params,
    to_plain,
)
from vlp_models.params.runs import SnapshotParams
from vlp_models.pipeline.stages import initial
from vlp_models.training.data import LoaderFactory
from vlp_models.training.run import Plan, fit
from vlp_models.training.scheduled_sampling import make_loss

COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}
CONFIG: dict[str, Any] = {
    "hidden": 16,
    "heads": 2,
    "layers": 2,
    "intermediate": 32,
    "vl_start": 1,
    "side": 16,
    "patch": 8,
    "max_positions": 12,
    "image_codes": 8,
    "layer_scale": 1.0,
    "init_std": 0.1,
}
PAIRS = ("itc", "itm", "mlm")


def colored_square(rng: np.random.Generator, image_id: str, captions: dict[str, str]) -> ImageRecord:
    """Return an image of one square of a random color; `{}` in a caption (by its id's suffix) is the color's name."""
    color = sorted(COLORS)[int(rng.integers(3))]
    picture = Image.new("RGB", (20, 24), tuple(int(v) for v in rng.integers(0, 255, 3)))
    picture.paste(COLORS[color], (2, 2, 12, 12))
    return ImageRecord(
        image_id=image_id,
        source="toy",
        width=20,
        height=24,
        pixels=encode(picture),
        pixels_extension="png",
        rows={
            "captions": [
                {"caption_id": f"{image_id}/{name}", "text": text.format(color)} for name, text in captions.items()
            ]
        },
    )


def write_shards(directory: Path, train: int = 24, val: int = 4) -> Path:
    directory.mkdir(parents=True)
    rng, counts = np.random.default_rng(3), {}
    for split, images in (("train", train), ("val", val), ("test", 4)):
        writer = ShardWriter(directory, split, images_per_shard=16)
        for number in range(images):
            writer.add(colored_square(rng, f"toy/{split}{number:03d}", {"c": "a {} square"}))
        texts = [
            {
                "text_id": f"toy/{split}t{i}",
                "source": "toy",
                "split": split,
                "text": f"the square is {sorted(COLORS)[i % 3]}",
            }
            for i in range(images)
        ]
        writer.add_without_image("texts", texts)
        counts[split] = writer.close()
    manifest = {"feature_dim": 0, "classes": [], "detector_id": "", "sources": ["toy"], "counts": counts}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    hash_shards(directory, "pixels")
    return directory


def write_workspace(root: Path, **pretrain: dict[str, Any]) -> Params:
    """Write a workspace as it is before `pretrain`, with a VLMo and these runs."""
    write_shards(root / "data" / "shards")
    write_tokenizer(root / "data" / "tokenizer")
    raw = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    raw["models"] = {"vlmo": {"family": "vlmo", "config": CONFIG}}
    raw["trainer"], raw["tracking"]["uri"], raw["finetune"] = to_plain(TRAINER), "", {}
    raw["defaults"] = {"pretrain": {"batch_size": 8, "max_text_len": 12, "optimizer": {"lr": 1e-2}}, "finetune": {}}
    raw["pretrain"] = {name: {"model": "vlmo", **run} for name, run in pretrain.items()}
    (root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    params = load_params(root / "params.yaml")
    initial.run(params, Workspace(root), "vlmo")
    return params


def train(
    root: Path, work: Path, *, batch_size: int, accumulate: int = 1, contrast_over: str = "batch", **more: Any
) -> tuple[torch.nn.Module, Any]:
    """Pretrain a new VLMo on the pairs of root/shards in the real loop. more: objectives, config, devices, ..."""
    tokenizer = Tokenizer.load(root / "tokenizer")
    torch.manual_seed(1)
    facts = DataFacts(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id)
    model: Any = build_model("vlmo", {**CONFIG, **more.get("config", {})}, facts)
    recipe = RecipeParams(
        objectives={name: ObjectiveParams() for name in more.get("objectives", PAIRS)},
        contrast_over=contrast_over,  # type: ignore[arg-type]
        mask_probability=0.3,
    )
    reader = InputReader(model.inputs, tokenizer, max_text_len=12, max_regions=1)
    loaders = LoaderFactory(
        root / "shards",
        "captions",
        sources={},
        collate=reader.collate,
        batch_size=batch_size,
        num_workers=0,
        seed=3,
        **reader.flags,
    )
    plan = Plan(
        seed=1,
        max_epochs=more.get("max_epochs", 1),
        max_steps=0,
        accumulate=accumulate,
        optimizer=OptimizerParams(lr=1e-2, eps=more.get("eps", 1e-8)),
        snapshots=SnapshotParams(),
    )
    work.mkdir(parents=True, exist_ok=True)
    loss = make_loss(model, recipe, ScheduledSamplingParams(), name="vlmo")
    tracker = more.get("tracker")
    trainer = replace(TRAINER, devices=more.get("devices", 1))
    result = fit(model, loss, loaders, plan=plan, trainer=trainer, work=work, title="toy", tracker=tracker)
    return model, result


def build_from_preset(preset: str, name: str, root: Path) -> Any:
    """Return a preset's model after the stage `initial`, in eval mode, with image weights but no text weights."""
    found = yaml.safe_load(find_preset(preset).read_text())["models"][name]
    model = ModelParams(family=found["family"], config=found["config"], image_init=found["image_init"])
    params, workspace = replace(write_workspace(root), models={name: model}), Workspace(root)
    initial.run(params, workspace, name)
    return load_model(workspace.checkpoint(f"initial/{name}"))[0].eval()
