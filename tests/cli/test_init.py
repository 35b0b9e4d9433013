"""`vlp init` in the current folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cloned_project import BIN, environment

from vlp_models.cli import project
from vlp_models.errors import DataError

ROOT = Path(__file__).parents[2]


def test_the_current_folder_becomes_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    inode = folder.stat().st_ino
    project.init(Path(), template="scenes")
    assert (folder / "params.yaml").is_file() and (folder / ".git").is_dir()
    assert folder.stat().st_ino == inode, "the shell that is in it stays in it"
    assert list(tmp_path.iterdir()) == [folder] and "  cd " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[commit]\ngpgsign = true\n[user]\nsigningkey = none", "git commit: .*gpg"),
        ("[core]\nhooksPath = {folder}", "git commit: house rule: no ticket"),
        ("[user]\nuseConfigOnly = true", "git does not know your name yet"),
    ],
    ids=["signature", "hook", "name"],
)
def test_the_reason_of_git_for_not_committing_is_shown(
    config: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, settings = tmp_path / "pre-commit", tmp_path / "gitconfig"
    hook.write_text("#!/bin/sh\necho 'house rule: no ticket' >&2\nexit 1\n", encoding="utf-8")
    hook.chmod(0o755)
    name = "" if "useConfigOnly" in config else "[user]\nname = a\nemail = a@example.org\n"
    settings.write_text(name + config.format(folder=tmp_path), encoding="utf-8")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    project.init(tmp_path / "mine", template="scenes")
    assert re.search(f"nothing is committed: {words}", capsys.readouterr().out)


def test_an_old_git_in_a_hook_of_another_repository_makes_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git 2.27 lacks `init --initial-branch`; a hook's GIT_DIR would put everything into the other repository."""
    old_git, other = tmp_path / "bin" / "git", tmp_path / "other"
    real_git = shutil.which("git")
    old_git.parent.mkdir()
    old_git.write_text(
        f'#!/bin/sh\ncase "$*" in *--initial-branch*) exit 129;; esac\nexec {real_git} "$@"\n', encoding="utf-8"
    )
    old_git.chmod(0o755)
    subprocess.run(["git", "init", "--quiet", other], check=True)
    monkeypatch.setenv("PATH", f"{old_git.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    project.init(tmp_path / "mine", template="scenes")
    assert (tmp_path / "mine" / ".git" / "HEAD").read_text(encoding="utf-8") == "ref: refs/heads/main\n"
    assert not (other / ".git" / "index").exists(), "nothing is staged there"


def test_an_environment_in_the_folder_stays_and_other_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my photos"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    (folder / ".gitignore").write_text("mine")
    with pytest.raises(DataError, match=r"my photos: is not empty \(\.gitignore, notes\.txt\); name another folder"):
        project.init(folder, template="scenes")
    assert sorted(path.name for path in folder.iterdir()) == [".gitignore", ".venv", "notes.txt"]
    for name in ("notes.txt", ".gitignore"):
        (folder / name).unlink()
    project.init(folder, template="scenes")
    assert (folder / ".venv" / "bin").is_dir() and (folder / "params.yaml").is_file()
    tracked = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True).stdout
    assert "params.yaml" in tracked and ".venv" not in tracked
    assert f"  cd '{folder}'\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("git", "limit", "code"),
    [
        ("", "unlimited", 2),  # git is missing
        ("kill -TERM $PPID; sleep 5", "unlimited", 143),
        ("kill -INT $PPID; sleep 5", "unlimited", 130),
        ("exit 0", "16", 74),  # no file may be larger than 8 KB, as on a full disk
    ],
    ids=["git is missing", "SIGTERM", "Ctrl-C", "disk full"],
)
def test_a_failed_init_leaves_nothing_and_the_next_one_works(tmp_path: Path, git: str, limit: str, code: int) -> None:
    programs, work = tmp_path / "programs", tmp_path / "work"
    work.mkdir()
    programs.mkdir()
    if git:
        (programs / "git").write_text(f"#!/bin/sh\n{git}\n")
        (programs / "git").chmod(0o755)
    for name in ("sh", "sleep"):
        (programs / name).symlink_to(str(shutil.which(name)))
    command = f"ulimit -f {limit}; exec {BIN}/python -m vlp_models.cli.main init new/folder"
    failed = subprocess.run(
        ["/bin/bash", "-c", command],
        cwd=work,
        env=environment(work) | {"PATH": str(programs), "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
    )
    assert failed.returncode == code and "Traceback" not in failed.stderr, failed.stderr
    assert list(work.iterdir()) == []
    project.init(work / "new" / "folder", template="scenes")
