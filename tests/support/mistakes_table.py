"""Common mistakes, one a row: what is wrong, the command, and the sentence that it answers with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

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


M = Mistake
PAIRS = "data/raw/photos/pairs.csv"
TABLE = [
    # params.yaml
    M("params.yaml is missing", "plan", remove("params.yaml"), r"params\.yaml: not found; run in the project root"),
    M("params.yaml is empty", "plan", write("params.yaml", ""), r"params\.yaml: expected one section per stage"),
    M("params.yaml is a list", "plan", write("params.yaml", "- a\n"), r"params\.yaml: expected one section per stage"),
    M("params.yaml is a folder", "plan", folder("params.yaml"), r"params\.yaml: a folder, where a file is needed"),
    M("params.yaml is unreadable", "plan", mode("params.yaml", 0), r"params\.yaml: permission denied; `chmod u\+rwX"),
    M("params.yaml leads nowhere", "plan", link("params.yaml", "gone.yaml"), r"params\.yaml: not found"),
    M("params.yaml leads to itself", "plan", link("params.yaml", "params.yaml"), r"params\.yaml: symbolic links"),
    M("params.yaml is UTF-16", "plan", encode("params.yaml", "utf-16"), r"params\.yaml: UTF-16 text; save it as UTF-8"),
    M("params.yaml is Latin-1", "plan", encode("params.yaml", "latin-1"), r"params\.yaml:\d+: not UTF-8 text; save"),
    M("params.yaml is zeros", "plan", write("params.yaml", bytes(99)), r"params\.yaml: nothing but zeros"),
    M(
        "params.yaml has a tab",
        "plan",
        write("params.yaml", "data:\n\tx: 1\n"),
        r"not valid YAML: line 2, column 1: found character",
    ),
    M(
        "params.yaml is not merged",
        "plan",
        write("params.yaml", "<<<<<<< a\n"),
        r"params\.yaml:1: git's conflict markers",
    ),
    M("unknown key", "plan", setting("trainer.devicse", 2), r"unknown key `trainer\.devicse`; did you mean `devices`"),
    M("wrong type", "plan", setting("trainer.devices", "two"), r"`trainer\.devices`.*'two'"),
    M("unknown model family", "plan", setting("models.tden.family", "tdne"), r"family: tdne`: no such family.*`tden`"),
    M("unknown start", "plan", setting("finetune.tden-captioning.start", "pretrain/tdn"), r"start: pretrain/tdn`: not"),
    M("no params file", "stage validate --params my.yaml", nothing, r"my\.yaml: not found"),
    M("name with a slash", "plan", setting("data.a/b", {"format": "pairs", "root": "x"}), r"`data\.a/b`: names may"),
    # data that params.yaml names
    M(
        "data is missing",
        "plan",
        remove("data/raw/photos"),
        r"`data\.photos\.root: data/raw/photos`: no such folder; it",
    ),
    M("data is missing", "run", remove("data/raw/photos"), r"format pairs .*`vlp use --set data\.photos\.root=FOLDER`"),
    M("data is a file", "plan", write("data/raw/photos", "x"), r"`data\.photos\.root: .*`: a file, not a folder"),
    M(
        "data leads nowhere",
        "run",
        link("data/raw/photos", "/mnt/none"),
        r"a symbolic link to /mnt/none, which does not",
    ),
    M("data is unreadable", "run", mode("data/raw/photos", 0), r"`data\.photos\.root: .*: permission denied; .*chmod"),
    M(
        "data is not pulled",
        "run",
        both(remove("data/raw/photos"), write("data/raw/photos.dvc", "outs: []\n")),
        r"`data\.photos\.root: data/raw/photos`: no such folder; fetch it with `dvc pull data/raw/photos\.dvc`",
    ),
    M(
        "data with a space and umlauts is missing",
        "plan",
        setting("data.photos.root", "data/raw/B\xfcro Fotos \u65e5\u672c"),
        "`data\\.photos\\.root: data/raw/B\xfcro Fotos \u65e5\u672c`: no such folder",
    ),
    M(
        "nothing ingested yet",
        "run",
        setting("data.new", {"format": "pairs", "root": "data/accepted", "pairs": "*/*"}),
        r"`vlp ingest` creates it",
    ),
    M(
        "initial weights are missing",
        "run",
        setting("models.tden.init", "checkpoints/imported/big"),
        r"`models\.tden\.init: .*not found; create it with `vlp import-checkpoint",
    ),
    M(
        "vocabulary is missing",
        "run",
        both(setting("tokenizer.source", "vocab"), setting("tokenizer.vocab", "vocab.txt")),
        r"`tokenizer\.vocab: vocab\.txt`: not found",
    ),
    M(
        "stage without its data",
        "stage prepare photos",
        remove("data/raw/photos"),
        r"`data\.photos\.root: .*no such folder",
    ),
    # listings and images
    M("listing is missing", "stage prepare photos", remove(PAIRS), r"pairs\.csv"),
    M("listing is empty", "stage prepare photos", write(PAIRS, ""), r"pairs\.csv"),
    M("listing is a folder", "stage prepare photos", folder(PAIRS), r"pairs\.csv"),
    M("listing is unreadable", "stage prepare photos", mode(PAIRS, 0), r"pairs\.csv: .*permission denied"),
    M(
        "listing is UTF-16",
        "stage prepare photos",
        encode(PAIRS, "utf-16"),
        r"pairs\.csv: UTF-16 text; save it as UTF-8",
    ),
    M(
        "listing is compressed",
        "stage prepare photos",
        write(PAIRS, b"\x1f\x8b\x08\0xxxxxxxxxx"),
        r"pairs\.csv: compressed with gzip",
    ),
    M(
        "listing is a spreadsheet",
        "stage prepare photos",
        write(PAIRS, b"PK\x03\x04xxxxxxxx"),
        r"pairs\.csv: a zip archive or a spreadsheet",
    ),
    M(
        "listing without captions",
        "stage prepare photos",
        write(PAIRS, "image,text\n0.png,a\n"),
        r"pairs\.csv.*caption",
    ),
    M("listing names no image", "stage prepare photos", write(PAIRS, "image,caption\nx.png,a b c d\n"), r"photos"),
    M(
        "images are unreadable",
        "stage prepare photos",
        both(*(mode(f"data/raw/photos/{n}.png", 0) for n in range(4))),
        r"photos",
    ),
    M(
        "images are text",
        "stage prepare photos",
        both(*(write(f"data/raw/photos/{n}.png", "x") for n in range(4))),
        r"photos",
    ),
    M(
        "COCO file is cut",
        "stage prepare photos",
        both(
            setting("data.photos", {"format": "coco", "root": "data/raw/photos", "captions": {"train": ["c.json"]}}),
            write("data/raw/photos/c.json", '{"images": ['),
        ),
        r"c\.json:1: not JSON",
    ),
    M(
        "COCO file is a list",
        "stage prepare photos",
        both(
            setting("data.photos", {"format": "coco", "root": "data/raw/photos", "captions": {"train": ["c.json"]}}),
            write("data/raw/photos/c.json", "[]"),
        ),
        r"c\.json: not ",
    ),
    M("unknown dataset", "stage prepare photo", nothing, r"`vlp stage prepare photo`: params\.data has photos"),
    # stages: inputs that are missing, damaged or unreadable
    M("unknown stage", "stage trian", nothing, r"no stage `trian`; did you mean"),
    M(
        "tables are missing",
        "stage validate",
        remove("data/interim"),
        r"data/interim/photos.*`dvc repro prepare@photos`",
    ),
    M("table is damaged", "stage validate", cut("data/interim/photos/images.parquet"), r"images\.parquet"),
    M(
        "table is unreadable",
        "stage validate",
        mode("data/interim/photos/images.parquet", 0),
        r"images\.parquet.*permission denied",
    ),
    M(
        "validated data is missing",
        "stage tokenizer",
        remove("data/validated"),
        r"data/validated.*`dvc repro validate`",
    ),
    M("validated data is damaged", "stage tokenizer", cut("data/validated/captions.parquet"), r"captions\.parquet"),
    M("validated data is missing", "stage features", remove("data/validated"), r"data/validated.*`dvc repro validate`"),
    M("an image was deleted", "stage features", both(remove(".work"), remove("data/raw/photos/0.png")), r"0\.png"),
    M(
        "an image is unreadable",
        "stage features",
        both(remove(".work"), mode("data/raw/photos/0.png", 0)),
        r"0\.png.*permission denied",
    ),
    M("features are missing", "stage shards", remove("data/features"), r"data/features.*`dvc repro features`"),
    M("features are damaged", "stage shards", cut("data/features/index.parquet"), r"index\.parquet"),
    M("tokenizer is missing", "stage initial tden", remove("data/tokenizer"), r"data/tokenizer.*`dvc repro tokenizer`"),
    M(
        "tokenizer is damaged",
        "stage initial tden",
        write("data/tokenizer/tokenizer.json", "{"),
        r"tokenizer\.json: not valid JSON",
    ),
    M(
        "tokenizer is binary",
        "stage initial tden",
        write("data/tokenizer/tokenizer.json", b"\xff\xfe\xff"),
        r"tokenizer\.json: not valid JSON",
    ),
    M("shards are missing", "stage pretrain tden", remove("data/shards"), r"data/shards.*`dvc repro shards`"),
    M(
        "shards are damaged",
        "stage pretrain tden",
        write("data/shards/manifest.json", "{"),
        r"data/shards/manifest\.json",
    ),
    M(
        "start is missing",
        "stage pretrain tden",
        remove("checkpoints/initial"),
        r"checkpoints/initial/tden.*`dvc repro initial@tden`",
    ),
    M(
        "start is damaged",
        "stage pretrain tden",
        cut("checkpoints/initial/tden/model.safetensors"),
        r"model\.safetensors",
    ),
    M(
        "start is unreadable",
        "stage pretrain tden",
        mode("checkpoints/initial/tden/model.safetensors", 0),
        r"model\.safetensors.*permission denied",
    ),
    M(
        "start is missing",
        "stage finetune tden-captioning",
        nothing,
        r"checkpoints/pretrain/tden.*`dvc repro pretrain@tden`",
    ),
    M("unknown run", "stage finetune tden-vqa", nothing, r"tden-vqa"),
    M("model is missing", "stage evaluate tden-captioning", nothing, r"checkpoints/finetune/tden-captioning"),
    M("model is missing", "stage register", nothing, r"`dvc repro"),
    M("validated data is missing", "stage training_stats", remove("data/validated"), r"data/validated"),
    M(
        "resume state of another user",
        "stage pretrain tden",
        both(folder(".work/pretrain-tden"), mode(".work/pretrain-tden", 0)),
        r"\.work/pretrain-tden.*permission denied",
    ),
    M("output is not writable", "stage tokenizer", mode("data", 0o555), r"data.*permission denied"),
    M("disk is full", "stage shards", nothing, r"the disk is full.*free some space", 74, lambda: file_size_limit(3000)),
    # vlp use, plan and run
    M("preset is missing", "use presets/vlmoo.yaml", nothing, r"presets/vlmoo\.yaml: no such file"),
    M("preset is a folder", "use ./presets", nothing, r"presets: a folder, where a file is needed"),
    M(
        "preset is unreadable",
        "use presets/longer.yaml",
        mode("presets/longer.yaml", 0),
        r"longer\.yaml: permission denied",
    ),
    M(
        "preset is not merged",
        "use presets/longer.yaml",
        write("presets/longer.yaml", "=======\n>>>>>>> b\n"),
        r"longer\.yaml:2: git's conf",
    ),
    M(
        "setting without =",
        "use --set trainer.devices",
        nothing,
        r"--set trainer\.devices: write it as key\.path=value",
    ),
    M(
        "setting is no YAML",
        "use --set trainer.devices=[",
        nothing,
        r"--set trainer\.devices: the value is not valid YAML",
    ),
    M(
        "package is missing",
        "use --set tokenizer.source=vocab --set tokenizer.vocab=package:no-bert",
        nothing,
        r"`tokenizer\.vocab: package:no-bert`: not installed; install it with",
    ),
    M("params.yaml is read-only", "use presets/longer.yaml", mode(".", 0o555), r"permission denied"),
    M(
        "lock of another user",
        "use presets/longer.yaml",
        give_away(".work/run.lock"),
        r"run\.lock: permission denied: .* belongs to uid 12345.*runs as the user",
    ),
    M(
        "lock of another user",
        "run",
        give_away(".work/run.lock"),
        r"run\.lock: permission denied: .* belongs to uid 12345",
    ),
    M(
        "database of another user",
        "run",
        give_away("mlflow.db"),
        r"mlflow\.db: permission denied: .* belongs to uid 12345",
    ),
    M(
        "disk is full",
        "use presets/longer.yaml",
        nothing,
        r"params\.yaml: the disk is full",
        74,
        lambda: file_size_limit(300),
    ),
    M("dvc.yaml is a folder", "plan", folder("dvc.yaml"), r"dvc\.yaml: a folder, where a file is needed"),
    M("dvc.yaml is unreadable", "plan", mode("dvc.yaml", 0), r"dvc\.yaml: permission denied"),
    M("dvc.yaml is binary", "plan", write("dvc.yaml", b"\xff\xfe"), r"dvc\.yaml is not updated: .*delete", 0),
    M(
        "dvc.lock is not merged",
        "run",
        write("dvc.lock", "<<<<<<< ours\n=======\n>>>>>>> theirs\n"),
        r"dvc\.lock:1: git's conflict markers; take one side",
    ),
    M(
        "no git repository",
        "run",
        both(remove(".git"), lambda p: os.environ.__setitem__("GIT_CEILING_DIRECTORIES", str(p.parent))),
        r"not a git repository: run `git init`",
    ),
    M("no DVC project", "run", remove(".dvc"), r"no \.dvc folder; run in the project root, or run `dvc init`"),
    M(
        "no home folder",
        "run",
        nothing,
        r"uid-\d+: no home folder, .* set HOME to a writable folder",
        during=unknown_user,
    ),
    # the registry
    M("unknown task", "promote vqq", nothing, r"vqq: no such task; did you mean `vqa`"),
    M(
        "nothing is registered",
        "promote captioning",
        nothing,
        r"vlp-captioning: no challenger to promote; `dvc repro register`",
    ),
    M(
        "no network",
        "promote captioning",
        setting("tracking.uri", "http://127.0.0.1:9"),
        r"MLflow at http://127\.0\.0\.1:9 failed \(Max retries exceeded: no answer\); check that it is running",
        69,
    ),
    M(
        "database is text",
        "promote captioning",
        write("mlflow.db", "not a database" * 99),
        r"MLflow at .*mlflow\.db failed .*not a database",
        69,
    ),
    M("database is a folder", "promote captioning", folder("mlflow.db"), r"mlflow\.db", 69),
    M(
        "database is unreadable",
        "promote captioning",
        both(write("mlflow.db", ""), mode("mlflow.db", 0)),
        r"mlflow\.db: permission denied",
        69,
    ),
    M(
        "folder is read-only",
        "promote captioning",
        both(folder(".work/locks"), mode(".", 0o555)),
        r"permission denied",
        69,
    ),
    M(
        "disk is full",
        "promote captioning",
        remove("mlflow.db"),
        r"MLflow at .*check that its disk is neither full nor",
        69,
        lambda: file_size_limit(4096),
    ),
    M("no home folder", "promote captioning", nothing, r"uid-\d+: no home folder.*set HOME", during=unknown_user),
    M("ledger is damaged", "history captioning", write("promotions/ledger.jsonl", "{}\n"), r"ledger\.jsonl, line 1"),
    M("ledger is binary", "history captioning", write("promotions/ledger.jsonl", b"\xff\xfe\n"), r"ledger\.jsonl"),
    M(
        "ledger is unreadable",
        "history captioning",
        both(write("promotions/ledger.jsonl", ""), mode("promotions/ledger.jsonl", 0)),
        r"ledger\.jsonl: permission denied",
    ),
    M("ledger is a folder", "history captioning", folder("promotions/ledger.jsonl"), r"ledger\.jsonl: a folder, where"),
    M("nothing is registered", "lineage captioning", nothing, r"vlp-captioning: nothing registered; run `dvc repro`"),
    M("no home folder", "lineage captioning", nothing, r"no home folder", during=unknown_user),
    M("no such version", "verify vlp-vqa/3", nothing, r"vlp-vqa/3: no such version"),
    M("nothing to roll back", "rollback captioning", nothing, r"vlp-captioning"),
    M("unknown alias", "evaluate-alias captioning winner", nothing, r"winner"),
    # predictions
    M("image is missing", "caption nowhere.png", nothing, r"nowhere\.png: file not found"),
    M("image is a folder", "caption data", nothing, r"data: file not found"),
    M("nothing is registered", "caption data/raw/photos/0.png", nothing, r"vlp-captioning"),
    M(
        "text is missing",
        "predict vqa data/raw/photos/0.png",
        nothing,
        r"vlp predict vqa IMAGE TEXT: the text is missing",
    ),
    M(
        "no network",
        "caption data/raw/photos/0.png",
        setting("tracking.uri", "http://127.0.0.1:9"),
        r"check that it is running",
        69,
    ),
    M("three images", "judge 0.png 1.png 2.png true", nothing, r"vlp judge: got 3 images"),
    # new data
    M(
        "inbox is unreadable",
        "ingest",
        both(folder("data/inbox"), mode("data/inbox", 0)),
        r"data/inbox: permission denied",
    ),
    M("inbox is a file", "ingest", write("data/inbox", "x"), r"data/inbox"),
    M("batch without listing", "ingest", folder("data/inbox/monday"), r"data/inbox/monday", 0),
    M(
        "batch is UTF-16",
        "ingest",
        write("data/inbox/monday/pairs.csv", "image,caption\n".encode("utf-16")),
        r"pairs\.csv: UTF-16 text",
    ),
    M(
        "batch is unreadable",
        "ingest",
        both(write("data/inbox/monday/pairs.csv", "x"), mode("data/inbox/monday/pairs.csv", 0)),
        r"pairs\.csv.*permission denied",
    ),
    M(
        "index of another user",
        "ingest",
        give_away(".work/ingest/lock"),
        r"ingest/lock: permission denied: .* uid 12345",
    ),
    M(
        ".dvc file is missing",
        "ingest",
        setting("ingest.fetch", ["data/new.dvc"]),
        r"data/new\.dvc: not a \.dvc file of one folder",
    ),
    M("nothing trained yet", "drift", nothing, r"dvc repro training_stats", 0),
    M("reports are read-only", "drift", both(folder("reports"), mode("reports", 0o555)), r"reports.*permission denied"),
    M("not a terminal", "forget photos/1", nothing, r"not a terminal: pass --dry-run or --yes"),
    M("unknown image", "forget photos/99.png --dry-run", nothing, r"photos/99"),
    # checkpoints
    M(
        "weights are missing",
        "import-checkpoint none.bin --format bert --name tden",
        nothing,
        r"none\.bin: no such folder; it should hold model\.safetensors",
    ),
    M("weights are text", "import-checkpoint w.pth --format xmodaler-tden --name tden", write("w.pth", "x"), r"w\.pth"),
    M(
        "weights are unreadable",
        "import-checkpoint w.pth --format xmodaler-tden --name tden",
        both(write("w.pth", "x"), mode("w.pth", 0)),
        r"w\.pth.*permission denied",
    ),
    M("unknown format", "import-checkpoint w.pth --format berd --name tden", write("w.pth", "x"), r"berd"),
    M("unknown run", "verify-resume pretrain/none", nothing, r"none"),
    # checks
    M("data is missing", "doctor", remove("data/raw/photos"), r"`data\.photos\.root: data/raw/photos`: no such", 1),
    M("lock of another user", "doctor", give_away(".work/run.lock"), r"permissions .*run\.lock: permission denied", 1),
    M("no home folder", "doctor", nothing, r"account .*no home folder", 1, unknown_user),
    M("outside a project", "status", remove("params.yaml"), r"no params\.yaml here"),
    M("params.yaml is Latin-1", "status", encode("params.yaml", "latin-1"), r"not UTF-8 text", 0),
    M(
        "ledger is unreadable",
        "status",
        both(write("promotions/ledger.jsonl", ""), mode("promotions/ledger.jsonl", 0)),
        r"ledger\.jsonl: permission denied",
        0,
    ),
]
