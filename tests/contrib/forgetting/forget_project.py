"""A project with two models on different datasets, and an image that one of them is trained on twice.

Model a is trained on `scenes` and `mine`, model b on `other`. A training image of `scenes` is in `mine` as well,
mirrored, in another file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from cloned_project import init_dvc
from photos import photo
from PIL import Image, ImageOps

from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.dataset import write as write_scenes

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
SCENES = {"generator": "objects", "train": 10, "val": 3, "test": 3, "questions_per_image": 0, "side": 96}
RUN = {"max_epochs": 2, "batch_size": 8}


def make_project(root: Path) -> Path:
    """Write a git and DVC project with code, params and data; return the image's file."""
    root.mkdir()
    shutil.copytree(ROOT / "vlp_models", root / "vlp_models", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".gitignore", root)
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw |= {
        "generate": {},
        "validate": raw["validate"] | {"max_bad_fraction": 0.0},
        "detector": raw["detector"] | {"source": "none"},
        "features": raw["features"] | {"source": "grid", "max_regions": 4},
        "tokenizer": raw["tokenizer"] | {"source": "vocab", "vocab": "vocab.txt", "min_answer_count": 1},
        "evaluate": {"batch_size": 100, "beam_size": 1, "splits": ["test"], "blind_baseline": [], "bootstrap": 20},
        "promotion": raw["promotion"]
        | {"select_on": "test", "tasks": {"captioning": {"metric": "CIDEr", "direction": "higher"}}},
    }
    scenes = raw["data"]["scenes"]
    raw["data"] = {name: _scenes(root, name, seed, scenes) for name, seed in (("scenes", 1), ("other", 2))}
    raw["data"]["mine"] = {"format": "pairs", "root": "data/raw/mine", "pairs": "pairs.csv"}
    tiny = yaml.safe_load((ROOT / "vlp_models" / "presets" / "tiny.yaml").read_text())["models"]["tden"]["config"]
    sizes = raw["models"]["tden"]["config"] | tiny
    sources: dict[str, Any] = {"a": {"scenes": 1, "mine": 1}, "b": {"other": 1}}
    raw["tracking"] = raw["tracking"] | {"dataset": {"captioning": "scenes"}}
    raw["models"] = {name: {"family": "tden", "config": sizes} for name in sources}
    raw["pretrain"] = {
        name: {"model": name, "sources": own, "recipe": {"objectives": {"mlm": 1.0}}, **RUN}
        for name, own in sources.items()
    }
    raw["finetune"] = {
        name: {"task": "captioning", "start": f"pretrain/{name}", "sources": own, "evaluate_on": ["scenes"], **RUN}
        for name, own in sources.items()
    }
    # Through JSON, since a value in two places would be written as an alias, which params.yaml does not support.
    (root / "params.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(raw)), sort_keys=False))
    words = sorted({word for file in root.rglob("captions_*.json") for word in file.read_text().lower().split('"')})
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    known = sorted({part for text in words for part in text.split() if part.isalpha()} - set(letters))
    (root / "vocab.txt").write_text("\n".join([*special, *letters, *known]) + "\n")
    picture = min((root / "data/raw/scenes/images").glob("*.png"), key=lambda file: file.name)
    _write_pairs(root / "data/raw/mine", picture)
    dvc = [sys.executable, "-m", "dvc"]
    cache = [*dvc, "config", "--local", "cache.dir", str(root.parent / "cache")]
    init_dvc(root)
    subprocess.run(cache, cwd=root, check=True)
    return picture


def _scenes(root: Path, name: str, seed: int, like: dict[str, Any]) -> dict[str, Any]:
    folder = root / "data" / "raw" / name
    folder.mkdir(parents=True)
    write_scenes(GeneratorParams(**SCENES, seed=seed), folder)
    unused = ("questions", "annotations")
    return {k: v for k, v in like.items() if k not in unused} | {"root": f"data/raw/{name}"}


def _write_pairs(folder: Path, picture: Path) -> None:
    folder.mkdir(parents=True)
    lines = ["image,caption,split"]
    for number in range(6):
        photo(number).save(folder / f"{number}.png")
        lines.append(f"{number}.png,a photo of number {'abcdef'[number]},{'train' if number < 5 else 'val'}")
    with Image.open(picture) as image:
        ImageOps.mirror(image.convert("RGB")).save(folder / "copy.png")
    lines.append("copy.png,the one that is mirrored,train")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")


def vlp(root: Path, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of the venv as a user of the project would."""
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(root), "DVC_SITE_CACHE_DIR": str(root / ".dvc" / "site"), "TMPDIR": str(root.parent)}
    env.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(list(command), cwd=root, env=env, capture_output=True, text=True)
    if check:
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done
