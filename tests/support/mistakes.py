"""What test_mistakes.py arranges: a project of four photos, damage to its files, and accounts with fewer rights."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from cloned_project import ROOT, run_in_process
from PIL import Image

Arrange = Callable[[Path], object]

TINY = {"hidden": 16, "heads": 2, "intermediate": 32}
TINY |= {f"{name}_layers": 1 for name in ("object", "sentence", "encoder", "decoder")}


def make_template(folder: Path) -> Path:
    """Write a git and DVC project that captions four photos, and run its stages up to `shards`."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    raw |= {"generate": {}, "data": {"photos": {"format": "pairs", "root": "data/raw/photos", "pairs": "pairs.csv"}}}
    raw["features"]["source"], raw["detector"]["source"] = "grid", "none"
    raw["tokenizer"] |= {"vocab_size": 100, "min_frequency": 1, "min_answer_count": 1}
    raw["models"]["tden"]["config"] |= TINY
    raw["validate"]["max_bad_fraction"] = 0.2
    del raw["pretrain"]["tden"]["recipe"]["objectives"]["moc"]
    del raw["finetune"]["tden-vqa"]
    raw["evaluate"] |= {"blind_baseline": [], "bootstrap": 10}
    raw["ingest"] |= {"settle_seconds": 0.0, "processes": 1}
    (folder / "presets").mkdir(parents=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True), encoding="utf-8")
    (folder / "presets" / "longer.yaml").write_text("pretrain: {tden: {max_epochs: 3}}\n")
    write_photos(folder / "data" / "raw" / "photos")
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    run_in_process(folder, "vlp", "plan")
    for stage in ("prepare photos", "validate", "detector", "features", "tokenizer", "shards", "initial tden"):
        run_in_process(folder, "vlp", "stage", *stage.split())
    run_in_process(folder, "vlp", "promote", "captioning", check=False)  # creates MLflow's tables, which takes seconds
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        for table in ("experiment_tags", "experiments"):  # an experiment holds the folder's path
            database.execute(f"delete from {table} where experiment_id != 0")
        database.commit()
    return folder


def write_photos(folder: Path) -> None:
    """Write four photos with captions: two to train on, one for each other split."""
    folder.mkdir(parents=True)
    lines = ["image,caption,split"]
    for number, split in enumerate(("train", "train", "val", "test")):
        coarse = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
        Image.fromarray(coarse).resize((64, 48), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        lines.append(f"{number}.png,a photo of number {number},{split}")
    (folder / "pairs.csv").write_text("\n".join(lines) + "\n")


def nothing(project: Path) -> None:
    """The command itself is the mistake."""


def write(name: str, content: str | bytes) -> Arrange:
    """Replace a file."""

    def arrange(project: Path) -> None:
        remove(name)(project)
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return arrange


def remove(name: str) -> Arrange:
    """Remove a file or a folder, if it exists."""

    def arrange(project: Path) -> None:
        path = project / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    return arrange


def folder(name: str) -> Arrange:
    """Put a folder where a file is expected."""
    return both(remove(name), lambda project: (project / name).mkdir(parents=True))


def link(name: str, target: str) -> Arrange:
    """Replace a file or folder by a symbolic link."""
    return both(remove(name), lambda project: (project / name).symlink_to(target))


def cut(name: str) -> Arrange:
    """Cut a file to its first third, as an interrupted copy leaves it."""
    return lambda project: (project / name).write_bytes(
        (project / name).read_bytes()[: (project / name).stat().st_size // 3]
    )


def encode(name: str, encoding: str) -> Arrange:
    """Save a text file in another encoding, with a character that is not ASCII."""
    return lambda project: (project / name).write_bytes(
        f"{(project / name).read_text(encoding='utf-8')}# caf\xe9\n".encode(encoding)
    )


def mode(name: str, bits: int) -> Arrange:
    return lambda project: (project / name).chmod(bits)


def both(*steps: Arrange) -> Arrange:
    return lambda project: [step(project) for step in steps]


def setting(key: str, value: object) -> Arrange:
    """Set a dotted key of params.yaml without any check; None removes it."""

    def arrange(project: Path) -> None:
        file = project / "params.yaml"
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        *parents, last = key.split(".")
        section = raw
        for name in parents:
            section = section.setdefault(name, {})
        if value is None:
            del section[last]
        else:
            section[last] = value
        file.write_text(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True), encoding="utf-8")

    return arrange


def give_away(name: str) -> Arrange:
    """Make a file another user's, readable by its owner alone; only root can."""

    def arrange(project: Path) -> None:
        if os.geteuid():
            pytest.skip("only root can give files to another user")
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
        os.chown(project / name, 12345, 12345)
        (project / name).chmod(0o600)

    return arrange


@contextlib.contextmanager
def without_root_rights() -> Iterator[None]:
    """Let file permissions count for root, too: drop the capabilities that ignore them, then take them back."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Rights(ctypes.Structure):
        _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))

    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = Header(0x20080522, 0), (Rights * 2)()
    assert libc.capget(ctypes.byref(header), rights) == 0
    before = rights[0].effective
    rights[0].effective &= ~0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
    assert libc.capset(ctypes.byref(header), rights) == 0
    try:
        yield
    finally:
        rights[0].effective = before
        assert libc.capset(ctypes.byref(header), rights) == 0


@contextlib.contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Let every file that grows beyond `limit` bytes fail, as on a full disk or above a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def unknown_user() -> Iterator[None]:
    """Be a user without a home folder, a name or an entry in the password database, as in a container."""

    def getpwuid(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pwd, "getpwuid", getpwuid)
        for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
            patch.delenv(name, raising=False)
        yield
