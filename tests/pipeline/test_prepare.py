"""prepare: a dataset in, canonical tables out; what can't be used is counted with a reason."""

from __future__ import annotations

import dataclasses
import json
import random
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from vlp_models.cli.presets import merge_overlay
from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates import hashes
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, MissingToolError, ParamsError
from vlp_models.params import DatasetParams, GeneratorParams, Params, load_params
from vlp_models.pipeline.dvc.external import check_files, explain_roots
from vlp_models.pipeline.stages import prepare, validate

ROOT = Path(__file__).parents[2]


def params_for(**sources: DatasetParams) -> Params:
    return dataclasses.replace(load_params(ROOT / "params.yaml"), data=sources)


PAIRS = DatasetParams.of(format="pairs", root="data/raw/pairs", pairs="pairs.csv")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Three good photos and one of each kind of bad file, a caption each."""
    directory = tmp_path / "data" / "raw" / "pairs"
    directory.mkdir(parents=True)
    for name in ("good-1.jpg", "good-2.jpg", "good-3.png"):
        pixels = random.Random(name).randbytes(300 * 200 * 3)
        Image.frombytes("RGB", (300, 200), pixels).save(directory / name)
    whole = (directory / "good-1.jpg").read_bytes()
    (directory / "cut.jpg").write_bytes(whole[:9_000])
    (directory / "mislabelled.png").write_bytes(whole)
    (directory / "empty.jpg").touch()
    Image.new("1", (8_000, 8_000)).save(directory / "bomb.png")
    names = ["good-1.jpg", "good-2.jpg", "good-3.png", "cut.jpg", "mislabelled.png", "empty.jpg", "bomb.png", "no.jpg"]
    lines = ["image,caption", *(f"{name},caption of {name}" for name in names)]
    (directory / "pairs.csv").write_text("\n".join(lines))
    return Workspace(tmp_path)


def test_pairs_with_bad_images(workspace: Workspace) -> None:
    prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
    out = workspace.interim("pairs")
    images = read_table("images", out).to_pylist()
    names = ["good-1.jpg", "good-2.jpg", "good-3.png", "mislabelled.png"]
    assert [row["image_id"] for row in images] == [f"pairs/{name}" for name in names]
    assert images[0]["path"] == "data/raw/pairs/good-1.jpg", "relative to the project, so that it can move"
    assert (images[0]["width"], images[0]["height"], len(images[0]["sha256"])) == (300, 200, 64)
    quarantine = {row["row_id"]: row for row in read_table("quarantine", out).to_pylist()}
    assert {name: row["rule"] for name, row in quarantine.items()} == {
        "pairs/cut.jpg": "image_decodes",
        "pairs/empty.jpg": "image_not_empty",
        "pairs/bomb.png": "image_not_a_bomb",
        "pairs/no.jpg": "image_present",
    }
    assert quarantine["pairs/no.jpg"]["provenance"] == "pairs.csv:9"
    assert quarantine["pairs/no.jpg"]["reason"] == "data/raw/pairs/no.jpg: no such file"
    assert read_table("captions", out).num_rows == 8, "captions of bad images are validation's to judge"
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    assert (counts["images"], counts["captions"], counts["quarantine"]) == (4, 8, 4)
    assert counts["notes"] == {prepare.MISNAMED: 1}


def test_unknown_split_is_quarantined_before_the_search_for_leaks(workspace: Workspace) -> None:
    splits = {"good-1.jpg": "train", "good-2.jpg": "held-out", "good-3.png": ""}
    listing = workspace.raw("pairs") / "pairs.csv"
    listing.write_text("\n".join(["image,caption,split", *(f"{n},a photo,{s}" for n, s in splits.items())]))
    params = params_for(pairs=PAIRS)
    prepare.run(params, workspace, "pairs")
    out = workspace.interim("pairs")
    assert read_table("images", out)["image_id"].to_pylist() == ["pairs/good-1.jpg"]
    assert [(row["rule"], row["reason"]) for row in read_table("quarantine", out).to_pylist()] == [
        ("split_known", "data/raw/pairs/good-2.jpg: split 'held-out' is not one of train, val, test"),
        ("split_known", "data/raw/pairs/good-3.png: no split, although other images of the dataset have one"),
    ]
    with pytest.raises(DataError, match="split_known: 2"):
        validate.run(params, workspace)


def test_external_images_need_allow_external_images(workspace: Workspace) -> None:
    """`..` and absolute paths; of a link in the dataset its owner has."""
    directory, elsewhere = workspace.raw("pairs"), workspace.root / "private"
    elsewhere.mkdir()
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        pixels = random.Random(name).randbytes(64 * 64 * 3)
        Image.frombytes("RGB", (64, 64), pixels).save(elsewhere / name)
    (directory / "link.jpg").symlink_to(elsewhere / "c.jpg")
    names = ["good-1.jpg", "../../../private/a.jpg", str(elsewhere / "b.jpg"), "link.jpg", "x/../good-2.jpg"]
    (directory / "pairs.csv").write_text("\n".join(["image,caption,split", *(f"{n},a caption,train" for n in names)]))
    prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
    out = workspace.interim("pairs")
    taken = [row["path"].rpartition("/")[2] for row in read_table("images", out).to_pylist()]
    assert taken == ["good-1.jpg", "link.jpg", "good-2.jpg"]
    refused = read_table("quarantine", out).to_pylist()
    assert [(row["rule"], row["provenance"]) for row in refused] == [
        ("image_inside", "pairs.csv:3"),
        ("image_inside", "pairs.csv:4"),
    ]
    assert "data.pairs.allow_external_images: true allows it" in refused[0]["reason"]
    prepare.run(params_for(pairs=dataclasses.replace(PAIRS, allow_external_images=True)), workspace, "pairs")
    assert read_table("images", out).num_rows == 5
    prepare.run(params_for(pairs=dataclasses.replace(PAIRS, images="../../../private")), workspace, "pairs")
    assert read_table("images", out).num_rows == 5, "a folder that params.yaml names"


def test_listed_size_must_match_the_file(workspace: Workspace) -> None:
    images = [
        {"id": 1, "file_name": "good-1.jpg", "width": 300, "height": 200},
        {"id": 2, "file_name": "good-2.jpg", "width": 200, "height": 300},
    ]
    captions = {"images": images, "annotations": [{"id": 1, "image_id": 1, "caption": "Noise."}]}
    (workspace.root / "data/raw/pairs/captions.json").write_text(json.dumps(captions))
    source = DatasetParams.of(format="coco", root="data/raw/pairs", images=".", captions={"train": ["captions.json"]})
    prepare.run(params_for(coco=source), workspace, "coco")
    (row,) = read_table("quarantine", workspace.interim("coco")).to_pylist()
    assert (row["row_id"], row["rule"]) == ("coco/2", "image_size")
    assert row["reason"] == "data/raw/pairs/good-2.jpg: 300x200, listed as 200x300"


def test_no_readable_image_stops_and_leaves_nothing(workspace: Workspace) -> None:
    for path in (*workspace.raw("pairs").glob("good-*"), workspace.raw("pairs") / "mislabelled.png"):
        path.unlink()
    with pytest.raises(DataError, match="none of 8 images is readable") as caught:
        prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
    assert "\n  pairs/good-1.jpg (pairs.csv:2): data/raw/pairs/good-1.jpg: no such file\n" in str(caught.value)
    assert str(caught.value).endswith("and 5 more") and "params.yaml" not in str(caught.value), "some are damaged"
    assert not list((workspace.root / "data" / "interim").glob("*"))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("comma.csv", "image,caption\n" + "a.jpg,one, two\n" * 5, "comma.csv:2: 3 fields, the header has 2"),
        ("latin.csv", b"image,caption\na.jpg,caf\xe9\n", "latin.csv:2): `caption` is not UTF-8"),
        ("keys.jsonl", '{"file_name": "a.jpg", "text": "b"}\n', "no field `image`; has file_name, text"),
        ("list.jsonl", '{"image": "a.jpg", "caption": ["b"]}\n', "`caption` is ['b'], expected str"),
        ("split.csv", "image,caption,split\ngood-1.jpg,a cat,third\n", "split 'third' is not one of train, val, test"),
        ("text.jsonl", "image: a.jpg\n", "none of its 1 lines is a JSON object; line 1: Expecting value"),
    ],
)
def test_reasons_are_shown_if_no_record_can_be_read(
    workspace: Workspace, name: str, content: str | bytes, reason: str
) -> None:
    (workspace.raw("pairs") / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        prepare.run(params_for(pairs=dataclasses.replace(PAIRS, options={"pairs": name})), workspace, "pairs")
    assert reason in str(caught.value)
    assert "lists no image" not in str(caught.value) and "data.pairs.images" not in str(caught.value)


def test_hint_names_the_folder_only_if_the_files_are_missing(workspace: Workspace) -> None:
    (workspace.raw("pairs") / "pairs.csv").write_text("image,caption\nx/1.jpg,a cat\nx/2.jpg,a dog\n")
    with pytest.raises(
        DataError, match=r"none of 2 images is readable(.|\n)*relative to the file that data\.pairs\.pairs"
    ):
        prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
    (workspace.raw("pairs") / "pairs.csv").write_text("image,caption\n")
    with pytest.raises(DataError, match="lists no image"):
        prepare.run(params_for(pairs=PAIRS), workspace, "pairs")


@pytest.mark.parametrize("preset", ["scenes-tasks", "vlmo"])
def test_a_folder_that_a_generator_writes_may_be_missing_before_a_run(preset: str, tmp_path: Path) -> None:
    """As in a new clone, or before the generator has written a new folder."""
    pytest.importorskip("vlp_models.contrib.research_formats")
    pytest.importorskip("vlp_models.contrib.detector")
    params = merge_overlay(ROOT / "params.yaml", ROOT / "vlp_models" / "presets" / f"{preset}.yaml", []).params
    assert explain_roots(params, tmp_path) == []
    check_files(params, tmp_path, regions=True)


def test_missing_dataset_names_where_to_get_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    scenes = GeneratorParams(generator="objects", seed=1, train=1, val=1, test=1)
    sources = {name: dataclasses.replace(PAIRS, root=f"data/raw/{name}") for name in ("pairs", "scenes")}
    sources["scenes_nlvr2"] = dataclasses.replace(PAIRS, root="data/raw/scenes/nlvr2")
    params = dataclasses.replace(params_for(**sources), generate={"scenes": scenes})
    for key, way_out in {
        "pairs": "`data.pairs.root: data/raw/pairs`: no such folder; it should hold a dataset of the format pairs",
        "scenes": "run `vlp stage generate scenes`",
        "scenes_nlvr2": "run `vlp stage generate scenes`",
    }.items():
        with pytest.raises(DataError) as caught:
            prepare.run(params, workspace, key)
        assert sources[key].root in str(caught.value)
        assert way_out in str(caught.value)


def test_unknown_dataset(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"prepare other`: params\.data has pairs"):
        prepare.run(params_for(pairs=PAIRS), Workspace(tmp_path), "other")


def test_parallel_result_equals_sequential_with_refused_rows(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at the front, between and at the end: they are not opened, and keep their places."""
    names = ["../a.jpg", "good-1.jpg", "/b.jpg", "../c.jpg", "no.jpg"]
    names += ["good-2.jpg", "cut.jpg", "good-3.png", "../d.jpg"]
    listing = workspace.raw("pairs") / "pairs.csv"
    listing.write_text("\n".join(["image,caption", *(f"{name},a caption" for name in names)]))
    prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
    alone = hash_path(workspace.interim("pairs"))
    rules = [row["rule"] for row in read_table("quarantine", workspace.interim("pairs")).to_pylist()]
    assert rules == [*["image_inside"] * 3, "image_present", "image_decodes", "image_inside"]
    monkeypatch.setattr(hashes, "SERIAL_LIMIT", 2)
    monkeypatch.setattr(hashes, "CHUNK", 1)
    monkeypatch.setattr(prepare, "cpu_count", lambda most: 2)
    prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
    assert hash_path(workspace.interim("pairs")) == alone
    listing.write_text("image,caption\n../a.jpg,a caption\n/b.jpg,a caption")
    with pytest.raises(DataError, match=r"none of 2 images is readable:\n.*outside of data\.pairs\.root"):
        prepare.run(params_for(pairs=PAIRS), workspace, "pairs")


def test_names_that_differ_in_unicode_form_letter_case_or_slashes_are_found(workspace: Workspace) -> None:
    """As archives of macOS and listings of Windows have them; only if exactly one file fits."""
    folder = workspace.raw("pairs")
    composed, decomposed = (unicodedata.normalize(form, "café-ダム.png") for form in ("NFC", "NFD"))
    (folder / "Sub").mkdir()
    for name in (decomposed, "Sub/IMG_1.JPG", "left\\over.png", "two.png", "TWO.png", "photo-17.png"):
        pixels = random.Random(name).randbytes(64 * 64 * 3)
        Image.frombytes("RGB", (64, 64), pixels).save(folder / name, "PNG")
    listed = [composed, "sub\\img_1.jpg", "left/over.png", "Two.png", "photo-71.png", "..\\..\\x.png", "SUB/none.png"]
    (folder / "pairs.csv").write_text("\n".join(["image,caption,split", *(f"{n},a photo,train" for n in listed)]))
    prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
    out = workspace.interim("pairs")
    paths = [row["path"].removeprefix("data/raw/pairs/") for row in read_table("images", out).to_pylist()]
    assert paths == [decomposed, "Sub/IMG_1.JPG", "left\\over.png"]
    assert [row["reason"].partition(": ")[2] for row in read_table("quarantine", out).to_pylist()] == [
        "no such file; 2 files differ from it only in letter case or Unicode form: TWO.png, two.png",
        "no such file; the nearest name there is photo-17.png",
        "no such file",
        "no such file",
    ]
    assert json.loads((out / "manifest.json").read_text())["counts"]["notes"][prepare.RENAMED] == 3

    images = [{"id": 0, "file_name": "photos\\" + composed}, {"id": 1, "file_name": "PHOTOS\\plain.png"}]
    (folder / "images" / "train" / "photos").mkdir(parents=True)
    (folder / decomposed).rename(folder / "images" / "train" / "photos" / decomposed)
    (folder / "photo-17.png").rename(folder / "images" / "train" / "photos" / "plain.png")
    (folder / "c_train.json").write_text(json.dumps({"images": images, "annotations": []}))
    source = DatasetParams.of(format="coco", root="data/raw/pairs", captions={"train": ["c_train.json"]})
    prepare.run(params_for(c=source), workspace, "c")
    assert read_table("images", workspace.interim("c"))["image_id"].to_pylist() == ["c/0", "c/1"]


def test_list_of_withdrawn_images_is_never_ignored(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace.withdrawn.write_text("{}\n")
    monkeypatch.setattr("vlp_models.curation.duplicates.WITHDRAWN", {})
    with pytest.raises(MissingToolError, match="need vlp_models/contrib/forgetting, which is not installed"):
        prepare.run(params_for(pairs=PAIRS), workspace, "pairs")
