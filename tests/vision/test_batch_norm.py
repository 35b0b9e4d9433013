"""Batch norm has the right gradients on a CPU in every memory layout, and unchanged ones where torch was right."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from vlp_models.models import DataFacts, build_model
from vlp_models.vision.batch_norm import fix_batch_norm_gradients, is_misread
from vlp_models.vision.small_backbone import SmallBackbone

Gradients = list[Tensor]


def norm(mode: str) -> nn.BatchNorm2d:
    """Return a batch norm whose numbers are all random, in training mode, in eval mode, or frozen."""
    torch.manual_seed(0)
    found = nn.BatchNorm2d(3).double()
    for tensor in (found.weight, found.bias, found.running_mean, found.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 1.5)
    return found.train(mode != "eval").requires_grad_(mode != "frozen")


def layouts(values: Tensor) -> Iterator[Tensor]:
    """Yield the tensor in every order of its dimensions in memory, with several strides for those of size one."""
    for order in itertools.permutations(range(values.dim())):
        strides, step = [0] * values.dim(), 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= values.shape[dimension]
        ones = [dimension for dimension in range(values.dim()) if values.shape[dimension] == 1]
        for chosen in itertools.product(*([strides[dimension], 1, 3, 2 * step] for dimension in ones)):
            for dimension, stride in zip(ones, chosen, strict=True):
                strides[dimension] = stride
            memory = values.new_zeros(1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)))
            yield memory.as_strided(values.shape, strides).copy_(values)


def gradients(module: nn.Module, x: Tensor, incoming: Tensor) -> Gradients:
    """Return the gradients of input and weights. Buffers of the module do not change."""
    module, leaf = copy.deepcopy(module), x.detach().requires_grad_()
    torch.autograd.backward(module(leaf), incoming)
    return [leaf.grad.clone(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["training", "eval", "frozen"])
def test_gradients_do_not_depend_on_the_layout(mode: str) -> None:
    """Of the input or the incoming gradient. Where torch reads a layout right, gradients are equal in every bit."""
    plain, faults = norm(mode), 0
    fixed = fix_batch_norm_gradients(norm(mode))
    for shape in [(1, 3, 4, 5), (2, 3, 4, 5), (3, 3, 1, 5), (2, 3, 4, 1)]:
        x, incoming = torch.randn(2, *shape, dtype=torch.float64).unbind(0)
        expected = gradients(plain, x, incoming)
        cases = [(x, other) for other in layouts(incoming)] + [(other, incoming) for other in layouts(x)]
        for given, arriving in cases:
            found, before = gradients(fixed, given, arriving), gradients(plain, given, arriving)
            for ours, wanted, theirs in zip(found, expected, before, strict=True):
                torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)
                if not is_misread(given) and not is_misread(arriving):
                    assert torch.equal(ours, theirs)
            faults += not all(torch.allclose(a, b) for a, b in zip(before, expected, strict=True))
    if not faults:
        pytest.skip("this torch reads every layout right; vlp_models/vision/batch_norm.py may no longer be needed")


def test_maps_of_several_rows_and_images_get_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[tuple[int, ...]] = []
    monkeypatch.setattr(Tensor, "register_hook", lambda self, hook: hooked.append(tuple(self.shape)))
    fixed = fix_batch_norm_gradients(nn.BatchNorm2d(3))
    for size in ((2, 3, 4, 5), (1, 3, 4, 5)):
        fixed(torch.randn(*size))
        with torch.no_grad():
            fixed(torch.randn(*size))
    fix_batch_norm_gradients(nn.BatchNorm1d(3))(torch.randn(1, 3, 5))
    assert hooked == [(1, 3, 4, 5)]


def test_second_call_and_copies_change_nothing() -> None:
    once = fix_batch_norm_gradients(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    for module in (fix_batch_norm_gradients(once), fix_batch_norm_gradients(copy.deepcopy(once))):
        assert len(module[0]._forward_hooks) == len(module[0]._forward_pre_hooks) == 1
        assert not module[1]._forward_hooks


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens": lambda y: y.flatten(2).transpose(1, 2),
    "channels last": lambda y: y.permute(0, 2, 3, 1),
    "rows of tokens": lambda y: y.permute(2, 3, 0, 1),
    "mean of the map": lambda y: y.mean((2, 3)),
    "one place": lambda y: y[:, :, 0, 0],
    "pooled": lambda y: nn.functional.max_pool2d(y, 2, ceil_mode=True).flatten(2).mT,
}


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("images", [1, 2])
def test_cnn_whose_activations_are_in_place(after: str, images: int) -> None:
    """ReLU changes batch norm's output in place after the hook was registered. Central differences of all weights."""
    torch.manual_seed(1)
    cnn = fix_batch_norm_gradients(SmallBackbone((3, 4, 5))).double()
    pixels = torch.randn(images, 3, 16, 24, dtype=torch.float64)
    weights = torch.randn_like(AFTER[after](cnn(pixels)))
    (AFTER[after](cnn(pixels)) * weights).sum().backward()
    with torch.no_grad():
        for parameter in cnn.parameters():
            direction, values, step = torch.randn_like(parameter), [], 1e-7
            for change in (step, -2 * step):
                parameter += change * direction
                values.append((AFTER[after](cnn(pixels)) * weights).sum())
            parameter += step * direction
            assert parameter.grad is not None
            expected = (values[0] - values[1]) / (2 * step)
            torch.testing.assert_close((parameter.grad * direction).sum(), expected, rtol=1e-5, atol=1e-6)


def all_fixed(model: nn.Module) -> bool:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return bool(norms) and all(len(module._forward_hooks) == len(module._forward_pre_hooks) == 1 for module in norms)


def test_built_models_are_fixed() -> None:
    facts = DataFacts(vocab_size=30, mask_id=4, feature_dim=6, num_classes=5)
    small = {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1}
    stem = {"stem": "timm", "stem_backbone": "test_efficientnet", "stem_stage": 1, "side": 32, "patch": 8}
    assert all_fixed(build_model("vlmo", {**small, **stem, "vl_start": 1}, facts))
    public = {"gate": True, "pool_first": True, "dictionary_size": 5, "backbone": "resnet18"}
    assert all_fixed(build_model("soho", {**small, **public}, facts))
    layers = dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 1)
    tden = {"hidden": 16, "heads": 2, "intermediate": 32, **layers, "pooler_batch_norm": True}
    assert all_fixed(build_model("tden", tden, facts))
