"""The synthetic NLVR: what its sentences mean, that they balance, and that the same seed gives the same bytes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlp_models.common.io import hash_path
from vlp_models.contrib.boxes import dataset as boxes
from vlp_models.contrib.boxes import phrases as boxes_phrases
from vlp_models.contrib.boxes import scene as boxes_scene
from vlp_models.contrib.boxes.dataset import make_group, write_descriptions
from vlp_models.contrib.boxes.scene import Item, Scene, draw
from vlp_models.contrib.boxes.sentences import add_typos, write_sentence
from vlp_models.data.formats import read_source
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams, GeneratorParams

SMALL = GeneratorParams(generator="boxes", seed=3, train=10, val=4, test=4, statements=3, permutations=2)
SEEDS = st.integers(0, 10_000)


def tower(*colors: str) -> tuple[Item, ...]:
    return tuple(Item("square", c, 20, 40, y) for c, y in zip(colors, boxes_scene.TOWER_Y, strict=False))


def sentences(scene: Scene, wanted: set[str]) -> dict[str, bool]:
    """Truth of each wanted sentence, as soon as the grammar happens to write it."""
    found: dict[str, bool] = {}
    for seed in range(80_000):
        made = write_sentence(random.Random(seed), scene)
        text = made.text.lower().rstrip(".")
        if text in wanted:
            found[text] = made.test(scene)
        if len(found) == len(wanted):
            break
    return found


@pytest.mark.slow
def test_tower_sentences_mean_what_nlvr_means_by_them() -> None:
    scene = Scene("tower", (tower("black", "yellow"), tower("blue", "yellow", "yellow"), tower("black")))
    truth = {
        "there is a yellow block on a black block": True,
        "there is a black block on a yellow block": False,
        "there are two yellow blocks": False,  # a bare number is exact: there are three
        "there are three yellow blocks": True,
        "there is a black tower": True,
        "there is a yellow tower": False,
        "there is a tower with a yellow block at the top": True,
        "there is exactly one tower with a yellow block at the top": False,
        "there is a black block as the base of a tower": True,
        "there is a tower with only black and yellow blocks": True,
        "there is a tower with only black and blue blocks": False,
    }
    assert sentences(scene, set(truth)) == truth


@pytest.mark.slow
def test_scatter_sentences_mean_what_nlvr_means_by_them() -> None:
    scene = Scene(
        "scatter",
        (
            (Item("circle", "yellow", 20, 80, 40), Item("square", "black", 10, 50, 50)),
            (Item("triangle", "blue", 30, 70, 70), Item("circle", "blue", 10, 3, 50)),
            (Item("circle", "yellow", 10, 40, 20),),
        ),
    )
    truth = {
        "there is a yellow circle touching the wall": True,
        "there is a black square touching the wall": False,
        "there is a blue circle touching the wall": False,
        "there are two yellow circles": True,
        "there is one yellow circle": False,
        "there is no yellow square": True,
        "there is a box with a yellow circle and a black square": True,
        "there is a box with only blue items": True,
        "there is a blue triangle touching the base": True,
    }
    assert sentences(scene, set(truth)) == truth


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_items_stay_inside_their_boxes(seed: int) -> None:
    rng = random.Random(seed)
    scene = boxes_scene.sample(rng, rng.choice(("tower", "scatter")))
    for made in (scene, boxes_scene.edit(rng, scene), boxes_scene.rearrange(rng, scene)):
        for box in made.boxes:
            assert 1 <= len(box) <= boxes_scene.MAX_ITEMS
            for item in box:
                assert 0 <= item.x <= 100 - item.size and 0 <= item.y <= 100 - item.size
            assert all(boxes_scene.gap(a, b) >= 1 for i, a in enumerate(box) for b in box[:i])


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_truth_does_not_depend_on_the_order_of_the_boxes(seed: int) -> None:
    rng = random.Random(seed)
    scene = boxes_scene.sample(rng, rng.choice(("tower", "scatter")))
    made = write_sentence(rng, scene)
    for order in boxes.ORDERS:
        turned = Scene(scene.kind, tuple(scene.boxes[i] for i in order))  # type: ignore[arg-type]
        assert made.test(turned) == made.test(scene), made.text


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, statements=st.integers(1, 6))
def test_sentences_are_true_as_often_as_false(seed: int, statements: int) -> None:
    group = make_group(random.Random(seed), statements)
    assert len(group) == 4
    balance: Counter[str] = Counter()
    for example in group:
        assert 1 <= len(example.statements) <= statements
        for _, text, label in example.statements:
            balance[text] += 1 if label else -1
    assert set(balance.values()) == {0}


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_typos_leave_a_sentence_readable(seed: int) -> None:
    text = "there are at least two black blocks as the base of a tower"
    written = add_typos(random.Random(seed), text)
    assert abs(len(written) - len(text)) <= 3
    assert sum(word in text for word in written.lower().rstrip(".").split()) >= 9


def test_colors_and_geometry_of_the_drawing() -> None:
    left = (Item("square", "yellow", 10, 0, 90), Item("circle", "blue", 30, 70, 0))
    scene = Scene("scatter", (left, (Item("triangle", "black", 20, 40, 40),), (Item("square", "black", 10, 0, 0),)))
    image = draw(scene, (1, 0, 2))
    assert image.size == (400, 100)
    assert image.getpixel((125, 50)) == image.getpixel((275, 50)) == (128, 128, 128)
    assert image.getpixel((10, 10)) == (211, 211, 211)
    assert image.getpixel((50, 58)) == (0, 0, 0)  # box 1 leftmost
    assert image.getpixel((150, 90)) == image.getpixel((159, 99)) == (255, 255, 0)
    assert image.getpixel((150 + 85, 15)) == (0, 153, 255)
    assert image.getpixel((150 + 70, 0)) == (211, 211, 211)  # outside the circle


def test_the_same_params_give_the_same_bytes_which_the_nlvr_reader_reads(tmp_path: Path) -> None:
    counts = boxes.write(SMALL, tmp_path / "boxes")
    boxes.write(SMALL, tmp_path / "again")
    assert hash_path(tmp_path / "boxes") == hash_path(tmp_path / "again")
    tables = read_source("boxes", DatasetParams.of(format="nlvr", root="boxes"), tmp_path)
    assert not tables["quarantine"]
    assert counts["images"] == len(tables["images"]) == 36
    assert len(tables["statements"]) == 2 * counts["statements"]
    assert Counter(row["split"] for row in tables["images"]) == {"train": 20, "val": 8, "test": 8}
    by_group: Counter[str] = Counter()
    for row in tables["statements"]:
        if "train-0" in row["group"] or "train-1" in row["group"]:
            by_group[row["group"]] += 1 if row["label"] else -1
    assert set(by_group.values()) == {0}
    for row in tables["images"][:4]:
        with Image.open(row["path"]) as image:
            pixels = image.convert("RGB")
        inside = [o for o in tables["objects"] if o["image_id"] == row["image_id"]]
        for item in inside:  # the middle of each box has the color its category names
            color = {"yellow": (255, 255, 0), "black": (0, 0, 0), "blue": (0, 153, 255)}[item["category"].split()[0]]
            assert pixels.getpixel((int(item["x1"] + item["x2"]) // 2, int(item["y1"] + item["y2"]) // 2)) == color


@pytest.mark.parametrize(("key", "value"), [("permutations", 7), ("statements", 0)])
def test_invalid_params_are_refused(tmp_path: Path, key: str, value: int) -> None:
    params = GeneratorParams(**{**vars(SMALL), key: value})
    with pytest.raises(DataError, match=key):
        boxes.write(params, tmp_path)


def test_runs_and_middles_of_towers() -> None:
    black = tower("black", "blue", "blue", "black")
    assert boxes_phrases.has_stacked(black, "black", "blue")
    assert not boxes_phrases.has_stacked(black, "yellow", "blue")
    assert boxes_phrases.level_is(black, -1, "black") and not boxes_phrases.level_is(black, 9, "blue")
    assert boxes_phrases.level_is(tower("black", "blue", "yellow"), 9, "blue")


def test_descriptions_follow_the_order_of_boxes() -> None:
    scene = Scene("tower", (tower("black", "yellow"), tower("blue", "yellow", "yellow"), tower("black")))
    texts = set(write_descriptions(random.Random(1), scene, (2, 0, 1), 2000))
    assert {
        "the left tower has one block black",
        "the middle tower has two blocks black at the base and yellow at the top",
        "the right tower has three blocks blue at the base yellow and yellow at the top",
        "the bases of the towers are black black and blue",
        "the towers have one two and three blocks",
        "there are three yellow blocks two black blocks and one blue block",
        "in the middle tower there is a yellow block on a black block",
        "two towers have a yellow block",
    } <= texts
    assert not {t for t in texts if t.startswith("the left tower") and "black" not in t}
    item = (Item("circle", "yellow", 20, 80, 40), Item("square", "black", 10, 50, 90))
    texts = set(write_descriptions(random.Random(2), Scene("scatter", (item, item[:1], item[1:])), (0, 1, 2), 4000))
    assert {
        "the left box has one yellow circle and one black square",
        "the boxes have one no and one black squares",
        "in the left box one black square is touching the base",
        "in the middle box nothing is touching the base",
        "there are two circles and two squares",
    } <= texts


def test_simple_dataset_has_at_most_two_items_per_box() -> None:
    for seed in range(150):
        for example in make_group(random.Random(seed), 4, simple=True):
            assert example.scene.kind == "tower" or max(map(len, example.scene.boxes)) <= 2
