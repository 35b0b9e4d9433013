"""Detectors of torchvision: their weights from its own cache, and parity with its own models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coco_toys import MOBILE, keep_coco_detector
from torchvision.models import get_model
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.ops import FrozenBatchNorm2d

from vlp_models.contrib.detector.checkpoint import fetch_published, load_published
from vlp_models.contrib.detector.faster_rcnn import PUBLISHED
from vlp_models.contrib.detector.regions import RegionExtractor
from vlp_models.errors import ParamsError
from vlp_models.params import DetectorBackbone


def lighten(model: FasterRCNN) -> FasterRCNN:
    """Keep boxes of any confidence; if the model resizes to 800 pixels, resize to 96 and keep fewer boxes."""
    model.roi_heads.score_thresh = 0.0
    if model.transform.min_size == (800,):
        model.transform.min_size, model.transform.max_size = (96,), 128
        model.rpn._pre_nms_top_n["testing"] = model.rpn._post_nms_top_n["testing"] = 50
    return model


@pytest.mark.slow
@pytest.mark.parametrize("backbone", PUBLISHED)
def test_coco_detector_by_name_or_path_equals_torchvisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: DetectorBackbone
) -> None:
    file, entry = keep_coco_detector(monkeypatch, tmp_path, backbone)
    theirs = get_model(f"fasterrcnn_{backbone}", weights=entry).eval()
    named, by_path = fetch_published("torchvision", backbone, "here"), load_published(file, backbone, ["cat"])
    assert named.classes == by_path.classes and (len(named.classes), named.classes[1]) == (91, "person")
    assert repr(named.model.transform).partition("\n")[2] == repr(theirs.transform).partition("\n")[2]
    image = torch.randint(0, 255, (3, 60, 80), dtype=torch.uint8)
    with torch.inference_mode():
        (wanted,), (found,) = (lighten(model).double()([image.double() / 255]) for model in (theirs, named.model))
    assert len(wanted["boxes"]) == 100 and len(wanted["labels"].unique()) > 5
    for name in ("boxes", "labels", "scores"):
        torch.testing.assert_close(found[name], wanted[name])
    lighten(by_path.model)
    regions = RegionExtractor(by_path, min_score=0.0, max_regions=5).extract([image])[0]
    assert 0 < len(regions) <= 5 and regions.features.shape[1:] == (1024,) and regions.class_probs.shape[1:] == (91,)


@pytest.mark.slow
def test_first_coco_weights_use_batch_norms_without_epsilon(tmp_path: Path) -> None:
    resnet = get_model("resnet50", weights=None, norm_layer=FrozenBatchNorm2d)
    for name, buffer in resnet.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(1e-6, 1e-4)
    theirs = FasterRCNN(_resnet_fpn_extractor(resnet, 5), 91).eval()
    for module in theirs.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.eps = 0.0  # as torchvision does when it loads them
    torch.save(theirs.state_dict(), tmp_path / "coco.pth")
    ours = load_published(tmp_path / "coco.pth", "resnet50_fpn", [])
    assert PUBLISHED["resnet50_fpn"].norm_eps > 0 and ours.config.norm_eps == 0
    image = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        first, second = (
            m.backbone.body.layer1(m.backbone.body.bn1(m.backbone.body.conv1(image))) for m in (theirs, ours.model)
        )
    torch.testing.assert_close(second / first.abs().max(), first / first.abs().max())


@pytest.mark.parametrize(("weights", "backbone"), [("torchvision", "small"), ("timm", MOBILE)])
def test_backbone_without_torchvision_weights_is_refused(weights: str, backbone: str) -> None:
    with pytest.raises(ParamsError, match=r"here: .*torchvision has weights for detector\.backbone resnet50_fpn, "):
        fetch_published(weights, backbone, "here")  # type: ignore[arg-type]
