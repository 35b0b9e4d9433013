"""The report in Chromium: short, complete at the widths of a laptop and of a phone, and in the right order."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.params import load_params
from vlp_models.pipeline.stages import report as report_stage

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

CUT_OFF = """() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const tables = [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1);
  const outside = [...document.querySelectorAll('main *, header *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && !e.closest('svg') && (box.right > innerWidth + 1 || box.left < -1);
  });
  const clipped = [...document.querySelectorAll('main *, header *')].filter(e =>
    getComputedStyle(e).overflowX === 'hidden' && e.scrollWidth > e.clientWidth + 1 && !e.title);
  const labels = [...document.querySelectorAll('.boxes text')].filter(e => {
    const label = e.getBBox(), view = e.ownerSVGElement.viewBox.baseVal;
    const [right, bottom] = [label.x + label.width, label.y + label.height];
    return label.x < -1 || right > view.width + 1 || label.y < -3 || bottom > view.height + 3;
  });
  return [...tables, ...outside, ...clipped, ...labels].map(e => e.outerHTML.slice(0, 160));
}"""
TOP = "selector => document.querySelector(selector).getBoundingClientRect().top + scrollY"


@pytest.fixture(scope="module")
def report(built_project: Path) -> str:
    return (built_project / "reports" / "index.html").as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off(browser: Any, report: str, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 860}, color_scheme=scheme)
    page.goto(report)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height <= (5000 if width == 1280 else 12_000), "before anything is unfolded"
    assert page.evaluate(CUT_OFF) == []
    page.close()


def test_the_page_stays_short_with_many_runs(browser: Any, built_project: Path, tmp_path: Path) -> None:
    """Six models with four runs each, which are copies of the built project's."""
    ignored = shutil.ignore_patterns("vlp_models", ".git", ".dvc", "mlartifacts")
    project = Path(shutil.copytree(built_project, tmp_path / "many", ignore=ignored))
    workspace, params = Workspace(project), load_params(project / "params.yaml")
    models = [f"model-{n}" for n in range(6)]
    pretrain, finetune = {}, {}
    for model in models:
        pretrain[model] = dataclasses.replace(params.pretrain["tden"], model=model)
        shutil.copy(workspace.curve("pretrain/tden"), workspace.curve(f"pretrain/{model}"))
        for task, seed in itertools.product(("captioning", "vqa"), (1, 2)):
            run, source = f"{model}-{task}-{seed}", f"tden-{task}"
            settings = params.finetune[source]
            finetune[run] = dataclasses.replace(settings, start=f"pretrain/{model}", variant=run, seed=seed)
            shutil.copytree(workspace.evaluation(source), workspace.evaluation(run))
            shutil.copy(workspace.curve(f"finetune/{source}"), workspace.curve(f"finetune/{run}"))
    made = dict.fromkeys(models, params.models["tden"])
    report_stage.run(dataclasses.replace(params, models=made, pretrain=pretrain, finetune=finetune), workspace)
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto((workspace.reports / "index.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") <= 5000
    assert page.evaluate(CUT_OFF) == []
    text = page.locator("main").inner_text()
    assert all(f"model-{n}-vqa-2" in text for n in range(6)), "nothing is left out once it is unfolded"
    page.close()


def test_the_page_opens_with_verdicts_and_a_picture_then_figures_and_examples(browser: Any, report: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto(report)
    assert page.locator("h1").inner_text() == "Captioning and visual question answering with tden, on scenes"
    assert page.locator("header .verdicts li").count() == 2
    assert "pretrained for" in page.locator(".lead").inner_text()
    tops = [
        page.evaluate(TOP, selector) for selector in (".verdicts", ".hero img", ".lead", ".six img", "section table")
    ]
    assert tops == sorted(tops) and tops[1] < 300
    assert page.locator(".hero img").bounding_box()["height"] > 300
    assert page.evaluate(TOP, ".hero .words") < 860 and page.evaluate(TOP, ".headlines") < 300
    cards = page.locator(".headlines .card")
    assert cards.count() == 3
    for text in cards.all_inner_texts():
        assert "scenes, test" in text and "this model" in text
        assert {"constant caption", "majority answer"} & set(text.split("\n")), "a trivial baseline next to it"
    assert page.locator(".six .card").count() == 6
    assert "Not picked by hand" in page.locator("h2:has-text('Predictions') + p").inner_text()
    visible = page.locator("main").inner_text()
    assert ", test\n" in visible and ", val\n" not in visible, "val is folded"
    for svg in page.locator(".curves figure").all_inner_texts():
        assert "_" not in svg.partition("\n")[2], "names that are read, not columns"
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.querySelector('.hero .words').getBoundingClientRect().bottom + scrollY") <= 844
    page.close()
