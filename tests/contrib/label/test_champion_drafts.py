"""Drafts of a registered champion: the captions that `vlp caption` prints, and how sure the model is of them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.label.background import Background
from vlp_models.contrib.label.desk import open_desk
from vlp_models.contrib.label.versions import open_champion, read_version_scores
from vlp_models.data.formats.pairs import PairsParams
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.registry.client import connect, model_name
from vlp_models.registry.versions import CHAMPION, download_bundle, find_version_by_alias
from vlp_models.serving.predictor import Predictor


def test_the_champion_drafts_what_it_predicts_and_how_sure_it_is(
    here: Workspace, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The metric that the fixture's versions have a score in.
    monkeypatch.setattr("vlp_models.contrib.label.versions.gate_metric", lambda params, task: "accuracy")
    champion = open_champion(params, here.root)
    assert champion.title == "vlp-captioning version 1 (champion, accuracy 61.0 on scenes test)"
    client = connect(params.tracking, here.root)
    version = find_version_by_alias(client, model_name(params.tracking, "captioning"), CHAMPION)
    assert version is not None
    predictor = Predictor(download_bundle(version))
    paths = [here.root / path for path in read_table("images", here.validated)["path"].to_pylist()[:4]]
    drafts = [champion.draft(Image.open(path).convert("RGB")) for path in paths]
    assert [draft.text for draft in drafts] == [row["caption"] for row in predictor.predict(paths)]
    assert {draft.origin for draft in drafts} == {"vlp-captioning version 1"}
    # An untrained model chooses among the words of its vocabulary nearly at random: log(words) nats a token at most.
    assert all(0 < draft.uncertainty < 10 for draft in drafts)
    # Its lineage has no number of training images, so no curve of versions follows from it.
    assert read_version_scores(params, here.root) is None


def test_without_a_registry_or_a_champion_the_reason_is_given(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for read in (open_champion, read_version_scores):
        with pytest.raises(DataError, match="no model is registered yet"):
            read(params, tmp_path)


def test_the_background_drafts_the_photos_that_come_next(here: Workspace, params: Params) -> None:
    folder = here.root / "data/raw/unlabeled"
    folder.mkdir(parents=True)
    for number, path in enumerate(read_table("images", here.validated)["path"].to_pylist()):
        shutil.copy(here.root / path, folder / f"{number:03}.png")
    (folder / "pairs.csv").write_text("image,caption,split\n000.png,a red shape,train\n")
    source = PairsParams(format="pairs", root="data/raw/unlabeled", pairs="pairs.csv")
    desk = open_desk(params, here, "unlabeled", source)
    first = desk.next("browser-1")
    assert first is not None and first.draft is None, "usable before the champion is loaded"
    Background(desk, params, here, here.root / ".work/label/unlabeled").start()
    deadline = time.monotonic() + 120
    while not desk.queue.is_active or desk.undrafted() is not None:
        assert time.monotonic() < deadline, desk.notes
        time.sleep(0.05)
    assert desk.notes["drafts"].startswith("Drafts: vlp-captioning version 1 (champion")
    shown = desk.show(first.image)
    assert shown.draft is not None and shown.draft.text and shown.draft.origin == "vlp-captioning version 1"
    label = desk.answer(image=first.image, caption="two shapes", by="me", draft="a shape", origin="version 1")
    assert label.draft == "version 1, edited"
    ahead = desk.next("browser-1")
    assert ahead is not None and ahead.draft is not None, "the drafts of those that come next are there already"
