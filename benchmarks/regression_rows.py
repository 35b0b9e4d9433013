"""What benchmarks/regressions.py changes in a project: 30 rows of harmful changes, and harmless ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

RAW, DROP, EXTRA = "data/raw/scenes", "data/raw/monday", "data/raw/extra"
VOCABULARY = "regressions-vocabulary"  # a package
PAIRS = ("two", "together")  # kinds of rows
MIN_DROP = 8.0  # percentage points of accuracy
UNUSED = "\n\nUNUSED = 1\n"


@dataclass(frozen=True)
class Change:
    """kind: params, code, raw (edits a raw folder), drop (adds data/raw/monday, edited) or package. doses: by harm.

    A dose is the value of a param, the old and the new text of code, or a function that edits a raw folder.
    """

    kind: str
    name: str
    doses: tuple[Any, ...]

    @property
    def id(self) -> str:
        """Return the change as bisect names it."""
        if self.kind == "drop":
            return "params data.monday"
        return f"{'data' if self.kind == 'raw' else self.kind} {self.name}"


@dataclass(frozen=True)
class Row:
    kind: str  # what counts as right
    about: str
    changes: tuple[Change, ...] = ()

    def is_injected(self, drop: float | None, alone: Sequence[float | None]) -> bool:
        """Return whether the drops, of all changes and of each of a pair alone, are as the kind requires."""
        singles = [single for single in alone if single is not None]
        if drop is None or (self.kind == "two" and len(singles) < len(alone)):
            return False
        if self.kind == "together" and any(single > MIN_DROP / 2 for single in singles):
            return False
        if self.kind == "two" and any(single < MIN_DROP for single in singles):
            return False
        return drop >= (1.0 if self.kind == "none" else MIN_DROP)


# Raw data: a folder in COCO's format. Files are linked to DVC's cache, so they are replaced, never written into.


def replace(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def edit(root: Path, pattern: str, change: Callable[[Any], Any]) -> None:
    (file,) = root.glob(pattern)
    replace(file, json.dumps(change(json.loads(file.read_bytes()))).encode())


def train_ids(root: Path) -> list[int]:
    (file,) = root.glob("dataset_*.json")
    return [image["cocoid"] for image in json.loads(file.read_bytes())["images"] if image["split"] == "train"]


def swap_answers(root: Path, share: float) -> None:
    """Give a share of the training questions another question's answers."""
    images = set(train_ids(root))

    def swap(content: dict[str, Any]) -> dict[str, Any]:
        rows = [row for row in content["annotations"] if row["image_id"] in images]
        chosen = random.Random(1).sample(rows, round(share * len(rows)))
        answers = [(row["answers"], row["multiple_choice_answer"]) for row in chosen]
        for row, (listed, answer) in zip(chosen, answers[1:] + answers[:1], strict=True):
            row["answers"], row["multiple_choice_answer"] = listed, answer
        return content

    edit(root, "v2_mscoco_*", swap)


def repeat_image(root: Path, count: int) -> None:
    """Make every image of a drop a lightly edited copy of one of the first, with its questions and objects."""
    from PIL import Image, ImageEnhance

    ids = train_ids(root)
    source = {other: ids[number % count] for number, other in enumerate(ids)}
    for number, (other, first) in enumerate(source.items()):
        path = root / "images" / f"COCO_scenes_{other:012}.png"
        with Image.open(root / "images" / f"COCO_scenes_{first:012}.png") as image:
            enhanced = ImageEnhance.Brightness(image.convert("RGB")).enhance(0.9 + 0.2 * number / len(ids))
        if other != first:
            path.unlink()
            enhanced.save(path)

    def copy(key: str, content: dict[str, Any]) -> dict[str, Any]:
        rows: dict[int, list[dict[str, Any]]] = {}
        for row in content[key]:
            rows.setdefault(row["image_id"], []).append(row)
        content[key] = []
        for other, first in source.items():
            for place, row in enumerate(rows[first]):
                own_id = "question_id" if "question_id" in row else "id"
                content[key].append(row | {"image_id": other, own_id: other * 1000 + place})
        return content

    for pattern, key in (("v2_mscoco_*", "annotations"), ("v2_Open*", "questions"), ("*/instances_*", "annotations")):
        edit(root, pattern, partial(copy, key))


def truncate(root: Path, share: float) -> None:
    """Lose the last questions of train, as a copy that stopped early does; keep a share."""
    lost = set(train_ids(root)[round(share * len(train_ids(root))) :])

    def keep(key: str, content: dict[str, Any]) -> dict[str, Any]:
        return content | {key: [row for row in content[key] if row["image_id"] not in lost]}

    for pattern, key in (("v2_mscoco_*", "annotations"), ("v2_Open*", "questions")):
        edit(root, pattern, partial(keep, key))


def lose_split(root: Path, share: float) -> None:
    """List the last images of train as val; keep a share."""
    lost = set(train_ids(root)[round(share * len(train_ids(root))) :])

    def move(content: dict[str, Any]) -> dict[str, Any]:
        images = [i | {"split": "val" if i["cocoid"] in lost else i["split"]} for i in content["images"]]
        return content | {"images": images}

    edit(root, "dataset_*", move)


def reword_caption(root: Path) -> None:
    def reword(content: dict[str, Any]) -> dict[str, Any]:
        content["annotations"][0]["caption"] = "There is a shape in the picture."
        return content

    edit(root, "annotations/captions_*", reword)


def dataset(name: str) -> dict[str, Any]:
    """Return the section of params.yaml that reads a generated dataset."""
    return {
        "format": "coco",
        "root": f"data/raw/{name}",
        "images": "images",
        "captions": {"all": ["annotations/captions_scenes.json"]},
        "instances": {"all": ["annotations/instances_scenes.json"]},
        "karpathy": "dataset_scenes.json",
        "questions": {"all": ["v2_OpenEnded_mscoco_scenes_questions.json"]},
        "annotations": {"all": ["v2_mscoco_scenes_annotations.json"]},
    }


def write_packages(folder: Path, words: Sequence[str]) -> None:
    """Write two versions of a package with a vocabulary: the second has lost all words."""
    kept = [word for word in words if word.startswith("[") or not word.removeprefix("##").isalpha()]
    for version, tokens in (("1.0", words), ("2.0", kept)):
        package, info = "regressions_vocabulary", f"regressions_vocabulary-{version}.dist-info"
        texts = {
            f"{package}/__init__.py": "",
            f"{package}/vocab.txt": "\n".join(tokens),
            # A package with a vocabulary is a BERT's; its weights are not read.
            f"{package}/config.json": '{"model_type": "bert"}',
            f"{package}/model.safetensors": "",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {VOCABULARY}\nVersion: {version}\n",
        }
        texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in texts)
        for name, text in texts.items():
            (folder / version / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / version / name).write_text(text)


def params(key: str, *doses: Any) -> Change:
    return Change("params", key, doses)


def code(file: str, old: str, *new: str) -> Change:
    return Change("code", file, tuple((old, text) for text in new))


def raw(how: Callable[..., None], *doses: Any) -> Change:
    return Change("raw", RAW, tuple(partial(how, **{"share": dose}) for dose in doses))


STEPS = params("finetune.vqa.max_steps", 10, 1)
TARGETS = "scores_BA[i, answer] = score"
SHUFFLED = code("tasks/vqa.py", TARGETS, "scores_BA[i - 1, answer] = score", "scores_BA[0, answer] = score")
SWAPPED = raw(swap_answers, 0.7, 1.0)
ROWS = [
    Row("cause", "a drop with swapped answers", (Change("drop", DROP, (partial(swap_answers, share=1.0),)),)),
    Row("cause", "a drop of near-duplicates", (Change("drop", DROP, (partial(repeat_image, count=1),)),)),
    Row("cause", "answers swapped in raw data", (SWAPPED,)),
    Row("cause", "a truncated raw file", (raw(truncate, 0.1, 0.02),)),
    Row("cause", "a lost part of train", (raw(lose_split, 0.1, 0.02),)),
    Row("cause", "fewer regions of an image", (params("features.max_regions", 2, 1),)),
    Row("cause", "another size of images", (params("features.source", "grid"),)),
    Row("cause", "fewer steps", (STEPS,)),
    Row("cause", "smaller batches", (params("finetune.vqa.batch_size", 2, 1),)),
    Row("cause", "learning rate", (params("defaults.finetune.optimizer.lr", 1e-5, 1e-7),)),
    Row("cause", "cut questions", (params("defaults.finetune.max_text_len", 5, 3),)),
    Row("cause", "dropout", (params("models.tden.config.dropout", 0.7, 0.95),)),
    Row("cause", "initial weights", (params("models.tden.config.init_std", 1e-3, 3.0),)),
    Row("cause", "lost answers", (params("tokenizer.min_answer_count", 60, 200),)),
    Row("cause", "shuffled targets in the code", (SHUFFLED,)),
    Row(
        "cause",
        "sign of a loss",
        (code("objectives/loss.py", "Loss.of(total, len(logits_BA)", "Loss.of(-total, len(logits_BA)"),),
    ),
    Row(
        "cause",
        "attention in a layer",
        (code("models/layers/attention.py", "memory.values, mask, dropout)", "memory.values * 0, mask, dropout)"),),
    ),
    Row(
        "cause",
        "features in the code",
        (code("vision/simple_regions.py", "word)] = 1", "word)] = 1 - number % 2", "word)] = 0"),),
    ),
    Row(
        "cause",
        "schedule in the code",
        (
            code(
                "training/optim.py",
                "factor = remaining\n",
                "factor = remaining * 1e-2\n",
                "factor = remaining * 1e-4\n",
            ),
        ),
    ),
    Row("cause", "encoded texts in the code", (code("data/tokenizer.py", "= max_len - 2", "= 2", "= 1"),)),
    Row("two", "fewer steps, shuffled targets", (STEPS, SHUFFLED)),
    Row("two", "swapped answers, cut questions", (SWAPPED, params("defaults.finetune.max_text_len", 5, 3))),
    Row(
        "together",
        "a schedule by steps, and early ones",
        (
            params("defaults.finetune.optimizer.schedule", "steps"),
            params("defaults.finetune.optimizer.decay_at", [0.1, 0.11], [0.02, 0.03, 0.04, 0.05]),
        ),
    ),
    Row(
        "together",
        "late steps, and code that takes shares for steps",
        (
            # A mapping that the good side lacks is one change.
            params(
                "finetune.vqa.optimizer", *({"schedule": "steps", "decay_at": at} for at in ([0.8, 0.9], [0.9] * 4))
            ),
            code("training/optim.py", "round(share * total)", "round(share)"),
        ),
    ),
    Row("package", "another version of a vocabulary", (Change("package", VOCABULARY, ("2.0",)),)),
    *[Row("none", "harmless changes and another seed")] * 4,
    Row("none", "another seed alone"),
]
HARMLESS = [
    params("drift.images", 100),
    params("flow.wait_minutes", 600),
    params("shards.images_per_shard", 400),
    params("features.min_score", 0.3),
    params("detector.steps", 200),
    params("validate.min_image_side", 12),
    params("defaults.finetune.max_text_len", 30),
    params("defaults.finetune.max_regions", 14),
    Change("raw", EXTRA, (reword_caption,)),
    *[
        code(file, "from __future__ import annotations\n", f"from __future__ import annotations\n{UNUSED}")
        for file in ("tasks/vqa.py", "models/layers/heads.py", "vision/simple_regions.py", "data/answers.py")
    ],
    code("training/optim.py", '"""', '"""Also: '),
]
