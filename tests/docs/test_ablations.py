"""docs/results/studies.md: every command gives valid params, and a model that trains with the stated objectives."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from toy_dataset import TINY, make_toy

from vlp_models.cli.presets import apply_overlay
from vlp_models.data.inputs import InputReader, ModelInputs, RegionInput
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.models import DataFacts, build_model
from vlp_models.params import load_params
from vlp_models.training.scheduled_sampling import make_loss

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"`(vlp use [^`]+)`", (ROOT / "docs" / "results" / "studies.md").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_ablation_trains(tmp_path: Path, command: str) -> None:
    words = shlex.split(command)[2:]
    preset = ROOT / words.pop(0) if words[0] != "--set" else None
    shutil.copy(ROOT / "params.yaml", tmp_path)
    assert apply_overlay(tmp_path / "params.yaml", preset, [w for w in words if w != "--set"]), "nothing changed"
    params = load_params(tmp_path / "params.yaml")

    toy = make_toy(tmp_path / "toy")
    data = ShardDataset(toy.shards, "train", "captions", {})
    reader = InputReader(ModelInputs(image=RegionInput()), toy.tokenizer, max_text_len=12, max_regions=4)
    batch = reader.collate([data[i] for i in range(8)])
    torch.manual_seed(0)
    facts = DataFacts(
        vocab_size=toy.tokenizer.vocab_size,
        mask_id=toy.tokenizer.mask_id,
        feature_dim=batch.image.features_BRF.shape[-1],
        num_classes=4,
    )
    model = build_model("tden", {**params.models["tden"].config, **TINY}, facts)
    run = params.pretrain["tden"]
    loss = make_loss(model, run.recipe, run.scheduled_sampling, name="tden")
    result = loss(batch, update=0, generator=torch.Generator().manual_seed(0))
    result.mean.backward()
    assert result.mean.isfinite()
    names = {name.removesuffix("_pass2") for name in result.parts if "accuracy" not in name}
    assert names == {name for name, one in run.recipe.objectives.items() if one.weight}
