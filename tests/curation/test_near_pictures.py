"""Changed copies are known, strangers are not: with keypoints, and with hashes alone."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from photos import photo
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from vlp_models.curation.duplicates import alignment, leaks, votes
from vlp_models.curation.duplicates.hashes import examine
from vlp_models.curation.duplicates.prints import Print, take_print
from vlp_models.curation.duplicates.search import NearPictures, NearRules
from vlp_models.curation.duplicates.votes import Votes
from vlp_models.errors import DataError
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.objects import write as write_scenes

COUNT = 12
RULES = NearRules(bits=8, keypoints=True)


def saved_anew(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=50)
    return Image.open(buffer).convert("RGB")


def written_on(image: Image.Image) -> Image.Image:
    image = image.copy()
    ImageDraw.Draw(image).rectangle((0, 60, image.width, 85), "yellow")
    ImageDraw.Draw(image).text((10, 60), "WHEN YOU SEE IT", "red", font_size=18)
    return image


CHANGES: dict[str, tuple[Callable[[Image.Image], Image.Image], bool]] = {  # and whether hashes alone see through it
    "saved anew": (saved_anew, True),
    "scaled": (lambda image: image.resize((100, 75)), True),
    "framed": (lambda image: ImageOps.expand(image, 20, "white"), True),
    "mirrored": (ImageOps.mirror, True),
    "a quarter turn": (lambda image: image.transpose(Image.Transpose.ROTATE_90), True),
    "three degrees": (lambda image: image.rotate(3), False),
    "cropped by a fifth": (lambda image: image.crop((25, 10, 185, 130)), False),
    "mirrored and cropped": (lambda image: ImageOps.mirror(image.crop((5, 20, 185, 150))), False),
    "brighter": (lambda image: ImageEnhance.Brightness(image).enhance(1.3), True),
    "written on": (written_on, False),
}


def prints(images: list[Image.Image], *, tested: bool) -> list[Print]:
    return [take_print(image, keypoints=True, mirror=tested) for image in images]


@pytest.fixture(scope="module")
def tested() -> list[Print]:
    return prints([photo(seed) for seed in range(COUNT)], tested=True)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_copy_is_known_and_no_other_picture_is(tested: list[Print], name: str) -> None:
    change, by_hash = CHANGES[name]
    copies = prints([change(photo(seed)) for seed in range(COUNT)], tested=False)
    found = [(match.other, match.held) for match in NearPictures(tested, RULES).matches(copies)]
    assert found == [(seed, seed) for seed in range(COUNT)]
    if by_hash:
        hashes = NearPictures(tested, NearRules(bits=8, keypoints=False))
        assert [(match.other, match.held) for match in hashes.matches(copies)] == found


def test_strangers_and_a_picture_of_other_colours_are_not_copies(tested: list[Print]) -> None:
    near = NearPictures(tested, RULES)
    strangers = [photo(seed) for seed in range(100, 160)]
    red, green, blue = photo(0).split()
    exchanged = Image.merge("RGB", (blue, red, green))
    assert near.matches(prints([*strangers, exchanged, Image.new("RGB", (80, 60), "red")], tested=False)) == []


def test_scenes_are_not_taken_for_copies_of_each_other(tmp_path: Path) -> None:
    """They share their shapes, colours and patterns: what a rule for photos must not be misled by."""
    write_scenes(
        GeneratorParams(generator="objects", seed=3, train=90, val=10, test=20, questions_per_image=0), tmp_path
    )
    files = sorted((tmp_path / "images").iterdir())
    splits = {image["filename"]: image["split"] for image in read_karpathy(tmp_path)}
    with leaks.PrintWriter(tmp_path) as writer:
        for file in files:
            writer.add(file.name, examine(file, 10**6, keypoints=True, tested=splits[file.name] != "train"))
    assert len(files) == 120
    assert leaks.find_copies([tmp_path / leaks.FILE], splits, RULES) == []


def read_karpathy(directory: Path) -> list[dict[str, str]]:
    (file,) = directory.glob("dataset_*.json")
    return json.loads(file.read_text())["images"]


def test_a_print_survives_its_file_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    photo(1).save(tmp_path / "a.png")
    with leaks.PrintWriter(tmp_path) as writer:
        writer.add("a", examine(tmp_path / "a.png", 10**6, keypoints=True, tested=True))
    (row,) = pq.read_table(tmp_path / leaks.FILE).to_pylist()
    (own,) = prints([photo(1)], tested=True)
    assert Print.from_bytes(row["print"]).to_bytes() == own.to_bytes() == row["print"]
    assert len(row["print"]) < 13_000
    damaged = {**row, "print": row["print"][:-7]}
    pq.write_table(pq.read_table(tmp_path / leaks.FILE).from_pylist([damaged]), tmp_path / leaks.FILE)
    with pytest.raises(DataError, match=r"prints\.parquet: damaged .* `dvc repro -f prepare@"):
        leaks.find_copies([tmp_path / leaks.FILE], {"a": "test"}, RULES)


def test_held_pictures_in_blocks_give_what_all_together_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {f"test-{seed}": photo(seed) for seed in range(5)}
    images |= {f"train-{seed}": photo(seed).crop((9, 9, 190, 140)) for seed in range(5)}
    for name, image in images.items():
        image.save(tmp_path / f"{name}.png")
    with leaks.PrintWriter(tmp_path) as writer:
        for name in images:
            writer.add(name, examine(tmp_path / f"{name}.png", 10**6, keypoints=True, tested=name.startswith("test")))

    tested = {name: "test" for name in images if name.startswith("test")}

    def found(**how: int) -> list[leaks.Copy]:
        return leaks.find_copies([tmp_path / leaks.FILE], tested, RULES, **how)

    whole = found()
    assert [(copy.image_id, copy.copy_of) for copy in whole] == [(f"train-{n}", f"test-{n}") for n in range(5)]
    assert found(held=2, workers=2) == whole  # in processes beside each other
    monkeypatch.setattr(leaks.batches, "__defaults__", (3,))
    assert found(held=2) == whole


def test_a_picture_listed_twice_hides_no_copy_of_the_next(tmp_path: Path) -> None:
    for name in ("a", "b"):
        photo(ord(name)).save(tmp_path / f"{name}.png")
    photo(ord("b")).resize((100, 75)).save(tmp_path / "t.png")
    with leaks.PrintWriter(tmp_path) as writer:
        for name in ("a", "a", "b", "t"):
            writer.add(name, examine(tmp_path / f"{name}.png", 10**6, keypoints=True, tested=name != "t"))
    tested = {"a": "test", "b": "test"}
    for held in (1, 2, 3):
        found = leaks.find_copies([tmp_path / leaks.FILE], tested, RULES, held=held)
        assert [(copy.image_id, copy.copy_of) for copy in found] == [("t", "b")], held


def test_votes_count_each_shared_keypoint_once() -> None:
    rng = np.random.default_rng(1)
    held = rng.integers(0, 256, (60, 32), np.uint8)  # three pictures of 20
    asking = held[10:35].copy()
    asking[:, 3] ^= 1  # one bit of 256
    counts = Votes(held, np.repeat([0, 1, 2], 20)).count(asking, np.repeat([0, 1], [12, 13]))
    assert [tuple(map(int, row)) for row in zip(*counts, strict=True)] == [(0, 0, 10), (0, 1, 2), (1, 1, 13)]


@pytest.mark.parametrize(("rows", "block"), [(votes.ROWS, votes.BLOCK), (7, 5)])
def test_votes_are_those_that_counting_one_by_one_gives(monkeypatch: pytest.MonkeyPatch, rows: int, block: int) -> None:
    monkeypatch.setattr(votes, "ROWS", rows)
    monkeypatch.setattr(votes, "BLOCK", block)
    monkeypatch.setattr(votes, "CROWD", 6)
    rng = np.random.default_rng(3)
    corners = rng.integers(0, 2, (12, 256), np.uint8)
    held, asking = (corners[rng.integers(0, 12, 90)] ^ (rng.random((90, 256)) < 0.08) for _ in range(2))
    held_owners, owners = np.sort(rng.integers(0, 9, 90)), np.sort(rng.integers(0, 7, 90))
    tables = np.random.default_rng(1).permuted(np.tile(np.arange(256), (10, 1)), axis=1)[:, :22]
    seen = set()
    for bits in tables:
        for corner, owner in zip(asking, owners, strict=True):
            alike = np.flatnonzero((held[:, bits] == corner[bits]).all(axis=1))
            if len(alike) <= 6:
                near = alike[(held[alike] != corner).sum(axis=1) <= votes.NEAR]
                seen |= {(corner.tobytes(), int(owner), int(held_owners[other])) for other in near}
    expected = Counter((owner, picture) for _, owner, picture in seen)
    found = Votes(np.packbits(held, axis=1), held_owners).count(np.packbits(asking, axis=1), owners)
    assert {(a, b): n for a, b, n in zip(*(part.tolist() for part in found), strict=True)} == expected
    assert max(expected.values()) > 3


@pytest.mark.parametrize("hidden", [0.0, 0.3])
def test_what_is_compared_quickly_is_what_the_plain_way_gives(hidden: float) -> None:
    rng = np.random.default_rng(2)
    for length in (1, 2, 11, 101, 671, 1021, 1024):
        x = rng.integers(0, 256, length).astype(np.float32)  # as grey levels are: many are equal
        y = np.where(rng.random(length) < 0.2, 0, x + rng.integers(-9, 9, length)).astype(np.float32)
        kept = np.ones(length, bool)
        for _ in range(3):
            a, b = x[kept] - x[kept].mean(), y[kept] - y[kept].mean()
            wrong = np.abs(y - y[kept].mean() - (a @ b) / max(a @ a, 1e-6) * (x - x[kept].mean()))
            kept = wrong <= np.quantile(wrong, 1 - hidden)
        _, found, off = alignment._trimmed_correlation(x, y, hidden)
        assert (found == kept).all() and (off == wrong).all()
    a, b = (rng.integers(0, 256, (number, 32), np.uint8) for number in (7, 12))
    a[0], b[3] = 0, 255  # 256 bits apart
    plain = [[sum(int(x ^ y).bit_count() for x, y in zip(one, other, strict=True)) for other in b] for one in a]
    assert alignment._distances(a, b).tolist() == plain
