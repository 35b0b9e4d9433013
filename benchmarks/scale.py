"""Time and memory of stages and loader for many pairs: `python benchmarks/scale.py [--pairs N ...]`.

Generates that many images of 16 x 16 pixels with a caption each in a temporary folder, as a dataset of format `pairs`.
Every 200th pair is bad in one of several ways, and up to 5,000 images each are val and test. Each stage runs in a
process of its own. Recorded are its seconds, the memory of the process before it starts to work, its peak, and the peak
of its workers; the counts of bad pairs are checked. `peak_mb` includes pages of mapped files, which the system drops if
others need the memory; `own_mb` excludes them and is sampled 20 times a second.

A straight line is fitted through the sizes and extrapolated to 10^8 pairs: an estimate that assumes that nothing but
the number of rows changes (the disk must hold spilled data, and the file cache must be as effective).

Each image of val and test is compared with all others (`validate.near_duplicates`), which takes time proportional to
the product of both numbers; `--no-near-duplicates` skips it, and the keypoints that prepare extracts for it.

`--pictures` is the number of images; the captions of all further pairs are of these images again. So 10^8 pairs need
little disk, and show what rows alone take.

`--resume` measures something else: how long `features` takes to resume. For each number, data/validated has that many
rows, in a mixed order and all of one image; 99% of the chunks exist as empty files, whose names are all that is read of
them. Recorded are the seconds from the start of the process to the end of the first new chunk, of 512 images.

`--local` is the folder for the images; 10^6 of them are 4 GB of small files. Use an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "scale-cpu.json"
RESUMED = ROOT / "benchmarks" / "results" / "scale-resume-cpu.json"
STAGES = ("prepare", "validate", "tokenizer", "shards", "loader", "streamed")
FAR = 10**8
COLORS = ("red", "blue", "green", "gray")
THINGS = ("cat", "dog", "house", "tree", "box", "cup", "car", "boat")

STAGE = """
import dataclasses, json, os, resource, sys, threading, time
from pathlib import Path
from vlp_models.params import load_params
from vlp_models.common.workspace import Workspace
name, root = sys.argv[1], Path(sys.argv[2])
params, workspace = load_params(root / "params.yaml"), Workspace(root)
now = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
most = {"own": 0}
def status(key):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) / 1024
def watch():
    while True:
        most["own"] = max(most["own"], status("RssAnon"))
        time.sleep(0.05)
threading.Thread(target=watch, daemon=True).start()
if name in ("loader", "streamed"):
    from vlp_models.training.data import LoaderFactory
    stream = {}
    if name == "streamed":
        from vlp_models.params import StreamParams
        stream = {"stream": StreamParams(address=str(workspace.shards), buffer_mb=128)}
    before, start = now(), time.perf_counter()
    factory = LoaderFactory(workspace.shards, "captions", sources={}, collate=list, batch_size=256, num_workers=0,
                            seed=1, regions=False, pixels=True, **stream)
    loader, _ = factory(0, 1)
    first, ids = time.perf_counter() - start, set()
    count = 0
    for number, batch in enumerate(loader):
        count += len(batch)
        if number == int(sys.argv[3]):
            break
    more = {"samples": count, "of": len(factory.train), "to_open_s": round(first, 2)}
else:
    import importlib
    stage = importlib.import_module(f"vlp_models.pipeline.stages.{name}")
    if name == "validate":
        import vlp_models.curation.validation.suites
    before, start, more = now(), time.perf_counter(), {}
    more_arguments = {"inputs": []} if name == "shards" else {}
    stage.run(params, workspace, "many" if name == "prepare" else "", **more_arguments)
seconds = time.perf_counter() - start
print("RESULT", json.dumps({"seconds": round(seconds, 1), "before_mb": round(before),
      "peak_mb": round(status("VmHWM")), "own_mb": round(most["own"]),
      "worker_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024), **more}))
"""

RESUME = """
import json, os, resource, sys, time
from pathlib import Path
from vlp_models.params import load_params
from vlp_models.common.workspace import Workspace
from vlp_models.data.features import CHUNK_IMAGES, chunk_name
from vlp_models.pipeline.stages import features
name, root, seconds = sys.argv[1], Path(sys.argv[2]), {}
class Mapper:
    def map(self, function, items):
        work = function.keywords["job"].work
        if name == "fill":
            chunks = -(-int(sys.argv[4]) // CHUNK_IMAGES)
            for number in range(chunks * 99 // 100):
                (work / chunk_name(number)).touch()
            raise KeyboardInterrupt
        seconds["listed_s"] = round(time.time() - begin, 2)
        item = next(items)
        seconds["read_s"] = round(time.time() - begin, 2)
        seconds["chunk"] = item[0]
        function(item)
        seconds["seconds"] = round(time.time() - begin, 2)
        raise KeyboardInterrupt
begin = float(sys.argv[3])
seconds["imported_s"] = round(time.time() - begin, 2)
try:
    features.run(load_params(root / "params.yaml"), Workspace(root), mapper=Mapper())
except KeyboardInterrupt:
    pass
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print("RESULT", json.dumps({**seconds, "peak_mb": round(peak)}))
"""


def picture(number: int) -> bytes:
    """Return a PNG of 16 x 16 pixels of noise, different for each number: no two are near-duplicates."""
    noise = np.random.default_rng(number).bytes(16 * 48)
    rows = b"".join(b"\0" + noise[48 * row : 48 * (row + 1)] for row in range(16))  # 0: no filter; 48 bytes: 16 pixels
    header = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def caption(number: int) -> str:
    color, other = (COLORS[number // k % len(COLORS)] for k in (1, 4))
    thing, behind = (THINGS[number // k % len(THINGS)] for k in (16, 128))
    return f"a {color} {thing} stands in front of a {other} {behind} at place {number}"


def another_caption(number: int) -> str:
    """Return a caption, different for each number, of a few thousand words in total."""
    millions, rest = divmod(number, 10**6)
    return f"{caption(number % 1000)} of row {rest // 1000} in hall {millions}"


def split_of(number: int, every: int) -> str:
    return {3: "val", 4: "test"}.get(number % every, "train")


def write_some(task: tuple[str, int, int, int]) -> list[str]:
    """Write images and lines `first` to `last`; one in `every` is val, one test, and 5 of 1,000 pairs are bad."""
    folder, first, last, every = task
    lines = []
    for number in range(first, last):
        data, text, name = picture(number), caption(number), f"images/{number // 1000:05d}/{number}.png"
        split = split_of(number, every)
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fault = number % 1000
        if fault == 7:
            data = data[: len(data) // 2]
        elif fault == 207:
            text = "1 + 1"
        elif fault == 407:
            name, text = f"images/{(number - 1) // 1000:05d}/{number - 1}.png", caption(number - 1).upper()  # repeated
            split = split_of(number - 1, every)
        elif fault == 607:
            name = f"images/lost/{number}.png"
        elif fault == 807:
            text = "word"
        if fault not in (407, 607):
            path.write_bytes(data)
        lines.append(json.dumps({"image": name, "caption": text, "split": split}) + "\n")
    return lines


def make_project(root: Path, pairs: int, near_duplicates: bool, pictures: int | None = None) -> None:
    """Make the dataset and params.yaml. pictures: number of images; default: one per pair."""
    import yaml

    pictures = min(pairs, pictures or pairs)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["data"] = {"many": {"format": "pairs", "root": "data/raw/many", "pairs": "pairs.jsonl"}}
    if not near_duplicates:
        params["validate"]["near_duplicates"] |= {"max_hash_distance": -1, "keypoints": False}
    params["shards"] |= {"pixels": True, "images_per_shard": max(1, 5000 * pictures // pairs)}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    folder = root / "data" / "raw" / "many"
    folder.mkdir(parents=True)
    every = max(10, pictures // 5000)
    tasks = [(str(folder), first, min(first + 1000, pictures), every) for first in range(0, pictures, 1000)]
    sound: list[str] = []
    with ProcessPoolExecutor(2) as pool, (folder / "pairs.jsonl").open("w") as listing:
        for lines in pool.map(write_some, tasks):
            listing.writelines(lines)
            if pairs > pictures:
                found = map(json.loads, lines)
                sound += [pair["image"] for pair in found if pair["split"] == "train" and _number(pair) % 100 != 7]
        for number in range(pictures, pairs):
            pair = {"image": sound[number % len(sound)], "caption": another_caption(number), "split": "train"}
            listing.write(json.dumps(pair) + "\n")


def _number(pair: dict[str, str]) -> int:
    return int(Path(pair["image"]).stem)


def measure(root: Path, stage: str, batches: int) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(root)}
    command = [sys.executable, "-c", STAGE, stage, str(root), str(batches)]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{stage}:\n{done.stdout}{done.stderr}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return found


def make_resumed(root: Path, images: int) -> None:
    """Make data/validated with so many rows, and params.yaml with features that need no detector."""
    import pyarrow as pa
    import yaml

    from vlp_models.data.tables import BATCH_ROWS, SCHEMAS, RowGroups

    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["features"]["source"], params["detector"]["source"] = "grid", "none"
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    (root / "one.png").write_bytes(picture(0))
    validated, schema = root / "data" / "validated", SCHEMAS["images"]
    validated.mkdir(parents=True)
    constant = {"source": "many", "split": "train", "path": "one.png", "width": 16, "height": 16, "provenance": ""}
    constant["sha256"] = hashlib.sha256(picture(0)).hexdigest()
    firsts = range(0, images, BATCH_ROWS)
    with RowGroups(validated / "images.parquet", schema, len(firsts)) as table:
        for first in firsts:
            numbers = range(first, min(first + BATCH_ROWS, images))
            rows = {name: [value] * len(numbers) for name, value in constant.items()}
            # a prime that divides no size: each number once, in a mixed order
            rows["image_id"] = [f"many/{number * 7919 % images:09d}" for number in numbers]
            table.write(pa.table(rows).select(schema.names).cast(schema))


def measure_resume(root: Path, images: int) -> dict[str, float]:
    """Start `features` twice: to find out where its chunks are, and with 99% of them finished."""
    make_resumed(root, images)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(root)}
    for name in ("fill", "resume"):
        command = [sys.executable, "-c", RESUME, name, str(root), str(time.time()), str(images)]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"features:\n{done.stdout}{done.stderr}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    assert found.pop("chunk") == -(-images // 512) * 99 // 100, "the first missing chunk"
    return {"images": images, **found, "load_average": round(os.getloadavg()[0], 2)}


def resume(sizes: list[int], local: Path | None, out: Path) -> None:
    runs = []
    for images in sizes:
        with tempfile.TemporaryDirectory(dir=local) as name:
            runs.append(measure_resume(Path(name), images))
        print(json.dumps(runs[-1]), flush=True)
        machine = {"cpus": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}
        out.write_text(json.dumps({"machine": machine, "resume_at_99_percent": runs}, indent=2) + "\n")


def check(root: Path, pairs: int) -> None:
    """Check that each kind of bad pair was found as often as it was made; pairs: with an image of their own."""
    report = json.loads((root / "reports" / "validation.json").read_text())
    failed = {(rule["table"], rule["rule"]): rule["failed"] for rule in report["rules"]}
    for where, table, rule in (
        (7, "images", "image_decodes"),
        (207, "captions", "text_letters"),
        (607, "images", "image_present"),
        (807, "captions", "caption_words"),
    ):
        made = len(range(where, pairs, 1000))
        assert failed.get((table, rule), 0) == made, (table, rule, failed.get((table, rule)), made)
    repeated = len(range(407, pairs, 1000))
    assert sum(report["left_out"].values()) == repeated, (report["left_out"], repeated)


def fit(runs: list[dict[str, float]]) -> dict[str, float]:
    """Fit least squares through (pairs, value), with equal relative weights."""
    sizes = np.array([run["pairs"] for run in runs], float)
    found: dict[str, float] = {}
    for name in ("seconds", "peak_mb", "own_mb"):
        values = np.array([run[name] for run in runs], float)
        if len(runs) > 1:
            slope, base = np.polyfit(sizes, values, 1, w=1 / np.sqrt(sizes))
            found |= {f"{name}_per_million": round(slope * 1e6, 1), f"{name}_at_{FAR:.0e}": round(base + slope * FAR)}
    return found


def write(out: Path, runs: dict[str, list[dict[str, float]]], *, near_duplicates: bool) -> None:
    result = {
        "machine": {"cpus": os.cpu_count(), "system": platform.system(), "python": platform.python_version()},
        "near_duplicates": near_duplicates,
        "stages": {stage: {"runs": found, "fit": fit(found)} for stage, found in runs.items() if found},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--pictures", type=int, default=None, help="number of images; default: one per pair")
    parser.add_argument("--batches", type=int, default=200, help="batches of 256 to load")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--no-near-duplicates", action="store_true", help="skip the search for near-duplicates")
    parser.add_argument("--resume", type=int, nargs="+", default=[], help="numbers of images; 99%% have features")
    parser.add_argument("--local", type=Path, default=None, help="folder for the images")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.resume:
        resume(options.resume, options.local, options.out or RESUMED)
        return
    out = options.out or RESULTS
    runs: dict[str, list[dict[str, float]]] = {stage: [] for stage in options.stages}
    for pairs in options.pairs:
        with tempfile.TemporaryDirectory(dir=options.local) as name:
            root = Path(name)
            start = time.perf_counter()
            make_project(root, pairs, not options.no_near_duplicates, options.pictures)
            print(f"{pairs:,} pairs, made in {time.perf_counter() - start:.0f} s", flush=True)
            for stage in options.stages:
                found = {"pairs": pairs, "pictures": min(pairs, options.pictures or pairs)}
                found |= measure(root, stage, options.batches)
                found["load_average"] = round(os.getloadavg()[0], 2)
                runs[stage].append(found)
                print(stage, json.dumps(found), flush=True)
                if stage == "validate":
                    check(root, int(found["pictures"]))
                write(out, runs, near_duplicates=not options.no_near_duplicates)  # the next may take hours


if __name__ == "__main__":
    main()
