"""Hugging Face dataset folders of six images, one of them broken, in each layout."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

BROKEN = 4  # the number of the image that no decoder reads
Write = Callable[[Path], None]


def image(number: int) -> bytes:
    """A small PNG or JPEG; a JPEG's first bytes alone for `BROKEN`."""
    coarse = np.random.default_rng(number).integers(0, 256, (5, 7, 3), np.uint8)
    buffer = io.BytesIO()
    picture = Image.fromarray(coarse).resize((70, 50), Image.Resampling.BICUBIC)
    picture.save(buffer, "PNG" if number % 2 else "JPEG")
    return buffer.getvalue()[:40] if number == BROKEN else buffer.getvalue()


def write_parquet(root: Path, **more: list[Any]) -> None:
    """Three rows each of train and test; the captions are lists, as in many datasets of the Hub."""
    (root / "data").mkdir(parents=True)
    for split, numbers in (("train", range(3)), ("test", range(3, 6))):
        columns = {
            "image": [{"bytes": image(n), "path": f"{n}.png"} for n in numbers],
            "caption": [[f"picture {n}", f"number {n}\n again"] for n in numbers],
            "filename": [f"{n}.png" for n in numbers],
        }
        pq.write_table(pa.table(columns | more), root / "data" / f"{split}-00000-of-00001.parquet", row_group_size=2)


def write_imagefolder(root: Path, kind: str = "jsonl") -> None:
    for split, numbers in (("train", range(3)), ("test", range(3, 6))):
        (root / split).mkdir(parents=True)
        for n in numbers:
            (root / split / f"{n}.png").write_bytes(image(n))
        if kind == "csv":
            lines = ["file_name,text", *(f'{n}.png,"picture {n}, a"' for n in numbers)]
        else:
            lines = [json.dumps({"file_name": f"{n}.png", "text": f"picture {n}, a"}) for n in numbers]
        (root / split / f"metadata.{kind}").write_text("\n".join(lines) + "\n")


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_webdataset(root: Path, kind: str = "txt") -> None:
    for split, numbers in (("train", range(3)), ("test", range(3, 6))):
        files = {}
        for n in numbers:
            files[f"{n:05}.{'png' if n % 2 else 'jpg'}"] = image(n)
            caption = json.dumps({"caption": f"picture {n}", "url": "https://x"}) if kind == "json" else f"picture {n}"
            files[f"{n:05}.{kind}"] = caption.encode()
            files[f"{n:05}.cls"] = b"3"
        write_tar(root / split / "00000.tar", files)
