"""Each task learns a toy set, and its predictions have the form of docs/reference/checkpoints.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from samples import with_values
from toy_dataset import COLORS, Toy
from toy_tasks import any_generator, double, learn, make, predict

from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models.checkpoint import write_checkpoint
from vlp_models.params import EvaluateParams
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskOptions, load_task_model, read_options
from vlp_models.tasks.vqa import VQA


def color_of(toy: Toy, split: str) -> dict[str, str]:
    dataset = ShardDataset(toy.shards, split, "captions")
    return {s.image_id: s.text.split()[1] for s in (dataset[i] for i in range(len(dataset)))}


def test_vqa_learns_to_answer(toy: Toy) -> None:
    vqa = make(toy, "vqa")
    assert learn(vqa, toy, 60) < 0.1
    truth = color_of(toy, "val")
    predictions = predict(vqa, toy, "val")
    assert [p["answer"] for p in predictions] == [truth[p["image_id"]] for p in predictions]
    first = predictions[0]
    assert set(first) == {"question_id", "image_id", "answer", "top"}
    assert first["question_id"] == f"{first['image_id']}/q"
    assert first["top"][0][0] == first["answer"]
    probabilities = [p for _, p in first["top"]]
    assert len(probabilities) == len(COLORS)
    assert probabilities == sorted(probabilities, reverse=True)


def test_vqa_without_images_does_not_learn(toy: Toy) -> None:
    """Control for the test above: the same training with blank images."""
    blind = make(toy, "vqa", blank_images=True)
    assert learn(blind, toy, 60) > 1.0
    batch = blind.collate([ShardDataset(toy.shards, "val", "questions")[0]])
    assert not batch.image.features_BRF.any()
    assert not batch.image.boxes_BR4.any()


def test_captioning_learns_to_describe(toy: Toy) -> None:
    captioning = make(toy, "captioning")
    assert learn(captioning, toy, 80) < 0.1
    dataset = ShardDataset(toy.shards, "val", "images")
    references = {s.image_id: s["captions"][0] for s in (dataset[i] for i in range(len(dataset)))}
    predictions = predict(captioning, toy, "val")
    assert {p["image_id"]: p["caption"] for p in predictions} == references
    assert {p["image_id"]: p["greedy"] for p in predictions} == references


def test_label_smoothing_reaches_the_loss(toy: Toy) -> None:
    plain, smooth = (make(toy, "captioning", options={"label_smoothing": s}) for s in (0.0, 0.2))
    smooth.load_state_dict(plain.state_dict())
    dataset = ShardDataset(toy.shards, "train", "captions")
    batch = plain.collate([dataset[i] for i in range(8)])
    with torch.no_grad():
        losses = [model.eval().loss(batch, generator=any_generator()).mean for model in (plain, smooth)]
    assert float(losses[0]) != float(losses[1])


def test_length_penalty_makes_captions_longer(toy: Toy) -> None:
    captioning = make(toy, "captioning")
    tokens = {}
    for penalty in (0.0, 2.0):
        captioning.set_search(EvaluateParams(length_penalty=penalty))
        tokens[captioning.search] = sum(len(p["caption"].split()) for p in predict(captioning, toy, "val"))
    assert list(tokens) == ["beam 3, at most 24 tokens", "beam 3, length penalty 2, at most 24 tokens"]
    assert tokens["beam 3, at most 24 tokens"] < tokens["beam 3, length penalty 2, at most 24 tokens"]


def test_consensus_does_not_depend_on_the_batch(toy: Toy) -> None:
    captioning = make(toy, "captioning")
    learn(captioning, toy, 20)  # briefly, so that samples differ
    captioning.set_search(EvaluateParams(consensus_samples=8, consensus_temperature=1.5))
    assert captioning.search == (
        "beam 3, consensus with 8 sampled at 1.5 by similarity to the others, at most 24 tokens"
    )
    together = predict(captioning, toy, "val")
    dataset = ShardDataset(toy.shards, "val", "images")
    samples = [dataset[i] for i in range(len(dataset))]
    alone = [captioning.predict(captioning.read([sample]), [sample])[0] for sample in samples]
    assert [p["caption"] for p in together] == [p["caption"] for p in alone]
    captioning.set_search(EvaluateParams())
    assert [p["caption"] for p in together] != [p["caption"] for p in predict(captioning, toy, "val")]


def test_adjacent_captions_share_an_encoded_image_with_equal_gradients(toy: Toy) -> None:
    captioning = make(toy, "captioning").double()
    dataset = ShardDataset(toy.shards, "train", "captions")
    one, other = dataset[0], dataset[1]
    samples = [one, with_values(one, sample_id="again", text="a red dog"), other]
    gradients = []
    for order in ([0, 1, 2], [0, 2, 1]):  # adjacent, or separate
        batch = double(captioning.collate([samples[i] for i in order]))
        assert len(batch.image) == (2 if order == [0, 1, 2] else 3)
        captioning.zero_grad()
        captioning.loss(batch, generator=any_generator()).mean.backward()
        gradients.append({n: p.grad.clone() for n, p in captioning.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-12, msg=name)


def test_rewards_and_masked_words_do_not_share_images(toy: Toy) -> None:
    captioning, rewarded = (make(toy, "captioning", options=o) for o in ({}, {"self_critical": {}}))
    can_share = type(captioning).can_share_images
    masked = read_options(type(captioning), {"targets": "masked"})
    assert can_share(captioning.model, captioning.options)
    assert not can_share(rewarded.model, rewarded.options) and not can_share(captioning.model, masked)


def test_hidden_answers_are_predicted_but_not_trained_on(toy: Toy) -> None:
    task_model = make(toy, "vqa")
    sample = with_values(ShardDataset(toy.shards, "test", task_model.view)[0], answers=())
    batch = task_model.collate([sample])
    assert len(task_model.predict(batch, [sample])) == 1
    with pytest.raises(DataError, match="hidden"):
        task_model.loss(batch, generator=any_generator())


@pytest.mark.parametrize("task", ["captioning", "vqa"])
def test_loaded_checkpoint_predicts_the_same(toy: Toy, tmp_path: Path, task: str) -> None:
    task_model = make(toy, task, blank_images=task == "vqa")
    learn(task_model, toy, 3)
    write_checkpoint(tmp_path, task_model, task_model.info, task_model.tokenizer, task_model.labels)
    loaded = load_task_model(tmp_path)
    assert not loaded.training
    assert loaded.info.detector_id == "toy"
    assert loaded.blank_images is (task == "vqa")
    assert predict(loaded, toy, "val") == predict(task_model, toy, "val")


def test_invalid_tasks_and_models_are_errors(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="known: captioning, vqa, retrieval"):
        make(toy, "painting")
    with pytest.raises(DataError, match="min_answer_count"):
        task_class("vqa")(toy.model(), toy.tokenizer, make(toy, "vqa").info)
    with pytest.raises(ParamsError, match="cannot generate"):
        task_class("captioning")(torch.nn.Linear(1, 1), toy.tokenizer, make(toy, "vqa").info)
    pretrained = make(toy, "vqa")
    write_checkpoint(tmp_path, pretrained, replace(pretrained.info, task=None), toy.tokenizer)
    with pytest.raises(CheckpointError, match="fine-tune it first"):
        load_task_model(tmp_path)


def test_options_are_typed_and_unknown_ones_are_errors() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Options(TaskOptions):
        rate: float = 0.5
        kind: Literal["all", "some"] = "all"

    class WithOptions(VQA):
        options_class: type[TaskOptions] = Options

    assert read_options(WithOptions, {}) == Options()
    assert read_options(WithOptions, {"rate": 1}) == Options(rate=1.0)
    with pytest.raises(ParamsError, match=r"options\.rat`: unknown option of the task vqa; its options: rate, kind"):
        read_options(WithOptions, {"rat": 1}, where="finetune.x.options")
    with pytest.raises(ParamsError, match=r"`finetune\.x\.options\.kind` must be one of all, some"):
        read_options(WithOptions, {"kind": "most"}, where="finetune.x.options")
    WithOptions.options_class = TaskOptions
    with pytest.raises(ParamsError, match="it has no options"):
        read_options(WithOptions, {"rate": 1})
