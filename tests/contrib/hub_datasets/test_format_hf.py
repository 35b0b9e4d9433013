"""Hugging Face folders: six images, one of them broken, in each layout, through `prepare`; damage and hostile tars."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hf_folders import Write, image, write_imagefolder, write_parquet, write_tar, write_webdataset

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data.formats import read_source
from vlp_models.data.formats.base import Tables, spooled
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError
from vlp_models.params import DatasetParams, load_params
from vlp_models.pipeline.dvc.external import explain_roots
from vlp_models.pipeline.stages import prepare

ROOT = Path(__file__).parents[3]


LAYOUTS: dict[str, tuple[Write, int]] = {  # how to write it, captions per image
    "parquet": (write_parquet, 2),
    "imagefolder, jsonl": (write_imagefolder, 1),
    "imagefolder, csv": (lambda root: write_imagefolder(root, "csv"), 1),
    "webdataset, txt": (write_webdataset, 1),
    "webdataset, json": (lambda root: write_webdataset(root, "json"), 1),
}


def prepared(tmp_path: Path, **settings: Any) -> Path:
    """Run `prepare` on data/raw/pets, and return its output."""
    source = DatasetParams.of(**{"format": "hf", "root": "data/raw/pets", **settings})
    params = dataclasses.replace(load_params(ROOT / "params.yaml"), data={"pets": source})
    prepare.run(params, Workspace(tmp_path), "pets")
    return Workspace(tmp_path).interim("pets")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_six_images_of_which_one_is_broken(tmp_path: Path, layout: str) -> None:
    write, per_image = LAYOUTS[layout]
    write(tmp_path / "data" / "raw" / "pets")
    out = prepared(tmp_path)
    images = read_table("images", out).to_pylist()
    assert [row["split"] for row in images] == ["test", "test", "train", "train", "train"]
    contents = [(tmp_path / row["path"]).read_bytes() for row in images]
    assert contents == [image(n) for n in (3, 5, 0, 1, 2)]
    is_inside = not layout.startswith("imagefolder")
    assert all(row["path"].startswith("data/interim/pets/images/") == is_inside for row in images)
    bad = read_table("quarantine", out).to_pylist()
    assert [(row["table"], row["rule"]) for row in bad] == [("images", "image_readable")]
    assert bad[0]["reason"].startswith("data/interim/pets/images/" if is_inside else "data/raw/pets/test/4.png")
    captions = read_table("captions", out).to_pylist()
    assert len(captions) == 6 * per_image and captions[0]["text"].startswith("picture 3")
    assert {row["image_id"] for row in captions} > {row["image_id"] for row in images}
    before = hash_path(out)
    prepared(tmp_path)
    assert hash_path(out) == before, "the same input gives the same bytes"


def test_rows_with_the_same_image_are_one_image(tmp_path: Path) -> None:
    root = tmp_path / "data" / "raw" / "pets"
    root.mkdir(parents=True)
    rows = {"image": [image(n) for n in (0, 0, 1)], "text": ["one", "two", "three"], "split": ["train", "val", "dev"]}
    pq.write_table(pa.table(rows), root / "all.parquet")
    out = prepared(tmp_path)
    assert [row["split"] for row in read_table("images", out).to_pylist()] == ["train", "val"]
    (bad,) = read_table("quarantine", out).to_pylist()
    assert bad["rule"] == "split_disjoint" and bad["provenance"] == "all.parquet:1"
    assert len(list((out / "images").rglob("*.*"))) == 2


def test_a_withdrawn_image_leaves_no_file(tmp_path: Path) -> None:
    withdrawn = pytest.importorskip("vlp_models.contrib.forgetting.withdrawn")
    write_parquet(tmp_path / "data" / "raw" / "pets")
    out = prepared(tmp_path)
    row = read_table("images", out).to_pylist()[0]
    image = withdrawn.WithdrawnImage(sha256=row["sha256"], pixels="0" * 64, perceptual=(), images=(row["image_id"],))
    withdrawn.withdraw(Workspace(tmp_path).withdrawn, [image])
    assert (tmp_path / row["path"]).exists()
    prepared(tmp_path)
    assert not (tmp_path / row["path"]).exists()
    assert read_table("images", out).num_rows == 4 and read_table("captions", out).num_rows == 10


def test_one_split_is_divided_unless_it_is_named(tmp_path: Path) -> None:
    root = tmp_path / "data" / "raw" / "pets"
    root.mkdir(parents=True)
    rows = {"image": [image(2 * n + 1) for n in range(20)], "text": [f"text {n}" for n in range(20)]}
    pq.write_table(pa.table(rows), root / "train-00000-of-00001.parquet")
    assert {row["split"] for row in read_table("images", prepared(tmp_path)).to_pylist()} == {"train", "val", "test"}
    out = prepared(tmp_path, splits=["train"])
    assert {row["split"] for row in read_table("images", out).to_pylist()} == {"train"}
    assert read_table("images", prepared(tmp_path, limit=7)).num_rows == 7


def read(tmp_path: Path, **settings: Any) -> Any:
    with spooled(tmp_path / "out"):
        (tmp_path / "out").mkdir(exist_ok=True)
        return read_source("pets", DatasetParams.of(**{"format": "hf", "root": "pets", **settings}), tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_limit_counts_the_rows_of_each_split_that_is_read(tmp_path: Path, layout: str) -> None:
    write, per_image = LAYOUTS[layout]
    write(tmp_path / "pets")
    tables = read(tmp_path, limit=2)
    assert [row["split"] for row in tables["images"]] == ["test", "test", "train", "train"]
    assert len(tables["captions"]) == 4 * per_image
    tables = read(tmp_path, limit=2, splits=["train"])
    assert [row["split"] for row in tables["images"]] == ["train", "train"]
    assert tables.skipped == {"rows of splits that `splits` does not name": 3}


def test_limit_with_a_column_of_splits(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    splits = ["train", "train", "train", "dev", "test", "val", "train", "test"]
    rows = {"image": [image(2 * n + 1) for n in range(8)], "text": [f"text {n}" for n in range(8)], "split": splits}
    pq.write_table(pa.table(rows), tmp_path / "pets" / "all.parquet")
    assert [row["text"] for row in read(tmp_path, limit=1)["captions"]] == ["text 0", "text 3", "text 4"]
    assert [row["text"] for row in read(tmp_path, limit=2, splits=["val"])["captions"]] == ["text 3", "text 5"]


def test_a_file_is_read_up_to_the_limit_of_its_split(tmp_path: Path) -> None:
    write_imagefolder(tmp_path / "pets")
    for split in ("train", "test"):
        with (tmp_path / "pets" / split / "metadata.jsonl").open("a") as file:
            file.write("broken\n")
    assert len(read(tmp_path)["quarantine"]) == 2
    tables = read(tmp_path, limit=2)
    assert len(tables["images"]) == 4 and not tables["quarantine"]


def test_a_file_without_a_suffix_is_no_image(tmp_path: Path) -> None:
    write_tar(tmp_path / "pets" / "train.tar", {"a.jpg": image(0), "a.txt": b"fine", "a": b"notes"})
    tables = read(tmp_path)
    assert [row["text"] for row in tables["captions"]] == ["fine"] and not tables["quarantine"]


def test_images_of_a_tar_with_a_suffix_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "pets" / "train.tar"
    write_tar(path, {"a.input.jpg": image(0), "a.edited.jpg": image(2), "a.txt": b"fine"})
    tables = read(tmp_path, image_column="input.jpg")
    (row,) = tables["images"]
    assert Path(row["path"]).read_bytes() == image(0) and not tables["quarantine"]
    path.write_bytes(_sized("00000.input.jpg", 2**40).tobuf() + bytes(1024))
    with pytest.raises(DataError, match=r"has 1,099,511,627,776 bytes; \.input\.jpg may have 268,435,456"):
        read(tmp_path, image_column="input.jpg")


def test_other_columns_of_a_csv_are_listed_and_not_taken_for_typos(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets" / "0.png").write_bytes(image(1))
    metadata = tmp_path / "pets" / "metadata.csv"
    metadata.write_text("file_name,text,language,splits\n0.png,a cat,en,all\n")
    tables = read(tmp_path)
    assert [row["text"] for row in tables["captions"]] == ["a cat"]
    assert tables.ignored == {"language", "splits"}
    metadata.write_text("file_name,title\n0.png,a cat\n")
    tables = read(tmp_path)
    assert [row["text"] for row in tables["captions"]] == ["a cat"] and not tables.ignored


def test_columns_are_guessed_named_or_listed(tmp_path: Path) -> None:
    names = ["first", "second", "third"]
    write_parquet(tmp_path / "pets", title=names, alt=[{"bytes": image(n), "path": None} for n in (1, 3, 5)])
    with pytest.raises(DataError, match=r"which column is the image\? 2 could be: image, alt; set `data.pets.image_co"):
        read(tmp_path)
    tables = read(tmp_path, image_column="alt", caption_column="title")
    assert [row["text"] for row in tables["captions"]] == names  # the other file has the same images, in another split
    with pytest.raises(DataError, match=r"no column `tilte` .*it has: image, caption, filename, title, alt"):
        read(tmp_path, image_column="alt", caption_column="tilte")


def test_a_missing_column_is_an_error_with_the_columns_there_are(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    file = tmp_path / "pets" / "a.parquet"
    pq.write_table(pa.table({"url": ["https://x"], "caption": ["x"], "width": [3]}), file)
    with pytest.raises(
        DataError, match=r"a\.parquet: which column is the image\? it has: url, .*`url` has addresses: download"
    ):
        read(tmp_path)
    pq.write_table(pa.table({"image": [image(1)], "width": [3]}), file)
    with pytest.raises(DataError, match=r"which column is the caption\? it has: image, width; set `data.pets.caption_"):
        read(tmp_path)
    file.rename(tmp_path / "pets" / "a.zip")
    with pytest.raises(
        DataError,
        match=r"no \.parquet, no \.tar and no metadata\.jsonl or metadata\.csv; found \.zip, .*; unpack \.zip",
    ):
        read(tmp_path)


def test_rows_without_an_image_are_quarantined(tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    images = [
        {"bytes": image(1), "path": None},
        {"bytes": None, "path": "/mnt/a.png"},
        {"bytes": b"", "path": ""},
        None,
    ]
    texts = [["a"], ["b"], ["c"], []]
    pq.write_table(pa.table({"image": images, "caption": texts}), tmp_path / "pets" / "a.parquet")
    tables = read(tmp_path)
    assert len(tables["images"]) == 1
    reasons = [row["reason"] for row in tables["quarantine"]]
    assert reasons == [
        "the row has only the path '/mnt/a.png', not the image",
        "the image is empty",
        "`caption` is an empty list",
    ]


def test_an_image_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "data" / "raw" / "pets"
    write_imagefolder(root)
    (tmp_path / "secret.png").write_bytes(image(1))
    with (root / "train" / "metadata.jsonl").open("a") as file:
        for name in ("../../../../secret.png", str(tmp_path / "secret.png")):
            file.write(json.dumps({"file_name": name, "text": "x"}) + "\n")
    rules = [row["rule"] for row in read_table("quarantine", prepared(tmp_path)).to_pylist()]
    assert sorted(rules) == ["image_inside", "image_inside", "image_readable"]


def test_a_folder_whose_name_is_not_utf_8_is_named(tmp_path: Path) -> None:
    write_imagefolder(tmp_path / "pets")
    (tmp_path / "pets" / "train").rename(tmp_path / "pets" / "caf\udce9")
    with pytest.raises(DataError, match=r"caf\\udce9/metadata\.jsonl: the name of .* a folder is not UTF-8; rename it"):
        read(tmp_path)


def _link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("00000.jpg")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def _named(name: str) -> tarfile.TarInfo:
    return tarfile.TarInfo(name)


def _sized(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def _extended(**headers: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("00000.jpg")
    info.pax_headers = {key.replace("_", "."): value for key, value in headers.items()}
    return info


def _typed(kind: bytes, size: int) -> tarfile.TarInfo:
    info = _sized("00000.jpg", size)
    info.type = kind
    return info


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (_link(tarfile.SYMTYPE), "'00000.jpg' is a link or a special file"),
        (_link(tarfile.LNKTYPE), "'00000.jpg' is a link or a special file"),
        (_link(tarfile.FIFOTYPE), "'00000.jpg' is a link or a special file"),
        (_named("../../00000.jpg"), "the path '../../00000.jpg' leads out of the tar"),
        (_named("/tmp/00000.jpg"), "the path '/tmp/00000.jpg' leads out of the tar"),
        (_sized("00000.jpg", 2**40), r"has 1,099,511,627,776 bytes; \.jpg may have 268,435,456"),
        (_sized("00000.txt", 2**21), r"has 2,097,152 bytes; \.txt may have 1,048,576"),
        (_sized("00000.jpg", 10**6), "not a tar file, or damaged"),
        (_extended(size="-1536"), r"damaged \(invalid size in the header at byte"),  # back to its own header
        (_extended(size="9" * 30), r"has 9{3}(,9{3}){9} bytes"),
        (_extended(GNU_sparse_major="1", GNU_sparse_minor="0"), r"damaged \(invalid header at byte"),
        (_extended(GNU_sparse_map="a,b"), r"damaged \(invalid header at byte"),
        (_typed(tarfile.XHDTYPE, 2**60), "not a tar file, or damaged"),
    ],
    ids=[
        *("symlink", "hard link", "fifo", "parent", "absolute", "terabyte", "long text", "truncated"),
        *("circle", "size of 30 digits", "sparse without its map", "sparse with words for numbers", "endless header"),
    ],
)
def test_hostile_tars_are_refused(tmp_path: Path, member: tarfile.TarInfo, message: str) -> None:
    path = tmp_path / "pets" / "train.tar"
    write_tar(path, {"a.jpg": image(0), "a.txt": b"fine"})
    sound = path.read_bytes()[: 512 * (1 + -(-len(image(0)) // 512) + 2)]
    path.write_bytes(sound + member.tobuf() + bytes(1024))
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    assert not (tmp_path / "00000.jpg").exists() and {path.name for path in tmp_path.iterdir()} == {"out", "pets"}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "pets" / "train.tar"
    write_tar(path, {"a.jpg": image(0), "a.txt": b"fine", "b.jpg": image(2), "b.txt": b"too"})
    content = bytearray(path.read_bytes())
    place = 512 * (1 + -(-len(image(0)) // 512) + 2)
    content[place : place + 20] = b"\xff" * 20  # of the header of b.jpg
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.tar: damaged or truncated after"):
        read(tmp_path)
    path.unlink()
    file = tmp_path / "pets" / "a.parquet"
    file.write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"a\.parquet: not a parquet file, or damaged"):
        read(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match=r"a\.parquet: a Git LFS pointer instead of the file; run `git lfs pull`"):
        read(tmp_path)


def test_records_of_tars_that_lack_a_part_are_quarantined(tmp_path: Path) -> None:
    files = {"a.jpg": image(0), "a.txt": b"fine", "b.jpg": image(2), "c.txt": b"no image", "d.e.txt": b"x"}
    write_tar(tmp_path / "pets" / "train.tar", files)
    tables = read(tmp_path)
    assert len(tables["images"]) == 1
    assert [row["reason"] for row in tables["quarantine"]] == [
        "no caption (.txt or .json) with the key b; it has .jpg",
        "no image with the key c; it has .txt",
        "no image with the key d; it has .e.txt",
    ]


def test_texts_of_tars_in_latin_1_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    files = {"a.jpg": image(0), "a.txt": b"\xef\xbb\xbffine", "b/c.jpg": image(2), "b/c.txt": b"caf\xe9"}
    files |= {"d.jpg": image(1), "d.json": b'{"txt": ["one", "two"]}'}
    write_tar(tmp_path / "pets" / "train.tar", files)
    tables = read(tmp_path)
    assert [row["text"] for row in tables["captions"]] == ["fine", "one", "two"]
    (row,) = tables["quarantine"]
    assert (row["rule"], row["row_id"]) == ("text_utf8", "pets/train.tar:1")
    assert row["reason"] == "b/c.txt in the tar is not UTF-8: 'caf\\udce9'; build the tar again with UTF-8"


def test_a_record_without_the_caption_of_the_first_is_quarantined(tmp_path: Path) -> None:
    records = [{"caption": "one", "url": "x"}, {"url": "https://a.caption"}, {"caption": "three"}]
    files: dict[str, bytes] = {}
    for n, record in enumerate(records):
        files |= {f"{n}.jpg": image(2 * n + 1), f"{n}.json": json.dumps(record).encode()}
    write_tar(tmp_path / "pets" / "train.tar", files)
    tables = read(tmp_path)
    assert [row["text"] for row in tables["captions"]] == ["one", "three"]
    assert [row["reason"] for row in tables["quarantine"]] == ["no `caption`; it has url"]


def write_img2dataset(root: Path, output: str) -> None:
    """Two shards of three rows as img2dataset writes them; it could not download the second row of each."""
    for shard in ("00000", "00001"):
        rows: list[dict[str, Any]] = []
        files: dict[str, bytes] = {}
        for n in range(3):
            key, is_loaded = f"{shard}{n:04d}", n != 1
            status = (
                {"status": "success", "error_message": None} if is_loaded else {"status": "x", "error_message": "404"}
            )
            row = {"url": f"https://a.b/{key}", "caption": f"picture {key}", "key": key, **status}
            content = image(2 * n + 1) + shard.encode()
            rows.append(row | ({"jpg": content if is_loaded else None} if output == "parquet" else {}))
            if is_loaded:
                texts = {f"{key}.txt": row["caption"].encode(), f"{key}.json": json.dumps(row).encode()}
                files |= {f"{key}.jpg": content, **texts}
        root.mkdir(exist_ok=True, parents=True)
        pq.write_table(pa.Table.from_pylist(rows), root / f"{shard}.parquet")
        (root / f"{shard}_stats.json").write_text("{}")
        if output == "webdataset":
            write_tar(root / f"{shard}.tar", files)
        if output == "files":
            (root / shard).mkdir()
            for name, content in files.items():
                (root / shard / name).write_bytes(content)


@pytest.mark.parametrize("output", ["webdataset", "files", "parquet"])
def test_folders_of_img2dataset_are_read(tmp_path: Path, output: str) -> None:
    write_img2dataset(tmp_path / "pets", output)
    tables = read(tmp_path)
    keys = ["000000000", "000000002", "000010000", "000010002"]
    assert [row["text"] for row in tables["captions"]] == [f"picture {key}" for key in keys]
    assert len(tables["images"]) == 4 and not tables["quarantine"]
    failed = {"rows that img2dataset could not download": 2} if output == "parquet" else {}
    assert tables.skipped == failed


def test_shards_of_img2dataset_without_images_are_counted_or_named(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    write_img2dataset(root, "webdataset")
    (root / "00001_stats.json").unlink()
    whole = (root / "00001.tar").read_bytes()
    (root / "00001.tar").write_bytes(whole[:3000])
    with pytest.raises(
        DataError, match=r"img2dataset has not finished it \(no 00001_stats\.json\): run img2dataset again"
    ):
        read(tmp_path)
    (root / "00001.tar").unlink()
    tables = read(tmp_path)
    assert len(tables["captions"]) == 2
    assert tables.skipped == {"shards of img2dataset without their images": 1}
    (root / "00000.tar").unlink()
    with pytest.raises(DataError, match="tables of URLs without images; run it with `--output_format webdataset`"):
        read(tmp_path)


def test_files_of_a_tar_may_be_in_any_order_and_captions_in_other_files(tmp_path: Path) -> None:
    """All images before all texts; a list of captions alone in a JSON; a suffix of its own."""
    path = tmp_path / "pets" / "train.tar"
    images = {f"{n}.JPG": image(2 * n + 1) for n in range(2)}
    write_tar(path, images | {"1.txt": b"one", "0.txt": b"zero"})
    assert [row["text"] for row in read(tmp_path)["captions"]] == ["zero", "one"]
    write_tar(path, images | {f"{n}.json": b'["a dog", "a cat"]' for n in range(2)})
    assert [row["text"] for row in read(tmp_path)["captions"]] == ["a dog", "a cat"] * 2
    write_tar(path, images | {f"{n}.caption": b"a dog" for n in range(2)})
    assert [row["text"] for row in read(tmp_path)["captions"]] == ["a dog"] * 2
    write_tar(path, images | {f"{n}.en": b"a dog" for n in range(2)})
    reason = "no caption (.txt or .json) with the key 0; it has .jpg, .en; `data.pets.caption_column` may name another"
    assert next(iter(read(tmp_path)["quarantine"]))["reason"].startswith(reason)
    assert [row["text"] for row in read(tmp_path, caption_column="en")["captions"]] == ["a dog"] * 2


def test_a_dataset_of_save_to_disk_and_metadata_as_parquet_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "pets" / "test"
    folder.mkdir(parents=True)
    rows = [{"image": {"bytes": image(n), "path": None}, "caption": f"picture {n}"} for n in (1, 3)]
    table = pa.Table.from_pylist(rows)
    for name in ("data-00000-of-00001.arrow", "cache-f00.arrow"):
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    assert [row["text"] for row in read(tmp_path)["captions"]] == ["picture 1", "picture 3"]
    for file in folder.iterdir():
        file.unlink()
    (folder / "a.png").write_bytes(image(1))
    pq.write_table(pa.Table.from_pylist([{"file_name": "a.png", "text": "a dog"}]), folder / "metadata.parquet")
    (row,) = read(tmp_path)["images"]
    assert row["path"] == str(folder / "a.png")


MANY, LARGE = 400, 100_000  # images, bytes of each


@pytest.mark.parametrize("rows", [50, MANY])
def test_a_large_parquet_file_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Row groups of 50, and one row group whose pages are small."""
    (tmp_path / "pets").mkdir()
    columns = {"image": [{"bytes": os.urandom(LARGE), "path": None} for _ in range(MANY)], "caption": ["a"] * MANY}
    table, path = pa.table(columns), tmp_path / "pets" / "train.parquet"
    pq.write_table(table, path, row_group_size=rows, write_batch_size=10)
    del table, columns
    before = pa.total_allocated_bytes()
    held = watch_memory(monkeypatch)
    assert len(read(tmp_path)["captions"]) == MANY == len(held)
    assert max(held) - before < MANY * LARGE / 4


@pytest.mark.parametrize("keys", [MANY, 1])
def test_a_large_tar_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Records of one image, and a hostile record of many."""
    path = tmp_path / "pets" / "train.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        for number in range(MANY):
            for suffix, content in (("jpg", os.urandom(LARGE)), ("txt", b"a")):
                archive.addfile(_sized(f"{number % keys}.{suffix}", len(content)), io.BytesIO(content))
    held = watch_memory(monkeypatch)
    tracemalloc.start()
    try:
        tables = read(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MANY * LARGE / 4
    if keys == 1:
        reason = f"{MANY} files with the key 0 and the suffix .jpg"
        assert [row["reason"] for row in tables["quarantine"]] == [reason] and not held
    else:
        assert len(tables["captions"]) == MANY == len(held)


def watch_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets Arrow's memory in bytes each time that an image is extracted."""
    held, extract = [], Tables.extract

    def watched(tables: Tables, content: bytes) -> Path:
        held.append(pa.total_allocated_bytes())
        return extract(tables, content)

    monkeypatch.setattr(Tables, "extract", watched)
    return held


def test_a_missing_folder_names_the_download(tmp_path: Path) -> None:
    params = load_params(ROOT / "params.yaml")
    changed = dataclasses.replace(params, data={"pets": DatasetParams.of(format="hf", root="data/raw/pets")})
    (message,) = explain_roots(changed, tmp_path)
    assert "hf download OWNER/NAME --repo-type dataset --local-dir data/raw/pets`, or name a dataset of" in message
    assert "`vlp use --set data.pets.root=hf://OWNER/NAME`" in message
