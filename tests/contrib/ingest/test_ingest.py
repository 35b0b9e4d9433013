"""vlp ingest: every kind of pair gets its verdict, and nothing is ingested twice."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hf_folders import write_parquet
from ingest_project import (
    COUNTS,
    ROOT,
    encoded,
    held,
    ingest_counts,
    make_project,
    make_submission,
    params_of,
    picture,
    quarantined,
    simple_submission,
)
from photos import photo
from PIL import Image, ImageOps

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.ingest import ingest
from vlp_models.contrib.ingest.index import HashIndex
from vlp_models.data.tables import LANGUAGES, read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import DatasetParams, IngestParams, load_params
from vlp_models.pipeline.stages import prepare, validate


def test_every_kind_of_pair_gets_its_verdict(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p", max_bad_fraction=0.6)
    (tmp_path / "secret.jpg").write_bytes(encoded(picture(77)))
    files = {
        "a.jpg": encoded(picture(1)),
        "b.png": encoded(picture(2), "PNG"),
        "copy.jpg": encoded(picture(1)),
        "b.bmp": encoded(picture(2), "BMP"),
        "small.jpg": encoded(picture(1).resize((40, 30)), quality=70),
        "val.jpg": encoded(picture(1001), quality=60),
        "test.png": encoded(picture(1002), "PNG"),
        "train.jpg": encoded(picture(1000)),
        "cut.jpg": encoded(picture(3))[:700],
        "empty.jpg": b"",
        "really.png": encoded(picture(4)),
        "bomb.png": encoded(Image.new("1", (9000, 9000)), "PNG"),
        "tiny.png": encoded(picture(5, (15, 40)), "PNG"),
        "c.jpg": encoded(picture(6)),
    }
    rows = [(name, f"a picture of {name}", "") for name in files]
    rows += [("a.jpg", "A PICTURE of a.jpg", ""), ("a.jpg", "another caption", "")]
    rows += [(name, "a way out of the drop", "") for name in ("../x.jpg", "/etc/passwd", "link.jpg", "out/secret.jpg")]
    rows += [("absent.jpg", "not there", ""), ("c.jpg", "!!", ""), ("c.jpg", "fine words", "third")]
    folder = make_submission(workspace, "mixed", rows, files)
    (folder / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (folder / "out").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.jpg")
    with (folder / "pairs.jsonl").open("a") as listing:
        listing.write('{"image": "pipe.jpg", "caption": "it never ends"}\nnot json\n')

    report = ingest.run(params_of(workspace), workspace)
    assert {name: report[name] for name in COUNTS} == {"new": 6, "duplicates": 4, "leaks": 2, "bad": 13}
    lost = quarantined(workspace, "mixed")
    rules = {image: (verdict, rule) for image, (verdict, rule, _) in lost.items()}
    assert rules == {
        "copy.jpg": ("duplicate", "image_repeated"),
        "b.bmp": ("duplicate", "image_repeated"),
        "small.jpg": ("duplicate", "image_repeated"),
        "a.jpg": ("duplicate", "caption_unique"),
        "val.jpg": ("leak", "leak_from_evaluation"),
        "test.png": ("leak", "leak_from_evaluation"),
        "cut.jpg": ("bad", "image_decodes"),
        "empty.jpg": ("bad", "image_not_empty"),
        "bomb.png": ("bad", "image_not_a_bomb"),
        "tiny.png": ("bad", "image_side"),
        **dict.fromkeys(("../x.jpg", "/etc/passwd", "link.jpg", "out/secret.jpg"), ("bad", "path_inside")),
        "absent.jpg": ("bad", "image_present"),
        "pipe.jpg": ("bad", "image_present"),
        "pairs.jsonl:22": ("bad", "text_letters"),
        "pairs.jsonl:23": ("bad", "split_known"),
        "pairs.jsonl:25": ("bad", "record_readable"),
    }
    assert "is in val as tested/1.png" in lost["val.jpg"][2], "a leak names the evaluation image"
    assert "(byte for byte) is in test as tested/2.png" in lost["test.png"][2]
    captions = {(row["caption"], row["split"]) for row in held(workspace)}
    names = ("a.jpg", "b.png", "train.jpg", "really.png", "c.jpg")
    assert captions == {(f"a picture of {name}", "train") for name in names} | {("another caption", "train")}
    (batch,) = (workspace.root / "data" / "accepted").iterdir()
    assert len([path for path in (batch / "images").rglob("*") if path.is_file()]) == 5, "no picture without a pair"
    assert not (workspace.root / "data" / "inbox" / "mixed").exists()
    assert (workspace.root / "data" / "inbox" / "done" / "mixed" / "pairs.jsonl").exists()


def test_second_run_ingests_nothing_twice_and_changes_nothing(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    simple_submission(workspace, "first", range(1, 6))
    assert ingest_counts(workspace) == (5, 0, 0, 0)
    simple_submission(workspace, "second", range(3, 9))
    assert ingest_counts(workspace) == (3, 3, 0, 0)
    assert len({row["batch"] for row in held(workspace)}) == 2
    shutil.rmtree(workspace.root / ".work")  # the index is a cache
    simple_submission(workspace, "second", range(1, 9))
    assert ingest_counts(workspace) == (0, 8, 0, 0)
    assert sorted(p.name for p in (workspace.root / "data/inbox/done").iterdir()) == ["first", "second", "second-2"]
    assert ingest_counts(workspace) == (0, 0, 0, 0)
    before = hash_path(workspace.root)
    assert ingest_counts(workspace) == (0, 0, 0, 0)
    assert hash_path(workspace.root) == before

    prepare.run(params_of(workspace), workspace, "ingested")
    images = read_table("images", workspace.interim("ingested")).to_pylist()
    assert {row["split"] for row in images} == {"train"} and len(images) == 8
    first = held(workspace)[0]
    assert f"ingested/{first['batch']}/{first['image']}" in {row["image_id"] for row in images}


def test_groups_and_languages_reach_the_tables(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    batches = {}
    for name, seeds in (("first", range(1, 13)), ("second", range(13, 25))):
        folder = simple_submission(workspace, name, seeds)
        rows = [
            {"image": f"{n}.jpg", "caption": f"picture {n}", "group": f"walk {n % 6}" if n % 4 else None, "lang": "EN"}
            for n in seeds
        ]
        rows += [{"image": f"{seeds[0]}.jpg", "caption": "ein Bild", "lang": "de_AT"}]
        rows += [{"image": f"{seeds[0]}.jpg", "caption": "another group", "group": "trip"}]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert ingest_counts(workspace) == (13, 0, 0, 1)
        batches[name] = quarantined(workspace, name)
    ((verdict, rule, reason),) = batches["first"].values()
    assert (verdict, rule) == ("bad", "group_unique") and "of group 'trip' here and of 'walk 1'" in reason
    simple_submission(workspace, "third", range(25, 27))  # names neither
    assert ingest_counts(workspace) == (2, 0, 0, 0)
    assert not any(
        {"group", "lang"} & row.keys() for row in held(workspace) if row["caption"].startswith("picture num")
    )

    params = params_of(workspace)
    source = dataclasses.replace(params.data["ingested"], val_fraction=0.5)
    prepare.run(dataclasses.replace(params, data={"ingested": source}), workspace, "ingested")
    tables = workspace.interim("ingested")
    image_of = {row["caption"]: f"ingested/{row['batch']}/{row['image']}" for row in held(workspace)}
    splits = {row["image_id"]: row["split"] for row in read_table("images", tables).to_pylist()}
    walks = [{splits[image_of[f"picture {n}"]] for n in range(1, 25) if n % 4 and n % 6 == walk} for walk in range(6)]
    assert [len(found) for found in walks] == [1] * 6, "a group is in one split, over both batches"
    assert set.union(*walks) == {"train", "val"}
    languages = Counter(json.loads(line)["language"] for line in (tables / LANGUAGES).read_text().splitlines())
    assert languages == {"en": 24, "de-at": 2}


def test_submission_with_splits_leaks_in_neither_direction(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    simple_submission(workspace, "train", range(1, 4))
    assert ingest_counts(workspace) == (3, 0, 0, 0)
    seeds = {"a.jpg": 1, "b.jpg": 1000, "c.jpg": 1002, "d.jpg": 10, "e.jpg": 11, "f.jpg": 11}
    files = {name: encoded(picture(seed)) for name, seed in seeds.items()}
    rows = [(name, f"picture of {name}", "test") for name in ["a.jpg", "b.jpg", "c.jpg", "d.jpg", "f.jpg"]]
    make_submission(workspace, "tests", [("e.jpg", "picture of e.jpg", ""), *rows], files)
    assert ingest_counts(workspace) == (2, 1, 3, 0)
    reasons = {image: (verdict, reason) for image, (verdict, _, reason) in quarantined(workspace, "tests").items()}
    assert reasons["a.jpg"][0] == "leak" and "is in train as ingested/" in reasons["a.jpg"][1]
    assert reasons["b.jpg"][0] == "leak" and "is in train as tested/0.png" in reasons["b.jpg"][1]
    assert reasons["c.jpg"][0] == "duplicate", "tested on already"
    assert reasons["e.jpg"][0] == "leak" and "is in test as f.jpg of this submission" in reasons["e.jpg"][1]
    assert {row["caption"]: row["split"] for row in held(workspace) if row["split"] != "train"} == {
        "picture of d.jpg": "test",
        "picture of f.jpg": "test",
    }
    make_submission(
        workspace, "later", [("x.jpg", "the tested one again", "")], {"x.jpg": encoded(picture(10), quality=60)}
    )
    assert ingest_counts(workspace) == (0, 0, 1, 0)
    (workspace.root / "data" / "raw" / "tested" / "1.png").write_bytes(encoded(picture(500), "PNG"))
    make_submission(workspace, "changed", [("x.jpg", "now a tested one", "")], {"x.jpg": encoded(picture(500))})
    assert ingest_counts(workspace) == (0, 0, 1, 0), "an evaluation image that changed is hashed again"


def test_changed_copies_of_evaluation_images_are_leaks_and_other_images_are_new(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    tested, mine = photo(1), photo(2)
    tested.save(workspace.root / "data/raw/tested/2.png")  # 2 is of test
    changed = {
        "mirrored.jpg": ImageOps.mirror(tested),
        "cropped.jpg": tested.crop((10, 10, 180, 140)),
        "turned.jpg": tested.rotate(90, expand=True),
        "askew.jpg": tested.rotate(3),
        "framed.jpg": ImageOps.expand(tested, 15, "black"),
        "mine.jpg": mine,
    }
    files = {name: encoded(image) for name, image in changed.items()}
    make_submission(workspace, "copies", [(name, f"a picture of {name}", "") for name in files], files)
    assert ingest_counts(workspace) == (1, 0, 5, 0)
    assert "is in test as tested/2.png" in quarantined(workspace, "copies")["cropped.jpg"][2]

    again = {"x.jpg": encoded(ImageOps.mirror(mine.crop((0, 0, 190, 140)))), "y.jpg": encoded(photo(3))}
    rows = [(name, f"a picture of {name}", "test") for name in again]
    rows += [("z.jpg", "the same as y, cropped", "")]
    make_submission(workspace, "tests", rows, again | {"z.jpg": encoded(photo(3).crop((15, 5, 190, 140)))})
    shutil.rmtree(workspace.root / ".work")  # the index is rebuilt from the batch
    assert ingest_counts(workspace) == (1, 0, 2, 0)
    lost = quarantined(workspace, "tests")
    assert "is in train as ingested/" in lost["x.jpg"][2] and "mirrored" in lost["x.jpg"][2]
    assert "is in test as y.jpg of this submission" in lost["z.jpg"][2]


def test_ingest_and_validate_agree_on_equal_captions(tmp_path: Path) -> None:
    """A batch that was accepted must not make `validate` stop the pipeline."""
    workspace = make_project(tmp_path / "p")
    captions = ["Die Straße ist frei", "DIE STRASSE IST FREI", "die  straße ist frei", "Ein Hund läuft"]
    make_submission(
        workspace, "street", [("1.jpg", caption, "") for caption in captions], {"1.jpg": encoded(picture(1))}
    )
    assert ingest_counts(workspace) == (2, 2, 0, 0)
    params = params_of(workspace)
    for name in params.data:
        prepare.run(params, workspace, name)
    validate.run(params, workspace)
    assert not read_table("quarantine", workspace.validated).num_rows


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [("", "of its own"), (".", "of its own"), ("../elsewhere", "outside"), ("/here/data", "relative to the project")],
)
def test_dataset_must_be_a_folder_that_dvc_can_track(dataset: str, reason: str) -> None:
    with pytest.raises(ParamsError, match=rf"`ingest.dataset.*{reason}"):
        IngestParams(dataset=dataset)
    if len(dataset) > 1:
        assert IngestParams(dataset=dataset, track=False)


def test_missing_evaluation_data_stops_the_ingest(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    shutil.rmtree(workspace.root / "data" / "raw" / "tested")
    simple_submission(workspace, "submission", range(1, 4))
    with pytest.raises(DataError, match=r"tested/pairs\.csv: no such file"):
        ingest.run(params_of(workspace), workspace)
    assert not held(workspace)


@pytest.mark.pipeline
def test_dvc_versions_batches_and_fetches_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    team = tmp_path / "team"
    team.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=team, check=True)

    def publish(seeds: range) -> None:
        (team / "photos").mkdir(exist_ok=True)
        for seed in seeds:
            (team / "photos" / f"{seed}.jpg").write_bytes(encoded(picture(seed)))
        lines = [f"{seed}.jpg,picture number {seed}" for seed in seeds]
        (team / "photos" / "pairs.csv").write_text("image,caption\n" + "\n".join(lines) + "\n")
        subprocess.run(["git", "add", "-A"], cwd=team, check=True)
        subprocess.run(["git", *identity, "commit", "-qm", "photos"], cwd=team, check=True)

    publish(range(1, 4))
    workspace = make_project(tmp_path / "p", dvc=True, fetch=["data/imported/photos.dvc"], settle_seconds=3600.0)
    (workspace.root / "data" / "imported").mkdir()
    dvc = [sys.executable, "-m", "dvc"]
    command = [*dvc, "import", "-q", str(team), "photos", "-o", "data/imported/photos"]
    subprocess.run(command, cwd=workspace.root, check=True)
    assert ingest_counts(workspace) == (3, 0, 0, 0), "what DVC fetched is complete"
    (batch,) = {row["batch"] for row in held(workspace)}
    dataset = workspace.root / "data" / "accepted"
    assert (dataset / f"{batch}.dvc").exists()
    ignored = subprocess.run(["git", "check-ignore", "-q", f"{dataset}/{batch}.dvc"], cwd=workspace.root)
    assert ignored.returncode == 1, "git does not ignore the .dvc file"
    stage = {"cmd": "echo read > read.txt", "deps": ["data/accepted"], "outs": ["read.txt"]}
    (workspace.root / "dvc.yaml").write_text(json.dumps({"stages": {"prepare": stage}}))  # JSON is YAML
    subprocess.run([*dvc, "repro", "-q"], cwd=workspace.root, check=True)
    assert ingest_counts(workspace) == (0, 0, 0, 0)
    assert json.loads((workspace.reports / "ingest.json").read_text())["submissions"] == []

    def status() -> dict[str, object]:
        done = subprocess.run([*dvc, "status", "--json"], cwd=workspace.root, capture_output=True, text=True)
        return dict(json.loads(done.stdout))

    assert status() == {}, "nothing new, so nothing is stale"
    publish(range(2, 6))
    assert ingest_counts(workspace) == (2, 2, 0, 0)
    assert list(status()) == ["prepare"], "something new, and it is versioned"

    shutil.rmtree(dataset / batch)
    publish(range(2, 7))
    with pytest.raises(DataError, match=f"1 tracked batches are missing.*{batch}.*dvc pull"):
        ingest.run(params_of(workspace), workspace)
    subprocess.run([*dvc, "checkout", "-q"], cwd=workspace.root, check=True)
    assert ingest_counts(workspace) == (1, 4, 0, 0)


@pytest.mark.long
def test_dvc_pulls_a_submission_from_a_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    workspace = make_project(tmp_path / "p", dvc=True, fetch=["data/remote/photos.dvc"])
    photos = simple_submission(workspace, "photos", range(1, 4)).rename(tmp_path / "photos")
    (workspace.root / "data" / "remote").mkdir()
    photos.rename(workspace.root / "data" / "remote" / "photos")
    for command in (
        ["remote", "add", "-d", "store", str(tmp_path / "store")],
        ["add", "-q", "data/remote/photos"],
        ["push", "-q"],
    ):
        subprocess.run([sys.executable, "-m", "dvc", *command], cwd=workspace.root, check=True)
    shutil.rmtree(workspace.root / "data" / "remote" / "photos")
    shutil.rmtree(workspace.root / ".dvc" / "cache")
    assert ingest_counts(workspace) == (3, 0, 0, 0)


def test_missing_dvc_project_is_an_error_before_any_work(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p", track=True)
    assert ingest_counts(workspace) == (0, 0, 0, 0)
    simple_submission(workspace, "submission", range(1, 4))
    with pytest.raises(DataError, match=r"not a DVC project; run `dvc init`, or set `ingest.track: false`"):
        ingest.run(params_of(workspace), workspace)
    assert not held(workspace)


@pytest.mark.pipeline
def test_command_exits_quickly_if_nothing_is_new(tmp_path: Path) -> None:
    workspace = make_project(tmp_path / "p")
    simple_submission(workspace, "first", range(1, 4))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vlp_models.cli.main", "ingest"]
    first = subprocess.run(command, cwd=workspace.root, env=env, capture_output=True, text=True)
    assert first.returncode == 0 and "3 new pairs" in first.stdout, first.stdout + first.stderr
    start = time.perf_counter()
    second = subprocess.run(command, cwd=workspace.root, env=env, capture_output=True, text=True)
    assert second.returncode == 0 and "nothing new" in second.stdout
    assert time.perf_counter() - start < 10, "a hang, not a matter of speed"


def test_the_last_line_names_what_trains_on_new_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = make_project(tmp_path)
    file = tmp_path / "params.yaml"
    whole = yaml.safe_load(file.read_text())
    unread, unnamed = copy.deepcopy(whole), copy.deepcopy(whole)
    del unread["data"]["ingested"]
    for run in (*unnamed["pretrain"].values(), *unnamed["finetune"].values()):
        run["sources"] = {"tested": 1}
    for number, (raw, expected) in enumerate(
        (
            (whole, "`vlp run` trains on them"),
            (unread, "params.yaml does not read data/accepted yet: `vlp use ingest` adds it"),
            (unnamed, "no run trains on them yet: `vlp use --set finetune.RUN.sources.ingested=1` adds them to one"),
        )
    ):
        file.write_text(yaml.safe_dump(raw))
        simple_submission(workspace, f"s{number}", range(number * 2, number * 2 + 2))
        ingest.run(params_of(workspace), workspace)
        batches = f"{number + 1} batch{'es' * (number > 0)}"
        line = f"ingest: 2 new pairs; data/accepted has {batches}; {expected}"
        assert capsys.readouterr().out.splitlines()[-1] == line  # a flow reports the last line


@pytest.mark.parametrize("new_file", [False, True], ids=["overwritten", "replaced"])
def test_an_image_of_equal_size_and_date_is_hashed_again(tmp_path: Path, new_file: bool) -> None:
    path, hashed = tmp_path / "a.bmp", list[bytes]()
    path.write_bytes(b"first")

    def hash_files(paths):
        for number, name, _ in paths:
            hashed.append(content := Path(name).read_bytes())
            fingerprint = SimpleNamespace(to_bytes=lambda: b"")
            yield number, SimpleNamespace(sha256=content, pixels=content, perceptual=None, fingerprint=fingerprint)

    with closing(HashIndex(tmp_path / "index.sqlite", "own", keypoints=False)) as index:
        for content in (b"first", b"first", b"other"):
            if content != path.read_bytes():
                before = path.stat()
                if new_file:
                    path.unlink()
                path.write_bytes(content)
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            index.sync_source("coco", [("coco/a", "test", str(path))], hash_files)
    assert hashed == [b"first", b"other"]


def test_images_that_prepare_extracts_are_compared(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "raw" / "pets")
    source = DatasetParams.of(format="hf", root="data/raw/pets")
    params = dataclasses.replace(load_params(ROOT / "params.yaml"), data={"pets": source})
    prepare.run(params, Workspace(tmp_path), "pets")
    out = Workspace(tmp_path).interim("pets")
    before = hash_path(out)
    with closing(HashIndex(tmp_path / "index.sqlite", "ingested", keypoints=True)) as index:
        ingest.index_datasets(index, params, Workspace(tmp_path), has_held_out=True)
        rows = index.connection.execute("SELECT image_id FROM images").fetchall()
    assert {row[0] for row in rows} == {row["image_id"] for row in read_table("images", out).to_pylist()}
    assert hash_path(out) == before
