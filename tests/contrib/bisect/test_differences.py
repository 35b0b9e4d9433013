"""What differs between two versions, from a dvc.lock and a cache of a few files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from vlp_models.contrib.bisect.differences import Difference, Origin, find_differences, format_differences
from vlp_models.errors import DataError


class Cache:
    """Files by md5, as DVC stores them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()

    def add(self, content: bytes, suffix: str = "") -> str:
        md5 = hashlib.md5(content).hexdigest() + suffix
        (self.folder / md5).write_bytes(content)
        return md5

    def add_tables(self, splits: dict[str, str], answer: str = "yes") -> str:
        """Add a data/validated with an image, a caption and a question of it, for each entry: image id -> split."""
        images = [
            {"image_id": name, "source": "scenes", "split": split, "sha256": name} for name, split in splits.items()
        ]
        captions = [{"image_id": name, "text": f"a photo of {name}"} for name in splits]
        questions = [
            {"image_id": name, "question_id": f"{name}/{answer}", "text": "is it?", "answers": [answer]}
            for name in splits
        ]
        entries = []
        for table, rows in (("images", images), ("captions", captions), ("questions", questions)):
            file = self.folder / "table"
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
            entries.append({"md5": self.add(file.read_bytes()), "relpath": f"{table}.parquet"})
        return self.add(json.dumps(entries).encode(), ".dir")

    def find(self, md5: str) -> Path | None:
        return self.folder / md5 if (self.folder / md5).exists() else None


def make_origin(
    cache: Cache,
    *,
    images: dict[str, str],
    params: dict[str, Any],
    code: dict[str, str],
    beam: int,
    torch: str = "2.11",
) -> Origin:
    """Return a version made by `validate`, `finetune` and `evaluate`; `report` is not upstream of its scores."""
    code_md5, settings = (cache.add(json.dumps(value).encode()) for value in (code, {"beam_size": beam}))
    stages: dict[str, Any] = {
        "plan": {"outs": [{"path": "data/plan", "md5": "0.dir"}]},
        "validate": {"outs": [{"path": "data/validated", "md5": cache.add_tables(images)}]},
        "finetune@vqa": {
            "deps": [{"path": "data/validated"}, {"path": "data/plan/code/models/tden.json", "md5": code_md5}],
            "params": {"params.yaml": {"finetune.vqa": params["finetune"]["vqa"]}},
            "outs": [{"path": "checkpoints/finetune/vqa"}],
        },
        "evaluate@vqa": {
            "deps": [{"path": "checkpoints/finetune/vqa"}, {"path": "data/plan/evaluate/vqa.json", "md5": settings}],
            "outs": [{"path": "reports/eval/vqa"}],
        },
        "report": {
            "deps": [{"path": "reports/eval/vqa"}, {"path": "data/plan/code/stages/report.json", "md5": code_md5}],
            "params": {"params.yaml": {"drift": params["drift"]}},
        },
    }
    return Origin(target="evaluate@vqa", stages=stages, params=params, packages={"torch": torch})


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Cache, Origin, Origin]:
    cache = Cache(tmp_path / "cache")
    old_params = {"finetune": {"vqa": {"max_epochs": 2, "seed": 1}}, "drift": {"images": 256}}
    new_params = {"finetune": {"vqa": {"max_epochs": 3, "seed": 1}}, "drift": {"images": 9}}
    old = make_origin(
        cache, images={"1": "train", "2": "test"}, params=old_params, code={"models/tden.py": "a" * 64}, beam=3
    )
    new = make_origin(
        cache,
        images={"1": "train", "3": "train", "2": "test"},
        params=new_params,
        code={"models/tden.py": "b" * 64},
        beam=5,
        torch="2.12",
    )
    return cache, old, new


def test_differences_name_the_stages_that_read_them_and_what_cannot_matter(
    versions: tuple[Cache, Origin, Origin],
) -> None:
    cache, old, new = versions
    differences = {d.name: d for d in find_differences(old, new, cache.find)}
    everything = ("evaluate@vqa", "finetune@vqa", "validate")
    assert differences == {
        "images of scenes, train": Difference(
            kind="data", name="images of scenes, train", before="1", after="2 (+1 -0)", stages=everything
        ),
        "captions of scenes, train": Difference(
            kind="data", name="captions of scenes, train", before="1", after="2 (+1 -0)", stages=everything
        ),
        "questions of scenes, train": Difference(
            kind="data", name="questions of scenes, train", before="1", after="2 (+1 -0)", stages=everything
        ),
        "finetune.vqa.max_epochs": Difference(
            kind="params", name="finetune.vqa.max_epochs", before="2", after="3", stages=("finetune@vqa",)
        ),
        "evaluate.beam_size": Difference(
            kind="params", name="evaluate.beam_size", before="3", after="5", stages=("evaluate@vqa",)
        ),
        "models/tden.py": Difference(
            kind="code", name="models/tden.py", before="a" * 8, after="b" * 8, stages=("finetune@vqa",)
        ),
        "torch": Difference(kind="packages", name="torch", before="2.11", after="2.12", stages=everything),
        "drift.images": Difference(kind="params", name="drift.images", before="256", after="9", stages=()),
    }
    lines = format_differences(list(differences.values()))
    assert "params   finetune.vqa.max_epochs: 2 -> 3  (finetune@vqa)" in lines
    assert lines[-1] == "unread   drift.images  (no stage of this run reads them, so they cannot matter)"


def test_equal_versions_and_a_cache_without_their_files(versions: tuple[Cache, Origin, Origin]) -> None:
    cache, old, new = versions
    assert format_differences(find_differences(old, old, cache.find)) == ["nothing differs"]
    with pytest.raises(DataError, match=r"not in DVC's cache; `dvc fetch"):
        find_differences(old, new, lambda md5: None)


def test_changed_answers_are_a_difference(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    versions = []
    for answer in ("yes", "no"):
        validated = cache.add_tables({"1": "train", "2": "test"}, answer)
        stages = {"evaluate@vqa": {"outs": [{"path": "data/validated", "md5": validated}]}}
        versions.append(Origin(target="evaluate@vqa", stages=stages, params={}, packages={}))
    names = [difference.name for difference in find_differences(*versions, cache.find)]
    assert names == ["questions of scenes, test", "questions of scenes, train"]
