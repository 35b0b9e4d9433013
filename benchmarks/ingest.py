"""Time and peak memory of `vlp ingest` on a batch of 100,000 pairs: `python benchmarks/ingest.py [--pairs N]`.

Makes a project with an evaluation set in a temporary folder, and a batch of small JPEGs and PNGs. The number of pairs
that are new, repeated (same bytes, same pixels in another format, scaled and recompressed), leaked from the evaluation
set, and bad is known; the counts that `vlp ingest` reports are checked against it. Then a batch of 3,000 into datasets
that already have `--held` pairs, to see what memory depends on.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vlp_models.contrib.ingest.index import FINGERPRINTS, MANIFEST, PAIRS
from vlp_models.curation.duplicates.fingerprints import fingerprint_image

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ingest.json"
EVALUATION = 2000
SHARES = {"same_bytes": 0.01, "same_pixels": 0.01, "scaled": 0.02, "leaked": 0.01, "truncated": 0.01, "no_text": 0.01}


def picture(seed: int) -> Image.Image:
    """Return a smooth random image of 128 x 96: eight by six random colors, interpolated, with a little noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize((128, 96), Image.Resampling.BICUBIC)
    noise = rng.integers(-6, 7, (96, 128, 1))
    return Image.fromarray(np.clip(np.asarray(coarse, np.int16) + noise, 0, 255).astype(np.uint8))


def encode(image: Image.Image, form: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def kind(number: int, pairs: int) -> str:
    """Return the kind of pair `number`: the first of each hundred are bad, by SHARES."""
    position = (number % 100) / 100
    for name, share in SHARES.items():
        if position < share - 1e-9:
            return name
        position -= share
    return "new"


def write_some(task: tuple[str, int, int, int]) -> list[str]:
    """Write images and lines `first` to `last` of the batch."""
    folder, first, last, pairs = task
    lines = []
    for number in range(first, last):
        pair_kind = kind(number, pairs)
        caption = f"picture number {number} of a drop" if pair_kind != "no_text" else "1 + 1"
        form, suffix, options = (
            ("PNG", "png", {"compress_level": 1}) if number % 4 == 0 else ("JPEG", "jpg", {"quality": 85})
        )
        original = number + 50 if number % 100 < 50 and number + 50 < pairs else number - 50  # number of a new pair
        if pair_kind == "same_bytes":
            data, suffix = source(original)
        elif pair_kind == "same_pixels":
            data, suffix = source(original)
            data, suffix = encode(Image.open(io.BytesIO(data)).convert("RGB"), "BMP"), "bmp"
        elif pair_kind == "scaled":
            data = encode(picture(original).resize((160, 120), Image.Resampling.BICUBIC), "JPEG", quality=60)
            suffix = "jpg"
        elif pair_kind == "leaked":
            data, suffix = encode(picture(-1 - number % EVALUATION + 10**9), "JPEG", quality=70), "jpg"
        else:
            data = encode(picture(number), form, **options)
        if pair_kind == "truncated":
            data = data[: len(data) // 2]
        name = f"images/{number // 1000:03d}/{number}.{suffix}"
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        lines.append(f'{name},"{caption}"\n')
    return lines


def source(number: int) -> tuple[bytes, str]:
    """Return a new image as it is in the batch."""
    if number % 4 == 0:
        return encode(picture(number), "PNG", compress_level=1), "png"
    return encode(picture(number), "JPEG", quality=85), "jpg"


def make_project(root: Path, pairs: int) -> None:
    import yaml

    evaluation = root / "data" / "raw" / "tested"
    (evaluation / "images").mkdir(parents=True)
    lines = ["image,caption,split\n"]
    for number in range(EVALUATION):
        name = f"images/{number}.png"
        picture(-1 - number + 10**9).save(evaluation / name, compress_level=1)
        lines.append(f"{name},a tested picture,{'test' if number % 2 else 'val'}\n")
    (evaluation / "pairs.csv").write_text("".join(lines))
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["data"] = {"tested": {"format": "pairs", "root": "data/raw/tested", "pairs": "pairs.csv"}}
    params["ingest"] = {"settle_seconds": 0.0, "processes": 2, "max_bad_fraction": 0.05}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    (root / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=root, check=True)
    drop = root / "data" / "inbox" / "drop"
    drop.mkdir(parents=True)
    tasks = [(str(drop), first, min(first + 500, pairs), pairs) for first in range(0, pairs, 500)]
    with ProcessPoolExecutor(2) as pool, (drop / "pairs.csv").open("w") as listing:
        listing.write("image,caption\n")
        for part in pool.map(write_some, tasks):
            listing.writelines(part)


def hold(root: Path, pairs: int) -> None:
    """Write a batch of `pairs` pairs into the dataset, as far as the index reads it: lines, hashes and one fingerprint
    for all of them, no images."""
    folder = root / "data" / "accepted" / "held"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(7)
    names = []
    with (folder / PAIRS).open("w") as file:
        for number in range(pairs):
            digest = hashlib.sha256(b"%d" % number).hexdigest()
            row = {"image": f"images/{digest[:2]}/{digest}.jpg", "caption": "held", "split": "train", "sha256": digest}
            row |= {"pixels": digest[::-1], "perceptual": f"{int(rng.integers(0, 2**63)) * 2 + 1:016x}"}
            names.append(row["image"])
            file.write(json.dumps(row) + "\n")
    fingerprint = fingerprint_image(picture(7), keypoints=True, mirrored=False).to_bytes()
    pq.write_table(pa.table({"image": names, "fingerprint": [fingerprint] * pairs}), folder / FINGERPRINTS)
    (folder / MANIFEST).write_text(json.dumps({"snapshot": "", "counts": {"new": pairs}}))


def truth(pairs: int) -> dict[str, int]:
    kinds = [kind(number, pairs) for number in range(pairs)]
    duplicates = sum(kinds.count(name) for name in ("same_bytes", "same_pixels", "scaled"))
    bad = kinds.count("truncated") + kinds.count("no_text")
    leaks = kinds.count("leaked")
    return {"new": pairs - duplicates - bad - leaks, "duplicates": duplicates, "leaks": leaks, "bad": bad}


def ingest(root: Path) -> dict[str, float]:
    """Return the seconds of one `vlp ingest`, and the peak memory of its processes in MB."""
    code = (
        "import resource, json, sys; from vlp_models.cli.main import main\n"
        "sys.argv = ['vlp', 'ingest']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "peak = lambda who: resource.getrusage(who).ru_maxrss / 1024\n"
        "print(json.dumps({'main': peak(resource.RUSAGE_SELF), 'children': peak(resource.RUSAGE_CHILDREN)}))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DVC_SITE_CACHE_DIR": str(root / "site"), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    peaks = json.loads(done.stdout.splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mb_main": round(peaks["main"]),
        "peak_mb_largest_child": round(peaks["children"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--held", type=int, nargs="*", default=[10_000, 100_000], help="sizes of the dataset")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs = []
    for pairs, held in [(options.pairs, 0), *((min(options.pairs, 3000), held) for held in options.held)]:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            start = time.perf_counter()
            make_project(root, pairs)
            if held:
                hold(root, held)
            made = time.perf_counter() - start
            load = os.getloadavg()[0]
            first = ingest(root)
            report = json.loads((root / "reports" / "ingest.json").read_text())
            counts = {key: report[key] for key in ("new", "duplicates", "leaks", "bad")}
            second = ingest(root)
            run = {
                "pairs": pairs,
                "held_beforehand": held,
                "first": first,
                "nothing_new": second,
                "counts": counts,
                "truth": truth(pairs),
                "load_average_before": round(load, 2),
                "load_average_after": round(os.getloadavg()[0], 2),
            }
            print(json.dumps(run), f"(made in {made:.0f} s)", flush=True)
            assert counts == run["truth"], "the counts are not the truth"
            runs.append(run)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"processes": 2, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
