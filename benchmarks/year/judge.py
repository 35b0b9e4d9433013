"""Judge a week of the year. Imports nothing of the package: it reads files, calls servers and serves models.

    python judge.py CONTEXT       CONTEXT is the JSON file that year.py writes; prints the checks as JSON

Each check is a question about the week, with the evidence if the answer is no. `truth.json` in the work folder has, of
every version, the captions of images that no drop has and their CIDEr: the judge's own opinion about which is better.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

MODEL = "vlp-captioning"
PRIVATE, HUGE = 400, 300  # images of the judge's test set, and behind them in the pool those of a huge drop
# Drops that are no data of the project, and words of the message about them. Another language is refused if the
# vocabulary has no room for it; else the drift is reported, and a person removes the batch.
REJECTED = {
    "damaged": ("pairs are bad",),
    "empty": ("has no pairs",),
    "another language": ("the vocabulary loses marks or words", "new pairs differ from the training data"),
}
MOVES = ("promoted", "rolled back", "withdrawn", "accepted")
RESAMPLES = 2000
ALIKE = 12  # of 64 bits of `look`; two images that have nothing in common differ in about 32
ENDING = 60  # seconds in which the processes of a completed flow end
SERVE = """
import json, sys
import mlflow.pyfunc, pandas
model = mlflow.pyfunc.load_model(f"models:/{sys.argv[1]}/{sys.argv[2]}")
images = json.loads(sys.stdin.read())
rows = []
for n in range(0, len(images), 50):  # it refuses a request of more than 64
    rows += model.predict(pandas.DataFrame({"image": images[n : n + 50]}))
print("\\n" + json.dumps([row["caption"] for row in rows]))
"""


class Judge:
    def __init__(self, context: dict[str, Any]) -> None:
        self.context = context
        self.work, self.project = Path(context["work"]), Path(context["project"])
        self.number: int = context["week"]
        self.week: dict[str, Any] = context["plan"][self.number - 1]
        self.checks: list[dict[str, Any]] = []
        self.measured: dict[str, Any] = {}
        self.chance = random.Random(self.number)

    def check(self, name: str, problems: list[str]) -> None:
        self.checks.append({"check": name, "ok": not problems, "detail": "; ".join(problems[:5])[:1500]})

    def judge(self) -> dict[str, Any]:
        for look in (
            *(self.look_at_flows, self.look_at_data, self.look_at_reports, self.look_at_ledger, self.look_at_champion),
            *(
                self.look_at_git,
                self.look_at_remote,
                self.look_at_mlflow,
                self.look_at_litter,
                self.look_at_earlier_week,
            ),
        ):
            try:
                look()
            except Exception as error:  # the judge's own fault or something that it cannot read: never a pass
                self.check(look.__name__.removeprefix("look_at_"), [f"{type(error).__name__}: {error}"])
        self.measure()
        return {"checks": self.checks, **self.measured}

    # -- what the flow did -------------------------------------------------------------------------------------------

    def look_at_flows(self) -> None:
        """The last flow completed; none is left at work."""
        flows = self.context["flows"]
        problems = [] if flows and flows[-1]["state"] == "COMPLETED" else [f"the flows ended {flows}"]
        open_states = ["RUNNING", "PENDING", "PAUSED", "CANCELLING"]  # Prefect's words; plain-ok
        body = {"flow_runs": {"state": {"type": {"any_": open_states}}}}
        problems += [f"{run['name']} is {run['state_type']}" for run in self.prefect("/flow_runs/filter", body)]
        unplanned = len(flows) > 1 and not self.expects_failure()
        self.check("flows", problems + ([f"a second flow was needed: {flows}"] if unplanned else []))

    def expects_failure(self) -> bool:
        return self.week["drop"] in REJECTED or bool(self.week["fault"])

    def look_at_data(self) -> None:
        """Nothing is lost or there twice: every image of every drop has the fate that was planned."""
        fates = self.fates()
        count = collections.Counter(
            hash_file(file) for file in (self.project / "data" / "accepted").glob("*/images/**/*.*")
        )
        validated, quarantined = self.validated()
        withdrawn = {hashlib.sha256(bytes.fromhex(image)).hexdigest() for image in self.context["withdrawn"]}
        problems = []
        for fate in fates:
            image, expected = fate["sha256"], fate["fate"]
            where = f"week {fate['week']}, {fate['image']} ({expected})"
            if expected != "new":
                # A leaked crop that ingestion does not recognize must be found by validation.
                if image in validated and image not in withdrawn:
                    problems.append(f"{where}: is in the validated data")
                if expected == "withdrawn" and count[image] > 1:
                    problems.append(f"{where}: accepted again")
            elif count[image] != 1 and not (count[image] == 0 and self.is_taken_for_withdrawn(fate)):
                problems.append(f"{where}: accepted {count[image]} times")
            elif count[image] == 0:
                self.measured["taken for withdrawn"] = self.measured.get("taken for withdrawn", 0) + 1
            elif image in withdrawn and image in validated:
                problems.append(f"{where}: was withdrawn, and is in the validated data")
            elif image not in withdrawn and validated[image] != 1 and image not in quarantined:
                problems.append(f"{where}: {validated[image]} times in the validated data, and not in quarantine")
        self.check("data", problems)

    def is_taken_for_withdrawn(self, fate: dict[str, Any]) -> bool:
        """Return whether a new image was rejected as a withdrawn one, with that reason, and looks like one.

        Ingestion compares perceptual hashes, so of a thousand scenes of a few shapes, one may be too close.
        """
        file = self.work / "taken-for-withdrawn.json"  # a submission is deleted after a month
        known = read_json(file) or []
        if fate["sha256"] not in known:
            week = f"week-{fate['week']:02}"
            report = self.project / "reports" / "ingest" / f"{week}.jsonl"
            rows = [json.loads(line) for line in report.read_text().splitlines()]
            reported = any(r["image"] == fate["image"] and r["rule"] == "image_withdrawn" for r in rows)
            image = self.project / "data" / "inbox" / "done" / week / fate["image"]
            prints = [look(bytes.fromhex(withdrawn)) for withdrawn in self.context["withdrawn"]]
            if not reported or min((look(image.read_bytes()) ^ p).bit_count() for p in prints) > ALIKE:
                return False
            file.write_text(json.dumps([*known, fate["sha256"]]))
        return True

    def fates(self) -> list[dict[str, Any]]:
        """Return the fates of the images of all drops; of a drop that was written twice, the last."""
        latest = {}
        for line in (self.work / "fates.jsonl").read_text().splitlines():
            fate = json.loads(line)
            latest[fate["week"], fate["image"]] = fate
        return list(latest.values())

    def validated(self) -> tuple[collections.Counter[str], set[str]]:
        """Return sha256 -> rows of images in the validated data, and the images in its quarantine."""
        import pyarrow.parquet as parquet

        folder = self.project / "data" / "validated"
        table = parquet.read_table(folder / "images.parquet", columns=["source", "sha256"]).to_pylist()
        rows = [row["sha256"] for row in table if row["source"] == "ingested"]
        images = {row["image_id"]: row["sha256"] for row in self.interim()}
        bad = parquet.read_table(folder / "quarantine.parquet").to_pylist()
        return collections.Counter(rows), {images[row["row_id"]] for row in bad if row["row_id"] in images}

    def interim(self) -> list[dict[str, Any]]:
        import pyarrow.parquet as parquet

        file = self.project / "data" / "interim" / "ingested" / "images.parquet"
        return list(parquet.read_table(file, columns=["image_id", "sha256"]).to_pylist()) if file.exists() else []

    # -- what it reported --------------------------------------------------------------------------------------------

    def look_at_reports(self) -> None:
        """Every planted fault is reported, once, in words that name it; and nothing else is reported as bad."""
        messages = [json.loads(line) for line in (self.work / "messages.jsonl").read_text().splitlines()]
        sent = [m for m in messages if m["time"] >= self.context["started"] - 1 or self.week["fault"] == "clock jumps"]
        sent = sent[-12:]
        problems = self.missing_reports(sent)
        self.measured["messages"] = [f"{m['state']}: {m['subject']}" for m in sent]
        self.check("reports", problems)

    def missing_reports(self, sent: list[dict[str, Any]]) -> list[str]:
        problems = []
        failed = [m for m in sent if m["state"] in ("Failed", "Crashed")]
        words = self.context["reported"].get(self.week["fault"], ())
        if words:
            naming = [m for m in sent if any(word.lower() in m["text"].lower() for word in words)]
            # A kill that no stage was running for is a fault that did not strike; the driver's log has it.
            states = {"worker killed": ("Lost",), "server killed": ("Lost",)}.get(self.week["fault"])
            naming = [m for m in naming if states is None or m["state"] in states]
            if len(naming) != 1:
                problems.append(f"{self.week['fault']}: {len(naming)} messages with {words}")
        if phrases := REJECTED.get(self.week["drop"]):
            naming = [message for message in sent if any(phrase in message["text"] for phrase in phrases)]
            if len(naming) != 1:
                problems.append(f"{self.week['drop']}: {len(naming)} messages with {phrases}")
        rejected = self.project / "reports" / "ingest" / f"week-{self.number:02}.jsonl"
        drift = read_json(self.project / "reports" / "drift.json") or {}
        planned_drift = self.week["drop"] == "drifted"
        if planned_drift != bool(drift.get("drifted")) and self.week["drop"] not in REJECTED:
            names = [m["name"] for m in drift.get("measures", []) if m.get("drifted")]
            problems.append(f"drift is {'not ' if planned_drift else ''}reported: {names}")
        if self.week["drop"] == "leaked" and '"leak"' not in rejected.read_text():
            problems.append("no leak is reported")
        expected = bool(words) or self.week["drop"] in REJECTED or bool(self.week["fault"])
        if failed and not expected:
            problems.append(f"failed without a planted fault: {failed[0]['message'][-300:]}")
        return problems

    # -- decisions ---------------------------------------------------------------------------------------------------

    def look_at_ledger(self) -> None:
        """Its hashes are right, and it continues that of the week before."""
        lines = (self.project / "promotions" / "ledger.jsonl").read_bytes().splitlines()
        problems, previous = [], "0" * 64
        for number, line in enumerate(lines, 1):
            entry = json.loads(line)
            content = {key: value for key, value in entry.items() if key != "hash"}
            text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
            if (entry["seq"], entry["previous"]) != (number, previous) or entry["hash"] != hashlib.sha256(
                text
            ).hexdigest():
                problems.append(f"line {number} does not continue the line before")
            previous = entry["hash"]
        before = self.work / "ledger-before.jsonl"
        if before.exists() and lines[: len(before.read_bytes().splitlines())] != before.read_bytes().splitlines():
            problems.append("lines of the week before have changed")
        before.write_bytes(b"".join(line + b"\n" for line in lines))
        self.check("ledger", problems)

    def entries(self) -> list[dict[str, Any]]:
        text = (self.project / "promotions" / "ledger.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def look_at_champion(self) -> None:
        """The champion is what the ledger states, and no promotion is wrong by the judge's own test set."""
        moves = [entry for entry in self.entries() if entry["action"] in MOVES]
        alias = self.alias("champion")
        problems = [] if str(moves[-1]["version"]) == alias else [f"alias {alias}, ledger {moves[-1]['version']}"]
        seen = self.work / "judged-entries.json"
        known = set(read_json(seen) or [])
        decisions = []
        for number, entry in enumerate(self.entries()):
            if entry["hash"] in known or entry["version"] is None:
                continue
            earlier = [e for e in self.entries()[:number] if e["action"] in MOVES]
            decisions.append(self.judge_decision(entry, str(earlier[-1]["version"]) if earlier else ""))
        problems += [decision["problem"] for decision in decisions if decision["problem"]]
        seen.write_text(json.dumps([entry["hash"] for entry in self.entries()]))
        self.measured |= {"decisions": decisions, "champion": alias, "truth": self.truth(alias)["CIDEr"]}
        self.check("champion", problems)

    def judge_decision(self, entry: dict[str, Any], champion: str) -> dict[str, Any]:
        """Compare a decision of the gate with the judge's own comparison, on images that no drop has."""
        version, outcome = str(entry["version"]), entry.get("decision", {}).get("outcome") or ""
        decision = {"action": entry["action"], "outcome": outcome, "version": version, "problem": ""}
        if not champion or champion == version:
            return decision
        ours, theirs = self.truth(version)["items"], self.truth(champion)["items"]
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        low, mean, high = bootstrap(differences, self.chance)
        decision |= {"gain": mean, "low": low, "high": high}
        if entry["action"] == "promoted" and high < 0:
            decision["problem"] = f"version {version} was promoted, and is worse: {low:.1f} to {high:.1f}"
        return decision

    def truth(self, version: str) -> dict[str, Any]:
        """Return the captions of a version for the judge's images, and their CIDEr; each version is served once."""
        file = self.work / "truth.json"
        known = read_json(file) or {}
        if version not in known:
            captions = self.serve(version, Path(self.context["package"]))
            known[version] = {"captions": captions, **cider(captions, self.references())}
            file.write_text(json.dumps(known))
        return dict(known[version])

    def images(self) -> list[Path]:
        return sorted((self.work / "pool" / "images").iterdir())[-HUGE - PRIVATE : -HUGE]

    def references(self) -> list[list[str]]:
        rows = json.loads((self.work / "pool" / "annotations" / "captions_scenes.json").read_text())["annotations"]
        by_image = collections.defaultdict(list)
        for row in rows:
            by_image[row["image_id"]].append(row["caption"])
        return [by_image[image_id] for image_id in sorted(by_image)][-HUGE - PRIVATE : -HUGE]

    def serve(self, version: str, package: Path) -> list[str]:
        images = [base64.b64encode(image.read_bytes()).decode() for image in self.images()]
        env = os.environ | {
            "MLFLOW_TRACKING_URI": self.context["mlflow"],
            "PYTHONPATH": str(package),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SERVE, MODEL, version]
        done = subprocess.run(command, input=json.dumps(images), env=env, capture_output=True, text=True, cwd=self.work)
        if done.returncode:
            raise RuntimeError(f"version {version} cannot be served: {done.stderr[-600:]}")
        return list(json.loads(done.stdout.splitlines()[-1]))

    # -- git, DVC, MLflow --------------------------------------------------------------------------------------------

    def look_at_git(self) -> None:
        """Everything of the week is committed, and the remote has the commit."""
        head, remote = git(self.project, "rev-parse", "HEAD"), git(Path(self.context["origin"]), "rev-parse", "main")
        problems = [] if head == remote else [f"HEAD is {head[:8]}, the remote's main {remote[:8]}"]
        changed = git(
            self.project, "status", "--porcelain", "--", "dvc.lock", "params.yaml", "promotions", "data/accepted"
        )
        problems += [f"not committed: {line}" for line in changed.splitlines()]
        commits = read_json(self.work / "commits.json") or {}
        commits[str(self.number)] = {"commit": head, "champion": self.alias("champion")}
        (self.work / "commits.json").write_text(json.dumps(commits))
        self.check("git", problems)

    def look_at_remote(self) -> None:
        """The DVC remote has every file that the commit names."""
        self.check("remote", [f"{name} is not in the bucket" for name in self.missing_in_bucket(self.project)])

    def missing_in_bucket(self, folder: Path) -> Iterator[str]:
        client, present = self.s3(), set()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="data", Prefix="cache/files/md5/"):
            present |= {
                item["Key"].removeprefix("cache/files/md5/").replace("/", "") for item in page.get("Contents", ())
            }
        for path, md5 in recorded_outs(folder):
            if md5 not in present:
                yield path
            elif md5.endswith(".dir"):
                body = client.get_object(Bucket="data", Key=f"cache/files/md5/{md5[:2]}/{md5[2:]}")["Body"].read()
                yield from (f"{path}/{item['relpath']}" for item in json.loads(body) if item["md5"] not in present)

    def s3(self) -> Any:
        import boto3

        key, secret = self.context["data_key"]
        names = {"aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.context["endpoint"], **names)

    def look_at_mlflow(self) -> None:
        """No run is open, and no content is registered twice."""
        experiments = self.mlflow("experiments/search", {"max_results": 100})["experiments"]
        body = {"experiment_ids": [e["experiment_id"] for e in experiments], "filter": "attributes.status = 'RUNNING'"}
        runs = self.mlflow("runs/search", body | {"max_results": 100}).get("runs", [])
        problems = [f"run {run['info'].get('run_name')} is RUNNING" for run in runs]
        versions, token = [], ""
        while True:
            query = urllib.parse.urlencode({"filter": f"name='{MODEL}'", "max_results": 200, "page_token": token})
            answer = self.mlflow(f"model-versions/search?{query}")
            versions += answer.get("model_versions", [])
            token = answer.get("next_page_token", "")
            if not token:
                break
        tags = [{tag["key"]: tag["value"] for tag in version.get("tags", ())} for version in versions]
        contents = collections.Counter(tag["content"] for tag in tags if "content" in tag)
        problems += [f"{count} versions have content {content[:8]}" for content, count in contents.items() if count > 1]
        self.measured["versions"] = len(versions)
        self.check("mlflow", problems)

    def alias(self, name: str) -> str:
        query = urllib.parse.urlencode({"name": MODEL, "alias": name})
        return str(self.mlflow(f"registered-models/alias?{query}")["model_version"]["version"])

    # -- another machine ---------------------------------------------------------------------------------------------

    def look_at_earlier_week(self) -> None:
        """Another clone pulls the data of a week drawn by chance, file by file, and serves its champion equally."""
        if self.number % 4 and self.number != len(self.context["plan"]):
            return
        commits = read_json(self.work / "commits.json") or {}
        number = self.chance.choice(sorted(week for week in commits if int(week) < self.number))
        folder = Path(tempfile.mkdtemp(prefix="clone-", dir=self.work))
        try:
            problems = self.problems_of_clone(folder / "clone", commits[number]["commit"])
        finally:
            shutil.rmtree(folder)
        champion = commits[number]["champion"]
        if self.serve(champion, Path(self.context["package"])) != self.truth(champion)["captions"]:
            problems.append(f"champion {champion} answers differently")
        self.measured["pulled_week"] = int(number)
        self.check("earlier week", [f"week {number}: {problem}" for problem in problems])

    def problems_of_clone(self, clone: Path, commit: str) -> list[str]:
        """Clone, pull as a colleague does, and hash what arrived."""
        git(self.work, "clone", "--quiet", self.context["origin"], str(clone))
        git(clone, "checkout", "--quiet", commit)
        key, secret = self.context["data_key"]
        (clone / ".dvc" / "config.local").write_text(
            f"['remote \"store\"']\n    access_key_id = {key}\n    secret_access_key = {secret}\n"
        )
        env = os.environ | {"DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(clone.parent / "site")}
        done = subprocess.run(
            [sys.executable, "-m", "dvc", "pull", "--quiet"], cwd=clone, env=env, capture_output=True, text=True
        )
        problems = [f"dvc pull: {done.stderr[-400:]}"] if done.returncode else []
        for path, md5 in recorded_outs(clone):
            if dvc_hash(clone / path) != md5:
                problems.append(f"{path} is not what was recorded")
        return problems

    # -- what grows --------------------------------------------------------------------------------------------------

    def look_at_litter(self) -> None:
        """No half-written file and no process without a parent in the record is left."""
        problems = [str(path.relative_to(self.project)) for path in self.project.rglob("*.partial")]
        deadline = time.monotonic() + ENDING
        while (left := self.working_processes()) and time.monotonic() < deadline:
            time.sleep(1)
        self.check("litter", problems + [f"still running: {words[:200]}" for words in left])

    def working_processes(self) -> list[str]:
        """Return the commands of processes that end with their flow."""
        commands = []
        for process in self.processes():
            with suppress(psutil.Error):
                commands.append(" ".join(process.cmdline()))
        of_flow = (" stage ", "prefect.engine", "supervise")
        return [words for words in commands if any(name in words for name in of_flow)]

    def processes(self) -> Iterator[psutil.Process]:
        mark = f"VLP_YEAR={self.work}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, psutil.Error):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield psutil.Process(int(folder.name))

    def measure(self) -> None:
        """Measure bytes on disk by part, and the memory of what runs all year."""
        import boto3

        parts = {".dvc/cache": "cache", "data": "data", ".work/stack": "prefect", ".work": "work", ".git": "git"}
        disk: collections.Counter[str] = collections.Counter()
        seen = set()
        for folder, _, files in os.walk(self.project):
            relative = f"{Path(folder).relative_to(self.project)}/"
            part = next((name for top, name in parts.items() if relative.startswith(f"{top}/")), "other")
            for file in files:
                with suppress(OSError):
                    status = (Path(folder) / file).lstat()
                    if status.st_ino not in seen:  # a link into the cache counts once
                        seen.add(status.st_ino)
                        disk[part] += status.st_blocks * 512
        keys = {"aws_access_key_id": "models", "aws_secret_access_key": "secret-of-models", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=self.context["endpoint"], **keys)
        for bucket, part in (("models", "artifacts"), ("data", "archive")):
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
                disk[part] += sum(item["Size"] for item in page.get("Contents", ()))
        disk["database"] = self.context["database_bytes"]
        memory: collections.Counter[str] = collections.Counter()
        record = read_json(self.project / ".work" / "stack" / "record.json") or {}
        pids = {name: entry["pid"] for name, entry in record.items() if isinstance(entry, dict) and "pid" in entry}
        for name, pid in {**pids, **self.context["services"]}.items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                memory[name] = sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
        self.measured |= {"disk": dict(disk), "memory": dict(memory), "images": self.count_images()}

    def count_images(self) -> int:
        """Return the number of validated images: features, shards and their copies in the cache grow with it."""
        import pyarrow.parquet as parquet

        return int(parquet.read_metadata(self.project / "data" / "validated" / "images.parquet").num_rows)

    def prefect(self, path: str, body: Any) -> Any:
        return call(f"http://127.0.0.1:{self.context['prefect']}/api{path}", body)

    def mlflow(self, path: str, body: Any = None) -> Any:
        return call(f"{self.context['mlflow']}/api/2.0/mlflow/{path}", body)


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
    ) as answer:
        return json.loads(answer.read())


def read_json(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def look(content: bytes) -> int:
    """Return 64 bits that similar images share: which of the lowest frequencies are above their median."""
    import io

    import numpy as np
    from PIL import Image
    from scipy.fft import dctn

    pixels = np.asarray(Image.open(io.BytesIO(content)).convert("L").resize((32, 32)), dtype=float)
    low = dctn(pixels)[:8, :8].ravel()
    return sum(1 << place for place, above in enumerate(low > np.median(low)) if above)


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def recorded_outs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield path and md5 of every output in dvc.lock and in the .dvc files of a commit."""
    lock = yaml.safe_load(git(folder, "show", "HEAD:dvc.lock"))
    for stage in lock["stages"].values():
        yield from ((out["path"], out["md5"]) for out in stage.get("outs", ()))
    for name in git(folder, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
        if name.endswith(".dvc"):
            for out in yaml.safe_load(git(folder, "show", f"HEAD:{name}"))["outs"]:
                yield str(Path(name).parent / out["path"]), out["md5"]


def hash_file(file: Path, how: str = "sha256") -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, how).hexdigest()


def dvc_hash(path: Path) -> str:
    """Return the md5 that DVC records for a file or a folder; empty: it is missing."""
    if not path.is_dir():
        return hash_file(path, "md5") if path.exists() else ""
    files = [
        {"md5": hash_file(file, "md5"), "relpath": file.relative_to(path).as_posix()}
        for file in path.rglob("*")
        if file.is_file()
    ]
    listing = json.dumps(sorted(files, key=lambda item: item["relpath"]), sort_keys=True)
    return hashlib.md5(listing.encode()).hexdigest() + ".dir"


def cider(captions: list[str], references: list[list[str]]) -> dict[str, Any]:
    """Return CIDEr-D by pycocoevalcap, on words of letters only, and that of each image (times 100)."""
    from pycocoevalcap.cider.cider import Cider

    def plain(text: str) -> str:
        return " ".join(re.findall(r"[a-z]+", text.lower()))

    gold = {number: [plain(text) for text in texts] for number, texts in enumerate(references)}
    score, items = Cider().compute_score(gold, {number: [plain(text)] for number, text in enumerate(captions)})
    return {"CIDEr": 100 * float(score), "items": [100 * float(item) for item in items]}


def bootstrap(differences: list[float], chance: random.Random) -> tuple[float, float, float]:
    """Return the mean with the limits of its 95% interval."""
    n = len(differences)
    means = sorted(sum(chance.choices(differences, k=n)) / n for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], sum(differences) / n, means[int(0.975 * RESAMPLES) - 1]


if __name__ == "__main__":
    print(json.dumps(Judge(json.loads(Path(sys.argv[1]).read_text())).judge()))
