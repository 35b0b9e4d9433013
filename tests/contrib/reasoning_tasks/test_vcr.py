"""VCR: it learns from the image, its loss is two cross-entropies, hidden labels, both subtasks or one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import with_values
from toy_dataset import COLORS, Toy
from toy_tasks import any_generator, double, learn, make, predict

from vlp_models.contrib.reasoning_tasks.segments import encode_segments
from vlp_models.contrib.reasoning_tasks.vcr import VCR
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import DataError, ParamsError


def samples_of(toy: Toy, split: str, count: int = 1000) -> list[Sample]:
    dataset = ShardDataset(toy.shards, split, "choices")
    return [dataset[i] for i in range(min(count, len(dataset)))]


@pytest.mark.slow
def test_learns_both_subtasks(toy: Toy) -> None:
    task_model = make(toy, "vcr", max_text_len=20)
    learn(task_model, toy, 200, lr=2e-3)
    rows = predict(task_model, toy, "train")
    assert np.mean([row["answer"] == row["answer_label"] for row in rows]) > 0.9
    assert np.mean([row["rationale"] == row["rationale_label"] for row in rows]) > 0.9
    first = rows[0]
    assert first["choice_id"] == f"{first['image_id']}/v"
    assert len(first["answer_probabilities"]) == 4 and sum(first["answer_probabilities"]) == pytest.approx(1, abs=1e-5)
    assert len(first["rationale_probabilities"]) == 1


def slow_cross_entropy(logits: np.ndarray, labels: list[int]) -> float:
    return sum(
        math.log(sum(math.exp(v) for v in row)) - row[label] for row, label in zip(logits, labels, strict=True)
    ) / len(labels)


@pytest.mark.parametrize("subtask", ["both", "answer", "rationale"])
def test_loss_is_a_cross_entropy_over_four_per_subtask(toy: Toy, subtask: str) -> None:
    task_model = make(toy, "vcr", max_text_len=20, options={"subtask": subtask}).double().eval()
    assert isinstance(task_model, VCR)
    samples = samples_of(toy, "train", 5)
    batch = double(task_model.collate(samples))

    def logit(sample: Sample, segments: tuple[str, ...]) -> float:  # one text and one image at a time
        alone = double(task_model.collate([sample]))
        text = encode_segments(task_model.tokenizer, [segments], 20)
        return float(task_model.head(task_model.model.fuse(alone.image, text).pooled_BP))

    expected = 0.0
    with torch.no_grad():
        if subtask != "rationale":
            rows = np.array([[logit(s, (s.text, a)) for a in s["answers"]] for s in samples])
            expected += slow_cross_entropy(rows, [s["answer_label"] or 0 for s in samples])
        if subtask != "answer":
            gold = [s["answers"][s["answer_label"] or 0] for s in samples]
            rows = np.array(
                [[logit(s, (s.text, g, r)) for r in s["rationales"]] for s, g in zip(samples, gold, strict=True)]
            )
            expected += slow_cross_entropy(rows, [s["rationale_label"] or 0 for s in samples])
    loss = task_model.loss(batch, generator=any_generator())
    assert loss.mean.item() == pytest.approx(expected, rel=1e-9)
    wanted = {"both": {"vcr_answer", "vcr_rationale"}}.get(subtask, {f"vcr_{subtask}"})
    assert set(loss.parts) == wanted | {f"{name}_accuracy" for name in wanted}

    weight = task_model.head.weight  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(loss.mean, weight)
    for j in (0, 7):
        with torch.no_grad():
            weight[0, j] += 1e-6
            above = task_model.loss(batch, generator=any_generator()).mean.item()
            weight[0, j] -= 2e-6
            below = task_model.loss(batch, generator=any_generator()).mean.item()
            weight[0, j] += 1e-6
        assert gradient[0, j].item() == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-8)


def test_answer_does_not_depend_on_the_rationales(toy: Toy) -> None:
    task_model = make(toy, "vcr", max_text_len=20).eval()
    samples = samples_of(toy, "train", 3)
    changed = [with_values(sample, rationales=("a", "a", "a", "a"), rationale_label=0) for sample in samples]
    before, after = (task_model.predict(task_model.collate(s), s) for s in (samples, changed))
    for one, other in zip(before, after, strict=True):
        assert one["answer_probabilities"] == pytest.approx(other["answer_probabilities"], abs=2e-6)


def test_image_is_encoded_once_for_all_its_texts(toy: Toy) -> None:
    task_model = make(toy, "vcr", max_text_len=20).eval()
    samples = samples_of(toy, "train", 3)
    batch = task_model.collate(samples)
    rows: list[int] = []
    task_model.model.object_encoder[0].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    together = task_model.model.fuse(batch.image, batch.text).pooled_BP
    own_image = batch.image.select(torch.arange(3).repeat_interleave(8))
    each = task_model.model.fuse(own_image, replace(batch.text, owner_N=None)).pooled_BP
    assert rows[1] == 8 * rows[0]  # images, or packed regions
    torch.testing.assert_close(together, each, rtol=1e-5, atol=1e-5)


def test_hidden_labels_give_rationales_for_every_answer(toy: Toy) -> None:
    task_model = make(toy, "vcr", max_text_len=20)
    known, other = samples_of(toy, "train", 2)
    hidden = with_values(other, answer_label=None, rationale_label=None)
    batch = task_model.collate([known, hidden])
    assert len(batch.text) == 2 * 20
    first, second = task_model.predict(batch, [known, hidden])
    alone = task_model.predict(task_model.collate([known]), [known])[0]
    assert first["rationale_probabilities"][known["answer_label"]] == pytest.approx(
        alone["rationale_probabilities"][0], abs=2e-6
    )
    assert (first["answer"], first["rationale"]) == (alone["answer"], alone["rationale"])
    assert second["rationale"] == int(np.argmax(second["rationale_probabilities"][second["answer"]]))
    with pytest.raises(DataError, match="hidden"):
        task_model.loss(batch, generator=any_generator())


def test_batch_of_one_and_image_without_regions(toy: Toy) -> None:
    task_model = make(toy, "vcr", max_text_len=20).train()
    (sample,) = samples_of(toy, "train", 1)
    assert sample.regions is not None
    empty = {name: getattr(sample.regions, name)[:0] for name in ("features", "boxes", "class_probs", "scores")}
    for variant in (sample, with_values(sample, boxes=()), replace(sample, regions=replace(sample.regions, **empty))):
        loss = task_model.loss(task_model.collate([variant]), generator=any_generator())
        loss.mean.backward()
        assert torch.isfinite(loss.mean)


def test_blank_image_hides_regions_and_objects(toy: Toy) -> None:
    task_model = make(toy, "vcr", max_text_len=20, blank_images=True).eval()
    a, b = samples_of(toy, "train", 2)
    other_image = with_values(replace(a, regions=b.regions), boxes=b["boxes"])
    rows = [task_model.predict(task_model.collate([s]), [s])[0] for s in (a, other_image)]
    assert rows[0]["answer_probabilities"] == rows[1]["answer_probabilities"]


def test_invalid_subtask_is_an_error(toy: Toy) -> None:
    with pytest.raises(ParamsError, match=r"`options\.subtask` must be one of both, answer, rationale"):
        make(toy, "vcr", options={"subtask": "all"})
    assert {word for s in samples_of(toy, "train") for a in s["answers"] for word in a.split()} >= set(COLORS)
