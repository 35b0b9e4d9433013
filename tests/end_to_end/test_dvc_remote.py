"""The commands of docs/guides/object-stores.md share a workspace's data through an S3 bucket: push here, pull there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from s3_server import BUCKET, credentials, s3_server

from vlp_models.common.io import hash_path

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.server


def commands(heading: str) -> list[str]:
    """Return the shell commands below a heading of docs/guides/object-stores.md."""
    text = (ROOT / "docs" / "guides" / "object-stores.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


def test_pushed_data_can_be_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dvc_s3")
    pytest.importorskip("moto")
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))

    def run(line: str, place: Path) -> None:
        program, *arguments = shlex.split(line)
        module = [sys.executable, "-m", "dvc"] if program == "dvc" else [program]
        done = subprocess.run([*module, *arguments], cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"

    (here / "data" / "shards").mkdir(parents=True)
    for number in range(3):
        (here / "data" / "shards" / f"train-{number:08d}.tar").write_bytes(bytes([number]) * 2000)
    (here / "dvc.yaml").write_text("stages:\n  shards:\n    cmd: python -c ''\n    outs: [data/shards]\n")
    with s3_server() as server:
        credentials(monkeypatch, server, tmp_path)
        for line in ("git init -q", "git config user.name a", "git config user.email a", "dvc init -q"):
            run(line, here)
        run("dvc commit -q -f shards", here)
        share, fetch = commands("A bucket for a team's data")
        for line in share.replace("BUCKET", BUCKET).split(" && "):
            run(line, here)
        run("git add -A", here)
        run("git commit -q -m shards", here)
        wanted = hash_path(here / "data" / "shards")
        run(f"git clone -q {here} {there}", tmp_path)
        shutil.rmtree(here)
        for line in fetch.split(" && "):
            run(line, there)
        assert hash_path(there / "data" / "shards") == wanted
        assert server.client.list_objects_v2(Bucket=BUCKET, Prefix="dvc/")["KeyCount"] >= 4
