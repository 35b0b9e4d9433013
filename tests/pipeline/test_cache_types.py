"""However DVC links outputs to its cache, a version is registered, exported and packed, and the cache stays intact."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from cloned_project import copy_project, run, run_in_process

from vlp_models import VLP


@pytest.mark.pipeline
@pytest.mark.parametrize(
    "kind",
    [  # most other tests have DVC's default: reflink, else copy
        pytest.param("copy", marks=pytest.mark.long),
        pytest.param("reflink", marks=pytest.mark.long),
        *("hardlink", "symlink"),
    ],
)
def test_every_cache_type_reaches_a_registered_version(built_project: Path, tmp_path: Path, kind: str) -> None:
    if kind == "reflink" and run(tmp_path, "cp", "--reflink=always", __file__, "copy", check=False).returncode:
        pytest.skip("this file system has no reflinks")
    project = copy_project(built_project, tmp_path / "project")
    run(project, "dvc", "config", "cache.type", kind)
    run(project, "dvc", "checkout", "--relink")
    assert (project / "checkpoints/finetune/tden-vqa/model.safetensors").is_symlink() == (kind == "symlink")

    run_in_process(project, "vlp", "use", "--set", f"tracking.model_prefix={kind}")  # makes `register` stale
    run(project, "vlp", "run")
    run_in_process(project, "vlp", "export", f"{kind}-captioning/1", str(tmp_path / "export"))
    assert VLP.from_pretrained(tmp_path / "export").task == "captioning"
    run_in_process(project, "vlp", "pack", "tden-vqa", "-o", str(tmp_path / "vqa.run.zip"))

    run(project, "vlp", "stage", "evaluate", "tden-vqa")  # overwrites outputs, which DVC would have removed first
    check_cache(project)

    # as a disk damages them: mode and time stay, and with links the cache has the same files
    damaged = [project / "checkpoints/pretrain/tden" / name for name in ("vocab.txt", "manifest.json", "SHA256SUMS")]
    contents = [path.read_bytes() for path in damaged]
    for path, content in zip(damaged, contents, strict=True):
        status = path.stat()
        path.chmod(0o644)
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        path.chmod(status.st_mode)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "pretrain/tden/vocab.txt: damaged" in run(project, "vlp", "run").stderr
    assert [path.read_bytes() for path in damaged] == contents
    check_cache(project)


def check_cache(project: Path) -> None:
    for path in (project / ".dvc/cache/files/md5").glob("??/*"):
        content = path.read_bytes()
        assert hashlib.md5(content).hexdigest() == path.parent.name + path.name.removesuffix(".dir"), path
