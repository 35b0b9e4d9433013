"""`vlp caption` remembers the served version exactly while the registry does not change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from page_project import ROOT

from vlp_models.cli import predict
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, VLPError
from vlp_models.params import Params
from vlp_models.registry import serving_cache
from vlp_models.registry.client import connect
from vlp_models.registry.serving_cache import ServingCache
from vlp_models.registry.versions import CHALLENGER, CHAMPION

NAME = "vlp-captioning"


@pytest.fixture(autouse=True)
def params_file(here: Workspace) -> None:
    shutil.copy(ROOT / "params.yaml", here.root)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls of `connect`, by which MLflow is imported."""
    calls: list[Any] = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return connect(*arguments)

    monkeypatch.setattr(serving_cache, "connect", counted)
    return calls


def caption(photo: Path, model: str = "") -> str:
    (found,) = predict.predictions("captioning", [str(photo)], None, model)
    return str(found["caption"])


@pytest.mark.slow
def test_mlflow_is_read_again_only_after_a_change(
    here: Workspace, params: Params, photo: Path, connections: list[Any]
) -> None:
    first = caption(photo)
    done = len(connections)
    assert caption(photo) == first and len(connections) == done, "the version was looked up again"
    assert caption(photo, f"{NAME}@{CHAMPION}") == first and len(connections) == done + 1
    client = connect(params.tracking, here.root)
    client.set_registered_model_alias(NAME, CHALLENGER, "1")
    assert caption(photo) == first and len(connections) == done + 2, "an alias moved"
    client.delete_registered_model_alias(NAME, CHAMPION)
    client.delete_registered_model_alias(NAME, CHALLENGER)
    try:
        with pytest.raises(DataError, match="nothing registered"):
            caption(photo)
    finally:
        client.set_registered_model_alias(NAME, CHAMPION, "1")
    assert caption(photo) == first


@pytest.mark.slow
def test_damaged_files_are_refused_also_when_remembered(here: Workspace, params: Params, photo: Path) -> None:
    caption(photo)
    answer = ServingCache(params.tracking, here.root).answers()[NAME]
    assert answer["version"] == f"{NAME} version 1"
    file = Path(answer["bundle"]) / "checkpoint" / "config.json"
    text = file.read_text()
    try:
        file.write_text(text + " ")
        with pytest.raises(VLPError, match=r"config\.json has changed"):
            caption(photo)
    finally:
        file.write_text(text)


@pytest.mark.slow
def test_a_promotion_while_the_bundle_is_checked_leaves_an_answer(
    here: Workspace, params: Params, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption(photo)
    remembered, check = here.root / ".work" / "registry" / "served.json", serving_cache.check_bundle

    def promoted_meanwhile(*given: Any) -> None:
        check(*given)
        remembered.write_text('{"database": ["another state"], "answers": {}}')

    monkeypatch.setattr(serving_cache, "check_bundle", promoted_meanwhile)
    bundle, version = serving_cache.open_served_bundle(params.tracking, here.root, NAME)
    assert bundle.is_dir() and version == f"{NAME} version 1"


def test_a_damaged_photo_leaves_the_others_their_captions(
    here: Workspace, photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = here.root / "cut.png"
    damaged.write_bytes(photo.read_bytes()[:200])
    monkeypatch.setattr(predict, "IMAGES_AT_ONCE", 2)
    paths = [str(photo), str(damaged), str(photo), str(photo), str(damaged)]
    with pytest.raises(DataError, match="2 of 5 images have no caption"):
        predict.caption(paths, model=f"{NAME}/1")
    out, err = capsys.readouterr()
    assert out == f"{photo}\t{caption(photo)}\n" * 3
    assert [line.partition(": ")[0] for line in err.splitlines()] == [str(damaged)] * 2
    with pytest.raises(DataError, match=r"cut\.png: not a readable image"):
        predict.caption([str(damaged)], model=f"{NAME}/1")


def test_a_server_is_asked_every_time(tmp_path: Path, params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    cache = ServingCache(params.tracking, tmp_path)
    cache.add(NAME, {"bundle": "x"})
    assert cache.answers() == {} and not (tmp_path / ".work").exists()
