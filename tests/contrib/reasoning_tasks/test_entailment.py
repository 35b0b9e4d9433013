"""Entailment: it learns three labels from the image, scores checked by hand, hidden labels, saved labels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from samples import with_values
from toy_dataset import Toy
from toy_tasks import learn, make, predict

from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import write_table
from vlp_models.data.views.hypotheses import ENTAILMENT
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import write_checkpoint
from vlp_models.tasks.base import load_task_model
from vlp_models.tasks.scoring import EvalContext


def samples_of(toy: Toy, split: str) -> list[Sample]:
    dataset = ShardDataset(toy.shards, split, "hypotheses")
    return [dataset[i] for i in range(len(dataset))]


@pytest.mark.slow
def test_learns_the_three_labels(toy: Toy) -> None:
    task_model = make(toy, "entailment")
    assert learn(task_model, toy, 300, lr=2e-3) < 0.15
    rows = predict(task_model, toy, "train")
    assert sum(row["prediction"] == row["label"] for row in rows) >= 0.95 * len(rows)
    assert {row["label"] for row in rows} == set(ENTAILMENT)
    first = rows[0]
    assert set(first["probabilities"]) == set(ENTAILMENT)
    assert sum(first["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert task_model.format_prediction(first)[0] == first["prediction"]


def test_scores_are_those_of_the_predictions(toy: Toy, tmp_path: Path) -> None:
    task_model, samples = make(toy, "entailment"), samples_of(toy, "val")
    rows = predict(task_model, toy, "val")
    rows = [row | {"prediction_blind": "neutral"} for row in rows]
    images = [
        {"image_id": name, "source": "toy", "split": "train", "path": "", "sha256": "", "width": 1, "height": 1}
        for name in ("toy/x", "toy/y")
    ]
    write_table([row | {"provenance": ""} for row in images], "images", tmp_path)
    labels = [("toy/x", "neutral"), ("toy/x", "entailment"), ("toy/y", "entailment")]
    train = [
        {"hypothesis_id": str(i), "image_id": image, "text": "t", "gold_label": label, "annotator_labels": []}
        for i, (image, label) in enumerate(labels)
    ]
    write_table([row | {"provenance": ""} for row in train], "hypotheses", tmp_path)

    hidden = [with_values(samples[0], gold_label=None), *samples[1:]]
    scored = task_model.score(rows, hidden, EvalContext(source="toy", validated=tmp_path))
    found = {score.metric: score for score in scored.scores}
    known = list(zip(rows, samples, strict=True))[1:]
    truth = [sample["gold_label"] for _, sample in known]
    assert found["accuracy"].n == len(known)
    right = sum(row["prediction"] == label for (row, _), label in zip(known, truth, strict=True))
    assert found["accuracy"].value == pytest.approx(100 * right / len(known))
    counts, baselines = Counter(truth), scored.baseline_values("accuracy")
    assert baselines["majority label"] == pytest.approx(100 * counts["entailment"] / len(known), abs=1e-3)
    assert baselines["hypothesis only"] == baselines["majority label"], "train's only word is in none of these"
    assert baselines["blind baseline"] == pytest.approx(100 * counts["neutral"] / len(known), abs=1e-3)
    annotations = 2 * len(known) + counts["neutral"]  # one of three annotators chose neutral
    assert baselines["one annotator"] == pytest.approx(100 * annotations / (3 * len(known)), abs=1e-3)
    assert {"macro F1", "recall (neutral)", "gain over blind baseline"} <= found.keys()
    assert found["recall (neutral)"].kept and not found["gain over blind baseline"].kept
    assert f"gold_label={truth[0]}" in task_model.slices(samples[1])

    path = task_model.write_official(rows, EvalContext(source="toy", validated=tmp_path), "val", tmp_path)
    assert path is not None
    header, first, *_ = path.read_text().splitlines()
    assert header == "pairID\tgold_label" and first.split("\t")[1] == rows[0]["prediction"]


def test_checkpoint_keeps_the_labels_in_the_heads_order(toy: Toy, tmp_path: Path) -> None:
    task_model = make(toy, "entailment")
    reordered = type(task_model)(task_model.model, toy.tokenizer, task_model.info, labels=ENTAILMENT[::-1])
    write_checkpoint(tmp_path, reordered, reordered.info, toy.tokenizer, reordered.labels)
    loaded = load_task_model(tmp_path)
    assert loaded.labels == ENTAILMENT[::-1]
    assert predict(loaded, toy, "val") == predict(reordered, toy, "val")
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "labels.json").unlink()
    with pytest.raises(CheckpointError, match=r"labels\.json: no such file"):
        load_task_model(tmp_path)


def test_text_only_control_does_not_depend_on_the_image(toy: Toy) -> None:
    blind = make(toy, "entailment", blank_images=True)
    a, b = samples_of(toy, "val")[:3:2]
    rows = [blind.predict(blind.collate([s]), [s])[0] for s in (a, replace(a, regions=b.regions))]
    assert rows[0]["probabilities"] == rows[1]["probabilities"]
