"""Standalone bundles: the committed ones predict again in an empty folder; other weights, or none, are noticed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bundles.run_bundle import MANIFEST, RunBundle, archive_bytes, open_bundle
from vlp_models.contrib.bundles.standalone import (
    LEVELS,
    ROUNDED,
    drop_probabilities,
    restore_weights,
    round_weights,
    unpack,
)
from vlp_models.errors import DataError

DOCS = Path(__file__).parents[3] / "docs"
RUNS = DOCS / "results" / "runs"
BUNDLES = sorted(RUNS.glob("*.run.zip"))
GUIDE = (DOCS / "guides" / "replay.md").read_text(encoding="utf-8")
STANDALONE = re.findall(r"^\| ([\w-]+)\.run\.zip \|", GUIDE, re.MULTILINE)  # its table


def replay(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vlp_models.cli.main", "replay", str(path), "--level", "predict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)


def repack(bundle: RunBundle, path: Path, changes: dict[str, bytes]) -> Path:
    """Write a bundle with other members and matching hashes."""
    files = {**bundle.files, **changes}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != MANIFEST}
    files[MANIFEST] = json.dumps({**bundle.manifest, "files": hashes}).encode()
    path.write_bytes(archive_bytes(files))
    return path


def weights_name(bundle: RunBundle) -> str:
    return f"checkpoints/finetune/{bundle.run}/{ROUNDED}"


@pytest.mark.slow
def test_files_have_the_names_of_dataset_and_run_and_the_guide_lists_those_that_are_standalone() -> None:
    standalone = []
    for path in BUNDLES:
        bundle, name = open_bundle(path), path.name.removesuffix(".run.zip")
        datasets = [dataset.replace("_", "-") for dataset in bundle.params()["data"]]
        # Presets share names of runs: tden-captioning alone is several.
        assert name.endswith(bundle.run) and any(dataset in name for dataset in datasets), name
        standalone += [name] if bundle.is_standalone else []
    assert standalone == sorted(STANDALONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", STANDALONE)
def test_committed_bundle_predicts_the_same_in_an_empty_folder(name: str, tmp_path: Path) -> None:
    path = RUNS / f"{name}.run.zip"
    done = replay(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
    files = open_bundle(path).files
    evaluated = json.loads(files["scores.json"])[-1]["split"]
    count = len(files[f"predictions-{evaluated}.jsonl"].splitlines())
    assert f"equal      predictions-{evaluated}.jsonl: all {count:,} are equal\n" in done.stdout
    assert "equal      computed again: all " in done.stdout and "differs" not in done.stdout
    if name == STANDALONE[0]:  # the guide shows what it prints
        assert done.stdout.replace(str(path), f"docs/results/runs/{path.name}") in GUIDE


@pytest.mark.slow
def test_other_weights_give_other_predictions(tmp_path: Path) -> None:
    bundle = open_bundle(RUNS / f"{STANDALONE[0]}.run.zip")
    weights = load(bundle.files[weights_name(bundle)])
    changed = {name: -tensor if name.startswith("scale.head") else tensor for name, tensor in weights.items()}
    path = repack(bundle, tmp_path / "other.run.zip", {weights_name(bundle): save(changed)})
    done = replay(path, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "differs    predictions-test.jsonl: " in done.stdout and "differs    computed again: " in done.stdout


def pickled() -> bytes:
    """Return what torch saves, a pickle that would create a file when it is loaded."""
    buffer = io.BytesIO()
    torch.save({"model.weight": torch.zeros(2, 2)}, buffer)
    return buffer.getvalue()


def without_a_scale(weights: bytes) -> bytes:
    tensors = load(weights)
    return save({name: tensor for name, tensor in tensors.items() if not name.startswith("low.")})


@pytest.mark.parametrize(
    "damage", [lambda weights: pickled(), lambda weights: weights[:-1], without_a_scale, lambda _: b""]
)
def test_weights_that_are_no_safetensors_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    name = f"checkpoints/finetune/run/{ROUNDED}"
    weights = save(round_weights({"model.weight": torch.ones(2, 2)}, 127))
    unpack({name: weights}, Workspace(tmp_path), "run")
    with pytest.raises(DataError, match=f"{name}: not weights of a bundle"):
        unpack({name: damage(weights)}, Workspace(tmp_path), "run")


@pytest.mark.parametrize(
    "member",
    [
        "checkpoints/finetune/tden-vqa/model.bin",
        "checkpoints/finetune/tden-vqa/model.pt",
        "checkpoints/finetune/../weights.safetensors",
        "checkpoints/pretrain/tden/model.safetensors",
        "data/shards/../../params.txt",
        "data/shards/.hidden.json",
        "data/raw/a.json",
        "/data/shards/a.tar",
        "plugins/a.py",
    ],
)
def test_member_outside_of_the_three_folders_is_refused(member: str, tmp_path: Path) -> None:
    bundle = open_bundle(BUNDLES[0])
    with pytest.raises(DataError, match="not a file of a bundle"):
        open_bundle(repack(bundle, tmp_path / "more.run.zip", {member: b""}))


def test_a_changed_byte_of_the_weights_is_refused(tmp_path: Path) -> None:
    path = RUNS / f"{STANDALONE[0]}.run.zip"
    content = bytearray(path.read_bytes())
    offset = content.index(ROUNDED.encode()) + 100_000  # in the first entry: its name, then its data
    content[offset] ^= 1
    (tmp_path / path.name).write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|changed since it was packed"):
        open_bundle(tmp_path / path.name)


@pytest.mark.parametrize("levels", [LEVELS[0], LEVELS[10], LEVELS[-1]])
def test_weights_are_rounded_to_half_a_level_of_their_row(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    weights = {
        "matrix": torch.randn(7, 33, generator=generator) * torch.logspace(-6, 3, 7)[:, None],
        "filters": torch.randn(3, 2, 5, 5, generator=generator),
        "zeros": torch.zeros(4, 4),
        "bias": torch.randn(9, generator=generator),
        "steps": torch.tensor([[3, 4]]),
    }
    restored = restore_weights(load(save(round_weights(weights, levels))))
    assert restored.keys() == weights.keys()
    for name, tensor in weights.items():
        assert restored[name].shape == tensor.shape and restored[name].dtype == tensor.dtype
    for name in ("bias", "steps", "zeros"):
        assert torch.equal(restored[name], weights[name])
    for name in ("matrix", "filters"):
        step = weights[name].flatten(1).abs().amax(dim=1, keepdim=True) / levels
        error = (restored[name] - weights[name]).flatten(1).abs()
        assert bool((error <= 0.5001 * step).all())


def test_decisions_are_compared_and_probabilities_are_not() -> None:
    prediction = {"answer": "blue", "n": 3, "label": True, "p_true": 0.2, "top": [["blue", 0.9], ["red", 0.1]]}
    near = {**prediction, "p_true": 0.3, "top": [["red", 0.5], ["blue", 0.4]]}
    assert drop_probabilities(prediction) == drop_probabilities(near)
    for changed in ({"answer": "red"}, {"n": 2}, {"label": False}):
        assert drop_probabilities({**prediction, **changed}) != drop_probabilities(prediction)
    ranked = {"captions": [{"caption": "a cat", "rank": 2, "top": [["a", 0.5]]}]}
    assert drop_probabilities(ranked) == {"captions": [{"caption": "a cat", "rank": 2, "top": []}]}
