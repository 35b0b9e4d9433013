"""The generate stage: whole, repeatable, in genuine formats."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image
from pycocotools.coco import COCO

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.params import GeneratorParams, Params, load_params
from vlp_models.pipeline.stages.generate import run
from vlp_models.synthetic.scenes import dataset as objects
from vlp_models.synthetic.scenes.language import check

SCENES = GeneratorParams(generator="objects", seed=3, train=8, val=2, test=3, questions_per_image=6, side=64)


def params_with(entry: GeneratorParams) -> Params:
    root = Path(__file__).resolve().parents[2]
    return dataclasses.replace(load_params(root / "params.yaml"), generate={"scenes": entry})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = Workspace(tmp_path_factory.mktemp("generate"))
    run(params_with(SCENES), workspace, "scenes")
    return workspace.raw("scenes")


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_files_match_the_data_section(made: Path) -> None:
    source = load_params(Path(__file__).resolve().parents[2] / "params.yaml").data["scenes"]
    files = source.options
    named = [files["karpathy"], files["scene_graphs"], *files["captions"]["all"], *files["instances"]["all"]]
    for name in [*named, *files["questions"]["all"], *files["annotations"]["all"]]:
        assert (made / name).is_file(), name
    assert len(list((made / source.images).glob("COCO_scenes_*.png"))) == 13
    assert load(made / "manifest.json")["counts"]["questions"] == 13 * 6


def test_output_is_coco_and_boxes_match_scene_graphs(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coco = COCO(str(made / "annotations" / "instances_scenes.json"))
    capsys.readouterr()
    assert len(coco.cats) == 24
    scenes = [json.loads(line) for line in (made / "scenes.jsonl").read_text().splitlines()]
    assert [int(scene["image_id"]) for scene in scenes] == coco.getImgIds()
    for scene in scenes:
        annotations = coco.loadAnns(coco.getAnnIds(int(scene["image_id"])))
        for annotation, item in zip(annotations, scene["objects"], strict=True):
            x, y, width, height = annotation["bbox"]
            assert [x, y, x + width, y + height] == item["box"]
            shown = f"{item['colour']} {item['shape']}"  # plain-ok
            assert coco.cats[annotation["category_id"]]["name"] == shown
            mask = coco.annToMask(annotation)
            assert annotation["area"] == pytest.approx(mask.sum() * item["visible"], rel=0.25)
        with Image.open(made / "images" / coco.imgs[int(scene["image_id"])]["file_name"]) as image:
            assert image.size == (64, 64) and image.mode == "RGB" and not image.info


def test_captions_karpathy_splits_and_truth_agree(made: Path) -> None:
    captions = {a["id"]: a for a in load(made / "annotations" / "captions_scenes.json")["annotations"]}
    scenes = {s["image_id"]: s for s in map(json.loads, (made / "scenes.jsonl").read_text().splitlines())}
    entries = load(made / "dataset_scenes.json")["images"]
    assert [e["split"] for e in entries] == ["train"] * 8 + ["val"] * 2 + ["test"] * 3
    for entry in entries:
        assert (made / entry["filepath"] / entry["filename"]).is_file()
        assert len(entry["sentids"]) == 5
        for sentence in entry["sentences"]:
            original = captions[sentence["sentid"]]
            assert (original["caption"], original["image_id"]) == (sentence["raw"], entry["cocoid"])
            assert check(" ".join(sentence["tokens"]), scenes[str(entry["cocoid"])]).true


def test_questions_and_annotations_are_vqa_v2(made: Path) -> None:
    questions = load(made / "v2_OpenEnded_mscoco_scenes_questions.json")
    annotations = load(made / "v2_mscoco_scenes_annotations.json")
    assert questions["task_type"] == "Open-Ended" and annotations["data_type"] == "mscoco"
    pairs = list(zip(questions["questions"], annotations["annotations"], strict=True))
    for question, annotation in pairs:
        assert question["question_id"] == annotation["question_id"]
        assert question["question_id"] // 1000 == question["image_id"] == annotation["image_id"]
        assert [a["answer_id"] for a in annotation["answers"]] == list(range(1, 11))
        assert {a["answer_confidence"] for a in annotation["answers"]} <= {"yes", "maybe", "no"}
    assert len({question["question_id"] for question, _ in pairs}) == len(pairs)


def test_second_run_gives_equal_bytes_even_in_parallel(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_WORTH_A_POOL", 1)
    run(params_with(SCENES), Workspace(tmp_path), "scenes")
    assert hash_path(tmp_path / "data" / "raw" / "scenes") == hash_path(made)


def test_another_seed_gives_other_images_and_a_longer_split_the_same_ones(made: Path, tmp_path: Path) -> None:
    images = made / "images"
    for name, entry in {
        "other": dataclasses.replace(SCENES, seed=4, train=1, val=0, test=0),
        "longer": dataclasses.replace(SCENES, train=10),
    }.items():
        run(params_with(entry), Workspace(tmp_path / name), "scenes")
    first = "COCO_scenes_000000000001.png"
    kept, longer, other = images, *(tmp_path / n / "data/raw/scenes/images" for n in ("longer", "other"))
    assert (longer / first).read_bytes() == (kept / first).read_bytes() != (other / first).read_bytes()
    val_kept, val_longer = kept / "COCO_scenes_000000000009.png", longer / "COCO_scenes_000000000011.png"
    assert val_kept.read_bytes() == val_longer.read_bytes()


def test_images_too_small_for_a_scene_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="`side`"):
        run(params_with(dataclasses.replace(SCENES, side=8)), Workspace(tmp_path), "scenes")
    assert not (tmp_path / "data" / "raw" / "scenes").exists()


def test_an_unknown_dataset_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"no `generate\.sceens`; known: scenes"):
        run(params_with(SCENES), Workspace(tmp_path), "sceens")
