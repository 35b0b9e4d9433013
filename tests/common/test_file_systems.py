"""Files are written on file systems that lack calls: the kernel refuses them here to a process."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from cloned_project import ROOT, init_dvc, run_in_process
from refused_calls import run_refused

WRITE = """
import sys
from pathlib import Path
from vlp_models.common.io import atomic_write, link_or_copy, symlink_or_copy, write_together
from vlp_models.registry.promotion.ledger import Ledger

root = Path(sys.argv[1])
with atomic_write(root / "synced", sync=True) as file:
    file.write_text("1")
write_together({root / "synced": "2", root / "new": "3"})
link_or_copy(root / "new", root / "linked")
(root / "folder").mkdir()
(root / "folder" / "file").write_text("4")
symlink_or_copy(root / "folder", root / "elsewhere" / "folder")
symlink_or_copy(root / "new", root / "elsewhere" / "file")
ledger = Ledger(root / "ledger.jsonl")
with ledger.locked():
    ledger.append({"model": "vqa", "action": "refused"})
"""


@pytest.mark.parametrize(
    "calls",
    [
        "link=1,symlink=1",  # exFAT
        "link=31,symlink=95",  # a share that is mounted by CIFS
        "link=38,fsync=22",  # a bucket
        "fsync=95",
    ],
)
def test_files_are_written_without_links_or_fsync(tmp_path: Path, calls: str) -> None:
    done = run_refused(calls, [sys.executable, "-c", WRITE, str(tmp_path)])
    if done.returncode == 86:
        pytest.skip("this machine has no seccomp")
    assert done.returncode == 0, done.stderr
    names = ("synced", "new", "linked", "elsewhere/folder/file", "elsewhere/file")
    assert [(tmp_path / name).read_text() for name in names] == ["2", "3", "3", "4", "3"]
    assert (tmp_path / "ledger.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "elsewhere/folder").is_symlink() == ("symlink" not in calls)


def test_a_copy_is_not_protected_as_its_file_in_the_cache_is(tmp_path: Path) -> None:
    (tmp_path / "cached").write_text("1")
    (tmp_path / "cached").chmod(0o444)
    code = "import sys; from vlp_models.common.io import link_or_copy; link_or_copy(*sys.argv[1:])"
    copy = tmp_path / "copy"
    # 18: another file system
    done = run_refused("link=18,chmod=1", [sys.executable, "-c", code, str(tmp_path / "cached"), str(copy)])
    if done.returncode == 86:
        pytest.skip("this machine has no seccomp")
    assert done.returncode == 0, done.stderr
    assert copy.read_text() == "1" and copy.stat().st_mode & 0o200


def test_a_folder_where_mlflow_has_no_database_is_refused_before_any_stage(tmp_path: Path) -> None:
    folder = tmp_path / "which one?"
    folder.mkdir()
    init_dvc(folder)
    shutil.copy(ROOT / "params.yaml", folder)
    done = run_in_process(folder, "vlp", "run", check=False)
    assert done.returncode == 69 and f"{folder}: MLflow cannot open a database" in done.stderr
