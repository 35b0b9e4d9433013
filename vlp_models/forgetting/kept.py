"""Runs that never saw a withdrawn picture need no training again: what they learn from is the same without it.

DVC can't know: runs on several datasets go by all of them, and every run by data/tokenizer, which counts its texts. So
their samples are compared, before and after, to the last byte; where nothing differs, DVC is told that the checkpoint
is still the result of its stage (`dvc commit`).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from vlp_models.data.dataset import ShardDataset
from vlp_models.forgetting.learning import Learning
from vlp_models.forgetting.saw import Checkpoints
from vlp_models.params import Params, to_plain
from vlp_models.serving.bundle import checkpoint_info
from vlp_models.workspace.paths import Workspace, hash_file, hash_path, read_json

AT_ONCE = 256  # samples
WORDS = ("vocab.txt", "tokenizer.json", "answers.json")


def unaffected(params: Params, workspace: Workspace, checkpoints: Checkpoints) -> list[str]:
    """The trainings of params.yaml that never saw it, and that DVC has no other reason to run; those that others start
    from first."""
    found: list[str] = []
    for kind in ("pretrain", "finetune"):
        for run in sorted(getattr(params, kind), key=lambda run: len(params.chain(f"{kind}/{run}"))):
            name = f"{kind}/{run}"
            written = kind == "finetune" and params.finetune[run].augment.captions
            there = not written and workspace.checkpoint(name).exists()
            if there and checkpoints.of(name).clean and _up_to_date(workspace.root, f"{kind}@{run}"):
                found.append(name)
    return found


def fingerprints(params: Params, workspace: Workspace, runs: list[str]) -> dict[str, str]:
    """Of each run, one hash over all that it reads: its samples, the words, what it starts from.

    Raises:
        DataError: the shards are damaged.
    """
    words = [hash_file(workspace.tokenizer / name) for name in WORDS if (workspace.tokenizer / name).exists()]
    facts = {k: v for k, v in read_json(workspace.shards / "manifest.json").items() if k not in ("counts", "sources")}
    found = {}
    for run in runs:
        kind, _, name = run.partition("/")
        learning = Learning.of(run, to_plain(getattr(params, kind)[name]))
        start = workspace.checkpoint(learning.start)
        parts = [words, facts, hash_path(start), hash_path(workspace.checkpoint(run))]
        regions = bool(checkpoint_info(workspace.checkpoint(run)).detector_id)
        parts += [_samples(workspace.shards, split, learning, regions=regions) for split in ("train", "val")]
        found[run] = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return found


def keep(root: Path, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Tells DVC of the runs of which nothing has changed; returns them. The others are stale, as DVC says."""
    kept = []
    for run, fingerprint in before.items():
        if after.get(run) == fingerprint and _dvc(root, "commit", "--force", run.replace("/", "@", 1)).returncode == 0:
            kept.append(run)
    return kept


def _samples(shards: Path, split: str, learning: Learning, *, regions: bool) -> str:
    """One hash over every sample of a split that a run may read, with what it sees of its pictures, in order."""
    p, digest = learning.params, hashlib.sha256()
    samples = ShardDataset(
        shards, split, learning.view, p.sources, regions=regions, pixels=not regions, captioned=learning.captioned
    )
    for start in range(0, len(samples), AT_ONCE):
        for sample in samples.__getitems__(range(start, min(start + AT_ONCE, len(samples)))):
            told = [sample.sample_id, sample.image_id, sample.source, sample.text, dict(sample.values)]
            digest.update(json.dumps(told, sort_keys=True).encode())
            pictures = [(sample.regions, sample.pixels), *((other.regions, other.pixels) for other in sample.others)]
            for of_regions, of_pixels in pictures:
                digest.update(of_pixels or b"")
                for array in vars(of_regions).values() if of_regions is not None else ():
                    digest.update(array.tobytes())
    return digest.hexdigest()


def _up_to_date(root: Path, stage: str) -> bool:
    done = _dvc(root, "status", "--json", stage)
    try:
        return done.returncode == 0 and json.loads(done.stdout) == {}
    except ValueError:
        return False


def _dvc(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, capture_output=True, text=True)
