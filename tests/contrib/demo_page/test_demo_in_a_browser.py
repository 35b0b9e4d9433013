"""The demo page as it is served: in a browser, on its address, and with uploads."""

from __future__ import annotations

import io
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
import requests
import yaml
from numpy.typing import NDArray
from PIL import Image
from prefect_server import free_port

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.demo_page import occlusion
from vlp_models.contrib.demo_page.commands import make_page
from vlp_models.contrib.demo_page.handlers import Overlay, Page
from vlp_models.contrib.demo_page.photos import IMPORTANT_COLOR, open_photo, scale_for_page
from vlp_models.errors import ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.serving.images import MAX_BYTES

pytestmark = pytest.mark.extras
pytest.importorskip("gradio", reason="in requirements-photographs.lock")
ROOT = Path(__file__).parents[3]
CAPTION = "document.querySelector('#caption textarea, #caption input')"
CLIPPED = """[...document.querySelectorAll('textarea')].filter(e =>
  e.offsetParent && (e.scrollHeight > e.clientHeight + 2 || e.scrollWidth > e.clientWidth + 2)
).map(e => e.value)"""

# Fields without a text that are for results
EMPTY = """[...document.querySelectorAll('textarea')].filter(e =>
  e.offsetParent && !e.value && !e.placeholder && !e.closest('#wanted')).map(e => e.outerHTML)"""
# Names of found photos that cover their photo, or are cut off
COVERING = """[...document.querySelectorAll('#found .caption-label')].filter(e => {
  const photo = e.parentElement.querySelector('img').getBoundingClientRect();
  return e.getBoundingClientRect().top < photo.bottom - 1 || e.scrollHeight > e.clientHeight + 1
    || e.scrollWidth > e.clientWidth + 1;
}).map(e => e.innerText)"""
# Pixels between the end of the text "Click to Upload" and the end of its field
ROOM_BELOW_UPLOAD = """(() => {
  const field = document.querySelector('#photo'), texts = document.createTreeWalker(field, NodeFilter.SHOW_TEXT);
  while (!texts.nextNode().textContent.includes('Click to Upload'));
  const text = document.createRange();
  text.selectNodeContents(texts.currentNode);
  return field.getBoundingClientRect().bottom - text.getBoundingClientRect().bottom;
})()"""


def _pixels(picture: Image.Image | bytes) -> NDArray[np.int16]:
    """Return pixels 0 to 255 as signed integers, to subtract them. [H, W, 3]"""
    opened = picture if isinstance(picture, Image.Image) else Image.open(io.BytesIO(picture))
    return np.asarray(opened.convert("RGB")).astype(np.int16)


def _check_boxes(tab: Any, overlay: Overlay | None, photo: Path, screen: Path) -> None:
    """Check that the page shows the overlay: the photo with the edges of its 16 boxes, which are grid cells."""
    assert overlay is not None
    element, deadline = tab.locator("#picture img"), time.monotonic() + 60
    while True:  # the file that the page loads
        element.wait_for()
        sent = _pixels(tab.request.get(urljoin(tab.url, element.get_attribute("src"))).body())
        if np.array_equal(sent, _pixels(overlay.picture)) or time.monotonic() > deadline:
            break
        tab.wait_for_timeout(200)
    assert np.array_equal(sent, _pixels(overlay.picture)), "the page shows another picture"
    plain = _pixels(scale_for_page(open_photo(photo)))
    differs, side = (sent != plain).any(2), 704 // 4
    assert sent.shape == (704, 704, 3)
    for line in range(0, 704, side):  # left and upper edges
        assert differs[line].mean() > 0.95 and differs[:, line].mean() > 0.95
    inside = np.arange(704) % side
    inside_S = (inside > 40) & (inside < side - 10)  # without edges and numbers
    assert not differs[np.ix_(inside_S, inside_S)].any()
    assert (sent == IMPORTANT_COLOR).all(2).sum() > 3 * side, "one box is thick"

    tab.wait_for_function("(e => e.complete && e.naturalWidth == 704)(document.querySelector('#picture img'))")
    while True:  # and the rendered picture, fitted into the element; it fades in
        element.screenshot(path=str(screen))
        with Image.open(screen) as opened:
            edge = min(opened.size)
            left, top = (opened.width - edge) // 2, (opened.height - edge) // 2
            found = _pixels(opened.crop((left, top, left + edge, top + edge)))
        small = [_pixels(Image.fromarray(x.astype(np.uint8)).resize((edge, edge))) for x in (sent, plain)]
        with_boxes, without = (float(np.abs(found - one).mean()) for one in small)
        if with_boxes < without / 2 or time.monotonic() > deadline:
            break
        tab.wait_for_timeout(200)
    assert with_boxes < without / 2, (with_boxes, without)


@pytest.mark.slow
def test_page_in_a_browser(
    here: Workspace, params: Params, photo: Path, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlp_models.contrib.demo_page.app import serving

    monkeypatch.setattr(occlusion, "NEGLIGIBLE", 0.0)  # losses of untrained models are small
    page: Page = make_page(params, here, runs=["own-vqa"], corrections=True)
    expected, answered = page.caption(str(photo)), page.answer(str(photo), "what is it ?")
    assert expected.overlay is not None and "thick ones matter most" in expected.overlay.note
    broken = here.root / "broken.png"
    broken.write_bytes(photo.read_bytes()[:200])
    port, elsewhere = free_port(), []
    with serving(page, host="127.0.0.1", port=port) as address:
        assert address == f"http://127.0.0.1:{port}"
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        tab = browser.new_page()
        tab.set_default_timeout(120_000)
        tab.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else elsewhere.append(r.url))
        # The page opens with an example: the photo and below it its caption, without an empty field.
        opening = page.caption(str(page.examples[0])).caption
        for width, height in ((1280, 860), (390, 844)):
            visitor = browser.new_page(viewport={"width": width, "height": height})
            visitor.goto(address, timeout=120_000)
            visitor.wait_for_function(f"text => {CAPTION}?.value == text", arg=opening, timeout=120_000)
            visitor.wait_for_selector("text=Click to Upload")  # it may come after the caption
            assert visitor.evaluate(EMPTY) == [] and not visitor.locator("#answers").is_visible()
            assert visitor.evaluate(CLIPPED) == [] and visitor.evaluate(ROOM_BELOW_UPLOAD) >= 0
            shown, caption = (visitor.locator(name).bounding_box() for name in ("#picture", "#caption textarea"))
            assert abs(caption["x"] - shown["x"]) < 30 and caption["y"] >= shown["y"] + shown["height"]
            assert caption["y"] + caption["height"] <= height, "the caption is within the first screen"
            visitor.close()
        tab.goto(address)
        tab.set_input_files("#photo input[type=file]", str(photo))
        tab.wait_for_function(f"text => {CAPTION}?.value == text", arg=expected.caption)
        assert tab.locator("#caption textarea, #caption input").input_value() == expected.caption
        tab.get_by_text("Other captions").click()
        assert tab.locator("#greedy textarea, #greedy input").input_value() == expected.greedy
        assert "vlp-captioning version 1 (champion; model tden)" in tab.locator("#caption").inner_text()
        assert tab.locator("#note textarea, #note input").input_value() == expected.overlay.note
        _check_boxes(tab, expected.overlay, photo, tmp_path / "captioned.png")
        tab.locator("#correction button").first.click()
        assert tab.locator("#corrected textarea").input_value() == expected.caption
        tab.locator("#corrected textarea").fill("shapes on a wall")
        tab.locator("#send").click()
        tab.wait_for_function("document.querySelector('#sent textarea, #sent input')?.value.startsWith('Thank you.')")
        (correction,) = (here.root / params.ingest.inbox).iterdir()
        assert f"{expected.caption}\n" in (correction / "pairs.csv").read_text().replace("\r\n", "\n")
        tab.locator("#question textarea, #question input").fill("what is it ?")
        tab.locator("#ask").click()
        tab.wait_for_function("document.querySelector('#answers')?.innerText.includes('%')")
        assert "vlp-vqa version 1 (run own-vqa; model tden)" in tab.locator("#answered-by").inner_text()
        _check_boxes(tab, answered.overlay, photo, tmp_path / "answered.png")
        assert not tab.locator("#found").is_visible(), "an empty field"
        tab.locator("#wanted textarea, #wanted input").fill("a red square")
        tab.locator("#look").click()
        tab.locator("#found img").first.wait_for()
        assert not tab.locator("#found [data-testid=block-label]").is_visible(), "it would cover the first photo"
        assert "vlp-captioning version 1" in tab.locator("#about-captioning").inner_text()
        assert list(folder.rglob(photo.name)), "uploads are in the page's own folder"

        tab.locator("#examples button").first.click()
        example = page.caption(str(page.examples[0])).caption
        tab.wait_for_function(
            "text => !document.querySelector('#answers')?.innerText.includes('%') && "
            "document.querySelector('#caption textarea, #caption input')?.value == text",
            arg=example,
        )
        for width in (1280, 390):
            tab.set_viewport_size({"width": width, "height": 860})
            tab.wait_for_timeout(500)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator("#found .caption-label").count() and tab.evaluate(COVERING) == []
            thumbnails = tab.locator("#examples button:visible")
            boxes = [thumbnails.nth(n).bounding_box() for n in range(thumbnails.count())]
            assert len(boxes) == len(page.examples) and all(b["x"] + b["width"] <= width - 8 for b in boxes)

        tab.locator("#photo button[aria-label]").first.click()  # remove the photo
        tab.set_input_files("#photo input[type=file]", str(broken))
        tab.locator("#problem textarea, #problem input").wait_for()
        problem = tab.locator("#problem textarea, #problem input").input_value()
        assert problem.startswith("Broken.png: damaged or cut short")
        with (
            pytest.raises(ParamsError, match=f"port {port}: .*choose others"),
            serving(page, host="127.0.0.1", port=port),
        ):
            pass
    assert not folder.exists() and not elsewhere, "the browser contacted only this server"


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=5):
            return True
    except OSError:
        return False


def test_default_host_is_the_loopback_address(here: Workspace, params: Params, tmp_path: Path) -> None:
    """Run the command. On Linux 127.0.0.2 is this machine, too: a server on all addresses would answer there."""
    (here.root / "params.yaml").write_text(yaml.safe_dump(to_plain(params)), encoding="utf-8")
    port, stderr = free_port(), tmp_path / "stderr"
    command = [sys.executable, "-m", "vlp_models.cli.main", "demo", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with stderr.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=here.root, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        lines = list(itertools.takewhile(lambda line: not line.startswith("the demo is at"), process.stdout))
        assert process.poll() is None, f"{lines} {stderr.read_text()}"
        assert [_answers(address, port) for address in ("127.0.0.1", "127.0.0.2", "::1")] == [True, False, False]
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_too_large_upload_is_rejected_and_leaves_no_file(here: Workspace, params: Params) -> None:
    from vlp_models.contrib.demo_page.app import serving

    with serving(make_page(params, here, runs=["own-vqa"]), host="127.0.0.1", port=free_port()) as address:
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        examples = set(folder.rglob("*"))
        for size, status in ((MAX_BYTES // 2, 200), (MAX_BYTES + 1, 413)):
            sent = requests.post(f"{address}/gradio_api/upload", files={"files": ("a.png", bytes(size))}, timeout=60)
            assert sent.status_code == status
        sizes = [path.stat().st_size for path in set(folder.rglob("*")) - examples if path.is_file()]
        assert sizes == [MAX_BYTES // 2]
