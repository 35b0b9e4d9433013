"""The parts of torchvision that detectors use, imported without torch's compiler.

torchvision.ops.roi_align imports a function of torch._dynamo.utils, and with it torch's compiler: 1.5 s of CPU time in
every process that opens a detector. The function is called only for deterministic algorithms on a GPU. So while
torchvision is imported a substitute is in its place; whatever else is read of the substitute is read of the original.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch  # noqa: F401 - before the substitute is in place

COMPILER = "torch._dynamo.utils"


class _Deferred(ModuleType):
    """Stands for torch._dynamo.utils, which is imported when it is used."""

    def is_compile_supported(self, device_type: str) -> bool:
        return bool(_original().is_compile_supported(device_type))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own
            raise AttributeError(name)
        return getattr(_original(), name)


def _original() -> ModuleType:
    # The import would return the substitute while that is in its place.
    if isinstance(sys.modules.get(COMPILER), _Deferred):
        del sys.modules[COMPILER]
    return importlib.import_module(COMPILER)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import torchvision in the block without torch's compiler, unless that is imported already."""
    if COMPILER in sys.modules:
        yield
        return
    deferred = sys.modules[COMPILER] = _Deferred(COMPILER)
    try:
        yield
    finally:
        if sys.modules.get(COMPILER) is deferred:
            del sys.modules[COMPILER]


with without_compiler():
    from torchvision.models import get_model, get_model_weights
    from torchvision.models.detection import FasterRCNN, FasterRCNN_ResNet50_FPN_Weights
    from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
    from torchvision.models.detection.transform import GeneralizedRCNNTransform
    from torchvision.ops import MultiScaleRoIAlign, nms

__all__ = [
    "AnchorGenerator",
    "BalancedPositiveNegativeSampler",
    "FastRCNNPredictor",
    "FasterRCNN",
    "FasterRCNN_ResNet50_FPN_Weights",
    "GeneralizedRCNNTransform",
    "MultiScaleRoIAlign",
    "RoIHeads",
    "TwoMLPHead",
    "fastrcnn_loss",
    "get_model",
    "get_model_weights",
    "nms",
]
