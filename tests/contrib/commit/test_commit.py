"""`vlp commit` in real repositories: git with hooks, signing and remotes, DVC with a remote in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlp_models.common.environment import command_environment
from vlp_models.contrib.commit.commit import RemoteError, commit_run, push_run
from vlp_models.contrib.commit.flow import commit_parts
from vlp_models.errors import DataError, MissingToolError
from vlp_models.flows.parts import LAST_PARTS, retrain_parts
from vlp_models.params import Params, load_params
from vlp_models.registry.promotion.ledger import Ledger

DEFAULTS = Path(__file__).parents[3] / "params.yaml"


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project after a run: a first commit, then another dvc.lock, and a promotion in the ledger."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    git(tmp_path, "config", "--global", "user.email", "someone@example.org")
    git(tmp_path, "config", "--global", "user.name", "Someone")
    git(tmp_path, "config", "--global", "init.defaultBranch", "main")
    root = tmp_path / "project"
    (root / "promotions").mkdir(parents=True)
    git(root, "init", "--quiet")
    shutil.copy(DEFAULTS, root / "params.yaml")
    (root / "promotions" / "ledger.jsonl").write_text("")
    (root / ".gitignore").write_text("/promotions/.*\n")
    (root / "notes.md").write_text("first\n")
    write_lock(root, features="1", report="1")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    write_lock(root, features="2", report="1")
    ledger = Ledger(root / "promotions" / "ledger.jsonl")
    with ledger.locked():
        ledger.append({"action": "promoted", "task": "captioning", "model": "vlp-captioning", "version": 3})
    return root


def write_lock(root: Path, **stages: str) -> None:
    entries = "".join(f"  {name}:\n    cmd: '{text}'\n" for name, text in stages.items())
    (root / "dvc.lock").write_text(f"stages:\n{entries}")


def defaults(root: Path) -> Params:
    return load_params(root / "params.yaml")


def vlp_commit(root: Path) -> int:
    return subprocess.run(["vlp", "commit"], cwd=root, env=command_environment(), capture_output=True).returncode


def add_remote(root: Path) -> Path:
    remote = root.parent / "remote.git"
    git(root.parent, "init", "--quiet", "--bare", str(remote))
    git(root, "remote", "add", "origin", str(remote))
    git(root, "push", "--quiet", "--set-upstream", "origin", "main")
    return remote


def test_only_the_files_of_a_run_are_committed_with_its_decisions_in_the_message(project: Path) -> None:
    (project / "notes.md").write_text("staged by a person\n")
    git(project, "add", "notes.md")
    (project / "notes.md").write_text("and edited since\n")
    assert commit_run(defaults(project), project).startswith("committed dvc.lock, promotions/ledger.jsonl as ")
    assert git(project, "show", "--name-only", "--format=", "HEAD").split() == ["dvc.lock", "promotions/ledger.jsonl"]
    message = git(project, "log", "-1", "--format=%B")
    assert message.splitlines()[0] == "vlp: promoted captioning version 3" and "stages: features" in message
    assert git(project, "show", ":notes.md") == "staged by a person"
    assert (project / "notes.md").read_text() == "and edited since\n"
    assert commit_run(defaults(project), project) == "nothing to commit"


def test_the_subject_of_a_message_is_not_cut_off_in_a_list_and_names_what_changed(project: Path) -> None:
    (project / "promotions" / "ledger.jsonl").write_text("")
    write_lock(project, **{f"finetune_of_a_run_{number}": "1" for number in range(9)})
    commit_run(defaults(project), project)
    subject, _, body = git(project, "log", "-1", "--format=%B").partition("\n")
    assert subject == "vlp: stages: " + ", ".join(f"finetune_of_a_run_{number}" for number in range(3)) + " and 6 more"
    assert "finetune_of_a_run_8" in body
    with (project / "params.yaml").open("a") as file:
        file.write("# a comment\n")
    commit_run(defaults(project), project)
    assert git(project, "log", "-1", "--format=%s") == "vlp: params.yaml"


def test_a_service_without_an_identity_commits_under_the_project_s_name(project: Path, tmp_path: Path) -> None:
    (tmp_path / "gitconfig").unlink()
    commit_run(defaults(project), project)
    assert git(project, "log", "-1", "--format=%an %ae").startswith("vlp vlp@")


def test_a_detached_head_gets_a_branch_of_its_own(project: Path) -> None:
    first = git(project, "rev-parse", "--short", "HEAD")
    for lock in ("2", "3"):  # the second time the branch exists already, with a commit that must stay
        git(project, "checkout", "--quiet", "--force", "--detach", first)
        write_lock(project, features=lock, report="1")
        commit_run(defaults(project), project)
        assert git(project, "branch", "--show-current").startswith(f"vlp-runs/{first}")
    assert len(git(project, "branch", "--list", "vlp-runs/*").splitlines()) == 2


def test_an_unfinished_merge_a_conflict_and_a_secret_are_refused(project: Path) -> None:
    git(project, "commit", "--quiet", "--all", "--message", "ours")
    git(project, "switch", "--quiet", "--create", "other", "HEAD~")
    write_lock(project, features="4", report="1")
    git(project, "commit", "--quiet", "--all", "--message", "theirs")
    subprocess.run(["git", "merge", "main"], cwd=project, capture_output=True)
    with pytest.raises(DataError, match="unfinished"):
        commit_run(defaults(project), project)
    git(project, "merge", "--abort")
    params = defaults(project)
    text = (project / "params.yaml").read_text()
    hook = "webhook: https://hooks.example.org/T0/abc"
    (project / "presets").mkdir()
    (project / "presets" / "own.yaml").write_text(f"trainer: {{devices: 1}}\nflow: {{{hook}}}\n")
    with pytest.raises(DataError, match=r"own\.yaml:2: a secret"):
        commit_run(params, project)
    (project / "presets" / "own.yaml").unlink()
    (project / "params.yaml").write_text(text.replace('webhook: ""', hook))
    with pytest.raises(DataError, match="env:NAME"):
        commit_run(params, project)


def test_what_is_staged_and_undone_in_the_working_tree_is_nothing_to_commit(project: Path) -> None:
    commit_run(defaults(project), project)
    before = (project / "dvc.lock").read_text()
    write_lock(project, features="9", report="9")
    git(project, "add", "dvc.lock")
    (project / "dvc.lock").write_text(before)
    assert commit_run(defaults(project), project) == "nothing to commit"


def test_a_batch_is_named_in_the_message_as_it_is(project: Path) -> None:
    batch = project / "data" / "accepted" / "wöche.dvc"
    batch.parent.mkdir(parents=True)
    batch.write_text("outs: []\n")
    commit_run(defaults(project), project)
    assert "new data: wöche" in git(project, "log", "-1", "--format=%B")
    batch.unlink()
    commit_run(defaults(project), project)
    assert "removed data: wöche" in git(project, "log", "-1", "--format=%B")


def test_a_branch_that_follows_another_one_is_pushed_under_its_own_name(project: Path) -> None:
    remote = add_remote(project)
    before = git(remote, "rev-parse", "main")
    git(project, "switch", "--quiet", "--create", "experiment", "--track", "origin/main")
    commit_run(defaults(project), project)
    assert push_run(project)[1] is False
    assert git(remote, "rev-parse", "main") == before
    assert git(remote, "rev-parse", "experiment") == git(project, "rev-parse", "HEAD")


def test_the_ssh_command_of_a_deploy_key_is_used(project: Path) -> None:
    git(project, "remote", "add", "origin", "ssh://git@host.invalid/x.git")
    script = project.parent / "ssh"
    script.write_text("#!/bin/sh\necho own ssh command >&2\nexit 1\n")
    script.chmod(0o755)
    git(project, "config", "core.sshCommand", str(script))
    commit_run(defaults(project), project)
    with pytest.raises(RemoteError, match="own ssh command"):
        push_run(project)


def test_a_failed_hook_and_a_failed_signature_are_reported_in_their_words(project: Path) -> None:
    hook = project / ".git" / "hooks" / "pre-commit"
    hook.write_text("#!/bin/sh\necho the ledger is too long >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(DataError, match="git commit: the ledger is too long"):
        commit_run(defaults(project), project)
    hook.unlink()
    for setting in (("commit.gpgSign", "true"), ("gpg.format", "ssh"), ("user.signingKey", "no-such-key.pub")):
        git(project, "config", *setting)
    with pytest.raises(DataError, match=r"git commit: .*no-such-key\.pub"):
        commit_run(defaults(project), project)
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(project.parent / "key")], check=True)
    git(project, "config", "user.signingKey", str(project.parent / "key.pub"))
    commit_run(defaults(project), project)
    assert "BEGIN SSH SIGNATURE" in git(project, "cat-file", "commit", "HEAD")


def test_the_lock_of_a_killed_git_is_removed_and_that_of_a_running_one_is_not(project: Path) -> None:
    lock = project / ".git" / "index.lock"
    lock.touch()
    with pytest.raises(DataError, match=r"index\.lock: another git"):
        commit_run(defaults(project), project)
    old = time.time() - 4000
    os.utime(lock, (old, old))
    assert commit_run(defaults(project), project).startswith("committed")


def test_a_commit_that_a_remote_did_not_get_goes_with_the_next_one(project: Path) -> None:
    remote = add_remote(project)
    commit_run(defaults(project), project)
    remote.rename(remote.with_name("away.git"))
    with pytest.raises(RemoteError, match="next run pushes again"):
        push_run(project)
    remote.with_name("away.git").rename(remote)
    assert commit_run(defaults(project), project) == "nothing to commit"
    assert push_run(project) == (
        "no default DVC remote, so the data is on this machine only; main pushed to origin",
        False,
    )
    assert git(remote, "rev-parse", "main") == git(project, "rev-parse", "HEAD")


def test_what_a_person_pushed_meanwhile_is_neither_lost_nor_pulled(project: Path, tmp_path: Path) -> None:
    remote = add_remote(project)
    git(tmp_path, "clone", "--quiet", str(remote), "other")
    (tmp_path / "other" / "notes.md").write_text("by a person\n")
    git(tmp_path / "other", "commit", "--quiet", "--all", "--message", "theirs")
    git(tmp_path / "other", "push", "--quiet")
    theirs = git(remote, "rev-parse", "main")
    for lock in ("3", "4"):
        write_lock(project, features=lock, report="1")
        commit_run(defaults(project), project)
        answer, is_refused = push_run(project)
        assert is_refused and "origin refused main ([rejected]" in answer and "branch vlp-runs/main" in answer
    assert git(remote, "rev-parse", "main") == theirs
    assert git(remote, "rev-parse", "vlp-runs/main") == git(project, "rev-parse", "HEAD")
    assert (project / "notes.md").read_text() == "first\n"
    # A person merges; from then on the branch itself is pushed.
    git(project, "pull", "--quiet", "--no-rebase", "--no-edit")
    assert push_run(project)[1] is False
    assert git(remote, "rev-parse", "main") == git(project, "rev-parse", "HEAD")


def test_a_side_branch_with_other_commits_is_kept(project: Path, tmp_path: Path) -> None:
    remote = add_remote(project)
    git(tmp_path, "clone", "--quiet", str(remote), "other")
    for branch in ("main", "vlp-runs/main"):
        git(tmp_path / "other", "commit", "--quiet", "--allow-empty", "--message", branch)
        git(tmp_path / "other", "push", "--quiet", "origin", f"HEAD:refs/heads/{branch}")
    commit_run(defaults(project), project)
    answer, is_refused = push_run(project)
    own = f"vlp-runs/main-{git(project, 'rev-parse', '--short', 'HEAD')}"
    assert is_refused and own in answer and git(remote, "rev-parse", own) == git(project, "rev-parse", "HEAD")


@pytest.mark.slow
def test_the_command_pushes_data_before_the_commit_and_another_clone_gets_both(project: Path, tmp_path: Path) -> None:
    remote = add_remote(project)
    store = tmp_path / "store"
    batch = project / "data" / "accepted" / "week-1"
    batch.mkdir(parents=True)
    (batch / "pairs.csv").write_text("image,caption\na.jpg,a dog\n")
    dvc = [sys.executable, "-m", "dvc"]
    for words in (["init", "-q"], ["remote", "add", "-q", "-d", "store", str(store)], ["add", "-q", str(batch)]):
        subprocess.run([*dvc, *words], cwd=project, check=True)
    git(project, "add", ".dvc", ".dvcignore")
    git(project, "commit", "--quiet", "--message", "dvc", "--only", ".dvc", ".dvcignore")
    # Nobody gets a commit without its data: a file is where the remote's folder should be, so `dvc push` fails.
    store.write_text("")
    before = git(remote, "rev-parse", "main")
    assert vlp_commit(project) == RemoteError.exit_code
    assert git(remote, "rev-parse", "main") == before
    store.unlink()
    assert vlp_commit(project) == 0
    assert "new data: week-1" in git(remote, "log", "-1", "--format=%B", "main")
    git(tmp_path, "clone", "--quiet", str(remote), "other")
    subprocess.run([*dvc, "pull", "-q", "data/accepted/week-1.dvc"], cwd=tmp_path / "other", check=True)
    assert (tmp_path / "other" / "data" / "accepted" / "week-1" / "pairs.csv").read_text().endswith("a dog\n")


def test_the_flow_commits_last_and_only_if_params_say_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_parts(defaults(project)) == []
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("  commit: false", "  commit: true"))
    params = defaults(project)
    assert retrain_parts(params)[-1].command == ("commit",)
    monkeypatch.delitem(LAST_PARTS, "commit")
    with pytest.raises(MissingToolError, match="needs vlp_models/contrib/commit"):
        retrain_parts(params)
