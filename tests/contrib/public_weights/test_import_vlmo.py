"""vlp import-checkpoint of VLMo's and BEiT's weights: the checkpoint, its preset, and a run's beginning from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pixel_toys import write_workspace
from public_vlmo import random_state
from safetensors.torch import load_file

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.public_weights.import_checkpoint import import_checkpoint
from vlp_models.errors import CheckpointError
from vlp_models.params import load_params
from vlp_models.pipeline.stages import initial
from vlp_models.tasks.base import load_task_model

SIZES = {"hidden": 16, "heads": 2, "layers": 2, "start": 1, "side": 16, "patch": 8}


def test_model_starts_from_public_weights(tmp_path: Path) -> None:
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    words = len((tmp_path / "data/tokenizer/vocab.txt").read_text().splitlines())
    state = random_state(**SIZES, vocab=words)
    torch.save({"module": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "vlmo.pt")
    lines = import_checkpoint("vlmo", tmp_path / "vlmo.pt", "there", params, workspace, heads=2)
    assert "randomly initialized (seed 1): nothing" in lines[1]
    assert "left out: text_embeddings.position_embeddings.weight" in lines
    preset = tmp_path / "checkpoints/imported/there/preset.yaml"
    apply_overlay(tmp_path / "params.yaml", preset, [])
    params = load_params(tmp_path / "params.yaml")
    initial.run(params, workspace, "there")
    weights = load_file(workspace.checkpoint("initial/there") / "model.safetensors")
    gamma = state["transformer.blocks.1.gamma_2"]
    assert torch.equal(weights["model.blocks.1.expert_scale"], gamma)
    assert params.models["there"].config["contrast"] == "both"
    torch.save(random_state(**SIZES, vocab=words + 1), tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="vocab_size"):
        import_checkpoint("vlmo", tmp_path / "other.pt", "other", params, workspace, heads=2)


def test_a_model_of_two_images_keeps_its_classifier_and_its_second_image(tmp_path: Path) -> None:
    """NLVR2's: it is a task's checkpoint, which can be scored as it is."""
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    words = len((tmp_path / "data/tokenizer/vocab.txt").read_text().splitlines())
    state = random_state(**SIZES, vocab=words, kind="nlvr2")
    torch.save(state, tmp_path / "vlmo.pt")
    with pytest.raises(CheckpointError, match="--max-text-len"):
        import_checkpoint("vlmo", tmp_path / "vlmo.pt", "judge", params, workspace, heads=2)
    lines = import_checkpoint("vlmo", tmp_path / "vlmo.pt", "judge", params, workspace, heads=2, max_text_len=12)
    assert "a run of nlvr2" in lines[-1]
    task = load_task_model(workspace.checkpoint("imported/judge"))
    found = task.state_dict()
    assert torch.equal(found["model.image_embedding.second_type_1D"][0], state["token_type_embeddings.weight"][2])
    for part in ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"):
        assert torch.equal(found[f"head.{part}"], state[f"nlvr2_classifier.{part}"])


def test_beits_weights_fill_the_image_side_of_a_model_in_params(tmp_path: Path) -> None:
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    state = {"mask_token": torch.zeros(1, 1, 16)}
    for name, tensor in random_state(**SIZES, vocab=20).items():
        if name.startswith("transformer.") and "_text" not in name and "_vl" not in name:
            state[name.removeprefix("transformer.").replace("_imag", "")] = tensor
    for layer in range(2):
        state[f"blocks.{layer}.attn.relative_position_bias_table"] = torch.randn(3 * 3 + 3, 2)
    for layer in range(2):  # TINY's feed-forward net is twice as wide, not four times
        for part in ("fc1.weight", "fc1.bias"):
            state[f"blocks.{layer}.mlp.{part}"] = state[f"blocks.{layer}.mlp.{part}"][:32].clone()
        state[f"blocks.{layer}.mlp.fc2.weight"] = state[f"blocks.{layer}.mlp.fc2.weight"][:, :32].clone()
    torch.save({"model": state}, tmp_path / "beit.pth")
    lines = import_checkpoint("beit", tmp_path / "beit.pth", "vlmo", params, workspace)
    assert "BEiT weights in blocks, image_embedding, norm, position_bias" in lines[0]
    weights = load_file(workspace.checkpoint("imported/vlmo") / "model.safetensors")
    assert torch.equal(weights["model.blocks.0.experts.vision.ffn.0.weight"], state["blocks.0.mlp.fc1.weight"])
    with pytest.raises(CheckpointError, match="BEiT fills the image side"):
        import_checkpoint("beit", tmp_path / "beit.pth", "unknown", params, workspace)
