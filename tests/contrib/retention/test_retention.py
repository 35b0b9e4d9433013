"""`vlp prune` in a real project: git, DVC with a remote, MLflow on SQLite, a ledger."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.common.environment import command_environment
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.retention import data as data_module
from vlp_models.contrib.retention import prune as prune_module
from vlp_models.contrib.retention.data import read_lock, require_whole, write_project
from vlp_models.contrib.retention.flow import prune_parts
from vlp_models.contrib.retention.prune import prune
from vlp_models.contrib.retention.versions import PRUNED, delete_files
from vlp_models.errors import DataError
from vlp_models.flows.parts import retrain_parts
from vlp_models.params import Params, load_params
from vlp_models.registry.client import connect
from vlp_models.registry.promotion.ledger import Ledger
from vlp_models.registry.versions import download_verified_bundle

DEFAULTS = Path(__file__).parents[3] / "params.yaml"
SIZE = 1000  # bytes of a version's files
TRACKED = ("dvc.lock", "dvc.yaml", "data/raw/pairs.dvc")
DVC = [sys.executable, "-m", "dvc"]


def run(root: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=root, env=command_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copy(DEFAULTS, tmp_path / "params.yaml")
    (tmp_path / "promotions").mkdir()
    (tmp_path / "reports").mkdir()
    return tmp_path


def settings(root: Path, **retention: Any) -> Params:
    raw = yaml.safe_load((root / "params.yaml").read_text())
    raw["retention"] |= retention
    (root / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    return load_params(root / "params.yaml")


def pruned(root: Path, *, dry: bool = False, **retention: Any) -> dict[str, tuple[int, int]]:
    params = settings(root, **retention)
    return {entry.kind: (entry.count, entry.bytes) for entry in prune(params, Workspace(root), dry=dry) if entry.count}


def register(root: Path, count: int, locks: dict[int, str] | None = None) -> Any:
    """Register versions 1 to `count` of vlp-vqa, each with one file; `locks`: number -> the dvc.lock it came from."""
    client = connect(settings(root).tracking, root)
    client.create_registered_model("vlp-vqa")
    experiment = client.search_experiments()[0].experiment_id
    for number in range(1, count + 1):
        run_id = client.create_run(experiment).info.run_id
        files = root / "files" / str(number)
        (files / "artifacts" / "bundle").mkdir(parents=True)
        (files / "artifacts" / "bundle" / "weights").write_bytes(bytes(SIZE))
        if lock := (locks or {}).get(number):
            client.log_text(run_id, lock, "lineage/dvc.lock")
        tags = {"content": f"content {number}"}
        client.create_model_version("vlp-vqa", files.as_uri(), run_id, tags=tags)
    return client


def with_files(root: Path) -> list[int]:
    return sorted(int(path.parents[2].name) for path in (root / "files").glob("*/artifacts/bundle/weights"))


def test_old_versions_lose_their_files_and_needed_ones_keep_them(root: Path) -> None:
    client = register(root, 8)
    client.set_registered_model_alias("vlp-vqa", "champion", "3")
    (root / "reports" / "registered.json").write_text(json.dumps({"vqa": [{"name": "vlp-vqa", "version": 4}]}))
    ledger = Ledger(root / "promotions" / "ledger.jsonl")
    with ledger.locked():  # a rollback from 3 goes to 1; 2 was withdrawn
        for action, number in (("promoted", 1), ("promoted", 2), ("rolled back", 1), ("promoted", 3)):
            ledger.append({"action": action, "model": "vlp-vqa", "version": number, "content": f"content {number}"})
    assert pruned(root, versions=2, dry=True) == {"registered versions": (3, 3 * SIZE)}
    (listed,) = (entry.names for entry in prune(settings(root, versions=2), Workspace(root), dry=True) if entry.names)
    assert sorted(listed) == ["vlp-vqa/2", "vlp-vqa/5", "vlp-vqa/6"]
    assert with_files(root) == list(range(1, 9))
    assert pruned(root, versions=2) == {"registered versions": (3, 3 * SIZE)}
    assert with_files(root) == [1, 3, 4, 7, 8]
    with pytest.raises(DataError, match=r"version 5: cannot read its files \(deleted by `vlp prune`\)"):
        download_verified_bundle(client.get_model_version("vlp-vqa", "5"))
    versions = {int(v.version): v.tags for v in client.search_model_versions("name='vlp-vqa'")}
    assert sorted(number for number, tags in versions.items() if PRUNED in tags) == [2, 5, 6]
    assert pruned(root, versions=2) == {}, "nothing is left to delete"
    (root / "files" / "2" / "artifacts").mkdir(parents=True)  # as an interrupted deletion may leave
    assert pruned(root, versions=2) == {"registered versions": (1, 0)} and not (root / "files" / "2").exists()
    assert pruned(root, versions=0) == {}


def test_an_interrupted_deletion_is_completed_by_the_next(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(root, 4)
    deleted: list[str] = []

    def interrupted(client: Any, version: Any) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(version.version)
        delete_files(client, version)

    monkeypatch.setattr(prune_module, "delete_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pruned(root, versions=1)
    assert len(with_files(root)) == 3
    monkeypatch.setattr(prune_module, "delete_files", delete_files)
    pruned(root, versions=1)
    assert with_files(root) == [4]


def write_data(root: Path, week: int) -> None:
    """Make an output from raw data as a stage of this week would, and commit both."""
    (root / "data" / "raw").mkdir(parents=True, exist_ok=True)
    (root / "data" / "raw" / "pairs").write_text(f"raw {week}")
    run(root, *DVC, "add", "-q", "data/raw/pairs")
    stage = {"cmd": f"echo {week} > data/shards", "outs": ["data/shards"], "deps": ["data/raw/pairs"]}
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"shards": stage}}))
    run(root, *DVC, "repro", "-q")
    run(root, "git", "add", "dvc.yaml", "dvc.lock", "data/raw/pairs.dvc")
    run(root, "git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", f"week {week}")


@pytest.mark.slow
def test_data_of_old_commits_goes_unless_a_version_that_keeps_its_files_needs_it(root: Path) -> None:
    run(root, "git", "init", "-q")
    run(root, *DVC, "init", "-q")
    (root / "data").mkdir()
    (root / "data" / "first").write_text("before the remote")
    run(root, *DVC, "add", "-q", "data/first")
    run(root, "git", "add", "data")
    run(root, "git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "before the remote")
    run(root, *DVC, "remote", "add", "-q", "-d", "store", str(root / "store"))
    run(root, "git", "add", ".dvc/config")
    # As the key of a bucket is kept. DVC itself cannot read the first commit then.
    run(root, *DVC, "remote", "modify", "-q", "--local", "store", "verify", "false")
    (root / ".gitignore").write_text(
        "/shared.git\n/data/shards\n/data/raw/pairs\n/store\n/files\n/mlflow.db\n/mlartifacts\n/.work\n"
    )
    locks = {}
    for week in range(1, 6):
        write_data(root, week)
        run(root, *DVC, "push", "-q")
        # As the stage of a group is named in the real file.
        locks[week] = (root / "dvc.lock").read_text().replace("  shards:", "  shards@all:")
    client = register(root, 5, locks)
    client.set_registered_model_alias("vlp-vqa", "champion", "2")
    assert not pruned(root, commits=9), "more commits than there are, also the one before the remote"

    def readable(command: str = "checkout") -> list[int]:
        """Return the weeks whose data DVC finds: in its cache, or with `pull` also in the remote."""
        found = []
        for week in range(1, 6):
            run(root, "git", "checkout", "-q", f"HEAD~{5 - week}", "--", *TRACKED)
            for name in ("shards", "raw/pairs"):
                (root / "data" / name).unlink(missing_ok=True)
            done = subprocess.run([*DVC, command, "-q"], cwd=root, env=command_environment(), capture_output=True)
            found += [week] if done.returncode == 0 else []
        run(root, "git", "checkout", "-q", "HEAD", "--", *TRACKED)
        run(root, *DVC, "checkout", "-q")
        return found

    assert readable() == [1, 2, 3, 4, 5]
    # Kept: the two newest commits, the newest version's data (week 5), the champion's (week 2).
    listed = pruned(root, dry=True, versions=1, commits=2)
    assert listed["files in DVC's cache"] == (4, 2 * 5 + 2 * 2) and readable() == [1, 2, 3, 4, 5]
    assert pruned(root, versions=1, commits=2)["registered versions"] == (3, 3 * SIZE)
    assert readable() == [2, 4, 5]
    assert readable("pull") == [1, 2, 3, 4, 5], "the remote has everything still"
    # A colleague has pushed a commit that is not here: its data must not go.
    run(root, "git", "clone", "-q", "--bare", ".", str(root / "shared.git"))
    run(root, "git", "remote", "add", "origin", str(root / "shared.git"))
    run(root, "git", "push", "-q", "origin", "HEAD~1:refs/heads/other", "HEAD:refs/heads/main")
    colleague = root / "files" / "colleague"
    run(root, "git", "clone", "-q", str(root / "shared.git"), str(colleague))
    identity = ("-c", "user.name=b", "-c", "user.email=b@example.org")
    run(colleague, "git", *identity, "commit", "-q", "--allow-empty", "-m", "theirs")
    run(colleague, "git", "push", "-q", "origin", "HEAD:refs/heads/theirs")
    with pytest.raises(DataError, match="commits that are not here"):
        pruned(root, versions=1, commits=2, remote=True)
    run(root, "git", "branch", "-q", "theirs", "origin/theirs")
    pruned(root, versions=1, commits=2, remote=True)
    assert readable("pull") == [2, 4, 5]


def test_a_remote_to_delete_from_must_exist_also_for_a_dry_run(root: Path) -> None:
    register(root, 2)
    run(root, "git", "init", "-q")
    run(root, *DVC, "init", "-q")
    with pytest.raises(DataError, match=r"retention\.remote: true, but DVC has no default remote; `dvc remote add"):
        pruned(root, dry=True, versions=1, commits=1, remote=True)
    with pytest.raises(DataError, match=r"set retention\.remote: false"):
        pruned(root, versions=1, commits=1, remote=True)
    assert with_files(root) == [1, 2], "nothing is deleted before"


def test_what_a_version_needs_must_be_known(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(root, "git", "init", "-q")
    run(root, *DVC, "init", "-q")
    run(root, "git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qam", "first", "--allow-empty")
    register(root, 1)
    with pytest.raises(DataError, match=r"vlp-vqa version 1: no dvc\.lock is kept"):
        pruned(root, commits=1)
    (root / "mlflow.db").unlink()
    ledger = Ledger(root / "promotions" / "ledger.jsonl")
    with ledger.locked():
        ledger.append({"action": "promoted", "model": "vlp-vqa", "version": 1, "content": "content 1"})
    with pytest.raises(DataError, match="the ledger has champions"):
        pruned(root, commits=1)
    lock = yaml.safe_dump({"stages": {"shards": {"outs": [{"path": "data/shards", "md5": f"{'ab' * 16}.dir"}]}}})
    with pytest.raises(DataError, match="data/shards of a kept version or commit: not in DVC's cache"):
        require_whole(root, [read_lock(lock)])
    monkeypatch.setattr(data_module, "dvc_files", lambda root: Path("/mnt/shared/cache/files/md5"))
    with pytest.raises(DataError, match="outside of the project"):
        write_project(root / "other", [], root)


def test_raw_data_is_kept_as_a_whole_though_a_stage_reads_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    deps = [{"path": f"data/raw/x{part}", "md5": "ab" * 16} for part in ("/images", "", "/texts")]
    lock = {"stages": {"prepare@x": {"deps": [*deps, {"path": "vlp_models/a.py", "md5": "cd" * 16}], "outs": []}}}
    write_project(tmp_path / "project", [read_lock(yaml.safe_dump(lock))], tmp_path)
    stage = yaml.safe_load((tmp_path / "project" / "0" / "dvc.yaml").read_text())["stages"]["kept"]
    assert stage["outs"] == ["data/raw/x"]


def test_old_submissions_states_and_logs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/inbox/done/monday", ".work/pretrain-gone/0123", ".work/pretrain-tden/0123", ".work/stack"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_bytes(bytes(100))
    log = root / ".work" / "stack" / "server.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b"first\n" + bytes(20 * 2**20) + b"last\n")
    freed = {"logs": (1, 19 * 2**20 + 11)}
    assert pruned(root, days=7) == freed, "younger than a week"
    os.write(descriptor, b"then\n")
    text = log.read_bytes()
    assert len(text) == 2**20 + 5 and text.endswith(b"last\nthen\n")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86400)
    assert pruned(root, days=7) == {"ingested submissions": (1, 100), "states of removed runs": (1, 100)}
    assert (root / ".work" / "pretrain-tden" / "0123" / "file").exists()


def test_the_flow_prunes_only_if_params_say_so(root: Path) -> None:
    assert prune_parts(settings(root)) == []
    assert retrain_parts(settings(root, commits=4))[-1].command == ("prune",)
