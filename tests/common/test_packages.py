"""Data in installed packages, with a small package on sys.path."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import vlp_models
from vlp_models.common import packages
from vlp_models.common.io import write_together
from vlp_models.common.packages import check_recorded, dependency, outdated_records, package_files
from vlp_models.errors import DataError, MissingToolError, ParamsError

ROOT = Path(__file__).parents[2]
SOURCE, KEY = "package:toy-words", "models.m.text_init"


def install(site: Path, version: str = "1.0", content: str = "{}") -> None:
    """Write the package as pip lays it out; importing it would fail."""
    model, info = site / "toy_words" / "model", site / "toy_words-1.0.dist-info"
    for folder in (model, info):
        folder.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(content)
    (site / "toy_words" / "__init__.py").write_text("raise RuntimeError")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-words\nVersion: {version}\n")
    names = ("toy_words/__init__.py", "toy_words/model/config.json", "toy_words-1.0.dist-info/METADATA", "../bin/toy")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def test_dvc_depends_on_the_recorded_content_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site")
    assert list(package_files(SOURCE, KEY)) == ["toy_words/model/config.json"]
    assert dependency(SOURCE) == "packages/toy-words.json" and dependency("some/folder") == "some/folder"
    file = tmp_path / "packages" / "toy-words.json"
    check_recorded(SOURCE, tmp_path, KEY)  # nothing is recorded yet
    write_together(outdated_records([(SOURCE, KEY), ("some/folder", KEY)], tmp_path))
    record = json.loads(file.read_text())
    assert (record["package"], record["version"]) == ("toy-words", "1.0")
    assert list(record["files"]) == ["toy_words/model/config.json"]
    check_recorded(SOURCE, tmp_path, KEY)

    assert outdated_records([(SOURCE, KEY)], tmp_path) == {}, "an unchanged record is not written again"
    install(tmp_path / "site", content='{"other": 1}')
    with pytest.raises(DataError, match=r"packages/toy-words\.json: its files have changed.*`vlp plan`"):
        check_recorded(SOURCE, tmp_path, KEY)
    install(tmp_path / "site", version="2.0")
    with pytest.raises(DataError, match=r"version 1\.0 is recorded, 2\.0 is installed"):
        check_recorded(SOURCE, tmp_path, KEY)
    write_together(outdated_records([(SOURCE, KEY)], tmp_path))
    check_recorded(SOURCE, tmp_path, KEY)


def test_missing_package_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"`models\.m\.text_init: package:no-such-words`: not installed; install it with `(uv )?pip install "
    with pytest.raises(MissingToolError, match=rf"{message}no-such-words`"):
        package_files("package:no-such-words", KEY)
    monkeypatch.setattr("vlp_models.common.packages.LOCKED", ("no-such-words",))
    with pytest.raises(MissingToolError, match=rf"{message}--no-deps --require-hashes -r requirements-photographs\."):
        package_files("package:no-such-words", KEY)
    with pytest.raises(ParamsError, match="not a valid package name"):
        package_files("package:../etc", KEY)


def test_code_on_the_path_needs_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is in the image, where every stage asks for the version."""
    version = metadata.version

    def hidden(name: str) -> str:
        if name == packages.OWN:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", hidden)
    packages.check_own_record(tmp_path)
    assert packages.describe_own()["version"] == packages.own_version() == vlp_models.__version__
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["version"] == vlp_models.__version__
