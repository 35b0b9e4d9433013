"""Where the project divides images itself, a group and the near-duplicates of an image stay in one split."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from photos import photo
from PIL import Image, ImageEnhance, ImageOps

from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates import leakage
from vlp_models.data.formats import read_source
from vlp_models.data.tables import read_table
from vlp_models.params import DatasetParams, Params, load_params
from vlp_models.pipeline.stages import prepare, validate

ROOT = Path(__file__).parents[2]
PAIRS = DatasetParams.of(format="pairs", root="raw", pairs="pairs.csv", group_near_duplicates=True)
CHANGES = {
    "flipped": ImageOps.mirror,
    "cropped": lambda image: image.crop((25, 10, 185, 130)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
    "mirrored and cropped": lambda image: ImageOps.mirror(image.crop((5, 20, 185, 150))),
    "again": lambda image: image,  # as JPEG of low quality, like all copies
}
PHOTOS = 30


@pytest.fixture(scope="module")
def augmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty photos, each with five changed copies, as an augmentation script leaves them; and a flat one, twice."""
    root = tmp_path_factory.mktemp("augmented")
    (root / "raw").mkdir()
    names = []
    for number in range(PHOTOS):
        whole = photo(number)
        for copy, change in {"": lambda image: image, **CHANGES}.items():
            # an augmentation script's names say nothing about their origin
            names.append(f"{len(names) * 7919 % 1000:03d}.jpg")
            change(whole).save(root / "raw" / names[-1], quality=50 if copy else 95)
    (root / "raw" / "pairs.csv").write_text("\n".join(["image,caption", *(f"{name},a photo" for name in names)]))
    (root / "families.json").write_text(json.dumps(names))
    return root


def params_for(source: DatasetParams) -> Params:
    return dataclasses.replace(load_params(ROOT / "params.yaml"), data={"own": source})


def splits_of_photos(root: Path, source: DatasetParams) -> list[set[str]]:
    """Return the splits that each photo's copies are in."""
    workspace = Workspace(root)
    prepare.run(params_for(source), workspace, "own")
    names = json.loads((root / "families.json").read_text())
    splits = {row["image_id"]: row["split"] for row in read_table("images", workspace.interim("own")).to_pylist()}
    found = defaultdict(set)
    for number, name in enumerate(names):
        found[number // (len(CHANGES) + 1)].add(splits[f"own/{name}"])
    return list(found.values())


@pytest.mark.slow
def test_augmented_copies_stay_in_one_split(augmented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = splits_of_photos(augmented, dataclasses.replace(PAIRS, group_near_duplicates=False))
    assert sum(len(splits) > 1 for splits in apart) > PHOTOS / 2, "copies are spread without the option"
    together = splits_of_photos(augmented, PAIRS)
    assert [len(splits) for splits in together] == [1] * PHOTOS
    assert {split for splits in together for split in splits} == {"train", "val", "test"}
    assert max(sum(split in splits for splits in together) for split in ("val", "test")) < PHOTOS / 3
    manifest = json.loads((augmented / "data" / "interim" / "own" / "manifest.json").read_text())
    assert manifest["counts"]["notes"][prepare.TOGETHER] > PHOTOS
    validate.run(params_for(PAIRS), Workspace(augmented))
    assert len(read_table("images", augmented / "data" / "validated")) == PHOTOS * (len(CHANGES) + 1), "no leak is left"

    monkeypatch.setattr(leakage, "INDEXED", 50)  # in blocks, and the rows in another order
    header, *rows = (augmented / "raw" / "pairs.csv").read_text().splitlines()
    (augmented / "raw" / "reversed.csv").write_text("\n".join([header, *reversed(rows)]))
    assert splits_of_photos(augmented, dataclasses.replace(PAIRS, options={"pairs": "reversed.csv"})) == together


def test_unrelated_photos_are_divided_as_without_the_option(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    names = [f"{number}.png" for number in range(12)]
    for number, name in enumerate(names):
        photo(number).save(tmp_path / "raw" / name)
    (tmp_path / "raw" / "pairs.csv").write_text("\n".join(["image,caption", *(f"{name},a photo" for name in names)]))
    workspace = Workspace(tmp_path)
    tables = {}
    for option in (False, True):
        source = dataclasses.replace(PAIRS, group_near_duplicates=option)
        prepare.run(params_for(source), workspace, "own")
        tables[option] = read_table("images", workspace.interim("own"))
    assert tables[True].equals(tables[False])


def test_a_placeholder_under_many_ids_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Grouped, its copies are in one split, where no rule looks for them."""
    (tmp_path / "raw").mkdir()
    names = [f"{number}.png" for number in range(20)]
    for number, name in enumerate(names):
        photo(min(number, 7)).save(tmp_path / "raw" / name)
    (tmp_path / "raw" / "pairs.csv").write_text("\n".join(["image,caption", *(f"{name},a photo" for name in names)]))
    workspace = Workspace(tmp_path)
    for option in (True, False):
        caplog.clear()
        prepare.run(params_for(dataclasses.replace(PAIRS, group_near_duplicates=option)), workspace, "own")
        assert "13 images are the same file, the first own/10.png; if it is a placeholder" in caplog.text
        manifest = json.loads((workspace.interim("own") / "manifest.json").read_text())
        assert manifest["counts"]["notes"][prepare.REPEATED] == 13


def test_images_of_a_group_stay_in_one_split(tmp_path: Path) -> None:
    rows = [f"{n}.jpg,a photo,{'' if n % 5 == 0 else f'walk {n // 20}'}" for n in range(400)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption,Group", *rows, "3.jpg,again,", "4.jpg,again,other"]))
    tables = read_source("p", DatasetParams.of(format="pairs", root=".", pairs="pairs.csv"), tmp_path)
    splits = [row["split"] for row in tables["images"]]
    walks = [{splits[n] for n in range(20 * walk, 20 * walk + 20) if n % 5} for walk in range(20)]
    assert [len(found) for found in walks] == [1] * 20
    assert len({splits[n] for n in range(0, 400, 5)}) == 3, "images without a group are divided on their own"
    ((reason, rule),) = [(row["reason"], row["rule"]) for row in tables["quarantine"]]
    assert (reason, rule) == ("the image is of group 'other' here and of 'walk 0' elsewhere", "group_unique")


def test_copies_join_groups(tmp_path: Path) -> None:
    """A copy of a photo in a group brings its own group along."""
    (tmp_path / "raw").mkdir()
    rows = []
    for number in range(8):
        first, second = photo(2 * number), photo(2 * number + 1)
        for name, image, group in (("a", first, "day"), ("b", second, "day"), ("c", ImageOps.mirror(second), "night")):
            image.save(tmp_path / "raw" / f"{number}{name}.png")
            rows.append(f"{number}{name}.png,a photo,{group} {number}")
        Image.new("RGB", (64, 64), (number * 30, 0, 0)).save(tmp_path / "raw" / f"{number}d.png")
        rows.append(f"{number}d.png,a photo,night {number}")
    (tmp_path / "raw" / "pairs.csv").write_text("\n".join(["image,caption,group", *rows]))
    prepare.run(params_for(PAIRS), Workspace(tmp_path), "own")
    splits = {
        r["image_id"]: r["split"] for r in read_table("images", tmp_path / "data" / "interim" / "own").to_pylist()
    }
    assert [len({splits[f"own/{number}{name}.png"] for name in "abcd"}) for number in range(8)] == [1] * 8
    assert len(set(splits.values())) == 3


def flickr8k(root: Path, names: list[str]) -> DatasetParams:
    """List the photos in Flickr8k's format: the first five of test, the others of train."""
    pytest.importorskip("vlp_models.contrib.research_formats")
    captions = "".join(f"{name},a photo\n" for name in names)
    (root / "raw" / "captions.txt").write_text(f"image,caption\n{captions}")
    (root / "raw" / "test.txt").write_text("\n".join(names[:5]))
    (root / "raw" / "train.txt").write_text("\n".join(names[5:]))
    lists = {"train": ["train.txt"], "test": ["test.txt"]}
    return DatasetParams.of(format="flickr8k", root="raw", images=".", split_files=lists)


def visual_genome(root: Path, names: list[str]) -> DatasetParams:
    pytest.importorskip("vlp_models.contrib.research_formats")
    images = [{"image_id": n, "url": f"https://host/raw/{name}"} for n, name in enumerate(names)]
    (root / "image_data.json").write_text(json.dumps(images))
    regions = [{"id": n, "regions": [{"region_id": n, "phrase": "a photo"}]} for n in range(len(names))]
    (root / "region_descriptions.json").write_text(json.dumps(regions))
    return DatasetParams.of(format="visual_genome", root=".", images=".")


def coco(root: Path, names: list[str]) -> DatasetParams:
    for split, chosen in (("test", names[:5]), ("train", names[5:])):
        images = [{"id": Path(name).stem, "file_name": name} for name in chosen]
        captions = [{"id": image["id"], "image_id": image["id"], "caption": "a photo"} for image in images]
        (root / "raw" / f"{split}.json").write_text(json.dumps({"images": images, "annotations": captions}))
    files = {"train": ["train.json"], "test": ["test.json"]}
    return DatasetParams.of(format="coco", root="raw", images=".", captions=files)


def pairs_with_splits(root: Path, names: list[str]) -> DatasetParams:
    rows = [f"{name},a photo,{'test' if n < 5 else 'train'}" for n, name in enumerate(names)]
    (root / "raw" / "pairs.csv").write_text("\n".join(["image,caption,split", *rows]))
    return DatasetParams.of(format="pairs", root="raw", pairs="pairs.csv")


@pytest.mark.slow
@pytest.mark.parametrize("write", [flickr8k, visual_genome, coco, pairs_with_splits])
def test_val_cut_from_train_keeps_copies_together(
    augmented: Path, write: Callable[[Path, list[str]], DatasetParams]
) -> None:
    """The test photos are listed; the copies of one of them in train are left to `validate`."""
    names = json.loads((augmented / "families.json").read_text())
    source = dataclasses.replace(write(augmented, names), val_fraction=0.3)
    images = augmented / "data" / "interim" / "own"

    def splits() -> list[Counter[str]]:
        rows = read_table("images", images).to_pylist()
        split_of = {Path(row["path"]).name: row["split"] for row in rows}
        copies = len(CHANGES) + 1
        return [Counter(split_of[name] for name in names[n : n + copies]) for n in range(0, len(names), copies)]

    workspace = Workspace(augmented)
    prepare.run(params_for(source), workspace, "own")
    apart = splits()
    assert sum(len(found) > 1 for found in apart[1:]) > PHOTOS / 2, "copies are spread without the option"
    prepare.run(params_for(dataclasses.replace(source, group_near_duplicates=True)), workspace, "own")
    together = splits()
    assert [len(found) for found in together[1:]] == [1] * (PHOTOS - 1)
    assert {split for found in together[1:] for split in found} == {"train", "val"}
    assert [found["test"] for found in together] == [found["test"] for found in apart], "listed splits stay"


def test_val_cut_from_train_keeps_groups_together(tmp_path: Path) -> None:
    rows = [f"{n}.jpg,a photo,{'test' if n < 20 else 'train'},walk {n // 20}" for n in range(400)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption,split,group", *rows]))
    source = DatasetParams.of(format="pairs", root=".", pairs="pairs.csv", val_fraction=0.3)
    splits = [row["split"] for row in read_source("p", source, tmp_path)["images"]]
    walks = [set(splits[20 * walk : 20 * walk + 20]) for walk in range(20)]
    assert walks[0] == {"test"} and [len(found) for found in walks] == [1] * 20
    assert 0 < splits.count("val") < 0.6 * len(splits)
