"""Where things lie, how a stage writes, and what it leaves behind. The only file that knows paths.

A stage writes to a temporary sibling and renames it at the end: an output is either whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlp_models.common.device import is_main_process
from vlp_models.common.io import hash_path, write_json
from vlp_models.errors import DataError

WITHDRAWN = "data/withdrawn.jsonl"
SEARCH = "search"  # of an evaluation and of a bundle: how answers are searched for


@dataclass(frozen=True)
class Workspace:
    """The project's root; every path a stage reads or writes is a property of it."""

    root: Path = field(default_factory=Path.cwd)

    def raw(self, name: str) -> Path:
        return self.root / "data" / "raw" / name

    def interim(self, source: str) -> Path:
        return self.root / "data" / "interim" / source

    @property
    def withdrawn(self) -> Path:
        """The pictures that must not come in (again): `vlp forget`. Git holds it; absent while there is none."""
        return self.root / WITHDRAWN

    @property
    def validated(self) -> Path:
        return self.root / "data" / "validated"

    @property
    def detector(self) -> Path:
        return self.root / "data" / "detector"

    @property
    def features(self) -> Path:
        return self.root / "data" / "features"

    @property
    def tokenizer(self) -> Path:
        return self.root / "data" / "tokenizer"

    @property
    def shards(self) -> Path:
        return self.root / "data" / "shards"

    @property
    def contents(self) -> Path:
        """What the shards hold, as hashes (workspace/contents.py)."""
        return self.root / "data" / "contents"

    @property
    def plan(self) -> Path:
        return self.root / "data" / "plan"

    def augmented(self, name: str) -> Path:
        """Captions that a model wrote of training images."""
        return self.root / "data" / "augmented" / name

    def checkpoint(self, start: str) -> Path:
        """`initial/MODEL`, `pretrain/RUN` or `finetune/RUN`."""
        return self.root / "checkpoints" / start

    def curve(self, run: str) -> Path:
        """`pretrain/RUN` or `finetune/RUN`: the losses, for plots."""
        return self.reports / "curves" / f"{run}.csv"

    def training(self, run: str) -> Path:
        """`pretrain/RUN` or `finetune/RUN`: its last numbers, and what it cost."""
        return self.reports / "training" / f"{run}.json"

    def figures(self, run: str) -> Path:
        """`pretrain/RUN`: what its model shows of itself; an empty list of most models."""
        return self.reports / "figures" / f"{run}.json"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    def evaluation(self, run: str) -> Path:
        return self.reports / "eval" / run

    def work(self, stage: str, fingerprint: str) -> Path:
        """Resume state: outside DVC's outs, because DVC deletes outs before a stage starts."""
        path = self.root / ".work" / stage / fingerprint[:16]
        path.mkdir(parents=True, exist_ok=True)
        return path

    def relative(self, path: Path) -> str:
        """`path` as tables store it: relative to the root where it lies inside it, else absolute."""
        path = path.absolute()
        return str(path.relative_to(self.root.absolute())) if path.is_relative_to(self.root.absolute()) else str(path)


def project_root(root: Path) -> Path:
    """The project that a workspace belongs to: of DVC's temporary copies (`dvc exp run --temp`), the one they were made
    from, whose registry and records they share."""
    parts = root.absolute().parts
    for place in range(len(parts) - 2):
        if parts[place : place + 3] == (".dvc", "tmp", "exps"):
            return Path(*parts[:place])
    return root


def require_output(path: Path, made_by: str) -> Path:
    """`path`, or a `DataError` that names the stage that makes it."""
    if not path.exists():
        raise DataError(f"{path}: not there yet; `dvc repro {made_by}` makes it")
    return path


def fingerprint(params: Any, inputs: dict[str, Path]) -> str:
    """Identity of a stage's work: its params and the content of its inputs."""
    value = {"params": params, "inputs": {name: hash_path(path) for name, path in inputs.items()}}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_manifest(directory: Path, *, stage: str, params: Any, counts: dict[str, Any], **more: Any) -> None:
    """What an output is, inside the output: deterministic, so that equal work gives equal bytes."""
    write_json(directory / "manifest.json", {"stage": stage, "params": params, "counts": counts, **more})


@contextmanager
def record_timing(workspace: Workspace, stage: str) -> Iterator[None]:
    """Writes the stage's seconds and peak memory (MB), of the main process, to `.work/timings/<stage>.json`."""
    start = time.perf_counter()
    yield
    if not is_main_process():
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record = {"stage": stage, "seconds": round(time.perf_counter() - start, 2), "peak_memory_mb": round(peak, 1)}
    write_json(workspace.root / ".work" / "timings" / f"{stage.replace('@', '-')}.json", record)
