"""COCO, Karpathy and VQA v2 files, written here in their genuine form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.data.formats import read_source
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams

NAMES = {9: "COCO_train2014_000000000009.jpg", 42: "COCO_val2014_000000000042.jpg", 73: "COCO_val2014_000000000073.jpg"}
FOLDERS = {9: "train2014", 42: "val2014", 73: "val2014"}


def captions_file() -> dict[str, Any]:
    texts = {9: ["A cup on a table. ", "a cup\n"], 42: ["A cat."], 73: ["Two bikes."]}
    annotations = [
        {"image_id": image, "id": 100 * image + n, "caption": text}
        for image, several in texts.items()
        for n, text in enumerate(several)
    ]
    images = [{"id": i, "file_name": name, "width": 64, "height": 48, "license": 3} for i, name in NAMES.items()]
    return {"info": {}, "licenses": [], "images": images, "annotations": annotations}


def instances_file() -> dict[str, Any]:
    boxes = [
        {"id": 1, "image_id": 9, "category_id": 47, "bbox": [10.5, 20, 30, 8], "iscrowd": 0, "area": 240},
        {"id": 2, "image_id": 42, "category_id": 17, "bbox": [0, 0, 64, 48], "iscrowd": 1, "area": 9},
        {"id": 3, "image_id": 42, "category_id": 17, "bbox": [1, 2, 3, 4], "iscrowd": 0, "area": 12},
    ]
    categories = [{"id": 47, "name": "cup"}, {"id": 17, "name": "cat", "supercategory": "animal"}]
    return {"images": captions_file()["images"], "annotations": boxes, "categories": categories}


def karpathy_file() -> dict[str, Any]:
    splits = {9: "train", 42: "restval", 73: "test"}
    images = [
        {
            "filepath": FOLDERS[image],
            "filename": NAMES[image],
            "imgid": n,
            "split": split,
            "cocoid": image,
            "sentids": [image],
            "sentences": [{"tokens": ["a"], "raw": f"Photo {image} .", "imgid": n, "sentid": image}],
        }
        for n, (image, split) in enumerate(splits.items())
    ]
    return {"images": images, "dataset": "coco"}


def questions_files() -> tuple[dict[str, Any], dict[str, Any]]:
    questions = [{"image_id": i, "question": f"What is in {i}?", "question_id": i * 1000} for i in NAMES]
    annotations = [
        {
            "question_id": i * 1000,
            "image_id": i,
            "question_type": "what is",
            "answer_type": "other",
            "multiple_choice_answer": "cup",
            "answers": [{"answer_id": n + 1, "answer": "A Cup", "answer_confidence": "yes"} for n in range(10)],
        }
        for i in NAMES
    ]
    return {"task_type": "Open-Ended", "questions": questions}, {"annotations": annotations}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for image, name in NAMES.items():
        (tmp_path / "images" / FOLDERS[image]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / FOLDERS[image] / name).touch()
    questions, annotations = questions_files()
    files = {
        "captions.json": captions_file(),
        "instances.json": instances_file(),
        "karpathy.json": karpathy_file(),
        "questions.json": questions,
        "answers.json": annotations,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def source(**changes: Any) -> DatasetParams:
    files = {
        "captions": {"all": ["captions.json"]},
        "instances": {"all": ["instances.json"]},
        "karpathy": "karpathy.json",
        "questions": {"all": ["questions.json"]},
        "annotations": {"all": ["answers.json"]},
    }
    return DatasetParams.of(format="coco", root=".", **{**files, **changes})


def rewrite(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rules(tables: Any) -> list[tuple[str, str, str]]:
    return [(row["table"], row["rule"], row["provenance"]) for row in tables["quarantine"]]


def test_all_files_are_joined(root: Path) -> None:
    tables = read_source("d", source(), root)
    assert not tables["quarantine"]
    splits = {row["image_id"]: row["split"] for row in tables["images"]}
    assert splits == {"d/9": "train", "d/42": "train", "d/73": "test"}, "restval is train; images are listed once"
    assert all(Path(row["path"]).exists() for row in tables["images"])
    assert [row["text"] for row in tables["captions"]] == ["A cup on a table.", "a cup", "A cat.", "Two bikes."]
    assert tables["captions"][1]["provenance"] == "captions.json#annotations[1]"
    assert [(row["category"], row["x1"], row["y1"], row["x2"], row["y2"]) for row in tables["objects"]] == [
        ("cup", 10.5, 20, 40.5, 28),
        ("cat", 1, 2, 4, 6),
    ]
    assert tables.skipped == {"crowd regions": 1}
    assert tables["questions"][0]["answers"] == ["A Cup"] * 10, "answers stay as they were typed"
    assert tables["questions"][0]["question_id"] == "d/9000"
    hidden = read_source("d", source(annotations={}), root)
    assert [row["answers"] for row in hidden["questions"]] == [[], [], []]


def test_split_by_file_and_folder_by_name(root: Path) -> None:
    """The tiny-COCO layout: captions_train2017.json next to train2017/."""
    (root / "captions.json").rename(root / "captions_train2017.json")
    (root / "train2017").mkdir()
    for name in NAMES.values():
        (root / "train2017" / name).touch()
    params = DatasetParams.of(format="coco", root=".", images=".", captions={"train": ["captions_train2017.json"]})
    tables = read_source("d", params, root)
    assert {row["split"] for row in tables["images"]} == {"train"}
    assert tables["images"][0]["path"] == str(root / "train2017" / NAMES[9])


def test_karpathy_alone_gives_captions(root: Path) -> None:
    """Flickr30k: no cocoid, no filepath, and no captions file."""

    def flickr(content: Any) -> None:
        for image in content["images"]:
            del image["cocoid"], image["filepath"]

    rewrite(root / "karpathy.json", flickr)
    tables = read_source("f", DatasetParams.of(format="coco", root=".", karpathy="karpathy.json"), root)
    assert [row["image_id"] for row in tables["images"]] == [
        f"f/{name.removesuffix('.jpg')}" for name in NAMES.values()
    ]
    assert [row["text"] for row in tables["captions"]] == ["Photo 9 .", "Photo 42 .", "Photo 73 ."]
    assert tables["captions"][2]["provenance"] == "karpathy.json#images[2].sentences[0]"


def test_image_that_the_karpathy_file_lacks_is_quarantined_once(root: Path) -> None:
    rewrite(root / "karpathy.json", lambda content: content["images"].pop(1))
    tables = read_source("d", source(), root)
    assert [row["image_id"] for row in tables["images"]] == ["d/9", "d/73"]
    assert rules(tables) == [("images", "split_known", "captions.json#images[1]")]
    assert tables["quarantine"][0]["row_id"] == "d/42"
    assert tables["quarantine"][0]["reason"] == "image 42 is not in the Karpathy file, so it has no split"


@pytest.mark.parametrize("name", ["validation", "valid", "dev", "Val", "VALIDATION "])
def test_synonyms_of_splits_in_params_and_in_the_karpathy_file(root: Path, name: str) -> None:
    def rename(content: Any) -> None:
        content["images"][2]["split"] = name

    rewrite(root / "karpathy.json", rename)
    tables = read_source("d", source(), root)
    assert [row["split"] for row in tables["images"]] == ["train", "train", "val"]
    by_key = source(karpathy="", captions={name: ["captions.json"]}, instances={"val": ["instances.json"]})
    tables = read_source("d", by_key, root)
    assert {row["split"] for row in tables["images"]} == {"val"} and len(tables["images"]) == 3


def test_an_image_listed_twice_reaches_validation(root: Path) -> None:
    rewrite(root / "captions.json", lambda content: content["images"].append(content["images"][0]))
    tables = read_source("d", source(instances={}), root)
    assert [row["image_id"] for row in tables["images"]].count("d/9") == 2, "validation's rule id_unique"
    assert len(tables["captions"]) == 4


def test_captions_of_a_file_with_one_id_for_two_images_may_be_of_either(root: Path) -> None:
    rewrite(root / "captions.json", lambda content: content["images"].append({"id": 9, "file_name": "other.jpg"}))
    tables = read_source("d", source(), root)
    assert [row["image_id"] for row in tables["images"]] == ["d/9", "d/42", "d/73"]
    assert [row["image_id"] for row in tables["captions"]] == ["d/42", "d/73"]
    assert len(tables["objects"]) == 2, "instances.json has one image of this id"
    assert rules(tables) == [
        ("images", "id_unique", "captions.json#images[3]"),
        ("captions", "id_unique", "captions.json#annotations[0]"),
        ("captions", "id_unique", "captions.json#annotations[1]"),
        ("questions", "id_unique", "questions.json#questions[0]"),
    ]


def overlapping_file(name: str, number: int) -> dict[str, Any]:
    """An annotation file whose only image has the id 1, as in every other one. `number`: of its annotations."""
    return {
        "images": [{"id": 1, "file_name": name}],
        "annotations": [{"id": number, "image_id": 1, "caption": f"a {name}", "category_id": 1, "bbox": [0, 0, 5, 5]}],
        "categories": [{"id": 1, "name": "dog"}],
        "questions": [{"question_id": number, "image_id": 1, "question": f"what is in {name}?"}],
    }


@pytest.mark.parametrize("names", [("a.jpg", "b.jpg"), ("1.jpg", "1.jpg")], ids=["two names", "two folders"])
def test_annotations_of_a_file_that_uses_an_id_for_another_image_are_quarantined(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    for number, (split, name) in enumerate(zip(("train", "test"), names, strict=True), start=1):
        (tmp_path / split).mkdir()
        (tmp_path / split / name).touch()
        (tmp_path / f"own_{split}.json").write_text(json.dumps(overlapping_file(name, number)))
    files = {"train": ["own_train.json"], "test": ["own_test.json"]}
    params = DatasetParams.of(format="coco", root=".", images=".", captions=files, instances=files, questions=files)
    tables = read_source("d", params, tmp_path)
    assert [row["split"] for row in tables["images"]] == ["train"]
    assert [row["caption_id"] for row in tables["captions"]] == ["d/1"]
    assert [row["object_id"] for row in tables["objects"]] == ["d/1"]
    assert [row["question_id"] for row in tables["questions"]] == ["d/1"], "it is under the key of the image's file"
    assert rules(tables) == [
        ("images", "id_unique", "own_test.json#images[0]"),
        ("captions", "id_unique", "own_test.json#annotations[0]"),
        ("objects", "id_unique", "own_test.json#annotations[0]"),
        ("questions", "id_unique", "own_test.json#questions[0]"),
    ]
    annotated = f"image 1 was train/{names[0]} before and is test/{names[1]} here"
    asked = f"image 1 is train/{names[0]} and test/{names[1]}"
    assert [row["reason"] for row in tables["quarantine"]] == [annotated, annotated, annotated, asked]
    both = DatasetParams.of(
        format="coco",
        root=".",
        images=".",
        captions={"train": ["own_train.json", "own_test.json"]},
        questions={"train": ["own_train.json"]},
    )
    tables = read_source("d", both, tmp_path)
    assert [row["caption_id"] for row in tables["captions"]] == ["d/1"]
    assert not tables["questions"], "a question under their common key may be about either"


def test_one_image_may_be_named_with_its_folder(root: Path) -> None:
    rewrite(root / "instances.json", lambda content: content["images"][0].update(file_name=f"train2014/{NAMES[9]}"))
    tables = read_source("d", source(), root)
    assert len(tables["images"]) == 3 and len(tables["objects"]) == 2 and not tables["quarantine"]


def test_val_fraction_holds_out_training_images(root: Path) -> None:
    keys = {"all": ["captions.json"]}
    tables = read_source("d", source(captions=keys, val_fraction=1.0), root)
    splits = {row["image_id"]: row["split"] for row in tables["images"]}
    assert splits == {"d/9": "val", "d/42": "val", "d/73": "test"}
    assert len(tables["images"]) == 3, "instances.json lists the same images again"
    assert not tables["quarantine"] and not tables.held_out
    grouped = read_source("d", source(val_fraction=1.0, group_near_duplicates=True), root)
    assert grouped.held_out == {"d/9": "9", "d/42": "42"}
    assert {row["split"] for row in read_source("d", source(val_fraction=0.0), root)["images"]} == {"train", "test"}


def test_file_that_lists_only_images(root: Path) -> None:
    """VQA v2's image_info_test2015.json has the images of the test questions and no annotations."""
    images = captions_file()["images"]
    (root / "image_info_test2015.json").write_text(json.dumps({"info": {}, "images": images}))
    for section in ("captions", "instances"):
        files: dict[str, Any] = {"captions": {}, "instances": {}, "karpathy": "", "annotations": {}}
        files |= {section: {"test": ["image_info_test2015.json"]}, "questions": {"test": ["questions.json"]}}
        tables = read_source("d", source(**files), root)
        assert {row["split"] for row in tables["images"]} == {"test"} and len(tables["questions"]) == 3
        assert not tables["captions"] and not tables["objects"] and not tables["quarantine"]


def test_limit_drops_rows_of_dropped_images(root: Path) -> None:
    tables = read_source("d", source(limit=1), root)
    assert [row["image_id"] for row in tables["images"]] == ["d/9", "d/73"], "the first of each split"
    for rows in (tables["captions"], tables["objects"], tables["questions"]):
        assert {row["image_id"] for row in rows} <= {"d/9", "d/73"}
    assert not tables["quarantine"]


def test_bad_records_are_quarantined_one_by_one(root: Path) -> None:
    def spoil(content: Any) -> None:
        content["annotations"][0] = {"image_id": 9, "id": 900}
        content["annotations"][1]["caption"] = ["a", "list"]
        content["annotations"][2] = "a string"
        content["images"][1]["file_name"] = "../../etc/passwd"

    rewrite(root / "captions.json", spoil)
    (root / "captions.json").write_bytes((root / "captions.json").read_bytes().replace(b"Two bikes", b"Two b\xefkes"))

    def spoil_boxes(content: Any) -> None:
        content["annotations"][0]["bbox"] = [1, 2, 3]
        content["annotations"][2]["category_id"] = 99

    rewrite(root / "instances.json", spoil_boxes)
    tables = read_source("d", source(), root)
    assert rules(tables) == [
        ("images", "path_inside", "captions.json#images[1]"),
        ("captions", "record_readable", "captions.json#annotations[0]"),
        ("captions", "record_readable", "captions.json#annotations[1]"),
        ("captions", "record_readable", "captions.json#annotations[2]"),
        ("captions", "text_utf8", "captions.json#annotations[3]"),
        ("objects", "record_readable", "instances.json#annotations[0]"),
        ("objects", "category_known", "instances.json#annotations[2]"),
    ]
    assert tables["quarantine"][1]["reason"] == "no field `caption`; has image_id, id"
    assert tables["quarantine"][1]["row_id"] == "d/900"
    assert "\\udcef" in tables["quarantine"][4]["reason"], "the bad byte is shown, and can be stored"
    json.dumps(tables["quarantine"]).encode()


def test_questions_and_annotations_must_match(root: Path) -> None:
    def spoil(content: Any) -> None:
        content["annotations"][0]["question_id"] = 5
        content["annotations"][1]["image_id"] = 9
        content["annotations"].append(content["annotations"][2])

    rewrite(root / "answers.json", spoil)
    tables = read_source("d", source(), root)
    assert [row["question_id"] for row in tables["questions"]] == ["d/73000"]
    assert sorted((row["row_id"], row["rule"]) for row in tables["quarantine"]) == [
        ("d/42000", "annotation_found"),
        ("d/5", "annotation_found"),
        ("d/73000", "id_unique"),
        ("d/9000", "annotation_found"),
    ]


def test_truth_carries_the_source_name(root: Path) -> None:
    half = '{"image_id": 9, "x": ["\\ud800"]}'
    lines = ['{"image_id": 9, "objects": []}', '{"image_id": "d/42"}', "not json", half, ""]
    (root / "truth.jsonl").write_text("\n".join(lines))
    tables = read_source("d", source(scene_graphs="truth.jsonl"), root)
    assert [row["image_id"] for row in tables["truth"]] == ["d/9", "d/42"]
    assert rules(tables) == [("truth", "record_readable", "truth.jsonl:3"), ("truth", "text_utf8", "truth.jsonl:4")]


@pytest.mark.parametrize(
    ("changes", "content", "message"),
    [
        ({"captions": {"all": ["absent.json"]}}, None, "absent.json: no such file"),
        ({}, "{ not json", "captions.json:1: not JSON"),
        ({}, "[1, 2]", "expected a list under `images`, found list without a key; if it lists images with their capt"),
        ({}, " ", "an empty file instead of a COCO annotation file"),
        ({}, '{"questions": []}', "expected a list under `images`, found the keys questions"),
        ({"captions": {"trial": ["captions.json"]}}, None, "captions.trial: expected one of train, val, test"),
        ({"karpathy": ""}, None, "captions.all: files of every split need data.d.karpathy"),
        ({"captions": {}, "instances": {}, "karpathy": ""}, None, "data.d lists no images"),
        ({}, '{"images": [], "annotations": 3}', "expected a list under `annotations`, found the keys images"),
        ({"questions": {}}, None, "annotations has `all`, but data.d.questions has not"),
    ],
)
def test_wrong_files_are_named(root: Path, changes: dict[str, Any], content: str | None, message: str) -> None:
    if content is not None:
        (root / "captions.json").write_text(content)
    with pytest.raises(DataError) as caught:
        read_source("d", source(**changes), root)
    assert message in str(caught.value)


ODD_SIZES = [None, 0, -1, "", "?", [], True, 0.5, float("nan"), float("inf")]


@pytest.mark.parametrize(
    ("size", "width"), [*((size, None) for size in ODD_SIZES), *((size, 64) for size in (64, 64.0, "64", " 64.0 "))]
)
def test_sizes_are_converted_and_odd_ones_unknown(root: Path, size: Any, width: int | None) -> None:
    rewrite(root / "captions.json", lambda content: content["images"][0].update(id=9.0, width=size))
    tables = read_source("d", source(instances={}), root)
    sizes = [(row["image_id"], row["width"], row["height"]) for row in tables["images"]]
    assert sizes == [("d/9", width, width and 48), ("d/42", 64, 48), ("d/73", 64, 48)], "ids of pandas are floats"
    assert not tables["quarantine"]


def test_odd_optional_fields_cost_no_record(root: Path) -> None:
    rewrite(root / "karpathy.json", lambda content: content["images"][0].update(filepath=None))

    def change(content: Any) -> None:
        content["annotations"][0].update(iscrowd="0", attributes=["red", "striped"])
        content["annotations"][1]["iscrowd"] = True
        content["annotations"][2].update(iscrowd=None, attributes={"occluded": False})

    rewrite(root / "instances.json", change)
    tables = read_source("d", source(), root)
    objects = [(row["object_id"], row["attributes"]) for row in tables["objects"]]
    assert objects == [("d/1", ["red", "striped"]), ("d/3", None)], "`attributes` of another tool is no list of words"
    assert tables.skipped["crowd regions"] == 1 and not tables["quarantine"]
    rewrite(root / "karpathy.json", lambda content: [image.update(cocoid=None) for image in content["images"]])
    tables = read_source("f", DatasetParams.of(format="coco", root=".", karpathy="karpathy.json"), root)
    assert len(tables["images"]) == 3 and not tables["quarantine"]


def test_questions_without_types_and_with_numbers_as_answers(root: Path) -> None:
    def change(content: Any) -> None:
        for annotation, answer in zip(content["annotations"], (2, "Yes", 2.5), strict=True):
            annotation["answers"] = [{"answer": answer}] * 10
            del annotation["question_type"], annotation["answer_type"]
        content["annotations"][0]["answers"][0] = {"answer": 3.0}
        content["annotations"][1].update(question_type=None, answer_type=7, answers=["Yes"] * 10)

    rewrite(root / "answers.json", change)
    tables = read_source("d", source(), root)
    assert not tables["quarantine"]
    assert [row["answers"][:2] for row in tables["questions"]] == [["3", "2"], ["Yes", "Yes"], ["2.5", "2.5"]]
    found = [(row["question_type"], row["answer_type"]) for row in tables["questions"]]
    assert found == [("", "number"), ("", "yes/no"), ("", "number")]


def test_the_readable_one_of_two_annotations_is_kept(root: Path) -> None:
    def change(content: Any) -> None:
        good = content["annotations"][0]
        content["annotations"][:1] = [{**good, "answers": None}, good, {**good, "answers": [{"answer": "x"}] * 10}]

    rewrite(root / "answers.json", change)
    tables = read_source("d", source(), root)
    assert len(tables["questions"]) == 3 and tables["questions"][0]["answers"] == ["A Cup"] * 10
    assert rules(tables) == [("questions", "id_unique", "answers.json#annotations[2]")]
