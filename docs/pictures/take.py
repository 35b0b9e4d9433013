"""Take the screenshots of the docs: Prefect, MLflow, validation, the report, the demo page and
the labeling page, in headless Chromium.

    make pictures           (= python docs/pictures/take.py, in a project where `make demo` has run)

Starts a Prefect server, an MLflow server and the demo page on free loopback ports, runs the retrain flow once, takes
the screenshots and stops the servers. The page needs a champion (`vlp promote`) and Gradio; without Gradio its
screenshot stays as it is. So does that of the visual dictionary if the report has none (the preset soho makes one).
`--photo FILE` takes only the page's screenshot of a photograph, with a champion trained on photographs. The page shows
photos of the test split as examples: if they must not be published, move them out of data/raw first. Needs Chromium
(Debian's package; `--chromium` names another) and playwright, which `make pictures` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SIZE = {"width": 1280, "height": 860}
HERO = 900  # height of the picture in README, in pixels
READY = 90.0  # seconds within which a server must respond


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(
    command: list[str], health: str, environment: dict[str, str], log: Path, folder: Path = ROOT
) -> Iterator[None]:
    """Run a server during the block.

    Raises:
        TimeoutError: it does not respond within `READY` seconds.
    """
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        deadline = time.monotonic() + READY
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=2):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{command[0]} does not respond; its log: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)


def call(url: str, body: dict[str, Any]) -> Any:
    """Post JSON and return the parsed response."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


class Camera:
    """Headless Chromium."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def take(
        self,
        url: str,
        name: str,
        *,
        clicks: Sequence[str] = (),
        fill: Mapping[str, str] | None = None,
        scroll_to: str = "",
        settle: float = 3.0,
        act: Callable[[Any], None] | None = None,
        whole: bool = False,
    ) -> None:
        """Open a page and write its screenshot to NAME.png.

        Args:
            clicks: selectors to click first, if they exist.
            fill: selector -> text to type there.
            settle: seconds to let the page render.
            act: called with the page before the screenshot is taken.
            whole: include the part below the window.
        """
        page = self._browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(url, wait_until="load")
        page.wait_for_timeout(1000 * settle)
        for selector in clicks:
            if page.locator(selector).count():
                page.locator(selector).first.click()
                page.wait_for_timeout(1000 * settle)
        for selector, text in (fill or {}).items():
            page.locator(selector).first.fill(text)
            page.wait_for_timeout(1000 * settle)
        if scroll_to:
            page.locator(scroll_to).first.evaluate("element => element.scrollIntoView()")
            page.wait_for_timeout(500)
        if act is not None:
            act(page)
        page.screenshot(path=str(HERE / f"{name}.png"), full_page=whole)
        page.close()
        print(f"docs/pictures/{name}.png  {(HERE / f'{name}.png').stat().st_size // 1024} KB", flush=True)


def prefect_pages(camera: Camera, home: Path) -> None:
    """Run the retrain flow against a Prefect server and take its page."""
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    environment = {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_API_URL": api,  # for the page in the browser
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with server(command, f"{api}/health", environment, home / "prefect.log"):
        run = "from flows.retrain import retrain; retrain()"  # as a worker does, with its server
        subprocess.run(
            [sys.executable, "-c", run],
            cwd=ROOT,
            env={**environment, "PREFECT_API_URL": api},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        runs = call(f"{api}/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
        camera.take(f"http://127.0.0.1:{port}/runs/flow-run/{runs[0]['id']}", "prefect-flow", settle=6)


def mlflow_page(camera: Camera, home: Path) -> None:
    """Take MLflow's comparison of the runs, from a copy of the database."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    store = home / "mlflow.db"
    shutil.copy(ROOT / "mlflow.db", store)  # a server writes to its store
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{store}"]
    with server(command, f"{base}/health", environment, home / "mlflow.log"):
        experiments = call(f"{base}/api/2.0/mlflow/experiments/search", {"max_results": 100})["experiments"]
        ids = [e["experiment_id"] for e in experiments if e["name"] != "Default"]
        address = f"{base}/#/experiments/{ids[0]}/runs?compareRunsMode=CHART&workflowType=machine_learning"
        camera.take(
            address,
            "mlflow-compare",
            clicks=('button[aria-label*="lose"]',),
            fill={'[placeholder="Search metric charts"]': "^(loss|captioning_accuracy|samples_per_s)$"},
            settle=5,
        )


def validation_page(camera: Camera) -> None:
    """Take the top of the validation page."""
    camera.take((ROOT / "reports" / "validation.html").as_uri(), "validation", settle=1)
    _shrink(HERE / "validation.png")


def dictionary(camera: Camera) -> None:
    """Take the report's visual dictionary, if a SOHO was pretrained in this project."""
    report = ROOT / "reports" / "index.html"
    if "Patches per code of the visual dictionary" not in report.read_text(encoding="utf-8"):
        print("docs/pictures/dictionary.png  unchanged: the report has no dictionary", file=sys.stderr)
        return
    camera.take(report.as_uri(), "dictionary", scroll_to="h2:has-text('visual dictionary')", settle=1)
    _shrink(HERE / "dictionary.png", 256)


def demo_page(camera: Camera, home: Path) -> None:
    """Take the page with a scene of the test split: its caption, an answer and, if a model is registered, a search.

    hero.png, for README, is its top.
    """
    from vlp_models.data.tables import read_table

    images = read_table("images", ROOT / "data" / "validated").to_pylist()
    scene = next(row["path"] for row in images if row["split"] == "test")
    registered = json.loads((ROOT / "reports" / "registered.json").read_text(encoding="utf-8"))
    wanted = "a red star and a blue square" if "retrieval" in registered else ""
    _page(camera, home, "page", ROOT / scene, "what color is the triangle?", wanted)
    from PIL import Image

    with Image.open(HERE / "page.png") as page:
        page.crop((0, 0, page.width, min(page.height, HERO))).save(HERE / "hero.png", optimize=True)


def photo_page(camera: Camera, home: Path, photo: Path) -> None:
    """Take the page with a photograph, captioned by a champion trained on photographs."""
    _page(camera, home, "page-photo", photo, "", "")


def _page(camera: Camera, home: Path, name: str, photo: Path, question: str, wanted: str) -> None:
    """Take the page with `photo`. question, wanted: empty if no champion answers or searches."""
    if importlib.util.find_spec("gradio") is None:
        print(f"docs/pictures/{name}.png  unchanged: gradio is not installed", file=sys.stderr)
        return
    port = free_port()
    base = f"http://127.0.0.1:{port}"

    def use(page: Any) -> None:
        page.set_default_timeout(1000 * READY)
        page.set_input_files("#photo input[type=file]", str(photo))
        page.wait_for_function("document.querySelector('#caption textarea, #caption input')?.value")
        if question:
            page.locator("#question textarea, #question input").fill(question)
            page.locator("#ask").click()
            page.wait_for_function("document.querySelector('#answers')?.innerText.includes('%')")
        if wanted:
            page.locator("#wanted textarea, #wanted input").fill(wanted)
            page.locator("#look").click()
            page.locator("#found img").first.wait_for()
        page.wait_for_timeout(2000)

    command = [sys.executable, "-m", "vlp_models.cli.main", "demo", "--port", str(port)]
    with server(command, base, dict(os.environ), home / "page.log"):
        camera.take(base, name, settle=2, act=use, whole=True)
    _shrink(HERE / f"{name}.png", 256)


def label_page(camera: Camera, home: Path) -> None:
    """Take the labeling page of a project of synthetic web scenes, 48 of 120 captioned."""
    project, name = home / "labels", "pairs"
    project.mkdir()
    shutil.copy(ROOT / "params.yaml", project)
    data = f"data.{name}={{format: pairs, root: data/raw/{name}, pairs: pairs.csv}}"
    generate = f"generate.{name}={{generator: web, seed: 9, train: 120, val: 0, test: 0, side: 256}}"
    changes = [data, generate, "features.source=grid", "detector.source=none"]
    run = [sys.executable, "-m", "vlp_models.cli.main"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments in (
        ["use", *(part for change in changes for part in ("--set", change))],
        ["stage", "generate", name],
    ):
        subprocess.run([*run, *arguments], cwd=project, env=environment, check=True, stdout=subprocess.DEVNULL)
    listing = project / "data/raw" / name / "pairs.csv"
    listing.write_text("".join(listing.read_text().splitlines(keepends=True)[:49]))
    token = project / ".work/label/token"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_text(secret := secrets.token_urlsafe(32))
    # The page's address sets a cookie, without which the server refuses a request.
    urllib.request.install_opener(urllib.request.build_opener(urllib.request.HTTPCookieProcessor()))
    port = free_port()
    address = f"http://127.0.0.1:{port}/?token={secret}"

    def use(page: Any) -> None:
        page.locator("#notes .gain").wait_for(timeout=1000 * READY)
        page.reload()
        page.wait_for_timeout(2000)
        page.keyboard.press("Enter")
        page.wait_for_timeout(2000)

    with server(
        [*run, "label", name, "--port", str(port), "--by", "Ann"], address, environment, home / "label.log", project
    ):
        camera.take(address, "label", settle=1, act=use)
    _shrink(HERE / "label.png", 256)


def _shrink(picture: Path, colors: int = 128) -> None:
    """Reduce a screenshot to this many colors; 128 are enough for text and drawings."""
    from PIL import Image

    how = Image.Quantize.MAXCOVERAGE if colors < 256 else Image.Quantize.MEDIANCUT  # the former posterizes noise
    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(colors, how)
    small.save(picture, optimize=True)
    print(f"docs/pictures/{picture.name}  {picture.stat().st_size // 1024} KB after shrinking", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    parser.add_argument(
        "--only", choices=("prefect", "mlflow", "validation", "report", "dictionary", "page", "label"), default=None
    )
    parser.add_argument("--photo", type=Path, default=None, help="take only page-photo.png, with this photograph")
    arguments = parser.parse_args()
    for needed in ("reports/index.html", "reports/validation.html", "mlflow.db"):
        if not (ROOT / needed).exists():
            sys.exit(f"{needed}: not found; run `make demo` first")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("playwright is not installed: run `make pictures`")

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        home = Path(folder)
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        flags += ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync"]
        browser = driver.chromium.launch(executable_path=arguments.chromium, args=flags)
        camera = Camera(browser)
        reports = (ROOT / "reports").as_uri()
        takers = {
            "report": lambda: camera.take(f"{reports}/index.html", "report", settle=1),
            "dictionary": lambda: dictionary(camera),
            "validation": lambda: validation_page(camera),
            "mlflow": lambda: mlflow_page(camera, home),
            "prefect": lambda: prefect_pages(camera, home),
            "page": lambda: demo_page(camera, home),
            "label": lambda: label_page(camera, home),
        }
        if arguments.photo is not None:
            takers = {"page": lambda: photo_page(camera, home, arguments.photo)}
        for name, taker in takers.items():
            if arguments.only in (None, name):
                taker()
        browser.close()


if __name__ == "__main__":
    main()
