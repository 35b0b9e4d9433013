"""SNLI-VE divides Flickr's photos otherwise than Flickr8k: what one tests on, the other learns from, by another name.

Each has them in a size and quality of its own. The door finds it by the pictures alone, and lists of photos
(`split_files`) divide both alike.
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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FLICKR8K = {
    "100_ab00000000": "train",
    "200_cd00000000": "train",
    "300_ef00000000": "train",
    "400_0100000000": "dev",
    "500_2300000000": "test",
}
SNLI_VE = {
    "100": "test",
    "200": "train",
    "400": "train",
    "500": "dev",
}  # 100 is trained from there, 400 and 500 are here
SIZE = (300, 225)  # of SNLI-VE's
LISTS = {
    split: [f"../flickr8k/Flickr_8k.{name}Images.txt"]
    for split, name in (("train", "train"), ("val", "dev"), ("test", "test"))
}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    flickr8k, snli_ve = tmp_path / "data" / "raw" / "flickr8k", tmp_path / "data" / "raw" / "snli_ve"
    (flickr8k / "Images").mkdir(parents=True)
    (snli_ve / "images").mkdir(parents=True)
    for name in FLICKR8K:
        photo(int(name[:3])).save(flickr8k / "Images" / f"{name}.jpg", quality=90)
    for split in ("train", "dev", "test"):
        names = [f"{name}.jpg\n" for name, own in FLICKR8K.items() if own == split]
        (flickr8k / f"Flickr_8k.{split}Images.txt").write_text("".join(names))
    (flickr8k / "Flickr8k.token.txt").write_text("".join(f"{name}.jpg#0\tA dog runs .\n" for name in FLICKR8K))
    for name, split in SNLI_VE.items():
        photo(int(name)).resize(SIZE).save(snli_ve / "images" / f"{name}.jpg", quality=60)
        line = {
            "Flikr30kID": f"{name}.jpg",
            "pairID": f"{name}.jpg#0r1e",
            "gold_label": "entailment",
            "annotator_labels": ["entailment"],
            "sentence2": "An animal moves.",
        }
        with (snli_ve / f"snli_ve_{split}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return Workspace(tmp_path)


def settings(max_bad_fraction: float, **snli_ve: object) -> Params:
    params = load_params(ROOT / "params.yaml")
    return dataclasses.replace(
        params,
        data={
            "flickr8k": DatasetParams.of(format="flickr8k", root="data/raw/flickr8k"),
            "snli_ve": DatasetParams.of(format="snli_ve", root="data/raw/snli_ve", **snli_ve),  # type: ignore[arg-type]
        },
        validate=dataclasses.replace(params.validate, max_bad_fraction=max_bad_fraction),
    )


def run(params: Params, workspace: Workspace) -> None:
    for name in params.data:
        prepare.run(params, workspace, name)
    validate.run(params, workspace)


def splits(workspace: Workspace) -> dict[str, str]:
    return {row["image_id"]: row["split"] for row in read_table("images", workspace.validated).to_pylist()}


def test_overlapping_splits_are_found_by_image_content(workspace: Workspace) -> None:
    with pytest.raises(DataError, match=r"near_disjoint: 3") as caught:
        run(settings(0.01), workspace)
    assert "is in test as snli_ve/100" in str(caught.value)
    run(settings(0.6), workspace)
    assert splits(workspace) == {
        "flickr8k/200_cd00000000": "train",
        "flickr8k/300_ef00000000": "train",
        "flickr8k/400_0100000000": "val",
        "flickr8k/500_2300000000": "test",
        "snli_ve/100": "test",
        "snli_ve/200": "train",
    }, "the copy that is tested on stays, the one that would be trained from or chosen by goes"
    captioned = read_table("captions", workspace.validated)["image_id"].to_pylist()
    assert "flickr8k/100_ab00000000" not in captioned, "and so does what was written of it"


def test_shared_split_lists_prevent_the_overlap(workspace: Workspace) -> None:
    run(settings(0.01, split_files=LISTS), workspace)
    found = splits(workspace)
    assert len(found) == len(FLICKR8K) + len(SNLI_VE)
    for name, split in FLICKR8K.items():
        alike = {own for image_id, own in found.items() if image_id.rpartition("/")[2].partition("_")[0] == name[:3]}
        assert alike == {"val" if split == "dev" else split}
