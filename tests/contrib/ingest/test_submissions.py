"""vlp ingest: a submission waits until it is complete, is rejected alone, moves to done/ and can be moved back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ingest_project import (
    encoded,
    held,
    ingest_counts,
    make_project,
    make_submission,
    params_of,
    picture,
    simple_submission,
)

from vlp_models.contrib.ingest import ingest
from vlp_models.contrib.ingest.index import HashIndex
from vlp_models.contrib.ingest.submissions import find_submissions
from vlp_models.errors import DataError


def test_unfinished_submission_waits(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p", settle_seconds=3600.0)
    folder = simple_submission(workspace, "slow", range(1, 4))
    os.utime(folder / "1.jpg", (0, 0))  # an old date, as from a copy that preserves dates
    assert ingest_counts(workspace) == (0, 0, 0, 0)
    report = json.loads((workspace.reports / "ingest.json").read_text())
    assert [entry["state"] for entry in report["submissions"]] == ["unfinished"]
    assert folder.exists() and not held(workspace)


def test_a_clock_that_was_ahead_delays_no_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = make_project(tmp_path / "p", settle_seconds=300.0)
    simple_submission(workspace, "early", range(1, 4))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86400)  # the clock was corrected by a day
    assert ingest_counts(workspace) == (3, 0, 0, 0)


def test_submission_that_changes_while_read_is_left_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlp_models.contrib.ingest import batch

    workspace = make_project(tmp_path / "p")
    folder = simple_submission(workspace, "moving", range(1, 4))
    write = batch.write_batch

    def late(*arguments: object) -> str:
        (folder / "4.jpg").write_bytes(encoded(picture(4)))
        return write(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(batch, "write_batch", late)
        assert ingest_counts(workspace) == (0, 0, 0, 0)
    assert not held(workspace)
    assert ingest_counts(workspace) == (3, 0, 0, 0)


def test_too_many_bad_pairs_reject_only_that_submission(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p", max_bad_fraction=0.3)
    make_submission(
        workspace, "a-bad", [("x.jpg", "is it there", ""), ("1.jpg", "it is there", "")], {"1.jpg": encoded(picture(1))}
    )
    simple_submission(workspace, "good", range(2, 5))
    make_submission(workspace, "none", [], {})
    with pytest.raises(
        DataError, match=r"a-bad.*1 of 2 pairs are bad.*max_bad_fraction \(30\.0%\).*image_present: 1"
    ) as caught:
        ingest.run(params_of(workspace), workspace)
    assert "none/pairs.jsonl: has no pairs; complete it, or move it out of the inbox" in str(caught.value)
    assert {row["caption"] for row in held(workspace)} == {f"picture number {seed}" for seed in range(2, 5)}
    assert (workspace.root / "data" / "inbox" / "a-bad").exists()
    assert json.loads((workspace.reports / "ingest.json").read_text())["new"] == 3


def test_removed_batch_can_be_ingested_again(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    inbox = workspace.root / "data" / "inbox"
    simple_submission(workspace, "monday", range(1, 4))
    assert ingest_counts(workspace) == (3, 0, 0, 0)
    (batch,) = (path.parent for path in (workspace.root / "data" / "accepted").glob("*/manifest.json"))
    (batch / "manifest.json").unlink()  # an interrupted removal
    (inbox / "done" / "monday").rename(inbox / "monday")
    simple_submission(workspace, "tuesday", range(4, 6))
    with pytest.raises(DataError, match=rf"{batch.name}: a folder without manifest\.json, .*delete it"):
        ingest.run(params_of(workspace), workspace)
    assert (inbox / "monday").exists() and not list(workspace.root.glob("data/.accepted.partial-*"))
    report = json.loads((workspace.reports / "ingest.json").read_text())
    states = {entry["name"]: entry["state"] for entry in report["submissions"]}
    assert states == {"monday": "rejected", "tuesday": "ingested"}
    shutil.rmtree(batch)
    assert ingest_counts(workspace) == (3, 0, 0, 0) and len({row["caption"] for row in held(workspace)}) == 5

    shutil.rmtree(batch)
    (inbox / "done" / "monday").rename(inbox / "monday")
    assert ingest_counts(workspace) == (3, 0, 0, 0)


@pytest.mark.parametrize("stays", ["tracked by DVC", "done is a file"])
def test_removed_batch_does_not_come_back_from_a_submission_in_place(tmp_path: Path, stays: str) -> None:
    workspace = make_project(tmp_path / "p")
    inbox = workspace.root / "data" / "inbox"
    folder = simple_submission(workspace, "monday", range(1, 4))
    (inbox / ("monday.dvc" if stays == "tracked by DVC" else "done")).write_text("")
    assert ingest_counts(workspace) == (3, 0, 0, 0) and folder.exists()
    for batch in {row["batch"] for row in held(workspace)}:
        shutil.rmtree(workspace.root / "data" / "accepted" / batch)
    assert ingest_counts(workspace) == (0, 0, 0, 0) and not held(workspace)
    os.utime(folder / "1.jpg", (0, 0))  # another file, as after `dvc checkout`
    assert ingest_counts(workspace) == (3, 0, 0, 0)


def test_long_names_are_shortened(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    for number, name in enumerate(("\u82b1" * 84, "\u82b2" * 85, "other")):  # 252 and 255 bytes
        simple_submission(workspace, name, range(2 * number, 2 * number + 2))
    assert ingest_counts(workspace) == (6, 0, 0, 0)
    assert len(list((workspace.reports / "ingest").glob("*.jsonl"))) == 3
    simple_submission(workspace, "\u82b2" * 85, range(6, 8))  # done/ has one of this name already
    simple_submission(workspace, "other", range(8, 10))
    assert ingest_counts(workspace) == (4, 0, 0, 0)
    assert len(list((workspace.root / "data/inbox/done").iterdir())) == 5


def test_listing_next_to_its_images_and_a_damaged_index(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    folder = workspace.root / "data" / "inbox"
    (folder / "photos").mkdir(parents=True)
    (folder / "photos" / "1.jpg").write_bytes(encoded(picture(1)))
    (folder / "today.csv").write_text("image,caption\nphotos/1.jpg,a loose picture\n")
    (workspace.root / ".work" / "ingest").mkdir(parents=True)
    (workspace.root / ".work" / "ingest" / "index.sqlite").write_bytes(b"no database" * 100)
    odd = simple_submission(workspace, "odd\udcff", range(2, 4))  # a name that is not UTF-8
    (odd / "pairs.jsonl").rename(odd / "p\udcff.jsonl")
    assert ingest.run(params_of(workspace), workspace, check=True)["submissions"][0]["state"] == "ready"
    assert ingest_counts(workspace) == (3, 0, 0, 0)
    assert (folder / "done" / "today.csv").exists() and (folder / "photos" / "1.jpg").exists()
    assert ingest_counts(workspace) == (0, 0, 0, 0)


def test_listing_in_the_inbox_waits_for_the_images_next_to_it(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    folder = workspace.root / "data" / "inbox"
    folder.mkdir(parents=True)
    (folder / "today.csv").write_text("image,caption\n1.jpg,a loose picture\n")
    (folder / "tomorrow.csv").write_text("")
    content = encoded(picture(1))
    (folder / "1.jpg").write_bytes(content[:100])
    submission = find_submissions(folder, [])[0][0]
    before = submission.snapshot()
    time.sleep(0.1)
    (folder / "1.jpg").write_bytes(content)
    after = submission.snapshot()
    assert after.id != before.id and after.files == 2, "the other listing is not part of it"
    assert after.age < time.time() - (folder / "today.csv").stat().st_ctime - 0.09, "the nearest change is the image's"
    (folder / "tomorrow.csv").unlink()
    assert submission.snapshot().id == after.id
    assert ingest_counts(workspace) == (1, 0, 0, 0)


def test_an_index_with_damaged_pages_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workspace = make_project(tmp_path / "p")
    simple_submission(workspace, "monday", range(1, 4))
    assert ingest_counts(workspace) == (3, 0, 0, 0)
    index = workspace.root / ".work" / "ingest" / "index.sqlite"
    page = 4096
    index.write_bytes(index.read_bytes()[: 2 * page] + b"\xff" * (index.stat().st_size - 2 * page))
    simple_submission(workspace, "tuesday", range(2, 6))
    with caplog.at_level("WARNING", logger="vlp_models"):
        assert ingest_counts(workspace) == (2, 2, 0, 0)
    assert f"{index}: damaged" in caplog.text


def test_pairs_written_before_the_index_was_found_damaged_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = make_project(tmp_path / "p")
    for name, seeds in (("monday", range(1, 4)), ("tuesday", range(4, 6)), ("wednesday", range(6, 7))):
        simple_submission(workspace, name, seeds)
    sync, calls = HashIndex.sync_batches, iter(range(100))

    def damaged_once(index: HashIndex, dataset: Path) -> None:
        if next(calls) == 2:  # after the batch of tuesday
            raise sqlite3.DatabaseError("database disk image is malformed")
        sync(index, dataset)

    monkeypatch.setattr(HashIndex, "sync_batches", damaged_once)
    assert ingest_counts(workspace) == (6, 0, 0, 0)
    report = json.loads((workspace.reports / "ingest.json").read_text())
    assert [entry["name"] for entry in report["submissions"]] == ["monday", "tuesday", "wednesday"]
    assert len(held(workspace)) == 6


def test_names_cannot_control_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = make_project(tmp_path / "p")
    name = "bad \x1b[2J\nsubmission \u202e"
    make_submission(workspace, name, [("missing.jpg", "a dog on the grass", "")], {})
    (workspace.root / "data" / "inbox" / f"{name} without a listing").mkdir()
    with pytest.raises(DataError, match="1 of 1 pairs are bad") as caught:
        ingest.run(params_of(workspace), workspace)
    for text in (str(caught.value), *capsys.readouterr().out.splitlines()):
        assert text.isprintable()
    assert r"bad \x1b[2J\nsubmission \u202e/pairs.jsonl: " in str(caught.value)


def test_a_folder_that_may_not_be_read_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' user may read everything, so reading this folder is refused here."""
    workspace = make_project(tmp_path / "p")
    simple_submission(workspace, "good", range(1, 4))
    lost = workspace.root / "data" / "inbox" / "lost+found"
    lost.mkdir()
    iterdir = Path.iterdir

    def refusing(folder: Path) -> Iterator[Path]:
        if folder == lost:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", refusing)
    assert ingest_counts(workspace) == (3, 0, 0, 0)
    report = json.loads((workspace.reports / "ingest.json").read_text())
    assert any("lost+found" in note and "ermission" in note for note in report["notes"]), report


def test_spellings_of_one_path_are_one_image(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    rows = [("x/1.jpg", "a first caption", ""), ("./x/1.jpg", "another caption", ""), ("x\\1.jpg", "a third one", "")]
    rows += [("x/../x/1.jpg", "not taken", "")]
    make_submission(workspace, "spelled", rows, {"x/1.jpg": encoded(picture(1))})
    ingest_counts(workspace)
    assert sorted(row["caption"] for row in held(workspace)) == ["a first caption", "a third one", "another caption"]
    assert len({row["image"] for row in held(workspace)}) == 1
