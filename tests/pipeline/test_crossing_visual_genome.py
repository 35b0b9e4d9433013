"""Visual Genome learns from photos that COCO tests on, saved again and in another size.

The door finds them by the pictures alone; `exclude` has them by COCO's ids, before the door.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from photos import photo

from vlp_models.common.workspace import Workspace
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams, Params, load_params
from vlp_models.pipeline.stages import prepare, validate

ROOT = Path(__file__).parents[2]
COCO = {41: "train", 42: "restval", 43: "val", 44: "test", 45: "test"}
GENOME = {7: None, 8: 41, 9: 42, 10: 43, 11: 44}  # its photos: which of COCO's they are
SIZE = (300, 225)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    coco, genome = tmp_path / "data" / "raw" / "coco", tmp_path / "data" / "raw" / "vg"
    (coco / "images").mkdir(parents=True)
    (genome / "VG_100K").mkdir(parents=True)
    listed, images, regions = [], [], []
    for number, split in COCO.items():
        photo(number).save(coco / "images" / f"{number}.jpg", quality=90)
        sentences = [{"sentid": number, "raw": f"A photo of {number} things."}]
        listed.append({"filename": f"{number}.jpg", "cocoid": number, "split": split, "sentences": sentences})
    for number, known in GENOME.items():
        photo(known or number).resize(SIZE).save(genome / "VG_100K" / f"{number}.jpg", quality=60)
        url = f"https://cs.stanford.edu/VG_100K/{number}.jpg"
        images.append({"image_id": number, "width": SIZE[0], "height": SIZE[1], "url": url, "coco_id": known})
        regions.append({"id": number, "regions": [{"region_id": number, "phrase": f"a thing on {number}"}]})
    (coco / "dataset_coco.json").write_text(json.dumps({"images": listed, "dataset": "coco"}))
    (genome / "image_data.json").write_text(json.dumps(images))
    (genome / "region_descriptions.json").write_text(json.dumps(regions))
    return Workspace(tmp_path)


def run(workspace: Workspace, max_bad_fraction: float, exclude: list[str]) -> dict[str, set[str]]:
    """Of each split, the images that the door lets through; captions are of these alone."""
    params: Params = load_params(ROOT / "params.yaml")
    params = dataclasses.replace(
        params,
        data={
            "coco": DatasetParams.of(format="coco", root="data/raw/coco", karpathy="dataset_coco.json"),
            "vg": DatasetParams.of(format="visual_genome", root="data/raw/vg", exclude=exclude),
        },
        validate=dataclasses.replace(params.validate, max_bad_fraction=max_bad_fraction),
    )
    for name in params.data:
        prepare.run(params, workspace, name)
    validate.run(params, workspace)
    found: dict[str, set[str]] = {}
    for row in read_table("images", workspace.validated).to_pylist():
        found.setdefault(row["split"], set()).add(row["image_id"])
    assert set(read_table("captions", workspace.validated)["image_id"].to_pylist()) == set().union(*found.values())
    return found


@pytest.mark.slow
def test_coco_test_photos_are_excluded_from_training(workspace: Workspace) -> None:
    with pytest.raises(DataError, match=r"near_disjoint: 2") as caught:
        run(workspace, 0.01, exclude=[])
    assert "vg/11 (image_data.json[4]): near_disjoint: the same image is in test as coco/44" in str(caught.value)
    found = run(workspace, 0.3, exclude=[])
    assert found == {
        "train": {"coco/41", "coco/42", "vg/7", "vg/8", "vg/9"},
        "val": {"coco/43"},
        "test": {"coco/44", "coco/45"},
    }
    assert run(workspace, 0.0, exclude=["../coco/dataset_coco.json"]) == found, "and nothing is in quarantine"
