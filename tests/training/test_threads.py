"""A training's threads: as params.yaml says; else one where a model is too small for more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.data.pixels import PixelInput
from vlp_models.params import TrainerParams
from vlp_models.training.distributed import SMALL_MODEL, set_threads

REGIONS, PIXELS = ModelInputs(image=RegionInput()), ModelInputs(image=PixelInput(height=8, width=8))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def model(inputs: ModelInputs | None, parameters: int) -> nn.Module:
    """Inside of a task's, as in a fine-tuning."""
    own = nn.Linear(parameters, 1, bias=False, device="meta")
    if inputs is not None:
        own.inputs = inputs  # type: ignore[assignment]
    return nn.ModuleDict({"model": own})


@pytest.mark.parametrize(
    ("inputs", "parameters", "asked", "expected"),
    [
        (REGIONS, SMALL_MODEL - 1, 0, 1),
        (ModelInputs(image=None), SMALL_MODEL - 1, 0, 1),
        (REGIONS, SMALL_MODEL - 1, 2, 2),
        (REGIONS, SMALL_MODEL, 0, 3),
        (PIXELS, 10, 0, 3),
        (None, 10, 0, 3),
    ],
)
def test_threads(inputs: ModelInputs | None, parameters: int, asked: int, expected: int) -> None:
    set_threads(model(inputs, parameters), TrainerParams(accelerator="cpu", torch_threads=asked))
    assert torch.get_num_threads() == expected
