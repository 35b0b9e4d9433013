"""Common mistakes, one a row: what is wrong, the command, and the sentence that it answers with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mistakes import (
    Arrange,
    both,
    cut,
    encode,
    file_size_limit,
    folder,
    give_away,
    link,
    mode,
    nothing,
    remove,
    setting,
    unknown_user,
    write,
)


@dataclass(frozen=True)
class Mistake:
    """what: is wrong. sentence: a regular expression in the output. During the command, `during` holds."""

    what: str
    command: str
    arrange: Arrange
    sentence: str
    code: int = 2
    during: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


PAIRS = "data/raw/photos/pairs.csv"
# command -> what is wrong, how it is arranged, the answer, and, unless it is 2, the exit code; what holds meanwhile
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "plan": [
        ("params.yaml is missing", remove("params.yaml"), r"params\.yaml: not found; run in the project root"),
        ("params.yaml is empty", write("params.yaml", ""), r"params\.yaml: expected one section per stage"),
        ("params.yaml is a folder", folder("params.yaml"), r"params\.yaml: a folder, where a file is needed"),
        ("params.yaml is unreadable", mode("params.yaml", 0), r"params\.yaml: permission denied; `chmod u\+rwX"),
        ("params.yaml leads to itself", link("params.yaml", "params.yaml"), r"params\.yaml: symbolic links"),
        ("params.yaml is UTF-16", encode("params.yaml", "utf-16"), r"params\.yaml: UTF-16 text; save it as UTF-8"),
        ("params.yaml is Latin-1", encode("params.yaml", "latin-1"), r"params\.yaml:\d+: not UTF-8 text; save"),
        ("params.yaml is zeros", write("params.yaml", bytes(99)), r"params\.yaml: nothing but zeros"),
        (
            "params.yaml has a tab",
            write("params.yaml", "data:\n\tx: 1\n"),
            r"not valid YAML: line 2, column 1: found character",
        ),
        ("params.yaml is not merged", write("params.yaml", "<<<<<<< a\n"), r"params\.yaml:1: git's conflict markers"),
        ("unknown key", setting("trainer.devicse", 2), r"unknown key `trainer\.devicse`; did you mean `devices`"),
        ("wrong type", setting("trainer.devices", "two"), r"`trainer\.devices`.*'two'"),
        ("unknown model family", setting("models.tden.family", "tdne"), r"family: tdne`: no such family.*`tden`"),
        ("unknown start", setting("finetune.tden-captioning.start", "pretrain/tdn"), r"start: pretrain/tdn`: not"),
        ("name with a slash", setting("data.a/b", {"format": "pairs", "root": "x"}), r"`data\.a/b`: names may"),
        ("data is a file", write("data/raw/photos", "x"), r"`data\.photos\.root: .*`: a file, not a folder"),
        ("dvc.yaml is a folder", folder("dvc.yaml"), r"dvc\.yaml: a folder, where a file is needed"),
        ("dvc.yaml is binary", write("dvc.yaml", b"\xff\xfe"), r"dvc\.yaml is not updated: .*delete", 0),
    ],
    "run": [
        ("data is missing", remove("data/raw/photos"), r"format pairs; .*`vlp use --set data\.photos\.root=FOLDER`"),
        ("data leads nowhere", link("data/raw/photos", "/mnt/none"), r"a symbolic link to /mnt/none, which does not"),
        ("data is unreadable", mode("data/raw/photos", 0), r"`data\.photos\.root: .*: permission denied; .*chmod"),
        (
            "data is not pulled",
            both(remove("data/raw/photos"), write("data/raw/photos.dvc", "outs: []\n")),
            r"`data\.photos\.root: data/raw/photos`: no such folder; fetch it with `dvc pull data/raw/photos\.dvc`",
        ),
        (
            "nothing ingested yet",
            setting("data.new", {"format": "pairs", "root": "data/accepted", "pairs": "*/*"}),
            r"`vlp ingest` creates it",
        ),
        (
            "initial weights are missing",
            setting("models.tden.init", "checkpoints/imported/big"),
            r"`models\.tden\.init: .*not found; create it with `vlp import-checkpoint",
        ),
        (
            "vocabulary is missing",
            both(setting("tokenizer.source", "vocab"), setting("tokenizer.vocab", "vocab.txt")),
            r"`tokenizer\.vocab: vocab\.txt`: not found",
        ),
        ("database of another user", give_away("mlflow.db"), r"mlflow\.db: permission denied: .* belongs to uid 12345"),
        (
            "dvc.lock is not merged",
            write("dvc.lock", "<<<<<<< ours\n=======\n>>>>>>> theirs\n"),
            r"dvc\.lock:1: git's conflict markers; take one side",
        ),
        (
            "no git repository",
            both(remove(".git"), lambda p: os.environ.__setitem__("GIT_CEILING_DIRECTORIES", str(p.parent))),
            r"not a git repository: run `git init`",
        ),
        ("no DVC project", remove(".dvc"), r"no \.dvc folder; run in the project root, or run `dvc init`"),
        ("no home folder", nothing, r"uid-\d+: no home folder, .* set HOME to a writable folder", 2, unknown_user),
    ],
    "stage prepare photos": [
        ("listing is empty", write(PAIRS, ""), r"pairs\.csv"),
        ("listing is a folder", folder(PAIRS), r"pairs\.csv"),
        ("listing is unreadable", mode(PAIRS, 0), r"pairs\.csv: .*permission denied"),
        ("listing is UTF-16", encode(PAIRS, "utf-16"), r"pairs\.csv: UTF-16 text; save it as UTF-8"),
        (
            "listing is a spreadsheet",
            write(PAIRS, b"PK\x03\x04xxxxxxxx"),
            r"pairs\.csv: a zip archive or a spreadsheet",
        ),
        ("listing without captions", write(PAIRS, "image,text\n0.png,a\n"), r"pairs\.csv.*caption"),
        ("listing names no image", write(PAIRS, "image,caption\nx.png,a b c d\n"), r"photos"),
        ("images are unreadable", both(*(mode(f"data/raw/photos/{n}.png", 0) for n in range(4))), r"photos"),
        ("images are text", both(*(write(f"data/raw/photos/{n}.png", "x") for n in range(4))), r"photos"),
        (
            "COCO file is cut",
            both(
                setting(
                    "data.photos", {"format": "coco", "root": "data/raw/photos", "captions": {"train": ["c.json"]}}
                ),
                write("data/raw/photos/c.json", '{"images": ['),
            ),
            r"c\.json:1: not JSON",
        ),
    ],
    "stage prepare photo": [("unknown dataset", nothing, r"`vlp stage prepare photo`: params\.data has photos")],
    "stage trian": [("unknown stage", nothing, r"no stage `trian`; did you mean")],
    "stage validate": [
        ("tables are missing", remove("data/interim"), r"data/interim/photos.*`dvc repro prepare@photos`"),
        ("table is damaged", cut("data/interim/photos/images.parquet"), r"images\.parquet"),
        ("table is unreadable", mode("data/interim/photos/images.parquet", 0), r"images\.parquet.*permission denied"),
    ],
    "stage tokenizer": [
        ("validated data is missing", remove("data/validated"), r"data/validated.*`dvc repro validate`"),
        ("output is not writable", mode("data", 0o555), r"data.*permission denied"),
    ],
    "stage features": [
        ("validated data is missing", remove("data/validated"), r"data/validated.*`dvc repro validate`"),
        ("an image was deleted", both(remove(".work"), remove("data/raw/photos/0.png")), r"0\.png"),
        (
            "an image is unreadable",
            both(remove(".work"), mode("data/raw/photos/0.png", 0)),
            r"0\.png.*permission denied",
        ),
    ],
    "stage shards": [
        ("features are missing", remove("data/features"), r"data/features.*`dvc repro features`"),
        ("features are damaged", cut("data/features/index.parquet"), r"index\.parquet"),
        ("disk is full", nothing, r"the disk is full.*free some space", 74, lambda: file_size_limit(3000)),
    ],
    "stage initial tden": [
        ("tokenizer is missing", remove("data/tokenizer"), r"data/tokenizer.*`dvc repro tokenizer`"),
        ("tokenizer is damaged", write("data/tokenizer/tokenizer.json", "{"), r"tokenizer\.json: not valid JSON"),
    ],
    "stage pretrain tden": [
        ("shards are missing", remove("data/shards"), r"data/shards.*`dvc repro shards`"),
        ("shards are damaged", write("data/shards/manifest.json", "{"), r"data/shards/manifest\.json"),
        ("start is missing", remove("checkpoints/initial"), r"checkpoints/initial/tden.*`dvc repro initial@tden`"),
        ("start is damaged", cut("checkpoints/initial/tden/model.safetensors"), r"model\.safetensors"),
        (
            "resume state of another user",
            both(folder(".work/pretrain-tden"), mode(".work/pretrain-tden", 0)),
            r"\.work/pretrain-tden.*permission denied",
        ),
    ],
    "stage finetune tden-captioning": [
        ("start is missing", nothing, r"checkpoints/pretrain/tden.*`dvc repro pretrain@tden`")
    ],
    "stage finetune tden-vqa": [("unknown run", nothing, r"tden-vqa")],
    "stage evaluate tden-captioning": [("model is missing", nothing, r"checkpoints/finetune/tden-captioning")],
    "stage register": [("model is missing", nothing, r"`dvc repro")],
    "use presets/vlmoo.yaml": [("preset is missing", nothing, r"presets/vlmoo\.yaml: no such file")],
    "use ./presets": [("preset is a folder", nothing, r"presets: a folder, where a file is needed")],
    "use presets/longer.yaml": [
        ("preset is not merged", write("presets/longer.yaml", "=======\n>>>>>>> b\n"), r"longer\.yaml:2: git's conf"),
        ("params.yaml is read-only", mode(".", 0o555), r"permission denied"),
        (
            "lock of another user",
            give_away(".work/run.lock"),
            r"run\.lock: permission denied: .* belongs to uid 12345.*runs as the user",
        ),
        ("disk is full", nothing, r"params\.yaml: the disk is full", 74, lambda: file_size_limit(300)),
    ],
    "use --set trainer.devices": [
        ("setting without =", nothing, r"--set trainer\.devices: write it as key\.path=value")
    ],
    "use --set trainer.devices=[": [
        ("setting is no YAML", nothing, r"--set trainer\.devices: the value is not valid YAML")
    ],
    "use --set tokenizer.source=vocab --set tokenizer.vocab=package:no-bert": [
        ("package is missing", nothing, r"`tokenizer\.vocab: package:no-bert`: not installed; install it with")
    ],
    "promote vqq": [("unknown task", nothing, r"vqq: no such task; did you mean `vqa`")],
    "promote captioning": [
        ("nothing is registered", nothing, r"vlp-captioning: no challenger to promote; `dvc repro register`"),
        (
            "no network",
            setting("tracking.uri", "http://127.0.0.1:9"),
            r"MLflow at http://127\.0\.0\.1:9 failed \(connection refused\); check that it is running, ",
            69,
        ),
        (
            "database is text",
            write("mlflow.db", "not a database" * 99),
            r"MLflow at .*mlflow\.db failed .*not a database",
            69,
        ),
        (
            "database is unreadable",
            both(write("mlflow.db", ""), mode("mlflow.db", 0)),
            r"mlflow\.db: permission denied",
            69,
        ),
        ("folder is read-only", both(folder(".work/locks"), mode(".", 0o555)), r"permission denied", 69),
        (
            "disk is full",
            remove("mlflow.db"),
            r"MLflow at .*check that its disk is neither full nor",
            69,
            lambda: file_size_limit(4096),
        ),
        ("no home folder", nothing, r"uid-\d+: no home folder.*set HOME", 2, unknown_user),
    ],
    "history captioning": [
        ("ledger is damaged", write("promotions/ledger.jsonl", "{}\n"), r"ledger\.jsonl, line 1"),
        ("ledger is a folder", folder("promotions/ledger.jsonl"), r"ledger\.jsonl: a folder, where"),
    ],
    "verify vlp-vqa/3": [("no such version", nothing, r"vlp-vqa/3: no such version")],
    "rollback captioning": [("nothing to roll back", nothing, r"vlp-captioning")],
    "evaluate-alias captioning winner": [("unknown alias", nothing, r"winner")],
    "caption nowhere.png": [("image is missing", nothing, r"nowhere\.png: file not found")],
    "caption data": [("image is a folder", nothing, r"data: file not found")],
    "caption data/raw/photos/0.png": [
        ("nothing is registered", nothing, r"vlp-captioning"),
        ("no network", setting("tracking.uri", "http://127.0.0.1:9"), r"check that it is running", 69),
    ],
    "predict vqa data/raw/photos/0.png": [
        ("text is missing", nothing, r"vlp predict vqa IMAGE TEXT: the text is missing")
    ],
    "judge 0.png 1.png 2.png true": [("three images", nothing, r"vlp judge: got 3 images")],
    "ingest": [
        ("inbox is unreadable", both(folder("data/inbox"), mode("data/inbox", 0)), r"data/inbox: permission denied"),
        ("inbox is a file", write("data/inbox", "x"), r"data/inbox"),
        ("batch without listing", folder("data/inbox/monday"), r"data/inbox/monday", 0),
        (
            "batch is UTF-16",
            write("data/inbox/monday/pairs.csv", "image,caption\n".encode("utf-16")),
            r"pairs\.csv: UTF-16 text",
        ),
        ("index of another user", give_away(".work/ingest/lock"), r"ingest/lock: permission denied: .* uid 12345"),
        (
            ".dvc file is missing",
            setting("ingest.fetch", ["data/new.dvc"]),
            r"data/new\.dvc: not a \.dvc file of one folder",
        ),
    ],
    "drift": [
        ("nothing trained yet", nothing, r"dvc repro training_stats", 0),
        ("reports are read-only", both(folder("reports"), mode("reports", 0o555)), r"reports.*permission denied"),
    ],
    "forget photos/1": [("not a terminal", nothing, r"not a terminal: pass --dry-run or --yes")],
    "forget photos/99.png --dry-run": [("unknown image", nothing, r"photos/99")],
    "import-checkpoint none.bin --format bert --name tden": [
        ("weights are missing", nothing, r"none\.bin: no such folder; it should hold model\.safetensors")
    ],
    "import-checkpoint w.pth --format xmodaler-tden --name tden": [
        ("weights are text", write("w.pth", "x"), r"w\.pth")
    ],
    "import-checkpoint w.pth --format berd --name tden": [("unknown format", write("w.pth", "x"), r"berd")],
    "verify-resume pretrain/none": [("unknown run", nothing, r"none")],
    "doctor": [
        ("data is missing", remove("data/raw/photos"), r"`data\.photos\.root: data/raw/photos`: no such", 1),
        ("lock of another user", give_away(".work/run.lock"), r"permissions .*run\.lock: permission denied", 1),
        ("no home folder", nothing, r"account .*no home folder", 1, unknown_user),
    ],
    "status": [
        ("outside a project", remove("params.yaml"), r"no params\.yaml here"),
        ("params.yaml is Latin-1", encode("params.yaml", "latin-1"), r"not UTF-8 text", 0),
        (
            "ledger is unreadable",
            both(write("promotions/ledger.jsonl", ""), mode("promotions/ledger.jsonl", 0)),
            r"ledger\.jsonl: permission denied",
            0,
        ),
    ],
}
TABLE = [Mistake(what, command, *row) for command, rows in ROWS.items() for what, *row in rows]
