"""Detectors: training, average precision, saving and loading, RoIAlign."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_detector import CLASSES, CONFIG, train
from torch import nn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.ops import MultiScaleRoIAlign

from vlp_models.contrib.detector import training
from vlp_models.contrib.detector.checkpoint import (
    Detector,
    load_detector,
    load_published,
    save_detector,
)
from vlp_models.contrib.detector.faster_rcnn import (
    PUBLISHED,
    DetectorConfig,
    SeededSampler,
    SeparableRoIAlign,
    build_detector,
    configure,
)
from vlp_models.contrib.detector.training import (
    LabeledImage,
    TrainingOptions,
    TrainingResult,
    average_precision,
    backward_of,
    fit,
)
from vlp_models.errors import CheckpointError, NonFiniteLossError
from vlp_models.vision.image_io import one_thread
from vlp_models.vision.saved_network import save_no_detector


def test_detector_learns_eight_drawings(drawings: list[LabeledImage], trained: tuple[Detector, TrainingResult]) -> None:
    _, first = train(drawings, steps=2, lr=1e-6)
    detector, result = trained
    assert result.losses["loss"] < first.losses["loss"] / 2
    scores = average_precision(detector.model, drawings, CLASSES, torch.device("cpu"), batch_size=4)
    assert scores["AP50"] > 80
    swapped = [dataclasses.replace(image, labels=3 - image.labels) for image in drawings]  # wrong classes
    assert average_precision(detector.model, swapped, CLASSES, torch.device("cpu"), batch_size=4)["AP50"] < 50


def test_same_seed_gives_same_weights(drawings: list[LabeledImage]) -> None:
    one, two = (train(drawings, steps=3, flip=True)[0].model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("batch_size", [4, 3])
def test_one_and_two_processors_give_the_same_weights(
    drawings: list[LabeledImage], monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    monkeypatch.setattr(training, "is_portable", lambda: True)
    found = []
    with one_thread():  # for an operation, as in portable mode
        for processors in (1, 2):
            monkeypatch.setattr(training, "cpu_count", lambda most, count=processors: min(most, count))
            detector, result = train(drawings, steps=6, batch_size=batch_size, flip=True)
            found.append((detector.model.state_dict(), result.losses))
    (one, losses), (two, others) = found
    assert losses == others
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_halves_are_computed_at_the_same_time(drawings: list[LabeledImage], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "is_portable", lambda: True)
    monkeypatch.setattr(training, "cpu_count", lambda most: most)
    both = Barrier(2, timeout=30)  # breaks unless two threads are at it
    read = training.read_image

    def read_together(path: Path, width: int, height: int) -> torch.Tensor:
        both.wait()
        return read(path, width, height)

    monkeypatch.setattr(training, "read_image", read_together)
    train(drawings, steps=2)


def test_processors_are_used_one_at_a_time_without_portable_mode(
    drawings: list[LabeledImage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "is_portable", lambda: False)
    threads = set()
    read = training.read_image

    def noting(path: Path, width: int, height: int) -> torch.Tensor:
        threads.add(get_ident())
        return read(path, width, height)

    monkeypatch.setattr(training, "read_image", noting)
    train(drawings, steps=2)
    assert threads == {get_ident()}


def test_loss_and_gradients_of_a_batch_are_the_means_of_its_halves(drawings: list[LabeledImage]) -> None:
    """Weighted by their images; the samplers take every proposal, so nothing is drawn."""
    torch.manual_seed(0)
    model = build_detector(CONFIG, len(CLASSES)).train()
    for part in (model.rpn, model.roi_heads):
        part.fg_bg_sampler.batch_size_per_image, part.fg_bg_sampler.positive_fraction = 10_000, 0.5
    batch = [(image, False) for image in drawings[:3]]
    alone = []
    for half in (batch[:2], batch[2:]):
        copy = build_detector(CONFIG, len(CLASSES)).train()
        copy.load_state_dict(model.state_dict())
        for part in (copy.rpn, copy.roi_heads):
            part.fg_bg_sampler.batch_size_per_image, part.fg_bg_sampler.positive_fraction = 10_000, 0.5
        losses = training.backward_of(copy(*training._load_examples(half, torch.device("cpu"))))
        alone.append((losses, copy))
    with training._Halves(model, 0, torch.device("cpu")) as halves:
        losses = halves.backward(batch)
    for name, value in losses.items():
        assert value == pytest.approx((2 * alone[0][0][name] + alone[1][0][name]) / 3, rel=1e-5)
    for own, first, second in zip(model.parameters(), *(half.parameters() for _, half in alone), strict=True):
        torch.testing.assert_close(own.grad, (2 * first.grad + second.grad) / 3, rtol=1e-3, atol=1e-4)
    for own, first, second in zip(model.buffers(), *(half.buffers() for _, half in alone), strict=True):
        torch.testing.assert_close(own, (first + second) / 2 if own.is_floating_point() else first)


def test_a_batch_of_one_image_is_not_divided(drawings: list[LabeledImage]) -> None:
    _, result = train(drawings, steps=3, batch_size=1)
    assert np.isfinite(result.losses["loss"])


def test_sampler_chooses_as_torchvisions_does() -> None:
    theirs = BalancedPositiveNegativeSampler(8, 0.25)
    ours = SeededSampler(theirs, torch.Generator().manual_seed(1))
    matched = [
        torch.tensor([-1] * 5 + [0] * negatives + [1, 2, 3][:positives])
        for negatives, positives in [(20, 3), (20, 1), (3, 3), (0, 0)]
    ]
    for number, masks in enumerate(zip(*theirs(matched), *ours(matched), strict=True)):
        positive, negative, own_positive, own_negative = masks
        assert (own_positive.sum(), own_negative.sum()) == (positive.sum(), negative.sum())
        assert (matched[number][own_positive.bool()] > 0).all()
        assert (matched[number][own_negative.bool()] == 0).all()
    before = torch.get_rng_state()
    again = SeededSampler(theirs, torch.Generator().manual_seed(1))
    first = SeededSampler(theirs, torch.Generator().manual_seed(1))(matched)
    for one, two in zip(first, again(matched), strict=True):
        assert all(map(torch.equal, one, two))
    assert torch.equal(before, torch.get_rng_state())


def test_non_finite_loss_names_the_images(drawings: list[LabeledImage]) -> None:
    with pytest.raises(NonFiniteLossError, match=r"step \d+, on images drawn/\d"):
        train(drawings, steps=30, lr=1e30)


def test_images_keep_their_size_unless_too_large() -> None:
    transform = build_detector(dataclasses.replace(CONFIG, max_side=100), 3).transform
    images, _ = transform([torch.rand(3, 40, 64), torch.rand(3, 120, 200)])
    assert images.image_sizes == [(40, 64), (60, 100)]


@pytest.mark.parametrize("config", [dataclasses.replace(CONFIG, max_side=100), PUBLISHED["mobilenet_v3_large_320_fpn"]])
def test_the_shorter_side_of_a_strip_keeps_a_pixel(config: DetectorConfig) -> None:
    model = build_detector(config, 3).eval()
    longest = config.max_side
    for width, height in ((4, longest * 4), (longest * 49, 49), (longest * 7, 4), (4, longest * 4 - 1)):
        boxes = torch.tensor([[0.0, 0.0, width, height]])
        images, targets = model.transform([torch.rand(3, height, width)], [{"boxes": boxes}])
        size = (1, longest) if width > height else (longest, 1)
        assert images.image_sizes == [size]
        assert targets[0]["boxes"].tolist() == [pytest.approx([0, 0, size[1], size[0]], rel=0.02)]
        with torch.no_grad():
            assert len(model([torch.rand(3, height, width)])) == 1


def test_anchors_follow_the_boxes() -> None:
    sides = np.repeat([10, 20, 30], 5)
    boxes = np.stack([sides * 0, sides * 0, sides, sides], axis=1)
    assert configure("small", 64, boxes).anchors == (10, 20, 30)


def test_save_and_load_round_trip(tmp_path: Path, trained: tuple[Detector, TrainingResult]) -> None:
    model = trained[0].model
    detector_id = save_detector(tmp_path, model, CONFIG, CLASSES, {"seed": 0})
    loaded = load_detector(tmp_path)
    assert (loaded.detector_id, loaded.config, loaded.classes) == (detector_id, CONFIG, CLASSES)
    assert all(torch.equal(loaded.model.state_dict()[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        model_copy = build_detector(CONFIG, len(CLASSES))
        model_copy.load_state_dict(model.state_dict())
        model_copy.roi_heads.box_predictor.cls_score.bias[0] += 1e-3
    (tmp_path / "other").mkdir()
    assert save_detector(tmp_path / "other", model_copy, CONFIG, CLASSES, {"seed": 0}) != detector_id


def test_weights_of_another_architecture_are_refused_with_their_names(tmp_path: Path) -> None:
    save_detector(tmp_path, build_detector(CONFIG, 3), CONFIG, CLASSES, {})
    state = load_file(tmp_path / "detector.safetensors")
    state["extra.weight"] = state.pop("rpn.head.conv.0.0.bias")
    state["rpn.head.bbox_pred.bias"] = torch.zeros(5)
    save_file(state, tmp_path / "detector.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_detector(tmp_path)
    text = str(error.value)
    assert "1 missing: rpn.head.conv.0.0.bias" in text
    assert "1 unexpected: extra.weight" in text
    assert "rpn.head.bbox_pred.bias [5] instead of [12]" in text


def test_damaged_and_missing_detectors_are_refused(tmp_path: Path) -> None:
    save_detector(tmp_path, build_detector(CONFIG, 3), CONFIG, CLASSES, {})
    weights = tmp_path / "detector.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        load_detector(tmp_path)
    content = bytearray(sound)
    content[-100] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"detector\.safetensors: damaged: weights and config\.json do not match"):
        load_detector(tmp_path)
    save_no_detector(tmp_path, {})
    with pytest.raises(CheckpointError, match=r"detector\.source: none"):
        load_detector(tmp_path)


@pytest.mark.slow
def test_coco_weights_file_gets_coco_names(tmp_path: Path) -> None:
    """A published .pth with 91 COCO classes and no batch norm counters."""
    model = build_detector(PUBLISHED["resnet50_fpn"], 91)
    state = {name: value for name, value in model.state_dict().items() if "num_batches_tracked" not in name}
    torch.save(state, tmp_path / "coco.pth")
    detector = load_published(tmp_path / "coco.pth", "resnet50_fpn", ["cat"])
    assert (len(detector.classes), detector.classes[1], detector.config.feature_dim) == (91, "person", 1024)
    with pytest.raises(CheckpointError, match=r"missing: .*backbone\.blocks"):
        load_published(tmp_path / "coco.pth", "small", ["cat"])


def test_roi_align_equals_torchvisions_values_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    theirs, ours = MultiScaleRoIAlign(["0"], output_size=5, sampling_ratio=2), SeparableRoIAlign(5, 2, stride=8)
    sizes = [(80, 128), (80, 128)]
    boxes = []
    for count in (40, 7):
        corner = torch.rand(count, 2, generator=generator) * torch.tensor([130.0, 80.0])
        sides = torch.rand(count, 2, generator=generator) * torch.tensor([90.0, 60.0])  # some extend outside
        boxes.append(torch.cat([corner - 10, corner - 10 + sides], dim=1))
    boxes[1] = torch.cat(
        [boxes[1], torch.tensor([[3.0, 4.0, 3.0, 4.0], [0.0, 0.0, 128.0, 80.0]])]
    )  # a point, the whole image
    results = []
    for pool in (theirs, ours):
        maps = torch.randn(2, 6, 10, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        pooled = pool({"0": maps}, boxes, sizes)
        pooled.square().sum().backward()
        results.append((pooled.detach(), maps.grad))
    assert results[0][0].shape == results[1][0].shape == (49, 6, 5, 5)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert ours({"0": torch.rand(1, 6, 4, 4)}, [torch.zeros(0, 4)], [(32, 32)]).shape == (0, 6, 5, 5), "no box"


@pytest.mark.parametrize("without", [None, 0, 1], ids=["both", "second half only", "first half only"])
def test_gradients_of_one_half_alone_are_those_of_the_batch(without: int | None) -> None:
    halves = object.__new__(training._Halves)
    halves._models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]  # type: ignore[list-item]
    for number, (half, gradient) in enumerate(zip(halves._models, (2.0, 3.0), strict=True)):
        if number != without:
            for parameter in half.parameters():
                parameter.grad = torch.tensor([[gradient]])
    halves._merge()
    model, replica = ([parameter.grad for parameter in half.parameters()] for half in halves._models)
    assert [None if g is None else g.item() for g in model] == [{None: 5.0, 0: 3.0, 1: 2.0}[without]]
    assert replica == [None]


def test_training_loop_of_detectors_and_warm_up_fixes_what_it_trains() -> None:
    detector = build_detector(DetectorConfig(channels=(4, 4, 4), feature_dim=8), 3)
    options = TrainingOptions(steps=1, batch_size=1, lr=1e-3, seed=0)
    none = np.zeros(0, np.float32)
    image = LabeledImage(image_id="a", path=Path("a"), width=1, height=1, boxes=none, labels=none, words=none)
    loss = {"sum": torch.stack([parameter.sum() for parameter in detector.parameters()]).sum()}
    fit(detector, lambda batch: backward_of(loss), [image], options, model_name="the detector", lr_key="detector.lr")
    norms = [module for module in detector.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(len(module._forward_hooks) == len(module._forward_pre_hooks) == 1 for module in norms)
