"""NLVR2: it learns from both images, whose order matters; scores, result file, invalid input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from samples import with_values
from toy_dataset import Toy
from toy_tasks import any_generator, learn, make, predict

from vlp_models.data.inputs import blanked
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import DataError
from vlp_models.tasks.scoring import EvalContext


def samples_of(toy: Toy, split: str) -> list[Sample]:
    dataset = ShardDataset(toy.shards, split, "image_pairs")
    return [dataset[i] for i in range(len(dataset))]


@pytest.mark.slow
def test_learns_true_and_false_from_both_images(toy: Toy) -> None:
    """The words are always the same, and neither image alone determines the label."""
    task_model = make(toy, "nlvr2")
    assert learn(task_model, toy, 150, lr=3e-3) < 0.15
    rows = predict(task_model, toy, "train")
    assert {row["label"] for row in rows} == {True, False}
    assert sum(row["prediction"] == row["label"] for row in rows) >= 0.95 * len(rows)
    assert rows[0]["image_ids"] == ["toy/train000", "toy/train001"]
    assert task_model.format_prediction(rows[0])[0].startswith(str(rows[0]["prediction"]).lower())

    samples = samples_of(toy, "train")
    blind = task_model.predict(blanked(task_model.collate(samples)), samples)
    assert len({row["p_true"] for row in blind}) == 1


def test_each_image_is_fused_with_its_own_statement(toy: Toy) -> None:
    """The concatenated feature equals that of two separate fusions; swapping the images changes the logits."""
    task_model = make(toy, "nlvr2").eval()
    samples = [replace(s, text=text) for s, text in zip(samples_of(toy, "val"), ("a red", "a"), strict=False)]
    with torch.no_grad():
        together = task_model.logits(task_model.collate(samples))
        for row, sample in zip(together, samples, strict=True):
            pooled = []
            for image in sample.images:
                one = replace(sample, image_id=image.image_id, regions=image.regions, others=())
                batch = task_model.reader.collate([one])
                pooled.append(task_model.model.fuse(batch.image, batch.text).pooled_BP[0])  # type: ignore[operator]
            torch.testing.assert_close(row, task_model.head(torch.cat(pooled)), atol=1e-5, rtol=1e-5)
        swapped = replace(
            samples[0],
            regions=samples[0].images[1].regions,
            others=(replace(samples[0].others[0], regions=samples[0].regions),),
        )
        assert not torch.allclose(task_model.logits(task_model.collate([swapped])), together[:1], atol=1e-5)
    text_only = make(toy, "nlvr2", blank_images=True)
    image = text_only.collate(samples).image
    assert len(image) == 4 and not image.features_BRF.any()


def test_scores_are_those_of_the_predictions(toy: Toy, tmp_path: Path) -> None:
    task_model = make(toy, "nlvr2")
    first = samples_of(toy, "val")
    labels = [True, True, False, True, False, True, None, None]
    samples = [
        with_values(s, label=label, group=f"g{i // 2}") for i, (s, label) in enumerate(zip(first, labels, strict=True))
    ]
    predicted = [True, True, True, True, False, False, True, True]
    rows = [
        {
            "pair_id": s.sample_id,
            "image_ids": list(s.image_ids),
            "group": s["group"],
            "label": s["label"],
            "p_true": 0.5,
        }
        | {"prediction": prediction, "prediction_blind": True}
        for s, prediction in zip(samples, predicted, strict=True)
    ]
    context = EvalContext(source="toy", validated=tmp_path)
    scored = task_model.score(rows, samples, context)
    found = {score.metric: score for score in scored.scores}
    assert (found["accuracy"].value, found["accuracy"].n) == (pytest.approx(100 * 4 / 6), 6)
    assert found["consistency"].value == pytest.approx(100 / 3)  # the first of three labeled sentences
    assert scored.baseline_values("accuracy")["majority label"] == pytest.approx(100 * 4 / 6, abs=1e-3)
    assert scored.baseline_values("accuracy")["blind baseline"] == pytest.approx(100 * 4 / 6, abs=1e-3)
    assert found["gain over blind baseline"].value == pytest.approx(0)
    assert task_model.slices(samples[2]) == ["label=false"] and task_model.slices(samples[7]) == []

    path = task_model.write_official(rows, context, "test", tmp_path)
    assert path is not None and path.name == "nlvr2_toy_test_predictions.csv"
    assert path.read_text().splitlines()[0] == f"{rows[0]['pair_id'].removeprefix('toy/')},true"
    assert len(path.read_text().splitlines()) == len(rows)


def test_empty_batch_has_zero_loss(toy: Toy) -> None:
    task_model = make(toy, "nlvr2")
    loss = task_model.loss(task_model.collate(samples_of(toy, "val")).empty(), generator=any_generator())
    assert loss.count == 0 and loss.sum.item() == 0


def test_statement_about_one_or_three_images_is_an_error(toy: Toy) -> None:
    task_model, sample = make(toy, "nlvr2"), samples_of(toy, "val")[0]
    for others in ((), sample.others * 2):
        with pytest.raises(DataError, match=rf"toy/val000/p: a statement about {1 + len(others)} image.*takes 2, left"):
            task_model.collate([replace(sample, others=others)])
