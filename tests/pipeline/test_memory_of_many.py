"""prepare, validate and shards pass rows through: more of them need no more memory.

Rows are many here and pictures few, which takes minutes in place of an hour; benchmarks/scale.py has as many of each.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from peak_memory import peak_mb

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.drift import training_stats
from vlp_models.curation.validation import cross_row_facts
from vlp_models.data import mapped, tables
from vlp_models.data.formats import base, pairs
from vlp_models.data.joins import Database
from vlp_models.data.shards import index
from vlp_models.params import load_params
from vlp_models.pipeline.stages import prepare, shards, tokenizer, validate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scale
import scale_structures as structures

STAGES = ("prepare", "validate", "tokenizer", "shards")
HOLDERS = (
    tables,
    base,
    pairs,
    prepare,
    validate,
    shards,
    training_stats,
    cross_row_facts,
)  # hold so many rows at a time
FEW_ROWS = 10_000
FEWER = 1024  # of them

PICTURES = 2000
FEW, MANY = 200_000, 500_000  # `validate` holds two batches of 65,536 at a time
SPARE = 128  # MB, by which allocators differ; the rows between the two, held as objects, are twice that and more
SMALL = "from vlp_models.data import joins\njoins.MEMORY = '128MB'\n"  # DuckDB's, which both sizes fill


def make(root: Path, rows: int, pictures: int = PICTURES) -> None:
    """The benchmark's project, with so many captions: those behind the first are of sound pictures of train."""
    root.mkdir()
    scale.make_project(root, rows, near_duplicates=False, pictures=pictures)


def run(stage: str, root: Path) -> None:
    params, workspace = load_params(root / "params.yaml"), Workspace(root)
    if stage == "prepare":
        prepare.run(params, workspace, "many")
    elif stage == "validate":
        validate.run(params, workspace)
    elif stage == "tokenizer":
        tokenizer.run(params, workspace)
    else:
        shards.run(params, workspace, inputs=[])


@pytest.mark.slow
@pytest.mark.pipeline
@pytest.mark.long
def test_memory_is_constant_in_rows_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Database.stream, "__defaults__", (FEWER,))
    monkeypatch.setattr(prepare, "cpu_count", lambda most: 1)  # with more, what is under way is up to their speed
    monkeypatch.setattr(sys, "intern", str)  # pathlib's: Python's table of all names grows by megabytes at a stroke
    for module in HOLDERS:
        for name in {"BATCH_ROWS", "BATCH"} & vars(module).keys():
            monkeypatch.setattr(module, name, FEWER)
    most: dict[int, dict[str, float]] = {}
    for rows in (2000, FEW_ROWS, 3 * FEW_ROWS):
        root = tmp_path / str(rows)
        make(root, rows, pictures=rows // 10)
        apply_overlay(root / "params.yaml", None, ["shards.images_per_shard=50"])
        if rows == 2000:  # what is loaded once
            for stage in STAGES:
                run(stage, root)
        else:
            most[rows] = {stage: peak_mb(partial(run, stage, root)) for stage in STAGES}
    for stage in STAGES:  # a row that is held takes some 600 bytes: 12 MB for 20,000
        assert most[3 * FEW_ROWS][stage] < most[FEW_ROWS][stage] + 4, most


INDEXES = {
    "features": (structures.make_features, structures.look_up_features),
    "hashes": (structures.make_hashes, structures.open_hashes),
    "shards": (partial(structures.make_shards, per_shard=1000), structures.load_all),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_are_not_held(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is held takes 30 bytes per row and more: 4 MB for 120,000."""
    monkeypatch.setattr(mapped, "MAPPED", 1)
    monkeypatch.setattr(mapped, "PIECE", FEWER)
    monkeypatch.setattr(index, "PIECE", FEWER)
    for constant in ("LOOKUPS", "BATCH", "BATCHES"):
        monkeypatch.setattr(structures, constant, 20)
    make, use = INDEXES[name]
    most = {}
    for rows in (2000, 30_000, 150_000):
        root = tmp_path / str(rows)
        root.mkdir()
        make(root, rows)
        most[rows] = peak_mb(partial(use, root, rows))
    assert most[150_000] < most[30_000] + 1, most


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "STAGE", SMALL + scale.STAGE)
    most: dict[tuple[str, int], float] = {}
    for rows in (FEW, MANY):
        root = tmp_path / str(rows)
        make(root, rows)
        for stage in ("prepare", "validate"):
            most[stage, rows] = scale.measure(root, stage, 0)["peak_mb"]
        scale.check(root, PICTURES)
        report = json.loads((root / "reports" / "validation.json").read_text())
        assert report["tables"]["captions"]["rows"] == rows
    for stage in ("prepare", "validate"):
        assert most[stage, MANY] < most[stage, FEW] + SPARE, most
