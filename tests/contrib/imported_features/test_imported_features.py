"""Imported features: all TSV layouts, npz, damaged records."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.imported_features.npz import open_npz
from vlp_models.contrib.imported_features.source import ImportedSource
from vlp_models.contrib.imported_features.tsv import open_tsv
from vlp_models.errors import DataError
from vlp_models.params import FeaturesParams
from vlp_models.vision.region_source import SourceRequest

RNG = np.random.default_rng(0)
FEATURES = RNG.random((3, 6), np.float32)
BOXES = np.array([[0, 0, 50, 40], [10, 20, 100, 80], [5, 5, 25, 45]], np.float32)  # of 100 x 80 pixels
PROBS = np.zeros((3, 1601), np.float32)
PROBS[[0, 1, 2], [7, 1600, 3]] = [0.3, 0.9, 0.6]
BY_CONFIDENCE = [1, 2, 0]
FRACTIONS = BOXES / [100, 80, 100, 80]


def b64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def bottom_up(name: str) -> list[str]:
    return [name, "100", "80", "3", b64(BOXES), b64(FEATURES)]


def lxmert(name: str) -> list[str]:
    classes, confidence = PROBS.argmax(axis=1).astype(np.int64) - 1, PROBS.max(axis=1)
    attributes = [b64(np.zeros(3, np.int64)), b64(np.zeros(3, np.float32))]
    return [name, "80", "100", b64(classes), b64(confidence), *attributes, "3", b64(BOXES), b64(FEATURES)]


def write(path: Path, *rows: list[str]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="ascii")
    return path


def image(image_id: str, path: str = "x.jpg") -> dict[str, str]:
    return {"image_id": image_id, "path": path}


def open_files(path: Path, max_regions: int = 9, order: Literal["file", "score"] = "file") -> ImportedSource:
    """Open a directory of .npz files, or TSV files."""
    options = {"max_regions": max_regions, "min_score": 0.0, "order": order}
    is_npz = path.is_dir() and any(path.glob("*.npz"))
    params = FeaturesParams(source="npz" if is_npz else "tsv", content="roi", path=str(path), **options)
    return (open_npz if is_npz else open_tsv)(SourceRequest(params=params, workspace=Workspace(path.parent)))


def read(source: ImportedSource, *images: dict[str, str]) -> tuple[list, list]:
    return source.regions(images, lambda _: None)


def test_bottom_up_rows_keep_their_order_and_have_no_classes(tmp_path: Path) -> None:
    source = open_files(write(tmp_path / "a.tsv", bottom_up("9"), bottom_up("17")), max_regions=2)
    (regions,), notes = read(source, image("coco/17"))
    assert (source.feature_dim, source.classes, notes) == (6, (), [])
    np.testing.assert_array_equal(regions.features, FEATURES[:2].astype(np.float16))
    np.testing.assert_allclose(regions.boxes, FRACTIONS[:2], atol=1e-6)
    assert regions.class_probs.shape == (2, 0)
    np.testing.assert_array_equal(regions.scores, [1, 1])


@pytest.mark.parametrize("layout", ["lxmert", "with probabilities"])
@pytest.mark.parametrize(("order", "rows"), [("score", BY_CONFIDENCE), ("file", [0, 1, 2])])
def test_rows_with_classes_in_the_files_order_or_by_confidence(
    tmp_path: Path, layout: str, order: Literal["file", "score"], rows: list[int]
) -> None:
    name = "COCO_val2014_000000000017"
    row = lxmert(name) if layout == "lxmert" else [*bottom_up(name), b64(PROBS)]
    source = open_files(write(tmp_path / "a.tsv", row), max_regions=2, order=order)
    (regions,), _ = read(source, image("coco/17", f"val2014/{name}.jpg"))  # matched by the file's stem
    assert len(source.classes) == 1601
    np.testing.assert_array_equal(regions.features, FEATURES[rows[:2]].astype(np.float16))
    np.testing.assert_allclose(regions.boxes, FRACTIONS[rows[:2]], atol=1e-6)
    np.testing.assert_allclose(regions.scores, PROBS[rows[:2]].max(1), atol=1e-6)
    np.testing.assert_allclose(regions.class_probs, PROBS[rows[:2]].astype(np.float16))


def test_directory_of_tsv_parts(tmp_path: Path) -> None:
    write(tmp_path / "karpathy_train.tsv.0", bottom_up("1"))
    write(tmp_path / "karpathy_train.tsv.1", bottom_up("2"))
    found, notes = read(open_files(tmp_path), image("c/2"), image("c/1"))
    assert ([len(regions) for regions in found], notes) == ([3, 3], [])


def damaged() -> dict[str, list[str]]:
    broken = {name: bottom_up(name) for name in ("base64", "count", "swapped", "nan", "width")}
    broken["base64"][5] = "@" + broken["base64"][5][1:]
    broken["count"][3] = "5"
    broken["swapped"][1:3] = ["80", "100"]
    broken["nan"][5] = b64(np.full_like(FEATURES, np.nan))
    broken["width"][5] = b64(FEATURES[:, :4])
    broken["columns"] = bottom_up("columns")[:5]
    return broken


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base64", "features: broken base64"),
        ("count", "not 5 rows"),
        ("swapped", "outside its image of 80 x 100"),
        ("nan", "not finite"),
        ("width", "4 features"),
        ("columns", "5 columns"),
    ],
)
def test_damaged_row_is_quarantined_with_its_line(tmp_path: Path, name: str, reason: str) -> None:
    source = open_files(write(tmp_path / "a.tsv", bottom_up("1"), damaged()[name]))
    (good, bad, absent), notes = read(source, image("c/1"), image(f"c/{name}"), image("c/none"))
    assert [len(good), len(bad), len(absent)] == [3, 0, 0]
    assert [(row["row_id"], row["rule"]) for row in notes] == [
        (f"c/{name}", "features_readable"),
        ("c/none", "features_present"),
    ]
    assert reason in notes[0]["reason"]
    assert notes[0]["provenance"] == "a.tsv:2"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["cut first", "whole first"])
@pytest.mark.parametrize("files", [1, 2])
def test_of_several_records_of_an_image_the_intact_one_is_read(
    tmp_path: Path, order: tuple[int, int], files: int
) -> None:
    """As a job that was killed and resumed leaves them, in one file or in two."""
    whole = bottom_up("17")
    records = [[*whole[:-1], whole[-1][:9]], whole]
    rows = [bottom_up("9"), *(records[n] for n in order)]
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = [rows] if files == 1 else [rows[:2], rows[2:]]
    for number, part in enumerate(parts):
        write(folder / f"{number}.tsv", *part)
    (regions,), notes = read(open_files(folder), image("coco/17"))
    assert notes == []
    np.testing.assert_array_equal(regions.features, FEATURES.astype(np.float16))


def test_file_without_readable_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no readable record.*broken base64"):
        open_files(write(tmp_path / "a.tsv", damaged()["base64"]))
    with pytest.raises(DataError, match="no TSV"):
        open_files(tmp_path / "missing.tsv")
    packed = tmp_path / "a.tsv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    with pytest.raises(DataError, match=r"a\.tsv\.gz: compressed with gzip, not text; unpack it"):
        open_files(packed)
    (tmp_path / "b.tsv").write_bytes(b"caf\xc3\xa9\tb\n")
    with pytest.raises(DataError, match=r"b\.tsv:1: byte 4 of the line is not ASCII"):
        open_files(tmp_path / "b.tsv")


def save_npz(path: Path, **changes: np.ndarray) -> None:
    arrays = {"features": FEATURES, "boxes": BOXES, "image_h": np.array([80]), "image_w": np.array([100])}
    np.savez(path, **arrays | {"cls_prob": PROBS} | changes)


def test_npz_directory(tmp_path: Path) -> None:
    save_npz(tmp_path / "17.npz")
    save_npz(tmp_path / "18.npz", features=np.array([object()] * 3))  # a pickle
    (tmp_path / "19.npz").write_bytes(b"PK\x03\x04 cut short")
    (regions, *_), _ = read(open_files(tmp_path, max_regions=2), image("coco/17"))
    np.testing.assert_array_equal(regions.features, FEATURES[:2].astype(np.float16))
    source = open_files(tmp_path, max_regions=2, order="score")
    (regions, *bad), notes = read(source, image("coco/17"), image("coco/18"), image("coco/19"), image("c/../../17"))
    np.testing.assert_array_equal(regions.features, FEATURES[BY_CONFIDENCE[:2]].astype(np.float16))
    np.testing.assert_allclose(regions.boxes, FRACTIONS[BY_CONFIDENCE[:2]], atol=1e-6)
    assert [len(regions) for regions in bad] == [0, 0, 0]
    assert [row["rule"] for row in notes] == ["features_readable", "features_readable", "features_present"]
    assert "allow_pickle=False" in notes[0]["reason"]


def test_record_matching_two_images_is_refused(tmp_path: Path) -> None:
    def row(image_id: str, path: str, content: str) -> dict[str, str]:
        return {**image(image_id, path), "sha256": content}

    save_npz(tmp_path / "1.npz")
    save_npz(tmp_path / "2.npz")
    source = open_files(tmp_path, max_regions=2)
    source.check_images(
        [row("flickr8k/1", "a/1.jpg", "aa"), row("snli_ve/1", "a/1.jpg", "aa"), row("p/2", "2.jpg", "cc")]
    )
    for other in ("pairs/dogs/1.jpg", "vg/1"):
        with pytest.raises(DataError, match=rf"the record 1 matches both pairs/cats/1\.jpg and {other}, .*whole id"):
            source.check_images([row("pairs/cats/1.jpg", "cats/1.jpg", "aa"), row(other, "dogs/1.jpg", "bb")])


def test_id_depends_on_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", bottom_up("1"))
    before = open_files(path).detector_id
    assert before == open_files(path).detector_id
    assert before.startswith("import-")
    assert open_files(write(path, bottom_up("1"), bottom_up("2"))).detector_id != before
