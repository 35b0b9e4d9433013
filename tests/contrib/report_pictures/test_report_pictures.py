"""The report's examples, curves and figures: on the page, the right ones, and within their frames."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import time
import types
from pathlib import Path

import pytest
from report_workspace import HOSTILE, Page, record, rendered
from toy_dataset import make_toy
from toy_tasks import make

from vlp_models.common.io import read_json, write_json, write_text
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.report_pictures.charts import boxes_overlay, line_chart, nice_ticks
from vlp_models.contrib.report_pictures.curves import read_curves
from vlp_models.contrib.report_pictures.galleries import GALLERIES, Card, Examples, choose_highlights, read_galleries
from vlp_models.contrib.report_pictures.pictures import Picture, Pictures, read_figures
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table, write_table
from vlp_models.evaluation.report import ReportContext
from vlp_models.evaluation.report.records import CURVES
from vlp_models.params import Params
from vlp_models.tasks import TASKS
from vlp_models.tasks.vqa import VQA


def test_examples_are_embedded_and_a_picture_that_cannot_be_shown_is_named(
    params: Params, workspace: Workspace
) -> None:
    text = rendered(params, workspace)
    sources = [attributes["src"] or "" for tag, attributes in Page(text).tags if tag == "img"]
    assert len(sources) == 1 + 5 + 6, "the large one, the other highlights, and two of each gallery"
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert "scenes/2: cannot be read" in text


def test_highlights_are_right_and_wrong_ones_of_different_images() -> None:
    def examples(name: str, rights: str) -> Examples:
        cards = [
            Card(picture=Picture(image_id=str(place), data="x"), lines=[], right={"+": True, "-": False}.get(letter))
            for place, letter in enumerate(rights)
        ]
        gallery = GALLERIES["captioning"]
        return Examples(gallery=gallery, model=name, run=name, split="test", cards=[], sample=cards, total=9)

    def chosen(*galleries: Examples) -> list[tuple[str, str]]:
        return [(one.run, card.picture.image_id) for one, card in choose_highlights(galleries).cards]

    a, b = examples("a", "++++-+"), examples("b", "++---+")
    expected = [("a", "0"), ("a", "1"), ("b", "5"), ("a", "2"), ("a", "4"), ("b", "3"), ("b", "2")]
    assert chosen(a, b) == expected
    assert "8 of the 12" in choose_highlights([a, b]).rule
    assert chosen(examples("a", "+++++++-")) == [("a", f"{n}") for n in (0, 1, 2, 3, 4, 5, 7)]
    assert chosen(examples("a", "??+")) == [("a", "2"), ("a", "0"), ("a", "1")]
    # Captions of photos cannot be judged: one is the large picture, two are among the others.
    captions, answers = examples("a", "?" * 9), examples("b", "+-" * 5)
    expected = [("a", "0"), ("b", "2"), ("b", "4"), ("b", "1"), ("b", "3"), ("a", "5"), ("a", "6")]
    assert chosen(captions, answers) == expected
    assert "are right" not in choose_highlights([examples("a", "??")]).rule and not choose_highlights([]).cards


def test_an_answer_that_needs_no_image_is_not_the_first_example(params: Params, workspace: Workspace) -> None:
    """Of three right answers the blind baseline gives the first two as well, so the third is the large picture."""
    (workspace.root / "2.png").write_bytes((workspace.root / "1.png").read_bytes())
    lines = [
        {"question_id": f"scenes/{n}", "image_id": f"scenes/{n}", "answer": HOSTILE, "top": [[HOSTILE, 0.7]]}
        | {"answer_blind": HOSTILE if n < 2 else "no"}
        for n in range(3)
    ]
    write_text(workspace.evaluation("vqa") / "predictions-test.jsonl", "".join(f"{json.dumps(x)}\n" for x in lines))
    only = dataclasses.replace(params, finetune={"vqa": params.finetune["vqa"]})
    context = ReportContext(params=only, workspace=workspace, records=[], missing=[])
    highlights = choose_highlights(read_galleries(context))
    assert [card.picture.image_id for _, card in highlights.cards] == ["scenes/2", "scenes/0", "scenes/1"]
    assert "the blind baseline gives as well come last" in highlights.rule


def test_the_large_picture_is_of_the_best_captioner(params: Params, workspace: Workspace) -> None:
    """The best on the split that ranks, of any model; not the first run, the best on test, or a text-only control."""
    first = params.finetune["captioning"]
    runs = {"captioning": first, "tuned": first, "other": dataclasses.replace(first, start="initial/second")}
    runs["blind"] = dataclasses.replace(first, blank_images=True)
    models = {**params.models, "second": params.models["tden"]}
    # run -> CIDEr on val, which ranks, and on test
    values = {"captioning": (50.0, 90.0), "tuned": (55.0, 40.0), "other": (60.0, 30.0), "blind": (99.0, 99.0)}
    predictions = (workspace.evaluation("captioning") / "predictions-test.jsonl").read_text(encoding="utf-8")
    for run, (val, test) in values.items():
        scores = [record("captioning", "CIDEr", value, split=s) for s, value in (("val", val), ("test", test))]
        write_json(workspace.evaluation(run) / "scores.json", scores)
        write_text(workspace.evaluation(run) / "predictions-test.jsonl", predictions)

    def large_picture(*names: str) -> str:
        chosen = dataclasses.replace(params, models=models, finetune={name: runs[name] for name in names})
        text = rendered(chosen, workspace)
        return re.search(r"Captions by (\S+) on an image of test", text)[1]  # type: ignore[index]

    assert large_picture("captioning", "tuned", "other", "blind") == "other"
    assert large_picture("captioning", "tuned", "blind") == "tuned", "the best run of one model"
    assert large_picture("blind", "captioning") == "captioning"
    (workspace.evaluation("tuned") / "scores.json").unlink()
    assert large_picture("tuned", "captioning") == "captioning", "a run that was not evaluated comes last"
    write_json(workspace.evaluation("other") / "scores.json", [record("captioning", "CIDEr", 60.0, dataset="photos")])
    assert large_picture("captioning", "other") == "captioning", "without a common dataset: the first one"


def test_a_task_of_a_plugin_has_pictures_and_its_title_is_quoted(
    params: Params, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class is VQA's with another name; its predictions have fields of their own."""

    class CountObjects(VQA):
        task, title = "count_objects", "Count the objects"

    plugin = types.ModuleType("counting")
    plugin.CountObjects = CountObjects  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "counting", plugin)
    monkeypatch.setitem(TASKS, "count_objects", "counting:CountObjects")
    run = dataclasses.replace(params.finetune["vqa"], task="count_objects")
    lines = [
        {"question_id": f"scenes/{n}", "image_id": f"scenes/{n}", "objects": "2", "sure": 0.25, "objects_blind": "3"}
        for n in range(3)
    ]
    predictions = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_text(workspace.evaluation("tden-count") / "predictions-test.jsonl", predictions)
    write_json(workspace.evaluation("tden-count") / "scores.json", [record("count_objects", "accuracy", 40.0)])
    text = rendered(dataclasses.replace(params, finetune={"tden-count": run}), workspace)
    assert "<h1>“Count the objects” with tden, on scenes</h1>" in text and "fine-tuned for “Count the objects”" in text
    assert "Count the objects: one run, so nothing is ranked" in text and "Count_objects" not in text
    assert text.count("objects: 2") >= 2 and "blind baseline: 3" in text and "data:image/jpeg" in text


def test_box_labels_stay_within_the_picture_and_apart() -> None:
    crowded = [([0.4 + n / 100, 0.4, 0.6, 0.6], f"blue triangle {n}") for n in range(6)]
    boxes = [([0.9, 0.0, 1.0, 0.5], "blue triangle"), ([0, 0.5, 1, 1], "x" * 99), *crowded]
    drawn = boxes_overlay(240, 100, boxes)
    labels = re.findall(r'<text class="c." x="([\d.]+)" y="([\d.]+)">([^<]*)', drawn)
    assert drawn.count("<rect") == len(boxes) and labels[0][2] == "blue triangle" and labels[1][2].endswith("…")
    frames = [(float(x), float(x) + 7.5 * len(text), float(y)) for x, y, text in labels]
    assert all(start >= 0 and end <= 240 and 10 <= y <= 97 for start, end, y in frames)
    for first, second in itertools.combinations(frames, 2):
        apart = abs(first[2] - second[2]) >= 13
        assert apart or first[1] < second[0] or second[1] < first[0], (first, second)


def test_cells_of_a_grid_are_not_drawn_as_objects(params: Params, workspace: Workspace) -> None:
    """A CNN trained on ImageNet names every cell of a photo; only a detector's regions are objects."""
    assert 'class="boxes"' in rendered(params, workspace)
    manifest = read_json(workspace.features / "manifest.json")
    write_json(workspace.features / "manifest.json", manifest | {"params": {"source": "timm"}})
    text = rendered(params, workspace)
    assert 'class="boxes"' not in text and "Boxes are" not in text


def test_a_chart_has_one_quantity(params: Params, workspace: Workspace) -> None:
    """Losses, accuracies in percent and any other figure are charts of their own, with names that are read."""
    text = "step,loss,mlm,mlm_accuracy,val_loss,codes_used\n1,3.0,2.0,0.2,,40\n2,2.5,1.5,0.4,2.6,60\n"
    write_text(workspace.curve("pretrain/tden"), text)
    (loss, accuracy, other) = read_curves(params, workspace)
    assert (loss.quantity, [name for name, _ in loss.legend]) == ("Loss", ["total", "masked words"])
    assert loss.has_validation and 'class="line c0 dashed"' in loss.chart
    assert (accuracy.quantity, accuracy.last) == ("Accuracy, %", "40.00 after 2 steps")
    assert (other.quantity, other.last) == ("Codes used", "60.00 after 2 steps")


def test_an_objective_has_the_same_color_in_all_charts(params: Params, workspace: Workspace) -> None:
    write_text(workspace.curve("pretrain/tden"), "step,loss,mlm,moc,ism\n1,3.0,2.0,1.0,1.0\n2,2.5,1.5,0.5,0.5\n")
    pretrain = params.pretrain["tden"]
    recipe = dataclasses.replace(pretrain.recipe, objectives={"ism": 1.0, "moc": 1.0})
    write_text(workspace.curve("pretrain/other"), "step,loss,ism,moc,ism_accuracy\n1,3.0,2.0,1.0,0.5\n")
    both = {"tden": pretrain, "other": dataclasses.replace(pretrain, recipe=recipe)}
    charts = read_curves(dataclasses.replace(params, pretrain=both), workspace)
    colors: dict[str, set[int]] = {}
    for chart in charts:
        assert len({number for _, number in chart.legend}) == len(chart.legend)
        for name, number in chart.legend:
            colors.setdefault(name, set()).add(number)
    assert {"total", "masked words", "image-sentence matching"} <= colors.keys() and len(charts) == 3
    assert all(len(numbers) == 1 for numbers in colors.values()), colors
    assert len(set(CURVES.values())) == len(CURVES), "of two lines with one name a chart would have one"


def test_boxes_are_drawn_only_for_models_that_read_regions(params: Params, workspace: Workspace) -> None:
    image_id = read_table("images", workspace.validated)["image_id"][0].as_py()
    boxes = {flag: Pictures(workspace, 10**9, regions=flag).get(image_id).boxes for flag in (True, False)}
    assert "<rect" in boxes[True] and not boxes[False]


def test_long_curves_are_thinned(params: Params, workspace: Workspace) -> None:
    """A curve of 50,000 steps is rendered quickly, in a small page."""
    lines = "".join(f"{i},{3 - i / 50_000}\n" for i in range(50_000))
    write_text(workspace.curve("finetune/vqa"), f"step,loss\n{lines}")
    start = time.perf_counter()
    text = rendered(params, workspace)
    assert time.perf_counter() - start < 10
    assert len(text) < 400_000


def test_ticks_are_round_and_a_line_without_numbers_is_not_drawn() -> None:
    assert nice_ticks(0, 97) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(5, 5)[-1] >= 5
    assert line_chart({"loss": [(1, float("nan"))]}, "t") == ""


def test_model_figures_are_on_the_page(params: Params, workspace: Workspace) -> None:
    """Patches are cut from the images, text is escaped, and a missing image is named."""
    pretrained = dataclasses.replace(params, pretrain={**params.pretrain, "shows": params.pretrain["tden"]})
    boxes = [("scenes/0", [0.0, 0.0, 0.5, 1.0]), ("scenes/2", [0, 0, 1, 1]), ("elsewhere", [0, 0, 1, 1])]
    patches = [{"image_id": image_id, "box": box} for image_id, box in boxes]
    saved = {"title": "Codes", "about": HOSTILE, "groups": [{"name": "code 1", "note": "two", "patches": patches}]}
    write_json(workspace.figures("pretrain/shows"), [saved])
    (figure,) = read_figures(pretrained, workspace)
    (first, lost, unknown) = figure.groups[0].pictures
    assert (first.width, first.height) == (72, 36) and first.data
    assert "cannot be read" in lost.problem and "not in the validated" in unknown.problem
    page = rendered(pretrained, workspace)
    assert "Codes · shows" in page and first.data in page and HOSTILE not in page
    assert read_figures(params, workspace) == []


def test_gallery_cards_show_both_images(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy")

    class ImageIds:
        def get(self, image_id: str, longest: int = 0) -> str:
            return image_id

    workspace = Workspace(tmp_path)
    workspace.validated.mkdir(parents=True)
    task_model, dataset = make(toy, "nlvr2"), ShardDataset(toy.shards, "val", "image_pairs")
    samples = [dataset[i] for i in range(len(dataset))]
    table = [
        {"pair_id": s.sample_id, "image_id": s.image_id, "other_image_ids": list(s.image_ids[1:]), "text": s.text}
        | {"label": s["label"], "group": s["group"], "provenance": ""}
        for s in samples
    ]
    write_table(table, "image_pairs", workspace.validated)
    rows = task_model.predict(task_model.collate(samples), samples)
    cards = GALLERIES["nlvr2"].cards(workspace, ImageIds(), rows[:2])  # type: ignore[arg-type]
    assert [(card.picture, card.second_picture) for card in cards] == [
        ("toy/val000", "toy/val001"),
        ("toy/val001", "toy/val002"),
    ]
    assert cards[0].lines[0].text == samples[0].text
    assert cards[0].below[0].right is (rows[0]["prediction"] == rows[0]["label"])
