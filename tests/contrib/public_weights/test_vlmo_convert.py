"""Weights in the documented public layouts of VLMo and BEiT: every name is loaded or reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from public_vlmo import random_state
from torch import Tensor

from vlp_models.contrib.public_weights.vlmo import convert_vlmo
from vlp_models.contrib.public_weights.vlmo_images import convert_beit, convert_vit
from vlp_models.errors import CheckpointError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.vlmo.image_tokens import DVAE
from vlp_models.models.vlmo.model import VLMo

SIZES: dict[str, Any] = {"hidden": 64, "heads": 4, "layers": 3, "start": 2, "side": 32, "patch": 8, "vocab": 30}
FACTS = DataFacts(vocab_size=30, mask_id=4)
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def asked(**config: Any) -> ImportRequest:
    return ImportRequest(facts=FACTS, config=config, heads=4)


def built(imported: ImportedModel) -> VLMo:
    torch.manual_seed(0)
    config = {key: value for key, value in imported.config.items() if key != "vocab_size"}
    model = build_model("vlmo", config, FACTS)
    assert isinstance(model, VLMo)
    _, unexpected = model.load_state_dict(dict(imported.weights), strict=False)
    assert not unexpected
    return model.eval()


HEADS = {"match_head", "word_head", "image_projection", "text_projection", "log_scale", "pooler"}
# kind of checkpoint -> modules that it lacks, and the layers of its classifier
LACKING: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "pretraining": (set(), ()),
    "plus": (set(), ()),
    "text": (HEADS - {"word_head", "pooler"}, ()),
    "retrieval": ({"match_head", "word_head"}, ()),
    "vqa": (HEADS - {"pooler"}, ("",)),
    "nlvr2": (HEADS - {"pooler"}, ("0.", "1.", "3.")),
}


@pytest.mark.parametrize("kind", LACKING)
def test_a_checkpoint_fills_its_part_of_the_model(kind: str) -> None:
    """What it computes is compared with the authors' code (test_authors_vlmo.py)."""
    state = random_state(**SIZES, kind=kind)
    state["relative_position_index"] = torch.zeros(17, 17)
    imported = convert_vlmo(state, asked())
    missing, layers = LACKING[kind]
    assert {name.split(".")[0] for name in set(built(imported).state_dict()) - set(imported.weights)} == missing
    assert imported.left_out == (("text_embeddings.position_embeddings.weight",) if kind != "plus" else ())
    assert imported.task == (kind if kind in ("vqa", "nlvr2") else None)
    assert imported.head.keys() == {f"{layer}{part}" for layer in layers for part in ("weight", "bias")}
    assert ("image_embedding.second_type_1D" in imported.weights) == (kind == "nlvr2")


def test_missing_unexpected_and_misshapen_names_are_reported() -> None:
    state = random_state(**SIZES)
    for name in ("transformer.blocks.1.mlp_text.fc2.bias", "itm_score.fc.weight", "transformer.blocks.2.gamma_2"):
        with pytest.raises(CheckpointError, match=rf"1 missing: {re.escape(name)}"):
            convert_vlmo({n: t for n, t in state.items() if n != name}, asked())
    with pytest.raises(CheckpointError, match=r"1 unexpected: ema\.weight"):
        convert_vlmo({**state, "ema.weight": torch.zeros(1)}, asked())
    with pytest.raises(CheckpointError, match=r"1 of another shape: pooler.dense.bias \[3\] instead of \[64\]"):
        convert_vlmo({**state, "pooler.dense.bias": torch.zeros(3)}, asked())
    with pytest.raises(CheckpointError, match="no square grid"):
        convert_vlmo({**state, "relative_position_bias_table": torch.zeros(500, 12)}, asked())
    with pytest.raises(CheckpointError, match="give --heads"):
        convert_vlmo(state, ImportRequest(facts=FACTS, config={}, heads=8))
    vit = {"cls_token": (1, 1, 64), "blocks.0.mlp.fc1.weight": (9, 64), "pos_embed": (1, 17, 64)}
    vit["patch_embed.proj.weight"] = (64, 3, 8, 8)
    with pytest.raises(CheckpointError, match="5 attention heads do not divide the hidden size 64"):
        convert_vlmo(random_state(**SIZES, kind="plus"), ImportRequest(facts=FACTS, config={}, heads=5))
    with pytest.raises(CheckpointError, match="5 attention heads do not divide the hidden size 64"):
        convert_vit({n: torch.zeros(s) for n, s in vit.items()}, ImportRequest(facts=FACTS, config={"heads": 5}))
    with pytest.raises(CheckpointError, match="of no task, not of a vqa model"):
        convert_vlmo(state, ImportRequest(facts=FACTS, config={}, heads=4, task="vqa"))
    with pytest.raises(CheckpointError, match=r"it has no `transformer\.cls_token`"):
        convert_vlmo({"weight": torch.zeros(1)}, asked())


def beit(shared: bool = False) -> dict[str, Tensor]:
    """Return the image side of a random VLMo with BEiT's names; a table of biases per layer, or a shared one."""
    state: dict[str, Tensor] = {"mask_token": torch.randn(1, 1, 64)}
    for name, tensor in random_state(**SIZES).items():
        if name.startswith("transformer.") and "_text" not in name and "_vl" not in name:
            state[name.removeprefix("transformer.").replace("mlp_imag", "mlp").replace("norm2_imag", "norm2")] = tensor
    for name in ("rel_pos_bias",) if shared else (f"blocks.{layer}.attn" for layer in range(3)):
        state[f"{name}.relative_position_bias_table"] = torch.randn(7 * 7 + 3, 4)
        state[f"{name}.relative_position_index"] = torch.zeros(17, 17)
    state["lm_head.weight"], state["lm_head.bias"] = torch.randn(11, 64), torch.randn(11)
    return state


def test_beit_fills_the_image_side() -> None:
    """Its states are compared with the authors' code (test_authors_vlmo.py), with a table of biases per layer."""
    state, config = beit(), {"max_positions": 12, "vl_start": 2}
    imported = convert_beit(state, asked(**config, image_codes=11))
    model = built(imported)
    assert imported.config["side"] == 32 and imported.config["heads"] == 4
    assert torch.equal(model.image_head.weight, state["lm_head.weight"])
    assert torch.equal(model.image_embedding.hidden_1D, state["mask_token"][0])
    shared = beit(shared=True)
    biases = convert_beit(shared, asked(**config)).weights["position_bias.image"]
    assert torch.equal(biases, shared["rel_pos_bias.relative_position_bias_table"].T.repeat(3, 1))

    finetuned = {n: t for n, t in state.items() if not n.startswith(("norm.", "mask_token", "lm_head"))}
    finetuned |= {"fc_norm.weight": torch.ones(64), "fc_norm.bias": torch.zeros(64), "head.weight": torch.zeros(5, 64)}
    weights = convert_beit(finetuned, asked(**config)).weights
    assert "norm.weight" not in weights and "image_head.weight" not in weights
    for other in ({"positions": "absolute"}, {"feed_forward": "shared"}):
        with pytest.raises(CheckpointError, match="must be `relative` and `experts`"):
            convert_beit(state, asked(**config, **other))
    with pytest.raises(CheckpointError, match="side 48, BEiT's 32"):
        convert_beit(state, asked(side=48))
    with pytest.raises(CheckpointError, match=r"1 missing: blocks\.2\.mlp\.fc1\.bias"):
        convert_beit({n: t for n, t in state.items() if n != "blocks.2.mlp.fc1.bias"}, asked())


def test_dvae_loads_its_layout_and_gives_a_code_per_patch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = DVAE(8, 16)
    state = {}
    for name, conv in made._named_convolutions():
        state[f"{name}.w"], state[f"{name}.b"] = conv.weight.detach().clone(), conv.bias.detach().clone()
    assert {"blocks.group_2.block_1.id_path.w", "blocks.group_4.block_2.res_path.conv_4.b"} <= state.keys()
    assert state["blocks.group_4.block_2.res_path.conv_4.w"].shape == (64, 16, 1, 1)
    torch.save(state, tmp_path / "encoder.pt")
    read = DVAE.load(tmp_path / "encoder.pt", 16)
    pixels = torch.rand(2, 3, 32, 32)
    assert torch.equal(read(pixels), made(pixels)) and made(pixels).shape == (2, 16, 4, 4)
    tokens = read.tokens(PIXELS, 4)
    assert tokens.shape == (2, 16) and tokens.dtype == torch.int64
    model = built(convert_beit(beit(), asked(max_positions=12, vl_start=2, image_codes=11)))
    with pytest.raises(CheckpointError, match="image_codes: 16"):
        DVAE.load(tmp_path / "encoder.pt", 11)
    with pytest.raises(CheckpointError, match=r"unexpected: blocks\.more"):
        torch.save({**state, "blocks.more": torch.zeros(1)}, tmp_path / "more.pt")
        DVAE.load(tmp_path / "more.pt", 16)
    assert model.image_tokens(PIXELS).shape == (2, 16)
