"""Result files that would be misread by their columns alone, as programs and spreadsheets write them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from score_files import scores, write_csv, write_samples, write_xlsx

from vlp_models.contrib.compare.comparison import compare
from vlp_models.contrib.compare.read import read_runs
from vlp_models.contrib.compare.scored import Columns, Run
from vlp_models.errors import DataError


def values_of(run: Run) -> dict[str, float]:
    (scored,) = run.metrics.values()
    return dict(zip(scored.items, scored.parts_NK[:, 0].tolist(), strict=True))


# ---- Inspect --------------------------------------------------------------------------------------------------------


def write_log(path: Path, status: str | None, count: int = 30, **eval_: Any) -> Path:
    """Write a log of two epochs; no status: the archive of a process that was killed has no header."""
    samples = [
        {"id": i, "epoch": epoch, "input": f"Question {i}", "scores": {"m": {"value": "CI"[(i + epoch) % 2]}}}
        for i in range(count)
        for epoch in (1, 2)
    ]
    header = {"status": status, "eval": {"model": "m", **eval_}}
    if path.suffix == ".json":
        path.write_text(json.dumps(header | {"samples": samples}))
        return path
    with zipfile.ZipFile(path, "w") as archive:
        for sample in samples:
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
        if status:
            archive.writestr("header.json", json.dumps(header))
    return path


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("b.json", "cancelled"),  # plain-ok
        ("b.json", "error"),
        ("b.eval", "error"),
        ("b.eval", "started"),
        ("b.eval", None),
    ],
)
def test_a_log_that_did_not_finish_is_refused_unless_the_common_items_suffice(
    tmp_path: Path, name: str, status: str | None
) -> None:
    a = write_log(tmp_path / "a.eval", "success")
    b = write_log(tmp_path / name, status, 25)
    with pytest.raises(DataError, match=rf"{name}: the log's status is {status or 'started'}.*--common"):
        compare({"a": a, "b": b})
    comparison = compare({"a": a, "b": b}, common=True)
    assert comparison.rows[0].items == 25 and any("status is" in note for note in comparison.notes)
    assert compare({"a": a, "b": write_log(tmp_path / name, "success")}).rows[0].items == 30


def test_epochs_invalid_samples_and_converted_logs_of_inspect(tmp_path: Path) -> None:
    (run,) = read_runs(write_log(tmp_path / "a.eval", "success", 3, config={"epochs_reducer": ["mode"]}))
    assert values_of(run) == {"0": 0.5, "1": 0.5, "2": 0.5}
    assert "epochs of a sample are averaged" in run.notes and "the log itself reduces epochs by mode" in run.notes
    # A converted log has a folder for each sample, whose other files are no samples.
    with zipfile.ZipFile(tmp_path / "chunked.eval", "w") as archive:
        archive.writestr("header.json", json.dumps({"status": "success", "eval": {}}))
        for i in range(2):
            folder = f"samples/a/{i}_epoch_1"
            sample = {"id": f"a/{i}", "input": "attachment://0", "scores": {"m": {"value": i}}}
            archive.writestr(f"{folder}/sample.json", json.dumps(sample))
            archive.writestr(f"{folder}/metadata.json", json.dumps({"image_id": "x"}))
            archive.writestr(f"{folder}/messages/0.json", "[]")
            archive.writestr(f"{folder}/attachments/0.json", json.dumps([f"a long question {i}"]))
    (run,) = read_runs(tmp_path / "chunked.eval")
    assert values_of(run) == {"a/0": 0.0, "a/1": 1.0} and run.metrics["m"].clusters == ["x", "x"]
    samples: list[dict[str, Any]] = [{"id": i, "scores": {"m": {"value": 1}}} for i in range(3)]
    samples[1]["invalidation"] = {"author": "me"}
    (tmp_path / "a.json").write_text(json.dumps({"status": "success", "samples": samples}))
    (run,) = read_runs(tmp_path / "a.json")
    assert list(values_of(run)) == ["0", "2"] and "1 samples were declared invalid: 1" in run.notes


# ---- lmms-eval ------------------------------------------------------------------------------------------------------


def test_documents_with_one_hash_are_compared_by_target_and_question(tmp_path: Path) -> None:
    """Yes-or-no questions have the same target; models may have a text of their own around the question."""

    def write(name: str, prompt: str = "{}", other: str = "") -> Path:
        rows = [
            {
                **{"doc_id": i, "doc_hash": "74", "target": "yes", "acc": i % 2},
                "input": prompt.format(
                    other if other and i == 7 else f"Is there a {['cat', 'dog', 'tree'][i % 3]} {i}?"
                ),
            }
            for i in range(30)
        ]
        return write_samples(tmp_path / name, rows)

    a = write("a.jsonl")
    comparison = compare([a, write("b.jsonl", "<image>{}\nAnswer the question with a word.")])
    assert any("the prompts have another text around the questions" in note for note in comparison.notes)
    assert not any("prompts" in note for note in compare([a, write("same.jsonl")]).notes)
    for prompt in ("{}", "Question: {}"):
        with pytest.raises(DataError, match=r"item \d+ has other contents than in .*\(input\)"):
            compare([a, write("c.jsonl", prompt, "Is there a cow?")])
    hashed = [{"doc_id": i, "doc_hash": str(i), "input": f"x{i}", "acc": 1} for i in range(30)]
    prompted = [{**row, "input": f"few shots, then {row['input']}"[: 20 + i]} for i, row in enumerate(hashed)]
    assert compare([write_samples(tmp_path / f"{name}.jsonl", rows) for name, rows in (("d", hashed), ("e", prompted))])


def test_several_filters_without_a_name_are_refused(tmp_path: Path) -> None:
    """lmms-eval writes a sample once per filter and does not write which."""
    rows = [{"doc_id": i, "target": "a", "acc": i % 2} for _ in range(2) for i in range(30)]
    with pytest.raises(DataError, match="doc_id 0 occurs more than once"):
        read_runs(write_samples(tmp_path / "a.jsonl", rows))
    named = [{**row, "filter": "strict" if i < 30 else "flexible"} for i, row in enumerate(rows)]
    assert set(read_runs(write_samples(tmp_path / "b.jsonl", named))[0].metrics) == {"acc,strict", "acc,flexible"}


def test_scores_that_are_nan_and_lists_instead_of_lines(tmp_path: Path) -> None:
    rows = [{"item": f"q{i}", "score": float("nan") if i == 3 else i % 2} for i in range(30)]
    lines, array = write_samples(tmp_path / "a.jsonl", rows), tmp_path / "a.json"
    array.write_text(json.dumps(rows))
    for path in (lines, array):
        (run,) = read_runs(path)
        assert len(values_of(run)) == 29 and "1 items have no number for score and are left out: q3" in run.notes
    with pytest.raises(DataError, match="line 2: Extra data"):
        (tmp_path / "b.jsonl").write_text('{"item": 1, "score": 1}\n{"item": 2, "score": 1} {"item": 3, "score": 1}\n')
        read_runs(tmp_path / "b.jsonl")


# ---- VLMEvalKit -----------------------------------------------------------------------------------------------------


def write_rotations(path: Path, wrong: dict[str, int], g_index: bool = True) -> Path:
    """Write 30 questions with four rotations each. wrong: index -> 1 if it is wrong."""
    columns = ["index", "question", "prediction", "hit", *["g_index"] * g_index]
    lines = []
    for rotation in range(4):
        for question in range(30):
            index = str(question + 1_000_000 * rotation)
            cells = [index, f"Which {question}?", "A", str(1 - wrong.get(index, 0)), *[str(question)] * g_index]
            lines.append("\t".join(cells))
    path.write_text("\n".join(["\t".join(columns), *lines]))
    return path


@pytest.mark.parametrize(("name", "g_index"), [("m_MMStar_circular.tsv", True), ("m_MMBench_DEV_EN.tsv", False)])
def test_rotations_are_one_question_that_is_right_if_all_are(tmp_path: Path, name: str, g_index: bool) -> None:
    """The rule of its official evaluation, which also counts a question once."""
    path = write_rotations(tmp_path / name, {"3": 1, "2000004": 1, "1000005": 1, "3000005": 1}, g_index)
    (run,) = read_runs(path)
    assert values_of(run) == {str(i): float(i not in (3, 4, 5)) for i in range(30)}
    assert any("120 rotations of 30 questions, each right if all" in note for note in run.notes)
    # Its own result file has the first rotation of each question, with the question's hit.
    official = tmp_path / "official_MMBench.json"
    rows = [{"index": i, "question": f"Which  {i}?", "prediction": "A", "hit": 1} for i in range(30)]
    official.write_text(json.dumps(rows))
    (row,) = compare({"a": official, "b": path}).rows
    assert (row.items, row.clusters, row.value) == (30, 30, pytest.approx(0.9))
    # --item states that each row counts; its question is then the cluster, if the file has it.
    (run,) = read_runs(path, columns=Columns(item="index"))
    assert len(run.metrics["hit"].items) == 120 and len(set(run.metrics["hit"].clusters)) == (30 if g_index else 120)
    with pytest.raises(DataError, match=r"item 7 has other contents than in .*\(question\)"):
        rows[7]["question"] = "Another?"
        official.write_text(json.dumps(rows))
        compare({"a": official, "b": path})


def test_graded_rotations_are_a_cluster(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "index": list(range(120)),
        "g_index": [i % 30 for i in range(120)],
        "prediction": ["?"] * 120,
    }
    a = write_csv(tmp_path / "a.csv", [i / 120 for i in range(120)], columns)
    (run,) = read_runs(a, columns=Columns(item="index"))
    assert "clusters: g_index" in run.notes and len(set(run.metrics["score"].clusters)) == 30
    (run,) = read_runs(a)
    assert len(run.metrics["score"].items) == 120


# ---- Spreadsheets and tables ----------------------------------------------------------------------------------------


def test_rows_with_totals_are_no_items(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for name in ("Overall", "average", "Total:", "macro avg", "Std. Dev.", "Gesamt", "Overall accuracy (%)", "平均"):
        path.write_text(f"item,score\nall,71.2%\nq1,1\nall in all,1\nq2,0\n{name},0.67\n")
        (run,) = read_runs(path)
        assert values_of(run) == {"q1": 1.0, "all in all": 1.0, "q2": 0.0}
        assert f"line 6, {name}: taken for a summary of the others, and left out" in run.notes
        assert any(note.startswith("line 2, all: taken") for note in run.notes)
    # The last row of each model; in the middle, the word is an item.
    path.write_text("model,item,score\na,q1,1\na,mean,1\na,q2,0\na,mean value,1\na,Mean,0.5\nb,q1,1\nb,mean,0.3\n")
    assert [list(values_of(run)) for run in read_runs(path)] == [["q1", "mean", "q2", "mean value"], ["q1"]]


def test_csv_with_semicolons_and_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text in (
        "item;score;cluster\nq1;0,5;x\nq2;1;y\n",
        "sep=;\r\nitem;score;cluster\r\nq1;0,5;x\r\nq2;1,0;y\r\n",
        "\ufeffitem\tscore\tcluster\nq1\t0,5\tx\nq2\t1\ty\n",
    ):
        path.write_text(text, encoding="utf-8", newline="")
        (run,) = read_runs(path)
        assert values_of(run) == {"q1": 0.5, "q2": 1.0} and run.metrics["score"].clusters == ["x", "y"]
        assert "numbers with a decimal comma" in run.notes
    path.write_text("item,score,why;where;when;who\nq1,1,a\n")
    assert values_of(read_runs(path)[0]) == {"q1": 1.0}
    for text, message in (
        ("item;score\nq1;0,5\nq2;0.25\n", "with a decimal comma and with a point"),
        ("item;score\nq1;1,234,5\n", "line 2: score is '1,234,5', not a number"),
        ('item,score\nq1,"0,5"\n', "line 2: score is '0,5', not a number"),
        ("sep=;\nitem;score\nq1;1\nq2;good\n", "line 4: score is 'good'"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_runs(path)


def test_ids_that_a_spreadsheet_or_pandas_rewrote(tmp_path: Path) -> None:
    values = scores(1, 30)
    plain = write_csv(tmp_path / "plain.csv", values, {"item": list(range(30))})
    floats = write_csv(tmp_path / "floats.csv", values, {"item": [f"{i}.0" for i in range(30)]})
    assert compare([plain, floats]).rows[0].items == 30
    # 1.0 and 1.5 may be versions: nothing is rewritten.
    versions = write_csv(tmp_path / "versions.csv", values, {"item": [f"{i}.{i % 2}" for i in range(30)]})
    assert "0.0" in values_of(read_runs(versions)[0])
    padded = write_csv(tmp_path / "padded.csv", values, {"item": [f"{i:02d}" for i in range(30)]})
    with pytest.raises(DataError, match="00 and 0 may be one item: spreadsheets drop zeros"):
        compare([plain, padded])


def test_the_same_table_as_xlsx_and_tsv(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    rows = [[i, f"Which_x000D_\n{i}?", "A", i % 2] for i in range(30)]
    xlsx = write_xlsx(tmp_path / "a.xlsx", [["index", "question", "prediction", "hit"], *rows])
    tsv = tmp_path / "b.tsv"
    tsv.write_text(
        "index\tquestion\tprediction\thit\n" + "".join(f'{i}\t"Which\r\n{i}?"\t{p}\t{h}\n' for i, _, p, h in rows)
    )
    (row,) = compare([xlsx, tsv]).rows
    assert row.items == 30 and row.gain == 0
