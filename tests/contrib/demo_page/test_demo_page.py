"""`vlp demo` on versions in a real registry: which versions it uses, and what the page shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from PIL import ExifTags, Image
from small_project import make_model

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.demo_page.commands import _explain_missing, make_page
from vlp_models.contrib.demo_page.handlers import NO_PHOTO, Page, PhotoModel
from vlp_models.contrib.demo_page.photos import BOX_COLOR, IMPORTANT_COLOR, find_examples, open_photo, scale_for_page
from vlp_models.contrib.demo_page.version_card import make_version_card
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError
from vlp_models.models import FAMILIES
from vlp_models.params import EvaluateParams, ModelParams, Params
from vlp_models.registry import versions as registry
from vlp_models.registry.versions import download_bundle
from vlp_models.serving.bundle import write_content
from vlp_models.serving.predictor import Predictor


def test_a_task_that_params_yaml_does_not_train_is_not_to_be_promoted(params: Params) -> None:
    without = dataclasses.replace(params, finetune={})
    assert _explain_missing(without, "vqa") == ("params.yaml has no run of this task; `vlp use scenes-tasks` adds one.")
    assert _explain_missing(dataclasses.replace(without, data={}), "vqa") == "params.yaml has no run of this task."


def test_champions_are_used_and_a_missing_one_names_the_command(here: Workspace, params: Params, photo: Path) -> None:
    page = make_page(params, here)
    assert set(page.missing) == {"vqa"} and "`vlp promote vqa`" in page.missing["vqa"]
    result = page.caption(str(photo))
    assert result.caption and result.greedy and not result.problem
    assert result.overlay is not None and result.overlay.note.startswith("The thin boxes are the 16 regions")
    assert page.answer(str(photo), "what is it ?").problem == page.missing["vqa"] == page.version_title("vqa")
    found = page.find("a red square")
    scores = [float(label.partition(" ")[0]) for _, label in found.photos]
    assert len(scores) == 5 and scores == sorted(scores, reverse=True) and not found.problem
    assert not any("/" in label for _, label in found.photos), "the file's name alone: a label has little room"
    about = page.about("captioning")
    assert "vlp-captioning version 1 (champion; model tden)" in about and "run own-captioning" in about
    assert "scenes (synthetic scenes)" in about and "Limits:" in about
    assert "No other weights were used." in about
    assert "5 photos of the split test" in page.about("retrieval")


def _controls(page: Page) -> set[str]:
    """Return the ids that the page shows."""
    from vlp_models.contrib.demo_page.app import build

    return {box.elem_id for box in build(page).blocks.values() if getattr(box, "elem_id", None)}


@pytest.mark.extras
def test_the_page_has_controls_only_for_the_models_it_has(here: Workspace, params: Params) -> None:
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("gradio is not installed: requirements-photographs.lock")
    both = make_page(params, here)  # no model answers
    assert both.title == "Caption a photo and search photos by text"
    controls = _controls(both)
    assert {"examples", "photo", "picture", "caption", "wanted", "look", "about-captioning"} <= controls
    assert not {"question", "ask", "answers", "about-vqa"} & controls
    every = make_page(params, here, runs=["own-vqa"])
    assert every.title == "Caption a photo, ask about it and search photos by text"
    assert {"question", "ask", "answers", "wanted", "caption", "about-vqa"} <= _controls(every)
    answerer = dataclasses.replace(every, captioner=None, search=None)
    assert answerer.title == "Ask about a photo"
    assert not {"caption", "greedy", "wanted", "found", "about-retrieval"} & _controls(answerer)
    search = dataclasses.replace(every, captioner=None, answerer=None)
    assert search.title == "Search photos by text"
    assert not {"photo", "examples", "caption", "question"} & _controls(search) and "wanted" in _controls(search)
    assert "drawn scenes" in every.warning, "photographs would get meaningless results"


def test_examples_are_readable_photos_of_the_split(here: Workspace, params: Params) -> None:
    images = read_table("images", here.validated).to_pylist()
    own = {here.root / row["path"] for row in images if row["split"] == "val"}
    found = find_examples(here, "val")
    assert len(found) == len(own) and set(found) == own
    content = found[0].read_bytes()
    found[0].write_bytes(content[:100])
    try:
        assert set(find_examples(here, "val")) == own - {found[0]}
        assert len(find_examples(here, "val", 2)) <= 2
    finally:
        found[0].write_bytes(content)
    assert find_examples(Workspace(here.root / "elsewhere"), "val") == []


def test_run_replaces_the_champion(here: Workspace, params: Params, photo: Path) -> None:
    page = make_page(params, here, runs=["own-vqa"])
    assert not page.missing and "(run own-vqa; model tden)" in page.about("vqa")
    assert "accuracy 61.0 (50.0 to 70.0)" in page.about("vqa")
    answered = page.answer(str(photo), "  what is\nit ? ")
    assert len(answered.answers) == 5 and answered.overlay is not None and answered.overlay.note
    with pytest.raises(DataError, match="the run other has no registered version"):
        make_page(params, here, runs=["other"])


@pytest.mark.parametrize("neighbors", [0, 2])
def test_consensus_caption_is_shown_next_to_the_beams_own(
    here: Workspace, params: Params, photo: Path, neighbors: int
) -> None:
    page = make_page(params, here)
    assert page.caption_labels() == ("Caption", "") and not page.caption(str(photo)).beam
    assert page.captioner is not None
    plain, task_model = page.caption(str(photo)), page.captioner.predictor.task_model
    task_model.set_search(EvaluateParams(consensus_samples=9, consensus_neighbors=neighbors))
    task_model.prepare_search(here.shards, {})
    chosen = page.caption(str(photo))
    assert chosen.beam == plain.caption and chosen.greedy == plain.greedy
    assert chosen.caption not in ("", chosen.beam), "the consensus chose another caption"
    assert page.caption_labels() == ("Caption, best of 10", "Most likely caption")
    if importlib.util.find_spec("gradio") is not None:
        assert _boxes_filled(page, photo) == {
            "Caption, best of 10": chosen.caption,
            "Most likely caption": chosen.beam,
            "Caption by the most likely next word": chosen.greedy,
        }


def _boxes_filled(page: Page, photo: Path) -> dict[str, str]:
    """Return the texts that an uploaded photo fills into the page's captions, by their labels."""
    from vlp_models.contrib.demo_page.app import build

    blocks = build(page)
    describe = next(f for f in blocks.fns.values() if f.name == "describe")
    filled = zip(describe.outputs, describe.fn(str(photo)), strict=True)
    captions = [(str(box.label), update) for box, update in filled if "aption" in str(box.label or "")]
    return {label: update["value"] for label, update in captions if update["visible"]}


def test_problems_are_shown_as_sentences(here: Workspace, params: Params, photo: Path) -> None:
    page = make_page(params, here, runs=["own-vqa"])
    (here.root / "words.png").write_bytes(b"no image at all")
    assert page.caption(None).problem == page.answer(None, "what ?").problem == NO_PHOTO
    wrong = page.caption(str(here.root / "words.png"))
    assert wrong.problem.startswith("Words.png: not an image") and wrong.problem.endswith(".") and not wrong.caption
    assert page.answer(str(here.root / "words.png"), "what ?").problem == wrong.problem
    assert page.answer(str(photo), " ").problem == "Enter a question first."
    assert "301 characters" in page.answer(str(photo), "x" * 301).problem
    assert page.find("").problem.startswith("Describe the photo to find")
    assert page.answer(str(photo), "what \ud800 ?").problem == "The question is not valid Unicode."
    assert page.find("what \ud800").problem == "The query is not valid Unicode."
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


def test_equal_photos_in_other_formats_give_equal_results(here: Workspace, params: Params, photo: Path) -> None:
    """Each file is compared with its plain twin: RGB, 8 bits, upright."""
    page = make_page(params, here, runs=["own-vqa"])
    with Image.open(photo) as opened:
        plain = opened.convert("RGB")
    gray = np.asarray(plain.convert("L"))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # rotate clockwise by 90 degrees
    folder = here.root / "forms"
    folder.mkdir()
    plain.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    with Image.open(folder / "cmyk.jpg") as inks:
        assert inks.mode == "CMYK"
        inks.convert("RGB").save(folder / "cmyk-twin.png")
    Image.fromarray(gray.astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(gray).convert("RGB").save(folder / "deep-twin.png")
    plain.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png", exif=exif)
    plain.save(folder / "turned-twin.png")
    plain.transpose(Image.Transpose.ROTATE_90).save(folder / "not-turned.png")

    def results(name: str) -> tuple[Any, ...]:
        captioned, answered = page.caption(str(folder / name)), page.answer(str(folder / name), "what is it ?")
        assert captioned.caption and captioned.overlay is not None and not captioned.problem
        return captioned.caption, captioned.greedy, captioned.overlay.picture.tobytes(), tuple(answered.answers)

    for name in ("cmyk.jpg", "deep.png", "turned.png"):
        assert results(name) == results(f"{Path(name).stem}-twin.png"), name
    answers = [results(name)[-1] for name in ("cmyk.jpg", "deep.png", "turned.png", "not-turned.png")]
    assert len(set(answers)) == 4, "other images get other answers"


def test_pixel_model_shows_the_cells_of_a_grid(here: Workspace, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", "vlp_models.contrib.plugin_kit.scaffolds.family.model:Toy")
    small = ModelParams(family="toy", config={"side": 8, "patch": 4, "hidden": 16, "heads": 2})
    checkpoint = make_model(here, 7, "pixels", made=small, name="toy")
    shutil.copytree(checkpoint, here.root / "pixels" / "checkpoint")
    write_content(here.root / "pixels", [])
    card = make_version_card(name="vlp-vqa", version=2, selected_by="run pixels", tags={}, lineage=None, scores=[])
    model = PhotoModel(Predictor(here.root / "pixels"), card)
    answered = Page(answerer=model, missing={}).answer(str(photo), "what is it ?")
    assert answered.answers and answered.overlay is not None
    note = "This model reads pixels, not regions: the thin boxes are the cells of a 4 x 4 grid."
    assert answered.overlay.note.startswith(note)
    plain, drawn = np.asarray(scale_for_page(open_photo(photo))), np.asarray(answered.overlay.picture)
    assert drawn.shape == plain.shape == (704, 704, 3)
    lines = {tuple(drawn[176 * row + 88, 176 * column]) for row in range(4) for column in range(4)}
    assert lines <= {BOX_COLOR, IMPORTANT_COLOR} and np.array_equal(drawn[100:140, 100:140], plain[100:140, 100:140])


def test_version_without_files_leaves_the_others_on_the_page(
    here: Workspace, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(version: Any) -> Path:
        if version.name.endswith("captioning"):
            raise MlflowException("No such artifact")
        return download_bundle(version)

    monkeypatch.setattr(registry, "download_bundle", download)
    page = make_page(params, here)
    assert "cannot read its files (No such artifact)" in page.missing["captioning"]
    assert page.captioner is None and page.search is not None


def test_no_version_at_all_is_an_error(here: Workspace, params: Params) -> None:
    other = dataclasses.replace(params, tracking=dataclasses.replace(params.tracking, model_prefix="other"))
    with pytest.raises(
        DataError, match=r"no model to show\. captioning: No champion yet: run `vlp promote captioning`"
    ):
        make_page(other, here)
