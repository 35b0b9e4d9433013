"""What is planted in which week, drawn by seed; and the drops: submissions of pairs whose fate is known.

A drop is written together with the fate of each of its images, which the judge reads.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import shutil
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

PAIRS, HUGE = 30, 300  # images of a drop, and of a huge one
PRIVATE = 400  # images that no drop has: the judge's own test set
LEAKS = 9  # test images in a drop with leaks: a third each as they are, encoded again, cropped
CALM = "calm"
DROPS = ("leaked", "swapped", "drifted", "empty", "damaged", "huge", "another language", "withdrawn again")
REJECTED = ("damaged", "empty", "another language")  # the flow fails, and a person acts
ACTS = ("forget", "better recipe", "worse recipe", "upgrade")
FAULTS = (
    *("worker killed", "server killed", "database killed", "machine killed", "disk full", "bucket away"),
    *("credential expired", "clock jumps", "commit on the remote"),
)
REPEATS = {**dict.fromkeys(DROPS, 2), **dict.fromkeys(FAULTS, 3), "forget": 4, "better recipe": 2, "worse recipe": 3}
FRENCH = (
    "une photo avec {} formes de couleur",
    "on voit {} objets sur un fond clair",
    "il y a {} figures dans cette image",
    "{} formes dessinées, vues de face",
)
LONG = (
    "An exhaustive description follows: {} Furthermore the composition appears deliberately balanced, with generous "
    "margins, subtle shading, and an unmistakably geometric vocabulary throughout."
)


@dataclass(frozen=True)
class Week:
    number: int
    drop: str = CALM
    act: str = ""
    fault: str = ""


def plan(seed: int, weeks: int) -> list[Week]:
    """Return the weeks of a year. The first is calm; each of the others has at most one drop, one act and one fault.

    With less room than plants, which of them occur is drawn as well. An image that comes again needs one that was
    withdrawn before; a week whose drop is rejected has no fault.
    """
    chance = random.Random(seed)
    columns: list[dict[int, str]] = []
    for names in (DROPS, ACTS, FAULTS):
        free = list(range(2, weeks + 1))
        if names is FAULTS:  # a flow that ends with its drop is not there to be struck
            free = [week for week in free if columns[0].get(week) not in REJECTED]
        # In a month without room for all, drops that a fault can follow.
        once = sorted(chance.sample(names, len(names)), key=lambda name: name in REJECTED)
        more = [name for name in names for _ in range(REPEATS.get(name, 1) - 1)]
        chance.shuffle(more)
        chosen = [*once, *more][: len(free)]
        chance.shuffle(chosen)
        columns.append(dict(zip(chance.sample(free, len(chosen)), chosen, strict=True)))
    drops, acts, faults = columns
    first = min((week for week, act in acts.items() if act == "forget"), default=weeks)
    for week, drop in drops.items():
        if drop == "withdrawn again" and week <= first:
            later = [w for w in drops if w > first and drops[w] not in (drop, *REJECTED)]
            drops[week] = CALM
            if later:
                other = chance.choice(later)
                drops[week], drops[other] = drops[other], drop
    return [Week(n, drops.get(n, CALM), acts.get(n, ""), faults.get(n, "")) for n in range(1, weeks + 1)]


@dataclass(frozen=True)
class Pair:
    image: bytes
    caption: str
    fate: str = "new"  # new, leak, withdrawn, bad, rejected (with its whole drop)


class Pool:
    """The generated images from which drops are made: of each week its own."""

    def __init__(self, folder: Path) -> None:
        texts: dict[int, list[str]] = {}
        for row in json.loads((folder / "annotations" / "captions_scenes.json").read_text())["annotations"]:
            texts.setdefault(row["image_id"], []).append(row["caption"])
        self._texts = [texts[image_id] for image_id in sorted(texts)]
        self._images = sorted((folder / "images").iterdir())

    def __len__(self) -> int:
        return len(self._images)

    def pairs(self, start: int, count: int) -> list[Pair]:
        return [
            Pair(self._images[number].read_bytes(), self._texts[number][number % len(self._texts[number])])
            for number in range(start, start + count)
        ]


def make_drop(week: Week, pool: Pool, tested: Sequence[Path], withdrawn: Sequence[bytes], seed: int) -> list[Pair]:
    """Return the pairs of a week's drop.

    Args:
        tested: image files of the test split, to leak. withdrawn: the images that were withdrawn so far.
    """
    chance = random.Random(f"{seed}/{week.number}")
    pairs = pool.pairs((week.number - 1) * PAIRS, PAIRS)
    if week.drop == "leaked":
        files = chance.sample(list(tested), LEAKS)
        third = LEAKS // 3
        images = [file.read_bytes() for file in files[:third]]
        images += [encode_again(file) for file in files[third : 2 * third]]
        images += [crop(file, chance) for file in files[2 * third :]]
        pairs += [Pair(image, "a picture from elsewhere", "leak") for image in images]
    elif week.drop == "swapped":
        captions = [pair.caption for pair in pairs]
        pairs = [Pair(p.image, caption) for p, caption in zip(pairs, captions[1:] + captions[:1], strict=True)]
    elif week.drop == "drifted":
        pairs = [Pair(enlarge(pair.image), LONG.format(pair.caption)) for pair in pairs]
    elif week.drop == "another language":
        texts = [chance.choice(FRENCH).format(chance.randint(2, 9)) for _ in pairs]
        pairs = [Pair(pair.image, text, "rejected") for pair, text in zip(pairs, texts, strict=True)]
    elif week.drop == "damaged":
        broken = set(chance.sample(range(PAIRS), PAIRS // 3))
        cut = [p.image[: len(p.image) // 2] if i in broken else p.image for i, p in enumerate(pairs)]
        pairs = [Pair(image, p.caption, "rejected") for image, p in zip(cut, pairs, strict=True)]
    elif week.drop == "huge":
        # behind the images of all weeks
        pairs = [*pool.pairs(len(pool) - HUGE, HUGE), Pair(make_bomb(60_000), "a bomb of pixels", "bad")]
    elif week.drop == "withdrawn again":
        pairs += [Pair(image, "the picture that was withdrawn", "withdrawn") for image in withdrawn[-1:]]
    elif week.drop == "empty":
        pairs = []
    return pairs


def write_drop(pairs: Sequence[Pair], name: str, inbox: Path) -> list[dict[str, Any]]:
    """Move a submission into the inbox in one step; return sha256 and fate of each image."""
    folder = inbox.parent / "staging" / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "images").mkdir(parents=True)
    fates = []
    with (folder / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "caption"])
        for number, pair in enumerate(pairs):
            path = f"images/{number:04}.png"
            (folder / path).write_bytes(pair.image)
            rows.writerow([path, pair.caption])
            fates.append({"sha256": hashlib.sha256(pair.image).hexdigest(), "fate": pair.fate, "image": path})
    inbox.mkdir(parents=True, exist_ok=True)
    folder.rename(inbox / name)
    return fates


def encode_again(file: Path) -> bytes:
    buffer = io.BytesIO()
    with Image.open(file) as image:
        image.convert("RGB").resize((image.width * 5 // 4, image.height * 5 // 4)).save(buffer, "PNG")
    return buffer.getvalue()


def crop(file: Path, chance: random.Random) -> bytes:
    """Return nine tenths of an image's width and height."""
    buffer = io.BytesIO()
    with Image.open(file) as image:
        width, height = image.width * 9 // 10, image.height * 9 // 10
        left, top = chance.randint(0, image.width - width), chance.randint(0, image.height - height)
        image.convert("RGB").crop((left, top, left + width, top + height)).save(buffer, "PNG")
    return buffer.getvalue()


def enlarge(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.convert("RGB").resize((image.width * 3, image.height * 2)).save(buffer, "PNG")
    return buffer.getvalue()


def make_bomb(side: int) -> bytes:
    """Return a small PNG whose header states `side` x `side` pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
