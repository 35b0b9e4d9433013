"""Every page of the built docs in Chromium, at the width of a laptop and of a phone, light and dark."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.extras, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the docs, strictly."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("sphinx is not installed: requirements-docs.lock")
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_their_window_and_load_nothing_from_elsewhere(
    site: Path, browser: Any, width: int, scheme: Any
) -> None:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    problems: list[str] = []
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith("file:") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    wide = []
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        # Tables, code and drawings scroll in their own boxes; the page itself must not.
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(str(path.relative_to(site)))
        hidden = page.evaluate(
            "[...document.querySelectorAll('svg.drawing text, h1, p')].filter(e => {"
            " const c = getComputedStyle(e); const color = e.tagName == 'text' ? c.fill : c.color;"
            " return color == getComputedStyle(document.body).backgroundColor; }).length"
        )
        assert not hidden, f"{path.name}: text in the color of its background"
    assert not wide and not problems
