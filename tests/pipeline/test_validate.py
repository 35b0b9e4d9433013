"""validate: every rule can fail, a failing row is set aside under exactly that rule, and too many stop the stage."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from photos import photo
from PIL import Image, ImageOps

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates.hashes import hash_image
from vlp_models.curation.duplicates.leakage import LEAKS, FingerprintWriter
from vlp_models.curation.validation import FLAGS
from vlp_models.curation.validation.rules import rules_for
from vlp_models.data.joins import read_boxed
from vlp_models.data.tables import ID_COLUMN, SCHEMAS, read_table, write_table
from vlp_models.errors import DataError, MissingToolError
from vlp_models.params import DatasetParams, Params, load_params
from vlp_models.pipeline.stages import validate

ROOT = Path(__file__).parents[2]
Rows = dict[str, list[dict[str, Any]]]

GOOD: dict[str, dict[str, Any]] = {
    "images": {"source": "d", "split": "train", "width": 64, "height": 48},
    "captions": {"image_id": "d/good"},
    "questions": {
        "image_id": "d/good",
        "text": "What is it?",
        "question_type": "what is",
        "answer_type": "other",
        "answers": ["cup"] * 10,
    },
    "statements": {"image_id": "d/good", "text": "There is a box.", "label": None, "group": "d/1"},
    "choices": {
        "image_id": "d/good",
        "text": "What color is Alex ?",
        "answers": ["red .", "blue .", "7 .", "green ."],
        "answer_label": None,
        "rationales": ["a", "b", "c", "d"],
        "rationale_label": 3,
        "boxes": [[0.0, 0.0, 64.5, 48.0]],
    },
    "hypotheses": {
        "image_id": "d/good",
        "text": "There is a cup.",
        "gold_label": "neutral",
        "annotator_labels": ["neutral", "entailment"],
    },
    "image_pairs": {
        "image_id": "d/good",
        "other_image_ids": ["d/good"],
        "text": "Both show a cup.",
        "label": True,
        "group": "d/1",
    },
    "texts": {"source": "d", "split": "train", "text": "There are cups."},
    "objects": {"image_id": "d/good", "category": "cup", "x1": 0.0, "y1": 0.0, "x2": 64.5, "y2": 48.0},
}
# One row for each rule: the good row, changed so that this rule alone is broken.
NO_LETTERS, UNCLEAN, URL = "1 + 1 = 2", "a bell\x07 rings", "https://example.org/1 https://example.org/2"
TEXTS: dict[str, dict[str, Any]] = {
    "text_present": {"text": None},
    "text_letters": {"text": NO_LETTERS},
    "text_clean": {"text": UNCLEAN},
    "text_not_url": {"text": URL},
}
IMAGE: dict[str, dict[str, Any]] = {
    "image_known": {"image_id": "d/nowhere"},
    "image_good": {"image_id": "d/images-image_side"},
}
BROKEN: dict[str, dict[str, dict[str, Any]]] = {
    "images": {
        "image_id_present": {"image_id": None},
        "source_present": {"source": None},
        "split_present": {"split": None},
        "path_present": {"path": None},
        "width_present": {"width": None},
        "height_present": {"height": None},
        "sha256_present": {"sha256": None},
        "id_unique": {"image_id": "d/good"},
        "split_known": {"split": "dev"},
        "split_disjoint": {"sha256": hashlib.sha256(b"d/tested").hexdigest()},
        "near_disjoint": {},  # a changed copy of d/tested, by its print
        "image_side": {"width": 15},
        "image_pixels": {"width": 50_001, "height": 1_000},
        "sha256_form": {"sha256": "0" * 63},
    },
    "captions": {
        "caption_id_present": {"caption_id": None},
        "id_unique": {"caption_id": "d/captions-good"},
        **IMAGE,
        **TEXTS,
        "caption_words": {"text": "Dog"},
        **({"flagged": {}} if FLAGS else {}),  # removed by `vlp audit` or `vlp influence`
    },
    "questions": {
        "question_id_present": {"question_id": None},
        "id_unique": {"question_id": "d/questions-good"},
        **IMAGE,
        **TEXTS,
        "answer_type_known": {"answer_type": "color"},
        "ten_answers": {"answers": ["cup"] * 9},
    },
    "statements": {
        "statement_id_present": {"statement_id": None},
        "id_unique": {"statement_id": "d/statements-good"},
        **IMAGE,
        **TEXTS,
        "group_present": {"group": None},
    },
    "choices": {
        "choice_id_present": {"choice_id": None},
        "id_unique": {"choice_id": "d/choices-good"},
        **IMAGE,
        **TEXTS,
        "four_answers": {"answers": ["red .", "blue ."]},
        "four_rationales": {"rationales": None},
        "answer_label_known": {"answer_label": 4},
        "rationale_label_known": {"rationale_label": -1},
        "choices_clean": {"answers": ["red .", " ", "7 .", "green ."]},
        "object_box_area": {"boxes": [[0.0, 0.0, 64.5, 48.0], [5.0, 5.0, 5.0, 9.0]]},
        "object_box_inside": {"boxes": [[0.0, 0.0, 66.0, 48.0]]},
    },
    "hypotheses": {
        "hypothesis_id_present": {"hypothesis_id": None},
        "id_unique": {"hypothesis_id": "d/hypotheses-good"},
        **IMAGE,
        **TEXTS,
        "gold_label_known": {"gold_label": "-"},
    },
    "image_pairs": {
        "pair_id_present": {"pair_id": None},
        "id_unique": {"pair_id": "d/image_pairs-good"},
        **IMAGE,
        "other_images_present": {"other_image_ids": []},
        "other_images_known": {"other_image_ids": ["d/good", "d/nowhere"]},
        "other_images_good": {"other_image_ids": ["d/images-image_side"]},
        "images_of_one_split": {"other_image_ids": ["d/images-d/tested"]},
        **TEXTS,
        "group_present": {"group": None},
    },
    "texts": {
        "text_id_present": {"text_id": None},
        "id_unique": {"text_id": "d/texts-good"},
        "source_present": {"source": None},
        "split_present": {"split": None},
        "split_known": {"split": "dev"},
        **TEXTS,
    },
    "objects": {
        "object_id_present": {"object_id": None},
        "id_unique": {"object_id": "d/objects-good"},
        **IMAGE,
        "category_present": {"category": None},
        **{f"{corner}_present": {corner: None} for corner in ("x1", "y1", "x2", "y2")},
        "box_area": {"x2": 0.0},
        "box_inside": {"x2": 66.0},
    },
}


def row(table: str, name: str, **changes: Any) -> dict[str, Any]:
    """A row that breaks no rule, with a provenance that names it, plus `changes`."""
    base = {**GOOD[table], ID_COLUMN[table]: f"d/{table}-{name}", "provenance": f"{table}-{name}"}
    if table == "captions":
        base["text"] = f"caption {name}"
    if table == "images":
        base |= {"path": f"{name}.png", "sha256": hashlib.sha256(name.encode()).hexdigest()}
    return {**base, **changes}


def good_rows(images: int = 1) -> Rows:
    rows: Rows = {table: [row(table, "good")] for table in GOOD}
    rows["images"] = [row("images", "good", image_id="d/good"), row("images", "d/tested", split="test")]
    rows["images"] += [row("images", f"more-{n}", split="val") for n in range(images - 1)]
    return rows


def write_interim(workspace: Workspace, rows: Rows, source: str = "d", truth: str = "") -> None:
    directory = workspace.interim(source)
    directory.mkdir(parents=True, exist_ok=True)
    for name in SCHEMAS:
        write_table(rows.get(name, []), name, directory)
    if truth:
        (directory / "truth.jsonl").write_text(truth)


def write_prints(workspace: Workspace, pictures: dict[str, Image.Image], rows: Rows, source: str = "d") -> None:
    """As `prepare` leaves them next to the tables."""
    splits = {row["image_id"]: row["split"] for row in rows["images"]}
    with FingerprintWriter(workspace.interim(source)) as fingerprints:
        for image_id, picture in pictures.items():
            content = io.BytesIO()
            picture.save(content, "PNG")
            tested = splits[image_id] != "train"
            fingerprints.add(image_id, hash_image(content.getvalue(), 10**6, keypoints=True, held_out=tested))


def params_for(max_bad_fraction: float, *sources: str) -> Params:
    params = load_params(ROOT / "params.yaml")
    return dataclasses.replace(
        params,
        data={name: DatasetParams.of(format="coco", root=name) for name in sources or ("d",)},
        validate=dataclasses.replace(params.validate, max_bad_fraction=max_bad_fraction),
    )


def test_every_rule_has_a_row_that_breaks_it() -> None:
    params = params_for(1.0).validate
    for table in ID_COLUMN:
        names = {rule.name for rule in rules_for(table, params)}
        assert names == set(BROKEN[table])


@pytest.mark.slow
def test_each_broken_row_is_quarantined_by_exactly_its_rule(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    rows = good_rows()
    for table, rules in BROKEN.items():
        rows[table] += [row(table, rule, **changes) for rule, changes in rules.items()]
    write_interim(workspace, rows)
    (tmp_path / "data" / "audit.jsonl").write_text('{"caption_id": "d/captions-flagged", "decision": "remove"}\n')
    write_prints(workspace, {"d/images-d/tested": photo(1), "d/images-near_disjoint": ImageOps.mirror(photo(1))}, rows)
    validate.run(params_for(0.99), workspace)

    broken: dict[str, set[str]] = defaultdict(set)
    for bad in read_table("quarantine", workspace.validated).to_pylist():
        broken[bad["provenance"]].add(bad["rule"])
        assert bad["reason"]
    assert broken == {f"{table}-{rule}": {rule} for table, rules in BROKEN.items() for rule in rules}
    for table in ID_COLUMN:
        left = [good["provenance"] for good in read_table(table, workspace.validated).to_pylist()]
        assert left == (["images-good", "images-d/tested"] if table == "images" else [f"{table}-good"])
        assert read_table(table, workspace.validated).schema.equals(SCHEMAS[table])

    report = json.loads((workspace.reports / "validation.json").read_text())
    failed = {(entry["table"], entry["rule"]): entry["failed"] for entry in report["rules"]}
    assert failed == {(table, rule): 1 for table, rules in BROKEN.items() for rule in rules}
    counts = report["tables"]["captions"]
    assert counts["good"] == 1 and counts["rows"] - counts["bad"] == 1 and counts["bad"] == len(BROKEN["captions"])
    assert "captions" in (workspace.reports / "validation.html").read_text()


@pytest.mark.slow
def test_equal_captions_of_a_training_image_are_dropped_and_counted(tmp_path: Path) -> None:
    """RSICD has them by design: they must not stop the pipeline, and none is trained on twice. Those of val and test
    stay: the CIDEr of a public test set is the mean over all references, equal ones too."""
    workspace, rows = Workspace(tmp_path), good_rows(images=2)
    texts = ["Many planes", "many  planes", "MANY PLANES", "many planes", "a white plane"]
    rows["captions"] = [row("captions", str(number), text=text) for number, text in enumerate(texts)]
    rows["captions"] += [row("captions", f"{n} of val", image_id="d/images-more-0", text=texts[n]) for n in range(2)]
    write_interim(workspace, rows)
    validate.run(params_for(0.0), workspace)
    left = read_table("captions", workspace.validated)["caption_id"].to_pylist()
    assert left == ["d/captions-0", "d/captions-4", "d/captions-0 of val", "d/captions-1 of val"]
    assert not read_table("quarantine", workspace.validated).num_rows
    report = json.loads((workspace.reports / "validation.json").read_text())
    assert report["tables"]["captions"] == {"rows": 7, "good": 4, "bad": 0, "bad_percent": 0.0}
    manifest = json.loads((workspace.validated / "manifest.json").read_text())
    assert report["left_out"] == manifest["counts"]["left_out"] == {validate.REPEATED: 3}


def unreadable(table: str, row_id: str, rule: str) -> dict[str, Any]:
    return {"table": table, "row_id": row_id, "rule": rule, "reason": "why", "provenance": f"{table}.json:1"}


@pytest.mark.slow
def test_rows_that_prepare_refused_count_as_checked(tmp_path: Path) -> None:
    """Both stages have the rule `id_unique`."""
    workspace, rows = Workspace(tmp_path), good_rows()
    rows["quarantine"] = [unreadable("captions", f"d/bad-{number}", "id_unique") for number in range(3)]
    rows["captions"] += [row("captions", "again", text=rows["captions"][0]["text"]), row("captions", "other")]
    write_interim(workspace, rows)
    validate.run(params_for(0.9), workspace)
    report = json.loads((workspace.reports / "validation.json").read_text())
    entries = {entry["rule"]: entry for entry in report["rules"] if entry["table"] == "captions"}
    assert (entries["id_unique"]["checked"], entries["id_unique"]["failed"]) == (5, 3)
    assert (entries["image_good"]["checked"], entries["image_good"]["failed"]) == (2, 0)


@pytest.mark.slow
def test_datasets_are_stacked_and_rows_of_bad_images_follow(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    rows = good_rows()
    rows["quarantine"] = [unreadable("images", "d/cut", "image_decodes"), unreadable("truth", "", "record_readable")]
    rows["captions"].append(row("captions", "of the cut image", image_id="d/cut"))
    write_interim(workspace, rows, truth='{"image_id": "d/good"}\n{"image_id": "d/cut"}\n')
    other = {"images": [row("images", "x", image_id="e/1", source="e")], "captions": []}
    other["captions"] = [row("captions", "x", caption_id="e/1", image_id="e/1")]
    write_interim(workspace, other, "e", truth='{"image_id": "e/1"}\n')
    write_interim(workspace, good_rows(), "left over from another day")
    validate.run(params_for(0.5, "d", "e"), workspace)

    assert read_table("images", workspace.validated)["source"].to_pylist() == ["d", "d", "e"]
    (boxed,) = read_boxed(workspace.validated)  # e/1 has no box
    assert (boxed["image_id"], [item["category"] for item in boxed["objects"]]) == ("d/good", ["cup"])
    rules = [(bad["table"], bad["rule"]) for bad in read_table("quarantine", workspace.validated).to_pylist()]
    assert rules == [("images", "image_decodes"), ("captions", "image_good"), ("truth", "record_readable")]
    truth = (workspace.validated / "truth.jsonl").read_text()
    assert truth == '{"image_id": "d/good"}\n{"image_id": "e/1"}\n'
    manifest = json.loads((workspace.validated / "manifest.json").read_text())
    assert manifest["splits"] == {"test": 1, "train": 2}
    report = json.loads((workspace.reports / "validation.json").read_text())
    assert report["tables"]["images"] == {"rows": 4, "good": 3, "bad": 1, "bad_percent": 25.0}, "unreadable ones count"

    first = hash_path(workspace.validated)
    validate.run(params_for(0.5, "d", "e"), workspace)
    assert hash_path(workspace.validated) == first


@pytest.mark.slow
def test_a_row_of_two_images_follows_both(tmp_path: Path) -> None:
    """A pair across splits is leakage; one of whose images could not be read, or leaks itself, is gone with it."""
    workspace = Workspace(tmp_path)
    rows = good_rows()
    rows["images"].append(row("images", "copy", sha256=hashlib.sha256(b"d/tested").hexdigest()))  # of a test image
    rows["quarantine"] = [unreadable("images", "d/cut", "image_decodes")]
    others = {"across": "d/images-d/tested", "cut": "d/cut", "copy": "d/images-copy"}
    rows["image_pairs"] += [row("image_pairs", name, other_image_ids=[other]) for name, other in others.items()]
    write_interim(workspace, rows)
    validate.run(params_for(0.8), workspace)
    found = {bad["provenance"]: bad for bad in read_table("quarantine", workspace.validated).to_pylist()}
    reasons = {name: (found[f"image_pairs-{name}"]["rule"], found[f"image_pairs-{name}"]["reason"]) for name in others}
    assert reasons == {
        "across": (
            "images_of_one_split",
            "d/good is in train, d/images-d/tested in test: one row must not mix splits",
        ),
        "cut": ("other_images_good", "image d/cut is quarantined"),
        "copy": ("other_images_good", "image d/images-copy is quarantined"),
    }
    (left,) = read_table("image_pairs", workspace.validated).to_pylist()
    assert (left["pair_id"], left["other_image_ids"]) == ("d/image_pairs-good", ["d/good"])


@pytest.mark.slow
def test_near_duplicates_of_test_images_leave_train_or_are_counted(tmp_path: Path) -> None:
    """Also across datasets, and between val and test; a picture that is only alike stays."""
    workspace, rows = Workspace(tmp_path), good_rows()
    rows["images"] += [row("images", name) for name in ("cropped", "other")]
    rows["images"] += [row("images", "framed", split="val")]
    write_interim(workspace, rows)
    tested = photo(1)
    pictures = {"d/tested": tested, "other": photo(2), "framed": ImageOps.expand(tested, 20, "white")}
    pictures["cropped"] = tested.crop((10, 20, 170, 140)).resize((320, 240))
    write_prints(workspace, {f"d/images-{name}": picture for name, picture in pictures.items()}, rows)
    far = {"images": [row("images", "x", image_id="e/1", source="e")]}
    write_interim(workspace, far, "e")
    write_prints(workspace, {"e/1": tested.rotate(90, expand=True)}, far, "e")

    validate.run(params_for(0.9, "d", "e"), workspace)
    found = {bad["row_id"]: bad["reason"] for bad in read_table("quarantine", workspace.validated).to_pylist()}
    assert set(found) == {"d/images-cropped", "d/images-framed", "e/1"}
    assert found["e/1"].startswith("the same image is in test as d/images-d/tested (rotated by")
    assert "corners agree" in found["d/images-cropped"]
    params = params_for(0.9, "d", "e")
    near = dataclasses.replace(params.validate.near_duplicates, action="count")
    params = dataclasses.replace(params, validate=dataclasses.replace(params.validate, near_duplicates=near))
    validate.run(params, workspace)
    assert not read_table("quarantine", workspace.validated).num_rows
    copies = pq.read_table(workspace.validated / LEAKS).to_pylist()
    pairs = {(copy["image_id"], copy["copy_of"]) for copy in copies}
    tested_id, framed = "d/images-d/tested", "d/images-framed"
    expected = {
        (framed, tested_id),
        *((name, other) for name in ("d/images-cropped", "e/1") for other in (framed, tested_id)),
    }
    assert pairs == expected
    report = json.loads((workspace.reports / "validation.json").read_text())
    assert report["across_splits"]["near_duplicates"] == len(expected)
    page = (workspace.reports / "validation.html").read_text()
    assert "3 near-duplicates of test images, 2 near-duplicates of val images" in page and "kept, and scores" in page
    assert f"<bdi>{framed}</bdi> is a copy of <bdi>{tested_id}</bdi> in test" in page


@pytest.mark.slow
def test_duplicate_sentences_are_counted_and_kept(tmp_path: Path) -> None:
    workspace, rows = Workspace(tmp_path), good_rows(images=2)
    texts = {"d/good": "A red ball lies on the grass.", "d/images-d/tested": "a RED ball lies on the grass"}
    texts["d/images-more-0"] = "a red ball lies on green grass"
    rows["captions"] = [row("captions", name, image_id=name, text=text) for name, text in texts.items()]
    rows["captions"].append(row("captions", "far", image_id="d/images-d/tested", text="two dogs"))
    write_interim(workspace, rows)
    validate.run(params_for(0.0), workspace)
    found = json.loads((workspace.reports / "validation.json").read_text())["across_splits"]["captions"]
    assert {split: (n["captions"], n["equal"], n["one_word_apart"]) for split, n in found.items()} == {
        "val": (1, 0, 1),
        "test": (2, 1, 0),
    }
    assert read_table("captions", workspace.validated).num_rows == 4
    page = (workspace.reports / "validation.html").read_text()
    assert "1 of 2 captions of test also occur in train, and 0 more differ by one word; “<bdi>a RED ball" in page


@pytest.mark.slow
def test_too_many_bad_rows_stop_and_keep_old_outputs(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.validated.mkdir(parents=True)
    (workspace.validated / "manifest.json").write_text("yesterday's")
    rows = good_rows(images=100)
    rows["captions"] = [row("captions", str(n)) for n in range(90)]
    rows["captions"] += [row("captions", f"bad-{n}", text=f"word{n}") for n in range(5)]
    rows["captions"] += [row("captions", f"worse-{n}", image_id="d/nowhere") for n in range(5)]
    write_interim(workspace, rows)
    with pytest.raises(DataError) as caught:
        validate.run(params_for(0.0999), workspace)
    message = str(caught.value)
    assert "captions: 10 of 100 rows are bad (10.00%)" in message
    assert "caption_words: 5" in message and "image_known: 5" in message
    assert "d/captions-worse-0 (captions-worse-0): image_known: image d/nowhere is not in the dataset" in message
    assert message.count("e.g.") == 3
    assert "raise validate.max_bad_fraction" in message
    assert (workspace.validated / "manifest.json").read_text() == "yesterday's"
    refused = tmp_path / ".work" / "validate" / "refused"
    assert f"All bad rows: {refused / 'quarantine.parquet'}" in message
    assert read_table("quarantine", refused).num_rows == 10
    assert json.loads((workspace.reports / "validation.json").read_text())["tables"]["captions"]["bad"] == 10
    assert "Refused" in (workspace.reports / "validation.html").read_text()

    validate.run(params_for(0.1), workspace)
    assert read_table("captions", workspace.validated).num_rows == 90, "at the limit, not above it"
    assert not list(refused.iterdir()), "of yesterday"


def test_no_good_image_stops_whatever_the_limit(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_interim(workspace, {"images": [row("images", "a", split="dev")]})
    with pytest.raises(DataError, match="images: no good row is left"):
        validate.run(params_for(1.0), workspace)


def test_unprepared_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"interim/d: not found; run `dvc repro prepare@d`"):
        validate.run(params_for(1.0), Workspace(tmp_path))


def test_the_first_error_of_an_import_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported in a thread; a second import finds half of it loaded and fails with `cannot import name`."""
    (tmp_path / "broken_suites.py").write_text("None.strip()", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(validate, "SUITES", "broken_suites")
    workspace = Workspace(tmp_path)
    write_interim(workspace, good_rows())
    with pytest.raises(MissingToolError, match=r"great_expectations: .*AttributeError.*'strip'"):
        validate.run(params_for(1.0), workspace)
