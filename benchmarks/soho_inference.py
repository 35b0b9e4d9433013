"""Time SOHO's inference against a model that reads a detector's regions (section 4.5 of the paper).

    OMP_NUM_THREADS=1 python benchmarks/soho_inference.py [--height 600] [--width 1000] [--rounds 3] [--layers 12]

One image and one text of 16 tokens. SOHO is a ResNet-101 and 12 layers over cells and words. The baseline is
torchvision's Faster R-CNN on a ResNet-101 with 1,600 categories and 100 regions per image, and Unified VLP's 12 layers
over regions and words. As in bottom-up attention, non-maximum suppression is per category, over all 300 proposals at
any score. All weights are random; only the number of boxes that suppression keeps depends on them.

The paper reports 464 ms against 44 on a V100, with a detector without a feature pyramid. The two models alternate;
results are medians of CPU seconds (on a GPU: seconds). Writes benchmarks/results/soho_inference-<device>.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import write_result
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.resnet import Bottleneck

from vlp_models.data.batch import Pixels, Regions, Text
from vlp_models.models import DataFacts, build_model

VOCAB, TOKENS, CATEGORIES, REGIONS, PROPOSALS, FEATURES = 30522, 16, 1600, 100, 300, 2048
CELL = 64  # pixels


class Stopwatch:
    """Seconds by name, over the rounds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[name].append(self._now() - start)


def detector(height: int, width: int) -> FasterRCNN:
    """Return a detector with random weights. The last scale of each residual block is zero, as in the usual
    initialization; otherwise activations would explode over a hundred layers with frozen batch norms."""
    backbone = resnet_fpn_backbone(backbone_name="resnet101", weights=None, trainable_layers=0)
    for block in backbone.modules():
        if isinstance(block, Bottleneck):
            block.bn3.weight.zero_()
    return FasterRCNN(
        backbone,
        num_classes=CATEGORIES + 1,
        min_size=min(height, width),
        max_size=max(height, width),
        rpn_pre_nms_top_n_test=2 * PROPOSALS,
        rpn_post_nms_top_n_test=PROPOSALS,
        box_score_thresh=0.0,
        box_detections_per_img=REGIONS,
    ).eval()


def timed_suppression(found: FasterRCNN, watch: Stopwatch) -> None:
    """Time the post-processing of scores separately as well."""
    heads = found.roi_heads
    plain = heads.postprocess_detections

    def timed(*arguments: Any) -> Any:
        with watch.timing("regions: suppression"):
            return plain(*arguments)

    heads.postprocess_detections = timed


@torch.inference_mode()
def main(device: torch.device, height: int, width: int, layers: int, rounds: int) -> None:
    """
    Raises:
        SystemExit: the detector finds fewer than 100 regions.
    """
    torch.manual_seed(0)
    watch = Stopwatch(device)
    facts = DataFacts(vocab_size=VOCAB, mask_id=103, feature_dim=FEATURES, num_classes=CATEGORIES + 1)
    soho = build_model("soho", {"height": 1024, "width": 1024, "layers": layers}, facts).to(device).eval()
    fuser = build_model("unified_vlp", {"layers": layers}, facts).to(device).eval()
    finder = detector(height, width).to(device)
    timed_suppression(finder, watch)

    picture = torch.rand(3, height, width, device=device)
    padded = [CELL * -(-side // CELL) for side in (height, width)]
    pixels, mask = torch.zeros(1, 3, *padded, device=device), torch.zeros(1, *padded, dtype=torch.bool, device=device)
    pixels[:, :, :height, :width], mask[:, :height, :width] = picture, True
    image = Pixels(pixels_B3HW=pixels, mask_BHW=mask)
    words = torch.randint(1000, VOCAB, (1, TOKENS), device=device)
    text = Text(ids_BT=words, mask_BT=torch.ones_like(words, dtype=torch.bool))
    regions = Regions(
        features_BRF=torch.rand(1, REGIONS, FEATURES, device=device),
        boxes_BR4=torch.rand(1, REGIONS, 4, device=device).sort(-1).values,
        class_probs_BRC=torch.rand(1, REGIONS, CATEGORIES + 1, device=device).softmax(-1),
        mask_BR=torch.ones(1, REGIONS, dtype=torch.bool, device=device),
    )

    kept = cells = 0
    for number in range(rounds + 1):
        with watch.timing("regions: detector"):
            kept = len(finder([picture])[0]["boxes"])
        if kept != REGIONS:
            raise SystemExit(f"the detector kept {kept} regions, not {REGIONS}: nothing to compare")
        with watch.timing("regions: transformer"):
            fuser.fuse(regions, text)  # type: ignore[operator]
        with watch.timing("pixels: CNN"):
            visual = soho.encode_image(image)  # type: ignore[operator]
        cells = int(visual.mask_BR.sum())
        with watch.timing("pixels: transformer"):
            soho.score(visual, text, torch.zeros(1, dtype=torch.int64, device=device))  # type: ignore[operator]
        if not number:  # the first round warms up
            watch.seconds.clear()

    medians = {name: round(statistics.median(values), 4) for name, values in watch.seconds.items()}
    by_regions = medians["regions: detector"] + medians["regions: transformer"]
    by_pixels = medians["pixels: CNN"] + medians["pixels: transformer"]
    result = {
        "device": str(device),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "pixels": [height, width],
        "layers": layers,
        "regions kept": kept,
        "cells": cells,
        "rounds": rounds,
        "seconds": medians,
        "seconds in all": {"regions": round(by_regions, 4), "pixels": round(by_pixels, 4)},
        "times as fast": round(by_regions / by_pixels, 2),
    }
    print(write_result(f"soho_inference-{device.type}", result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--height", type=int, default=600)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    main(torch.device(given.device), given.height, given.width, given.layers, given.rounds)
