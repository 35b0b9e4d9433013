"""The scenes' hypotheses: read back by the genuine format's reader, labels that hold, words that give little away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vlp_models.contrib.reasoning_tasks.scenes.entailment import Balance, make_hypotheses
from vlp_models.data.formats import read_source
from vlp_models.data.views.hypotheses import ENTAILMENT
from vlp_models.params import DatasetParams, GeneratorParams
from vlp_models.synthetic.scenes.dataset import write
from vlp_models.synthetic.scenes.language import NUMBERS, AtLeast, Description
from vlp_models.synthetic.scenes.scene import COLORS, SHAPES, Scene, sample_scene


def scene(number: int) -> tuple[Scene, np.random.Generator]:
    rng = np.random.default_rng([7, number])
    return sample_scene(rng, image_id=str(number), split="train", side=64), rng


def test_snli_ve_reader_reads_the_files(tmp_path: Path) -> None:
    params = GeneratorParams(generator="objects", seed=3, train=6, val=2, test=3, side=64, hypotheses_per_image=4)
    assert write(params, tmp_path / "with")["hypotheses"] == 44
    tables = read_source("ve", DatasetParams.of(format="snli_ve", root="with"), tmp_path)
    assert not tables["quarantine"] and len(tables["hypotheses"]) == 44
    assert Counter(row["split"] for row in tables["images"]) == {"train": 6, "val": 2, "test": 3}
    assert all(Path(row["path"]).is_file() for row in tables["images"])
    for row in tables["hypotheses"]:
        labels = Counter(row["annotator_labels"])
        assert sum(labels.values()) == 5 and labels.most_common(1)[0][0] == row["gold_label"]


def test_labels_follow_from_the_scene() -> None:
    """Checked independently of the code that made the sentences: counted from the scene."""
    checked: Counter[str] = Counter()
    for number in range(60):
        graph, rng = scene(number)
        for text, label in make_hypotheses(graph, 6, rng):
            words = text.rstrip(".").lower().split()
            if label == "neutral":
                assert not any(word in COLORS for word in words)  # of no object in particular
                continue
            shapes = [o.shape for o in graph.objects]
            if words[:2] == ["there", "are"]:
                true = shapes.count(words[3].removesuffix("s")) == NUMBERS.index(words[2])
            elif words[:2] == ["there", "is"] and words[2] == "a":
                true = AtLeast(Description(color=words[3], shape=words[4])).is_true_of(graph)
            elif words[0] == "something":
                true = words[1] in {o.color for o in graph.objects}
            else:
                continue
            assert true is (label == "entailment"), text
            checked[label] += 1
    assert min(checked["entailment"], checked["contradiction"]) > 20


@pytest.mark.slow
def test_text_alone_does_not_separate_entailment_from_contradiction() -> None:
    balance: Balance = {}
    counts: dict[str, Counter[str]] = {}
    for number in range(250):
        graph, rng = scene(number)
        for text, label in make_hypotheses(graph, 3, rng, balance):
            counts.setdefault(text, Counter())[label] += 1
    total = sum(count.total() for count in counts.values())
    assert Counter({label: sum(c[label] for c in counts.values()) for label in ENTAILMENT}) == Counter(
        dict.fromkeys(ENTAILMENT, total // 3)
    )
    best = sum(max(count.values()) for count in counts.values()) / total  # the commonest label of each sentence
    assert best == pytest.approx(2 / 3, abs=0.04)
    assert all(abs(c["entailment"] - c["contradiction"]) <= 1 for c in counts.values())
    assert any(shape in text for text in counts for shape in SHAPES)
