"""`vlp demo` on versions in a real registry: what it picks, and what it says."""

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

from vlp_models.cli.demo import make_page
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError
from vlp_models.models import FAMILIES
from vlp_models.params import EvaluateParams, ModelParams, Params
from vlp_models.registry import versions as registry
from vlp_models.registry.versions import download_bundle
from vlp_models.serving.page.handlers import NO_PHOTO, Eye, Page
from vlp_models.serving.page.photos import GIVEN, WEIGHED, open_photo, shown
from vlp_models.serving.page.version_card import origin
from vlp_models.serving.predictor import Predictor


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
    task_model.set_search(EvaluateParams(consensus_samples=9, consensus_neighbors=neighbours))
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
        return download_bundle(version)

    monkeypatch.setattr(registry, "download_bundle", gone)
    page = make_page(params, here)
    assert "its files can't be had (No such artifact)" in page.missing["captioning"]
    assert page.captioner is None and page.search is not None


def test_without_any_version_there_is_no_page(here: Workspace, params: Params) -> None:
    other = dataclasses.replace(params, tracking=dataclasses.replace(params.tracking, model_prefix="other"))
    with pytest.raises(
        DataError, match=r"no model to show\. captioning: No champion yet: run `vlp promote captioning`"
    ):
        make_page(other, here)
