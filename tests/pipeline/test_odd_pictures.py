"""Pictures as people have them, from the file to what models read: seen as they are meant, or counted with a reason."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.report_pictures.pictures import Pictures
from vlp_models.data.features import FeatureStore
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams, Params, load_params
from vlp_models.pipeline.engines import Cluster
from vlp_models.pipeline.stages import features, prepare, validate
from vlp_models.serving.images import open_image

ROOT = Path(__file__).parents[2]
UPRIGHT = Image.fromarray(np.random.default_rng(5).integers(0, 256, (6, 9, 3), np.uint8)).resize((90, 60))


def file_of(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def odd_files() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    jpeg = file_of(UPRIGHT, "JPEG")
    frames = [Image.new("RGB", (40, 40), color) for color in ("red", "blue")]
    gray = (np.asarray(UPRIGHT.convert("L")).astype(np.uint16) * 257).astype(np.uint16)
    return {
        "upright.png": file_of(UPRIGHT),
        "on-its-side.png": file_of(UPRIGHT.rotate(90, expand=True), exif=exif),
        "print.jpg": file_of(UPRIGHT.convert("CMYK"), "JPEG"),
        "gray.png": file_of(UPRIGHT.convert("L")),
        "gray-16.png": file_of(Image.fromarray(gray)),
        "moving.gif": file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "speck.png": file_of(Image.new("RGB", (1, 1))),
        "cut-short.jpg": jpeg[: len(jpeg) // 2],
    }


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    folder = tmp_path / "data" / "raw" / "pairs"
    folder.mkdir(parents=True)
    files = odd_files()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "pairs.csv").write_text("\n".join(["image,caption,split", *(f"{n},a picture,train" for n in files)]))
    return Workspace(tmp_path)


def settings() -> Params:
    params = load_params(ROOT / "params.yaml")
    return dataclasses.replace(
        params,
        data={"pairs": DatasetParams.of(format="pairs", root="data/raw/pairs", pairs="pairs.csv")},
        validate=dataclasses.replace(params.validate, max_bad_fraction=0.5),
        features=dataclasses.replace(params.features, source="grid"),
        sections={"cluster": Cluster(workers=1)},
    )


@pytest.mark.slow
def test_unusual_images_are_decoded_correctly_or_counted(workspace: Workspace) -> None:
    params = settings()
    prepare.run(params, workspace, "pairs")
    validate.run(params, workspace)
    images = {row["image_id"].partition("/")[2]: row for row in read_table("images", workspace.validated).to_pylist()}
    assert set(images) == {"upright.png", "on-its-side.png", "print.jpg", "gray.png", "gray-16.png"}
    assert {(row["width"], row["height"]) for row in images.values()} == {UPRIGHT.size}
    lost = {
        row["row_id"]: row["rule"]
        for row in read_table("quarantine", workspace.validated).to_pylist()
        if row["table"] == "images"
    }
    assert lost == {
        "pairs/moving.gif": "image_still",
        "pairs/cut-short.jpg": "image_decodes",
        "pairs/speck.png": "image_side",
    }
    features.run(params, workspace)
    store = FeatureStore(workspace.features)
    found = {name: store.get(f"pairs/{name}").features.astype(np.float32) for name in images}
    assert np.array_equal(found["on-its-side.png"], found["upright.png"])
    assert np.allclose(found["gray-16.png"], found["gray.png"], atol=0.01)
    assert np.abs(found["print.jpg"] - found["upright.png"]).mean() < 0.1, "its colors are those of the original"
    pictures = Pictures(workspace, 10**6)
    assert pictures.get("pairs/on-its-side.png").data == pictures.get("pairs/upright.png").data
    half = (0.0, 0.0, 0.5, 0.5)
    assert pictures.patch("pairs/on-its-side.png", half).data == pictures.patch("pairs/upright.png", half).data


def test_serving_refuses_what_validation_would(workspace: Workspace) -> None:
    folder = workspace.raw("pairs")
    for name, message in (
        ("moving.gif", "animation"),
        ("speck.png", "1x1 pixels"),
        ("cut-short.jpg", "not a readable"),
    ):
        with pytest.raises(DataError, match=message):
            open_image(folder / name)
    assert np.array_equal(open_image(folder / "on-its-side.png"), open_image(folder / "upright.png"))
