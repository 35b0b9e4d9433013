"""The labeling page in Chromium: by keyboard, on a phone, and while the server restarts."""

from __future__ import annotations

import csv
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from label_project import LabelServer, make_project

pytestmark = [pytest.mark.extras, pytest.mark.slow]


def rows(server: LabelServer) -> list[dict[str, str]]:
    with server.listing.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_page_by_keyboard_on_a_phone_and_over_a_restart(
    tmp_path: Path, start: Callable[..., LabelServer], browser: Any
) -> None:
    project = make_project(tmp_path, 9)
    (project / "data/raw/own/pairs.csv").write_text(
        "image,caption,split\nimg/000.jpg,a red drawing of shapes,train\nimg/001.jpg,many blue shapes,train\n"
    )
    server = start(project)
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page, elsewhere, errors = context.new_page(), [], []
    page.on("request", lambda r: None if r.url.startswith((server.address, "data:")) else elsewhere.append(r.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{server.address}/?token={server.token}")
    assert "token" not in page.url

    def until(is_met: Callable[[], bool]) -> None:
        """Wait here: the page's policy allows no script of others, such as playwright's own waiting."""
        deadline = time.monotonic() + 60
        while not is_met():
            assert time.monotonic() < deadline, page.locator("body").inner_text()
            page.wait_for_timeout(50)

    def text(name: str) -> str:
        return str(page.locator(name).inner_text())

    def wait_for(count: str) -> None:
        until(lambda: text("#count").startswith(count))

    def image() -> str:
        until(lambda: bool(page.locator("#caption").input_value()))
        return text("#name")

    until(lambda: "photos unlike the labeled ones" in text("#notes"))
    page.reload()  # the photo that was shown before the features were known has no draft

    # Enter accepts, e edits, c clears, s skips, u takes back.
    wait_for("2 of 9")
    first = image()
    draft = page.locator("#caption").input_value()
    page.keyboard.press("Enter")
    wait_for("3 of 9")
    assert (rows(server)[-1]["image"], rows(server)[-1]["caption"]) == (first, draft)
    assert rows(server)[-1]["label_draft"].endswith(", accepted")
    second = image()
    page.keyboard.press("e")
    page.keyboard.type(" on paper")
    page.keyboard.press("Enter")
    wait_for("4 of 9")
    assert rows(server)[-1]["caption"].endswith(" on paper") and rows(server)[-1]["label_draft"].endswith(", edited")
    page.keyboard.press("u")
    wait_for("3 of 9")
    assert text("#name") == second and second not in {row["image"] for row in rows(server)}
    assert page.locator("#caption").input_value().endswith(" on paper")
    page.locator("#caption").blur()
    page.keyboard.press("s")
    until(lambda: text("#name") != second)
    assert "1 skipped" in text("#count")
    image()
    page.keyboard.press("c")
    page.keyboard.type("https://example.org")
    page.keyboard.press("Enter")
    page.locator("#problem").wait_for()
    assert text("#problem") == "nothing but a URL: 'https://example.org'."
    # A phone: everything fits, and nothing is cut off.
    for width, height in ((390, 844), (1280, 800)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        boxes = [page.locator(f"#{name}").bounding_box() for name in ("photo", "caption", "accept", "skip", "undo")]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
        assert boxes[2]["y"] + boxes[2]["height"] <= height, "the photo, its caption and `Save` are on one screen"
    # The server dies while an answer is on its way; the page sends it again, and it is written once.
    server.stop(signal.SIGKILL)
    page.locator("#caption").fill("shapes on a wall")
    page.keyboard.press("Enter")
    until(lambda: text("#problem").startswith("The server does not respond."))
    server.start()
    wait_for("4 of 9")
    assert [row["caption"] for row in rows(server)].count("shapes on a wall") == 1
    assert not page.locator("#problem").is_visible() and not elsewhere and not errors
    context.close()
