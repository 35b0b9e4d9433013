"""Weights in the documented public layouts: every name is loaded or reported, and outputs equal a plain reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_vlmo import PlainVLMo, random_state
from torch import Tensor

from vlp_models.contrib.public_weights.vlmo import convert_vlmo
from vlp_models.contrib.public_weights.vlmo_images import convert_beit, convert_vit
from vlp_models.data.batch import Pixels, Text
from vlp_models.errors import CheckpointError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.convert.mapping import ImportedModel, ImportRequest
from vlp_models.models.vlmo.image_tokens import DVAE
from vlp_models.models.vlmo.model import VLMo

SIZES: dict[str, Any] = {"hidden": 64, "heads": 4, "layers": 3, "start": 2, "side": 32, "patch": 8, "vocab": 30}
FACTS = DataFacts(vocab_size=30, mask_id=4)
TEXT = Text(
    ids_BT=torch.tensor([[2, 7, 8, 9, 10, 11, 3], [2, 12, 3, 0, 0, 0, 0]]),
    mask_BT=torch.arange(7) < torch.tensor([[7], [3]]),
)
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


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["pretraining", "text", "retrieval", "vqa", "nlvr2", "plus"])
def test_imported_weights_equal_the_plain_model(kind: str) -> None:
    state = random_state(**SIZES, kind=kind)
    state["relative_position_index"] = torch.zeros(17, 17)
    imported = convert_vlmo(state, asked())
    model, plain = built(imported), PlainVLMo(state, heads=4, side=32)
    own = set(model.state_dict())
    fresh = {name.split(".")[0] for name in own - set(imported.weights)}
    heads = {"match_head", "word_head", "image_projection", "text_projection", "log_scale", "pooler"}
    assert (
        fresh
        == {
            "pretraining": set(),
            "plus": set(),
            "text": heads - {"word_head", "pooler"},
            "retrieval": {"match_head", "word_head"},
            "vqa": heads - {"pooler"},
            "nlvr2": heads - {"pooler"},
        }[kind]
    )
    with torch.no_grad():
        fused = model.fuse(Pixels(pixels_B3HW=PIXELS), TEXT)
        pair = plain.pair(PIXELS, TEXT.ids_BT, TEXT.mask_BT)
        close(fused.text_BTD[TEXT.mask_BT], pair[:, :7][TEXT.mask_BT])
        close(fused.image_BRD, pair[:, 7:])
        pooled = plain.pooled(pair)
        if kind == "vqa":
            at = "vqa_classifier"
            pooled = torch.nn.functional.gelu(plain.norm(plain.linear(pooled, f"{at}.0"), f"{at}.1", 1e-5))
        close(fused.pooled_BP, pooled)
        if kind in ("pretraining", "retrieval", "plus"):
            close(model.embed_text(TEXT), plain.embedded(plain.text(TEXT.ids_BT, TEXT.mask_BT), "text"))
            close(model.embed_image(Pixels(pixels_B3HW=PIXELS)), plain.embedded(plain.image(PIXELS), "image"))
            close(model.contrast_scale(), torch.tensor(2.5).exp())
        if kind == "pretraining":
            vectors = model.contrast_vectors(model.encode_image(Pixels(pixels_B3HW=PIXELS)), TEXT, model.biases(7))
            close(vectors[1][0], plain.embedded(plain.image(PIXELS, first=2), "vl_image"))
            close(vectors[1][1], plain.embedded(plain.text(TEXT.ids_BT, TEXT.mask_BT, first=2), "vl_text"))
            logits = model.match_head(fused.pooled_BP)
            close(logits, plain.linear(plain.pooled(pair), "itm_score.fc"))
    assert imported.left_out == (("text_embeddings.position_embeddings.weight",) if kind != "plus" else ())
    assert imported.task == (kind if kind in ("vqa", "nlvr2") else None)
    layers = {"vqa": ("",), "nlvr2": ("0.", "1.", "3.")}.get(kind, ())
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


def beit(kind: str = "own") -> dict[str, Tensor]:
    """Return the image side of a random VLMo with BEiT's names. kind: a bias table per layer (own), or a shared one."""
    state: dict[str, Tensor] = {"mask_token": torch.randn(1, 1, 64)}
    for name, tensor in random_state(**SIZES).items():
        if name.startswith("transformer.") and "_text" not in name and "_vl" not in name:
            state[name.removeprefix("transformer.").replace("mlp_imag", "mlp").replace("norm2_imag", "norm2")] = tensor
    for layer in range(3):
        table = torch.randn(7 * 7 + 3, 4)
        name = "rel_pos_bias" if kind == "shared" else f"blocks.{layer}.attn"
        state[f"{name}.relative_position_bias_table"] = table
        state[f"{name}.relative_position_index"] = torch.zeros(17, 17)
    state["lm_head.weight"], state["lm_head.bias"] = torch.randn(11, 64), torch.randn(11)
    return state


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_beit_fills_the_image_side(kind: str) -> None:
    state = beit(kind)
    config = {"max_positions": 12, "vl_start": 2, "image_codes": 11}
    imported = convert_beit(state, asked(**config))
    model = built(imported)
    assert imported.config["side"] == 32 and imported.config["heads"] == 4
    # BEiT itself, by the plain writing: one layer's tables side by side, and the types it does not have
    table = [
        state[
            "rel_pos_bias.relative_position_bias_table"
            if kind == "shared"
            else f"blocks.{i}.attn.relative_position_bias_table"
        ]
        for i in range(3)
    ]
    there = {
        f"transformer.{n}".replace(".mlp.", ".mlp_imag.").replace(".norm2.", ".norm2_imag."): t
        for n, t in state.items()
    }
    there["relative_position_bias_table"] = torch.cat(table, 1)
    there["token_type_embeddings.weight"] = model.image_embedding.type_1D.detach().expand(2, -1)
    with torch.no_grad():
        found = model.image_states(model.encode_image(Pixels(pixels_B3HW=PIXELS)), model.biases(0))
        close(found, PlainVLMo(there, heads=4, side=32).image(PIXELS))
        close(model.image_head.weight, state["lm_head.weight"])
    finetuned = {n: t for n, t in state.items() if not n.startswith(("norm.", "mask_token", "lm_head"))}
    finetuned |= {"fc_norm.weight": torch.ones(64), "fc_norm.bias": torch.zeros(64), "head.weight": torch.zeros(5, 64)}
    weights = convert_beit(finetuned, asked(max_positions=12, vl_start=2)).weights
    assert "norm.weight" not in weights and "image_head.weight" not in weights
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
