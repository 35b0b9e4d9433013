"""One's own pairs: what spreadsheets and scripts really write."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tempfile
import time
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables
from vlp_models.data.formats.splits import split_by_hash
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams


def read(directory: Path, content: str | bytes, name: str = "pairs.csv", limit: int = 0) -> Tables:
    (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return read_source("p", DatasetParams.of(format="pairs", root=".", pairs=name, limit=limit), directory)


def test_csv_with_bom_quotes_and_several_captions(tmp_path: Path) -> None:
    tables = read(
        tmp_path,
        b"\xef\xbb\xbfImage, Caption,split,photographer\r\n"
        b'a.jpg,"A dog, and a ""cat""",train,me\r\n'
        b"\r\n"
        b'a.jpg,"Over two\r\nlines",train,me\r\n'
        b"sub/b.jpg,Ein Fu\xc3\x9fg\xc3\xa4nger,Test,you\r\n",
    )
    assert not tables["quarantine"]
    assert [(row["caption_id"], row["image_id"], row["text"], row["provenance"]) for row in tables["captions"]] == [
        ("p/2", "p/a.jpg", 'A dog, and a "cat"', "pairs.csv:2"),
        ("p/4", "p/a.jpg", "Over two lines", "pairs.csv:4"),
        ("p/6", "p/sub/b.jpg", "Ein Fußgänger", "pairs.csv:6"),
    ]
    assert [(row["path"], row["split"]) for row in tables["images"]] == [
        (str(tmp_path / "a.jpg"), "train"),
        (str(tmp_path / "sub/b.jpg"), "test"),
    ]


def test_usual_synonyms_of_splits_are_read(tmp_path: Path) -> None:
    names = ["validation", "Valid", "dev", " val", "training", "testing", "TEST"]
    lines = ["image,caption,split", *(f"{n}.jpg,a cat,{name}" for n, name in enumerate(names))]
    tables = read(tmp_path, "\n".join([*lines, "0.jpg,a dog,dev"]))
    assert [row["split"] for row in tables["images"]] == ["val", "val", "val", "val", "train", "test", "test"]
    assert not tables["quarantine"], "dev and validation are one split"


def test_bad_lines_cost_only_themselves(tmp_path: Path) -> None:
    tables = read(
        tmp_path,
        b"image,caption,split\n"
        b"a.jpg,one good line,train\n"
        b"b.jpg,an unquoted, comma,train\n"
        b'c.jpg,"an open quote,train\n'
        b'd.jpg,"a good line, quoted",train\n'
        b"e.jpg,Latin-1 caf\xe9,train\n"
        b",no image,train\n"
        b"a.jpg,in another split,test\n"
        b"f.jpg,last,train\n",
    )
    assert [row["text"] for row in tables["captions"]] == ["one good line", "a good line, quoted", "last"]
    assert [(row["provenance"], row["rule"]) for row in tables["quarantine"]] == [
        ("pairs.csv:3", "record_readable"),
        ("pairs.csv:4", "record_readable"),
        ("pairs.csv:6", "text_utf8"),
        ("pairs.csv:7", "record_readable"),
        ("pairs.csv:8", "split_disjoint"),
    ]
    assert "needs quotes" in tables["quarantine"][0]["reason"]
    assert tables["quarantine"][4]["reason"] == "the image is test here and train in pairs.csv:2"


def test_tsv_may_have_quotes_anywhere(tmp_path: Path) -> None:
    written = (
        b'image\tcaption\na.jpg\t"hello" said the man\n'  # plain-ok
        b'b.jpg\tan "open quote\nc.jpg\t"quoted, whole"\nd.jpg\t"open\n'
    )
    tables = read(tmp_path, written, "pairs.tsv")
    texts = ['"hello" said the man', 'an "open quote', "quoted, whole", '"open']  # plain-ok
    assert [row["text"] for row in tables["captions"]] == texts and not tables["quarantine"]


def test_open_quote_in_tsv_does_not_swallow_other_lines(tmp_path: Path) -> None:
    written = b'image\tcaption\na.jpg\t"Sit\nb.jpg\the says, stop."\nc.jpg\t"over\ntwo lines"\n'  # plain-ok
    tables = read(tmp_path, written, "pairs.tsv")
    texts = {row["image_id"]: row["text"] for row in tables["captions"]}
    assert texts == {"p/a.jpg": '"Sit', "p/b.jpg": 'he says, stop."', "p/c.jpg": "over two lines"}  # plain-ok
    assert not tables["quarantine"]


def test_two_spellings_of_a_path_are_one_image(tmp_path: Path) -> None:
    tables = read(tmp_path, b"image,caption\nx/a.jpg,one of them\n./x/a.jpg,two of them\nx//b/../a.jpg,three of them\n")
    assert [row["image_id"] for row in tables["images"]] == ["p/x/a.jpg"]
    assert {row["image_id"] for row in tables["captions"]} == {"p/x/a.jpg"}


def test_paths_of_windows_are_one_image_with_those_of_others(tmp_path: Path) -> None:
    listing = "image,caption\nx/a.jpg,one\n.\\x\\a.jpg,two\nx\\b\\..\\a.jpg,three\n"
    tables = read(tmp_path, listing)
    assert {row["image_id"] for row in tables["captions"]} == {"p/x/a.jpg"} and len(tables["images"]) == 1
    (tmp_path / "batch").mkdir()
    (tmp_path / "batch" / "pairs.csv").write_text(listing)
    tables = read_source("p", DatasetParams.of(format="pairs", root=".", pairs="*/pairs.csv"), tmp_path)
    assert {row["image_id"] for row in tables["captions"]} == {"p/batch/x/a.jpg"} and len(tables["images"]) == 1


def test_a_group_in_two_unicode_forms_is_one_group(tmp_path: Path) -> None:
    composed = [f"M\u00fcller {n}" for n in range(20)]
    names = composed + [unicodedata.normalize("NFD", name) for name in composed]
    tables = read(tmp_path, "image,caption,group\n" + "".join(f"{n}.jpg,x,{name}\n" for n, name in enumerate(names)))
    splits = [row["split"] for row in tables["images"]]
    assert splits[:20] == splits[20:] and set(splits) == {"train", "val", "test"}


def test_huge_field_is_one_bad_line(tmp_path: Path) -> None:
    tables = read(tmp_path, f"image,caption\na.jpg,{'x' * 200_000}\nb.jpg,fine\n")
    assert [row["text"] for row in tables["captions"]] == ["fine"]
    assert "field larger than field limit" in tables["quarantine"][0]["reason"]


def test_open_quotes_cost_linear_time(tmp_path: Path) -> None:
    """Each line opens a quote that swallows all that follow. Read to the end from each, 64 KB took 5 s, 32 KB 1.2 s."""
    line, count = 'a",x,"c\n', 32_000
    start = time.process_time()
    tables = read(tmp_path, "image,caption\n" + line * count + "b.jpg,fine\n")
    assert time.process_time() - start < 20
    assert len(tables["quarantine"]) == count
    assert [row["text"] for row in tables["captions"]] == ["fine"]


def test_a_caption_over_several_lines_is_one_caption(tmp_path: Path) -> None:
    for breaks, kept in ((49, 1), (50, 0)):
        tables = read(tmp_path, 'image,caption\na.jpg,"' + "word\n" * breaks + 'end"\n')
        assert len(tables["captions"]) == kept


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        json.dumps({"image": "a.jpg", "caption": "a\u2028b", "split": "train"}, ensure_ascii=False),
        '{"image": "b.jpg"}',
        '{"image": "b.jpg", "caption": ',
        '["b.jpg", "x"]',
        '{"image": "b.jpg", "caption": "half a pair \\ud800", "split": "val"}',
        '{"image": "b.jpg", "caption": null}',
        '{"image": "b.jpg", "caption": "fine", "split": "val"}',
    ]
    tables = read(tmp_path, "\n".join(lines), "pairs.jsonl")
    assert [(row["caption_id"], row["text"]) for row in tables["captions"]] == [("p/1", "a b"), ("p/7", "fine")]
    assert [(row["provenance"], row["rule"]) for row in tables["quarantine"]] == [
        ("pairs.jsonl:2", "record_readable"),
        ("pairs.jsonl:3", "record_readable"),
        ("pairs.jsonl:4", "record_readable"),
        ("pairs.jsonl:5", "text_utf8"),
        ("pairs.jsonl:6", "record_readable"),
    ]


def test_limit(tmp_path: Path) -> None:
    assert len(read(tmp_path, "image,caption\n" + "a.jpg,x\n" * 5, limit=3)["captions"]) == 3


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_header_shows_what_separates_the_fields(tmp_path: Path, delimiter: str, suffix: str) -> None:
    lines = (("Image", " caption", '"lang"'), ("a.jpg", "a dog", "en"))
    tables = read(tmp_path, "".join(delimiter.join(line) + "\n" for line in lines), f"pairs{suffix}")
    assert [row["text"] for row in tables["captions"]] == ["a dog"] and not tables["quarantine"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "pairs.csv",
            "file,text\na.jpg,x\n",
            "pairs.csv:1: the first line must name the columns image, caption (and may name split, group, lang)",
        ),
        ("pairs.csv", "image|caption\na.jpg|x\n", "separated by ','; found 'image|caption'"),
        ("pairs.csv", "", "pairs.csv: empty"),
        ("pairs.csv", '[{"image":"a.jpg","caption":"x"}]', "pairs.csv: no line can be read"),
        ("pairs.jsonl", "image,caption\na,b\n", "none of its 2 lines is a JSON object"),
        ("pairs.xlsx", "PK", "pairs are read from .csv, .tsv, .jsonl"),
        ("pairs.json", "[]", "for the format pairs: `jq -c '.[]' pairs.json > pairs.jsonl`"),
        ("pairs.jsonl", '[{"image": "a"}]', "`jq -c '.[]' pairs.jsonl > lines.jsonl`"),
        (
            "my list.jsonl",
            '[{"image": "a"},\n {}]',
            "it is a JSON list: if it lists images with their captions, write JSON",
        ),
        ("pairs.csv", "<!doctype html>\n", "an HTML page instead of the file"),
        ("pairs.jsonl", "version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer instead of the file"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, content, name)
    assert message in str(caught.value)


def test_a_header_in_the_middle_is_no_row_and_counted(tmp_path: Path) -> None:
    tables = read(tmp_path, "image,caption\na.jpg,a dog\nImage, Caption\nb.jpg,a cat\n")
    assert [row["text"] for row in tables["captions"]] == ["a dog", "a cat"]
    assert tables.skipped == {"repeated header lines": 1}


def test_groups_that_a_spreadsheet_has_rounded_do_not_join_images(tmp_path: Path) -> None:
    tables = read(tmp_path, "image,caption,group\na.jpg,x,1.23E+12\nb.jpg,x,1.23E+12\nc.jpg,x,007\nd.jpg,x,7\n")
    assert [row["image_id"] for row in tables["images"]] == ["p/c.jpg", "p/d.jpg"]
    reasons = [row["reason"] for row in tables["quarantine"]]
    assert reasons == ["`group` is 1.23E+12, a number that a spreadsheet has rounded; save the column as text"] * 2


def test_an_address_is_no_file_of_an_image(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "image,caption\nhttps://a.b/c.jpg,x\n")["quarantine"]
    assert row["reason"] == "`image` is an address, https://a.b/c.jpg; download the images and name their files"


def test_characters_that_are_not_shown_are_removed_but_joiners_are_spelling(tmp_path: Path) -> None:
    """A tokenizer drops them, so no caption of a model could equal a reference that has them."""
    hidden = (
        "\ufeff",
        "\u200b",
        "co\u00adoperate",
        "\u202bx\u202c",
        "\u2764\ufe0f",
        "\u0645\u06cc\u200c\u062f\u0648\u062f",
    )
    tables = read(tmp_path, f"image,caption\na.jpg,{' '.join(hidden)}\n")
    (row,) = tables["captions"]
    assert row["text"] == "cooperate x \u2764 \u0645\u06cc\u200c\u062f\u0648\u062f"


@pytest.mark.parametrize(
    ("file", "way_out"),
    [("annotations.zip", "unpack annotations.zip in"), ("sub/pairs.csv", "it is in "), ("x.txt", "check the paths")],
)
def test_a_missing_file_may_be_packed_or_one_folder_deeper(tmp_path: Path, file: str, way_out: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"pairs\.csv: no such file .*; {way_out}"):
        read_source("p", DatasetParams.of(format="pairs", root=".", pairs="pairs.csv"), tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs\.csv: no such file"):
        read_source("p", DatasetParams.of(format="pairs", root=".", pairs="pairs.csv"), tmp_path)
    with pytest.raises(DataError, match=r"data\.p\.pairs"):
        read_source("p", DatasetParams.of(format="pairs", root="."), tmp_path)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def shown(text: str) -> str:
    """Return a text without format characters (Unicode's category Cf) and selectors of a symbol's look."""
    marks = {mark for mark in text if unicodedata.category(mark) == "Cf" or mark in "\ufe0e\ufe0f"}
    return " ".join("".join(mark for mark in text if mark not in marks).split())


@pytest.mark.slow
@settings(deadline=None)  # a database a time
@given(st.lists(texts, min_size=1, max_size=8))
@example(["\xad"])
def test_csv_round_trip(captions: list[str]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL)
    writer.writerows([["image", "caption"], *(["a.jpg", caption] for caption in captions)])
    with tempfile.TemporaryDirectory() as directory:
        tables = read(Path(directory), buffer.getvalue())
    assert not tables["quarantine"]
    assert [shown(row["text"]) for row in tables["captions"]] == [shown(caption) for caption in captions]


@given(st.lists(texts, min_size=3, max_size=60, unique=True))
@example(["", "ï", "00"])  # one for val, two for test, and none for train
def test_split_by_hash_fills_every_split(names: list[str]) -> None:
    assert set(split_by_hash(names).values()) == {"train", "val", "test"}
    assert split_by_hash(names) == split_by_hash(names[::-1])


def test_split_by_hash_is_80_10_10_and_stable_when_images_are_added() -> None:
    names = [f"{n}.jpg" for n in range(5_000)]
    splits = split_by_hash(names)
    counts = Counter(splits.values())
    assert abs(counts["val"] - 500) < 100 and abs(counts["test"] - 500) < 100
    more = split_by_hash([*names, *(f"new-{n}.jpg" for n in range(500))])
    assert all(more[name] == split for name, split in splits.items())


def test_a_pattern_reads_batches_whose_ids_do_not_depend_on_each_other(tmp_path: Path) -> None:
    source = DatasetParams.of(format="pairs", root=".", pairs="*/pairs.jsonl")
    with pytest.raises(DataError, match="no file matches"):
        read_source("p", source, tmp_path)
    line = '{"image": "i/x.jpg", "caption": "words", "split": "train", "sha256": "more than is read"}\n'
    for batch in ("bb", "aa", ".partial"):
        (tmp_path / batch).mkdir()
        (tmp_path / batch / "pairs.jsonl").write_text(line * 2)
    tables = read_source("p", source, tmp_path)
    assert [row["caption_id"] for row in tables["captions"]] == ["p/aa/1", "p/aa/2", "p/bb/1", "p/bb/2"]
    assert [(row["image_id"], row["path"]) for row in tables["images"]] == [
        ("p/aa/i/x.jpg", str(tmp_path / "aa/i/x.jpg")),
        ("p/bb/i/x.jpg", str(tmp_path / "bb/i/x.jpg")),
    ]
    assert tables["captions"][3]["provenance"] == "bb/pairs.jsonl:2"


def test_listings_of_one_folder_have_captions_of_their_own(tmp_path: Path) -> None:
    source = DatasetParams.of(format="pairs", root=".", pairs="**/*.csv")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "one.csv").write_text("image,caption,lang\na.jpg,a bird flies,en\n")
    (tmp_path / "a.csv").write_text("image,caption,lang\n1.jpg,a dog runs,en\n2.jpg,two cats,en\n")
    (tmp_path / "b.csv").write_text("image,caption,lang\n3.jpg,ein Hund,de\n1.jpg,ein Hund rennt,de\n")
    tables = read_source("p", source, tmp_path)
    assert [(row["caption_id"], row["image_id"]) for row in tables["captions"]] == [
        ("p/a.csv:2", "p/1.jpg"),
        ("p/a.csv:3", "p/2.jpg"),
        ("p/b.csv:2", "p/3.jpg"),
        ("p/b.csv:3", "p/1.jpg"),
        ("p/x/2", "p/x/a.jpg"),
    ]
    assert [row["caption_id"] for row in tables["languages"]] == [row["caption_id"] for row in tables["captions"]]
    assert [row["image_id"] for row in tables["images"]] == ["p/1.jpg", "p/2.jpg", "p/3.jpg", "p/x/a.jpg"]
    (tmp_path / "b.csv").unlink()
    alone = read_source("p", source, tmp_path)
    assert [row["caption_id"] for row in alone["captions"]] == ["p/2", "p/3", "p/x/2"], "one listing a folder"


LISTING = b"image,caption\na.jpg,a cat\n"
COMPRESSED = [
    (gzip.compress(LISTING, mtime=0), "compressed with gzip"),
    (bz2.compress(LISTING), "compressed with bzip2"),
    (lzma.compress(LISTING), "compressed with xz"),
    (b"PK\x03\x04" + bytes(200), "a zip archive or a spreadsheet"),
    (LISTING.decode().encode("utf-16"), "UTF-16 text; save it as UTF-8"),
    (LISTING.decode().encode("utf-16-le"), "UTF-16 text; save it as UTF-8"),
    (bytes(range(256)) * 9, "a binary file, not text"),
    (bytes(500), "nothing but zeros"),
]


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.tsv", "pairs.jsonl"])
@pytest.mark.parametrize(
    ("content", "reason"), COMPRESSED, ids=["gzip", "bzip2", "xz", "zip", "utf-16", "utf-16-le", "binary", "zeros"]
)
def test_file_that_is_not_text_is_one_clear_sentence(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: {reason}"):
        read(tmp_path, content, name)
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"d\.json: {reason}"):
        read_source("d", DatasetParams.of(format="coco", root=".", captions={"train": ["d.json"]}), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "pairs.csv",
            "image,caption,splt\na.jpg,a cat,test\n",
            "pairs.csv:1: unknown column `splt`; did you mean `split`?",
        ),
        ("pairs.csv", "image,captoin\na.jpg,a cat\n", "pairs.csv:1: unknown column `captoin`; did you mean `caption`?"),
        ("pairs.tsv", "image\tcaption\tlanguage\n", "pairs.tsv:1: unknown column `language`; did you mean `lang`?"),
        ("pairs.csv", "image,caption,lnag\n", "pairs.csv:1: unknown column `lnag`; did you mean `lang`?"),
        (
            "pairs.jsonl",
            '{"image": "a.jpg", "caption": "a cat"}\n{"image": "b.jpg", "caption": "a dog", "Split": "test"}\n',
            "pairs.jsonl:2: unknown key `Split`; did you mean `split`?",
        ),
    ],
)
def test_a_misspelled_column_is_an_error(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, content, name)
    assert str(caught.value).endswith(message)


def test_other_columns_are_named_once(tmp_path: Path) -> None:
    tables = read(tmp_path, "image,caption,split,captions,photographer,long\n" + "a.jpg,a cat,test,,me,8.5\n" * 3)
    assert tables.describe_ignored() == "ignored columns: captions, long, photographer"
    lines = '{"image": "a.jpg", "caption": "a cat", "license": 1}\n{"image": "a.jpg", "caption": "a dog", "by": ""}\n'
    assert read(tmp_path, lines, "pairs.jsonl").describe_ignored() == "ignored columns: by, license"
    assert read(tmp_path, "image,caption\na.jpg,a cat\n").describe_ignored() == ""


def test_latin_1_is_reported_with_the_command_that_converts_the_file(tmp_path: Path) -> None:
    command = "`iconv -f cp1252 -t utf-8 pairs.csv > utf8-pairs.csv`"
    (row,) = read(tmp_path, b"image,caption\na.jpg,caf\xe9\nb.jpg,a bar\n")["quarantine"]
    assert row["rule"] == "text_utf8" and row["reason"].endswith(f"; convert the file: {command}")
    (row,) = read(tmp_path, '{"image": "a.jpg", "caption": "half \\ud800"}\n', "pairs.jsonl")["quarantine"]
    assert row["rule"] == "text_utf8" and "iconv" not in row["reason"], "the file is UTF-8"


def test_column_named_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs\.csv:1: the column 'caption' is named twice; rename or delete one"):
        read(tmp_path, "image,caption,Caption\na.jpg,a cat,a dog\n")
    assert len(read(tmp_path, ",image,caption,\n0,a.jpg,a cat,\n")["captions"]) == 1, "columns without a name"
