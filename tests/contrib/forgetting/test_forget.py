"""`vlp forget` end to end: its report, what is erased, what is retrained and what is not."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cloned_project import run_in_process
from forget_project import make_project, vlp

from vlp_models.common.io import hash_path
from vlp_models.data.shards.dataset import ShardDataset

PICTURE, COPY = "scenes/1", "mine/copy.png"


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_image_and_its_mirrored_copy_are_forgotten(tmp_path: Path) -> None:
    root = tmp_path / "project"
    picture = make_project(root)
    vlp(root, "vlp", "run")
    run_in_process(root, "vlp", "promote", "captioning", "--version", "1", "--force", "a toy")
    before = {name: hash_path(root / "checkpoints" / name) for name in ("pretrain/a", "pretrain/b", "finetune/b")}
    assert picture.name.encode() not in shards(root), "shards hold keys, not file names"
    assert ids(root) >= {PICTURE, COPY}

    report = json.loads(vlp(root, "vlp", "forget", str(picture), "--dry-run", "--json").stdout)
    assert [one["image_id"] for one in report["found"]] == [COPY, PICTURE]
    assert report["found"][0]["how"].startswith("mirrored")
    states = {one["name"]: one["state"] for one in report["checkpoints"]}
    clean = ("data/detector", "data/tokenizer", "initial/a", "initial/b", "pretrain/b", "finetune/b")
    assert states == {**dict.fromkeys(clean, "clean"), "pretrain/a": "exposed", "finetune/a": "exposed"}
    assert all(one["first"]["epoch"] == 1 for one in report["checkpoints"] if one["state"] == "exposed")
    by_run = {one["how"].partition(":")[0]: one for one in report["versions"]}
    assert {run: one["state"] for run, one in by_run.items()} == {"finetune/a": "exposed", "finetune/b": "clean"}
    champion = next(one for one in report["versions"] if "champion" in one["aliases"])
    assert not (root / "data" / "withdrawn.jsonl").exists() and not (root / ".work" / "forget").exists()
    text = run_in_process(root, "vlp", "forget", PICTURE, "--dry-run").stdout
    assert ("CHAMPION" in text) == (champion["state"] == "exposed")
    assert "pretrain/a, from initial/a" in text

    options = ("--yes", "--retrain", "--withdraw-versions", "--by", "the owner")
    done = vlp(root, "vlp", "forget", str(picture), *options)
    assert not ids(root) & {PICTURE, COPY} and b"scenes%2F1." not in shards(root)
    trained = set(re.findall(r"Running stage '((?:pretrain|finetune)@\w+)'", done.stdout))
    assert trained == {"pretrain@a", "finetune@a"}
    after = {name: hash_path(root / "checkpoints" / name) for name in before}
    assert {name for name in before if before[name] == after[name]} == {"pretrain/b", "finetune/b"}
    assert vlp(root, "dvc", "status").stdout.strip().endswith("up to date.")

    lines = [json.loads(line) for line in (root / "promotions" / "ledger.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["action"] == "forgotten"]
    files = (picture, root / "data/raw/mine/copy.png")
    assert set(line["images"]) == {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert (line["by"], line["checkpoints"]) == ("the owner", {"pretrain/a": "exposed", "finetune/a": "exposed"})
    (version,) = line["versions"]["vlp-captioning"]
    assert "run-a" in version["aliases"] and version["state"] == "exposed"
    assert '"action": "forgotten"' in run_in_process(root, "vlp", "history", "captioning", "--json").stdout
    assert not any(word in json.dumps(line) for word in (PICTURE, COPY, picture.name)), "the ledger has hashes only"

    now = json.loads(run_in_process(root, "vlp", "forget", str(picture), "--dry-run", "--json").stdout)
    assert now["found"] == [] and {one["state"] for one in now["checkpoints"]} == {"clean"}
    then = next(one for one in now["versions"] if one["version"] == version["version"])
    assert (then["state"], then["aliases"]) == ("exposed", []), "determined from DVC's cache, since its data is gone"
    assert any(one["state"] == "clean" and "run-a" in one["aliases"] for one in now["versions"])


def ids(root: Path) -> set[str]:
    splits = ("train", "val", "test")
    return {name for split in splits for name in ShardDataset(root / "data/shards", split, "images").image_ids()}


def shards(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((root / "data" / "shards").glob("*.tar")))


def test_forget_needs_a_terminal_or_an_explicit_option(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vlp_models.cli.main", "forget", "scenes/1"]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2 and "pass --dry-run or --yes" in done.stderr
