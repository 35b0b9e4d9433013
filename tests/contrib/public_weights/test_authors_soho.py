"""Parity with the public SOHO code (researchmm/soho), which was run on the same weights, images and texts
(tests/golden/authors_soho.json, tests/support/authors_soho.py).

This model runs in float64: in float32 its convolutions differ from processor to processor, and a ReLU close to zero
then changes whole gradients. The recorded numbers are float32.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from authors_soho import (
    CASES,
    FACTS,
    SIZES,
    STEPS,
    TIMES_M,
    answering,
    built,
    checkpoint,
    digest,
    features,
    gradient,
    pretraining,
    weight,
)
from torch import Tensor

from vlp_models.contrib.public_weights.soho import read_soho
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.soho.dictionary import Dictionary
from vlp_models.params import GroupParams, OptimizerParams
from vlp_models.params.schema import build
from vlp_models.training.optim import Freezing, build_optimizer

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "authors_soho.json").read_text())
STEM = {"cnn_stem": GroupParams(frozen=True)}  # `frozen_stages=1` there
# A name of the public code's weights -> ours, of those whose updates were recorded
STEPPED = {
    "backbone.layer2.0.conv1.weight": "backbone.net.layer2.0.conv1.weight",
    "backbone.layer4.1.conv2.weight": "backbone.net.layer4.1.conv2.weight",
    "backbone.conv1.weight": "backbone.net.conv1.weight",
    "neck.conv.conv.weight": "neck.conv.weight",
    "neck.pos_line.weight": "gate.vectors.weight",
    "language.bert.encoder.layer.0.intermediate.dense.weight": "transformer.0.ffn.0.weight",
    "head.match_class.weight": "match_head.weight",
}


def close(found: Tensor, wanted: list[float], name: str, most: int = 24) -> None:
    """Compare within 1e-5 of the largest recorded value, or of 1 where all are smaller."""
    values = digest(found, most) if found.is_floating_point() else found.int().flatten().tolist()
    assert values == pytest.approx(wanted, rel=0, abs=1e-5 * max(1, *map(abs, wanted))), name


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImportedModel]:
    folder = tmp_path_factory.mktemp("soho")
    found = {}
    for name in ("pretraining", "vqa"):
        torch.save(checkpoint(GOLDEN[f"{name} layout"]), folder / f"{name}.pth")
        found[name] = read_soho(folder / f"{name}.pth", ImportRequest(facts=FACTS, config={}, heads=SIZES["heads"]))
    return found


def test_sizes_are_those_of_the_recording() -> None:
    assert GOLDEN["sizes"] == SIZES and GOLDEN["evaluated"].keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_every_step_of_the_pretraining_forward_pass(imported: dict[str, ImportedModel], case: str) -> None:
    """The CNN's map, the neck's features, codes, mixed vectors, mask, tokens, logits and losses."""
    found = pretraining(built(imported["pretraining"]).double(), case, torch.float64)
    assert found.keys() == GOLDEN["evaluated"][case].keys()
    for name, wanted in GOLDEN["evaluated"][case].items():
        close(found[name], wanted, name)


def test_four_steps_of_training(imported: dict[str, ImportedModel]) -> None:
    """Outputs, gradients, the dictionary, statistics; landscape, portrait and square images in turn.

    The neck and the gate see an image once here, four times there: the same mean, but another unbiased variance.
    """
    model = built(imported["pretraining"]).double()
    Freezing(model, STEM).train(0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for number, step in enumerate(GOLDEN["trained"]):
        model.zero_grad()
        found = pretraining(model, step["case"], torch.float64)
        found["total"].backward()
        model.dictionary.update()
        for name, wanted in step["outputs"].items():
            close(found[name], wanted, f"{number}: {name}", 12)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        for name, wanted in step["gradients"].items():
            close(parameters[name].grad, wanted, f"{number}: gradient of {name}", 12)
        cells = found["codes"].numel()
        for name, wanted in step["buffers"].items():
            value = buffers[name]
            if name in ("neck.norm.running_var", "gate.norm.running_var"):
                if number:
                    continue
                added = value - 0.9 * before[name]
                value = 0.9 * before[name] + added * (cells - 1) / cells * 4 * cells / (4 * cells - 1)
            close(value, wanted, f"{number}: {name}", 12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("release", "square"), [("vqa", True), ("vqa of the first release", False)])
def test_vqa_forward_pass(imported: dict[str, ImportedModel], case: str, release: str, square: bool) -> None:
    """The first release used the mask of the first image's shape, here the largest, so it is correct."""
    model = built(imported["vqa"], square_mask=square).double()
    found = answering(model, imported["vqa"].head, case, torch.float64)
    for name, wanted in GOLDEN[release][case].items():
        close(found[name], wanted, name)


def test_mask_of_the_first_release_differs_unless_square() -> None:
    now, first = GOLDEN["vqa"], GOLDEN["vqa of the first release"]
    assert {case for case in CASES if now[case]["mask"] != first[case]["mask"]} == {"lying", "standing"}


def test_vqa_training_step(imported: dict[str, ImportedModel]) -> None:
    wanted, model = GOLDEN["vqa trained"], built(imported["vqa"]).double()
    Freezing(model, STEM).train(0)
    head = {name: tensor.double().requires_grad_() for name, tensor in imported["vqa"].head.items()}
    found = answering(model, head, wanted["case"], torch.float64)
    found["loss"].backward()
    for name, values in wanted["outputs"].items():
        close(found[name], values, name, 12)
    parameters = dict(model.named_parameters()) | {f"head.{name}": tensor for name, tensor in head.items()}
    for name, values in wanted["gradients"].items():
        close(parameters[name].grad, values, name, 12)


def test_dictionary_from_scratch() -> None:
    """Codes that are never hit become zero at once; then one comes alive per step."""
    codes, dimension = SIZES["codes"], SIZES["hidden"]
    dictionary = Dictionary(codes, dimension, momentum=0.4, update="released").train()
    dictionary.codes.copy_(weight("neck.vq.embed", (codes, dimension)))
    assert len(GOLDEN["dictionary"]) == STEPS
    for step, wanted in enumerate(GOLDEN["dictionary"]):
        mapped = dictionary(features(step), TIMES_M, learn=True)
        dictionary.update()
        found = {"codes": mapped.codes_M, "vectors": mapped.vectors_MD, "table": dictionary.codes}
        found |= {"counts": dictionary.counts, "sums": dictionary.sums}
        for name, values in wanted.items():
            close(found[name], values, f"{step}: {name}", 24 if name == "counts" else 12)


def test_updates_of_sgd_and_adamw(imported: dict[str, ImportedModel]) -> None:
    """SGD for the CNN, its frozen stem untouched; AdamW for the rest.

    The public code's AdamW adds eps before it corrects for the bias, so in the first update its eps is that much larger
    here. It decays biases and norms, too; here only matrices decay, so only those are compared.
    """
    groups = {"cnn": {"kind": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-4}, "cnn_stem": {"frozen": True}}
    settings: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.01, "groups": groups}
    settings["eps"] = 1e-6 / math.sqrt(1 - 0.999)
    params = build(OptimizerParams, settings, where="optimizer")
    model = built(imported["pretraining"])
    Freezing(model, params.groups)
    optimizer = build_optimizer(model, params)
    parameters = dict(model.named_parameters())
    for step, wanted in enumerate(GOLDEN["optimised"]):  # plain-ok
        for theirs, ours in STEPPED.items():
            if parameters[ours].requires_grad:
                shape = tuple(GOLDEN["pretraining layout"][theirs])
                parameters[ours].grad = gradient(step, theirs, shape).view_as(parameters[ours])
        optimizer.step()
        for theirs, ours in STEPPED.items():
            if step == 0 or theirs.startswith("backbone"):
                values = digest(parameters[ours], 12)
                assert values == pytest.approx(wanted[theirs], rel=1e-6, abs=3e-7), f"{step}: {theirs}"
