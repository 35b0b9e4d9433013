"""Two towers in the project: trained by both contrasts, frozen, with LoRA; from a stand-in of the Hub to the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import COMMIT, REPOSITORY, hub_server
from photos import photo
from test_two_towers import load, read_pixels
from two_tower_folders import CAPTIONS, WRITERS, write_clip, write_siglip

from vlp_models.data.batch import Batch, Pixels
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.params import GroupParams
from vlp_models.tasks.retrieval import Retrieval
from vlp_models.training.optim import Freezing

ROOT = Path(__file__).parents[3]
SHORT = {
    "models.siglip.init": f"hf://{REPOSITORY}",
    "tokenizer.vocab": f"hf://{REPOSITORY}",
    "trainer.precision": "32-true",
    "finetune.siglip-retrieval.max_epochs": 1,
    "finetune.siglip-retrieval.batch_size": 8,
    "evaluate.bootstrap": 20,
    "tracking.uri": "",
    "validate.max_bad_fraction": 0.2,
}
# A process of its own: the client of the Hub reads its environment once.
RUN = """
import sys
from vlp_models.cli.main import main
from vlp_models.cli.pipeline import run_stage
sys.argv = ["vlp", "use", "own-pairs-siglip", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    if end.code:
        raise
runs = "siglip-zero-shot", "siglip-retrieval"
stages = [("prepare", "pairs"), ("validate", ""), ("shards", ""), ("tokenizer", ""), ("initial", "siglip")]
for stage, key in [*stages, *((stage, run) for run in runs for stage in ("finetune", "evaluate")), ("report", "")]:
    run_stage(stage, key, "params.yaml")
"""


def make_task(folder: Path, **options: Any) -> tuple[Retrieval, Batch]:
    """Return the task, and a batch of five photos with a caption each."""
    model, tokenizer = load(folder)
    info = CheckpointInfo(family="dual_encoder", name="towers", model_config={}, max_text_len=32, options=options)
    pixels = read_pixels(model, [photo(seed, (64, 64)) for seed in range(len(CAPTIONS))])
    ids = tuple("abcde")
    text = tokenizer.encode_batch(CAPTIONS, 32)
    return Retrieval(model, tokenizer, info), Batch(
        sample_ids=ids, image_ids=ids, image=Pixels(pixels_B3HW=pixels), text=text
    )


def train(task: Retrieval, batch: Batch, steps: int = 30) -> list[float]:
    optimizer = torch.optim.Adam([p for p in task.parameters() if p.requires_grad], lr=2e-3)
    generator, losses = torch.Generator(), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(batch, generator=generator).mean
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("loss", ["contrastive", "sigmoid"])
def test_both_contrasts_train_every_kind(kind: str, loss: str, tmp_path: Path) -> None:
    task, batch = make_task(WRITERS[kind](tmp_path), loss=loss)
    losses = train(task, batch)
    assert losses[-1] < 0.5 * losses[0]


def test_the_loss_is_the_one_that_a_model_was_trained_by(tmp_path: Path) -> None:
    assert make_task(write_siglip(tmp_path / "siglip"))[0].by_sigmoid
    assert not make_task(write_clip(tmp_path / "clip"))[0].by_sigmoid


def test_a_frozen_tower_stays(tmp_path: Path) -> None:
    task, batch = make_task(write_siglip(tmp_path))
    Freezing(task, {"image": GroupParams(frozen=True), "scale": GroupParams(frozen=True)})
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    losses = train(task, batch)
    assert losses[-1] < losses[0]
    changed = {name for name, tensor in task.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(name.startswith("model.towers.text_model") for name in changed)


@pytest.mark.extras
@pytest.mark.parametrize("kind", WRITERS)
def test_lora_trains_adapters_in_both_towers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="an extra: requirements-lora.lock")
    from vlp_models.contrib.lora.adapters import add_lora
    from vlp_models.contrib.lora.params import LoraParams

    task, batch = make_task(WRITERS[kind](tmp_path), loss="contrastive")
    add_lora(task, LoraParams(rank=2, alpha=4), "finetune.towers.lora")
    before = task.model.embed_text(batch.text)  # type: ignore[operator]
    losses = train(task, batch)
    assert losses[-1] < losses[0]
    # Each adapter is used: none is left at its start.
    unused = [name for name, p in task.named_parameters() if "lora_B" in name and not p.abs().sum()]
    assert not unused
    assert not torch.equal(task.model.embed_text(batch.text), before)  # type: ignore[operator]


@pytest.mark.pipeline
@pytest.mark.slow
def test_the_preset_downloads_scores_without_training_and_fine_tunes(tmp_path: Path) -> None:
    """From the name on the Hub, through `vlp use`, to a report whose baseline is the model as it was downloaded."""
    hub_files = write_siglip(tmp_path / "hub")
    project = tmp_path / "project"
    photos = project / "data" / "raw" / "pairs"
    photos.mkdir(parents=True)
    lines = ["image,caption,split"]
    for number in range(24):
        photo(number, (80, 60)).save(photos / f"{number}.png")
        split = "train" if number < 12 else "val" if number < 18 else "test"
        lines.append(f'{number}.png,"{CAPTIONS[number % 5]}",{split}')
    (photos / "pairs.csv").write_text("\n".join(lines) + "\n")
    for name in ("params.yaml", "dvc.yaml"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    with hub_server() as hub:
        hub.files = {path.name: path.read_bytes() for path in hub_files.iterdir()} | {"pytorch_model.bin": b"pickle"}
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", RUN, *(word for key, value in SHORT.items() for word in ("-S", f"{key}={value}"))],
            cwd=project,
            env=inherited | settings | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert "model.safetensors" in hub.downloaded
        assert "pytorch_model.bin" not in hub.downloaded
    params = (project / "params.yaml").read_text()
    assert params.count(f"hf://{REPOSITORY}@{COMMIT}") == 2
    config = json.loads((project / "checkpoints/initial/siglip/config.json").read_text())
    assert config["provenance"]["init"]["source"] == f"hf://{REPOSITORY}@{COMMIT}"
    scores = {
        run: {
            (row["split"], row["metric"]): row
            for row in json.loads((project / f"reports/eval/{run}/scores.json").read_text())
        }
        for run in ("siglip-zero-shot", "siglip-retrieval")
    }
    for key, row in scores["siglip-retrieval"].items():
        untrained = scores["siglip-zero-shot"][key]
        if row["value"] is not None:
            assert row["baselines"]["zero-shot siglip"] == pytest.approx(untrained["value"])
        assert "zero-shot siglip" not in untrained["baselines"]
    assert "zero-shot siglip" in (project / "reports/index.html").read_text()
