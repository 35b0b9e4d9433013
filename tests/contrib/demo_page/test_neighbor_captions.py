"""Without a champion that is better, `vlp caption` and the page show the nearest-neighbor caption, and state it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from page_project import ROOT
from test_demo_page import _controls
from toy_registry import toy_items, write_evaluation

from vlp_models.cli.predict import caption
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.demo_page.commands import make_page
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.evaluation.predict import NearestTrainImages
from vlp_models.params import Params
from vlp_models.registry.client import connect
from vlp_models.registry.evaluations import CURRENT_EVALUATION, get_run_id, log_evaluation
from vlp_models.registry.serving_cache import refresh_serving_cache
from vlp_models.registry.versions import CHALLENGER, CHAMPION
from vlp_models.tasks.captioning import NEAREST, _baseline_captions
from vlp_models.tasks.scoring import EvalContext

NAME = "vlp-captioning"
NOTE = (
    "No champion yet: this is the caption that the 30 most similar training photos agree on (CIDEr 15.6 on scenes "
    "test; the trained model has 13.0)."
)


@pytest.fixture
def challenge(here: Workspace, params: Params, tmp_path: Path) -> Iterator[Callable[[float], None]]:
    """Return a function that makes the captioner a challenger with this CIDEr, where the neighbors have 15.6."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["features"]["source"], raw["detector"]["source"] = "grid", "none"
    (here.root / "params.yaml").write_text(yaml.safe_dump(raw))
    client = connect(params.tracking, here.root)

    def score(cider: float) -> None:
        items = [toy_items([1.0] * 5, metric="CIDEr")]
        evaluation = write_evaluation(tmp_path / f"{cider}", items)
        record = {
            "task": "captioning",
            "metric": "CIDEr",
            "dataset": "scenes",
            "split": "test",
            "value": cider,
            "n": 300,
        }
        record |= {"baselines": {NEAREST: 15.6, "constant caption": 3.0}, "low": None, "high": None}
        (evaluation / "scores.json").write_text(json.dumps([record]))
        folder = log_evaluation(client, get_run_id(client.get_model_version(NAME, "1")), evaluation)
        client.set_model_version_tag(NAME, "1", CURRENT_EVALUATION, folder)
        client.set_registered_model_alias(NAME, CHALLENGER, "1")
        client.delete_registered_model_alias(NAME, CHAMPION)
        refresh_serving_cache(client, params.tracking, here.root, [])  # as registration does

    yield score
    client.set_registered_model_alias(NAME, CHAMPION, "1")


@pytest.fixture
def expected(here: Workspace, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return file -> caption of the test images, as the evaluation's baseline has them; of one of six neighbors."""
    for module in ("serving.neighbors", "tasks.captioning"):
        monkeypatch.setattr(f"vlp_models.{module}.NEIGHBORS", 1)
    rows = [row for row in read_table("images", here.validated).to_pylist() if row["split"] == "test"]
    nearest = partial(NearestTrainImages(here.shards, "scenes").find, "test")
    context = EvalContext(source="scenes", validated=here.validated, nearest=nearest)
    captions = _baseline_captions([], [row["image_id"] for row in rows], context)[NEAREST]
    found = {row["path"]: captions[row["image_id"]] for row in rows}
    assert len(set(found.values())) > 1
    return found


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], str]:
    """Return file -> caption, and the last line of stderr."""
    out, err = capsys.readouterr()
    return dict(line.split("\t") for line in out.splitlines()), (err.splitlines() or [""])[-1]


def test_the_better_baseline_captions_until_there_is_a_champion(
    challenge: Callable[[float], None], expected: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    challenge(13.0)
    caption(list(expected))
    assert printed(capsys) == (expected, NOTE)
    caption(list(expected), model=f"{NAME}@challenger")
    models_own, note = printed(capsys)
    assert models_own != expected and "nearest" not in note

    challenge(16.0)  # better than the neighbors, and not yet promoted
    caption(list(expected))
    assert printed(capsys)[0] == models_own
    caption(list(expected), nearest_neighbor=True)
    captions, note = printed(capsys)
    assert captions == expected
    assert note.startswith("Nearest-neighbor caption: the caption that the 30 most similar training photos agree on;")


def test_a_champion_captions_unless_the_neighbors_are_requested(
    challenge: Callable[[float], None], here: Workspace, params: Params, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    challenge(13.0)
    connect(params.tracking, here.root).set_registered_model_alias(NAME, CHAMPION, "1")  # promoted with --force
    caption([str(photo)])
    assert "No champion" not in printed(capsys)[1]
    with pytest.raises(ParamsError, match="--model or --nearest-neighbor, not both"):
        caption([str(photo)], model=NAME, nearest_neighbor=True)
    with pytest.raises(DataError, match=r"nowhere\.png: file not found"):
        caption(["nowhere.png"], nearest_neighbor=True)


def test_without_shards_the_error_names_the_trained_model(
    challenge: Callable[[float], None], here: Workspace, photo: Path
) -> None:
    challenge(13.0)
    aside = here.shards.rename(here.root / "aside")
    try:
        with pytest.raises(DataError, match=r"data/shards: not found.*`--model vlp-captioning@challenger` uses"):
            caption([str(photo)])
    finally:
        aside.rename(here.shards)


def test_the_page_shows_the_caption_of_similar_photos_and_states_it(
    challenge: Callable[[float], None], here: Workspace, params: Params, expected: dict[str, str]
) -> None:
    challenge(13.0)
    page = make_page(params, here)
    training_captions = set(read_table("captions", here.validated).column("text").to_pylist())
    assert page.captioner is None and page.title == "Caption a photo and search photos by text"
    assert page.missing["captioning"] == page.version_title("captioning") == NOTE and NOTE in page.about("captioning")
    for path, text in expected.items():
        result = page.caption(path)
        assert (result.caption, result.beam, result.greedy, result.problem) == (text, "", "", "")
        assert result.overlay is not None and result.overlay.note == ""
        ((picture, training_caption),) = result.photos
        assert max(picture.size) <= 320 and training_caption in training_captions
    assert "not an image" in page.caption(str(here.root / "params.yaml")).problem
    assert page.caption_labels() == ("A caption of similar photos", "")
    if importlib.util.find_spec("gradio") is not None:
        assert {"caption", "similar", "about-captioning"} <= _controls(page)

    challenge(16.0)
    assert "`vlp promote captioning`" in make_page(params, here).missing["captioning"]
