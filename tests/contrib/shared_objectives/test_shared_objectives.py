"""Objectives across models: what goes with what, shared objectives against slow references, and their checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from toy_dataset import check_resume, make_toy, write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.trial import Trial, build_trial, generator, small_config
from vlp_models.contrib.shared_objectives.heads import (
    SHARED,
    PairBatch,
    PretrainingModel,
    add_mismatched,
    pair_features,
    refusal,
)
from vlp_models.data.batch import Batch
from vlp_models.errors import ParamsError
from vlp_models.models import FAMILIES, DataFacts, add_objectives, known_objectives, own_objectives
from vlp_models.objectives.loss import Loss
from vlp_models.params import GroupParams, ObjectiveParams, Params, RecipeParams, ScheduledSamplingParams, load_params
from vlp_models.pipeline.check_params import check_runs
from vlp_models.pipeline.stages import finetune, pretrain
from vlp_models.tasks.base import load_task_model
from vlp_models.training.scheduled_sampling import make_loss

NO_VECTORS, NO_DECODER, PIXELS = "no vectors of images and texts alone", "no decoder of words", "it reads pixels"
REFUSED = {
    "tden": {},
    "unified_vlp": {"itc": NO_VECTORS, "ism": NO_VECTORS},
    "xgpt": {"mlm": "no states of words after fusion", "itc": NO_VECTORS, "ism": NO_VECTORS},
    "vlmo": {"ic": NO_DECODER, "msg": NO_DECODER, "moc": PIXELS, "mrfr": PIXELS},
    "soho": {
        **dict.fromkeys(("itc", "ism"), NO_VECTORS),
        **dict.fromkeys(("ic", "msg"), NO_DECODER),
        **dict.fromkeys(("moc", "mrfr"), PIXELS),
    },
    "toy": dict.fromkeys(("moc", "mrfr"), "no states of regions after fusion"),
}
ADDED = {
    "tden": ("itm", "itc", "ic", "mrfr"),
    "unified_vlp": ("mlm", "itm", "ic", "msg", "moc", "mrfr"),
    "xgpt": ("itm", "msg", "moc", "mrfr"),
    "vlmo": ("ism",),
    "soho": (),
    "toy": ("mlm", "itm", "itc", "ism", "ic", "msg"),
}
CELLS = [(family, name) for family, names in ADDED.items() for name in names]
# For each objective a family that is checked against a slow reference; `itm` in both ways of computing a pair's feature
SLOW = [
    ("unified_vlp", "mlm"),
    ("tden", "itm"),
    ("xgpt", "itm"),
    ("tden", "itc"),
    ("vlmo", "ism"),
    ("tden", "ic"),
    ("xgpt", "msg"),
    ("xgpt", "moc"),
    ("unified_vlp", "mrfr"),
]
SMALL_TOY = {
    "side": 64,
    "patch": 16,
    "hidden": 32,
    "heads": 2,
    "image_layers": 1,
    "text_layers": 1,
    "decoder_layers": 1,
}
SHARE = 0.4  # masked


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> SampleScenes:
    return write_sample_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", "vlp_models.contrib.plugin_kit.scaffolds.family.model:Toy")


def build(family: str, scenes: SampleScenes) -> Trial:
    return build_trial(family, SMALL_TOY if family == "toy" else small_config(family), scenes)


def with_objectives(family: str, scenes: SampleScenes, *names: str) -> tuple[Trial, PretrainingModel]:
    trial = build(family, scenes)
    model = add_objectives(trial.model, names, scenes.facts, "pretrain.x.recipe.objectives", family)
    assert isinstance(model, PretrainingModel)
    return trial, model.eval()


def batch_of(trial: Trial, size: int = 8, *, shared: bool = False, step: int = 1) -> Batch:
    """The first texts, two for each image; with `step=2` one for each image."""
    reader = trial.reader()
    return reader.collate(trial.scenes.samples(trial.view, reader)[: size * step : step], share_images=shared)


def loss_of(model: PretrainingModel, batch: Batch, name: str, learners: Tensor | None = None) -> Loss:
    (loss,) = model.pretraining_losses(
        batch, objectives={name: learners}, generator=generator(3), mask_probability=SHARE
    ).values()
    return loss


def pairs_of(batch: Batch) -> PairBatch:
    return PairBatch(
        image=batch.image,
        text=batch.text,
        image_ids=batch.image_ids,
        learners=None,
        generator=generator(3),
        mask_probability=SHARE,
    )


# ---- What goes with what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ADDED)
def test_the_protocols_of_a_model_decide(family: str, scenes: SampleScenes) -> None:
    model = build(family, scenes).model
    known = known_objectives(model, scenes.facts)
    assert known == [*own_objectives(model), *ADDED[family]]
    refused = {name: refusal(model, name, scenes.facts) for name in SHARED if name not in known}
    expected = REFUSED[family]
    assert refused.keys() == expected.keys()
    assert all(reason in refused[name] for name, reason in expected.items())


@pytest.mark.parametrize("family", [family for family in REFUSED if REFUSED[family]])
def test_a_refused_objective_names_key_reason_and_alternatives(family: str, scenes: SampleScenes) -> None:
    model = build(family, scenes).model
    others = ", ".join(known_objectives(model, scenes.facts))
    for name, reason in REFUSED[family].items():
        with pytest.raises(ParamsError) as error:
            add_objectives(model, [name], scenes.facts, "pretrain.web.recipe.objectives", family)
        message = str(error.value)
        assert f"`pretrain.web.recipe.objectives.{name}`: {family} cannot train on it: " in message
        assert reason in message and message.endswith(f"it can train on {others}")


def test_objectives_of_one_family_are_refused_elsewhere_with_their_reason(scenes: SampleScenes) -> None:
    model = build("tden", scenes).model
    assert "SOHO's visual dictionary" in refusal(model, "mvm", scenes.facts)
    assert refusal(model, "mlmm", scenes.facts) == "no such objective"


def test_data_without_classes_or_mask_token_refuse_what_needs_them(scenes: SampleScenes) -> None:
    model = build("xgpt", scenes).model
    assert "class probabilities" in refusal(model, "moc", dataclasses.replace(scenes.facts, num_classes=0))
    assert "mask token" in refusal(model, "msg", dataclasses.replace(scenes.facts, mask_id=None))


def test_own_objectives_need_no_head_and_change_nothing(scenes: SampleScenes) -> None:
    model = build("tden", scenes).model
    assert add_objectives(model, ["mlm", "ism"], scenes.facts, "x", "tden") is model


def test_without_the_folder_the_way_out_is_named(scenes: SampleScenes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("tden", scenes).model
    monkeypatch.setattr("vlp_models.models.SHARED_OBJECTIVES", {})
    assert known_objectives(model, scenes.facts) == list(own_objectives(model))
    with pytest.raises(ParamsError, match=r"`x\.itm`: tden can train on mlm, .* need vlp_models/contrib/shared_obj"):
        add_objectives(model, ["mlm", "itm"], scenes.facts, "x", "tden")


def test_plan_refuses_the_objective_before_anything_runs(tmp_path: Path) -> None:
    def params(name: str) -> Params:
        return write_workspace(tmp_path / name, pretrain={"tden": {"recipe": {"objectives": {name: 1.0}}}})

    check_runs(params("itm"))
    with pytest.raises(
        ParamsError, match=r"`pretrain\.tden\.recipe\.objectives\.mvm`: tden cannot train on it: .* itm"
    ):
        check_runs(params("mvm"))


def test_two_passes_and_contrast_over_updates_are_for_own_objectives(scenes: SampleScenes) -> None:
    _, model = with_objectives("tden", scenes, "mlm", "itm")
    recipe = RecipeParams(objectives={"mlm": ObjectiveParams(), "itm": ObjectiveParams()})
    with pytest.raises(ParamsError, match=r"scheduled_sampling\.scheme: a` is for the own objectives .* itm from"):
        make_loss(model, recipe, ScheduledSamplingParams(scheme="a"), name="tden")
    over = dataclasses.replace(recipe, contrast_over="update")
    with pytest.raises(ParamsError, match=r"contrast_over: update` is for the own objectives"):
        make_loss(model, over, ScheduledSamplingParams(), name="tden")


# ---- Training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "name"), CELLS)
def test_batch_of_one_and_no_learners(family: str, name: str, scenes: SampleScenes) -> None:
    trial, model = with_objectives(family, scenes, name)
    alone = loss_of(model, batch_of(trial, 1), name)
    alone.mean.backward()
    assert alone.mean.isfinite() and (int(alone.count) > 0) is (name not in ("itc", "ism"))
    batch = batch_of(trial, 4)
    none = loss_of(model, batch, name, torch.zeros(4, dtype=torch.bool))
    none.sum.backward()
    assert int(none.count) == 0 and float(none.sum.detach()) == 0
    every = loss_of(model, batch, name, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(every.sum, loss_of(model, batch, name).sum)


@pytest.mark.parametrize(("family", "name"), [("tden", "itm"), ("tden", "itc"), ("tden", "ic"), ("unified_vlp", "mlm")])
def test_texts_may_share_an_image(family: str, name: str, scenes: SampleScenes) -> None:
    trial, model = with_objectives(family, scenes, name)
    shared, copied = (loss_of(model, batch_of(trial, 6, shared=shared), name) for shared in (True, False))
    torch.testing.assert_close(shared.sum, copied.sum)


def test_own_and_shared_objectives_are_summed(scenes: SampleScenes) -> None:
    trial, model = with_objectives("tden", scenes, "itm", "mlm")
    recipe = RecipeParams(objectives={"itm": ObjectiveParams(weight=0.5), "mlm": ObjectiveParams()})
    loss = make_loss(model, recipe, ScheduledSamplingParams(), name="tden")(
        batch_of(trial), update=0, generator=generator(3)
    )
    assert list(loss.losses) == ["mlm", "itm"]
    expected = 0.5 * loss.losses["itm"].mean + loss.losses["mlm"].mean
    torch.testing.assert_close(loss.mean, expected)
    assert {"itm", "itm_accuracy", "mlm", "mlm_accuracy"} <= loss.parts.keys()


# ---- Against slow references --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("family", "name"), SLOW)
def test_loss_is_that_of_a_slow_reference(family: str, name: str, size: int, scenes: SampleScenes) -> None:
    trial, model = with_objectives(family, scenes, name)
    batch = batch_of(trial, size, step=2)
    with torch.no_grad():
        found = loss_of(model, batch, name)
        total, count = REFERENCES[name](model.model, model.objective_heads[name], batch)
    assert int(found.count) == count
    torch.testing.assert_close(found.sum, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "name"), SLOW)
def test_gradient_is_the_finite_difference(family: str, name: str, scenes: SampleScenes) -> None:
    """Along a random direction of all weights, in float64. Region features are constants."""
    trial, model = with_objectives(family, scenes, name)
    batch = in_float64(batch_of(trial, 3, step=2))
    model = model.double()
    loss_of(model, batch, name).sum.backward()
    torch.manual_seed(0)
    ways = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    slope = sum((p.grad * ways[n]).sum() for n, p in model.named_parameters() if p.grad is not None)
    ends = []
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in (1e-7, -1e-7):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(start[n] + step * ways[n])
            ends.append(loss_of(model, batch, name).sum)
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-7, slope, rtol=1e-4, atol=1e-5)


def in_float64(batch: Batch) -> Batch:
    tensors = {n: v.double() for n, v in vars(batch.image).items() if isinstance(v, Tensor) and v.is_floating_point()}
    return dataclasses.replace(batch, image=dataclasses.replace(batch.image, **tensors))


def one(batch: Batch, i: int) -> tuple[Any, Any]:
    """Image and text of one pair alone."""
    index = torch.tensor([i])
    return batch.image.select(index), batch.text.select(index)


def slow_mlm(model: Any, head: Any, batch: Batch) -> tuple[Tensor, int]:
    masked, words_NT = pairs_of(batch).mask_words(head.facts)
    assert torch.equal(masked.ids_BT[~words_NT], batch.text.ids_BT[~words_NT])
    total, count = torch.zeros(()), 0
    for i, t in words_NT.nonzero().tolist():
        image, _ = one(batch, i)
        states_TD = model.fuse(image, masked.select(torch.tensor([i]))).text_BTD[0]
        total = total - head.head(states_TD[t]).log_softmax(-1)[batch.text.ids_BT[i, t]]
        count += 1
    return total, count


def slow_itm(model: Any, head: Any, batch: Batch) -> tuple[Tensor, int]:
    text, matched_P, origin_P = add_mismatched(pairs_of(batch))
    total, own = torch.zeros(()), batch.text
    for i, (matched, origin, owner) in enumerate(zip(matched_P, origin_P, text.owner_N, strict=True)):
        assert origin == owner  # one image for each text here
        words = text.ids_BT[i][text.mask_BT[i]].tolist()
        (source,) = {j for j in range(len(own)) if own.ids_BT[j][own.mask_BT[j]].tolist() == words}
        assert (batch.image_ids[source] == batch.image_ids[owner]) == bool(matched)
        image, _ = one(batch, int(owner))
        _, words_of_pair = one(batch, source)
        logits = head.head(pair_features(model, image, words_of_pair))[0]
        total = total - logits.log_softmax(-1)[int(matched)]
    assert int(matched_P.sum()) == len(batch.text)
    return total, len(matched_P)


def vectors(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    pairs = [one(batch, i) for i in range(len(batch))]
    return torch.cat([model.embed_text(t) for _, t in pairs]), torch.cat([model.embed_image(i) for i, _ in pairs])


def slow_itc(model: Any, head: Any, batch: Batch) -> tuple[Tensor, int]:
    texts_NE, images_NE = vectors(model, batch)
    total, scale = torch.zeros(()), min(100.0, float(head.log_scale.exp()))
    if len(batch) < 2:
        return total, 0
    for i in range(len(batch)):
        for ours, theirs in ((texts_NE[i], images_NE), (images_NE[i], texts_NE)):
            total = total - 0.5 * torch.stack([scale * (ours @ other) for other in theirs]).log_softmax(-1)[i]
    return total, len(batch)


def slow_ism(model: Any, head: Any, batch: Batch) -> tuple[Tensor, int]:
    texts_NE, images_NE = vectors(model, batch)
    mean = torch.zeros(())
    if len(batch) < 2:
        return mean, 0
    for a, b in ((texts_NE, images_NE), (images_NE, texts_NE)):
        costs = [
            max(0.0, 0.2 - float(a[i] @ b[i]) + float(a[i] @ b[j]))
            for i in range(len(batch))
            for j in range(len(batch))
            if i != j
        ]
        violated = [cost for cost in costs if cost > 0]
        mean = mean + sum(violated) / max(1, len(violated))
    return mean * len(batch), len(batch)


def slow_words(model: Any, head: Any, batch: Batch) -> tuple[Tensor, int]:
    read = pairs_of(batch).mask_words(head.facts)[0] if head.masks_words else batch.text
    total, count = torch.zeros(()), 0
    for i in range(len(batch)):
        length = int(batch.text.mask_BT[i].sum())
        image, _ = one(batch, i)
        text = read.select(torch.tensor([i]))
        cut = dataclasses.replace(text, ids_BT=text.ids_BT[:, :length], mask_BT=text.mask_BT[:, :length])
        logits_TV = model.generation_logits(image, cut)[0]
        for t in range(length - 1):
            total = total - logits_TV[t].log_softmax(-1)[batch.text.ids_BT[i, t + 1]]
            count += 1
    return total, count


def slow_regions(
    model: Any, head: Any, batch: Batch, cost: Callable[[Tensor, Any, int, int], Tensor]
) -> tuple[Tensor, int]:
    """Find the hidden regions by what the model is given, then read each pair alone."""
    given: list[Any] = []

    class Watched(type(model)):  # type: ignore[misc]
        def locate(self, image: Any, text: Any) -> Any:
            given.append(image)
            return super().locate(image, text)

    before, model.__class__ = type(model), Watched
    try:
        head(model, pairs_of(batch))
    finally:
        model.__class__ = before
    (covered,) = given
    hidden_BR = batch.image.features_BRF.any(-1) & ~covered.features_BRF.any(-1)
    assert not covered.class_probs_BRC[hidden_BR].any()
    assert torch.equal(covered.features_BRF[~hidden_BR], batch.image.features_BRF[~hidden_BR])
    assert torch.equal(covered.boxes_BR4, batch.image.boxes_BR4)
    total, count = torch.zeros(()), 0
    for i, r in hidden_BR.nonzero().tolist():
        _, text = one(batch, i)
        states_RD = model.locate(covered.select(torch.tensor([i])), text).states_NRD[0]
        total = total + cost(head.head(states_RD[r]), batch.image, i, r)
        count += 1
    return total, count


def class_cost(logits_C: Tensor, image: Any, i: int, r: int) -> Tensor:
    target_C = image.class_probs_BRC[i, r] / image.class_probs_BRC[i, r].sum()
    return torch.special.entr(target_C).neg().sum() - (target_C * logits_C.log_softmax(-1)).sum()


REFERENCES: dict[str, Callable[[Any, Any, Batch], tuple[Tensor, int]]] = {
    "mlm": slow_mlm,
    "itm": slow_itm,
    "itc": slow_itc,
    "ism": slow_ism,
    "ic": slow_words,
    "msg": slow_words,
    "moc": lambda model, head, batch: slow_regions(model, head, batch, class_cost),
    "mrfr": lambda model, head, batch: slow_regions(
        model, head, batch, lambda found, image, i, r: (found - image.features_BRF[i, r]).square().mean()
    ),
}


# ---- Checkpoints --------------------------------------------------------------------------------------------------


def test_checkpoints_have_the_heads_and_later_runs_may_ignore_them(tmp_path: Path) -> None:
    """Pretrained on `itm`, then on `itm` and `itc`, then fine-tuned; a run on its own objectives has no new names."""
    still = {"lr": 0.0, "muon_lr": 0.0}
    objectives = {"mlm": 1.0, "itm": 1.0}
    runs = {
        "own": {"model": "tden", "max_epochs": 1, "recipe": {"objectives": {"mlm": 1.0}}},
        "first": {"model": "tden", "max_epochs": 1, "recipe": {"objectives": objectives}},
        "more": {
            "model": "tden",
            "start": "pretrain/first",
            "max_epochs": 1,
            "optimizer": still,
            "recipe": {"objectives": {**objectives, "itc": 1.0}},
        },
    }
    write_workspace(tmp_path, pretrain=runs, finetune={"vqa": {"start": "pretrain/first", "optimizer": still}})
    params, workspace = load_params(tmp_path / "params.yaml"), Workspace(tmp_path)
    weights = {}
    for name in runs:
        pretrain.run(params, workspace, name)
        weights[name] = load_file(workspace.checkpoint(f"pretrain/{name}") / "model.safetensors")
    assert weights["own"].keys() == load_file(workspace.checkpoint("initial/tden") / "model.safetensors").keys()
    heads = {"objective_heads.itm.head.weight", "objective_heads.itm.head.bias"}
    assert weights["first"].keys() == weights["own"].keys() | heads
    assert weights["more"].keys() == weights["first"].keys() | {"objective_heads.itc.log_scale"}
    assert all(torch.equal(weights["more"][name], tensor) for name, tensor in weights["first"].items())
    curve = workspace.curve("pretrain/more").read_text().partition("\n")[0].split(",")
    assert {"mlm", "itm", "itm_accuracy", "itc", "val_itm", "val_itc"} <= set(curve)

    finetune.run(params, workspace, "vqa")
    tuned = load_file(workspace.checkpoint("finetune/vqa") / "model.safetensors")
    assert not [name for name in tuned if name.startswith("objective_heads")]
    assert all(torch.equal(tuned[name], weights["first"][name]) for name in weights["own"])
    assert load_task_model(workspace.checkpoint("finetune/vqa")).task == "vqa"


def test_a_killed_run_with_heads_resumes_bitwise(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy")

    def fit(work: Path, **more: Any) -> tuple[nn.Module, Any]:
        model = toy.model(feature_dropout=0.1)
        facts = DataFacts(vocab_size=toy.tokenizer.vocab_size, mask_id=toy.tokenizer.mask_id)
        names = ("mlm", "itm", "itc")
        return toy.fit(
            work,
            add_objectives(model, names, facts, "x", "tden"),
            objectives=dict.fromkeys(names, 1.0),
            accumulate=2,
            ema_decay=0.9,
            optimizer={"groups": {"objective_heads": GroupParams(lr=1e-2)}},
            **more,
        )

    check_resume(fit, tmp_path, 2)
