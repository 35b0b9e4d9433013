"""A dataset of scenes with planted mistakes, prepared by the real stages, and its audit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from small_project import TINY, make_data

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.audit.audit import Summary, audit
from vlp_models.contrib.audit.decisions import REPORT
from vlp_models.data.tables import read_table, write_table
from vlp_models.params import GeneratorParams, ModelParams, Params, load_params

ROOT = Path(__file__).parents[2]
STRAY = ("Ein großer roter Ball liegt neben einem Würfel", "Красный мяч лежит рядом с кубом")  # plain-ok
EMPTY = ("DSC 0042", "a photo", "on 2024-05-17")  # which no rule of `validate` refuses
STOCK = "Image courtesy of the archive of the city"
COPIES = 25
VLMO = ModelParams(
    family="vlmo",
    config={"hidden": 16, "heads": 2, "layers": 2, "intermediate": 32, "vl_start": 1, "side": 32, "patch": 8},
)


class Audited(NamedTuple):
    """planted: kind -> ids of the captions that were changed."""

    workspace: Workspace
    params: Params
    planted: dict[str, set[str]]
    summary: Summary

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.workspace.root / REPORT).read_text(encoding="utf-8").splitlines()]

    def listed(self, kind: str) -> list[str]:
        """Return the captions with a finding of the kind, most suspicious first."""
        rows = [(f["score"], row) for row in self.rows() for f in row["findings"] if f["kind"] == kind]
        return [row["caption_id"] for _, row in sorted(rows, key=lambda pair: (-pair[0], pair[1]["rank"]))]


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    workspace = Workspace(tmp_path_factory.mktemp("audit"))
    loaded = load_params(ROOT / "params.yaml")
    generator = GeneratorParams(generator="objects", seed=3, train=300, val=8, test=8, side=64)
    features = dataclasses.replace(loaded.features, source="boxes")
    models = {"tden": TINY, "vlmo": VLMO}
    params = dataclasses.replace(loaded, generate={"scenes": generator}, features=features, models=models)
    cores = os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        os.sched_setaffinity(0, {min(cores)})  # to start another process takes longer than the work
        make_data(params, workspace)
        planted = plant(workspace)
        summary = audit(params, workspace, ["scenes"])
    os.sched_setaffinity(0, cores)
    return Audited(workspace, params, planted, summary)


def plant(workspace: Workspace) -> dict[str, set[str]]:
    """Change captions of the training images; return which."""
    interim = workspace.interim("scenes")
    split_of = {row["image_id"]: row["split"] for row in read_table("images", interim).to_pylist()}
    rows = read_table("captions", interim).to_pylist()
    # one caption an image: swaps are found by the image alone
    rows = list({row["image_id"]: row for row in rows}.values())
    train = [row for row in rows if split_of[row["image_id"]] == "train"]
    swapped, rest = train[:20], train[20:]
    texts = [row["text"] for row in swapped]
    for row, text in zip(swapped, texts[7:] + texts[:7], strict=True):
        row["text"] = text
    planted = {"swapped": {row["caption_id"] for row, text in zip(swapped, texts, strict=True) if row["text"] != text}}
    for kind, changes in (("empty", EMPTY), ("language", STRAY), ("copied", (STOCK,) * COPIES)):
        chosen, rest = rest[: len(changes)], rest[len(changes) :]
        for row, text in zip(chosen, changes, strict=True):
            row["text"] = text
        planted[kind] = {row["caption_id"] for row in chosen}
    write_table([], "quarantine", workspace.validated)
    for directory in (interim, workspace.validated):
        write_table(rows, "captions", directory)
    return planted


@pytest.fixture
def copied(audited: Audited, tmp_path: Path) -> Callable[[], Audited]:
    """Return a function that copies the project, for a test that changes it."""

    def copy() -> Audited:
        shutil.copytree(audited.workspace.root, tmp_path / "project", symlinks=True)
        return audited._replace(workspace=Workspace(tmp_path / "project"))

    return copy
