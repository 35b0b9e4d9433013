"""The gradient of every loss is its derivative: central differences along random directions, in float64.

Every family, each of its pretraining objectives, each task that it supports, and the vision warm-up; batches of one,
two and three samples, full and with padding; batch norms in training mode, in eval mode, and frozen. Each group of
parameters gets a random direction, in which each of its tensors has length one.

A loss is a function of the weights alone here: every evaluation draws from generators with the same seeds, and starts
from the same running statistics. Some things are not smooth, or have no gradient by design:

- SOHO's dictionary replaces each feature by a code and passes the code's gradient to the feature, which is not the
  derivative. TIFG's target of XGPT moves with the weights, but has no gradient. `freeze_constants` records the first
  evaluation. Afterwards, the dictionary adds the recorded difference of code and feature, a constant, and TIFG reads
  and generates the recorded regions. Gradients are the model's own, of the first evaluation.
- ReLU, max pooling and the margin of a ranking loss have kinks, and TDEN's mean over violating pairs jumps where one
  stops to violate the margin. A difference across a kink is wrong, so other directions are tried with smaller steps,
  at most twice. A wrong gradient fails in every direction.
- Words and negatives that are drawn by the model's own probabilities (hard negatives, the second pass of scheduled
  sampling) have no gradient, and do not change within a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import golden_tden
import numpy as np
import pytest
import soho_toys
import tiny_tden as tiny
import tiny_vlmo
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_unified_vlp import scored, tiny_unified_vlp
from tiny_xgpt import tiny_xgpt
from torch import Tensor, nn
from two_pass_toys import recipe_of

from vlp_models import tasks
from vlp_models.data.batch import Batch
from vlp_models.data.pixels import collate_pixels
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.soho.dictionary import Quantized
from vlp_models.params import ScheduledSamplingParams, to_plain
from vlp_models.tasks import task_class
from vlp_models.training.scheduled_sampling import make_loss

STEP, TOLERANCE = 1e-5, 1e-6
NOISE = 2e-10  # rounding of a loss of size 1, divided by the step
SIZES = [1, 2, 3]
Losses = Callable[[], Mapping[str, Tensor]]
Groups = Mapping[str, list[nn.Parameter]]


# ---- The check ---------------------------------------------------------------------------------------------------


def check_gradients(losses: Losses, groups: Groups, *, kinks: bool) -> None:
    """Compare each loss's gradient with its derivative, group by group.

    kinks: whether other directions may be tried.
    """
    generator = torch.Generator().manual_seed(7)
    groups = {name: [p for p in group if p.requires_grad] for name, group in groups.items()}
    groups = {name: group for name, group in groups.items() if group}
    weights = [parameter for group in groups.values() for parameter in group]
    base = losses()
    gradients = {name: _gradients(loss, weights) for name, loss in base.items()}
    for name, loss in _values(losses).items():
        assert loss == pytest.approx(base[name].item(), rel=1e-12), f"{name} is not a function of the weights"
    for group, parameters in groups.items():
        open_losses, failures = set(base), []
        for attempt in range(3 if kinks else 1):
            directions = [_unit(parameter, generator) for parameter in parameters]
            step = STEP / 10**attempt
            derivatives = _derivatives(losses, parameters, directions, step)
            for name in sorted(open_losses):
                pairs = zip(parameters, directions, strict=True)
                ours = float(sum((gradients[name][id(p)] * d).sum() for p, d in pairs))
                theirs, noise = derivatives[name], NOISE * STEP / step * max(1.0, abs(base[name].item()))
                if abs(ours - theirs) <= TOLERANCE * max(abs(ours), abs(theirs)) + noise:
                    open_losses.remove(name)
                else:
                    failures.append(f"{name}, {group}: gradient {ours:.9g}, derivative {theirs:.9g} at step {step}")
            if not open_losses:
                break
        assert not open_losses, "\n".join(failures)


def _gradients(loss: Tensor, weights: list[nn.Parameter]) -> dict[int, Tensor]:
    """Return the gradient of each parameter by its `id`; zeros for one that the loss does not depend on."""
    found: Sequence[Tensor | None] = [None] * len(weights)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    pairs = zip(weights, found, strict=True)
    return {id(weight): torch.zeros_like(weight) if one is None else one for weight, one in pairs}


@torch.no_grad()
def _values(losses: Losses) -> dict[str, float]:
    return {name: loss.item() for name, loss in losses().items()}


@torch.no_grad()
def _derivatives(
    losses: Losses, parameters: list[nn.Parameter], directions: list[Tensor], step: float
) -> dict[str, float]:
    """Return the losses' central differences along the directions. The parameters are unchanged afterwards."""
    kept, ends = [parameter.clone() for parameter in parameters], []
    for signed in (step, -step):
        for parameter, value, direction in zip(parameters, kept, directions, strict=True):
            parameter.copy_(value + signed * direction)
        ends.append(_values(losses))
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    return {name: (ends[0][name] - ends[1][name]) / (2 * step) for name in ends[0]}


def _unit(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random direction of length one."""
    direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return direction / direction.norm()


# ---- Models and batches ------------------------------------------------------------------------------------------

STEM = {"stem": "convolutions", "stem_channels": [4, 4, 6], "patch": 8}
TIMM = {"stem": "timm", "stem_backbone": "test_resnet", "stem_stage": 0, "patch": 8}
SOHO = {"mvm_probability": 0.7}
BUILD: dict[str, Callable[..., Any]] = {
    "tden": tiny.build_tiny,
    "unified_vlp": tiny_unified_vlp,
    "xgpt": tiny_xgpt,
    "vlmo": tiny_vlmo.build_tiny,
    "soho": soho_toys.build,
}
HAS_KINKS = {name: name not in ("xgpt", "vlmo") for name in BUILD}  # a VLMo with a CNN has some as well


def build(family: str, config: Mapping[str, Any]) -> Any:
    """Build a tiny model whose norms and biases are random too: with timm's initial zeros, equal cells in the padding
    of an image would be at a kink of max pooling."""
    model = BUILD[family](**config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def random_batch(family: str, size: int, *, padded: bool, seed: int = 0) -> Batch:
    """Return samples without any padding, or (padded) with some in each sample, as far as the family has any."""

    def make(count: int, seed: int) -> Batch:
        if family == "soho":
            return soho_toys.batch_of(count, seed=seed, padded=padded)
        if family == "vlmo":
            return tiny_vlmo.random_batch(count, seed=seed, image_ids="?" * count)
        return tiny.random_batch(count, seed=seed)  # type: ignore[no-any-return]

    if padded:  # of the toys' samples, only the first is full
        batch = make(size + 1, seed).select(torch.arange(1, size + 1))
        assert not batch.text.mask_BT.all()
    else:
        batch = _concatenated([make(1, 10 * seed + i) for i in range(size)])
        assert batch.text.mask_BT.all()
    names = tuple(map(str, range(size)))
    batch = dataclasses.replace(batch, sample_ids=names, image_ids=names)
    return scored(batch) if family == "unified_vlp" else batch


def _concatenated(records: Sequence[Any]) -> Any:
    """Concatenate batches and everything in them."""
    first = records[0]
    if isinstance(first, Tensor):
        return torch.cat(list(records))
    if isinstance(first, tuple):
        return tuple(item for record in records for item in record)
    if first is None:
        return None
    names = [field.name for field in dataclasses.fields(first)]
    return dataclasses.replace(first, **{n: _concatenated([getattr(record, n) for record in records]) for n in names})


def with_texts(batch: Batch, texts: Batch, owner_N: Tensor) -> Batch:
    """Return the batch with the texts of another one. owner_N int64: the image of each."""
    return dataclasses.replace(batch, text=dataclasses.replace(texts.text, owner_N=owner_N))


def freeze_constants(model: Any) -> None:
    """Let what has no gradient repeat the first evaluation: a dictionary's codes, added as a constant, and the regions
    that TIFG reads and generates."""
    found: dict[str, Any] = {}
    dictionary = getattr(model, "dictionary", None)
    if dictionary is not None:
        look_up = dictionary.forward

        def forward(features_MD: Tensor, weights_M: Tensor | None = None, *, learn: bool = False) -> Quantized:
            if "codes" not in found:
                first = look_up(features_MD, weights_M, learn=learn)
                found["codes"] = first, (first.vectors_MD - features_MD).detach()
                return first
            first, offset_MD = found["codes"]
            return dataclasses.replace(first, vectors_MD=features_MD + offset_MD)

        dictionary.forward = forward
    if hasattr(model, "generate_regions"):
        generate = model.generate_regions
        model.generate_regions = lambda text, image, detected: generate(
            text,
            found.setdefault("regions", dataclasses.replace(image, embedded_KD=image.embedded_KD.detach())),
            detected,
        )


def set_mode(module: nn.Module, mode: str) -> None:
    """mode: `training`; `eval`; or `frozen`: training, but batch norms keep their statistics and weights."""
    module.train(mode != "eval")
    for each in module.modules():
        if mode == "frozen" and isinstance(each, nn.modules.batchnorm._BatchNorm):
            each.eval().requires_grad_(False)


def groups_of(model: Any, **more: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the model's groups, and those of modules next to it."""
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups()
    else:
        groups = {name: list(child.parameters()) for name, child in model.named_children()}
        groups["itself"] = list(model.parameters(recurse=False))
    return groups | {name: list(module.parameters()) for name, module in more.items()}


def repeatable(module: nn.Module, losses: Callable[[torch.Generator], Mapping[str, Tensor]]) -> Losses:
    """Return the losses as a function of the weights: random draws and buffers are the same in each call."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def evaluate() -> Mapping[str, Tensor]:
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        torch.manual_seed(5)  # the masked words of Unified VLP's questions are drawn from the global generator
        return losses(torch.Generator().manual_seed(5))

    return evaluate


# ---- Pretraining -------------------------------------------------------------------------------------------------

PRETRAINING: dict[str, tuple[str, dict[str, Any]]] = {
    "TDEN": ("tden", {}),
    "Unified VLP": ("unified_vlp", {"region_classes": "pretext"}),
    "XGPT": ("xgpt", {}),
    "VLMo": ("vlmo", {}),
    "SOHO": ("soho", SOHO),
    "SOHO, public code": ("soho", {**SOHO, **soho_toys.PUBLIC}),  # its batch norm's output becomes tokens
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TDEN, public code": ("tden", golden_tden.PUBLIC),
    "TDEN, hardest negatives": ("tden", {"ism_negatives": "hardest", "mask_scheme": "bert"}),
    "TDEN, one stream": ("tden", {"structure": "single_stream"}),
    "TDEN, cross-modal matching": ("tden", {"ism_source": "cross_modal"}),
    "Unified VLP, public code": ("unified_vlp", {"compat_reference": True}),
    "XGPT, merged attention": ("xgpt", {"cross_attention": "shared_merged", "signal": "kv"}),
    "XGPT, two stacks": ("xgpt", {"structure": "enc_dec", "tifg_target": "raw", "ida_masks": "multi"}),
    "VLMo, both contrasts": ("vlmo", {"contrast": "both", "positions": "absolute", "layer_scale": 0.0}),
    "VLMo, CNN": ("vlmo", STEM),
    "VLMo, timm's CNN": ("vlmo", TIMM),
    "SOHO, no dictionary": ("soho", {"dictionary_size": 0}),
    "SOHO, small CNN": (
        "soho",
        {**SOHO, "backbone": "small", "backbone_options": {"channels": [4, 4, 6]}, "backbone_stage": 0},
    ),
}


def check_pretraining(
    case: tuple[str, dict[str, Any]], size: int, padded: bool, mode: str = "training", alone: str = ""
) -> None:
    """alone: `image` or `text`, if a batch of VLMo has no other."""
    family, config = case
    model, batch = build(family, config), random_batch(family, size, padded=padded)
    if family == "soho":  # two texts an image
        owner_N = torch.arange(size).repeat_interleave(2)
        batch = with_texts(batch, random_batch(family, 2 * size, padded=padded, seed=1), owner_N)
    set_mode(model, mode)
    freeze_constants(model)
    asked = dict.fromkeys(model.objectives)
    if alone:
        batch = dataclasses.replace(batch, **{"image": {"text": None}, "text": {"image": None}}[alone])
        asked = {"image": {"mim": None}, "text": {"mlm": None}}[alone]

    def losses(generator: torch.Generator) -> dict[str, Tensor]:
        found = model.pretraining_losses(batch, objectives=asked, generator=generator, mask_probability=0.4)
        assert size < 3 or all(loss.count > 0 for loss in found.values()), "a loss without items checks nothing"
        return {name: loss.mean for name, loss in found.items()}

    kinks = HAS_KINKS[family] or "stem" in config
    check_gradients(repeatable(model, losses), groups_of(model), kinks=kinks)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", PRETRAINING)
def test_pretraining(case: str, size: int, padded: bool) -> None:
    check_pretraining(PRETRAINING[case], size, padded)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", VARIANTS)
def test_pretraining_of_variants(case: str, size: int, padded: bool) -> None:
    check_pretraining(VARIANTS[case], size, padded)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "frozen"])
@pytest.mark.parametrize("case", ["SOHO", "SOHO, public code", "VLMo, timm's CNN"])
def test_batch_norms_that_keep_their_statistics(case: str, mode: str) -> None:
    for size in SIZES:
        check_pretraining((PRETRAINING | VARIANTS)[case], size, padded=True, mode=mode)


@pytest.mark.parametrize("alone", ["image", "text"])
@pytest.mark.parametrize("size", SIZES)
def test_vlmo_on_texts_or_images_alone(alone: str, size: int) -> None:
    check_pretraining(("vlmo", {}), size, padded=True, alone=alone)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tden", "unified_vlp", "xgpt"])
@pytest.mark.parametrize("size", SIZES)
def test_second_pass_of_scheduled_sampling(family: str, size: int) -> None:
    """It continues the first pass, whose states it shares."""
    model, batch = build(family, {}).train(), random_batch(family, size, padded=True)
    recipe = recipe_of(dict.fromkeys(model.objectives, 1.0), mask_probability=0.4)
    freeze_constants(model)
    for scheme in "abc" if len(model.word_paths) > 1 else "a":
        loss = make_loss(model, recipe, ScheduledSamplingParams(scheme=scheme), name=family)  # type: ignore[arg-type]

        def losses(generator: torch.Generator, loss: Any = loss) -> dict[str, Tensor]:
            return {"both passes": loss(batch, update=0, generator=generator).mean}

        check_gradients(repeatable(model, losses), groups_of(model), kinks=HAS_KINKS[family])


# ---- Tasks -------------------------------------------------------------------------------------------------------

TOKENIZER = Tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(25))], lowercase=True)
ANSWERS = ["red", "green", "blue"]
FUSES: dict[str, dict[str, Any]] = {"tden": {}, "unified_vlp": {}, "vlmo": {}, "soho": {}}
# name -> task, options, and the families with the configs that it is checked with
TASKS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "captioning": ("captioning", {}, {"tden": {}, "unified_vlp": {}, "xgpt": {}}),
    "captioning, smoothed": ("captioning", {"label_smoothing": 0.1}, {"xgpt": {"structure": "enc"}}),
    "captioning, masked": ("captioning", {"targets": "masked", "mask_probability": 0.4}, {"unified_vlp": {}}),
    "vqa": ("vqa", {}, FUSES | {"soho": {"fusion_hidden": 8}, "vlmo": {"classifier": "mlp"}}),
    "vqa, two classifiers": ("vqa", {}, {"tden": golden_tden.PUBLIC, "unified_vlp": {"mask_question": True}}),
    "nlvr": ("nlvr", {}, FUSES | {"soho": {"task_features": "dictionary"}}),
    "nlvr2": ("nlvr2", {}, FUSES | {"vlmo": {"second_image_type": True}}),
    "entailment": ("entailment", {}, FUSES | {"vlmo": TIMM, "soho": soho_toys.PUBLIC}),
    "vcr": ("vcr", {}, FUSES | {"tden": {"segment_types": True, "use_decoder_in_fusion": False}}),
    "vcr, answers": ("vcr", {"subtask": "answer"}, {"unified_vlp": {}}),
    "retrieval": ("retrieval", {}, {"tden": {}, "vlmo": {}, "soho": {}}),
    "retrieval, hardest": ("retrieval", {"negatives": "hardest", "margin": 0.5}, {"tden": golden_tden.PUBLIC}),
    "retrieval, margin": ("retrieval", {"loss": "margin", "same_image_negatives": True}, {"vlmo": STEM}),
    "retrieval, contrastive": ("retrieval", {"loss": "contrastive", "temperature": 0.1}, {"tden": {}}),
    "retrieval, pairs": ("retrieval", {"scorer": "pairs"}, {"tden": {"ism_source": "cross_modal"}, "vlmo": {}}),
}


def task_model(family: str, task: str, options: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    model = build(family, config)
    info = CheckpointInfo(
        family=family,
        name=family,
        model_config=to_plain(model.config),
        task=task,
        max_text_len=12,
        max_regions=8,
        feature_dim=6,
        classes=("background", "a", "b", "c", "d"),
        options=options,
    )
    labels = {"labels": ANSWERS} if task == "vqa" else {}
    torch.manual_seed(3)
    return task_class(task)(model, TOKENIZER, info, **labels).double()


def task_batch(family: str, task: str, size: int, padded: bool, options: Mapping[str, Any]) -> Batch:
    batch = random_batch(family, size, padded=padded)
    generator = torch.Generator().manual_seed(1)
    if task == "vqa":
        targets = torch.rand(size, len(ANSWERS), generator=generator, dtype=torch.float64)
    elif task == "vcr":
        texts = 4 if options.get("subtask") else 8
        owner_N = torch.arange(size).repeat_interleave(texts)
        batch = with_texts(batch, random_batch(family, texts * size, padded=padded, seed=1), owner_N)
        segment_BT = batch.text.mask_BT & (torch.arange(batch.text.mask_BT.shape[1]) > 2)
        batch = dataclasses.replace(batch, text=dataclasses.replace(batch.text, last_segment_BT=segment_BT))
        targets = torch.randint(4, (size, 2), generator=generator)
    else:
        targets = torch.randint(2, (size,), generator=generator)
    if task == "nlvr2":
        images = random_batch(family, 2 * size, padded=padded, seed=1)
        image, owners = images.image, torch.arange(size).repeat_interleave(2)
        if family == "vlmo":
            image = dataclasses.replace(image, place_B=torch.arange(2).repeat(size))
        batch = dataclasses.replace(batch, image=image, image_ids=images.image_ids, image_owner_M=owners)
    return dataclasses.replace(batch, targets=targets)


TASK_CASES = [
    (name, family) for name, (task, _, families) in TASKS.items() if task in tasks.TASKS for family in families
]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("name", "family"), TASK_CASES)
def test_task(name: str, family: str, padded: bool) -> None:
    task, options, families = TASKS[name]
    for size in SIZES:
        model = task_model(family, task, options, families[family]).train()
        batch = task_batch(family, task, size, padded, options)
        freeze_constants(model.model)

        def losses(generator: torch.Generator, model: Any = model, batch: Batch = batch) -> dict[str, Tensor]:
            return {task: model.loss(batch, generator=generator).mean}

        kinks = HAS_KINKS[family] or "stem" in families[family] or "margin" in name
        check_gradients(repeatable(model, losses), groups_of(model.model, head=model.head), kinks=kinks)


# ---- Vision warm-up ----------------------------------------------------------------------------------------------

WARM_UPS: dict[str, tuple[str, dict[str, Any]]] = {
    "SOHO": ("soho", {"longer": 60, "shorter": 40}),
    "SOHO, pooling first": ("soho", {"longer": 60, "shorter": 40, "pool_first": True}),
    "SOHO, small CNN": VARIANTS["SOHO, small CNN"],
    "VLMo": ("vlmo", {}),
    "VLMo, CNN": ("vlmo", STEM),
    "VLMo, timm's CNN": ("vlmo", TIMM),
}


@pytest.mark.parametrize("case", WARM_UPS)
def test_vision_warmup(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vision_warmup = pytest.importorskip("vlp_models.contrib.detector.vision_warmup")
    family, config = WARM_UPS[case]
    model = build(family, config).train()
    torch.manual_seed(3)
    hidden, words = model.config.hidden, 4
    head = nn.Linear(hidden, words).double()
    encoder = vision_warmup.VisionEncoder(
        model=model, cells=model.cells, pixel_input=model.inputs.image, cell_side=model.cell_side, hidden=hidden
    )

    def in_float64(*args: Any) -> Any:
        pixels = collate_pixels(*args)
        return dataclasses.replace(pixels, pixels_B3HW=pixels.pixels_B3HW.double())

    monkeypatch.setattr(vision_warmup, "collate_pixels", in_float64)
    rng = np.random.default_rng(2)
    for size in SIZES:
        examples = []
        for width, height in [(50, 70), (64, 64), (90, 40)][:size]:
            picture = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
            corners = np.sort(rng.uniform(0, (width, height), (5, 2, 2)), axis=1)
            boxes = corners.reshape(5, 4).astype(np.float32)
            examples.append((picture, boxes, rng.integers(0, 2, (5, words)).astype(np.float32)))

        def losses(generator: torch.Generator, examples: Any = examples) -> dict[str, Tensor]:
            states_KD, targets_KW = vision_warmup._encode_cells(encoder, examples, torch.device("cpu"))
            return {"words": F.binary_cross_entropy_with_logits(head(states_KD), targets_KW.double())}

        kinks = family == "soho" or "stem" in config
        check_gradients(repeatable(model, losses), groups_of(model, head=head), kinks=kinks)
