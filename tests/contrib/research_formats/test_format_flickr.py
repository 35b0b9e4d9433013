"""Flickr8k and Flickr30k in both layouts each: the same captions and splits, and lists of the photos of each split."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.data.formats.splits import photo_id
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams

PHOTOS = ["100_ab00000001.jpg", "200_cd.jpg", "300_ef.jpg", "400_01.jpg"]
SPLITS = {"train": PHOTOS[:2], "dev": PHOTOS[2:3], "test": PHOTOS[3:]}
NEVER = "999_zz.jpg"  # that no list has


def captions(photo: str) -> list[str]:
    return [f'A dog number {n} , it says " woof " at {photo[:3]} .' for n in range(5)]  # plain-ok


def write_lists(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, photos in SPLITS.items():
        (folder / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{photo}\n" for photo in photos))


def as_sent(root: Path) -> None:
    write_lists(root / "Flickr8k_text")
    lines = [f"{p}#{n}\t{text}" for p in [*PHOTOS, NEVER] for n, text in enumerate(captions(p))]
    (root / "Flickr8k_text" / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    (root / "Flicker8k_Dataset").mkdir()


def as_copied(root: Path) -> None:
    write_lists(root)
    quoted = [(p, text.replace('"', '""')) for p in [*PHOTOS, NEVER] for text in captions(p)]
    (root / "captions.txt").write_text("image,caption\n" + "".join(f'{p},"{text}"\n' for p, text in quoted))
    (root / "Images").mkdir()


def load(tmp_path: Path, format: str = "flickr8k", **params: Any) -> Tables:
    return read_source("f", DatasetParams.of(format=format, root="f", **params), tmp_path)


def of_val(tables: Tables) -> set[str]:
    return {row["image_id"] for row in tables["images"] if row["split"] == "val"}


def test_both_layouts_of_flickr8k_are_the_same_dataset(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    as_sent(tmp_path / "one" / "f")
    as_copied(tmp_path / "two" / "f")
    sent, copied = load(tmp_path / "one"), load(tmp_path / "two")
    for tables, folder in ((sent, "Flicker8k_Dataset"), (copied, "Images")):
        assert not tables["quarantine"]
        assert tables.skipped == Counter({"captions of unlisted photos": 5})
        found = {(row["image_id"], row["split"], Path(row["path"]).parts[-2:]) for row in tables["images"]}
        assert found == {
            ("f/100_ab00000001", "train", (folder, "100_ab00000001.jpg")),
            ("f/200_cd", "train", (folder, "200_cd.jpg")),
            ("f/300_ef", "val", (folder, "300_ef.jpg")),
            ("f/400_01", "test", (folder, "400_01.jpg")),
        }
    captions_of_both = [
        [(row["caption_id"], row["image_id"], row["text"]) for row in t["captions"]] for t in (sent, copied)
    ]
    assert captions_of_both[0] == captions_of_both[1] and captions_of_both[0][6] == (
        "f/200_cd#1",
        "f/200_cd",
        captions("200")[1],
    )


def test_dev_can_be_test_with_val_held_out_of_train(tmp_path: Path) -> None:
    as_copied(tmp_path / "f")
    photos = [f"{1000 + n}_x.jpg" for n in range(400)]
    (tmp_path / "f" / "Flickr_8k.trainImages.txt").write_text("\n".join(photos))
    (tmp_path / "f" / "captions.txt").write_text("image,caption\n" + "".join(f"{p},a dog\n" for p in photos))
    lists = {"train": ["Flickr_8k.trainImages.txt"], "test": ["Flickr_8k.devImages.txt"]}
    tables = load(tmp_path, split_files=lists, val_fraction=0.1)
    held = of_val(tables)
    assert 20 < len(held) < 60
    (tmp_path / "f" / "Flickr_8k.trainImages.txt").write_text("\n".join(photos[:200]))
    fewer = of_val(load(tmp_path, split_files=lists, val_fraction=0.1))
    assert fewer == {i for i in held if int(i[2:].partition("_")[0]) < 1200}, "it depends on no other photo"
    assert tables.skipped["listed photos without a caption"] == 1, "300_ef"


def test_broken_lines_and_lists_are_quarantined(tmp_path: Path) -> None:
    as_sent(tmp_path / "f")
    text = tmp_path / "f" / "Flickr8k_text" / "Flickr8k.token.txt"
    extra = [
        "no tab",
        "100_ab00000001.jpg#x\tno number",
        "100_ab00000002.jpg#0\tanother file",
        "../400_01.jpg#7\tup and away",
    ]
    text.write_text(text.read_text() + "\n".join(extra) + "\n")
    with (tmp_path / "f" / "Flickr8k_text" / "Flickr_8k.testImages.txt").open("a") as file:
        file.write("100_ab00000001.jpg\n")  # of train as well
    tables = load(tmp_path)
    assert [(row["rule"], row["provenance"]) for row in tables["quarantine"]] == [
        ("split_disjoint", "Flickr_8k.testImages.txt:2"),
        ("record_readable", "Flickr8k.token.txt:26"),
        ("record_readable", "Flickr8k.token.txt:27"),
        ("id_unique", "Flickr8k.token.txt:28"),
        ("path_inside", "Flickr8k.token.txt:29"),
    ]
    assert len(tables["captions"]) == 20


def test_flickr30k_with_entities_splits_and_with_karpathys(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    ids = ["1000092795", "2000", "3000"]
    lines = [f"{i}.jpg#{n}\tTwo people , number {n} ." for i in ids for n in range(5)]
    (root / "results_20130124.token").write_text("\n".join(lines) + "\n")
    for split, photo in zip(("train", "val", "test"), ids, strict=True):
        (root / f"{split}.txt").write_text(f"{photo}\n")
    tables = load(tmp_path, "flickr30k")
    assert [(row["image_id"], row["split"]) for row in tables["images"]] == [
        ("f/1000092795", "train"),
        ("f/2000", "val"),
        ("f/3000", "test"),
    ]
    assert tables["captions"][0]["text"] == "Two people , number 0 ." and len(tables["captions"]) == 15
    images = ",".join(
        f'{{"filename": "{i}.jpg", "imgid": {n}, "sentids": [], "split": "test", "sentences": []}}'
        for n, i in enumerate(ids)
    )
    (root / "dataset_flickr30k.json").write_text(f'{{"images": [{images}], "dataset": "flickr30k"}}')
    tables = load(tmp_path, "flickr30k", karpathy="dataset_flickr30k.json")
    assert {row["split"] for row in tables["images"]} == {"test"}

    (root / "results_20130124.token").unlink()
    piped = ["image_name| comment_number| comment", *(line.replace("#", "| ").replace("\t", "| ") for line in lines)]
    (root / "results.csv").write_text("\n".join([*piped, "2199200615.jpg| 4   A dog runs across the grass ."]))
    again = load(tmp_path, "flickr30k")
    assert [row["text"] for row in again["captions"]] == [row["text"] for row in tables["captions"]]
    assert [row["provenance"] for row in again["quarantine"]] == ["results.csv:17"]


def test_a_photo_that_a_karpathy_file_lists_twice_has_its_first_split(tmp_path: Path) -> None:
    root = tmp_path / "f"
    root.mkdir()
    (root / "results_20130124.token").write_text("10_aaaaaaaaaa.jpg#0\ta dog\n11_aaaaaaaaaa.jpg#0\ta cat\n")
    listed = (("10_aaaaaaaaaa", "test"), ("10_bbbbbbbbbb", "train"), ("11_aaaaaaaaaa", "val"), ("11_cccccccccc", "val"))
    images = [{"filename": f"{name}.jpg", "split": split, "sentences": []} for name, split in listed]
    (root / "dataset_flickr30k.json").write_text(json.dumps({"images": images}))
    tables = load(tmp_path, "flickr30k", karpathy="dataset_flickr30k.json")
    assert [(row["image_id"], row["split"]) for row in tables["images"]] == [
        ("f/10_aaaaaaaaaa", "test"),
        ("f/11_aaaaaaaaaa", "val"),
    ]
    (row,) = tables["quarantine"]
    assert (row["rule"], row["provenance"]) == ("split_disjoint", "dataset_flickr30k.json#images[1]")
    assert row["reason"] == "photo 10 is already listed as test"


def test_file_names_that_are_not_utf8_are_quarantined(tmp_path: Path) -> None:
    as_sent(tmp_path / "f")
    folder = tmp_path / "f" / "Flickr8k_text"
    for file, line in (
        ("Flickr8k.token.txt", b"100_\xff.jpg#9\tA dog .\n"),
        ("Flickr_8k.testImages.txt", b"400_\xff.jpg\n"),
    ):
        (folder / file).write_bytes((folder / file).read_bytes() + line)
    tables = load(tmp_path)
    assert {row["provenance"] for row in tables["quarantine"]} == {
        "Flickr_8k.testImages.txt:2",
        "Flickr8k.token.txt:26",
    }
    assert len(tables["images"]) == 4


def test_a_quote_within_a_caption_is_a_character(tmp_path: Path) -> None:
    as_copied(tmp_path / "f")
    (tmp_path / "f" / "captions.txt").write_text(f'image,caption\n{PHOTOS[0]},a 5" pipe\n{PHOTOS[1]},"two, quoted"\n')
    tables = load(tmp_path)
    assert [row["text"] for row in tables["captions"]] == ['a 5" pipe', "two, quoted"]
    assert not tables["quarantine"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="comes on request"):
        load(tmp_path)
    (tmp_path / "f").mkdir()
    with pytest.raises(DataError, match=r"contains none of Flickr8k\.token\.txt, captions\.txt"):
        load(tmp_path)
    (tmp_path / "f" / "captions.txt").write_text("file,text\n")
    with pytest.raises(DataError, match="which define the splits"):
        load(tmp_path)
    write_lists(tmp_path / "f")
    with pytest.raises(DataError, match=r"captions\.txt:1: the first line must name the columns image, caption"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"split_files\.trial: expected one of train, val, test"):
        load(tmp_path, split_files={"trial": ["Flickr_8k.devImages.txt"]})


def test_own_photos_with_underscores_in_their_names_stay_distinct(tmp_path: Path) -> None:
    names = ["IMG_0001.jpg", "IMG_0002.jpg", "20240131_123059.jpg", "20240131_123101.jpg", "DSC_1.JPG", "100_1.jpg"]
    root = tmp_path / "f"
    root.mkdir()
    for split, photos in {"train": names[:4], "dev": names[4:5], "test": names[5:]}.items():
        (root / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{photo}\n" for photo in photos))
    lines = ["image,caption", *(f"{name},a photo of {name}" for name in names)]
    (root / "captions.txt").write_text("\n".join(lines))
    tables = load(tmp_path)
    assert not tables["quarantine"] and not tables.skipped
    assert [Path(row["path"]).name for row in tables["images"]] == names
    assert [row["split"] for row in tables["images"]] == ["train"] * 4 + ["val", "test"]


@pytest.mark.parametrize(
    ("file", "photo"),
    [
        ("2181846120_3744ca3942.jpg", "2181846120"),
        ("2258277193_586949ec62.jpg.1", "2258277193"),
        ("2181846120_3744ca3942_b.jpg", "2181846120"),
        ("2181846120.jpg", "2181846120"),
        ("IMG_0001.jpg", "IMG_0001"),
        ("image12.png", "image12"),
        ("2181846120_3744ca3942a.jpg", "2181846120_3744ca3942a"),
    ],
)
def test_only_names_of_flickr_are_cut(file: str, photo: str) -> None:
    assert photo_id(file) == photo


def test_split_lists_match_in_another_letter_case(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "captions.txt").write_text("image,caption\nIMG_1.JPG,a dog\nimg_2.jpg,a cat\nImg_2.jpg,a cat\n")
    for split, listed in {"train": "img_1.jpg", "dev": "IMG_2.jpg", "test": ""}.items():
        (folder / f"Flickr_8k.{split}Images.txt").write_text(listed)
    tables = load(tmp_path)
    assert [(row["image_id"], row["split"]) for row in tables["images"]] == [("f/IMG_1", "train"), ("f/img_2", "val")]
    assert [row["rule"] for row in tables["quarantine"]] == ["id_unique"], "one listed photo is not two"
