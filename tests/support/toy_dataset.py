"""A toy dataset of colored shapes as shards, a tiny model, and one call that trains it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_files import hash_shards
from torch import nn

from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import InputReader, ModelInputs, RegionInput
from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.write import ImageRecord, ShardWriter
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models import DataFacts, build_model
from vlp_models.params import (
    ObjectiveParams,
    OptimizerParams,
    Params,
    RecipeParams,
    ScheduledSamplingParams,
    SnapshotParams,
    StreamParams,
    TrainerParams,
    load_params,
    merged,
    to_plain,
)
from vlp_models.training.log import TIMING

CLASSES = ["background", "circle", "square", "star"]
COLORS = ["red", "green", "blue"]
FEATURE_DIM = 6
TINY: dict[str, Any] = {
    "hidden": 16,
    "heads": 2,
    "intermediate": 32,
    "object_layers": 1,
    "sentence_layers": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "dropout": 0.1,
}
TRAINER = TrainerParams(
    accelerator="cpu",
    devices=1,
    precision="auto",
    num_workers=0,
    checkpoint_every_steps=2,
    log_every_steps=1,
    torch_threads=1,
)


@dataclass(frozen=True)
class Toy:
    """44 training samples; batches of 8 make 6 updates an epoch, the last of 4 samples."""

    shards: Path
    tokenizer: Tokenizer

    def model(self, seed: int = 1, **config: Any) -> nn.Module:
        torch.manual_seed(seed)
        return build_model(
            "tden",
            {**TINY, **config},
            DataFacts(
                vocab_size=self.tokenizer.vocab_size,
                mask_id=self.tokenizer.mask_id,
                feature_dim=FEATURE_DIM,
                num_classes=len(CLASSES),
            ),
        )

    def fit(
        self,
        work: Path,
        model: nn.Module | None = None,
        *,
        objectives: Mapping[str, float] | None = None,
        mix: str = "sum",
        mask_probability: float = 0.3,
        reuse_batch: bool = False,
        batch_size: int = 8,
        accumulate: int = 1,
        max_epochs: int = 2,
        max_steps: int = 0,
        ema_decay: float = 0.0,
        optimizer: Mapping[str, Any] | None = None,
        loss: Any = None,
        tracker: Any = None,
        snapshots: SnapshotParams | None = None,
        cpu_processes: int = 1,
        stream: Mapping[str, Any] | None = None,
        **trainer: Any,
    ) -> tuple[nn.Module, Any]:
        """Pretrains (by default a fresh model), resuming whatever lies in `work`."""
        from vlp_models.training.data import LoaderFactory
        from vlp_models.training.run import Plan, fit
        from vlp_models.training.scheduled_sampling import make_loss

        work.mkdir(parents=True, exist_ok=True)
        model = model or self.model()
        weights = objectives or {"mlm": 1.0, "moc": 1.0, "ism": 1.0, "msg": 1.0}
        key = "weight" if mix == "sum" else "share"
        recipe = RecipeParams(
            objectives={name: ObjectiveParams(**{key: value}) for name, value in weights.items()},
            mix=mix,  # type: ignore[arg-type]
            mask_probability=mask_probability,
            reuse_batch=reuse_batch,
        )
        loaders = LoaderFactory(
            self.shards,
            "captions",
            sources={},
            collate=InputReader(
                ModelInputs(image=RegionInput()), self.tokenizer, max_text_len=12, max_regions=8
            ).collate,
            batch_size=batch_size,
            num_workers=trainer.get("num_workers", 0),
            seed=3,
            stream=StreamParams(**stream) if stream else None,
        )
        plan = Plan(
            seed=1,
            max_epochs=max_epochs,
            max_steps=max_steps,
            accumulate=accumulate,
            optimizer=OptimizerParams(**{"lr": 1e-3, "ema_decay": ema_decay, **(optimizer or {})}),
            snapshots=snapshots or SnapshotParams(),
            cpu_processes=cpu_processes,
        )
        result = fit(
            model,
            loss or make_loss(model, recipe, ScheduledSamplingParams(), name="tden"),
            loaders,
            plan=plan,
            trainer=replace(TRAINER, **trainer),
            work=work,
            title="toy",
            tracker=tracker,
        )
        return model, result


class KilledAt:
    """A tracker that breaks the run off once update `step` is saved, as a kill would."""

    def __init__(self, work: Path, step: int) -> None:
        self.checkpoint = work / f"step-{step:08d}.ckpt"

    def sync(self, log: Path) -> None:
        if self.checkpoint.exists():
            raise InterruptedError("killed")


class Keeping:
    """A tracker that remembers the weights whenever it is asked."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.seen = module, {}

    def sync(self, log: Path) -> None:
        self.seen[len(log.read_text().splitlines())] = {k: v.clone() for k, v in self.module.state_dict().items()}


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING} for row in rows]


def check_resume(fit: Callable[..., tuple[Any, Any]], root: Path, *steps: int) -> tuple[Any, Any]:
    """Check that runs that are killed after these updates end as one that nothing stops, to the bit.

    fit: trains in a folder, with an optional `tracker`. Returns the undisturbed model and its result.
    """
    whole, result = fit(root / "whole")
    for step in steps:
        work = root / f"killed-{step}"
        with pytest.raises(InterruptedError):
            fit(work, tracker=KilledAt(work, step))
        torch.manual_seed(step)  # the state of the process must not matter
        resumed, after = fit(work)
        assert after.resumed_from == step and after.samples == result.samples
        assert after.seconds > 0 and after.peak_memory_mb > 0
        assert same_weights(whole, resumed), f"killed after {step}"
        assert untimed(after.rows) == untimed(result.rows), f"killed after {step}"
    return whole, result


def make_toy(root: Path) -> Toy:
    return Toy(write_shards(root / "shards"), Tokenizer.load(write_tokenizer(root / "tokenizer")))


def write_shards(directory: Path, train: int = 44, val: int = 8) -> Path:
    """What the shards stage would write."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(5)
    counts = {}
    for split, images in (("train", train), ("val", val), ("test", 4)):
        writer = ShardWriter(directory, split, images_per_shard=16)
        records = [_image(f"toy/{split}{i:03d}", rng) for i in range(images)]
        for record, other in zip(records, [*records[1:], records[0]], strict=True):
            writer.add(replace(record, rows={**record.rows, "image_pairs": [_compared(record, other)]}))
        counts[split] = writer.close()
    manifest = {
        "feature_dim": FEATURE_DIM,
        "classes": CLASSES,
        "detector_id": "toy",
        "sources": ["toy"],
        "counts": counts,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    hash_shards(directory, "regions")
    return directory


def write_tokenizer(directory: Path) -> Path:
    """Write what the tokenizer stage writes."""
    words = [*COLORS, *CLASSES[1:], "a", "the", "is", "what", "colour", "?"]  # plain-ok
    Tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words], lowercase=True).save(directory)
    (directory / "answers.json").write_text(json.dumps(COLORS))
    return directory


def _image(image_id: str, rng: np.random.Generator) -> ImageRecord:
    """Return one colored shape, with a caption, a question and a statement that require the image."""
    shape, color, claimed = int(rng.integers(1, 4)), int(rng.integers(3)), int(rng.integers(3))
    name = CLASSES[shape]
    question = {
        "question_id": f"{image_id}/q",
        "text": f"what colour is the {name} ?",  # plain-ok
        "answers": [COLORS[color]] * 10,
        "question_type": "what colour is",  # plain-ok
        "answer_type": "other",
    }
    statement = {
        "statement_id": f"{image_id}/s",
        "text": f"the {name} is {COLORS[claimed]}",
        "label": claimed == color,
        "group": image_id,
    }
    sure = {
        "text": f"the {name} is {COLORS[claimed]}",
        "gold_label": "entailment" if claimed == color else "contradiction",
    }
    open_ = {"text": f"what is a {name}", "gold_label": "neutral"}
    hypotheses = [
        {"hypothesis_id": f"{image_id}/h{i}", "annotator_labels": [row["gold_label"]] * 2 + ["neutral"], **row}
        for i, row in enumerate((sure, open_))
    ]
    colors = [COLORS[i] if i < 3 else "a" for i in (color, *(i for i in range(4) if i != color))]
    shapes = [CLASSES[i] if i else "a" for i in (shape, *(i for i in range(4) if i != shape))]
    order = [int(i) for i in np.random.default_rng(len(image_id) + 7 * shape + color).permutation(4)]
    choice = {
        "choice_id": f"{image_id}/v",
        "text": "what colour ?",  # plain-ok
        "answers": [f"the {colors[i]}" for i in order],
        "answer_label": order.index(0),
        "rationales": [f"is {shapes[i]}" for i in order],
        "rationale_label": order.index(0),
        "boxes": [[1.0, 1.0, 5.0, 5.0]],
    }
    return ImageRecord(
        image_id=image_id,
        source="toy",
        width=10,
        height=10,
        regions=_regions(rng, shape, color),
        rows={
            "captions": [{"caption_id": f"{image_id}/c", "text": f"a {COLORS[color]} {name}"}],
            "questions": [question],
            "statements": [statement],
            "choices": [choice],
            "hypotheses": hypotheses,
        },
    )


def _compared(record: ImageRecord, other: ImageRecord) -> dict[str, Any]:
    """Return a statement that requires both images: the text is always the same."""
    color, another = (image.rows["captions"][0]["text"].split()[1] for image in (record, other))
    return {
        "pair_id": f"{record.image_id}/p",
        "other_image_ids": [other.image_id],
        "text": "the colour is the colour",  # plain-ok
        "label": color == another,
        "group": record.image_id,
    }


def _regions(rng: np.random.Generator, shape: int, color: int) -> RegionArrays:
    """Return two regions whose features encode shape and color."""
    features = rng.normal(0, 0.05, (2, FEATURE_DIM)).astype(np.float16)
    features[:, shape - 1] += 1
    features[:, 3 + color] += 1
    probabilities = np.full((2, len(CLASSES)), 0.02, dtype=np.float16)
    probabilities[:, shape] = 0.94
    boxes = np.sort(rng.uniform(0, 1, (2, 2, 2)), axis=1).reshape(2, 4).astype(np.float32)
    scores = np.array([0.9, 0.8], dtype=np.float32)
    return RegionArrays(features=features, boxes=boxes, class_probs=probabilities, scores=scores)


def write_workspace(root: Path, **changes: Any) -> Params:
    """Write a workspace as it is before `pretrain`, with a matching params.yaml.

    changes: section -> overrides (`pretrain={"tden": {"max_epochs": 8}}`).
    """
    import yaml

    from vlp_models.pipeline.stages import initial
    from vlp_models.tasks import TASKS

    write_shards(root / "data" / "shards")
    write_tokenizer(root / "data" / "tokenizer")
    raw = yaml.safe_load((Path(__file__).parents[2] / "params.yaml").read_text())
    raw["models"] = {"tden": {"family": "tden", "config": TINY}}
    raw["trainer"] = to_plain(TRAINER)
    raw["tracking"]["uri"] = ""
    adamw = {"lr": 1e-3}
    raw["defaults"] = {
        "pretrain": {"batch_size": 8, "max_epochs": 2, "optimizer": raw["defaults"]["pretrain"]["optimizer"]},
        "finetune": {"batch_size": 8, "max_epochs": 1, "max_text_len": 12, "max_regions": 4, "optimizer": adamw},
    }
    two_pass = {
        **raw["pretrain"]["tden"],
        "start": "pretrain/tden",
        "max_epochs": 2,
        "scheduled_sampling": {"scheme": "a"},
    }
    raw["pretrain"] = {"tden": {**raw["pretrain"]["tden"], "max_epochs": 2}, "two-pass": two_pass}
    tasks = ("captioning", "vqa", "retrieval", "nlvr", "nlvr2", "vcr", "entailment")
    # The last four are in a folder of contrib, which may be absent.
    raw["finetune"] = {task: {"task": task, "start": "pretrain/tden"} for task in tasks if task in TASKS}
    for section, values in changes.items():
        raw[section] = merged(raw.get(section, {}), values)
    raw = json.loads(json.dumps(raw))  # no part twice: it would be dumped as an alias
    (root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    params = load_params(root / "params.yaml")
    for model in params.models:
        initial.run(params, Workspace(root), model)
    return params
