"""Truthfulness against drawn scenes: the references are true of their own scene and seldom of another's."""

from __future__ import annotations

import json
from pathlib import Path

from vlp_models.metrics.caption import score_faithfulness
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.dataset import write


def test_captions_are_judged_by_their_own_scene(tmp_path: Path) -> None:
    write(
        GeneratorParams(generator="objects", seed=5, train=20, val=1, test=1, questions_per_image=1, side=64), tmp_path
    )
    lines = (tmp_path / "scenes.jsonl").read_text(encoding="utf-8").splitlines()
    scenes = {str(scene["image_id"]): scene for scene in map(json.loads, lines)}
    annotations = json.loads((tmp_path / "annotations" / "captions_scenes.json").read_text())["annotations"]
    captions = {str(row["image_id"]): row["caption"] for row in annotations}

    (true, checkable, facts), verdicts = score_faithfulness(captions, scenes)
    assert true.value == checkable.value == 100
    assert facts.value is not None and 0 < facts.value < 100
    assert all(verdicts.values()) and set(verdicts) == set(captions)

    ids = sorted(captions)
    moved = {image_id: captions[other] for image_id, other in zip(ids, ids[1:] + ids[:1], strict=True)}
    wrong, *_ = score_faithfulness(moved, scenes)[0]
    assert wrong.value is not None and wrong.value < 70


def test_what_is_not_of_the_language_is_not_true(tmp_path: Path) -> None:
    write(
        GeneratorParams(generator="objects", seed=5, train=1, val=1, test=1, questions_per_image=1, side=64), tmp_path
    )
    scene = json.loads((tmp_path / "scenes.jsonl").read_text(encoding="utf-8").splitlines()[0])
    (true, checkable, _), verdicts = score_faithfulness(
        {"a": "colourless green ideas", "b": "", "c": "x"}, {"a": scene, "b": scene}
    )
    assert true.value == checkable.value == 0 and true.n == 2
    assert verdicts == {"a": False, "b": False}


def test_without_scenes_there_is_no_number() -> None:
    scores, verdicts = score_faithfulness({"a": "a red star"}, {})
    assert [score.value for score in scores] == [None] * 3 and verdicts == {}
    assert scores[0].note == "not computed: nothing to score"
