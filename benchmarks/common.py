"""Shared by the benchmarks: result files, `vlp` in a folder, random regions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp_models.data.batch import Regions

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, record: Mapping[str, Any]) -> str:
    """Write benchmarks/results/NAME.json and return its text."""
    text = json.dumps(record, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return text


def vlp(
    arguments: list[str], folder: Path, emulator: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> None:
    """Run `vlp` in a folder; exit with its output if it fails.

    Args:
        emulator: a command that runs this Python for another processor.
    """
    python = [*emulator, "-0", sys.executable, os.path.realpath(sys.executable)] if emulator else [sys.executable]
    path = os.pathsep.join(filter(None, [str(RESULTS.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*python, "-m", "vlp_models.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def random_regions(images: int, regions: int, feature_dim: int, *, classes: int = 1) -> Regions:
    """Return images with random regions, always the same."""
    import torch

    from vlp_models.data.batch import Regions

    generator = torch.Generator().manual_seed(1)
    return Regions(
        features_BRF=torch.randn(images, regions, feature_dim, generator=generator),
        boxes_BR4=torch.rand(images, regions, 4, generator=generator).sort(-1).values,
        class_probs_BRC=torch.randn(images, regions, classes, generator=generator).softmax(-1),
        mask_BR=torch.ones(images, regions, dtype=torch.bool),
    )
