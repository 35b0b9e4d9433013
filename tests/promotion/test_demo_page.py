"""`vlp demo` on versions in a real registry: what it picks, what it says, and the page in a browser."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
import pytest
import requests
import yaml
from mlflow.exceptions import MlflowException
from numpy.typing import NDArray
from PIL import ExifTags, Image
from small_project import SIZES, make_data, make_model
from toy_registry import toy_items, write_evaluation

from vlp_models.data.tables import read_table
from vlp_models.demo import make_page
from vlp_models.errors import DataError, ParamsError
from vlp_models.models import FAMILIES
from vlp_models.params import EvaluateParams, ModelParams, Params, WorldParams, load_params, to_plain
from vlp_models.serving.bundle import content_of, write_bundle
from vlp_models.serving.images import MAX_BYTES
from vlp_models.serving.page import regions
from vlp_models.serving.page.handlers import NO_PHOTO, Eye, Page, Seen
from vlp_models.serving.page.origin import origin
from vlp_models.serving.page.photo import GIVEN, WEIGHED, open_photo, shown
from vlp_models.serving.predictor import Predictor
from vlp_models.tracking import registry
from vlp_models.tracking.client import connect
from vlp_models.tracking.registry import CHAMPION, Registered, bundle_of, model_name, register
from vlp_models.workspace.paths import Workspace

ROOT = Path(__file__).parents[2]
TASKS = ("captioning", "vqa", "retrieval")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def params() -> Params:
    loaded = load_params(ROOT / "params.yaml")
    world = WorldParams(world="objects", seed=3, train=6, val=4, test=5, side=64)
    return dataclasses.replace(
        loaded,
        generate={"scenes": world},
        models={"tden": ModelParams(family="tden", config=SIZES)},
        features=dataclasses.replace(loaded.features, source="grid"),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Workspace:
    """Untrained models of grid cells, registered: a champion for captioning and for retrieval, none for vqa."""
    workspace = Workspace(tmp_path_factory.mktemp("project"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        make_data(params, workspace)
        workspace.detector.mkdir()  # cells of a grid need none
        client = connect(params.tracking, workspace.root)
        for seed, task in enumerate(TASKS):
            checkpoint = make_model(workspace, seed, f"own.{task}", task=task)
            version = registered(client, params, workspace, task, checkpoint)
            if task != "vqa":
                client.set_registered_model_alias(version.name, CHAMPION, str(version.version))
    return workspace


def registered(client: Any, params: Params, workspace: Workspace, task: str, checkpoint: Path) -> Registered:
    bundle = workspace.root / "bundles" / task / "bundle"
    bundle.mkdir(parents=True)
    write_bundle(bundle, checkpoint=checkpoint, detector=workspace.detector, features=to_plain(params.features))
    run = f"own.{task}"
    evaluation = write_evaluation(bundle.parent / "evaluation", [toy_items([1.0] * 5, metric="accuracy")])
    score = {"metric": "accuracy", "value": 61.0, "low": 50.0, "high": 70.0, "dataset": "scenes", "split": "test"}
    (evaluation / "scores.json").write_text(json.dumps([score | {"task": task}]))
    return register(
        client,
        name=model_name(params.tracking, task),
        task=task,
        run=run,
        bundle=bundle,
        content=content_of(bundle),
        metrics={},
        tags={"run": run, "model": "tden", "family": "tden", "task": task},
        card="",
        evaluation=evaluation,
        predicted={},
        inputs=[],
        trained_in="",
        lineage={"params": {"data": {"scenes": {}}, "generate": {"scenes": {}}}},
        files={},
    )


@pytest.fixture
def here(made: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(made.root)
    return made


@pytest.fixture
def photo(here: Workspace) -> Path:
    return here.root / read_table("images", here.validated)["path"][0].as_py()


def test_champions_answer_and_where_there_is_none_the_command_is_named(
    here: Workspace, params: Params, photo: Path
) -> None:
    page = make_page(params, here)
    assert set(page.missing) == {"vqa"} and "`vlp promote vqa`" in page.missing["vqa"]
    said = page.caption(str(photo))
    assert said.caption and said.greedy and not said.problem
    assert said.seen is not None and said.seen.note.startswith("The thin boxes are the 16 regions")
    assert page.answer(str(photo), "what is it ?").problem == page.missing["vqa"] == page.answers("vqa")
    found = page.find("a red square")
    scores = [float(label.partition(" ")[0]) for _, label in found.photos]
    assert len(scores) == 5 and scores == sorted(scores, reverse=True) and not found.problem
    about = page.about("captioning")
    assert "vlp-captioning version 1 (champion; model tden)" in about and "run own.captioning" in about
    assert "scenes (generated scenes)" in about and "What it can't do:" in about
    assert "What it began with is not on record." in about and "Its regions are plain cells of a grid" in about
    assert "5 photos of the split test" in page.about("retrieval")


def test_a_run_answers_in_the_champions_place(here: Workspace, params: Params, photo: Path) -> None:
    page = make_page(params, here, runs=["own.vqa"])
    assert not page.missing and "(run own.vqa; model tden)" in page.about("vqa")
    assert "accuracy 61.0 (50.0 to 70.0)" in page.about("vqa")
    answered = page.answer(str(photo), "  what is\nit ? ")
    assert len(answered.answers) == 5 and answered.seen is not None and answered.seen.note
    with pytest.raises(DataError, match="the run other has no registered version"):
        make_page(params, here, runs=["other"])


@pytest.mark.parametrize(("neighbours", "like"), [(0, "the others"), (2, "those of similar photos")])
def test_a_chosen_caption_is_called_so_and_the_beams_own_stands_beside_it(
    here: Workspace, params: Params, photo: Path, neighbours: int, like: str
) -> None:
    page = make_page(params, here)
    assert page.caption_labels() == ("Caption, the best of a beam of 3", "") and not page.caption(str(photo)).beam
    assert page.captioner is not None
    plain, task_model = page.caption(str(photo)), page.captioner.predictor.task_model
    task_model.set_search(EvaluateParams(consensus=9, consensus_neighbours=neighbours))
    task_model.prepare_search(here.shards, {})
    chosen = page.caption(str(photo))
    assert chosen.beam == plain.caption and chosen.greedy == plain.greedy
    assert chosen.caption not in ("", chosen.beam), "another than the beam's was chosen"
    said = f"Caption, of the beam's and 9 drawn the one most like {like}"
    assert page.caption_labels() == (said, "Caption, the best of a beam of 3")
    if importlib.util.find_spec("gradio") is not None:
        assert _boxes_filled(page, photo) == {
            f"{said} (vlp-captioning version 1 (champion; model tden))": chosen.caption,
            "Caption, the best of a beam of 3": chosen.beam,
            "Caption, word by word (greedy)": chosen.greedy,
        }


def _boxes_filled(page: Page, photo: Path) -> dict[str, str]:
    """What a dropped photo writes into the page's captions, by their labels."""
    from vlp_models.serving.page.app import build

    blocks = build(page)
    dropped = next(f for f in blocks.fns.values() if f.name == "describe")
    filled = zip(dropped.outputs, dropped.fn(str(photo)), strict=True)
    return {str(box.label): text for box, text in filled if str(box.label).startswith("Caption") and box.visible}


def test_what_goes_wrong_is_said_in_a_sentence(here: Workspace, params: Params, photo: Path) -> None:
    page = make_page(params, here, runs=["own.vqa"])
    (here.root / "words.png").write_bytes(b"no image at all")
    assert page.caption(None).problem == page.answer(None, "what ?").problem == NO_PHOTO
    wrong = page.caption(str(here.root / "words.png"))
    assert wrong.problem.startswith("Words.png: not an image") and wrong.problem.endswith(".") and not wrong.caption
    assert page.answer(str(here.root / "words.png"), "what ?").problem == wrong.problem
    assert page.answer(str(photo), " ").problem == "Write a question first."
    assert "301 characters" in page.answer(str(photo), "x" * 301).problem
    assert page.find("").problem.startswith("Write what the photo shows")
    Path(photo).rename(photo.with_suffix(".away"))
    try:
        train = make_page(params, here, split="train").find("a cup")
        val = make_page(params, here, split="val").find("a cup")
        test = page.find("a cup")
    finally:
        photo.with_suffix(".away").rename(photo)
    assert sorted(len(found.photos) for found in (train, val, test)) in ([3, 5, 6], [4, 4, 6], [4, 5, 5])
    assert [bool(found.problem) for found in (train, val, test)].count(True) == 1
    assert "no such file" in make_page(params, here, split="other").missing["retrieval"]


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_a_dot_and_an_animation_are_refused_where_the_caption_would_stand(
    here: Workspace, params: Params, kind: str
) -> None:
    page, name = make_page(params, here, runs=["own.vqa"]), f"moving.{kind.lower()}"
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue", "white")]
    frames[0].save(here.root / name, kind, save_all=True, append_images=frames[1:])
    Image.new("RGB", (1, 1)).save(here.root / f"dot.{kind.lower()}", kind)
    for file, said in (
        (name, f"{name.capitalize()}: an animation; save the one picture of it that is meant as a file of its own."),
        (f"dot.{kind.lower()}", f"Dot.{kind.lower()}: 1x1 pixels; a picture has at least 4 a side."),
    ):
        captioned = page.caption(str(here.root / file))
        assert captioned.problem == said and not captioned.caption and captioned.seen is None
        assert page.answer(str(here.root / file), "what ?").problem == said


def test_a_photo_says_the_same_in_whatever_form_it_comes(here: Workspace, params: Params, photo: Path) -> None:
    """Each file beside its plain twin: RGB, 8 bits, the right way up."""
    page = make_page(params, here, runs=["own.vqa"])
    with Image.open(photo) as opened:
        plain = opened.convert("RGB")
    grey = np.asarray(plain.convert("L"))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned clockwise by a quarter
    folder = here.root / "forms"
    folder.mkdir()
    plain.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    with Image.open(folder / "cmyk.jpg") as inks:
        assert inks.mode == "CMYK"
        inks.convert("RGB").save(folder / "cmyk-twin.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(grey).convert("RGB").save(folder / "deep-twin.png")
    plain.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=exif)
    plain.save(folder / "turned-twin.png")
    plain.transpose(Image.Transpose.ROTATE_90).save(folder / "not-turned.png")

    def said(name: str) -> tuple[Any, ...]:
        captioned, answered = page.caption(str(folder / name)), page.answer(str(folder / name), "what is it ?")
        assert captioned.caption and captioned.seen is not None and not captioned.problem
        return captioned.caption, captioned.greedy, captioned.seen.picture.tobytes(), tuple(answered.answers)

    for name in ("cmyk.jpg", "deep.png", "turned.png"):
        assert said(name) == said(f"{Path(name).stem}-twin.png"), name
    likeliest = [said(name)[-1] for name in ("cmyk.jpg", "deep.png", "turned.png", "not-turned.png")]
    assert len(set(likeliest)) == 4, "another picture is answered otherwise"


def test_a_model_of_pixels_has_cells_of_a_grid(here: Workspace, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", "toy_model.model:Toy")
    small = ModelParams(family="toy", config={"side": 8, "patch": 4, "hidden": 16, "heads": 2})
    checkpoint = make_model(here, 7, "pixels", made=small, name="toy")
    shutil.copytree(checkpoint, here.root / "pixels" / "checkpoint")
    made_by = origin(name="vlp-vqa", version=2, chosen="run pixels", tags={}, lineage=None, scores=[])
    eye = Eye(Predictor(here.root / "pixels"), made_by)
    answered = Page(answerer=eye, missing={}).answer(str(photo), "what is it ?")
    assert answered.answers and answered.seen is not None
    told = "This model reads pixels, no regions. The thin boxes are the cells of a grid of 4 x 4, not objects."
    assert answered.seen.note.startswith(told)
    plain, drawn = np.asarray(shown(open_photo(photo))), np.asarray(answered.seen.picture)
    assert drawn.shape == plain.shape == (704, 704, 3)
    lines = {tuple(drawn[176 * row + 88, 176 * column]) for row in range(4) for column in range(4)}
    assert lines <= {GIVEN, WEIGHED} and np.array_equal(drawn[100:140, 100:140], plain[100:140, 100:140])


def test_a_version_whose_files_are_gone_leaves_the_others_on_the_page(
    here: Workspace, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(version: Any) -> Path:
        if version.name.endswith("captioning"):
            raise MlflowException("No such artifact")
        return bundle_of(version)

    monkeypatch.setattr(registry, "bundle_of", gone)
    page = make_page(params, here)
    assert "its files can't be had (No such artifact)" in page.missing["captioning"]
    assert page.captioner is None and page.search is not None


def test_without_any_version_there_is_no_page(here: Workspace, params: Params) -> None:
    other = dataclasses.replace(params, tracking=dataclasses.replace(params.tracking, model_prefix="other"))
    with pytest.raises(DataError, match=r"nothing to show\. captioning: No champion yet: `vlp promote captioning`"):
        make_page(other, here)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _browser() -> Any:
    """Headless Chromium, or a skip with the reason."""
    for package in ("gradio", "playwright"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: requirements-photographs.lock, requirements-pictures.lock")
    if CHROMIUM is None:
        pytest.skip("Chromium is not on this machine")
    from playwright.sync_api import sync_playwright

    return sync_playwright()


@pytest.fixture
def browser() -> Iterator[Any]:
    with _browser() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        flags += ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync"]
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


def _pixels(picture: Image.Image | bytes) -> NDArray[np.int16]:
    """[H, W, 3] of 0 to 255, which can be subtracted."""
    opened = picture if isinstance(picture, Image.Image) else Image.open(io.BytesIO(picture))
    return np.asarray(opened.convert("RGB")).astype(np.int16)


def _see_boxes(tab: Any, seen: Seen | None, photo: Path, screen: Path) -> None:
    """The picture on the page is `seen`: the uploaded photo but for the edges of its 16 boxes, which are grid cells."""
    assert seen is not None
    element, deadline = tab.locator("#picture img"), time.monotonic() + 60
    while True:  # its file, as the page has it
        element.wait_for()
        sent = _pixels(tab.request.get(urljoin(tab.url, element.get_attribute("src"))).body())
        if np.array_equal(sent, _pixels(seen.picture)) or time.monotonic() > deadline:
            break
        tab.wait_for_timeout(200)
    assert np.array_equal(sent, _pixels(seen.picture)), "the picture on the page is another"
    plain = _pixels(shown(open_photo(photo)))
    differs, side = (sent != plain).any(2), 704 // 4
    assert sent.shape == (704, 704, 3)
    for line in range(0, 704, side):  # left and upper edges
        assert differs[line].mean() > 0.95 and differs[:, line].mean() > 0.95
    inside = np.arange(704) % side
    inside_S = (inside > 40) & (inside < side - 10)  # where no edge is and no number
    assert not differs[np.ix_(inside_S, inside_S)].any()
    assert (sent == WEIGHED).all(2).sum() > 3 * side, "one is thick"

    tab.wait_for_function("(e => e.complete && e.naturalWidth == 704)(document.querySelector('#picture img'))")
    element.screenshot(path=str(screen))  # and as one sees it: fitted into the element
    with Image.open(screen) as opened:
        edge = min(opened.size)
        left, top = (opened.width - edge) // 2, (opened.height - edge) // 2
        found = _pixels(opened.crop((left, top, left + edge, top + edge)))
    small = [_pixels(Image.fromarray(x.astype(np.uint8)).resize((edge, edge))) for x in (sent, plain)]
    with_boxes, without = (float(np.abs(found - one).mean()) for one in small)
    assert with_boxes < without / 2, (with_boxes, without)


@pytest.mark.photographs
def test_the_page_in_a_browser(
    here: Workspace, params: Params, photo: Path, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlp_models.serving.page.app import serving

    monkeypatch.setattr(regions, "NEGLIGIBLE", 0.0)  # untrained models hardly care
    page: Page = make_page(params, here, runs=["own.vqa"])
    expected, answered = page.caption(str(photo)), page.answer(str(photo), "what is it ?")
    assert expected.seen is not None and "thick ones matter most" in expected.seen.note
    broken = here.root / "broken.png"
    broken.write_bytes(photo.read_bytes()[:200])
    port, elsewhere = _free_port(), []
    with serving(page, host="127.0.0.1", port=port) as address:
        assert address == f"http://127.0.0.1:{port}"
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        tab = browser.new_page()
        tab.set_default_timeout(120_000)
        tab.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else elsewhere.append(r.url))
        tab.goto(address)
        tab.set_input_files("#photo input[type=file]", str(photo))
        tab.wait_for_function("document.querySelector('#caption textarea, #caption input')?.value")
        assert tab.locator("#caption textarea, #caption input").input_value() == expected.caption
        assert tab.locator("#greedy textarea, #greedy input").input_value() == expected.greedy
        assert "vlp-captioning version 1 (champion; model tden)" in tab.locator("#caption").inner_text()
        assert tab.locator("#note textarea, #note input").input_value() == expected.seen.note
        _see_boxes(tab, expected.seen, photo, tmp_path / "captioned.png")
        tab.locator("#question textarea, #question input").fill("what is it ?")
        tab.locator("#ask").click()
        tab.wait_for_function("document.querySelector('#answers')?.innerText.includes('%')")
        assert "vlp-vqa version 1 (run own.vqa; model tden)" in tab.locator("#answers").inner_text()
        _see_boxes(tab, answered.seen, photo, tmp_path / "answered.png")
        tab.locator("#wanted textarea, #wanted input").fill("a red square")
        tab.locator("#look").click()
        tab.locator("#found img").first.wait_for()
        assert "vlp-captioning version 1" in tab.locator("#about-captioning").inner_text()
        assert list(folder.rglob(photo.name)), "what is dropped lies in the page's own folder"

        tab.locator("#photo button[aria-label]").first.click()  # takes it away
        tab.set_input_files("#photo input[type=file]", str(broken))
        tab.locator("#problem textarea, #problem input").wait_for()
        problem = tab.locator("#problem textarea, #problem input").input_value()
        assert problem.startswith("Broken.png: damaged or cut short")
        with (
            pytest.raises(ParamsError, match=f"port {port}: .*choose another"),
            serving(page, host="127.0.0.1", port=port),
        ):
            pass
    assert not folder.exists() and not elsewhere, "the browser asked nobody but this server"


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.photographs
def test_without_a_host_it_listens_on_this_machine_alone(here: Workspace, params: Params, tmp_path: Path) -> None:
    """The command itself. On Linux 127.0.0.2 is this machine as well: who listens everywhere answers there, too."""
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("gradio is not installed: requirements-photographs.lock")
    (here.root / "params.yaml").write_text(yaml.safe_dump(to_plain(params)), encoding="utf-8")
    port, said = _free_port(), tmp_path / "stderr"
    command = [sys.executable, "-m", "vlp_models.cli", "demo", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with said.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=here.root, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        lines = list(itertools.takewhile(lambda line: not line.startswith("the page is at"), process.stdout))
        assert process.poll() is None, f"{lines} {said.read_text()}"
        assert [_answers(address, port) for address in ("127.0.0.1", "127.0.0.2", "::1")] == [True, False, False]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.photographs
def test_an_upload_that_is_too_large_is_turned_away_and_leaves_nothing(here: Workspace, params: Params) -> None:
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("gradio is not installed: requirements-photographs.lock")
    from vlp_models.serving.page.app import serving

    with serving(make_page(params, here, runs=["own.vqa"]), host="127.0.0.1", port=_free_port()) as address:
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        for size, status in ((MAX_BYTES // 2, 200), (MAX_BYTES + 1, 413)):
            sent = requests.post(f"{address}/gradio_api/upload", files={"files": ("a.png", bytes(size))}, timeout=60)
            assert sent.status_code == status
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        assert sizes == [MAX_BYTES // 2]
