"""The report in Chromium: short, complete at the widths of a laptop and of a phone, and in the right order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

CUT_OFF = """() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const tables = [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1);
  const outside = [...document.querySelectorAll('main *, header *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && !e.closest('svg') && (box.right > innerWidth + 1 || box.left < -1);
  });
  const labels = [...document.querySelectorAll('.boxes text')].filter(e => {
    const label = e.getBBox(), view = e.ownerSVGElement.viewBox.baseVal;
    const [right, bottom] = [label.x + label.width, label.y + label.height];
    return label.x < -1 || right > view.width + 1 || label.y < -3 || bottom > view.height + 3;
  });
  return [...tables, ...outside, ...labels].map(e => e.outerHTML.slice(0, 160));
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


def test_the_page_opens_with_what_was_trained_then_figures_then_pictures(browser: Any, report: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    page.goto(report)
    assert page.locator("h1").inner_text() == "Captioning and visual question answering with tden, on scenes"
    assert "pretrained for" in page.locator(".lead").inner_text()
    places = [page.evaluate(TOP, selector) for selector in (".lead", ".headlines", ".six img", "section table")]
    assert places == sorted(places) and places[1] < 500 and places[2] < 1000
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
    page.close()
