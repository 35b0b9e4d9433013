"""The detector stage: each source, its report, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn_workspace import make_workspace, params_with, write_objects

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data.joins import FILE, write_boxed
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.pipeline.stages.detector import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = make_workspace(tmp_path_factory.mktemp("detector"))
    run(params_with(), workspace)
    return workspace


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_outputs(trained: Workspace) -> None:
    config = load(trained.detector / "config.json")
    assert config["classes"] == ["__background__", "blue square", "red square"]
    assert config["architecture"]["feature_dim"] == 16
    assert config["architecture"]["words"] == ["blue", "red", "square"]
    assert config["training"]["datasets"] == ["drawn"]
    assert load(trained.detector / "manifest.json")["detector_id"] == config["detector_id"]
    report = load(trained.reports / "detector.json")
    assert report["detector_id"] == config["detector_id"]
    assert set(report["val"]) == {"AP", "AP50", "AP75", "AR"}
    assert report["counts"] == {"train_images": 6, "classes": 2, "val_images": 2}
    assert sorted(p.name for p in trained.detector.iterdir()) == [
        "config.json",
        "detector.safetensors",
        "manifest.json",
    ]


def test_the_same_params_give_the_same_bytes(trained: Workspace, tmp_path: Path) -> None:
    again = make_workspace(tmp_path)
    run(params_with(), again)
    assert hash_path(again.detector) == hash_path(trained.detector)


def test_the_number_of_images_can_be_limited(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    run(params_with(detector={"max_images": 4}), workspace)
    assert load(workspace.reports / "detector.json")["counts"]["train_images"] == 4


def test_own_weights_load_with_the_same_id(trained: Workspace, tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    weights = str(trained.detector / "detector.safetensors")
    run(params_with(detector={"source": "weights", "weights": weights}), workspace)
    one, two = (load(place.detector / "config.json") for place in (trained, workspace))
    assert one["detector_id"] == two["detector_id"]
    assert load(workspace.reports / "detector.json")["val"] == load(trained.reports / "detector.json")["val"]


def test_no_detector(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    run(params_with(detector={"source": "none"}), workspace)
    assert load(workspace.detector / "config.json")["detector_id"] == "none"
    assert load(workspace.reports / "detector.json")["detector_id"] == "none"


def test_attributes_are_trained_as_words(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    objects = read_table("objects", workspace.validated).to_pylist()
    write_objects([row | {"attributes": ["dotted"]} for row in objects], workspace)
    run(params_with(), workspace)
    words = load(workspace.detector / "config.json")["architecture"]["words"]
    assert words == ["blue", "dotted", "red", "square"]
    assert "loss_words" in load(workspace.reports / "detector.json")["losses"]


def test_images_without_boxes_do_not_change_its_input(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    before = (workspace.validated / FILE).read_bytes()
    images = read_table("images", workspace.validated).to_pylist()
    more = [images[0] | {"image_id": name, "path": "x.png", "sha256": name} for name in ("a/1", "drawn/00", "z/9")]
    moved = [row | {"provenance": "another line"} for row in images]
    write_table([*more, *reversed(moved)], "images", workspace.validated)
    write_boxed(workspace.validated)
    assert (workspace.validated / FILE).read_bytes() == before
    for name in ("images", "objects"):  # that file is all it reads of data/validated
        (workspace.validated / f"{name}.parquet").unlink()
    run(params_with(), workspace)
    write_objects_of(workspace, images[:-1])
    assert (workspace.validated / FILE).read_bytes() != before


def write_objects_of(workspace: Workspace, images: list[dict[str, Any]]) -> None:
    """The table of boxes, of these images alone; each has one."""
    write_table(images, "images", workspace.validated)
    box = {"category": "red square", "x1": 1, "y1": 1, "x2": 20, "y2": 20, "provenance": ""}
    write_objects([box | {"object_id": row["image_id"], "image_id": row["image_id"]} for row in images], workspace)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"sources": ["cats"]}, ParamsError, "names cats"),
        ({"source": "weights"}, ParamsError, r"needs `detector\.weights`"),
        ({"source": "weights", "weights": "missing.pth"}, CheckpointError, r"missing\.pth: no such file"),
        ({"steps": 0}, ParamsError, r"detector\.steps: 0"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, changes: dict, error: type[Exception], text: str) -> None:
    workspace = make_workspace(tmp_path)
    with pytest.raises(error, match=text):
        run(params_with(detector=changes), workspace)
    assert not workspace.detector.exists()


def test_no_boxes_to_train_on(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path)
    write_objects([], workspace)
    with pytest.raises(DataError, match=r"no object boxes.*features\.source"):
        run(params_with(), workspace)


def test_an_image_that_grew_after_validation_is_not_decoded(tmp_path: Path) -> None:
    from PIL import Image

    workspace = make_workspace(tmp_path)
    for number in range(6):
        Image.new("RGB", (640, 640)).save(tmp_path / "images" / f"{number}.png")
    with pytest.raises(DataError, match="640x640 pixels, but 64x64 when it was validated"):
        run(params_with(), workspace)
    assert not workspace.detector.exists()
    assert not list(workspace.detector.parent.glob(".detector*"))
