"""Result files of several programs, as `vlp compare` reads them."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from score_files import scores, write_csv, write_samples, write_xlsx

from vlp_models.contrib.compare.comparison import compare
from vlp_models.contrib.compare.inspect_logs import ZSTANDARD
from vlp_models.contrib.compare.read import read_runs
from vlp_models.contrib.compare.scored import Columns, Run
from vlp_models.errors import DataError


def test_each_format_gives_the_same_scores(tmp_path: Path) -> None:
    values, count = scores(1, 40), 40
    images = [f"image{i // 2}" for i in range(count)]
    write_csv(tmp_path / "plain.csv", values, {"cluster": images})
    (tmp_path / "vlmevalkit.tsv").write_text(
        "index\timage_path\tanswer\thit\n" + "".join(f"q{i}\t{images[i]}\tA\t{int(values[i])}\n" for i in range(count))
    )
    columns = {
        "index": {str(i): f"q{i}" for i in range(count)},
        "image_path": dict(enumerate(images)),
        "hit": dict(enumerate(values)),
    }
    columns = {name: {str(k): v for k, v in column.items()} for name, column in columns.items()}
    (tmp_path / "vlmevalkit.json").write_text(json.dumps(columns))
    samples = [
        {"doc_id": f"q{i}", "target": "A", "filtered_resps": ["A"], "exact_match": values[i], "image_id": images[i]}
        for i in range(count)
    ]
    (tmp_path / "20261126_samples_task.jsonl").write_text("\n".join(map(json.dumps, samples)))
    nested = [{**{k: v for k, v in s.items() if k != "image_id"}, "doc": {"image_id": s["image_id"]}} for s in samples]
    nested = [{**s, "exact_match": {"question": "?", "score": s["exact_match"]}, "filter": "none"} for s in nested]
    (tmp_path / "nested.jsonl").write_text("\n".join(map(json.dumps, nested)))
    log: dict[str, Any] = {"eval": {"model": "open/model"}, "samples": []}
    for i in range(count):
        score = {"match": {"value": "C" if values[i] else "I"}}
        log["samples"].append({"id": f"q{i}", "epoch": 1, "metadata": {"image_id": images[i]}, "scores": score})
    (tmp_path / "inspect.json").write_text(json.dumps(log))
    with zipfile.ZipFile(tmp_path / "inspect.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"eval": log["eval"]}))
        for sample in log["samples"]:
            archive.writestr(f"samples/{sample['id']}_epoch_1.json", json.dumps(sample))
    files = sorted(path for path in tmp_path.iterdir())
    assert len(files) == 7
    limit = csv.field_size_limit()  # of all readers of this process
    for path in files:
        (run,) = read_runs(path)
        (scored,) = run.metrics.values()
        found = dict(zip(scored.items, scored.parts_NK[:, 0], strict=True))
        assert found == {f"q{i}": values[i] for i in range(count)}, path
        assert dict(zip(scored.items, scored.clusters, strict=True)) == {f"q{i}": images[i] for i in range(count)}, path
        assert any(note.startswith("clusters: ") and "none" not in note for note in run.notes)
    assert read_runs(tmp_path / "inspect.eval")[0].model == "open/model"
    assert csv.field_size_limit() == limit


def test_spreadsheet(tmp_path: Path) -> None:
    pytest.importorskip("python_calamine")
    path = write_xlsx(tmp_path / "result.xlsx", [["index", "hit"], *[[i, i % 2] for i in range(30)]])
    (run,) = read_runs(path)
    assert run.metrics["hit"].items[:3] == ["0", "1", "2"] and run.metrics["hit"].parts_NK[:, 0].sum() == 15
    with pytest.raises(DataError, match="line 6: hit is 'bad'"):
        read_runs(write_xlsx(path, [[], [], ["index", "hit"], [1, 1], [], [2, "bad"]]))


def test_a_cell_far_from_the_others_is_refused(tmp_path: Path) -> None:
    """The whole range between the first and the last cell would be allocated."""
    pytest.importorskip("python_calamine")
    rows = [["index", "hit"], *[[i, i % 2] for i in range(30)]]
    formatted = '<row r="1048576"><c r="XFD1048576" s="0"/></row>'
    assert read_runs(write_xlsx(tmp_path / "formatted.xlsx", rows, formatted))[0].metrics["hit"].items[-1] == "29"
    for cell in ('<row><c r="XFD1048576">', '<row r="1048576"><c r="XFC1"/><c>', "<row r='60000000'><c>"):
        path = write_xlsx(tmp_path / "far.xlsx", rows, f"{cell}<v>1</v></c></row>")
        code = f"from vlp_models.contrib.compare.comparison import compare; compare([{str(path)!r}])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "DataError" in done.stderr and f"{path}: not readable: xl/s.xml has cells up to row" in done.stderr, cell


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "item,score\nq1,1\nq1,0\n", "q1 occurs more than once"),
        ("a.csv", "item,score\nq1,1\nq2,good\n", "line 3: score is 'good'"),
        ("a.csv", "item,score\nq1,nan\nq2,\n", "no scores per item; 2 items have no number for score"),
        ("a.csv", "item,score\nq1,inf\n", "line 2: score is 'inf'"),
        ("a.csv", "item,score\nq1,1_0\n", "line 2: score is '1_0'"),
        ("a.csv", "item,score\n\nq1,1\n,\nq2,good\n", "line 5: score is 'good'"),  # after empty lines
        ("a.csv", 'item,score\n"a\nb",1\nq2,good\n', "line 4: score is 'good'"),  # after a cell of two lines
        ("a.csv", "item,score\n,1\n", "a row without item"),
        ("a.csv", "item,points\nq1,1\n", "there are: item, points. Name one with --score"),
        ("a.csv", "", "empty"),
        ("a.csv", "item,score\nq1,1,0\n", "line 2 has 3 cells, but there are 2 columns"),
        ("a.csv", "item,score,score\nq1,1,0\n", "several columns are called score"),
        ("a.csv", "item,score,image_id\nq1,1,\nq2,1,im1\n", "image_id is empty for 1 items (q1)"),
        ("a.jsonl", '\n{"item": 1, "score": 1}\n\n{"item": 2, "score": {}}', "line 4: score is {}"),
        ("a.jsonl", '{"doc_id": 1, "acc": "1.0"}', 'not compared: acc (such as "1.0")'),
        ("a.json", '{"results": {"task": {"acc": 0.5}}}', "totals of tasks, without scores per item"),
        ("a.jsonl", '{"item": 1, "score": 1' + "0" * 400 + "}", "line 1: score is 1"),
        ("a.jsonl", '{"doc_id": 1, "acc": 1}\n{"doc_id": 2, "acc"', "line 2"),
        ("a.json", '{"samples": [{"id": 1, "scores": {"m": {"value": "great"}}}]}', "'great', not a number"),
        ("a.json", "[[1]]", "neither a list of rows"),
        ("a.eval", "no archive", "not readable"),
        ("a.pkl", "", "unknown kind of file"),
    ],
)
def test_bad_files_are_named_with_the_line_and_the_way_out(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as error:
        read_runs(tmp_path / name)
    assert message in str(error.value) and str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize(
    ("encoding", "named", "reason"),
    [
        ("utf-16", "utf-16", "UTF-16 text; save it as UTF-8"),
        ("latin-1", "cp1252", "not UTF-8 text; save it as UTF-8"),
    ],
)
def test_another_encoding_is_named_with_the_command_that_converts_it(
    tmp_path: Path, encoding: str, named: str, reason: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("item,score\ncafé,1\n", encoding=encoding)
    with pytest.raises(DataError) as error:
        read_runs(path)
    command = f"`iconv -f {named} -t utf-8 {path} > {tmp_path}/utf8-a.csv`"
    assert str(error.value) == f"{path}: {reason}: {command}"


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.contrib.compare.scored.MAX_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "a.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("samples/1_epoch_1.json", "0" * 100_000)
    with pytest.raises(DataError, match="unpacks to 100,000 bytes"):
        read_runs(tmp_path / "a.eval")


@pytest.mark.parametrize(
    ("method", "message"), [("bz2", "neither stored nor"), ("deflate", "CRC"), ("zstd", "declares")]
)
def test_a_member_with_a_false_size_is_refused(tmp_path: Path, method: str, message: str) -> None:
    text = json.dumps({"id": 1, "scores": {"m": {"value": 1}}}).encode()
    padded, path = text + b" " * 50_000_000, tmp_path / "a.eval"
    methods = {"bz2": zipfile.ZIP_BZIP2, "deflate": zipfile.ZIP_DEFLATED, "zstd": zipfile.ZIP_STORED}
    with zipfile.ZipFile(path, "w", methods[method]) as archive:
        member = zipfile.ZipInfo("samples/1_epoch_1.json")
        if method == "zstd":
            import pyarrow as pa

            archive.writestr(member, pa.compress(padded, codec="zstd", asbytes=True))
            member.compress_type = ZSTANDARD
        else:
            archive.writestr(member, padded, methods[method])
        member.file_size, member.CRC = len(text), zlib.crc32(text)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        read_runs(path)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_metrics_of_one_dictionary_are_one_metric_and_likelihoods_have_their_name(tmp_path: Path) -> None:
    """POPE logs the same dictionary for its F1 as for its accuracy; lambada's `perplexity` is a log-likelihood."""
    entry = [{"question_id": i, "score": float(i % 3 > 0)} for i in range(30)]
    pope = [{"doc_id": i, "pope_accuracy": entry[i], "pope_f1_score": entry[i]} for i in range(30)]
    (run,) = read_runs(write_samples(tmp_path / "pope.jsonl", pope))
    assert list(run.metrics) == ["pope_accuracy"]
    assert "the scores per item of pope_f1_score are those of pope_accuracy" in run.notes
    rows = [{"doc_id": i, "perplexity": -0.1 * i, "filter": "none"} for i in range(30)]
    assert list(read_runs(write_samples(tmp_path / "lambada.jsonl", rows))[0].metrics) == ["log-likelihood"]
    rows = [{**row, "perplexity": 2.0, "filter": "strict"} for row in rows]
    assert list(read_runs(write_samples(tmp_path / "real.jsonl", rows))[0].metrics) == ["perplexity,strict"]


def test_a_named_score_of_samples_keeps_clusters_and_contents(tmp_path: Path) -> None:
    rows = [{"doc_id": i, "doc_hash": f"{i}", "image_id": i // 2, "acc": i % 2, "f1": 0.5} for i in range(60)]
    file = write_samples(tmp_path / "a.jsonl", rows)
    (run,) = read_runs(file, columns=Columns(score="acc"))
    assert list(run.metrics) == ["acc"] and len(set(run.metrics["acc"].clusters)) == 30
    assert run.metrics["acc"].contents["doc_hash"][7] == "7"
    with pytest.raises(DataError, match="no number in hit; there are: doc_id, "):
        read_runs(file, columns=Columns(score="hit"))
    bare = write_samples(tmp_path / "b.jsonl", [{"doc_id": i, "acc": 1} for i in range(60)])
    with pytest.raises(DataError, match=r"b\.jsonl: no clusters, although .*a\.jsonl has some. --cluster names"):
        compare([file, bare], metrics="acc")
    assert compare([file, bare], metrics="acc", columns=Columns(cluster="doc_id")).rows[0].clusters == 60
    other = write_samples(tmp_path / "c.jsonl", [{"doc_id": f"x{i}", "acc": 1} for i in range(60)])
    with pytest.raises(DataError, match=r"no item in common .*0, 1, .*x0, x1, .*--item names the column"):
        compare([file, other], metrics="acc")


def test_tables_of_vlmevalkit_are_scored_as_it_does(tmp_path: Path) -> None:
    """For DocVQA its `eval_score` is a distance; -1 and an empty cell are answers that were not judged."""

    def read(name: str, score: str, cells: list[Any]) -> Run:
        rows = [{"index": i, "prediction": "?", score: cell} for i, cell in enumerate(cells)]
        if score == "eval_match":
            rows = [{**row, "eval_score": float(np.mean(row[score]))} for row in rows]
        (tmp_path / name).write_text(json.dumps(rows))
        return read_runs(tmp_path / name)[0]

    matches = [[0.0], [0.3, 0.8], [0.51], [0.5]]
    for name, expected in {
        "m_DocVQA_VAL_results.json": [1.0, 0.7, 0.0, 0.5],
        "m_ChartQA_TEST_results.json": [0.0, 0.8, 0.51, 0.5],
        "m_TextVQA_VAL_results.json": [0.0, 0.55, 0.51, 0.5],
    }.items():
        assert read(name, "eval_match", matches).metrics["eval_score"].parts_NK[:, 0] == pytest.approx(expected)
    run = read("m_MMBench-Video_score.json", "score", [3, -1, 0, None, "", math.nan])
    assert run.metrics["score"].items == ["0", "2"]
    assert "4 items have no number for score and are left out: 1, 3, 4, 5" in run.notes
    assert "a score of -1 is VLMEvalKit's for an answer that was not judged" in run.notes
    assert len(read("m_other.json", "score", [3, -1, -2]).metrics["score"].items) == 3
    full, gap = tmp_path / "full.csv", tmp_path / "gap.csv"
    full.write_text("item,score\nq1,1\nq2,0\n")
    gap.write_text("item,score\nq1,1\nq2,\n")
    with pytest.raises(DataError, match=r"only in .*full\.csv: q2\)\. .*gap\.csv: 1 items have no number .* --common"):
        compare([full, gap])


def test_logs_of_inspect_pair_the_same_samples_only(tmp_path: Path) -> None:
    """Samples without ids are numbered after a shuffle, and another task's samples have the same numbers."""

    def log(name: str, question: str) -> Path:
        samples = [
            {
                **{"id": i, "input": [{"id": f"{name}{i}", "content": [{"type": "text", "text": f"{question}{i}"}]}]},
                **{"target": "A", "metadata": {"row": f"r{i}"}, "scores": {"m": {"value": i % 2}, "n": {"value": 1}}},
            }
            for i in range(30)
        ]
        (tmp_path / name).write_text(json.dumps({"eval": {"model": name}, "samples": samples}))
        return tmp_path / name

    a, b, other = log("a.json", "How many?"), log("b.json", "How many?"), log("c.json", "Why?")
    assert compare([a, b], metrics=["m"]).rows[0].items == 30
    with pytest.raises(DataError, match="item 0 has other contents"):
        compare([a, other], metrics=["m"])
    (run,) = read_runs(a, columns=Columns(item="row", score="m"))
    assert list(run.metrics) == ["m"] and run.metrics["m"].items[7] == "r7"
    for columns, message in (
        (Columns(score="q"), "no scorer q with numbers; there are: m, n"),
        (Columns(item="q"), "a row without q"),
    ):
        with pytest.raises(DataError, match=message):
            read_runs(a, columns=columns)


def test_samples_as_lmms_eval_writes_them(tmp_path: Path) -> None:
    """Its documents have one hash, and the images of a question are known only by the files that it shows."""
    rows: list[dict[str, Any]] = [
        {
            **{"doc_id": i, "target": f"['{i}']", "filtered_resps": "2", "token_counts": [None], "doc_hash": "74"},
            **{"input_media": [f"images/{i // 3}.png"], "accuracy": float(i % 2), "input": "How many?"},
        }
        for i in range(60)
    ]

    write_samples(tmp_path / "a.jsonl", rows)
    (run,) = read_runs(tmp_path / "a.jsonl")
    assert set(run.metrics) == {"accuracy"} and len(set(run.metrics["accuracy"].clusters)) == 20
    assert run.notes == ["items: doc_id", "clusters: input_media"]
    write_samples(tmp_path / "b.jsonl", [{**row, "input_media": [f"/other/{row['input_media'][0]}"]} for row in rows])
    assert compare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]).rows
    write_samples(
        tmp_path / "b.jsonl", [{**row, "target": "other" if row["doc_id"] == 7 else row["target"]} for row in rows]
    )
    with pytest.raises(DataError, match="item 7 has other contents"):
        compare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    del rows[5]["input_media"]  # larger than lmms-eval writes into the file
    write_samples(tmp_path / "c.jsonl", rows)
    (run,) = read_runs(tmp_path / "c.jsonl")
    assert run.metrics["accuracy"].clusters == run.metrics["accuracy"].items


def test_images_form_the_same_clusters_in_any_order_and_on_common_items(tmp_path: Path) -> None:
    """The clusters of lmms-eval's samples have no names of their own."""

    def samples(name: str, order: Iterable[int], images: int = 2) -> Path:
        rows = [
            {"doc_id": i, "target": f"{i}", "input_media": [f"/{name}/{i // images}.png"], "acc": float(i * i % 3 > 0)}
            for i in order
        ]
        return write_samples(tmp_path / name, rows)

    a = samples("a.jsonl", range(100))
    b = samples("b.jsonl", reversed(range(100)))
    assert compare([a, b]).rows == compare({"a": a, "b": a}).rows and compare([a, b]).rows[0].clusters == 50
    (row,) = compare([a, samples("c.jsonl", range(1, 100))], common=True).rows
    assert (row.items, row.clusters) == (99, 50)
    with pytest.raises(DataError, match="in other clusters"):
        compare([a, samples("d.jsonl", range(100), images=3)])


def test_items_without_a_score_are_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"doc_id": i, "acc": i % 2} for i in range(30)]
    rows[7]["acc"] = None
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run,) = read_runs(tmp_path / "a.jsonl")
    assert len(run.metrics["acc"].items) == 29 and "1 items have no number for acc and are left out: 7" in run.notes
    samples: list[dict[str, Any]] = [{"id": i, "scores": {"m": {"value": i % 2}}} for i in range(30)]
    samples[3]["scores"] = None
    (tmp_path / "a.json").write_text(json.dumps({"samples": samples}))
    (run,) = read_runs(tmp_path / "a.json")
    assert len(run.metrics["m"].items) == 29 and any("left out: 3" in note for note in run.notes)


def test_scores_of_inspect_are_converted_as_it_does(tmp_path: Path) -> None:
    def read(values: list[Any], **scorers: Any) -> Run:
        samples = [{"id": i, "scores": {"m": {"value": value}, **scorers}} for i, value in enumerate(values)]
        (tmp_path / "a.json").write_text(json.dumps({"samples": samples}))
        return read_runs(tmp_path / "a.json")[0]

    run = read(["C", "I", "P", "N", "yes", "No", "TRUE", "false", "0.5", 2, True])
    assert run.metrics["m"].parts_NK[:, 0].tolist() == [1, 0, 0.5, 0, 1, 0, 1, 0, 0.5, 2, 1]
    run = read(["C", None, math.nan, "nan", "I"], why={"value": "a text"}, several={"value": [1, 0]})
    assert list(run.metrics) == ["m"] and run.metrics["m"].items == ["0", "4"]
    assert "3 items have no number for m and are left out: 1, 2, 3" in run.notes
    assert "not compared: sample 0: why is 'a text', not a number" in run.notes
    assert "not compared: sample 0: several is '[1, 0]', not a number" in run.notes
    assert list(read(["7", "great"], right={"value": "C"}).metrics) == ["right"]
    with pytest.raises(DataError, match="sample 1: m is 'great', not a number"):
        read(["C", "great"])


def test_zstandard_members_of_an_archive(tmp_path: Path) -> None:
    """Inspect's own logs: Python's zipfile reads them from 3.14 on."""
    import pyarrow as pa

    path = tmp_path / "a.eval"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(3):
            text = json.dumps({"id": i, "scores": {"m": {"value": 1}}}).encode()
            packed = pa.compress(text, codec="zstd", asbytes=True)
            member = zipfile.ZipInfo(f"samples/{i}_epoch_1.json")
            archive.writestr(member, packed)
            member.compress_type, member.file_size = ZSTANDARD, len(text)
    (run,) = read_runs(path)
    assert run.metrics["m"].items == ["0", "1", "2"]
