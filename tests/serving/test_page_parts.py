"""Behind the page of `vlp demo`: what is dropped is checked, turned upright, and drawn on; regions are weighed."""

from __future__ import annotations

import io
import math
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy_dataset import make_toy
from toy_tasks import any_generator, learn, make

from vlp_models.common.limits import LEAST_SIDE
from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import DataError, MissingToolError
from vlp_models.serving.page import app
from vlp_models.serving.page.occlusion import Remembering, Weighed, given, weigh
from vlp_models.serving.page.photos import GIVEN, WEIGHED, open_photo, shown, with_boxes
from vlp_models.serving.page.version_card import limits, trained_on

ORIENTATION = 0x0112  # EXIF


def bomb() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 9_000, 9_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_photo_is_turned_upright_and_made_rgb(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the camera was held on its side
    left_red = Image.new("RGB", (40, 20), "blue")
    left_red.paste((255, 0, 0), (0, 0, 20, 20))
    (tmp_path / "side.jpg").write_bytes(saved(left_red, "JPEG", exif=exif, quality=95))
    upright = open_photo(tmp_path / "side.jpg")
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5))[0] > 200 and upright.getpixel((10, 35))[2] > 200
    for mode, kind, name in (("CMYK", "JPEG", "c.jpg"), ("P", "GIF", "p.gif"), ("RGBA", "PNG", "a.PNG")):
        (tmp_path / name).write_bytes(saved(Image.new(mode, (LEAST_SIDE, LEAST_SIDE)), kind))
        assert open_photo(tmp_path / name).mode == "RGB"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("words.png", b"no image at all", "not an image"),
        ("empty.png", b"", "an empty file"),
        ("cut.png", saved(Image.effect_noise((64, 64), 9), "PNG")[:900], "damaged or cut short"),
        ("named.jpg", saved(Image.new("RGB", (2, 2)), "PNG"), "named .jpg, but holds PNG"),
        ("bomb.png", bomb(), "81,000,000 pixels"),
        ("icon.ico", saved(Image.new("RGB", (16, 16)), "ICO"), "not an image"),
        ("dot.png", saved(Image.new("RGB", (1, 1)), "PNG"), "1x1 pixels; a picture has at least 4 a side"),
        ("line.bmp", saved(Image.new("RGB", (90, 3)), "BMP"), "90x3 pixels; a picture has at least 4 a side"),
    ],
)
def test_what_is_no_photo_is_refused_without_telling_where_it_lies(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        open_photo(tmp_path / name)
    assert str(caught.value).startswith(f"{name}: ") and str(tmp_path) not in str(caught.value)


def test_boxes_stay_inside_and_the_weighty_ones_are_thick() -> None:
    photo = Image.new("RGB", (100, 50), "white")
    drawn = with_boxes(photo, [(0.5, 0.2, 0.9, 0.8), (0.0, 0.0, 1.0, 1.0), (0.3, 0.3, 0.3, 0.3)], [1])
    assert drawn.size == shown(photo).size == (700, 350) and photo.getpixel((0, 0)) == (255, 255, 255)
    assert drawn.getpixel((350, 175)) == GIVEN and drawn.getpixel((2, 175)) == WEIGHED
    assert drawn.getpixel((697, 175)) == WEIGHED and drawn.getpixel((500, 175)) == (255, 255, 255)


def without(regions: RegionArrays, left_out: int) -> RegionArrays:
    return RegionArrays(**{name: np.delete(value, left_out, axis=0) for name, value in vars(regions).items()})


@pytest.mark.parametrize("task", ["captioning", "vqa"])
def test_a_region_weighs_what_the_answer_loses_without_it(tmp_path: Path, task: str) -> None:
    """A caption's likelihood is what training minimises, an answer's is the probability that is predicted."""
    toy = make_toy(tmp_path)
    task_model = make(toy, task)
    learn(task_model, toy, steps=10)
    sample = ShardDataset(toy.shards, "train", task_model.view)[0]
    assert sample.regions is not None and len(sample.regions) == 2

    def likelihood(regions: RegionArrays) -> float:
        seen = [replace(sample, regions=regions)]
        batch = task_model.collate(seen)
        if task == "captioning":
            with torch.no_grad():
                return -float(task_model.eval().loss(batch, generator=any_generator()).sum)
        return math.log(dict(task_model.predict(batch, seen)[0]["top"])[said])

    predicted = task_model.predict(task_model.collate([sample]), [sample])[0]
    said = sample.text if task == "captioning" else predicted["answer"]
    found = weigh(task_model, given(sample.regions, 4), sample.text, said)
    whole = likelihood(sample.regions)
    assert found.likelihood == pytest.approx(whole, abs=1e-4)
    losses = [whole - likelihood(without(sample.regions, i)) for i in range(2)]
    assert found.losses == pytest.approx(losses, abs=1e-4) and losses[0] != losses[1]
    alone = weigh(task_model, given(sample.regions, 1), sample.text, said)
    assert alone.losses == (0.0,) and alone.weightiest == ()


def test_at_most_three_regions_are_called_weighty_and_none_that_makes_no_difference() -> None:
    assert Weighed(likelihood=-1.0, losses=(0.01, 2.0, -1.0, 0.5, 0.3, 0.2)).weightiest == (1, 3, 4)


def test_the_regions_of_a_photo_are_made_once() -> None:
    class Counting:
        calls = 0

        def extract(self, images: Any) -> list[RegionArrays]:
            self.calls += 1
            empty = np.zeros((0, 4), np.float32)
            half = np.zeros((0, 2), np.float16)
            return [RegionArrays(features=half, boxes=empty, class_probs=half, scores=empty[:, 0]) for _ in images]

    counting = Counting()
    remembering = Remembering(counting)
    red, blue = Image.new("RGB", (4, 2), "red"), Image.new("RGB", (4, 2), "blue")
    assert remembering.extract([red])[0] is remembering.extract([red.copy()])[0] and counting.calls == 1
    remembering.extract([blue])
    remembering.extract([Image.new("RGB", (2, 4), "blue")])
    assert counting.calls == 3 and len(remembering.extract([red, blue])) == 2


def test_what_it_learned_from_is_said_and_what_it_can_not_do(tmp_path: Path) -> None:
    params = {"data": {"scenes": {}, "photos": {}}, "generate": {"scenes": {}}, "finetune": {"a": {"sources": {}}}}
    record = {"params": params, "data": {"shards": {"counts": {"train": {"images": 1200}}}}}
    both = trained_on(record, "a")
    assert "scenes (generated scenes), photos" in both and "1,200 images" in both and "means nothing" not in both
    params["finetune"]["a"]["sources"] = {"scenes": 1}
    assert "photos" not in trained_on(record, "a").partition(".")[0] and "means nothing" in trained_on(record, "a")
    assert "without a record" in trained_on(None, "a")
    said = " ".join(limits(make(make_toy(tmp_path), "vqa")))
    assert "among 3 answers" in said and "by 3 classes of things" in said


def test_without_gradio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    install = r"`uv pip install --no-deps --require-hashes -r requirements-photographs\.lock`"
    with pytest.raises(MissingToolError, match=f"{install} brings it"):
        app.check_installed()
