"""Run bundles of others: what `vlp pack` never writes is refused when a bundle is opened, before anything is printed,
and a forged score differs at level score."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bundles import run_bundle
from vlp_models.contrib.bundles.replay import _compare_evaluations, score
from vlp_models.contrib.bundles.run_bundle import ITEMS, LINEAGE, MANIFEST, PARAMS, SCORES, archive_bytes, open_bundle
from vlp_models.errors import DataError
from vlp_models.metrics import score as item_files
from vlp_models.metrics.score import HEADER, write_items
from vlp_models.metrics.unseen import SEEN_TEXT, score_unseen
from vlp_models.tasks.scoring import read_item_scores

BUNDLE = Path(__file__).parents[3] / "docs" / "results" / "runs" / "scenes-soho-vqa.run.zip"
Files = dict[str, bytes]
Rows = list[dict[str, Any]]


def write_bundle(path: Path, manifest: dict[str, Any], files: dict[str, bytes]) -> Path:
    """Write a bundle with matching hashes."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    path.write_bytes(archive_bytes({**files, MANIFEST: json.dumps({**manifest, "files": hashes}).encode()}))
    return path


def contents() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and the other files of the demo's bundle."""
    opened = open_bundle(BUNDLE)
    return dict(opened.manifest), {name: content for name, content in opened.files.items() if name != MANIFEST}


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "r\x1b[31mX"},
        {"run": "../other"},
        {"task": "vqa\n"},
        {"bootstrap": -5},
        {"bootstrap": 10**9},
        {"bootstrap": True},
        {"environment": {}},
        {"environment": {"mode": 1}},
        {"weights": {"model.safetensors": None}},
        {"weights": {"\x1b[2J": "abc"}},
        {"weights": {}},
        {"task": "vqa\u202eREVERSED"},
        {"task": "captioning"},
        {"model": "tden"},
        {"seed": 2},
        {"git_commit": "0" * 40},
        {"bootstrap": 1},
    ],
    ids=str,
)
def test_invalid_value_in_the_manifest_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    manifest, files = contents()
    path = write_bundle(tmp_path / "changed.zip", manifest | changes, files)
    with pytest.raises(DataError, match="not a run bundle") as caught:
        open_bundle(path)
    assert "\x1b" not in str(caught.value) and "\x9b" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": "x"},
        {"seed": True},
        {"value": "x"},
        {"value": float("nan")},
        {"value": 10**400},
        {"low": [1]},
        {"split": None},
        {"metric": "\x1b[31maccuracy"},
        {"data": 1},
        {"git": None},
        {"n": "1"},
        {"metric": "accuracy \u202e)tset("},
        {"run": "other"},
        {"model": "tden"},
        {"seed": 1834},
        {"value": ...},  # without the key
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_invalid_value_in_a_score_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    manifest, files = contents()
    records = json.loads(files[SCORES])
    records[-1] = {key: value for key, value in (records[-1] | changes).items() if value is not ...}
    path = write_bundle(tmp_path / "changed.zip", manifest, files | {SCORES: json.dumps(records).encode()})
    with pytest.raises(DataError, match="not a run bundle"):
        open_bundle(path)
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert isinstance(result.exception, DataError)


def test_score_that_was_not_computed_is_accepted(tmp_path: Path) -> None:
    manifest, files = contents()
    records = json.loads(files[SCORES])
    records[-1] |= {"value": None, "low": None, "high": None}
    path = write_bundle(tmp_path / "changed.zip", manifest, files | {SCORES: json.dumps(records).encode()})
    assert open_bundle(path).json(SCORES) == records


# ---- Forged scores, in bundles that open -----------------------------------------------------------------------------


def changed_items(content: bytes, change: Callable[[Rows, Rows], Any]) -> bytes:
    """Return items.parquet after `change` of its rows and its header."""
    table = pq.read_table(io.BytesIO(content))
    rows, header = table.to_pylist(), json.loads(table.schema.metadata[HEADER])
    change(rows, header)
    schema = table.schema.with_metadata({HEADER: json.dumps(header)})
    output = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), output)
    return output.getvalue()


def changed_scores(content: bytes, split: str = "", **changes: Any) -> bytes:
    """Return scores.json with other values of the accuracy of a split; default: of all."""
    records = json.loads(content)
    for record in records:
        if record["metric"] == "accuracy" and split in ("", record["split"]):
            record |= changes
    return json.dumps(records).encode()


def without_items_of_test(rows: Rows, header: Rows) -> None:
    rows[:] = [row for row in rows if row["split"] != "test"]
    header[:] = [entry for entry in header if entry["split"] != "test"]


def without_items(rows: Rows, header: Rows) -> None:
    rows.clear()
    header.clear()


def by_macro_f1(rows: Rows, header: Rows) -> None:
    for entry in header:
        entry["statistic"] = "macro F1"


def right_answers_only(rows: Rows, header: Rows) -> None:
    rows[:] = [row for row in rows if row["parts"][0] == row["parts"][1]]


FORGED = {"value": 100.0, "low": 100.0, "high": 100.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_items_of_test, "accuracy on scenes test: has a score, but no items"),
        (without_items, "no score has items"),
        (by_macro_f1, "accuracy on scenes test: its items have the statistic macro F1, not mean"),
        (right_answers_only, "accuracy on scenes test: n is 1800, and it has 1535 items"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("extra", [False, True])
def test_forged_headline_score_differs(
    change: Callable[[Rows, Rows], None], message: str, extra: bool, tmp_path: Path
) -> None:
    manifest, files = contents()
    files |= {
        ITEMS: changed_items(files[ITEMS], change),
        SCORES: changed_scores(files[SCORES], "", extra=extra, **FORGED),
    }
    path = write_bundle(tmp_path / "forged.zip", manifest, files)
    (finding, _) = score(open_bundle(path))
    assert finding.equal is False and message in finding.text
    assert CliRunner().invoke(app, ["replay", str(path)]).exit_code == 1


def with_unseen(files: Files) -> Files:
    """Add a baseline, seen items and the scores without them to the accuracy, as an evaluation writes them."""
    items, records, folder = read_item_scores(files[ITEMS]), json.loads(files[SCORES]), io.BytesIO()
    for number, scores in enumerate(items):
        slices = [[*names, *([SEEN_TEXT] if i < 300 else [])] for i, names in enumerate(scores.slices)]
        constant = scores.parts_NK * [0.5, 1.0]
        items[number] = dataclasses.replace(scores, slices=slices, baselines={"majority answer": constant})
        for record in records:
            if (record["split"], record["metric"]) == (scores.split, "accuracy"):
                record["baselines"] = {"majority answer": record["value"] / 2, "chance": 7.0}
                record["leakage"] = score_unseen(items[number], {"chance": 7.0}, resamples=1000, seed=record["seed"])
    write_items(folder, items)  # type: ignore[arg-type]
    return files | {ITEMS: folder.getvalue(), SCORES: json.dumps(records).encode()}


@pytest.mark.parametrize(
    "path",
    [
        "",
        "baselines majority answer",
        "leakage texts",
        "leakage without_both value",
        "leakage without_both low",
        "leakage without_images baselines majority answer value",
        "leakage without_both baselines majority answer gain low",
        "leakage without_both baselines chance gain value",
    ],
)
def test_forged_baseline_or_unseen_score_differs(path: str, tmp_path: Path) -> None:
    manifest, files = contents()
    files = with_unseen(files)
    records = json.loads(files[SCORES])
    keys = [name.replace("_answer", " answer") for name in path.replace("majority answer", "majority_answer").split()]
    for record in records:
        if record["metric"] == "accuracy" and record["split"] == "test" and keys:
            *outer, last = keys
            for key in outer:
                record = record[key]
            record[last] += 0.5
    files |= {SCORES: json.dumps(records).encode()}
    (finding, _) = score(open_bundle(write_bundle(tmp_path / "forged.zip", manifest, files)))
    if keys:
        assert finding.equal is False and f"accuracy on scenes test: {keys[0].split()[0]}"[:-1] in finding.text
    else:
        assert finding.equal, finding.text


def test_replay_prints_the_checked_metrics_and_both_commits(tmp_path: Path) -> None:
    manifest, files = contents()
    lineage = json.loads(files[LINEAGE]) | {"git_commit": "b" * 40 + "+changes"}
    records = json.loads(files[SCORES])
    for record in records:
        record["git"] = "a" * 40
    files |= {LINEAGE: json.dumps(lineage).encode(), SCORES: json.dumps(records).encode()}
    path = write_bundle(tmp_path / "changed.zip", manifest | {"git_commit": "b" * 40 + "+changes"}, files)
    output = CliRunner().invoke(app, ["replay", str(path)]).output
    assert f"packed at commit {'b' * 12}+changes, evaluated at {'a' * 12}\n" in output
    assert "(scenes val: accuracy; scenes test: accuracy)" in output
    first = CliRunner().invoke(app, ["replay", str(BUNDLE)]).stdout.splitlines()[0]
    assert first.endswith("commit ef2a6e54c809+changes")


@pytest.mark.parametrize(
    "changes", [{"baselines": {"majority answer": 1.0}}, {"n": 1_000_000}, {"leakage": {"images": 1}}], ids=str
)
def test_other_baselines_items_or_leakage_differ_from_those_computed_again(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    bundle = open_bundle(BUNDLE)
    folder = Workspace(tmp_path).evaluation(bundle.run)
    folder.mkdir(parents=True)
    for name, content in bundle.files.items():
        (folder / name).write_bytes(content)
    assert all(finding.equal for finding in _compare_evaluations(bundle, Workspace(tmp_path)))
    (folder / SCORES).write_bytes(changed_scores(bundle.files[SCORES], "test", **changes))
    (*_, finding) = _compare_evaluations(bundle, Workspace(tmp_path))
    assert finding.equal is False and f"accuracy on scenes test: {next(iter(changes))} " in finding.text


# ---- Files that `vlp pack` never writes ------------------------------------------------------------------------------


def without_rows(rows: Rows, header: Rows) -> None:
    rows[:] = [row for row in rows if row["split"] != "test"]


def without_parts(rows: Rows, header: Rows) -> None:
    for row in rows:
        row["parts"] = []


def unequal_parts(rows: Rows, header: Rows) -> None:
    rows[0]["parts"] = [1.0]


def by_bleu(rows: Rows, header: Rows) -> None:
    header[0]["statistic"] = "BLEU-4"


def hostile_baseline(rows: Rows, header: Rows) -> None:
    header[0]["baselines"] = ["\x1b]0;owned\x07"]


def baseline_without_parts(rows: Rows, header: Rows) -> None:
    header[0]["baselines"] = ["majority answer"]


def hostile_metric(rows: Rows, header: Rows) -> None:
    header.append(header[0] | {"metric": "\x1b]0;owned\x07"})


@pytest.mark.parametrize(
    "change",
    [without_rows, without_parts, unequal_parts, by_bleu, hostile_metric, hostile_baseline, baseline_without_parts],
    ids=lambda change: str(change.__name__),
)
def test_damaged_items_are_an_error_that_names_bundle_and_member(
    change: Callable[[Rows, Rows], None], tmp_path: Path
) -> None:
    manifest, files = contents()
    path = write_bundle(tmp_path / "a.zip", manifest, files | {ITEMS: changed_items(files[ITEMS], change)})
    with pytest.raises(DataError, match=r"a\.zip: items\.parquet: ") as caught:
        score(open_bundle(path))
    assert "\x1b" not in str(caught.value)


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_files, "MAX_ROWS", 2699)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda self: pytest.fail("was read"))
    with pytest.raises(DataError, match=r"scenes-soho-vqa\.run\.zip: items\.parquet: .* 2,700 rows"):
        score(open_bundle(BUNDLE))
    monkeypatch.setattr(run_bundle, "MAX_BYTES", 100_000)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("was read"))
    with pytest.raises(DataError, match="more than 100,000 bytes"):
        open_bundle(BUNDLE)


def two_scores(files: Files) -> Files:
    records = json.loads(files[SCORES])
    forged = [record | FORGED for record in records if record["metric"] == "accuracy"]
    return files | {SCORES: json.dumps([*forged, *records]).encode()}


def other_params(files: Files) -> Files:
    raw = yaml.safe_load(files[PARAMS])
    raw["finetune"]["soho-vqa"]["seed"] = 7
    return files | {PARAMS: yaml.safe_dump(raw).encode()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (two_scores, "two scores of one metric"),
        (other_params, "seed is 1 in bundle.json, but 7 in params.yaml"),
        (lambda files: files | {PARAMS: b"flow: {webhook: ***}"}, "params.yaml: not valid YAML"),
        (lambda files: files | {"../../x": b""}, "not a file of a bundle"),
        (lambda files: files | {"readme.md": b""}, "not a file of a bundle"),
        (lambda files: files | {"a\x1b[31m": b""}, "not a file of a bundle"),
        (lambda files: files | {SCORES: files[SCORES].decode().encode("utf-16")}, "codec can't decode"),
        (lambda files: files | {LINEAGE: b'{"run": "x",' + files[LINEAGE][1:]}, "has a key twice"),
    ],
    ids=["two scores", "params", "yaml", "..", "unknown", "escape", "utf-16", "key twice"],
)
def test_files_that_contradict_or_are_unknown_are_refused(
    change: Callable[[Files], Files], message: str, tmp_path: Path
) -> None:
    manifest, files = contents()
    path = write_bundle(tmp_path / "changed.zip", manifest, change(files))
    with pytest.raises(DataError, match=message) as caught:
        open_bundle(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("twice", "same name"),
        ("link", "is a link"),
        ("manifest", "codec can't"),
        ("bzip2", "neither stored nor deflated"),  # zipfile unpacks it without a limit, whatever size it declares
    ],
)
def test_archive_of_another_form_is_refused(case: str, message: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    files = list(open_bundle(BUNDLE).files.items())
    files += [files[-1]] if case == "twice" else []
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # of the second member
        for name, content in files:
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o120777 << 16 if case == "link" else 0
            utf16 = case == "manifest" and name == MANIFEST
            method = zipfile.ZIP_BZIP2 if case == "bzip2" else zipfile.ZIP_DEFLATED
            archive.writestr(member, content.decode().encode("utf-16") if utf16 else content, method)
        archive.comment = bytes(64)
    content = buffer.getvalue()[:-64]
    path = tmp_path / "changed.zip"
    path.write_bytes(content + hashlib.sha256(content).hexdigest().encode())
    with pytest.raises(DataError, match=message):
        open_bundle(path)
