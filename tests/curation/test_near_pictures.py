"""Changed copies of an image are found and unrelated images are not: with keypoints, and with hashes alone."""

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

from vlp_models.common.executors import LocalMapper
from vlp_models.curation.duplicates import alignment, leakage, search
from vlp_models.curation.duplicates.fingerprints import Fingerprint, fingerprint_image
from vlp_models.curation.duplicates.hashes import hash_image_file
from vlp_models.curation.duplicates.leakage import (
    FINGERPRINTS,
    FingerprintWriter,
    Leak,
    find_leaks,
    find_near_duplicates,
)
from vlp_models.curation.duplicates.search import KeypointIndex, NearDuplicateIndex, NearRules
from vlp_models.data.formats.splits import Clusters
from vlp_models.errors import DataError
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.dataset import write as write_scenes

COUNT = 12
RULES = NearRules(max_hash_distance=8, keypoints=True)


def re_encode(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=50)
    return Image.open(buffer).convert("RGB")


def overlay_text(image: Image.Image) -> Image.Image:
    image = image.copy()
    ImageDraw.Draw(image).rectangle((0, 60, image.width, 85), "yellow")
    ImageDraw.Draw(image).text((10, 60), "WHEN YOU SEE IT", "red", font_size=18)
    return image


CHANGES: dict[
    str, tuple[Callable[[Image.Image], Image.Image], bool]
] = {  # name: (change, whether hashes alone find it)
    "re-encoded": (re_encode, True),
    "scaled": (lambda image: image.resize((100, 75)), True),
    "framed": (lambda image: ImageOps.expand(image, 20, "white"), True),
    "mirrored": (ImageOps.mirror, True),
    "rotated by a quarter": (lambda image: image.transpose(Image.Transpose.ROTATE_90), True),
    "rotated by three degrees": (lambda image: image.rotate(3), False),
    "cropped by a fifth": (lambda image: image.crop((25, 10, 185, 130)), False),
    "mirrored and cropped": (lambda image: ImageOps.mirror(image.crop((5, 20, 185, 150))), False),
    "brighter": (lambda image: ImageEnhance.Brightness(image).enhance(1.3), True),
    "text laid over": (overlay_text, False),
}


def fingerprints(images: list[Image.Image], *, held_out: bool) -> list[Fingerprint]:
    return [fingerprint_image(image, keypoints=True, mirrored=held_out) for image in images]


@pytest.fixture(scope="module")
def indexed() -> list[Fingerprint]:
    return fingerprints([photo(seed) for seed in range(COUNT)], held_out=True)


@pytest.mark.parametrize("name", CHANGES)
def test_changed_copy_matches_only_its_original(indexed: list[Fingerprint], name: str) -> None:
    change, by_hash = CHANGES[name]
    copies = fingerprints([change(photo(seed)) for seed in range(COUNT)], held_out=False)
    found = [(match.query, match.indexed) for match in NearDuplicateIndex(indexed, RULES).search(copies)]
    assert found == [(seed, seed) for seed in range(COUNT)]
    if by_hash:
        hashes = NearDuplicateIndex(indexed, NearRules(max_hash_distance=8, keypoints=False))
        assert [(match.query, match.indexed) for match in hashes.search(copies)] == found


def test_unrelated_and_recolored_images_do_not_match(indexed: list[Fingerprint]) -> None:
    near = NearDuplicateIndex(indexed, RULES)
    unrelated = [photo(seed) for seed in range(100, 160)]
    red, green, blue = photo(0).split()
    recolored = Image.merge("RGB", (blue, red, green))
    assert near.search(fingerprints([*unrelated, recolored, Image.new("RGB", (80, 60), "red")], held_out=False)) == []


@pytest.mark.slow
def test_synthetic_scenes_do_not_match_each_other(tmp_path: Path) -> None:
    """Scenes share shapes, colors and patterns, which must not mislead rules made for photographs."""
    write_scenes(
        GeneratorParams(generator="objects", seed=3, train=90, val=10, test=20, questions_per_image=0), tmp_path
    )
    files = sorted((tmp_path / "images").iterdir())
    splits = {image["filename"]: image["split"] for image in read_karpathy(tmp_path)}
    with FingerprintWriter(tmp_path) as writer:
        for file in files:
            writer.add(file.name, hash_image_file(file, 10**6, keypoints=True, held_out=splits[file.name] != "train"))
    assert len(files) == 120
    assert find_leaks([tmp_path / FINGERPRINTS], splits, RULES) == []


def read_karpathy(directory: Path) -> list[dict[str, str]]:
    (file,) = directory.glob("dataset_*.json")
    return json.loads(file.read_text())["images"]


def test_fingerprint_round_trips_and_damage_is_reported(tmp_path: Path) -> None:
    photo(1).save(tmp_path / "a.png")
    with FingerprintWriter(tmp_path) as writer:
        writer.add("a", hash_image_file(tmp_path / "a.png", 10**6, keypoints=True, held_out=True))
    (row,) = pq.read_table(tmp_path / FINGERPRINTS).to_pylist()
    (own,) = fingerprints([photo(1)], held_out=True)
    assert Fingerprint.from_bytes(row["fingerprint"]).to_bytes() == own.to_bytes() == row["fingerprint"]
    assert len(row["fingerprint"]) < 13_000
    damaged = {**row, "fingerprint": row["fingerprint"][:-7]}
    pq.write_table(pq.read_table(tmp_path / FINGERPRINTS).from_pylist([damaged]), tmp_path / FINGERPRINTS)
    with pytest.raises(DataError, match=r"fingerprints\.parquet: damaged .* `dvc repro -f prepare@"):
        find_leaks([tmp_path / FINGERPRINTS], {"a": "test"}, RULES)


def test_indexing_in_blocks_finds_the_same_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {f"test-{seed}": photo(seed) for seed in range(5)}
    images |= {f"train-{seed}": photo(seed).crop((9, 9, 190, 140)) for seed in range(5)}
    for name, image in images.items():
        image.save(tmp_path / f"{name}.png")
    with FingerprintWriter(tmp_path) as writer:
        for name in images:
            writer.add(
                name, hash_image_file(tmp_path / f"{name}.png", 10**6, keypoints=True, held_out=name.startswith("test"))
            )

    held_out = {name: "test" for name in images if name.startswith("test")}

    def found(**options: int) -> list[Leak]:
        return find_leaks([tmp_path / FINGERPRINTS], held_out, RULES, **options)

    whole = found()
    assert [(copy.image_id, copy.copy_of) for copy in whole] == [(f"train-{n}", f"test-{n}") for n in range(5)]
    monkeypatch.setattr(leakage, "INDEXED", 2)
    assert found(workers=2) == whole  # in parallel processes
    monkeypatch.setattr(leakage.batches, "__defaults__", (3,))
    assert found() == whole
    monkeypatch.setattr(leakage, "INDEXED", 4096)
    monkeypatch.setattr(leakage, "BATCH", 3)
    monkeypatch.setattr(leakage, "LocalMapper", lambda workers: LocalMapper(1))  # here the patched size applies
    assert found(workers=2) == whole  # each process has half of the batches


def test_repeated_image_id_does_not_hide_the_next_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        photo(ord(name)).save(tmp_path / f"{name}.png")
    photo(ord("b")).resize((100, 75)).save(tmp_path / "t.png")
    with FingerprintWriter(tmp_path) as writer:
        for name in ("a", "a", "b", "t"):
            writer.add(name, hash_image_file(tmp_path / f"{name}.png", 10**6, keypoints=True, held_out=name != "t"))
    held_out = {"a": "test", "b": "test"}
    for indexed in (1, 2, 3):
        monkeypatch.setattr(leakage, "INDEXED", indexed)
        found = find_leaks([tmp_path / FINGERPRINTS], held_out, RULES)
        assert [(copy.image_id, copy.copy_of) for copy in found] == [("t", "b")], indexed


def count_alignments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of a function each time that it verifies a pair."""
    called: list[str] = []

    def watch(name: str) -> None:
        verify = getattr(search, name)
        monkeypatch.setattr(search, name, lambda *arguments: called.append(name) or verify(*arguments))

    watch("align_by_orientation")
    watch("align_by_keypoints")
    return called


def write_copies(directory: Path, whole: list[str], small: list[str]) -> None:
    """Write fingerprints of one picture under the names `whole`, and of a smaller version under the names `small`."""
    photo(1).save(directory / "whole.png")
    photo(1).resize((100, 75)).save(directory / "small.png")
    with FingerprintWriter(directory) as writer:
        for file, names in (("whole.png", whole), ("small.png", small)):
            hashes = hash_image_file(directory / file, 10**6, keypoints=True, held_out=True)
            for name in names:
                writer.add(name, hashes)


def test_leaks_of_a_repeated_picture_grow_with_its_copies_not_with_their_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placeholder that a website returned for missing photos is often in train, val and test."""
    held_out = {f"{dataset}/val-{n}": "val" for dataset in "ab" for n in range(50)}
    trained = [f"a/{n}" for n in range(200)] + [f"b/{n}" for n in range(100)]
    smaller = [f"a/small-{n}" for n in range(50)]
    write_copies(tmp_path, [*trained, *held_out], smaller)
    called = count_alignments(monkeypatch)
    found = find_leaks([tmp_path / FINGERPRINTS], held_out, RULES)
    assert {leak.image_id for leak in found} == {*trained, *smaller}
    per_image = Counter(leak.image_id for leak in found)
    assert {name for name, count in per_image.items() if count > 1} == {"a/0", "b/0", "a/small-0"}
    assert len(found) == 350 + 3 * 99
    for copies in ("a/", "b/", "a/small"):
        named = {leak.copy_of for leak in found if leak.image_id.startswith(copies)}
        assert named == set(held_out), "every dataset names every val copy"
    assert len(called) <= 2 * len(smaller), "equal pixels need no verification"
    with monkeypatch.context() as patched:
        patched.setattr(leakage, "INDEXED", 30)
        blocks = find_leaks([tmp_path / FINGERPRINTS], held_out, RULES)
    assert {(leak.image_id, leak.copy_of) for leak in found} <= {(leak.image_id, leak.copy_of) for leak in blocks}
    monkeypatch.setattr(leakage.batches, "__defaults__", (16,))
    monkeypatch.setattr(leakage, "BATCH", 16)
    monkeypatch.setattr(leakage, "LocalMapper", lambda workers: LocalMapper(1))  # here the patched size applies
    assert find_leaks([tmp_path / FINGERPRINTS], held_out, RULES, workers=3) == found, "with any number of processes"


def test_copies_of_one_picture_are_paired_with_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [f"copy-{n}" for n in range(100)]
    write_copies(tmp_path, ["listed", *copies], ["small"])
    called = count_alignments(monkeypatch)
    pairs = list(find_near_duplicates(tmp_path / FINGERPRINTS, RULES, fixed={"listed"}))
    assert len(pairs) < 4 * len(copies) and len(called) < 4 * len(copies)
    clusters = Clusters()
    for one, other in pairs:
        if "listed" not in (one, other):
            clusters.join(one, other)
    assert len({clusters.first(name) for name in [*copies, "small"]}) == 1, "also without the listed image"


def test_each_shared_keypoint_is_counted_once() -> None:
    rng = np.random.default_rng(1)
    held = rng.integers(0, 256, (60, 32), np.uint8)  # three pictures of 20
    queries = held[10:35].copy()
    queries[:, 3] ^= 1  # one bit of 256
    counts = KeypointIndex(held, np.repeat([0, 1, 2], 20)).count_shared(queries, np.repeat([0, 1], [12, 13]))
    assert [tuple(map(int, row)) for row in zip(*counts, strict=True)] == [(0, 0, 10), (0, 1, 2), (1, 1, 13)]


@pytest.mark.parametrize(("rows", "block"), [(search.UNPACK_ROWS, search.VOTES_BLOCK), (7, 5)])
def test_shared_keypoints_equal_a_brute_force_count(monkeypatch: pytest.MonkeyPatch, rows: int, block: int) -> None:
    monkeypatch.setattr(search, "UNPACK_ROWS", rows)
    monkeypatch.setattr(search, "VOTES_BLOCK", block)
    monkeypatch.setattr(search, "CROWD", 6)
    rng = np.random.default_rng(3)
    corners = rng.integers(0, 2, (12, 256), np.uint8)
    held, queries = (corners[rng.integers(0, 12, 90)] ^ (rng.random((90, 256)) < 0.08) for _ in range(2))
    held_owners, owners = np.sort(rng.integers(0, 9, 90)), np.sort(rng.integers(0, 7, 90))
    tables = np.random.default_rng(1).permuted(np.tile(np.arange(256), (10, 1)), axis=1)[:, :22]
    shared = set()
    for bits in tables:
        for corner, owner in zip(queries, owners, strict=True):
            same_key = np.flatnonzero((held[:, bits] == corner[bits]).all(axis=1))
            if len(same_key) <= 6:
                near = same_key[(held[same_key] != corner).sum(axis=1) <= alignment.SAME_CORNER]
                shared |= {(corner.tobytes(), int(owner), int(held_owners[other])) for other in near}
    expected = Counter((owner, picture) for _, owner, picture in shared)
    found = KeypointIndex(np.packbits(held, axis=1), held_owners).count_shared(np.packbits(queries, axis=1), owners)
    assert {(a, b): n for a, b, n in zip(*(part.tolist() for part in found), strict=True)} == expected
    assert max(expected.values()) > 3


@pytest.mark.parametrize("hidden", [0.0, 0.3])
def test_fast_comparisons_equal_plain_ones(hidden: float) -> None:
    rng = np.random.default_rng(2)
    for length in (1, 2, 11, 101, 671, 1021, 1024):
        x = rng.integers(0, 256, length).astype(np.float32)  # many are equal, as gray levels are
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
    assert alignment._hamming_distances(a, b).tolist() == plain
