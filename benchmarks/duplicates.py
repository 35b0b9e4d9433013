"""Measure the recall and false positives of near-duplicate detection: `python benchmarks/duplicates.py ROOT...`.

ROOT is any folder of photos. The first photos (in the order of a hash of their names) are the test set; each is changed
in each way, and every changed copy is searched in the test set, as a training image would be. The other photos are
searched unchanged. A copy counts as found if its own original is returned; any other match is a false positive.
`--crowd 3000` adds that many of the others to the test set, since a larger test set hides keypoints.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from vlp_models.curation.duplicates.fingerprints import Fingerprint, fingerprint_image
from vlp_models.curation.duplicates.search import NearDuplicateIndex, NearRules
from vlp_models.data.images import to_upright_rgb

Change = Callable[[Image.Image, random.Random], Image.Image]
BATCH = 256
ENDINGS = (".jpg", ".jpeg", ".png")
OTHERS = "others, as they are"


def saved(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")


def scaled(image: Image.Image, by: float) -> Image.Image:
    return image.resize((max(1, round(image.width * by)), max(1, round(image.height * by))), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, share: float, rng: random.Random) -> Image.Image:
    """Remove `share` of the width and of the height, at a random position."""
    width, height = round(image.width * (1 - share)), round(image.height * (1 - share))
    x, y = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    return image.crop((x, y, x + width, y + height))


def written_on(image: Image.Image, rng: random.Random) -> Image.Image:
    """Draw two lines of large text on a bar, about a sixth of the image."""
    image, height = image.copy(), image.height
    draw, bar = ImageDraw.Draw(image), height // 6
    top = rng.choice((0, height // 2 - bar // 2, height - bar))
    draw.rectangle((0, top, image.width, top + bar), fill=rng.choice(("black", "white", "yellow")))
    draw.text((image.width // 20, top + bar // 8), "WHEN YOU SEE IT", fill="red", font_size=bar * 0.6)
    return image


def shifted(image: Image.Image, rng: random.Random) -> Image.Image:
    """Change brightness, contrast and saturation by up to 30%, hue by up to 15 degrees."""
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(rng.uniform(0.7, 1.3))
    hue, saturation, value = image.convert("HSV").split()
    by = rng.randint(-11, 11)
    return Image.merge("HSV", (hue.point(lambda h: (h + by) % 256), saturation, value)).convert("RGB")


# The names seed the changes: keep them, or published figures cannot be reproduced.
CHANGES: dict[str, Change] = {
    "saved anew, JPEG quality 50": lambda image, rng: saved(image, 50),  # plain-ok
    "scaled to a half": lambda image, rng: scaled(image, 0.5),
    "scaled by 1.5": lambda image, rng: scaled(image, 1.5),
    "bordered, 10% on each side": lambda image, rng: ImageOps.expand(
        image, image.width // 10, rng.choice(("black", "white", "gray"))
    ),
    "mirrored": lambda image, rng: ImageOps.mirror(image),
    "turned by 90 degrees": lambda image, rng: image.transpose(Image.Transpose.ROTATE_90),
    "turned by 3 degrees": lambda image, rng: image.rotate(rng.choice((-3, 3)), Image.Resampling.BICUBIC),
    "cropped by 5%": lambda image, rng: cropped(image, 0.05, rng),
    "cropped by 10%": lambda image, rng: cropped(image, 0.10, rng),
    "cropped by 20%": lambda image, rng: cropped(image, 0.20, rng),
    "colours shifted": shifted,  # plain-ok
    "grey": lambda image, rng: ImageOps.grayscale(image).convert("RGB"),  # plain-ok
    "text laid over": written_on,
    "mirrored, cropped by 10%, saved anew": lambda image, rng: saved(  # plain-ok
        ImageOps.mirror(cropped(image, 0.1, rng)), 70
    ),
}


def fingerprint_file(task: tuple[Path, str, bool]) -> Fingerprint:
    path, change, held = task
    with Image.open(path) as file:
        image = to_upright_rgb(file)
    if change:
        image = CHANGES[change](image, random.Random(f"{path.name} {change}"))
    return fingerprint_image(image, keypoints=True, mirrored=held)


def batches(fingerprints: Iterable[Fingerprint]) -> Iterable[list[Fingerprint]]:
    stream = iter(fingerprints)
    while batch := list(islice(stream, BATCH)):
        yield batch


def measure(held: NearDuplicateIndex, fingerprints: Iterable[Fingerprint], numbered: bool) -> dict[str, Any]:
    """Search fingerprints. own: copy number n is of indexed image n; else none has a copy."""
    queries = matched = 0
    false: list[tuple[int, int]] = []
    for batch in batches(fingerprints):
        for match in held.search(batch):
            if numbered and match.indexed == queries + match.query:
                matched += 1
            else:
                false.append((queries + match.query, match.indexed))
        queries += len(batch)
    return {"asked": queries, "found": matched, "false": false}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("roots", type=Path, nargs="+")
    parser.add_argument("--changed", type=int, default=1000)
    parser.add_argument("--others", type=int, default=6000)
    parser.add_argument("--crowd", type=int, default=0, help="others that are added to the test set and not searched")
    parser.add_argument("--skip", type=int, default=0, help="photos to skip: those that the limits were tuned on")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--no-keypoints", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    photos = sorted(
        (path for root in options.roots for path in root.rglob("*") if path.suffix.lower() in ENDINGS),
        key=lambda path: hashlib.sha256(path.name.encode()).digest(),
    )
    changed = photos[options.skip : options.skip + options.changed]
    rest = photos[: options.skip] + photos[options.skip + options.changed :]
    crowd, others = rest[: options.crowd], rest[options.crowd :][: options.others]
    rules = NearRules(max_hash_distance=options.bits, keypoints=not options.no_keypoints)
    print(f"{len(changed)} photos changed, {len(crowd)} more in the test set, {len(others)} others", file=sys.stderr)
    with ProcessPoolExecutor(options.processes) as pool:
        clock = time.perf_counter()
        tested = list(pool.map(fingerprint_file, [(path, "", True) for path in [*changed, *crowd]], chunksize=16))
        held = NearDuplicateIndex(tested, rules)
        rows: dict[str, Any] = {}
        for change in CHANGES:
            tasks = [(path, change, False) for path in changed]
            rows[change] = measure(held, pool.map(fingerprint_file, tasks, chunksize=16), numbered=True)
            print_row(change, rows[change])
        tasks = [(path, "", False) for path in others]
        start = time.perf_counter()
        strangers = list(pool.map(fingerprint_file, tasks, chunksize=16))
        made = time.perf_counter() - start
        start = time.perf_counter()
        rows[OTHERS] = measure(held, strangers, numbered=False)
        rows[OTHERS] |= {"print_seconds": round(made, 1), "search_seconds": round(time.perf_counter() - start, 1)}
        print_row(OTHERS, rows[OTHERS])
    for change, row in rows.items():
        queries = others if change == OTHERS else changed
        row["false"] = [[queries[n].name, [*changed, *crowd][h].name] for n, h in row["false"]]
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{time.perf_counter() - clock:.0f} s", file=sys.stderr)


def print_row(change: str, row: dict[str, Any]) -> None:
    print(f"{change:40} {row['found']:6} of {row['asked']:6}, false {len(row['false'])}", flush=True)


if __name__ == "__main__":
    main()
