"""Labels in pairs.csv: what is there stays, a kill loses or doubles nothing, and several writers do not either."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlp_models.common import io
from vlp_models.contrib.label.listing import Label, LabelError, Listing
from vlp_models.data.formats import pairs
from vlp_models.data.formats.base import Tables
from vlp_models.data.formats.pairs import LABELED, PairsParams, read_pairs
from vlp_models.errors import DataError
from vlp_models.params import load_params

RULES = load_params(Path(__file__).parents[3] / "params.yaml").validate
DRAFT = "vlp-captioning version 3, edited"


def open_listing(file: Path, **options: Any) -> Listing:
    return Listing(file, file.parents[1] / ".work" / "label.lock", RULES, **options)


def make_label(number: int, caption: str = 'a dog, a cat and "a bird"', by: str = "Zoë") -> Label:
    return Label(
        image=f"img/{number:04}.jpg", caption=caption, by=by, at=f"2026-01-02T03:04:05.{number:03}Z", draft=DRAFT
    )


def read(file: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_pairs(file, Tables(directory=None))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pairs").mkdir()
    return tmp_path / "pairs"


FILES = {
    # name: (file, content, the first row with the columns of labels)
    "csv": ("pairs.csv", b'image,caption\nimg/a.jpg,"one, two"\n', b'img/a.jpg,"one, two",,,\n'),
    "windows": ("pairs.csv", b"\xef\xbb\xbfImage; Caption\r\na.jpg;one\r\n", b"a.jpg;one;;;\r\n"),
    "latin-1": ("pairs.csv", b"image,caption\na.jpg,caf\xe9\nb.jpg,tea", b"a.jpg,caf\xe9,,,\nb.jpg,tea,,,\n"),
    "tsv": ("pairs.tsv", b"image\tcaption\na.jpg\tsay 'no'\n", b"a.jpg\tsay 'no'\t\t\t\n"),
    "several lines": ("pairs.csv", b'image,caption\na.jpg,"one\ntwo"\n', b'a.jpg,"one\ntwo",,,\n'),
    "jsonl": ("pairs.jsonl", b'{"image": "a.jpg", "caption": "one"}\n', b'{"image": "a.jpg", "caption": "one"}\n'),
    "new": ("pairs.csv", None, b""),
    "empty": ("pairs.csv", b"", b"image,caption,labeled_by,labeled_at,label_draft\n"),
    "empty jsonl": ("pairs.jsonl", b"", b""),
}


@pytest.mark.parametrize("name", FILES)
def test_labels_are_rows_and_undo_removes_them(folder: Path, name: str) -> None:
    file, content, rows = folder / FILES[name][0], FILES[name][1], FILES[name][2]
    if content is not None:
        file.write_bytes(content)
    before = read(file) if content else []
    listing = open_listing(file)
    assert listing.add(make_label(1)) and listing.add(make_label(2, "眠っている小さな白い猫"))
    assert rows in file.read_bytes() and listing.captions()["img/0002.jpg"] == ["眠っている小さな白い猫"]
    added = read(file)[len(before) :]
    assert [row["caption"] for row in added] == [make_label(1).caption, "眠っている小さな白い猫"]
    assert [added[0][column] for column in LABELED] == ["Zoë", "2026-01-02T03:04:05.001Z", DRAFT]
    for row, old in zip(read(file), before, strict=False):
        assert {column: row[column] for column in old} == old
    with_one = file.read_bytes()
    assert not listing.add(make_label(2, " 眠っている小さな白い猫  ")), "a repeated request"
    assert file.read_bytes() == with_one
    # A label that was changed by hand since is not removed.
    assert listing.remove(make_label(2, "眠っている小さな白い猫"))
    assert not listing.remove(make_label(2, "眠っている小さな白い猫"))
    assert not listing.remove(make_label(1, by="Max"))
    assert [row["image"] for row in read(file)[len(before) :]] == ["img/0001.jpg"]
    # The pipeline reads the file, and does not report the columns as ignored.
    tables = pairs.read("pairs", PairsParams(format="pairs", root=folder.name, pairs=file.name), folder.parent)
    assert len(tables["captions"]) and not tables.ignored & set(LABELED)


def test_rows_that_name_splits_and_languages_get_both(folder: Path) -> None:
    file = folder / "pairs.csv"
    file.write_text("split,image,caption,photographer\ntrain,a.jpg,one,Ann\ntest,b.jpg,two,Bob\n")
    listing = open_listing(file, split="val", language="de")
    assert listing.names_splits and listing.add(make_label(1, "ein Hund"))
    assert read(file)[-1] == {
        **{"split": "val", "image": "img/0001.jpg", "caption": "ein Hund", "photographer": "", "lang": "de"},
        **dict(zip(LABELED, ["Zoë", "2026-01-02T03:04:05.001Z", DRAFT], strict=True)),
    }


def test_a_row_that_columns_cannot_be_added_to_is_named(folder: Path) -> None:
    file = folder / "pairs.csv"
    file.write_text("image,caption\na.jpg,one\nb.jpg,two, three\n")
    content = file.read_bytes()
    with pytest.raises(DataError, match=r"pairs\.csv:3: 3 fields, the header has 2; fix this line first"):
        open_listing(file).add(make_label(1))
    assert file.read_bytes() == content
    with pytest.raises(DataError, match=r"labels are written to \.csv"):
        open_listing(folder / "pairs.parquet")


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        ("", "empty"),
        (" \u200b\n", "empty"),
        ("dog", "words"),
        ("1 2 3", "no letter"),
        ("a dog\x07 runs", "control"),
        ("a dog \ufffd runs", "control"),
        ("https://example.org/dog.jpg www.example.org", "URL"),
        ("a dog \ud800 runs", "UTF-8"),
        ("word " * 81, "words"),
    ],
)
def test_captions_that_validate_refuses_are_refused(folder: Path, caption: str, reason: str) -> None:
    with pytest.raises(LabelError, match=reason):
        open_listing(folder / "pairs.csv").check(caption)


def test_captions_are_one_line_in_any_language(folder: Path) -> None:
    check = open_listing(folder / "pairs.csv").check
    assert check("  two\r\ndogs\t play ") == "two dogs play"
    assert check("Người leo núi") == "Người leo núi" and check("走っている犬") == "走っている犬"


def test_a_hard_link_into_the_cache_is_not_written_through(folder: Path) -> None:
    cached, file = folder.parent / "cached", folder / "pairs.csv"
    cached.write_text("image,caption\na.jpg,one two\n")
    cached.chmod(0o444)
    file.hardlink_to(cached)
    listing = open_listing(file)
    assert listing.add(make_label(1)) and listing.add(make_label(2))
    assert cached.read_text() == "image,caption\na.jpg,one two\n" and len(read(file)) == 3


def test_a_link_into_the_cache_is_replaced_and_another_link_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cached, elsewhere = tmp_path / ".dvc/cache/files/md5/ab/cdef", tmp_path / "elsewhere.csv"
    cached.parent.mkdir(parents=True)
    for target, is_link in ((cached, False), (elsewhere, True)):
        target.write_text("image,caption\na.jpg,one two\n")
        file = folder / f"{target.stem}.csv"
        file.symlink_to(target)
        assert open_listing(file).add(make_label(1)) and len(read(file)) == 2
        assert file.is_symlink() == is_link
    assert len(read(elsewhere)) == 2
    assert cached.read_text() == "image,caption\na.jpg,one two\n"


def in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


STEPS = {
    # where the process is killed: (object, name of its function, before or after its work)
    "before the new file": (Path, "touch", False),
    "in the middle of the text": (Path, "write_bytes", None),
    "before the text is flushed": (io, "sync_to_disk", False),
    "before the old file is replaced": (Path, "replace", False),
    "after the old file was replaced": (Path, "replace", True),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_the_file_before_or_after(
    folder: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "pairs.csv"
    open_listing(file).add(make_label(1))
    before = file.read_bytes()
    owner, name, after = STEPS[step]
    work = getattr(owner, name)

    def deadly(*arguments: Any, **more: Any) -> Any:
        if after is None:  # half of the new text
            work(arguments[0], arguments[1][: len(arguments[1]) // 2])
        elif after:
            work(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    def label() -> None:
        setattr(owner, name, deadly)
        open_listing(file).add(make_label(2))

    _, status = os.waitpid(in_child(label), 0)
    assert os.WIFSIGNALED(status), "the step was not reached"
    assert (file.read_bytes() == before) != bool(after), "whole, and only after the replacement with the label"
    # The browser repeats the answer that was not acknowledged.
    listing = open_listing(file)
    assert listing.add(make_label(2)) != bool(after)
    assert [row["image"] for row in read(file)] == ["img/0001.jpg", "img/0002.jpg"]
    listing.add(make_label(3))
    assert [entry.name for entry in folder.iterdir()] == ["pairs.csv"], "nothing is left behind"


def test_several_processes_lose_nothing(folder: Path) -> None:
    file = folder / "pairs.csv"

    def write(process: int) -> None:
        listing = open_listing(file)
        for number in range(15):
            listing.add(make_label(100 * process + number, by=f"process {process}"))
            listing.add(make_label(999, f"caption of {process} number {number}"))

    children = [in_child(lambda process=process: write(process)) for process in range(3)]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    counts = Counter((row["image"], row["caption"]) for row in read(file))
    assert len(counts) == 3 * 15 * 2 and set(counts.values()) == {1}


def test_rows_added_by_another_program_are_kept(folder: Path) -> None:
    file = folder / "pairs.jsonl"
    listing = open_listing(file)
    listing.add(make_label(1))
    with file.open("a") as appended:
        appended.write(json.dumps({"image": "by-hand.jpg", "caption": "written by hand"}))  # no line end
    assert listing.captions()["by-hand.jpg"] == ["written by hand"]
    listing.add(make_label(2))
    assert [row["image"] for row in read(file)] == ["img/0001.jpg", "by-hand.jpg", "img/0002.jpg"]
