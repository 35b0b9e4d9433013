"""A small DVC project with an evaluation dataset, and submissions with known outcomes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from cloned_project import init_dvc
from PIL import Image

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.ingest import ingest
from vlp_models.params import Params, load_params

ROOT = Path(__file__).parents[2]
COUNTS = ("new", "duplicates", "leaks", "bad")


def picture(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def make_project(root: Path, *, dvc: bool = False, **ingest: Any) -> Workspace:
    """Create datasets `tested` (images 1000 to 1009: train, val and test) and `ingested`, as its preset adds it."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["generate"] = {}
    raw["data"] = {
        "tested": {"format": "pairs", "root": "data/raw/tested", "pairs": "pairs.csv"},
        **yaml.safe_load((ROOT / "vlp_models" / "presets" / "ingest.yaml").read_text())["data"],
    }
    raw["ingest"] |= {"settle_seconds": 0.0, "processes": 1, "track": dvc, "max_bad_fraction": 0.5} | ingest
    raw["features"]["source"] = "grid"
    raw["detector"]["source"] = "none"
    root.mkdir(exist_ok=True)
    (root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    tested = root / "data" / "raw" / "tested"
    tested.mkdir(parents=True)
    lines = ["image,caption,split"]
    for number in range(10):
        picture(1000 + number).save(tested / f"{number}.png")
        lines.append(f"{number}.png,a tested picture,{('train', 'val', 'test')[number % 3]}")
    (tested / "pairs.csv").write_text("\n".join(lines) + "\n")
    if dvc:
        (root / ".gitignore").write_text((ROOT / ".gitignore").read_text())
        init_dvc(root)
    return Workspace(root)


def params_of(workspace: Workspace) -> Params:
    return load_params(workspace.root / "params.yaml")


def make_submission(workspace: Workspace, name: str, rows: list[tuple[str, str, str]], files: dict[str, bytes]) -> Path:
    """Write a submission of (image, caption, split) rows and image files."""
    folder = workspace.root / "data" / "inbox" / name
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"image": image, "caption": caption, "split": split or None}) for image, caption, split in rows]
    (folder / "pairs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def simple_submission(workspace: Workspace, name: str, seeds: range) -> Path:
    """Write a submission of one good pair for each seed."""
    rows = [(f"{seed}.jpg", f"picture number {seed}", "") for seed in seeds]
    return make_submission(workspace, name, rows, {f"{seed}.jpg": encoded(picture(seed)) for seed in seeds})


def held(workspace: Workspace) -> list[dict[str, Any]]:
    """Read every pair of the dataset from its batches."""
    dataset = workspace.root / "data" / "accepted"
    rows = []
    for path in sorted(dataset.glob("*/pairs.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            assert (path.parent / row["image"]).is_file()
            rows.append({**row, "batch": path.parent.name})
    return rows


def quarantined(workspace: Workspace, name: str) -> dict[str, tuple[str, str, str]]:
    """Return image -> verdict, rule and reason of the pairs a submission lost."""
    path = workspace.reports / "ingest" / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["image"] or row["from"]: (row["verdict"], row["rule"], row["reason"]) for row in rows}


def ingest_counts(workspace: Workspace) -> tuple[int, ...]:
    """Ingest; return how many pairs were new, duplicates, leaks and bad."""
    report = ingest.run(params_of(workspace), workspace)
    assert report == json.loads((workspace.reports / "ingest.json").read_text())
    return tuple(report[name] for name in COUNTS)
