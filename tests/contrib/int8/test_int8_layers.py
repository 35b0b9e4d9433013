"""Linear layers with weights of 8 bits: rounding errors within half a step, the same outputs by both kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vlp_models.contrib.int8.layers import FEW_ROWS, Int8Linear, quantize, quantize_linears
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import load_checkpoint_weights
from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.linear import QUANTIZED_LAYERS, SCALE, PackedLinear, project_part, use_quantized_layers


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = MultiHeadAttention(64, heads=4)
        self.out = nn.Linear(64, 80, bias=False)
        self.tiny = nn.Linear(64, 2)
        self.words = nn.Embedding(100, 64)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.tiny(self.out(self.attention(self.words(ids_BT)))[..., :64])


def int8_of(module: Small) -> Small:
    weights = quantize_linears(module, module.state_dict())
    other = Small()
    use_quantized_layers(other, weights)
    load_checkpoint_weights(other, weights, where=None)  # type: ignore[arg-type]
    return other.eval()


def test_rounding_errors_are_at_most_half_a_step() -> None:
    weight = torch.randn(40, 96) * torch.logspace(-6, 3, 40)[:, None]
    weight[7] = 0
    values, scale = quantize(weight)
    assert values.dtype == torch.int8 and values.abs().max() == 127
    assert ((values * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [None, slice(32), slice(32, None)])
def test_both_kernels_compute_the_product_with_the_rounded_weights(bias: bool, rows: slice | None) -> None:
    layer = Int8Linear(64, 96, bias=bias)
    layer.weight, layer.weight_scale = quantize(torch.randn(96, 64))
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    x = torch.randn(3, FEW_ROWS, 64)
    whole = x @ (layer.weight * layer.weight_scale[:, None]).T + (0 if layer.bias is None else layer.bias)
    wanted = whole[..., rows or slice(None)]
    torch.testing.assert_close(layer(x, rows), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer(x[0], rows), wanted[0], rtol=0.02, atol=0.1)  # bfloat16
    torch.testing.assert_close(layer(x.double(), rows), wanted.double(), rtol=1e-5, atol=1e-4)


def test_large_linear_layers_are_replaced_and_nothing_else() -> None:
    module = Small().eval()
    other = int8_of(module)
    assert [name for name, layer in other.named_modules() if isinstance(layer, Int8Linear)] == [
        "attention.qkv",
        "attention.out",
        "out",
    ]
    ids = torch.arange(60).view(3, 20)
    with torch.no_grad():
        found, wanted = other(ids), module(ids)
    assert not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))
    assert torch.equal(other.words.weight, module.words.weight)


def test_parts_of_the_outputs() -> None:
    layer = PackedLinear(64, 192)
    other = Int8Linear(64, 192, bias=True)
    other.weight, other.weight_scale = quantize(layer.weight.detach())
    x = torch.randn(20, 64)
    assert torch.equal(project_part(other, x, slice(64, None)), other(x)[:, 64:])


@pytest.mark.parametrize("damage", ["no layer", "an embedding", "float weights", "no weights"])
def test_scale_without_a_layer_is_refused(damage: str) -> None:
    module = Small()
    weights = quantize_linears(module, module.state_dict())
    if damage == "no layer":
        weights[f"other{SCALE}"] = torch.ones(80)
    elif damage == "an embedding":
        weights[f"words{SCALE}"] = torch.ones(100)
    elif damage == "float weights":
        weights["out.weight"] = weights["out.weight"].float()
    else:
        del weights["out.weight"]
    with pytest.raises(CheckpointError, match=r"weight_scale: a scale without a linear layer's int8 weights"):
        use_quantized_layers(Small(), weights)


def test_without_the_folder_the_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = quantize_linears(Small(), Small().state_dict())
    monkeypatch.delitem(QUANTIZED_LAYERS, "int8")
    with pytest.raises(CheckpointError, match="weights of 8 bits need vlp_models/contrib/int8"):
        use_quantized_layers(Small(), weights)
