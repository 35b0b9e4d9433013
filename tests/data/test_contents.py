"""What a run depends on of the shards: changed by what it reads, and by nothing else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_files import hash_shards

from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.contents import (
    CONTENTS,
    Kind,
    evaluation_file,
    find_changed_data,
    trained_on_file,
    trained_on_inputs,
)
from vlp_models.data.shards.write import ImageRecord

Record = Callable[..., ImageRecord]


@pytest.fixture
def hashed(build_shards: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """hashed(kind, train=..., val=..., ...): data/contents of these shards, file -> contents."""

    def made(kind: Kind = "regions", **splits: Any) -> dict[str, Any]:
        shards = build_shards(**splits)
        hash_shards(shards, kind)
        contents = tmp_path / "contents"
        found = {str(p.relative_to(contents)): json.loads(p.read_text()) for p in contents.rglob("*.json")}
        shutil.rmtree(shards)
        shutil.rmtree(contents)
        return found

    return made


CAPTIONS = trained_on_file("regions", "captions", ())
QUESTIONS = trained_on_file("regions", "questions", ())


def test_hashes_do_not_depend_on_packing_or_unread_data(hashed: Callable[..., dict[str, Any]], record: Record) -> None:
    plain = hashed(train=[record(i) for i in range(5)], val=[record(9)])
    with_pixels = hashed(train=[record(i, pixels=True) for i in range(5)], val=[record(9)], pixels=True)
    assert with_pixels == plain, "images next to regions"
    # a dataset in front of it, which moves every shard's border, and has questions alone
    others = [record(i, source="a") for i in range(2)]
    others = [dataclasses.replace(other, rows={"questions": other.rows["questions"]}) for other in others]
    more = hashed(train=[*others, *(record(i) for i in range(5))], val=[record(9)])
    assert more[CAPTIONS] == plain[CAPTIONS] and more[QUESTIONS] != plain[QUESTIONS]
    assert more[trained_on_file("regions", "questions", ["scenes"])] == plain[QUESTIONS]["scenes"]
    assert more[trained_on_file("regions", "captions", ["a"])] == {}
    tested = hashed(train=[record(i) for i in range(5)], val=[record(9)], test=[record(7)])
    assert tested[CAPTIONS] == plain[CAPTIONS], "who learns does not see the test split"
    assert tested[evaluation_file("regions", "captions")] and not plain[evaluation_file("regions", "captions")]


@pytest.mark.parametrize("change", ["text", "regions", "order", "fewer", "another split"])
def test_hashes_change_with_the_data_read(hashed: Callable[..., dict[str, Any]], record: Record, change: str) -> None:
    records, val = [record(i) for i in range(4)], [record(9)]
    before = hashed(train=records, val=val)
    if change == "text":
        other = [{**records[2].rows["captions"][0], "text": "another"}, records[2].rows["captions"][1]]
        records[2] = dataclasses.replace(records[2], rows={**records[2].rows, "captions": other})
    elif change == "regions":
        records[2] = dataclasses.replace(records[2], regions=record(6).regions)
    elif change == "order":
        records = records[::-1]
    elif change == "fewer":
        records = records[:-1]
    else:
        records, val = records[:-1], [*val, records[-1]]
    after = hashed(train=records, val=val)
    assert after[CAPTIONS] != before[CAPTIONS]
    assert (after[QUESTIONS] == before[QUESTIONS]) == (change == "text"), "of one view only"


def test_a_kind_reads_its_own_part_of_an_image(hashed: Callable[..., dict[str, Any]], record: Record) -> None:
    records = [record(i, pixels=True) for i in range(3)]
    changed = [*records[:2], dataclasses.replace(records[2], pixels=record(7, pixels=True).pixels)]
    for kind, same in (("regions", True), ("pixels", False), ("texts", True)):
        before, after = hashed(kind, train=records, pixels=True), hashed(kind, train=changed, pixels=True)
        assert (before == after) is same


def test_hashes_of_image_pairs_cover_both_images(hashed: Callable[..., dict[str, Any]], record: Record) -> None:
    def pairs(third: ImageRecord) -> Any:
        rows = {"pair_id": "p", "text": "both?", "label": True, "group": "g"}
        row = rows | {"other_image_ids": [third.image_id]}
        first = record(0)
        first = dataclasses.replace(first, rows={**first.rows, "image_pairs": [row]})
        return hashed(train=[first, record(1), third])[trained_on_file("regions", "image_pairs", ())]

    third = record(3)
    assert pairs(third) == pairs(third) != pairs(dataclasses.replace(third, regions=record(2).regions))


def test_changed_training_data_is_found(tmp_path: Path) -> None:
    workspace, name = Workspace(tmp_path), f"{CONTENTS}/{CAPTIONS}"
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text("then")
    inputs = {name: hash_file(file), "tokenizer": "1" * 64}
    assert trained_on_inputs(inputs) == [name] and not find_changed_data(workspace, inputs)
    file.write_text("now")
    assert find_changed_data(workspace, inputs) == [name]

    # A streamed run: repacking changes its order of samples, though no sample.
    index = workspace.shards / "index-train.json"
    index.parent.mkdir(parents=True)
    index.write_text("packed once")
    inputs = {index.name: hash_file(index)}
    assert trained_on_inputs(inputs) == [index.name] and not find_changed_data(workspace, inputs)
    index.write_text("packed again")
    assert find_changed_data(workspace, inputs) == [index.name]
