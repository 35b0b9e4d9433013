"""Time and memory of reading the data's indexes, with 10^8 rows: `python benchmarks/scale_structures.py [--rows N]`.

The stages that make these files take hours for 10^8 pairs. So the files are made directly, with the columns, the sizes
of row groups and the order of the real ones:

    features   index.parquet of data/features, by chunks of 512 images
    hashes     the hashes of the features kept for the next run, in the order of image ids, so not of hashes
    shards     index-train.parquet of data/shards, with the view `captions` alone

Each measurement runs in a process of its own and is given as seconds, the peak of its own memory (`own_mb`, sampled 20
times a second) and of its memory with pages of mapped files (`peak_mb`), which the system drops if others need it.
`--local` is the folder for the files: about 25 GB for 10^8 rows.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "scale-structures-cpu.json"
SEED = 1
LOOKUPS = 20_000
BATCH = 4096  # samples
BATCHES = 20


def ids(first: int, count: int) -> list[str]:
    return [f"many/{number:09d}" for number in range(first, first + count)]


def starts(rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each group, and the number of its rows."""
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


# --- Making the files ------------------------------------------------------------------------------------------------


def make_features(folder: Path, rows: int) -> None:
    from vlp_models.data.features import CHUNK_IMAGES, INDEX_SCHEMA
    from vlp_models.data.tables import RowGroups

    features = folder / "features"
    features.mkdir()
    manifest = {"detector_id": "d", "feature_dim": 4, "classes": ["background"]}
    (features / "manifest.json").write_text(json.dumps(manifest))
    with RowGroups(features / "index.parquet", INDEX_SCHEMA, -(-rows // CHUNK_IMAGES)) as writer:
        for first, count in starts(rows, CHUNK_IMAGES):
            positions = np.arange(count, dtype=np.int32)
            columns = [
                ids(first, count),
                np.full(count, first // CHUNK_IMAGES, np.int32),
                positions * 36,
                positions * 0 + 36,
            ]
            writer.write(pa.table(dict(zip(INDEX_SCHEMA.names, columns, strict=True)), schema=INDEX_SCHEMA))


def make_hashes(folder: Path, rows: int) -> None:
    schema = pa.schema([("image_id", pa.string()), ("sha256", pa.string())])
    directory = folder / "hashes"
    directory.mkdir()
    with pq.ParquetWriter(directory / "hashes.parquet", schema, compression="zstd") as writer:
        for first, count in starts(rows, 32_768):
            hashes = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(first, first + count)]
            writer.write_table(pa.table({"image_id": ids(first, count), "sha256": hashes}, schema=schema))


def make_shards(folder: Path, rows: int, per_shard: int) -> None:
    from vlp_models.data.shards.write import index_schema
    from vlp_models.data.tables import RowGroups

    shards = folder / "shards"
    shards.mkdir()
    schema = index_schema()
    counts = {"train": {"captions": rows, "shards": -(-rows // per_shard)}, "val": {}, "test": {}}
    manifest = {"feature_dim": 0, "classes": [], "detector_id": "", "sources": ["many"], "counts": counts}
    (shards / "manifest.json").write_text(json.dumps(manifest))
    for split in ("train", "val", "test"):
        with RowGroups(shards / f"index-{split}.parquet", schema, -(-rows // per_shard)) as writer:
            for first, count in starts(rows if split == "train" else 0, per_shard):
                writer.write(shard_rows(schema, first, count, first // per_shard))


def shard_rows(schema: pa.Schema, first: int, count: int, shard: int) -> pa.Table:
    positions = np.arange(count, dtype=np.int64)
    digits = pa.array(positions + first).cast(pa.string())
    names = pc.binary_join_element_wise("many/", pc.utf8_lpad(digits, 9, "0"), "")
    values: dict[str, Any] = {
        "view": pa.repeat("captions", count),
        "sample_id": names,
        "image_id": names,
        "source": pa.repeat("many", count),
        "shard": np.full(count, shard, np.int32),
        "key": pc.replace_substring(names, "/", "%2F"),
        "regions_offset": positions * 0,
        "regions_size": positions * 0,
        "pixels_offset": positions * 25_600 + 1024,
        "pixels_size": positions * 0 + 24_000,
        "pixels_extension": pa.repeat("jpg", count),
        "text": pc.binary_join_element_wise("a cat in front of a house at place ", digits, ""),
    }
    columns = [values.get(column.name, pa.nulls(count, column.type)) for column in schema]
    return pa.Table.from_arrays([pa.array(column) for column in columns], schema=schema)


# --- What is measured ------------------------------------------------------------------------------------------------


def open_features(folder: Path, rows: int) -> None:
    from vlp_models.data.features import FeatureStore

    assert ids(0, 1)[0] in FeatureStore(folder / "features")


def look_up_features(folder: Path, rows: int) -> None:
    from vlp_models.data.features import FeatureStore

    store = FeatureStore(folder / "features")
    for number in np.random.default_rng(SEED).integers(rows, size=LOOKUPS):
        assert ids(int(number), 1)[0] in store
    assert "many/x" not in store


def open_hashes(folder: Path, rows: int) -> None:
    from vlp_models.data.features import _HASHES_SCHEMA
    from vlp_models.data.mapped import SortedRows

    stored = SortedRows.open(folder / "hashes" / "hashes.parquet", "sha256", _HASHES_SCHEMA)
    for number in np.random.default_rng(SEED).integers(rows, size=LOOKUPS).tolist():
        row = stored.find(hashlib.sha256(b"%d" % number).hexdigest())
        assert row is not None and row["image_id"] == ids(number, 1)[0]


def make_order(folder: Path, rows: int) -> None:
    from vlp_models.data.shards.order import EpochOrder

    order = EpochOrder(length=rows, batch_size=BATCH, seed=SEED)
    next(order.batches(0, order.steps * 99 // 100))


def make_grouped_order(folder: Path, rows: int) -> None:
    from vlp_models.data.shards.order import GroupedOrder

    images = np.arange(rows, dtype=np.uint32) // 5 * 5
    order = GroupedOrder(length=rows, batch_size=BATCH, seed=SEED, images=images, texts_per_image=5)
    next(order.batches(0))


def load(folder: Path, rows: int, **more: Any) -> None:
    """Open a loader, and take batches from 99% of an epoch on."""
    from vlp_models.training.data import LoaderFactory

    factory = LoaderFactory(
        folder / "shards",
        "captions",
        collate=list,  # type: ignore[arg-type]
        batch_size=BATCH,
        seed=SEED,
        regions=False,
        **more,
    )
    loader, _ = factory(0, 1)
    steps = len(loader)
    loader.load_state_dict({"epoch": 0, "batches": steps * 99 // 100, "steps": steps})
    batches = iter(loader)
    for _ in range(min(BATCHES, steps - steps * 99 // 100)):
        next(batches)


def load_all(folder: Path, rows: int) -> None:
    load(folder, rows, sources={})


def load_named(folder: Path, rows: int) -> None:
    load(folder, rows, sources={"many": 2})


def load_grouped(folder: Path, rows: int) -> None:
    load(folder, rows, sources={}, texts_per_image=5)


MEASURED: dict[str, tuple[str, Callable[[Path, int], None]]] = {  # name -> file that it needs, function
    "index of features, first opening": ("features", open_features),
    "index of features, 20,000 look-ups": ("features", look_up_features),
    "hashes of kept features, first opening": ("hashes", open_hashes),
    "hashes of kept features, 20,000 look-ups": ("hashes", open_hashes),
    "order of an epoch": ("", make_order),
    "order of an epoch, grouped by image": ("", make_grouped_order),
    "loader, first opening": ("shards", load_all),
    "loader, resumed at 99%": ("shards", load_all),
    "loader, a dataset twice": ("shards", load_named),
    "loader, grouped by image": ("shards", load_grouped),
}


def run_measured(name: str, folder: Path, rows: int) -> None:
    """Run one measurement in this process, and print its seconds and memory."""
    importlib.import_module("vlp_models.training.data")  # loaded once, so not measured

    most = {"own": 0.0}

    def status(key: str) -> float:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[key].split()[0]) / 1024

    def watch() -> None:
        while True:
            most["own"] = max(most["own"], status("RssAnon"))
            time.sleep(0.05)

    before = status("RssAnon")
    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    MEASURED[name][1](folder, rows)
    measured = {"seconds": round(time.perf_counter() - start, 1), "before_mb": round(before)}
    print("RESULT", json.dumps(measured | {"own_mb": round(most["own"]), "peak_mb": round(status("VmHWM"))}))


def measure(name: str, folder: Path, rows: int) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rows", str(rows), "--one", name, "--local", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-300:]}
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    measured: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--per-shard", type=int, default=4000, help="images per shard")
    parser.add_argument("--only", nargs="+", choices=("", "features", "hashes", "shards"), default=None)
    parser.add_argument("--local", type=Path, default=None, help="folder for the files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", choices=MEASURED, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_measured(options.one, options.local, options.rows[0])
        return
    sys.path.insert(0, str(ROOT))
    make = {"features": make_features, "hashes": make_hashes, "": lambda folder, rows: None}
    make["shards"] = lambda folder, rows: make_shards(folder, rows, options.per_shard)
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "system": platform.system(), "python": platform.python_version()},
        "per_shard": options.per_shard,
        "runs": [],
    }
    for rows in options.rows:
        for needed in options.only if options.only is not None else make:
            with tempfile.TemporaryDirectory(dir=options.local) as name:
                folder, start = Path(name), time.perf_counter()
                make[needed](folder, rows)
                seconds = round(time.perf_counter() - start)
                print(f"{rows:,} rows of {needed or 'nothing'}, made in {seconds} s", flush=True)
                for what in (what for what, (file, _) in MEASURED.items() if file == needed):
                    measured = {"rows": rows, "what": what, **measure(what, folder, rows)}
                    measured["load_average"] = round(os.getloadavg()[0], 2)
                    result["runs"].append(measured)
                    print(json.dumps(measured), flush=True)
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
