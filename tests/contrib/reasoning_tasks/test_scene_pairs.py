"""The scenes' statements about pairs: read back by the format's reader, labels that hold, nothing given away."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from vlp_models.contrib.reasoning_tasks.scenes.image_pairs import VALIDATION
from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.params import DatasetParams, GeneratorParams
from vlp_models.synthetic.scenes.dataset import write
from vlp_models.synthetic.scenes.language import NUMBERS
from vlp_models.synthetic.scenes.scene import COLORS, SHAPES, TEXTURES, Scene

pytestmark = pytest.mark.slow

SIZES = {"seed": 3, "train": 46, "val": 8, "test": 9, "side": 64, "questions_per_image": 1}
SOURCE = DatasetParams.of(format="nlvr2", root="a/nlvr2", validation_directories=[VALIDATION])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    write(GeneratorParams(generator="objects", pair_sentences=5, **SIZES), root / "a")  # type: ignore[arg-type]
    return root


@pytest.fixture
def tables(dataset: Path) -> Tables:
    return read_source("n", SOURCE, dataset)


def test_nlvr2_reader_reads_the_files(dataset: Path, tables: Tables) -> None:
    assert not tables["quarantine"]
    images = tables["images"]
    # of 46, 8 and 9 scenes 11, 2 and 2 sets of four, each with eight files
    assert Counter(row["split"] for row in images) == {"train": 88, "val": 16, "test": 16}
    assert all(Path(row["path"]).is_file() for row in images)
    assert len(list((dataset / "a" / "nlvr2" / "images").rglob("*.png"))) == len(images)
    first = json.loads((dataset / "a" / "nlvr2" / "data" / "train.json").read_text().splitlines()[0])
    genuine = {"identifier", "sentence", "label", "left_url", "right_url", "writer", "validation", "synset", "query"}
    assert first.keys() == genuine | {"directory"}
    assert first["label"] in ("True", "False")


def test_labels_follow_from_the_scenes(dataset: Path) -> None:
    """Checked independently of the code that made the sentences: parsed, and counted from the scene graphs."""
    lines = (dataset / "a" / "scenes.jsonl").read_text().splitlines()
    scenes = {f"COCO_scenes_{int(s.image_id):012d}.png": s for s in (Scene.from_dict(json.loads(x)) for x in lines)}
    checked: Counter[str] = Counter()
    for file in sorted((dataset / "a" / "nlvr2" / "data").glob("*.json")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            words = record["sentence"].rstrip(".").lower().split()
            left, right = (count(scenes[record[side]], words) for side in ("left_url", "right_url"))
            if words[0] == "exactly":
                true = (left > 0) + (right > 0) == 1
            elif words[0] == "either":
                true = (left > 0) + (right > 0) != 1
            elif words[0] == "the":
                true = left == right
            else:
                true = left + right == NUMBERS.index(words[4])
            assert str(true) == record["label"], record
            checked[words[0]] += 1
    assert set(checked) == {"exactly", "either", "the", "together"}


def count(scene: Scene, words: list[str]) -> int:
    """How many objects there are of the kind that the words name."""
    plain = {word.removesuffix("s") for word in words} | set(words)
    return sum(
        all(
            value in plain or not plain & set(values)
            for value, values in ((o.shape, SHAPES), (o.color, COLORS), (o.texture, TEXTURES))
        )
        for o in scene.objects
    )


def test_neither_text_nor_one_image_predicts_the_label(tables: Tables) -> None:
    pictures = {row["image_id"]: Path(row["path"]).read_bytes() for row in tables["images"]}
    of_sentence: dict[str, list[bool]] = defaultdict(list)
    of_picture: dict[tuple[str, str, bytes], list[bool]] = defaultdict(list)
    for row in tables["image_pairs"]:
        of_sentence[row["group"]].append(row["label"])
        for side, image_id in (("left", row["image_id"]), ("right", row["other_image_ids"][0])):
            of_picture[row["group"], side, pictures[image_id]].append(row["label"])
    assert len(of_sentence) > 50
    assert all(sorted(labels) == [False, False, True, True] for labels in of_sentence.values())
    assert all(sorted(labels) == [False, True] for labels in of_picture.values())
    of_text: dict[str, set[str]] = defaultdict(set)
    for row in tables["image_pairs"]:
        of_text[row["group"]].add(row["text"])
    assert all(len(texts) == 1 for texts in of_text.values())


def test_simple_sentences_are_only_in_train_and_balanced(dataset: Path, tmp_path: Path) -> None:
    write(GeneratorParams(generator="objects", pair_sentences=5, simple_pair_sentences=4, **SIZES), tmp_path)  # type: ignore[arg-type]
    plain, taught = (
        {file.name: file.read_text().splitlines() for file in (root / "nlvr2" / "data").glob("*.json")}
        for root in (dataset / "a", tmp_path)
    )
    assert taught["test1.json"] == plain["test1.json"]
    besides = [json.loads(line) for line in taught["train.json"] if line not in set(plain["train.json"])]
    assert set(plain["train.json"]) <= set(taught["train.json"]) and len(besides) > 100
    assert {record["directory"] for record in besides} == {0}, "none is in val"
    scenes = {
        f"COCO_scenes_{int(scene.image_id):012d}.png": scene
        for scene in (Scene.from_dict(json.loads(x)) for x in (tmp_path / "scenes.jsonl").read_text().splitlines())
    }
    of_sentence: dict[str, list[str]] = defaultdict(list)
    kinds: Counter[str] = Counter()
    for record in besides:
        words = record["sentence"].rstrip(".").lower().split()
        a, b = (count(scenes[record[side]], words) for side in ("left_url", "right_url"))
        kind = "more" if "more" in words else words[1] if words[0] == "the" else words[0]
        true = {"more": a > b, "left": a > 0, "right": b > 0, "both": a > 0 and b > 0, "at": a + b > 0}[kind]
        assert record["label"] == str(true), record
        kinds[kind] += 1
        of_sentence[record["identifier"].rpartition("-")[0].rpartition("-")[0] + record["sentence"]].append(
            record["label"]
        )
    assert len(kinds) == 5
    assert all(sorted(labels) == ["False", "False", "True", "True"] for labels in of_sentence.values())
