"""The report's examples, curves and figures: on the page, the right ones, and within their frames."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

from report_workspace import HOSTILE, Page, rendered
from toy_dataset import make_toy
from toy_tasks import make

from vlp_models.common.io import write_json, write_text
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.report_pictures.charts import boxes_overlay, line_chart, nice_ticks
from vlp_models.contrib.report_pictures.curves import read_curves
from vlp_models.contrib.report_pictures.galleries import GALLERIES, Card, Examples, choose_highlights
from vlp_models.contrib.report_pictures.pictures import Picture, Pictures, read_figures
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table, write_table
from vlp_models.evaluation.report.records import CURVES
from vlp_models.params import Params


def test_examples_are_embedded_and_a_picture_that_cannot_be_shown_is_named(
    params: Params, workspace: Workspace
) -> None:
    text = rendered(params, workspace)
    sources = [attributes["src"] or "" for tag, attributes in Page(text).tags if tag == "img"]
    assert len(sources) == 6 + 6, "of the six highlights, and two of each gallery"
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
    assert chosen(a, b) == [("a", "0"), ("b", "1"), ("a", "2"), ("a", "4"), ("b", "3"), ("b", "2")]
    assert "8 of the 12" in choose_highlights([a, b]).rule
    assert chosen(examples("a", "++++++-")) == [("a", f"{n}") for n in (0, 1, 2, 3, 4, 6)]
    assert chosen(examples("a", "??+")) == [("a", "2"), ("a", "0"), ("a", "1")]
    assert "are right" not in choose_highlights([examples("a", "??")]).rule and not choose_highlights([]).cards


def test_box_labels_stay_within_the_picture() -> None:
    drawn = boxes_overlay(240, 100, [([0.9, 0.0, 1.0, 0.5], "blue triangle"), ([0, 0.5, 1, 1], "x" * 99)])
    ends = re.findall(r'<text class="c." x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]*)', drawn)
    assert ends[0] == ("238.0", "13.0", "end", "blue triangle"), "at the right edge, and inside the box at the top"
    assert len(ends[1][3]) * 7.5 < 240 and ends[1][3].endswith("…")


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
