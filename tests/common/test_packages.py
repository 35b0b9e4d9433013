"""Data in installed packages: a package of our own making on sys.path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlp_models.common.packages import check_recorded, dependency, package_files, record_packages
from vlp_models.errors import DataError, MissingToolError, ParamsError

SOURCE, WHERE = "package:toy-words", "models.m.text_init"


def install(site: Path, version: str = "1.0", content: str = "{}") -> None:
    """As pip lays it out; importing it would fail."""
    model, info = site / "toy_words" / "model", site / "toy_words-1.0.dist-info"
    for folder in (model, info):
        folder.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(content)
    (site / "toy_words" / "__init__.py").write_text("raise RuntimeError")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-words\nVersion: {version}\n")
    names = ("toy_words/__init__.py", "toy_words/model/config.json", "toy_words-1.0.dist-info/METADATA", "../bin/toy")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def test_a_packages_content_is_what_dvc_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site")
    assert list(package_files(SOURCE, WHERE)) == ["toy_words/model/config.json"]
    assert dependency(SOURCE) == "packages/toy-words.json" and dependency("some/folder") == "some/folder"
    file = tmp_path / "packages" / "toy-words.json"
    check_recorded(SOURCE, tmp_path, WHERE)  # nobody has noted it yet
    record_packages([(SOURCE, WHERE), ("some/folder", WHERE)], tmp_path)
    noted = json.loads(file.read_text())
    assert (noted["package"], noted["version"]) == ("toy-words", "1.0")
    assert list(noted["files"]) == ["toy_words/model/config.json"]
    check_recorded(SOURCE, tmp_path, WHERE)

    stamp = file.stat().st_mtime_ns
    record_packages([(SOURCE, WHERE)], tmp_path)
    assert file.stat().st_mtime_ns == stamp, "what is as it was is not written again"
    install(tmp_path / "site", content='{"other": 1}')
    with pytest.raises(DataError, match=r"packages/toy-words\.json: its files are others .*`vlp plan`"):
        check_recorded(SOURCE, tmp_path, WHERE)
    install(tmp_path / "site", version="2.0")
    with pytest.raises(DataError, match=r"1\.0 was noted, 2\.0 is installed"):
        check_recorded(SOURCE, tmp_path, WHERE)
    record_packages([(SOURCE, WHERE)], tmp_path)
    check_recorded(SOURCE, tmp_path, WHERE)


def test_a_package_that_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"`models\.m\.text_init: package:no-such-words`: not installed; `uv pip install no-such-words` brings it"
    with pytest.raises(MissingToolError, match=said):
        package_files("package:no-such-words", WHERE)
    monkeypatch.setattr("vlp_models.common.packages.LOCKED", ("no-such-words",))
    said = r"`uv pip install --no-deps --require-hashes -r requirements-photographs\.lock` brings it"
    with pytest.raises(MissingToolError, match=said):
        package_files("package:no-such-words", WHERE)
    with pytest.raises(ParamsError, match="no name of a package"):
        package_files("package:../etc", WHERE)
