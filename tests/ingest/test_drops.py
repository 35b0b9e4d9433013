"""vlp ingest: what becomes of a drop. It waits until it is whole, is refused alone, goes to done/, can be put back."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from ingest_world import encoded, held, make_drop, make_project, params_of, picture, simple_drop, take

from vlp_models.errors import DataError
from vlp_models.ingest import ingest


def test_an_unfinished_drop_waits(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p", settle_seconds=3600.0)
    folder = simple_drop(workspace, "slow", range(1, 4))
    os.utime(folder / "1.jpg", (0, 0))  # an old date, as a copy that keeps dates has it
    assert take(workspace) == (0, 0, 0, 0)
    report = json.loads((workspace.reports / "ingest.json").read_text())
    assert [entry["state"] for entry in report["drops"]] == ["unfinished"]
    assert folder.exists() and not held(workspace)


def test_a_drop_that_changes_while_it_is_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlp_models.ingest import batch

    workspace = make_project(tmp_path / "p")
    folder = simple_drop(workspace, "moving", range(1, 4))
    write = batch.write_batch

    def late(*arguments: object) -> str:
        (folder / "4.jpg").write_bytes(encoded(picture(4)))
        return write(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(batch, "write_batch", late)
        assert take(workspace) == (0, 0, 0, 0)
    assert not held(workspace)
    assert take(workspace) == (3, 0, 0, 0)


def test_too_many_bad_pairs_refuse_the_drop_and_no_other(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p", max_bad_fraction=0.3)
    make_drop(
        workspace, "a-bad", [("x.jpg", "is it there", ""), ("1.jpg", "it is there", "")], {"1.jpg": encoded(picture(1))}
    )
    simple_drop(workspace, "good", range(2, 5))
    make_drop(workspace, "none", [], {})
    with pytest.raises(DataError, match=r"a-bad.*1 of 2 pairs are bad.*max_bad_fraction \(30\.0%\).*image_present: 1"):
        ingest.run(params_of(workspace), workspace)
    assert {row["caption"] for row in held(workspace)} == {f"picture number {seed}" for seed in range(2, 5)}
    assert (workspace.root / "data" / "inbox" / "a-bad").exists()
    assert json.loads((workspace.reports / "ingest.json").read_text())["new"] == 3


def test_what_is_taken_out_can_be_put_back(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    inbox = workspace.root / "data" / "inbox"
    simple_drop(workspace, "monday", range(1, 4))
    assert take(workspace) == (3, 0, 0, 0)
    (batch,) = (path.parent for path in (workspace.root / "data" / "accepted").glob("*/manifest.json"))
    (batch / "manifest.json").unlink()  # a removal that is cut off
    (inbox / "done" / "monday").rename(inbox / "monday")
    simple_drop(workspace, "tuesday", range(4, 6))
    with pytest.raises(DataError, match=rf"{batch.name}: a folder without manifest\.json, .*delete it"):
        ingest.run(params_of(workspace), workspace)
    assert (inbox / "monday").exists() and not list(workspace.root.glob("data/.accepted.partial-*"))
    report = json.loads((workspace.reports / "ingest.json").read_text())
    states = {entry["name"]: entry["state"] for entry in report["drops"]}
    assert states == {"monday": "refused", "tuesday": "taken"}
    shutil.rmtree(batch)
    assert take(workspace) == (3, 0, 0, 0) and len({row["caption"] for row in held(workspace)}) == 5

    shutil.rmtree(batch)
    with closing(sqlite3.connect(workspace.root / ".work" / "ingest" / "index.sqlite")) as index, index:
        index.execute("INSERT INTO drops SELECT snapshot FROM batches")  # as version 2 had it
        (version,) = index.execute("PRAGMA user_version").fetchone()
        index.execute(f"PRAGMA user_version = {4 + version % 2}")
    (inbox / "done" / "monday").rename(inbox / "monday")
    assert take(workspace) == (3, 0, 0, 0)


@pytest.mark.parametrize("stays", ["DVC has it", "done is no folder"])
def test_a_batch_that_is_taken_out_does_not_come_back_by_itself(tmp_path: Path, stays: str) -> None:
    """Its drop is where it was."""
    workspace = make_project(tmp_path / "p")
    inbox = workspace.root / "data" / "inbox"
    folder = simple_drop(workspace, "monday", range(1, 4))
    (inbox / ("monday.dvc" if stays == "DVC has it" else "done")).write_text("")
    assert take(workspace) == (3, 0, 0, 0) and folder.exists()
    for batch in {row["batch"] for row in held(workspace)}:
        shutil.rmtree(workspace.root / "data" / "accepted" / batch)
    assert take(workspace) == (0, 0, 0, 0) and not held(workspace)
    os.utime(folder / "1.jpg", (0, 0))  # another file in its place, as `dvc checkout` leaves it
    assert take(workspace) == (3, 0, 0, 0)


def test_a_long_name_stops_no_other_drop(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    for number, name in enumerate(("\u82b1" * 84, "\u82b2" * 85, "other")):  # 252 and 255 bytes
        simple_drop(workspace, name, range(2 * number, 2 * number + 2))
    assert take(workspace) == (6, 0, 0, 0)
    assert len(list((workspace.reports / "ingest").glob("*.jsonl"))) == 3
    simple_drop(workspace, "\u82b2" * 85, range(6, 8))  # once more, where done/ has one
    simple_drop(workspace, "other", range(8, 10))
    assert take(workspace) == (4, 0, 0, 0)
    assert len(list((workspace.root / "data/inbox/done").iterdir())) == 5


def test_a_listing_beside_its_images_and_a_damaged_index(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    folder = workspace.root / "data" / "inbox"
    (folder / "photos").mkdir(parents=True)
    (folder / "photos" / "1.jpg").write_bytes(encoded(picture(1)))
    (folder / "today.csv").write_text("image,caption\nphotos/1.jpg,a loose picture\n")
    (workspace.root / ".work" / "ingest").mkdir(parents=True)
    (workspace.root / ".work" / "ingest" / "index.sqlite").write_bytes(b"no database" * 100)
    odd = simple_drop(workspace, "odd\udcff", range(2, 4))  # a name that is not UTF-8
    (odd / "pairs.jsonl").rename(odd / "p\udcff.jsonl")
    assert ingest.run(params_of(workspace), workspace, check=True)["drops"][0]["state"] == "ready"
    assert take(workspace) == (3, 0, 0, 0)
    assert (folder / "done" / "today.csv").exists() and (folder / "photos" / "1.jpg").exists()
    assert take(workspace) == (0, 0, 0, 0)
