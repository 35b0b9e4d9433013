"""`vlp new` writes plugins that work as they are, and `vlp try` prints what is wrong with one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from cloned_project import ROOT
from hf_folders import Write, write_parquet, write_webdataset

from vlp_models.cli.project import template_files
from vlp_models.common.plugins import use_plugins
from vlp_models.contrib.plugin_kit.commands import KINDS, new, try_plugin
from vlp_models.errors import ParamsError

NAMES = {"family": "zebra_net", "task": "a", "format": "a_format_with_quite_a_long_name"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with the files of `vlp init`."""
    path = list(sys.path)
    for name in ("params.yaml", "prefect.yaml"):
        (tmp_path / name).write_bytes(template_files()[name].read_bytes())
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    use_plugins({}, tmp_path)
    sys.path[:] = path


def run_try(name: str, capsys: pytest.CaptureFixture[str], code: int = 0, **options: object) -> str:
    """Run `vlp try` and return what it prints."""
    found = 0
    try:
        try_plugin(name, **{"assign": None, "root": "", "ranks": False, **options})  # type: ignore[arg-type]
    except typer.Exit as end:
        found = end.exit_code
    output = capsys.readouterr().out
    assert found == code, output
    return output


def check_style(project: Path) -> None:
    """Check that ruff, with this repository's settings, has nothing to change in the plugins of a clone."""
    first_party = 'lint.isort.known-first-party = ["vlp_models"]'  # which a clone contains
    settings = ["--config", str(ROOT / "pyproject.toml"), "--config", first_party, "--no-cache"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(["ruff", *command, *settings, "plugins"], cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_new_family_and_a_new_task_work_as_they_are(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name in NAMES.items():
        new(kind, name)
    assert "next: vlp try a_format_with_quite_a_long_name --root FOLDER" in capsys.readouterr().out
    assert yaml.safe_load((project / "params.yaml").read_text())["plugins"] == {
        "families": {"zebra_net": "plugins.zebra_net.model:ZebraNet"},
        "tasks": {"a": "plugins.a:A"},
        "formats": {"a_format_with_quite_a_long_name": "plugins.a_format_with_quite_a_long_name:read"},
    }
    text = "".join(file.read_text() for file in (project / "plugins").rglob("*.py"))
    assert "toy" not in text.lower() and "color (" not in text and "guess" not in text.lower()
    check_style(project)
    settings = ["hidden=32", "heads=2", "side=32", "patch=8"]
    shown = run_try("zebra_net", capsys, assign=settings)
    assert "vcr, a\n" in shown and "ok      decoding\n" in shown and "problem" not in shown
    shown = run_try("a", capsys)
    assert "ok      official file: colors_scenes_train.txt, 16 entries\n" in shown


@pytest.mark.slow
def test_new_plugins_pass_mypy(project: Path) -> None:
    for kind, name in NAMES.items():
        new(kind, name)
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *settings, "--namespace-packages", "-p", "plugins"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("family", "tden", "the name tden is taken: it is one of the families; choose another one"),
        ("family", "vqa", "the name vqa is taken: it is one of the tasks"),
        ("task", "9lives", "`9lives` cannot be a Python module: use lower-case letters, digits and `_`"),
        ("task", "my-task", "`my-task` cannot be a Python module"),
        ("task", "class", "`class` cannot be a Python module"),
        ("format", "used", "plugins/used.py: exists; choose another name, or move it away"),
        ("family", "used", "plugins/used.py: exists"),
        ("tasks", "x", "no scaffold for a `tasks`; did you mean `task`?"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_an_unusable_name_is_refused(project: Path, kind: str, name: str, message: str) -> None:
    (project / "plugins").mkdir()
    (project / "plugins" / "used.py").write_text("x = 1\n")
    before = (project / "params.yaml").read_bytes()
    with pytest.raises(ParamsError) as caught:
        new(kind, name)
    assert message in str(caught.value)
    assert (project / "params.yaml").read_bytes() == before
    assert [path.name for path in (project / "plugins").iterdir()] == ["used.py"]


def test_nothing_is_left_behind_if_params_are_invalid(project: Path) -> None:
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("task: captioning, start", "task: captionin, start"))
    for kind in KINDS:
        with pytest.raises(ParamsError, match="captionin"):
            new(kind, "mine")
    assert not (project / "plugins").exists()


def test_an_edited_plugin_that_breaks_is_a_sentence_with_its_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new("task", "broken")
    file = project / "plugins" / "broken.py"
    file.write_text(file.read_text().replace(".pooled_BP", ".pooled"))
    shown = run_try("broken", capsys, code=1)
    assert "problem training: " in shown and "plugins/broken.py:" in shown
    assert "AttributeError: 'Fused' object has no attribute 'pooled'" in shown
    with pytest.raises(ParamsError, match=r"no family, task or format `brokn`; did you mean `broken`\?"):
        run_try("brokn", capsys)
    with pytest.raises(ParamsError, match="--ranks is for families; broken is not one"):
        run_try("broken", capsys, ranks=True)


def test_a_format_lists_tables_and_quarantined_records(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new("format", "mine")
    data = project / "data"
    data.mkdir()
    (data / "a.png").touch()
    (data / "captions.tsv").write_text("train\ta.png\ta dog\ntrain\ta.png\tone dog\nno tabs\n")
    capsys.readouterr()
    assert run_try("mine", capsys, root="data") == (
        "ok      reads: 2 images, 2 captions\nok      images: train 2\nok      captions: train 2\n"
        "ok      quarantine: 1 record\n"
        "  captions.tsv:3: record_readable: not split, file and caption with tabs between\n"
    )
    with pytest.raises(ParamsError, match=r"name the folder to read: `vlp try mine --root FOLDER`"):
        run_try("mine", capsys)
    (data / "captions.tsv").write_text("trian\tb.png\ta dog\n")
    assert "problem images: try/b.png: split 'trian' is not one of train, val, test" in run_try(
        "mine", capsys, code=1, root="data"
    )


@pytest.mark.parametrize("write", [write_parquet, write_webdataset], ids=["parquet", "tar"])
def test_images_inside_files_are_extracted_and_removed_again(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    pytest.importorskip("vlp_models.contrib.hub_datasets")
    write(project / "pets")
    (project / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(project / "tmp"))
    shown = run_try("hf", capsys, root="pets")
    assert "ok      images: train 3, test 3\n" in shown and "problem" not in shown
    assert not list((project / "tmp").iterdir())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            'tables["images"].append(image)',
            "pass",
            "captions: try/1 names the image try/a.png, which is not in `images`",
        ),
        ('"text": text,', '"text": text, "lang": "en",', "captions: a row has lang, which captions does not have"),
        ('"text": text,', '"text": [text],', "captions: row try/1: a value has another type"),
        ("join_id(name, number)", '"1"', "captions: caption_id 1 occurs twice"),
        ("with tables.record", "1 / 0\n        with tables.record", "mine.py:16: ZeroDivisionError: division by zero"),
        ("return tables", "return Tables()", "reads: no table has a row; name the files with --set"),
    ],
    ids=["image", "column", "type", "id", "crash", "empty"],
)
def test_a_broken_reader_is_named(
    project: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    new("format", "mine")
    file = project / "plugins" / "mine.py"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    (project / "a.png").touch()
    (project / "captions.tsv").write_text("train\ta.png\ta dog\nval\ta.png\ta dog\n")
    assert message in run_try("mine", capsys, code=1, root=".")
