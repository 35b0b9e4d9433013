"""A corrected caption of the demo page becomes a submission that `vlp ingest` accepts, with its provenance."""

from __future__ import annotations

import csv
import dataclasses
import shutil
from pathlib import Path

import pytest
from ingest_project import make_project, params_of
from photos import photo as draw

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.demo_page import corrections
from vlp_models.contrib.demo_page.commands import make_page
from vlp_models.contrib.demo_page.corrections import VISITOR, Corrections
from vlp_models.contrib.demo_page.photos import find_examples
from vlp_models.contrib.ingest import ingest
from vlp_models.errors import DataError
from vlp_models.params import Params


def read_submission(folder: Path) -> dict[str, str]:
    with (folder / "pairs.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    return row


def test_a_correction_is_ingested_with_its_provenance(
    here: Workspace, params: Params, photo: Path, tmp_path: Path
) -> None:
    workspace, upload = make_project(tmp_path / "project"), tmp_path / "upload.JPG"
    draw(7).save(upload)
    page = make_page(params, here, corrections=True)
    page = dataclasses.replace(
        page, corrections=Corrections(inbox=workspace.root / "data/inbox", rules=params.validate, evaluation=[photo])
    )
    shown = page.caption(str(upload)).caption
    for text, by in (("a poster of bright shapes", " Zoë\n"), ("a poster with\r\nmany shapes", "")):
        sent = page.correct(str(upload), shown, text, by)
        assert sent.caption.startswith("Thank you.") and not sent.problem
    folders = sorted((workspace.root / "data/inbox").iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    row = read_submission(folders[0])
    assert row["caption"] == "a poster of bright shapes" and row["labeled_by"] == "Zoë"
    assert row["label_draft"].startswith("vlp-captioning version 1 (champion") and row["label_draft"].endswith(shown)
    assert row["labeled_at"].endswith("Z") and read_submission(folders[1])["labeled_by"] == VISITOR
    assert (folders[0] / row["image"]).read_bytes() == upload.read_bytes()
    # What must not be trained on, is unchanged or would be refused later is a sentence at once.
    for path, caption, reason in (
        (photo, "a poster of shapes", "This photo is evaluation data"),
        (upload, f" {shown} ", "This is the caption that the page shows"),
        (upload, "https://example.org", "Nothing but a URL"),
        (upload, "x" * 1001, "A caption has at most 1,000 characters"),
        (tmp_path / "gone.jpg", "a poster of shapes", "Gone.jpg: cannot be read"),
    ):
        assert page.correct(str(path), shown, caption, "").problem.startswith(reason), caption
    assert page.correct(None, "", "a poster of shapes", "").problem == "Upload a photo first."
    assert len(list((workspace.root / "data/inbox").iterdir())) == 2
    report = ingest.run(params_of(workspace), workspace)
    assert (report["new"], report["duplicates"]) == (1, 1), "the photo is in the dataset once"


def test_full_inboxes_and_pages_without_an_inbox_accept_none(
    here: Workspace, params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrections, "MAX_WAITING", 1)
    upload, accepted = tmp_path / "upload.png", Corrections(inbox=tmp_path / "inbox", rules=params.validate)
    draw(7).save(upload)
    about = {"by": "", "version": "v", "draft": "a cat"}
    accepted.save(upload, caption="a poster of shapes", **about)
    with pytest.raises(DataError, match="1 corrections are waiting; `vlp ingest` reads them"):
        accepted.save(upload, caption="a poster with shapes", **about)
    shutil.rmtree(tmp_path / "inbox")
    accepted.save(upload, caption="a poster with shapes", **about)
    without = dataclasses.replace(params, ingest=dataclasses.replace(params.ingest, inbox=""))
    assert make_page(without, here, corrections=True).corrections is None
    assert make_page(params, here).corrections is None
    page = make_page(params, here, corrections=True)
    assert page.corrections is not None and set(page.corrections.evaluation) == set(find_examples(here, "test"))
    assert not make_page(params, here, split="train", corrections=True).corrections.evaluation  # type: ignore[union-attr]
