"""A toy DVC project with the real stage names and commands that take no time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stages `validate` ... `report` as in dvc.yaml, each writing one small file that depends on the one before."""
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(ROOT / "params.yaml", folder)
    runs = list(yaml.safe_load((ROOT / "params.yaml").read_text())["finetune"])
    names = ["validate", "tokenizer", "shards", "pretrain", "scheduled_sampling"]
    stages: dict[str, object] = {}
    for before, name in zip([None, *names], names, strict=False):
        stages[name] = stage(name, [before] if before else ["params.yaml"])
    for group, before in (("finetune", "pretrain"), ("evaluate", None)):
        cmd = f"{sys.executable} -c \"open('{group}-${{item}}','w').write('x')\""
        dep = before or "finetune-${item}"
        stages[group] = {"foreach": runs, "do": {"cmd": cmd, "deps": [dep], "outs": [f"{group}-${{item}}"]}}
    stages["register"] = stage("register", [f"evaluate-{run}" for run in runs])
    stages["report"] = stage("report", [f"evaluate-{run}" for run in runs])
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=folder, check=True)
    return folder


def stage(name: str, deps: list[str]) -> dict[str, object]:
    return {"cmd": f"{sys.executable} -c \"open('{name}','w').write('x')\"", "deps": deps, "outs": [name]}
