from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from png_files import png_header
from shard_files import read_shard

from vlp_models.data import mapped
from vlp_models.data.shards import index
from vlp_models.data.shards.archive import check_tar, read_member
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.shards.write import ImageRecord, member_key
from vlp_models.errors import DataError

Build = Callable[..., Path]
Record = Callable[..., ImageRecord]


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for info, data in members:
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_shards_round_trip(build_shards: Build, record: Record) -> None:
    records = [record(i, pixels=True) for i in range(7)]
    directory = build_shards(train=records)
    tars = sorted(directory.glob("*.tar"))
    assert [tar.name for tar in tars] == [f"train-{number:08d}.tar" for number in range(3)]
    found = [item for tar in tars for item in read_shard(tar)]
    assert [value["json"]["image_id"] for _, value in found] == [r.image_id for r in records]
    for (key, value), wanted in zip(found, records, strict=True):
        assert key == member_key(wanted.image_id)
        assert value["png"] == wanted.pixels
        assert value["json"]["questions"][0]["answers"] == wanted.rows["questions"][0]["answers"]
        assert value["json"]["statements"][0]["label"] is wanted.rows["statements"][0]["label"]
        for name in ("features", "boxes", "class_probs", "scores"):
            np.testing.assert_array_equal(getattr(value["regions.safetensors"], name), getattr(wanted.regions, name))


def test_the_same_input_gives_the_same_bytes(build_shards: Build, record: Record) -> None:
    one, two = (build_shards(name, train=[record(i) for i in range(7)], val=[record(9)]) for name in ("a", "b"))
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in two.iterdir()) and len(names) == 7
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_webdataset_reads_shards_in_secure_mode(build_shards: Build, record: Record) -> None:
    directory = build_shards(train=[record(i, pixels=True) for i in range(4)])
    script = (
        "import sys, json, webdataset as wds\n"
        "wds.utils.enforce_security = True\n"
        "for sample in wds.WebDataset(sys.argv[1:], shardshuffle=False):\n"
        "    print(sample['__key__'], json.loads(sample['json'])['image_id'], len(sample['regions.safetensors']) > 0,\n"
        "          sample['png'][1:4].decode(), sep='|')\n"
    )
    tars = map(str, sorted(directory.glob("*.tar")))
    result = subprocess.run([sys.executable, "-c", script, *tars], check=True, capture_output=True, text=True)
    ids = [record(i).image_id for i in range(4)]
    assert result.stdout.splitlines() == [f"{member_key(i)}|{i}|True|PNG" for i in ids]


def test_index_has_member_offsets(build_shards: Build, record: Record) -> None:
    directory = build_shards(train=[record(i) for i in range(7)])
    index = pq.read_table(directory / "index-train.parquet").to_pylist()
    members = {n: {m.name: m for m in check_tar(directory / f"train-{n:08d}.tar")} for n in range(3)}
    for row in index:
        member = members[row["shard"]][f"{row['key']}.regions.safetensors"]
        assert (row["regions_offset"], row["regions_size"]) == (member.offset, member.size)
    assert {row["view"] for row in index} == {"images", "captions", "questions", "statements"}


@given(st.lists(st.text(min_size=1, max_size=120), min_size=2, max_size=2, unique=True))
def test_keys_are_safe_and_different(ids: list[str]) -> None:
    try:
        ids[0].encode(), ids[1].encode()
    except UnicodeEncodeError:
        return
    keys = [member_key(image_id) for image_id in ids]
    assert keys[0] != keys[1]
    assert all(len(f"{key}.regions.safetensors") <= 100 and not set(key) & set("./\\: ~") for key in keys)


def info(name: str, type: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = type, link
    return made


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (info("../escape.json"), "no path"),
        (info("/etc/escape.json"), "no path"),
        (info("a/b.json"), "no path"),
        (info("pipe:touch escape.json"), "no command"),
        (info("pipe:touch.json"), "no command"),
        (info(".json"), "a name is"),
        (info("a.json\n"), "a name is"),
        (info("a.pickle"), "extension .pickle"),
        (info("a.pyd"), "extension .pyd"),
        (info("a.pth"), "extension .pth"),
        (info("a.json.gz"), "extension .json.gz"),
        (info("a.json", tarfile.SYMTYPE, "/etc/passwd"), "only plain files"),
        (info("a.json", tarfile.LNKTYPE, "b.json"), "only plain files"),
        (info("a.json", tarfile.CHRTYPE), "only plain files"),
        (info("a.json", tarfile.FIFOTYPE), "only plain files"),
        (info("a.json", tarfile.DIRTYPE), "only plain files"),
        (info("a" * 150 + ".json"), "only plain files|no path"),  # a GNU long-name header
    ],
)
def test_forbidden_members_are_refused(member: tarfile.TarInfo, reason: str, tmp_path: Path) -> None:
    good = (info("good.json"), b"{}")
    path = write_tar(tmp_path / "train-00000000.tar", good, (member, b"x"), format=tarfile.GNU_FORMAT)
    with pytest.raises(DataError, match=reason):
        list(read_shard(path))
    assert [p.name for p in tmp_path.iterdir()] == ["train-00000000.tar"]


def test_archives_with_extended_headers_or_huge_or_duplicate_members_are_refused(tmp_path: Path) -> None:
    path, extended, huge = tmp_path / "a.tar", info("good.json"), info("a.json")
    extended.pax_headers = {"path": "../escape.json"}
    write_tar(path, (extended, b"{}"), format=tarfile.PAX_FORMAT)
    with pytest.raises(DataError, match="refused"):
        check_tar(path)
    huge.size = 1 << 33
    path.write_bytes(huge.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(DataError, match="8589934592 bytes"):
        check_tar(path)
    write_tar(path, (info("a.json"), b"{}"), (info("a.json"), b"{}"))
    with pytest.raises(DataError, match="duplicate member"):
        check_tar(path)


@pytest.mark.parametrize("keep", [0, 100, 700, 1024])
def test_truncated_archive_is_refused(keep: int, build_shards: Build, record: Record) -> None:
    path = build_shards(train=[record(1)]) / "train-00000000.tar"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"train-00000000.tar: (no tar header|truncated).*again"):
        check_tar(path)


EMPTY_SAFETENSORS = struct.pack("<Q", 2) + b"{}"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b'{"image_id": '),
        ("a.json", b"[1]"),
        ("a.json", b"\xff"),
        ("a.json", b"[" * 100_000),
        ("a.regions.safetensors", b"\x80\x04cos\nsystem\n."),
        ("a.regions.safetensors", EMPTY_SAFETENSORS),
        ("a.regions.safetensors", b"\xff" * 16),
        ("a.png", b"GIF89a"),
        ("a.png", png_header(60_000, 60_000)),
        ("a.txt", b"\xff"),
    ],
)
def test_a_malformed_member_is_named(name: str, data: bytes, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", (info(name), data))
    with pytest.raises(DataError, match=f"x.tar: {name}: not a valid"):
        list(read_shard(path))


def test_a_wrong_index_is_noticed(build_shards: Build, record: Record) -> None:
    directory = build_shards(train=[record(1), record(2)])
    path = directory / "train-00000000.tar"
    member = check_tar(path)[1]
    assert read_member(path, member.name, member.offset, member.size)
    for name, offset, size in (
        (member.name, member.offset + 512, member.size),
        (member.name, member.offset, member.size - 1),
        ("other.regions.safetensors", member.offset, member.size),
        (member.name, 10**9, member.size),
        ("a.pickle", member.offset, member.size),
        (member.name, member.offset, 1 << 40),
    ):
        with pytest.raises(DataError, match="build the shards again"):
            read_member(path, name, offset, size)


@pytest.fixture
def shards(build_shards: Callable[..., Path], record: Callable[..., ImageRecord]) -> Path:
    records = [record(i, source="nlvr" if i % 3 == 0 else "scenes") for i in range(11)]
    return build_shards(train=sorted(records, key=lambda r: r.image_id))


def everything(shards: Path) -> list[object]:
    """Everything a dataset returns, in another order than stored."""
    captions = ShardDataset(shards, "train", "captions")
    images = ShardDataset(shards, "train", "images", {"nlvr": 2}, captioned=True)
    order = [(7 * i) % len(captions) for i in range(len(captions))]
    samples = [(s.sample_id, s.text, s.regions.features.tobytes()) for s in captions.__getitems__(order) if s.regions]
    return [samples, captions.image_ids(), images.image_ids(), images.references(), len(images)]


def test_a_mapped_index_gives_the_same_rows(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = everything(shards)
    monkeypatch.setattr(index, "PIECE", 4)
    assert everything(shards) == held
    monkeypatch.setattr(mapped, "MAPPED", 1)
    assert everything(shards) == held
    folder = shards.with_name(".shards-mapped")
    files = sorted(folder.iterdir())
    assert [file.name.split("-")[2] for file in files] == ["captions", "images"]
    times = [file.stat().st_mtime_ns for file in files]
    assert everything(shards) == held
    assert [file.stat().st_mtime_ns for file in sorted(folder.iterdir())] == times, "written once"
    os.utime(shards / "index-train.parquet", ns=(1, 1))
    assert everything(shards) == held
    assert len(list(folder.iterdir())) == 2 and sorted(folder.iterdir()) != files, "another index, another file"


def test_index_stays_in_memory_if_the_folder_is_not_writable(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = everything(shards)
    monkeypatch.setattr(mapped, "MAPPED", 1)
    shards.with_name(".shards-mapped").write_text("a file in the folder's place")
    assert everything(shards) == held
